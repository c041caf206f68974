//! Block devices and servers of messages whose requests processes of the host carry out: [`proto::requests`].

use core::marker::PhantomData;
use core::sync::atomic::{AtomicU32, Ordering::Relaxed};

use proto::requests::{Client, Part, Queue, op, status};

use crate::backend::{Block, BlockOp, BlockStatus, Data, Messages};

/// How a virtual CPU's thread wakes and awaits others of the host.
pub trait Futex {
    /// Wakes one who waits for this word.
    fn wake_one(word: &AtomicU32);
    /// Waits until the word is woken, if it has this value; it may return earlier.
    fn wait(word: &AtomicU32, value: u32);
    /// A worker has written to this part of guest memory, or may have, and the guest is about to be told.
    fn guest_memory_written(_address: u64, _length: u32) {}
}

/// A device's side of a queue of requests.
#[derive(Debug)]
pub struct Requests<'a, F> {
    client: Client<'a>,
    /// See [`Self::with_device_process`].
    leaves: bool,
    futex: PhantomData<fn() -> F>,
}

impl<'a, F: Futex> Requests<'a, F> {
    /// Without requests. The workers have the host's kernel write to guest memory, which cannot be called back.
    pub fn new(queue: &'a Queue) -> Self {
        Self { client: Client::new(queue), leaves: false, futex: PhantomData }
    }

    /// Without requests. The workers are another program's, which writes to guest memory itself, by [`Queue::enter`]: a device that is reset need not wait
    /// for requests that may wait for the host for ever.
    pub fn with_device_process(queue: &'a Queue) -> Self {
        Self { leaves: true, ..Self::new(queue) }
    }

    /// Gives a request to the workers.
    fn give(&mut self, id: u16) {
        if self.client.give(id) {
            F::wake_one(&self.client.queue.calls);
        }
    }

    fn take_back(&mut self) {
        if self.leaves { self.client.abandon(F::wait) } else { self.client.forget(F::wait) }
    }
}

/// Puts parts of guest memory into a request; gives their number.
fn fill(parts: &[Part], data: &mut Data<'_>) -> usize {
    // Of more than there is room for, the worker finds that bytes are missing.
    let given = parts.iter().map_while(|place| {
        let part = data.part(u32::MAX)?;
        place.address.store(part.address, Relaxed);
        place.length.store(part.length, Relaxed);
        Some(())
    });
    given.count()
}

/// Says which parts of guest memory are written.
fn announce<F: Futex>(data: &mut Data<'_>) {
    while let Some(part) = data.part(u32::MAX) {
        F::guest_memory_written(part.address, part.length);
    }
}

impl<F: Futex> Block for Requests<'_, F> {
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
        self.give(id);
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

    fn finish(&mut self, id: u16, data: &mut Data<'_>) {
        // What was read is there already.
        announce::<F>(data);
        self.client.finish(id);
    }

    fn forget(&mut self) {
        self.take_back();
    }
}

impl<F: Futex> Messages for Requests<'_, F> {
    fn start(&mut self, id: u16, message: &mut Data<'_>, answer: &mut Data<'_>) -> bool {
        let Some(request) = self.client.request(id) else { return false };
        request.op.store(op::MESSAGE, Relaxed);
        let count = fill(&request.parts, message);
        let used = count + fill(&request.parts[count..], answer);
        request.count.store(count as u32, Relaxed);
        request.used.store(used as u32, Relaxed);
        self.give(id);
        true
    }

    fn completed(&mut self) -> Option<(u16, u32)> {
        let (id, request) = self.client.completed()?;
        Some((id, request.answer.load(Relaxed)))
    }

    fn finish(&mut self, id: u16, data: &mut Data<'_>) {
        // The answer is there already.
        announce::<F>(data);
        self.client.finish(id);
    }

    fn forget(&mut self) {
        self.take_back();
    }
}
