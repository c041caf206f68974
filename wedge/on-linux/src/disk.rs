//! Disks: worker processes that read and write host files.
//!
//! The vCPU writes requests to shared memory ([`proto::requests`]); a disk's workers execute them
//! with vectored system calls directly on guest memory. Workers are processes, because the wedge
//! has no threads. Where the host's io_uring suffices ([`crate::io_uring`]), each disk has one
//! worker with all requests in flight; else it has two, because system calls block: a read does not
//! wait for a flush. Only workers have the descriptor of the disk.
//!
//! A worker trusts no value of a request: sectors outside of the disk and ranges outside of memory
//! fail.
//!
//! After a failed flush all flushes of the disk fail until it is opened again ([`FlushErrors`]):
//! the host kernel reports a write-back error once and drops the data. Hence there is one flush at
//! a time.

use core::sync::atomic::{AtomicU32, Ordering::Relaxed, Ordering::SeqCst};

use linux_raw_sys::errno;
use linux_raw_sys::general as linux;
use proto::hosted::{DiskRecord, Filters, MAX_DISKS, MAX_QUEUES, Start, layout};
use proto::requests::{PARTS, Queue, REQUESTS, Request, op, status};
use vmm_bus::backend::SECTOR;
use vmm_bus::requests::{Futex, Requests};

use crate::io_uring::{IoUring, Submission};
use crate::linux::sys::{self, Errno, Vector};
use crate::mmu::ram::Ram;
use crate::report::{self, HOST};
use crate::state::shared::event;
use crate::{children as processes, kick as device};

/// Workers of each disk without io_uring.
const WORKERS: usize = 2;
/// Largest number of disk workers.
pub const MAX_WORKERS: usize = MAX_DISKS * WORKERS;

/// Device side of a request queue.
pub type RequestEndpoint = Requests<'static, Sleep>;

/// Futex words in shared memory.
pub struct Sleep;

impl Futex for Sleep {
    fn wake_one(word: &AtomicU32) {
        sys::wake_one(word);
    }

    fn wait(word: &AtomicU32, value: u32) {
        sys::wait(word, value, None);
    }

    fn guest_memory_written(address: u64, length: u32) {
        crate::mmu::frames::write_by_device(address, length.into());
    }
}

/// Returns a request queue.
pub fn queue(index: usize) -> &'static Queue {
    // SAFETY: `main` has mapped the shared memory for the life of the process; all fields are
    // atomic.
    let queues = unsafe { &*((layout::SHARED + layout::QUEUES) as *const [Queue; MAX_QUEUES]) };
    &queues[index]
}

/// Creates the workers of all disks; returns their ids. For the device process, before the guest
/// runs.
pub fn make_workers(start: &Start, filters: &Filters) -> Result<[u32; MAX_WORKERS], Errno> {
    let count = (start.disks as usize).min(MAX_DISKS);
    let mut workers = [0; MAX_WORKERS];
    // Read now: the guest may change it before a worker runs.
    let disks: [DiskRecord; MAX_DISKS] = core::array::from_fn(crate::state::config::disk);
    let is_ours = |disk: &DiskRecord| !disk.is_external;
    let has_rings = disks[..count].iter().any(is_ours) && IoUring::is_possible();
    let each = if has_rings { 1 } else { WORKERS };
    let flush_errors = AllFlushErrors::new()?;
    for (index, place) in workers.iter_mut().take(count * each).enumerate() {
        let disk_index = index / each;
        if !is_ours(&disks[disk_index]) {
            continue;
        }
        match processes::fork()? {
            0 => work(
                disk_index,
                disks[disk_index],
                flush_errors.of(disk_index),
                has_rings,
                start,
                filters,
            ),
            worker => *place = worker,
        }
    }
    flush_errors.unmap()?;
    Ok(workers)
}

/// Flush errors of a disk, shared by its workers; guest processes cannot access it.
#[derive(Debug)]
struct FlushErrors {
    /// 0: no flush; 1: one worker flushes; 2: another worker waits for it.
    flushing: AtomicU32,
    /// 1: a flush has failed.
    has_failed: AtomicU32,
}

