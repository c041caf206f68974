//! Disks: files of the host, read and written by processes of their own.
//!
//! The virtual CPU leaves requests in shared memory ([`proto::requests`]); a disk's workers carry them out with the host's vectored
//! calls, straight to and from guest memory. Workers are processes, because this program has no threads. Where the host has rings that suffice
//! ([`crate::ring`]), there is one for each disk, which has all requests carried out at a time; else there are two,
//! because the host's calls wait: a read does not wait for a flush. They have the disk's descriptor, which
//! the guest's processes have not.
//!
//! A worker believes nothing of what it finds in a request: sectors outside of the disk and parts outside of memory fail.
//!
//! After a flush has failed, all flushes of the disk fail until it is opened anew ([`Loss`]): the host's kernel reports data
//! that it could not write once, and keeps none of it. So there is one flush at a time.

use core::sync::atomic::{AtomicU32, Ordering::Relaxed, Ordering::SeqCst};

use linux_raw_sys::errno;
use linux_raw_sys::general as linux;
use proto::requests::{PARTS, Queue, REQUESTS, Request, op, status};
use proto::wedge::{Disk, Filters, MAX_DISKS, MAX_QUEUES, Start, layout};
use vmm_bus::backend::SECTOR;
use vmm_bus::requests::{Futex, Requests};

use crate::memory::Ram;
use crate::report::{self, HOST};
use crate::ring::{Entry, Ring};
use crate::shared::event;
use crate::sys::{self, Errno, Vector};
use crate::{device, processes};

/// Processes for each disk, where the host has no rings.
const WORKERS: usize = 2;
/// Most processes of disks.
pub const MAX_WORKERS: usize = MAX_DISKS * WORKERS;

/// A device's requests, as the guest's devices have them.
pub type Link = Requests<'static, Sleep>;

/// Words of shared memory that processes wait for.
pub struct Sleep;

impl Futex for Sleep {
    fn wake_one(word: &AtomicU32) {
        sys::wake_one(word);
    }

    fn wait(word: &AtomicU32, value: u32) {
        sys::wait(word, value, None);
    }

    fn guest_memory_written(address: u64, length: u32) {
        crate::frames::write_by_device(address, length.into());
    }
}

/// The queue with this number.
pub fn queue(number: usize) -> &'static Queue {
    // SAFETY: `main` has mapped the shared memory for as long as the process lives; all of it is atomic.
    let queues = unsafe { &*((layout::SHARED + layout::QUEUES) as *const [Queue; MAX_QUEUES]) };
    &queues[number]
}

/// Makes the workers of all disks. For the device process, before there are guests. Gives their ids.
pub fn make_workers(start: &Start, filters: &Filters) -> Result<[u32; MAX_WORKERS], Errno> {
    let count = (start.disks as usize).min(MAX_DISKS);
    let mut workers = [0; MAX_WORKERS];
    // Read here: when a worker first runs, the guest may have changed it.
    let disks: [Disk; MAX_DISKS] = core::array::from_fn(crate::shared::disk);
    let is_ours = |disk: &Disk| !disk.is_elsewhere;
    let has_rings = disks[..count].iter().any(is_ours) && Ring::is_possible();
    let each = if has_rings { 1 } else { WORKERS };
    let losses = Losses::new()?;
    for (index, place) in workers.iter_mut().take(count * each).enumerate() {
        let number = index / each;
        if !is_ours(&disks[number]) {
            continue;
        }
        match processes::fork()? {
            0 => work(number, disks[number], losses.of(number), has_rings, start, filters),
            worker => *place = worker,
        }
    }
    losses.unmap()?;
    Ok(workers)
}

/// Whether flushes of a disk have failed. Its workers share it; the guest's processes do not have it.
#[derive(Debug)]
struct Loss {
    /// 0: nobody flushes; 1: somebody does; 2: and another waits for that.
    flushing: AtomicU32,
    /// 1: a flush has failed.
    is_lost: AtomicU32,
}

impl Loss {
    /// Waits until no other worker flushes.
    fn enter(&self) {
        if self.flushing.compare_exchange(0, 1, SeqCst, SeqCst).is_err() {
            while self.flushing.swap(2, SeqCst) != 0 {
                sys::wait(&self.flushing, 2, None);
            }
        }
    }

    /// Lets others flush.
    fn leave(&self) {
        if self.flushing.swap(0, SeqCst) == 2 {
            sys::wake_one(&self.flushing);
        }
    }

    /// What a flush comes to, and all later ones with it.
    fn judge(&self, done: Result<(), Failure>) -> Result<(), Failure> {
        if done.is_err() {
            self.is_lost.store(1, SeqCst);
        }
        done.and_then(|()| self.check())
    }

