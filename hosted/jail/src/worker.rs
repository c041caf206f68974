//! Requests in shared memory, and guest memory, as a process of another program has them.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, FromRawFd, OwnedFd};
use std::sync::atomic::Ordering::{Relaxed, SeqCst};
use std::sync::atomic::{AtomicBool, AtomicU32};
use std::time::Duration;

use proto::requests::{PARTS, Queue, Request, op};
use proto::wedge::{MAX_QUEUES, layout};
use rustix::fs::Timespec;
use rustix::io::Errno;
use rustix::thread::futex;
use vmm_mem::GuestMemory;
use vmm_mem::shared::SharedMemory;

/// What a process writes to standard output when requests are served; anything else is why they are not.
pub const READY: u8 = 0;

/// What a process is told of its machine. It has the descriptors of [`layout`]: guest memory, shared memory and the doorbell.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Machine {
    /// Bytes of guest memory.
    pub memory: u64,
    /// Number of the queue of requests.
    pub queue: usize,
}

/// A process that carries requests out.
#[derive(Debug)]
pub struct Worker {
    guest: SharedMemory,
    shared: SharedMemory,
    doorbell: OwnedFd,
    machine: Machine,
}

/// A part of guest memory: address and length. It may lie anywhere.
pub type Part = (u64, u32);

/// A request, taken out of shared memory.
#[derive(Debug)]
pub struct Taken<'a> {
    /// What is to be done: see [`proto::requests::op`].
    pub op: u32,
    /// Where its data is.
    pub parts: Vec<Part>,
    /// First sector.
    pub sector: u64,
    /// [`Request::count`].
    pub count: u32,
    request: &'a Request,
    memory: &'a GuestMemory,
}

impl Taken<'_> {
    /// Copies bytes of guest memory: all of these parts, if they have no more than `most` bytes.
    pub fn read(&self, parts: &[Part], most: usize) -> Option<Vec<u8>> {
        let length = length(parts);
        if length > most {
            return None;
        }
        let mut bytes = vec![0; length];
        let mut rest = bytes.as_mut_slice();
        for &(address, length) in parts {
            let (now, later) = rest.split_at_mut(length as usize);
            self.memory.read_slice(address, now).ok()?;
            rest = later;
        }
        Some(bytes)
    }

    /// Copies bytes to guest memory, into these parts, as far as they have room.
    pub fn write(&self, parts: &[Part], bytes: &[u8]) -> Option<()> {
        let mut rest = bytes;
        for &(address, length) in parts {
            let (now, later) = rest.split_at(rest.len().min(length as usize));
            self.memory.write_slice(address, now).ok()?;
            rest = later;
        }
        Some(())
    }

    /// Bytes of all parts.
    pub fn length(&self) -> usize {
        length(&self.parts)
    }

    /// The length of an answer.
    pub fn set_answer(&self, length: u32) {
        self.request.answer.store(length, Relaxed);
    }
}

fn length(parts: &[Part]) -> usize {
    parts.iter().map(|part| part.1 as usize).sum()
}

/// What a process does with requests.
pub trait Serve {
    /// Carries a request out; gives its status.
    fn act(&mut self, taken: &Taken<'_>) -> u8;

    /// No request has come for a moment since the last one, or none comes any more.
    fn idle(&mut self) {}
}

/// How long a moment is.
const MOMENT: Duration = Duration::from_millis(200);
/// How often a process without requests looks whether it is to end, if it misses the signal.
const PAUSE: Duration = Duration::from_secs(1);

impl Worker {
    /// Takes the descriptors over and maps memory.
    ///
    /// # Errors
    /// They are not what a machine has.
    pub fn new(machine: Machine) -> io::Result<Self> {
        if machine.queue >= MAX_QUEUES {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        let own = |number: u32| {
            // SAFETY: `parador run` starts the program with these descriptors, and nothing else of it uses them.
            unsafe { OwnedFd::from_raw_fd(number as i32) }
        };
        Ok(Self {
            guest: SharedMemory::open(own(layout::MEMORY_FD), machine.memory)?,
            shared: SharedMemory::open(own(layout::SHARED_FD), layout::SHARED_LENGTH)?,
            doorbell: own(layout::DOORBELL_FD),
            machine,
        })
    }

    /// Says on standard output that requests are served, and serves them until `end`, which a signal sets.
    ///
    /// # Errors
    /// Guest memory makes no layout.
    pub fn serve(mut self, served: &mut impl Serve, end: &AtomicBool) -> io::Result<()> {
        rustix::io::write(rustix::stdio::stdout(), &[READY])?;
        let offset = layout::QUEUES + (self.machine.queue * size_of::<Queue>()) as u64;
        let queue = self.shared.at(offset, size_of::<Queue>() as u64)?;
        // SAFETY: it lies in the mapping, which lives as long as `self`; it is page-aligned memory at a multiple of its size, and all of it
        // is atomic, with no value that is not allowed.
        let queue = unsafe { &*queue.cast::<Queue>() };
        let doorbell = self.doorbell.as_fd();
        let hole = vmm_machine::layout_with_pci().hole_start;
        let ranges: Vec<_> = vmm_boot::ram_ranges(self.machine.memory, hole).collect();
        self.guest.with(ranges, |memory| {
            let (mut next, mut is_idle) = (0, true);
            while !end.load(Relaxed) {
                if let Some(id) = queue.take(&mut next) {
                    finish(queue, id, served.act(&take(&queue.requests[id], memory)), doorbell);
                    is_idle = false;
                    continue;
                }
                let mut has_come = true;
                let limit = if is_idle { PAUSE } else { MOMENT };
                queue.sleep(|word, seen| has_come = wait(word, seen, limit));
                if !has_come && !is_idle {
                    served.idle();
                    is_idle = true;
                }
            }
            served.idle();
        })
    }
}

/// Reads a request, each value once.
fn take<'a>(request: &'a Request, memory: &'a GuestMemory) -> Taken<'a> {
    let used = (request.used.load(Relaxed) as usize).min(PARTS);
    let parts = request.parts[..used].iter();
    Taken {
        op: request.op.load(Relaxed),
        parts: parts.map(|part| (part.address.load(Relaxed), part.length.load(Relaxed))).collect(),
        sector: request.sector.load(Relaxed),
        count: request.count.load(Relaxed),
        request,
        memory,
    }
}

fn finish(queue: &Queue, id: usize, status: u8, doorbell: BorrowedFd<'_>) {
    if queue.end(id, status) {
        // It cannot fail with a mapped word.
        let _ = futex::wake(&queue.answers, futex::Flags::empty(), u32::MAX >> 1);
    }
    queue.rung.store(1, SeqCst);
    // The counter of the descriptor does not overflow: each look takes all of it.
    let _ = rustix::io::write(doorbell, &1_u64.to_ne_bytes());
}

/// `false`: nothing has come in this time.
fn wait(word: &AtomicU32, seen: u32, limit: Duration) -> bool {
    let limit = Timespec { tv_sec: limit.as_secs() as i64, tv_nsec: limit.subsec_nanos().into() };
    // An early return is allowed.
    futex::wait(word, futex::Flags::empty(), seen, Some(&limit)) != Err(Errno::TIMEDOUT)
}

/// Splits the parts of a message: what is to be read, and where the answer goes.
pub fn split<'a>(taken: &'a Taken<'_>) -> Option<(&'a [Part], &'a [Part])> {
    if taken.op != op::MESSAGE {
        return None;
    }
    taken.parts.split_at_checked(taken.count as usize)
}
