//! Requests in shared memory, and guest memory, as a process of another program has them.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, FromRawFd, OwnedFd};
use std::sync::atomic::AtomicU32;
use std::sync::atomic::Ordering::{Relaxed, SeqCst};

use proto::requests::{PARTS, Queue, Request, op};
use proto::wedge::{MAX_QUEUES, layout};
use rustix::thread::futex;
use vmm_mem::GuestMemory;
use vmm_mem::shared::SharedMemory;

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
    /// [`Request::count`].
    pub count: u32,
    request: &'a Request,
    memory: &'a GuestMemory,
}

impl Taken<'_> {
    /// Copies bytes of guest memory: all of these parts, if they have no more than `most` bytes.
    pub fn read(&self, parts: &[Part], most: usize) -> Option<Vec<u8>> {
        let length: usize = parts.iter().map(|part| part.1 as usize).sum();
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

    /// The length of an answer.
    pub fn set_answer(&self, length: u32) {
        self.request.answer.store(length, Relaxed);
    }
}

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

    /// Carries requests out with `act`, which gives the status of each, for as long as the process lives.
    ///
    /// # Errors
    /// Guest memory makes no layout.
    pub fn serve(mut self, mut act: impl FnMut(&Taken<'_>) -> u8) -> io::Result<()> {
        let offset = layout::QUEUES + (self.machine.queue * size_of::<Queue>()) as u64;
        let queue = self.shared.at(offset, size_of::<Queue>() as u64)?;
        // SAFETY: it lies in the mapping, which lives as long as `self`; it is page-aligned memory at a multiple of its size, and all of it
        // is atomic, with no value that is not allowed.
        let queue = unsafe { &*queue.cast::<Queue>() };
        let doorbell = self.doorbell.as_fd();
        let hole = vmm_machine::layout_with_pci().hole_start;
        let ranges: Vec<_> = vmm_boot::ram_ranges(self.machine.memory, hole).collect();
        self.guest.with(ranges, |memory| {
            let mut next = 0;
            loop {
                match queue.take(&mut next) {
                    Some(id) => {
                        finish(queue, id, act(&take(&queue.requests[id], memory)), doorbell)
                    }
                    None => queue.sleep(wait),
                }
            }
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

fn wait(word: &AtomicU32, seen: u32) {
    // An early return is allowed.
    let _ = futex::wait(word, futex::Flags::empty(), seen, None);
}

/// Splits the parts of a message: what is to be read, and where the answer goes.
pub fn split<'a>(taken: &'a Taken<'_>) -> Option<(&'a [Part], &'a [Part])> {
    if taken.op != op::MESSAGE {
        return None;
    }
    taken.parts.split_at_checked(taken.count as usize)
}