    /// Whether a flush may succeed.
    fn check(&self) -> Result<(), Failure> {
        match self.is_lost.load(SeqCst) {
            0 => Ok(()),
            _ => Err(Failure::Host(Errno(errno::EIO as i32))),
        }
    }
}

/// Those of all disks: memory that the device process has until it has made the workers.
struct Losses(u64);

impl Losses {
    const LENGTH: u64 = 4096;

    fn new() -> Result<Self, Errno> {
        let rights = linux::PROT_READ | linux::PROT_WRITE;
        let flags = linux::MAP_SHARED | linux::MAP_ANONYMOUS;
        let arguments = [0, Self::LENGTH, rights.into(), flags.into(), u64::MAX, 0];
        // SAFETY: nothing that is mapped is in the way.
        unsafe { sys::call(linux::__NR_mmap, arguments) }.map(Self)
    }

    /// That of a disk, for its workers: in their processes it stays mapped.
    fn of(&self, number: usize) -> &'static Loss {
        const { assert!(size_of::<[Loss; MAX_DISKS]>() as u64 <= Losses::LENGTH) };
        // SAFETY: the memory is zeros at first, which both words may be, and all of it is atomic.
        let all = unsafe { &*(self.0 as *const [Loss; MAX_DISKS]) };
        &all[number]
    }

    fn unmap(self) -> Result<(), Errno> {
        // SAFETY: this process has given it to none but its children.
        unsafe { sys::unmap(self.0, Self::LENGTH) }
    }
}

