//! Disks: files of the host, read and written by processes of their own.
//!
//! The virtual CPU leaves requests in shared memory, as parts of guest memory; a disk's workers carry them out with the host's vectored
//! calls, straight to and from guest memory. Workers are processes, because this program has no threads, and several for each disk,
//! because the host's calls wait: the console is served meanwhile, and a read does not wait for a flush. They have the disk's descriptor, which
//! the guest's processes have not.
//!
//! A request is one of a set. Invariants: a request's slot belongs to the virtual CPU until its bit is in [`Queue::waiting`], to the
//! worker that takes the bit out until it is in [`Queue::done`], then to the virtual CPU again. A worker believes nothing of what it finds there:
//! sectors outside of the disk and parts outside of memory fail. The virtual CPU takes a disk's requests back only when no worker has any,
//! so no memory is written late.

use core::sync::atomic::{AtomicU8, AtomicU32, AtomicU64, Ordering::Relaxed, Ordering::SeqCst};

use linux_raw_sys::errno;
use linux_raw_sys::general as linux;
use proto::wedge::{Disk, Filters, MAX_DISKS, Start, layout};
use vmm_bus::outside::{Block, BlockOp, BlockStatus, Data, SECTOR};

use crate::memory::Ram;
use crate::report::{self, HOST};
use crate::shared::{event, shared};
use crate::sys::{self, Errno, Vector};
use crate::{device, processes};

/// Requests of a disk at a time; each is a bit of a word.
const REQUESTS: usize = 64;
/// Most parts of a request, more than the device model makes of one.
const PARTS: usize = 128;
/// Processes for each disk.
const WORKERS: usize = 2;
/// Most processes of disks.
pub const MAX_WORKERS: usize = MAX_DISKS * WORKERS;

/// Operations, as [`Request::op`] has them.
mod op {
    pub const READ: u32 = 0;
    pub const WRITE: u32 = 1;
    pub const FLUSH: u32 = 2;
    pub const DISCARD: u32 = 3;
    /// Zeros that take room.
    pub const ZERO: u32 = 4;
    /// Zeros that need not.
    pub const UNMAP: u32 = 5;
}

/// A part of guest memory.
#[repr(C)]
struct Part {
    address: AtomicU64,
    length: AtomicU32,
}

/// A request.
#[repr(C)]
struct Request {
    op: AtomicU32,
    /// Parts that are used.
    used: AtomicU32,
    sector: AtomicU64,
    /// Sectors, where there are no parts.
    count: AtomicU32,
    /// How it ended: a [`BlockStatus`].
    status: AtomicU8,
    parts: [Part; PARTS],
}

/// The requests of one disk.
#[repr(C)]
pub struct Queue {
    /// Requests that no worker has taken.
    waiting: AtomicU64,
    /// Requests that are done.
    done: AtomicU64,
    /// Counts up with each request.
    calls: AtomicU32,
    /// Workers that wait for [`Queue::calls`].
    sleepers: AtomicU32,
    /// Counts up with each request that is done.
    answers: AtomicU32,
    /// The virtual CPU waits for [`Queue::answers`].
    is_awaited: AtomicU32,
    /// A failure of the host has been told.
    told: AtomicU32,
    requests: [Request; REQUESTS],
}

/// The disks of a machine.
pub type Queues = [Queue; MAX_DISKS];

/// A disk as the guest's device has it.
pub struct Link {
    number: usize,
    /// Requests that are not finished.
    outside: u64,
    /// Those of them that are done and have not been reported.
    done: u64,
}

impl Link {
    /// The disk with this number.
    pub fn new(number: usize) -> Self {
        Self { number, outside: 0, done: 0 }
    }

    fn queue(&self) -> &'static Queue {
        &shared().disks[self.number]
    }
}

impl Block for Link {
    fn start(&mut self, id: u16, op: BlockOp, data: &mut Data<'_>) -> bool {
        let queue = self.queue();
        let Some(request) = queue.requests.get(usize::from(id)) else { return false };
        let (op, sector, count) = match op {
            BlockOp::Read { sector } => (op::READ, sector, 0),
            BlockOp::Write { sector } => (op::WRITE, sector, 0),
            BlockOp::Flush => (op::FLUSH, 0, 0),
            BlockOp::Discard { sector, count } => (op::DISCARD, sector, count),
            BlockOp::WriteZeroes { sector, count, unmap: false } => (op::ZERO, sector, count),
            BlockOp::WriteZeroes { sector, count, unmap: true } => (op::UNMAP, sector, count),
        };
        request.op.store(op, Relaxed);
        request.sector.store(sector, Relaxed);
        request.count.store(count, Relaxed);
        let mut used = 0;
        while let Some(part) = data.part(u32::MAX) {
            // More than there is room for: the worker finds that bytes are missing.
            let Some(place) = request.parts.get(used) else { break };
            place.address.store(part.address, Relaxed);
            place.length.store(part.length, Relaxed);
            used += 1;
        }
        request.used.store(used as u32, Relaxed);
        let bit = 1 << id;
        self.outside |= bit;
        queue.waiting.fetch_or(bit, SeqCst);
        queue.calls.fetch_add(1, SeqCst);
        if queue.sleepers.load(SeqCst) != 0 {
            sys::wake_one(&queue.calls);
        }
        true
    }

