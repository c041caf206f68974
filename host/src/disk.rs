//! Engine of raw disks: executes the requests of a queue ([`proto::requests`]) on a host file, with
//! vectored system calls directly on guest memory.
//!
//! Where the host's io_uring suffices ([`crate::io_uring`]), one worker per disk has all requests
//! in flight; else there are two, because system calls block: a read does not wait for a flush.
//! Workers are processes of a pre-virtualized VM, and threads of a VM with KVM.
//!
//! A worker trusts no value of a request: sectors outside of the disk and ranges outside of memory
//! fail.
//!
//! After a failed flush all flushes of the disk fail until it is opened again ([`FlushErrors`]):
//! the host kernel reports a write-back error once and drops the data. Hence there is one flush at
//! a time.

use core::fmt;
use core::sync::atomic::{AtomicU32, Ordering::Relaxed, Ordering::SeqCst};

use linux_raw_sys::errno;
use linux_raw_sys::general as linux;
use proto::disk::SECTOR;
use proto::hosted::DiskRecord;
use proto::hosted::counters::{self, DeviceCounters, EndedRequests};
use proto::requests::{PARTS, Queue, REQUESTS, Request, op, status};

use crate::io_uring::{IoUring, Submission};
use crate::sys::{self, Errno, Vector};

/// Workers of each disk without io_uring.
pub const BLOCKING_WORKERS: usize = 2;

/// A VM as a disk's worker sees it.
///
/// # Safety
/// [`Self::locate`] must return mapped guest memory, where no Rust object is.
pub unsafe trait DiskHost {
    /// Returns the host address of a range of guest memory, if it is contiguous there.
    fn locate(&self, address: u64, length: u64) -> Option<u64>;
    /// Notifies a vCPU of completed requests.
    fn notify(&self);
    /// Returns a time in nanoseconds, of which only differences count.
    fn now(&self) -> u64;
    /// Prints a warning.
    fn warn(&self, text: fmt::Arguments<'_>);
}

/// Flush errors of a disk, shared by its workers. Zeroed memory is a valid value.
#[derive(Debug, Default)]
pub struct FlushErrors {
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
/// Maximum vectors of zeros in one write: 1 MiB, so that other requests of the disk do not wait
/// long.
const ZERO_VECTORS: usize = 16;

/// Request in execution.
#[derive(Clone, Copy)]
struct Job {
    kind: Kind,
    /// Time of its start in nanoseconds.
    began: u64,
    /// Length of its data in bytes.
    length: u64,
    /// Index of its counters ([`counters::op`]); `None`: the guest has made up the operation.
    counted: Option<usize>,
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
    /// Writes of [`ZEROS`], after fallocate(2) has failed.
    Zeros,
    Flush,
    /// fallocate(2) with this mode; the flag permits writing zeros instead.
    Allocate(u32, bool),
}

impl Job {
    const NONE: Self = Self {
        kind: Kind::Flush,
        began: 0,
        length: 0,
        counted: None,
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
            Kind::Write | Kind::Zeros => Submission::Write(self.vectors(), self.at),
            Kind::Flush => Submission::Flush,
            Kind::Allocate(mode, _) => Submission::Allocate(mode, self.at, self.left),
        }
    }

    /// Fills the remaining memory with zeros.
    fn clear(&mut self) {
        for vector in self.vectors() {
            // SAFETY: the vector is mapped guest memory, where no Rust object is.
            unsafe { (vector.address as *mut u8).write_bytes(0, vector.length as usize) };
        }
        self.left = 0;
    }