impl FlushErrors {
    /// Waits until no other worker flushes.
    fn enter(&self) {
        if self.flushing.compare_exchange(0, 1, SeqCst, SeqCst).is_err() {
            while self.flushing.swap(2, SeqCst) != 0 {
                sys::wait(&self.flushing, 2, None);
            }
        }
    }

    /// Permits the next flush.
    fn leave(&self) {
        if self.flushing.swap(0, SeqCst) == 2 {
            sys::wake_one(&self.flushing);
        }
    }

    /// Records a flush's result; returns it, or the error of an earlier flush.
    fn flush_result(&self, done: Result<(), Failure>) -> Result<(), Failure> {
        if done.is_err() {
            self.has_failed.store(1, SeqCst);
        }
        done.and_then(|()| self.check())
    }

    /// Fails after an earlier flush has failed.
    fn check(&self) -> Result<(), Failure> {
        match self.has_failed.load(SeqCst) {
            0 => Ok(()),
            _ => Err(Failure::Host(Errno(errno::EIO as i32))),
        }
    }
}

/// Flush errors of all disks, mapped in the device process until it has created the workers.
struct AllFlushErrors(u64);

impl AllFlushErrors {
    const LENGTH: u64 = 4096;

    fn new() -> Result<Self, Errno> {
        let rights = linux::PROT_READ | linux::PROT_WRITE;
        let flags = linux::MAP_SHARED | linux::MAP_ANONYMOUS;
        let arguments = [0, Self::LENGTH, rights.into(), flags.into(), u64::MAX, 0];
        // SAFETY: the kernel chooses a free address.
        unsafe { sys::call(linux::__NR_mmap, arguments) }.map(Self)
    }

    /// Returns the flush errors of a disk. They stay mapped in its workers.
    fn of(&self, disk_index: usize) -> &'static FlushErrors {
        const { assert!(size_of::<[FlushErrors; MAX_DISKS]>() as u64 <= AllFlushErrors::LENGTH) };
        // SAFETY: the memory is initially zero, which is valid for both words, and all fields are
        // atomic.
        let all = unsafe { &*(self.0 as *const [FlushErrors; MAX_DISKS]) };
        &all[disk_index]
    }

    fn unmap(self) -> Result<(), Errno> {
        // SAFETY: only children of this process refer to the memory.
        unsafe { sys::unmap(self.0, Self::LENGTH) }
    }
}

/// Runs a worker of the disk with index `disk_index`.
fn work(
    disk_index: usize,
    disk: DiskRecord,
    errors: &'static FlushErrors,
    has_ring: bool,
    start: &Start,
    filters: &Filters,
) -> ! {
    let fd = layout::DISKS_FD + disk_index as u32;
    let make = || if has_ring { IoUring::new(fd).map(Some) } else { Ok(None) };
    let alone = sys::ignore(linux::SIGXFSZ)
        .and_then(|()| processes::become_worker(fd, make, filters, Filters::WORKER));
    let worker =
        Worker { fd, disk_index, disk, errors, ram: Ram::new(start), queue: queue(disk_index) };
    match alone {
        Ok(Some(ring)) => worker.serve_io_uring(ring),
        Ok(None) => worker.serve_sync(),
        Err(error) => {
            report::warn(format_args!("cannot set up a worker of disk {disk_index}: {error}"));
            sys::exit(HOST)
        }
    }
}

/// Reason for a failed request.
enum Failure {
    /// Malformed, or outside of the disk or of memory.
    Invalid,
    /// Error of the host.
    Host(Errno),
}

impl From<Errno> for Failure {
    fn from(error: Errno) -> Self {
        Self::Host(error)
    }
}

/// Zeros, for hosts that cannot write zeros by fallocate(2).
static ZEROS: [u8; 1 << 16] = [0; 1 << 16];

/// Request in execution.
#[derive(Clone, Copy)]
struct Job {
    kind: Kind,
    /// File offset and length of the remaining part.
    at: u64,
    left: u64,
    /// Remaining vectors.
    first: usize,
    used: usize,
    vectors: [Vector; PARTS],
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    Read,
    Write,
    Flush,
    /// fallocate(2) with this mode; the flag permits writing zeros instead.
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