    fn completed(&mut self) -> Option<(u16, BlockStatus)> {
        let queue = self.queue();
        self.done |= queue.done.swap(0, SeqCst) & self.outside;
        if self.done == 0 {
            return None;
        }
        let id = self.done.trailing_zeros();
        self.done &= self.done - 1;
        let status = match queue.requests[id as usize].status.load(Relaxed) {
            DONE => BlockStatus::Done,
            UNSUPPORTED => BlockStatus::Unsupported,
            _ => BlockStatus::Failed,
        };
        Some((id as u16, status))
    }

    fn finish(&mut self, id: u16, _: &mut Data<'_>) {
        // What was read is there already.
        self.outside &= !(1 << (id % REQUESTS as u16));
    }

    fn forget(&mut self) {
        let queue = self.queue();
        // What no worker has begun need not begin.
        let unbegun = queue.waiting.swap(0, SeqCst);
        self.outside &= !(unbegun | self.done);
        self.done = 0;
        queue.is_awaited.store(1, SeqCst);
        loop {
            let answers = queue.answers.load(SeqCst);
            self.outside &= !queue.done.swap(0, SeqCst);
            if self.outside == 0 {
                break;
            }
            sys::wait(&queue.answers, answers, None);
        }
        queue.is_awaited.store(0, SeqCst);
    }
}

const DONE: u8 = 0;
const FAILED: u8 = 1;
const UNSUPPORTED: u8 = 2;

/// Makes the workers of all disks. For the device process, before there are guests. Gives their ids.
pub fn make_workers(start: &Start, filters: &Filters) -> Result<[u32; MAX_WORKERS], Errno> {
    let count = (start.disks as usize).min(MAX_DISKS);
    let mut workers = [0; MAX_WORKERS];
    for (index, place) in workers.iter_mut().take(count * WORKERS).enumerate() {
        match processes::fork()? {
            0 => work(index / WORKERS, start, filters),
            worker => *place = worker,
        }
    }
    Ok(workers)
}

/// A worker of disk `number`.
fn work(number: usize, start: &Start, filters: &Filters) -> ! {
    let fd = layout::DISKS_FD + number as u32;
    let alone = sys::ignore(linux::SIGXFSZ)
        .and_then(|()| processes::become_worker(fd, filters, Filters::WORKER));
    if let Err(error) = alone {
        report::say(format_args!("a process for disk {number} cannot be set up: {error:?}"));
        sys::exit(HOST);
    }
    let worker = Worker { fd, number, disk: crate::shared::disk(number), ram: Ram::new(start) };
    let queue = &shared().disks[number];
    let mut next = 0;
    loop {
        let seen = queue.calls.load(SeqCst);
        let waiting = queue.waiting.load(SeqCst);
        if waiting == 0 {
            queue.sleepers.fetch_add(1, SeqCst);
            if queue.waiting.load(SeqCst) == 0 {
                sys::wait(&queue.calls, seen, None);
            }
            queue.sleepers.fetch_sub(1, SeqCst);
            continue;
        }
        // The next one in a circle, so that none waits for ever.
        let id = (waiting.rotate_right(next).trailing_zeros() + next) % REQUESTS as u32;
        let bit = 1 << id;
        if queue.waiting.fetch_and(!bit, SeqCst) & bit == 0 {
            continue;
        }
        next = (id + 1) % REQUESTS as u32;
        let request = &queue.requests[id as usize];
        let status = match worker.carry_out(request) {
            Ok(()) => DONE,
            Err(Failure::Nonsense) => FAILED,
            Err(Failure::Host(Errno(number))) if number == errno::EOPNOTSUPP as i32 => UNSUPPORTED,
            Err(Failure::Host(error)) => {
                worker.tell(queue, error);
                FAILED
            }
        };
        request.status.store(status, Relaxed);
        queue.done.fetch_or(bit, SeqCst);
        queue.answers.fetch_add(1, SeqCst);
        if queue.is_awaited.load(SeqCst) != 0 {
            sys::wake(&queue.answers);
        }
        device::tell_by_bell(0, event::DISK);
    }
}

/// Why a request fails.
enum Failure {
    /// It is none: outside of the disk or of memory.
    Nonsense,
    /// The host says no.
    Host(Errno),
}

impl From<Errno> for Failure {
    fn from(error: Errno) -> Self {
        Self::Host(error)
    }
}

/// Zeros for hosts that make none themselves.
static ZEROS: [u8; 1 << 16] = [0; 1 << 16];

struct Worker {
    fd: u32,
    number: usize,
    disk: Disk,
    ram: Ram,
}

