//! Disks: files of the host, read and written by processes of their own.
//!
//! The virtual CPU leaves requests in shared memory ([`proto::requests`]); a disk's workers carry them out with the host's vectored
//! calls, straight to and from guest memory. Workers are processes, because this program has no threads, and several for each disk,
//! because the host's calls wait: the console is served meanwhile, and a read does not wait for a flush. They have the disk's descriptor, which
//! the guest's processes have not.
//!
//! A worker believes nothing of what it finds in a request: sectors outside of the disk and parts outside of memory fail.

use core::sync::atomic::{Ordering::Relaxed, Ordering::SeqCst};

use linux_raw_sys::errno;
use linux_raw_sys::general as linux;
use proto::requests::{Client, PARTS, Part, Queue, Request, op, status};
use proto::wedge::{Disk, Filters, MAX_DISKS, MAX_QUEUES, Start, layout};
use vmm_bus::outside::{Block, BlockOp, BlockStatus, Data, SECTOR};

use crate::memory::Ram;
use crate::report::{self, HOST};
use crate::shared::event;
use crate::sys::{self, Errno, Vector};
use crate::{device, processes};

/// Processes for each disk.
const WORKERS: usize = 2;
/// Most processes of disks.
pub const MAX_WORKERS: usize = MAX_DISKS * WORKERS;

/// A disk as the guest's device has it.
pub struct Link {
    client: Client<'static>,
}

impl Link {
    /// The disk with this number.
    pub fn new(number: usize) -> Self {
        Self { client: Client::new(queue(number)) }
    }
}

impl Block for Link {
    fn start(&mut self, id: u16, op: BlockOp, data: &mut Data<'_>) -> bool {
        let Some(request) = self.client.request(id) else { return false };
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
        let used = fill(&request.parts, data);
        request.used.store(used as u32, Relaxed);
        give(&mut self.client, id);
        true
    }

    fn completed(&mut self) -> Option<(u16, BlockStatus)> {
        let (id, request) = self.client.completed()?;
        let status = match request.status.load(Relaxed) {
            status::DONE => BlockStatus::Done,
            status::UNSUPPORTED => BlockStatus::Unsupported,
            _ => BlockStatus::Failed,
        };
        Some((id, status))
    }

    fn finish(&mut self, id: u16, _: &mut Data<'_>) {
        // What was read is there already.
        self.client.finish(id);
    }

    fn forget(&mut self) {
        self.client.forget(|answers, seen| sys::wait(answers, seen, None));
    }
}

/// The queue with this number.
pub fn queue(number: usize) -> &'static Queue {
    // SAFETY: `main` has mapped the shared memory for as long as the process lives; all of it is atomic.
    let queues = unsafe { &*((layout::SHARED + layout::QUEUES) as *const [Queue; MAX_QUEUES]) };
    &queues[number]
}

/// Puts parts of guest memory into a request; gives their number.
pub fn fill(parts: &[Part], data: &mut Data<'_>) -> usize {
    // Of more than there is room for, the worker finds that bytes are missing.
    let given = parts.iter().map_while(|place| {
        let part = data.part(u32::MAX)?;
        place.address.store(part.address, Relaxed);
        place.length.store(part.length, Relaxed);
        Some(())
    });
    given.count()
}

/// Gives a request to the workers.
pub fn give(client: &mut Client<'_>, id: u16) {
    if client.give(id) {
        sys::wake_one(&client.queue.calls);
    }
}

/// Makes the workers of all disks. For the device process, before there are guests. Gives their ids.
pub fn make_workers(start: &Start, filters: &Filters) -> Result<[u32; MAX_WORKERS], Errno> {
    let count = (start.disks as usize).min(MAX_DISKS);
    let mut workers = [0; MAX_WORKERS];
    for (index, place) in workers.iter_mut().take(count * WORKERS).enumerate() {
        if crate::shared::disk(index / WORKERS).is_elsewhere {
            continue;
        }
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
    let queue = queue(number);
    let mut next = 0;
    loop {
        let Some(id) = queue.take(&mut next) else {
            queue.sleep(|calls, seen| sys::wait(calls, seen, None));
            continue;
        };
        let request = &queue.requests[id];
        let status = match worker.carry_out(request) {
            Ok(()) => status::DONE,
            Err(Failure::Nonsense) => status::FAILED,
            Err(Failure::Host(Errno(number))) if number == errno::EOPNOTSUPP as i32 => {
                status::UNSUPPORTED
            }
            Err(Failure::Host(error)) => {
                worker.tell(queue, error);
                status::FAILED
            }
        };
        if queue.end(id, status) {
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