    /// Returns the io_uring submission.
    fn entry(&self) -> Submission<'_> {
        match self.kind {
            Kind::Read => Submission::Read(self.vectors(), self.at),
            Kind::Write => Submission::Write(self.vectors(), self.at),
            Kind::Flush => Submission::Flush,
            Kind::Allocate(mode, _) => Submission::Allocate(mode, self.at, self.left),
        }
    }

    /// Advances by `done` transferred bytes.
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

/// Flushes of a disk with io_uring.
#[derive(Default)]
struct Flushes {
    /// A flush is in the ring.
    is_under_way: bool,
    /// Flushes that wait for it, one bit per request.
    waiting: u64,
}

struct Worker {
    fd: u32,
    disk_index: usize,
    disk: DiskRecord,
    errors: &'static FlushErrors,
    ram: Ram,
    queue: &'static Queue,
}

impl Worker {
    /// Executes one request at a time, in parallel with the second worker.
    fn serve_sync(&self) -> ! {
        let (mut next, mut job) = (0, Job::NONE);
        loop {
            let Some(id) = self.queue.take(&mut next) else {
                self.queue.sleep(|calls, seen| sys::wait(calls, seen, None));
                continue;
            };
            let planned = self.plan(&self.queue.requests[id], &mut job);
            let done = planned.and_then(|()| match job.kind {
                Kind::Flush => {
                    self.errors.enter();
                    let done = self.errors.check().and_then(|()| self.run_sync(&mut job));
                    let done = self.errors.flush_result(done);
                    self.errors.leave();
                    done
                }
                _ => self.run_sync(&mut job),
            });
            self.finish(id, done);
        }
    }

    /// Repeats system calls until a job is complete.
    fn run_sync(&self, job: &mut Job) -> Result<(), Failure> {
        loop {
            let result = self.call(job, 0);
            if let Some(done) = self.on_completion(job, result) {
                return done;
            }
        }
    }

