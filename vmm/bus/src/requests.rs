//! Back ends of block and message devices whose requests are carried out by host processes:
//! [`proto::requests`].

use core::marker::PhantomData;
use core::sync::atomic::{AtomicU32, Ordering::Relaxed};

use proto::requests::{Client, Part, Queue, op, status};

use crate::backend::{Block, BlockOp, BlockStatus, Data, Messages};

/// Futex operations of a vCPU thread.
pub trait Futex {
    /// Wakes one thread that waits for this word.
    fn wake_one(word: &AtomicU32);
    /// Waits until the word is woken, if it has this value; may return earlier.
    fn wait(word: &AtomicU32, value: u32);
    /// Reports that a worker has written, or may have written, to this part of guest memory; called
    /// before the guest is notified.
    fn guest_memory_written(_address: u64, _length: u32) {}
}

/// Device side of a request queue.
#[derive(Debug)]
pub struct Requests<'a, F> {
    client: Client<'a>,
    /// True for a queue of [`Self::with_device_process`].
    can_abandon: bool,
    futex: PhantomData<fn() -> F>,
}

impl<'a, F: Futex> Requests<'a, F> {
    /// Creates a back end without requests. The workers let the host kernel write to guest memory,
    /// which cannot be cancelled.
    pub fn new(queue: &'a Queue) -> Self {
        Self { client: Client::new(queue), can_abandon: false, futex: PhantomData }
    }

    /// Creates a back end without requests whose workers are in a device process. It writes to
    /// guest memory itself, within [`Queue::enter`]: a reset of the device need not wait for
    /// requests that may block in the host indefinitely.
    pub fn with_device_process(queue: &'a Queue) -> Self {
        Self { can_abandon: true, ..Self::new(queue) }
    }

    /// Submits a request to the workers.
    fn submit(&mut self, id: u16) {
        if self.client.give(id) {
            F::wake_one(&self.client.queue.calls);
        }
    }

    fn cancel_all(&mut self) {
        if self.can_abandon { self.client.abandon(F::wait) } else { self.client.forget(F::wait) }
    }
}

/// Copies parts of guest memory into a request; returns their number.
fn fill(parts: &[Part], data: &mut Data<'_>) -> usize {
    // If the request has no room for all parts, the worker finds that bytes are missing.
    let given = parts.iter().map_while(|place| {
        let part = data.part(u32::MAX)?;
        place.address.store(part.address, Relaxed);
        place.length.store(part.length, Relaxed);
        Some(())
    });
    given.count()
}

/// Reports the parts of guest memory that were written.
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
        self.submit(id);
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
        // The worker has already written the data.
        announce::<F>(data);
        self.client.finish(id);
    }

    fn forget(&mut self) {
        self.cancel_all();
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
        self.submit(id);
        true
    }

    fn completed(&mut self) -> Option<(u16, u32)> {
        let (id, request) = self.client.completed()?;
        Some((id, request.answer.load(Relaxed)))
    }

    fn finish(&mut self, id: u16, data: &mut Data<'_>) {
        // The worker has already written the reply.
        announce::<F>(data);
        self.client.finish(id);
    }

    fn forget(&mut self) {
        self.cancel_all();
    }
}
