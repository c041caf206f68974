//! The vCPU's side of a device process, for tests that start, kill and query such a process.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::Ordering::{Relaxed, SeqCst};
use std::time::{Duration, Instant};

use proto::hosted::layout;
use proto::requests::{Client, Queue};
use rustix::event::{EventfdFlags, eventfd};
use rustix::fs::Timespec;
use rustix::thread::futex;
use vmm_mem::shared::SharedMemory;

use crate::worker::Segment;

/// Memory shared with a device process. Each process gets fresh memory.
#[derive(Debug)]
pub struct Driver {
    guest: SharedMemory,
    /// For access to guest memory with read(2) and write(2).
    file: File,
    shared: SharedMemory,
    counters: SharedMemory,
    doorbell: OwnedFd,
    memory: u64,
}

impl Driver {
    /// Creates `memory` bytes of guest memory, shared memory, counters and a doorbell.
    ///
    /// # Errors
    /// Errors of the host.
    pub fn new(memory: u64) -> io::Result<Self> {
        let guest = SharedMemory::new("guest", memory)?;
        let file = File::from(guest.descriptor().try_clone_to_owned()?);
        let shared = SharedMemory::new("shared", layout::SHARED_LENGTH)?;
        let counters = SharedMemory::new("counters", layout::COUNTERS_LENGTH)?;
        let doorbell = eventfd(0, EventfdFlags::NONBLOCK | EventfdFlags::CLOEXEC)?;
        Ok(Self { guest, file, shared, counters, doorbell, memory })
    }

    /// Returns the size of guest memory in bytes.
    pub const fn memory(&self) -> u64 {
        self.memory
    }

    /// Returns the descriptors for the process, with the numbers that it expects.
    pub fn descriptors(&self) -> [(BorrowedFd<'_>, u32); 4] {
        [
            (self.guest.descriptor(), layout::MEMORY_FD),
            (self.shared.descriptor(), layout::SHARED_FD),
            (self.doorbell.as_fd(), layout::DOORBELL_FD),
            (self.counters.descriptor(), layout::COUNTERS_FD),
        ]
    }

    /// Returns guest memory.
    pub const fn guest(&self) -> &File {
        &self.file
    }

    /// Returns a queue without requests, for the next process.
    ///
    /// # Errors
    /// Errors of the host.
    pub fn session(&mut self) -> io::Result<Session<'_>> {
        self.shared.write_at(layout::QUEUES, &[0; size_of::<Queue>()])?;
        let queue = self.shared.at(layout::QUEUES, size_of::<Queue>() as u64)?;
        // SAFETY: the queue lies in the mapping, which is borrowed for as long as the session
        // lives; it is page-aligned, and all of it is atomic, with no invalid value.
        let queue = unsafe { &*queue.cast::<Queue>() };
        Ok(Session { driver: self, client: Client::new(queue) })
    }
}

/// Requests to one process.
#[derive(Debug)]
pub struct Session<'a> {
    /// Shared memory.
    pub driver: &'a Driver,
    client: Client<'a>,
}

impl Session<'_> {
    /// Submits a request with this free ID; see [`proto::requests::Request`].
    pub fn submit(&mut self, id: u16, op: u32, sector: u64, part: Option<Segment>, count: u32) {
        let Some(request) = self.client.request(id) else { return };
        request.op.store(op, Relaxed);
        request.sector.store(sector, Relaxed);
        request.count.store(count, Relaxed);
        request.used.store(part.is_some().into(), Relaxed);
        if let Some((address, length)) = part {
            request.parts[0].address.store(address, Relaxed);
            request.parts[0].length.store(length, Relaxed);
        }
        if self.client.give(id) {
            let _ = futex::wake(&self.client.queue.calls, futex::Flags::empty(), 1);
        }
    }

    /// Returns the next completed request and its status: one that has completed, or the first
    /// within `limit`.
    pub fn completed(&mut self, limit: Duration) -> Option<(u16, u8)> {
        let until = Instant::now() + limit;
        let queue = self.client.queue;
        queue.is_awaited.store(1, SeqCst);
        loop {
            let seen = queue.answers.load(SeqCst);
            if let Some((id, request)) = self.client.completed() {
                let status = request.status.load(Relaxed);
                self.client.finish(id);
                return Some((id, status));
            }
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return None;
            }
            let left = Timespec::try_from(left).ok();
            let _ = futex::wait(&queue.answers, futex::Flags::empty(), seen, left.as_ref());
        }
    }
}