    /// Executes all requests concurrently. Requests that do not block are executed immediately, the
    /// rest by io_uring.
    fn serve_io_uring(&self, mut ring: IoUring) -> ! {
        /// Id of the wait for requests; smaller ids are those of requests.
        const WAIT: u64 = REQUESTS as u64;
        let queue = self.queue;
        let (mut next, mut jobs) = (0, [Job::NONE; REQUESTS]);
        // Requests in the ring, one bit each. The guest may submit one of them again.
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
                    Ok(()) => self.try_without_waiting(job, busy != 0),
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
                // Register as a waiter, as `Queue::sleep` does.
                let seen = queue.calls.load(SeqCst);
                queue.sleepers.fetch_add(1, SeqCst);
                waits = true;
                ring.push(Submission::Wait(&queue.calls, seen), WAIT);
            }
            let least = if queue.waiting.load(SeqCst) == 0 { 1 } else { 0 };
            match ring.wait(least) {
                Err(error) if error.0 != errno::EINTR as i32 => {
                    let disk = self.disk_index;
                    report::warn(format_args!("disk {disk}: cannot wait for io_uring: {error}"));
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
                match self.on_completion(job, result) {
                    Some(mut done) => {
                        if job.kind == Kind::Flush {
                            flushes.is_under_way = false;
                            done = self.errors.flush_result(done);
                        }
                        busy &= !(1 << id);
                        self.finish(id as usize, done);
                    }
                    None => ring.push(job.entry(), id),
                }
            }
        }
    }

    /// Submits the next flush if none is in flight. After a failed flush it completes all pending
    /// ones; returns their bits.
    fn begin_flush(&self, flushes: &mut Flushes, ring: &mut IoUring) -> u64 {
        let mut ended = 0;
        while flushes.waiting != 0 && !flushes.is_under_way {
            let id = flushes.waiting.trailing_zeros();
            flushes.waiting &= flushes.waiting - 1;
            match self.errors.check() {
                Ok(()) => {
                    ring.push(Submission::Flush, id.into());
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

    /// Executes a request that does not block: reads of cached data; reads where the host cannot
    /// report that, and writes, if no other request is pending. `None`: use io_uring.
    fn try_without_waiting(&self, job: &mut Job, is_busy: bool) -> Option<Result<(), Failure>> {
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
        self.on_completion(job, result)
    }

    /// Completes a request.
    fn finish(&self, id: usize, done: Result<(), Failure>) {
        let status = match done {
            Ok(()) => status::DONE,
            Err(Failure::Invalid) => status::FAILED,
            Err(Failure::Host(Errno(number))) if number == errno::EOPNOTSUPP as i32 => {
                status::UNSUPPORTED
            }
            Err(Failure::Host(error)) => {
                self.warn_once(error);
                status::FAILED
            }
        };
        if self.queue.end(id, status) {
            sys::wake(&self.queue.answers);
        }
        device::raise_completion(self.disk_index, event::DISK);
    }

    /// Validates a request, reading each of its values once, and fills in a job.
    fn plan(&self, request: &Request, job: &mut Job) -> Result<(), Failure> {
        let sector = request.sector.load(Relaxed);
        let count = request.count.load(Relaxed);
        let op = request.op.load(Relaxed);
        let writes = !matches!(op, op::READ | op::FLUSH);
        if writes && self.disk.read_only {
            return Err(Failure::Invalid);
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
            _ => return Err(Failure::Invalid),
        };
        job.left = match job.kind {
            Kind::Flush => return Ok(()),
            Kind::Allocate(..) => u64::from(count) * u64::from(SECTOR),
            Kind::Read | Kind::Write => self.take_parts(request, job)?,
        };
        job.at = self.file_offset(sector, job.left)?;
        Ok(())
    }

    /// Translates the ranges of the data; returns the total length in bytes.
    fn take_parts(&self, request: &Request, job: &mut Job) -> Result<u64, Failure> {
        let used = request.used.load(Relaxed) as usize;
        let parts = request.parts.get(..used).ok_or(Failure::Invalid)?;
        let mut length = 0;
        for (vector, part) in job.vectors.iter_mut().zip(parts) {
            let address = part.address.load(Relaxed);
            let bytes = u64::from(part.length.load(Relaxed));
            self.ram.offset(address).filter(|&(_, most)| most >= bytes).ok_or(Failure::Invalid)?;
            *vector = Vector { address: layout::DIRECT + address, length: bytes };
            length += bytes;
        }
        if length == 0 || !length.is_multiple_of(SECTOR.into()) {
            return Err(Failure::Invalid);
        }
        job.used = used;
        Ok(length)
    }

    /// Executes the remaining part of a job by a system call.
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
        // SAFETY: the vectors are mapped guest memory, where no Rust object is.
        unsafe { sys::call(call, arguments) }
    }

    /// Handles the result of a system call; `None`: the job continues.
    fn on_completion(
        &self,
        job: &mut Job,
        result: Result<u64, Errno>,
    ) -> Option<Result<(), Failure>> {
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

    /// Returns the file offset of a range of sectors.
    fn file_offset(&self, sector: u64, bytes: u64) -> Result<u64, Failure> {
        let count = bytes.div_ceil(SECTOR.into());
        match sector.checked_add(count) {
            Some(end) if end <= self.disk.sectors => Ok(sector * u64::from(SECTOR)),
            _ => Err(Failure::Invalid),
        }
    }

    /// Writes zeros.
    fn zero(&self, mut at: u64, mut left: u64) -> Result<(), Failure> {
        while left != 0 {
            let length = left.min(ZEROS.len() as u64);
            let arguments = [self.fd.into(), ZEROS.as_ptr() as u64, length, at, 0, 0];
            // SAFETY: the zeros are only read.
            match unsafe { sys::call(linux::__NR_pwrite64, arguments) } {
                Ok(0) => return Err(Failure::Host(Errno(errno::EIO as i32))),
                Ok(done) => (left, at) = (left - done.min(left), at + done),
                Err(Errno(number)) if number == errno::EINTR as i32 => {}
                Err(error) => return Err(error.into()),
            }
        }
        Ok(())
    }

    /// Reports the first error of the host for each disk; the guest receives every error.
    fn warn_once(&self, error: Errno) {
        if self.queue.warned.swap(1, SeqCst) == 0 {
            let disk_index = self.disk_index;
            report::warn(format_args!("disk {disk_index}: request failed: {error}"));
        }
    }
}