impl Worker {
    fn carry_out(&self, request: &Request) -> Result<(), Failure> {
        let sector = request.sector.load(Relaxed);
        let count = request.count.load(Relaxed);
        let op = request.op.load(Relaxed);
        let writes = !matches!(op, op::READ | op::FLUSH);
        if writes && self.disk.read_only {
            return Err(Failure::Nonsense);
        }
        match op {
            op::READ => self.transfer(linux::__NR_preadv, sector, request),
            op::WRITE => self.transfer(linux::__NR_pwritev, sector, request),
            // SAFETY: no memory is touched.
            op::FLUSH => unsafe {
                sys::call(linux::__NR_fdatasync, [self.fd.into(), 0, 0, 0, 0, 0])?;
                Ok(())
            },
            op::DISCARD => self.allocate(linux::FALLOC_FL_PUNCH_HOLE, sector, count),
            op::UNMAP => self
                .allocate(linux::FALLOC_FL_PUNCH_HOLE, sector, count)
                .or_else(|_| self.zero(sector, count)),
            op::ZERO => self
                .allocate(linux::FALLOC_FL_ZERO_RANGE, sector, count)
                .or_else(|_| self.zero(sector, count)),
            _ => Err(Failure::Nonsense),
        }
    }

    /// Where sectors begin in the file.
    fn place(&self, sector: u64, bytes: u64) -> Result<u64, Failure> {
        let count = bytes.div_ceil(SECTOR.into());
        match sector.checked_add(count) {
            Some(end) if end <= self.disk.sectors => Ok(sector * u64::from(SECTOR)),
            _ => Err(Failure::Nonsense),
        }
    }

    /// Reads or writes, until all is done.
    fn transfer(&self, call: u32, sector: u64, request: &Request) -> Result<(), Failure> {
        let mut vectors = [Vector { address: 0, length: 0 }; PARTS];
        let used = request.used.load(Relaxed) as usize;
        let parts = request.parts.get(..used).ok_or(Failure::Nonsense)?;
        let mut left = 0;
        for (vector, part) in vectors.iter_mut().zip(parts) {
            let address = part.address.load(Relaxed);
            let length = u64::from(part.length.load(Relaxed));
            self.ram
                .offset(address)
                .filter(|&(_, most)| most >= length)
                .ok_or(Failure::Nonsense)?;
            *vector = Vector { address: layout::DIRECT + address, length };
            left += length;
        }
        if left == 0 || !left.is_multiple_of(SECTOR.into()) {
            return Err(Failure::Nonsense);
        }
        let mut at = self.place(sector, left)?;
        let mut vectors = &mut vectors[..used];
        loop {
            let arguments =
                [self.fd.into(), vectors.as_ptr() as u64, vectors.len() as u64, at, 0, 0];
            // SAFETY: the vectors are guest memory, which is mapped and where no Rust object is.
            let done = match unsafe { sys::call(call, arguments) } {
                Ok(0) => return Err(Failure::Host(Errno(errno::EIO as i32))),
                Ok(done) => done.min(left),
                Err(Errno(number)) if number == errno::EINTR as i32 => continue,
                Err(error) => return Err(error.into()),
            };
            left -= done;
            at += done;
            if left == 0 {
                return Ok(());
            }
            let mut passed = done;
            while let Some(first) = vectors.first_mut().filter(|first| first.length <= passed) {
                passed -= first.length;
                vectors = &mut vectors[1..];
            }
            if let Some(first) = vectors.first_mut() {
                first.address += passed;
                first.length -= passed;
            }
        }
    }

    /// Changes the room that sectors take; afterwards they read as zeros.
    fn allocate(&self, mode: u32, sector: u64, count: u32) -> Result<(), Failure> {
        let length = u64::from(count) * u64::from(SECTOR);
        let at = self.place(sector, length)?;
        let mode = u64::from(mode | linux::FALLOC_FL_KEEP_SIZE);
        // SAFETY: no memory is touched.
        unsafe { sys::call(linux::__NR_fallocate, [self.fd.into(), mode, at, length, 0, 0]) }?;
        Ok(())
    }

    /// Writes zeros.
    fn zero(&self, sector: u64, count: u32) -> Result<(), Failure> {
        let mut left = u64::from(count) * u64::from(SECTOR);
        let mut at = self.place(sector, left)?;
        while left != 0 {
            let length = left.min(ZEROS.len() as u64);
            let arguments = [self.fd.into(), ZEROS.as_ptr() as u64, length, at, 0, 0];
            // SAFETY: the zeros are read.
            match unsafe { sys::call(linux::__NR_pwrite64, arguments) } {
                Ok(0) => return Err(Failure::Host(Errno(errno::EIO as i32))),
                Ok(done) => (left, at) = (left - done.min(left), at + done),
                Err(Errno(number)) if number == errno::EINTR as i32 => {}
                Err(error) => return Err(error.into()),
            }
        }
        Ok(())
    }

    /// Says once for each disk that the host has failed; the guest gets an error each time.
    fn tell(&self, queue: &Queue, error: Errno) {
        if queue.told.swap(1, SeqCst) == 0 {
            let number = self.number;
            report::say(format_args!(
                "disk {number}: the host refuses a request with error {}",
                error.0
            ));
        }
    }
}