    /// Selects zeros for the next write, up to the end of the job.
    fn take_zeros(&mut self) {
        const EACH: u64 = ZEROS.len() as u64;
        self.kind = Kind::Zeros;
        self.first = 0;
        self.used = self.left.div_ceil(EACH).min(ZERO_VECTORS as u64) as usize;
        let mut left = self.left;
        for vector in &mut self.vectors[..self.used] {
            *vector = Vector { address: ZEROS.as_ptr() as u64, length: left.min(EACH) };
            left -= vector.length;
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

/// Requests of a disk with io_uring.
struct InFlight {
    ring: IoUring,
    jobs: [Job; REQUESTS],
    /// Requests in the ring, one bit each. The guest may submit one of them again.
    busy: u64,
    /// A flush is in the ring.
    is_flushing: bool,
    /// Flushes that wait for it, one bit per request.
    flushes: u64,
    /// The wait for requests is in the ring.
    waits: bool,
}

/// A worker of a disk.
pub struct Worker<'a, H> {
    /// Descriptor of the file.
    pub fd: u32,
    /// Number of the disk, for messages.
    pub index: usize,
    /// Properties of the disk.
    pub record: DiskRecord,
    /// Flush errors of the disk.
    pub errors: &'a FlushErrors,
    /// Request queue of the disk.
    pub queue: &'a Queue,
    /// Counters of the disk.
    pub counters: &'a DeviceCounters,
    /// The VM.
    pub host: H,
}

impl<H: DiskHost> Worker<'_, H> {
    /// Executes requests with this ring; without one, by blocking calls. Returns the error with
    /// which the host has refused to wait.
    pub fn serve(&self, ring: Option<IoUring>) -> Errno {
        match ring {
            Some(ring) => self.serve_io_uring(ring),
            None => self.serve_sync(),
        }
    }

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
            self.finish(id, &job, done);
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
    fn serve_io_uring(&self, ring: IoUring) -> Errno {
        let jobs = [Job::NONE; REQUESTS];
        let (is_flushing, waits) = (false, false);
        let mut state = InFlight { ring, jobs, busy: 0, is_flushing, flushes: 0, waits };
        let (queue, mut next) = (self.queue, 0);
        loop {
            while let Some(id) = queue.take(&mut next) {
                self.begin(&mut state, id);
            }
            self.begin_flush(&mut state);
            if state.busy == 0 && !state.waits {
                queue.sleep(|calls, seen| sys::wait(calls, seen, None));
                continue;
            }
            match self.wait(&mut state) {
                Err(error) if error.0 != errno::EINTR as i32 => return error,
                _ => self.complete(&mut state),
            }
        }
    }

    /// Executes a taken request, or submits it to the ring.
    fn begin(&self, state: &mut InFlight, id: usize) {
        if state.busy >> id & 1 != 0 {
            return;
        }
        let job = &mut state.jobs[id];
        let done = match self.plan(&self.queue.requests[id], job) {
            Ok(()) => self.try_without_waiting(job, state.busy != 0),
            Err(failure) => Some(Err(failure)),
        };
        match done {
            Some(done) => return self.finish(id, job, done),
            None if job.kind == Kind::Flush => state.flushes |= 1 << id,
            None => state.ring.push(job.entry(), id as u64),
        }
        state.busy |= 1 << id;
    }

    /// Submits the next flush if none is in flight. After a failed flush it completes all pending
    /// ones.
    fn begin_flush(&self, state: &mut InFlight) {
        while state.flushes != 0 && !state.is_flushing {
            let id = state.flushes.trailing_zeros();
            state.flushes &= state.flushes - 1;
            match self.errors.check() {
                Ok(()) => {
                    state.ring.push(Submission::Flush, id.into());
                    state.is_flushing = true;
                }
                failed => {
                    state.busy &= !(1 << id);
                    self.finish(id as usize, &state.jobs[id as usize], failed);
                }
            }
        }
    }

    /// Waits for new requests and for completions.
    fn wait(&self, state: &mut InFlight) -> Result<(), Errno> {
        let queue = self.queue;
        if !state.waits {
            // Register as a waiter, as `Queue::sleep` does.
            let seen = queue.calls.load(SeqCst);
            queue.sleepers.fetch_add(1, SeqCst);
            state.waits = true;
            // Its id is above those of requests.
            state.ring.push(Submission::Wait(&queue.calls, seen), REQUESTS as u64);
        }
        let least = if queue.waiting.load(SeqCst) == 0 { 1 } else { 0 };
        state.ring.wait(least)
    }

    /// Handles all completions.
    fn complete(&self, state: &mut InFlight) {
        while let Some((id, result)) = state.ring.completed() {
            let Some(job) = state.jobs.get_mut(id as usize) else {
                state.waits = false;
                self.queue.sleepers.fetch_sub(1, SeqCst);
                continue;
            };
            match self.on_completion(job, result) {
                Some(mut done) => {
                    if job.kind == Kind::Flush {
                        state.is_flushing = false;
                        done = self.errors.flush_result(done);
                    }
                    state.busy &= !(1 << id);
                    self.finish(id as usize, job, done);
                }
                None => state.ring.push(job.entry(), id),
            }
        }
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

    /// Counts and completes a request.
    fn finish(&self, id: usize, job: &Job, done: Result<(), Failure>) {
        if let Some(op) = job.counted {
            let time = self.host.now().saturating_sub(job.began);
            let ended = EndedRequests::one(job.length, done.is_err(), Some(time));
            self.counters.ops[op].add(&ended);
        }
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
        self.host.notify();
    }

    /// Validates a request, reading each of its values once, and fills in a job.
    fn plan(&self, request: &Request, job: &mut Job) -> Result<(), Failure> {
        let sector = request.sector.load(Relaxed);
        let count = request.count.load(Relaxed);
        let op = request.op.load(Relaxed);
        (job.began, job.length, job.counted) = (self.host.now(), 0, counters::op::of_disk(op));
        let writes = !matches!(op, op::READ | op::FLUSH);
        if writes && self.record.read_only {
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
            Kind::Allocate(..) if count == 0 => return Err(Failure::Invalid),
            Kind::Allocate(..) => u64::from(count) * SECTOR,
            _ => self.take_parts(request, job)?,
        };
        job.at = self.file_offset(sector, job.left)?;
        job.length = job.left;
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
            let address = self.host.locate(address, bytes).ok_or(Failure::Invalid)?;
            *vector = Vector { address, length: bytes };
            length += bytes;
        }
        if length == 0 || !length.is_multiple_of(SECTOR) {
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
            Kind::Write | Kind::Zeros => {
                (linux::__NR_pwritev, [fd, vectors.0, vectors.1, job.at, 0, 0])
            }
            Kind::Flush => (linux::__NR_fdatasync, [fd, 0, 0, 0, 0, 0]),
            Kind::Allocate(mode, _) => {
                (linux::__NR_fallocate, [fd, mode.into(), job.at, job.left, 0, 0])
            }
        };
        // SAFETY: the vectors are mapped guest memory, where no Rust object is, or zeros that are
        // only read.
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
            (Kind::Read, Ok(0)) if self.is_padding(job) => {
                job.clear();
                Some(Ok(()))
            }
            (Kind::Read | Kind::Write | Kind::Zeros, Ok(0)) => {
                Some(Err(Errno(errno::EIO as i32).into()))
            }
            (Kind::Read | Kind::Write | Kind::Zeros, Ok(done)) => {
                job.advance(done.min(job.left));
                if job.kind == Kind::Zeros {
                    job.take_zeros();
                }
                (job.left == 0).then_some(Ok(()))
            }
            (Kind::Allocate(_, true), Err(_)) => {
                job.take_zeros();
                None
            }
            // A range that is not aligned to the blocks of a block device, which keeps its data:
            // the guest sees blocks of 512 bytes.
            (Kind::Allocate(_, false), Err(Errno(number))) if number == errno::EINVAL as i32 => {
                Some(Ok(()))
            }
            (_, Ok(_)) => Some(Ok(())),
            (_, Err(error)) => Some(Err(error.into())),
        }
    }

    /// Returns whether the rest of a read is the part of the last sector that the file lacks: its
    /// length is no multiple of a sector.
    fn is_padding(&self, job: &Job) -> bool {
        job.left < SECTOR && job.at + job.left == self.record.sectors * SECTOR
    }

    /// Returns the file offset of a range of sectors.
    fn file_offset(&self, sector: u64, bytes: u64) -> Result<u64, Failure> {
        let count = bytes.div_ceil(SECTOR);
        match sector.checked_add(count) {
            Some(end) if end <= self.record.sectors => Ok(sector * SECTOR),
            _ => Err(Failure::Invalid),
        }
    }

    /// Reports the first error of the host for each disk; the guest receives every error.
    fn warn_once(&self, error: Errno) {
        if self.queue.warned.swap(1, SeqCst) == 0 {
            self.host.warn(format_args!("disk {}: request failed: {error}", self.index));
        }
    }
}

#[cfg(test)]
mod tests;