/// A worker of disk `number`.
fn work(
    number: usize,
    disk: Disk,
    loss: &'static Loss,
    has_ring: bool,
    start: &Start,
    filters: &Filters,
) -> ! {
    let fd = layout::DISKS_FD + number as u32;
    let make = || if has_ring { Ring::new(fd).map(Some) } else { Ok(None) };
    let alone = sys::ignore(linux::SIGXFSZ)
        .and_then(|()| processes::become_worker(fd, make, filters, Filters::WORKER));
    let worker = Worker { fd, number, disk, loss, ram: Ram::new(start), queue: queue(number) };
    match alone {
        Ok(Some(ring)) => worker.serve_many(ring),
        Ok(None) => worker.serve(),
        Err(error) => {
            report::say(format_args!("cannot set up a process of disk {number}: {error}"));
            sys::exit(HOST)
        }
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

/// What is to be done for a request.
#[derive(Clone, Copy)]
struct Job {
    kind: Kind,
    /// Where in the file, and how many bytes are left.
    at: u64,
    left: u64,
    /// What of the vectors is left.
    first: usize,
    used: usize,
    vectors: [Vector; PARTS],
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    Read,
    Write,
    Flush,
    /// `fallocate` with this mode; if the host cannot, it may be asked to write zeros.
    Allocate(u32, bool),
}

impl Job {
    const NONE: Self = Self {
        kind: Kind::Flush,
        at: 0,
        left: 0,
        first: 0,
        used: 0,
        vectors: [Vector { address: 0, length: 0 }; PARTS],
    };

    fn vectors(&self) -> &[Vector] {
        &self.vectors[self.first..self.used]
    }

    /// As the ring has it.
    fn entry(&self) -> Entry<'_> {
        match self.kind {
            Kind::Read => Entry::Read(self.vectors(), self.at),
            Kind::Write => Entry::Write(self.vectors(), self.at),
            Kind::Flush => Entry::Flush,
            Kind::Allocate(mode, _) => Entry::Allocate(mode, self.at, self.left),
        }
    }

    /// So many bytes have been moved.
    fn advance(&mut self, done: u64) {
        self.left -= done;
        self.at += done;
        let mut passed = done;
        while let Some(first) = self.vectors[self.first..self.used].first_mut() {
            if first.length > passed {
                first.address += passed;
                first.length -= passed;
                return;
            }
            passed -= first.length;
            self.first += 1;
        }
    }
}

/// Flushes of a disk with a ring.
#[derive(Default)]
struct Flushes {
    /// The ring has one.
    is_under_way: bool,
    /// Those that wait for its end: a bit for each request.
    waiting: u64,
}

struct Worker {
    fd: u32,
    number: usize,
    disk: Disk,
    loss: &'static Loss,
    ram: Ram,
    queue: &'static Queue,
}

impl Worker {
    /// One request after the other, beside another worker.
    fn serve(&self) -> ! {
        let (mut next, mut job) = (0, Job::NONE);
        loop {
            let Some(id) = self.queue.take(&mut next) else {
                self.queue.sleep(|calls, seen| sys::wait(calls, seen, None));
                continue;
            };
            let planned = self.plan(&self.queue.requests[id], &mut job);
            let done = planned.and_then(|()| match job.kind {
                Kind::Flush => {
                    self.loss.enter();
                    let done = self.loss.check().and_then(|()| self.carry_out(&mut job));
                    let done = self.loss.judge(done);
                    self.loss.leave();
                    done
                }
                _ => self.carry_out(&mut job),
            });
            self.finish(id, done);
        }
    }

    /// Asks the host until a job is done.
    fn carry_out(&self, job: &mut Job) -> Result<(), Failure> {
        loop {
            let result = self.call(job, 0);
            if let Some(done) = self.went(job, result) {
                return done;
            }
        }
    }

    /// All requests at a time, alone. What the host has at hand is done at once, everything else by the ring.
    fn serve_many(&self, mut ring: Ring) -> ! {
        /// Of the wait for requests; the others are those of requests.
        const WAIT: u64 = REQUESTS as u64;
        let queue = self.queue;
        let (mut next, mut jobs) = (0, [Job::NONE; REQUESTS]);
        // Requests that the ring has: a bit for each. The guest may say that there is one of these once more.
        let mut busy = 0_u64;
        let mut flushes = Flushes::default();
        let mut waits = false;
        loop {
            while let Some(id) = queue.take(&mut next) {
                if busy >> id & 1 != 0 {
                    continue;
                }
                let job = &mut jobs[id];
                let done = match self.plan(&queue.requests[id], job) {
                    Ok(()) => self.try_at_once(job, busy != 0),
                    Err(failure) => Some(Err(failure)),
                };
                match done {
                    Some(done) => self.finish(id, done),
                    None if job.kind == Kind::Flush => {
                        flushes.waiting |= 1 << id;
                        busy |= 1 << id;
                    }
                    None => {
                        ring.push(job.entry(), id as u64);
                        busy |= 1 << id;
                    }
                }
            }
            busy &= !self.begin_flush(&mut flushes, &mut ring);
            if busy == 0 && !waits {
                queue.sleep(|calls, seen| sys::wait(calls, seen, None));
                continue;
            }
            if !waits {
                // As `Queue::sleep` does.
                let seen = queue.calls.load(SeqCst);
                queue.sleepers.fetch_add(1, SeqCst);
                waits = true;
                ring.push(Entry::Wait(&queue.calls, seen), WAIT);
            }
            let least = if queue.waiting.load(SeqCst) == 0 { 1 } else { 0 };
            match ring.wait(least) {
                Err(error) if error.0 != errno::EINTR as i32 => {
                    let disk = self.number;
                    report::say(format_args!("disk {disk}: cannot wait for io_uring: {error}"));
                    sys::exit(HOST)
                }
                _ => {}
            }
            while let Some((id, result)) = ring.completed() {
                let Some(job) = jobs.get_mut(id as usize) else {
                    waits = false;
                    queue.sleepers.fetch_sub(1, SeqCst);
                    continue;
                };
                match self.went(job, result) {
                    Some(mut done) => {
                        if job.kind == Kind::Flush {
                            flushes.is_under_way = false;
                            done = self.loss.judge(done);
                        }
                        busy &= !(1 << id);
                        self.finish(id as usize, done);
                    }
                    None => ring.push(job.entry(), id),
                }
            }
        }
    }

    /// Gives the ring the next flush, if it has none. After one has failed, ends all others; these are the bits of the result.
    fn begin_flush(&self, flushes: &mut Flushes, ring: &mut Ring) -> u64 {
        let mut ended = 0;
        while flushes.waiting != 0 && !flushes.is_under_way {
            let id = flushes.waiting.trailing_zeros();
            flushes.waiting &= flushes.waiting - 1;
            match self.loss.check() {
                Ok(()) => {
                    ring.push(Entry::Flush, id.into());
                    flushes.is_under_way = true;
                }
                failed => {
                    ended |= 1 << id;
                    self.finish(id as usize, failed);
                }
            }
        }
        ended
    }

    /// Does what does not wait: reads of what the host has in memory; what it has not said of itself, and writes, if nothing else is to be done meanwhile.
    /// `None`: it is for the ring.
    fn try_at_once(&self, job: &mut Job, is_busy: bool) -> Option<Result<(), Failure>> {
        const AGAIN: i32 = errno::EAGAIN as i32;
        const UNKNOWN: i32 = errno::EOPNOTSUPP as i32;
        let is_alone = !is_busy && self.queue.waiting.load(SeqCst) == 0;
        let result = match job.kind {
            Kind::Read => match self.call(job, linux::RWF_NOWAIT) {
                Err(Errno(AGAIN)) => return None,
                Err(Errno(UNKNOWN)) if is_alone => self.call(job, 0),
                Err(Errno(UNKNOWN)) => return None,
                result => result,
            },
            Kind::Write if is_alone => self.call(job, 0),
            _ => return None,
        };
        self.went(job, result)
    }

    /// A request has ended.
    fn finish(&self, id: usize, done: Result<(), Failure>) {
        let status = match done {
            Ok(()) => status::DONE,
            Err(Failure::Nonsense) => status::FAILED,
            Err(Failure::Host(Errno(number))) if number == errno::EOPNOTSUPP as i32 => {
                status::UNSUPPORTED
            }
            Err(Failure::Host(error)) => {
                self.tell(error);
                status::FAILED
            }
        };
        if self.queue.end(id, status) {
            sys::wake(&self.queue.answers);
        }
        device::tell(0, event::DISK);
    }

    /// Makes a job of a request, each value of which is read once.
    fn plan(&self, request: &Request, job: &mut Job) -> Result<(), Failure> {
        let sector = request.sector.load(Relaxed);
        let count = request.count.load(Relaxed);
        let op = request.op.load(Relaxed);
        let writes = !matches!(op, op::READ | op::FLUSH);
        if writes && self.disk.read_only {
            return Err(Failure::Nonsense);
        }
        let allocate = |mode, or_zeros| Kind::Allocate(mode | linux::FALLOC_FL_KEEP_SIZE, or_zeros);
        (job.first, job.used) = (0, 0);
        job.kind = match op {
            op::READ => Kind::Read,
            op::WRITE => Kind::Write,
            op::FLUSH => Kind::Flush,
            op::DISCARD => allocate(linux::FALLOC_FL_PUNCH_HOLE, false),
            op::UNMAP => allocate(linux::FALLOC_FL_PUNCH_HOLE, true),
            op::ZERO => allocate(linux::FALLOC_FL_ZERO_RANGE, true),
            _ => return Err(Failure::Nonsense),
        };
        job.left = match job.kind {
            Kind::Flush => return Ok(()),
            Kind::Allocate(..) => u64::from(count) * u64::from(SECTOR),
            Kind::Read | Kind::Write => self.take_parts(request, job)?,
        };
        job.at = self.place(sector, job.left)?;
        Ok(())
    }

    /// Where data is in this process; gives its length.
    fn take_parts(&self, request: &Request, job: &mut Job) -> Result<u64, Failure> {
        let used = request.used.load(Relaxed) as usize;
        let parts = request.parts.get(..used).ok_or(Failure::Nonsense)?;
        let mut length = 0;
        for (vector, part) in job.vectors.iter_mut().zip(parts) {
            let address = part.address.load(Relaxed);
            let bytes = u64::from(part.length.load(Relaxed));
            self.ram.offset(address).filter(|&(_, most)| most >= bytes).ok_or(Failure::Nonsense)?;
            *vector = Vector { address: layout::DIRECT + address, length: bytes };
            length += bytes;
        }
        if length == 0 || !length.is_multiple_of(SECTOR.into()) {
            return Err(Failure::Nonsense);
        }
        job.used = used;
        Ok(length)
    }

    /// Asks the host for what is left of a job.
    fn call(&self, job: &Job, flags: u32) -> Result<u64, Errno> {
        let fd = self.fd.into();
        let vectors = (job.vectors().as_ptr() as u64, job.vectors().len() as u64);
        let (call, arguments) = match job.kind {
            Kind::Read => {
                (linux::__NR_preadv2, [fd, vectors.0, vectors.1, job.at, 0, flags.into()])
            }
            Kind::Write => (linux::__NR_pwritev, [fd, vectors.0, vectors.1, job.at, 0, 0]),
            Kind::Flush => (linux::__NR_fdatasync, [fd, 0, 0, 0, 0, 0]),
            Kind::Allocate(mode, _) => {
                (linux::__NR_fallocate, [fd, mode.into(), job.at, job.left, 0, 0])
            }
        };
        // SAFETY: the vectors are guest memory, which is mapped and where no Rust object is.
        unsafe { sys::call(call, arguments) }
    }

    /// What the host has answered; `None`: there is more to do.
    fn went(&self, job: &mut Job, result: Result<u64, Errno>) -> Option<Result<(), Failure>> {
        match (job.kind, result) {
            (_, Err(Errno(number))) if number == errno::EINTR as i32 => None,
            (Kind::Read | Kind::Write, Ok(0)) => Some(Err(Errno(errno::EIO as i32).into())),
            (Kind::Read | Kind::Write, Ok(done)) => {
                job.advance(done.min(job.left));
                (job.left == 0).then_some(Ok(()))
            }
            (Kind::Allocate(_, true), Err(_)) => Some(self.zero(job.at, job.left)),
            (_, Ok(_)) => Some(Ok(())),
            (_, Err(error)) => Some(Err(error.into())),
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

    /// Writes zeros.
    fn zero(&self, mut at: u64, mut left: u64) -> Result<(), Failure> {
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
    fn tell(&self, error: Errno) {
        if self.queue.told.swap(1, SeqCst) == 0 {
            let number = self.number;
            report::say(format_args!("disk {number}: the host refuses a request: {error}"));
        }
    }
}
