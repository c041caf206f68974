//! Request queues between a vCPU and device workers on the host: disks, shared directories.
//!
//! The vCPU writes requests with lists of guest memory ranges to memory that it shares with
//! workers. The queue has a fixed set of request slots. Invariants: a slot belongs to the vCPU
//! until its bit is set in [`Queue::waiting`], then to the worker that clears that bit until it is
//! set in [`Queue::done`], then to the vCPU again. The guest can overwrite all of it, so a worker
//! reads each value once and validates it.
//!
//! The host implements waiting and waking: each futex word is incremented before its waiters are
//! woken.

use core::sync::atomic::{AtomicU8, AtomicU32, AtomicU64, Ordering::Relaxed, Ordering::SeqCst};

/// Number of request slots; each is a bit of a word.
pub const REQUESTS: usize = 64;
/// Largest number of ranges of a request, as many as a descriptor chain of the device models has.
pub const PARTS: usize = 128;

/// Operations: values of [`Request::op`].
pub mod op {
    /// Reads sectors to the ranges.
    pub const READ: u32 = 0;
    /// Writes sectors from the ranges.
    pub const WRITE: u32 = 1;
    /// Makes all completed writes durable.
    pub const FLUSH: u32 = 2;
    /// Discards the contents of sectors.
    pub const DISCARD: u32 = 3;
    /// Writes zeros and keeps the sectors allocated.
    pub const ZERO: u32 = 4;
    /// Writes zeros and may deallocate the sectors.
    pub const UNMAP: u32 = 5;
    /// Passes a message in the first [`Request::count`](super::Request::count) ranges; the reply
    /// goes to the remaining ranges.
    pub const MESSAGE: u32 = 6;
}

/// Results: values of [`Request::status`].
pub mod status {
    /// Success.
    pub const DONE: u8 = 0;
    /// I/O error.
    pub const FAILED: u8 = 1;
    /// Unsupported operation.
    pub const UNSUPPORTED: u8 = 2;
}

/// Range of guest memory.
#[repr(C)]
#[derive(Debug)]
pub struct Part {
    /// Guest-physical address.
    pub address: AtomicU64,
    /// Length in bytes.
    pub length: AtomicU32,
}

/// A request.
#[repr(C)]
#[derive(Debug)]
pub struct Request {
    /// Operation: see [`op`].
    pub op: AtomicU32,
    /// Number of ranges in use.
    pub used: AtomicU32,
    /// First sector.
    pub sector: AtomicU64,
    /// Sectors of an operation without ranges; ranges of a message.
    pub count: AtomicU32,
    /// Result: see [`status`].
    pub status: AtomicU8,
    /// Length of a reply in bytes.
    pub answer: AtomicU32,
    /// Value of [`Queue::answers`] at the completion.
    pub order: AtomicU32,
    /// Ranges of the data.
    pub parts: [Part; PARTS],
}

/// Request queue of one device.
#[repr(C)]
#[derive(Debug)]
pub struct Queue {
    /// Requests that no worker has taken, one bit each.
    pub waiting: AtomicU64,
    /// Completed requests, one bit each.
    pub done: AtomicU64,
    /// Submissions so far: futex of the workers.
    pub calls: AtomicU32,
    /// Number of workers that wait for [`Queue::calls`].
    pub sleepers: AtomicU32,
    /// Number of workers that poll for requests, each of which takes one.
    pub pollers: AtomicU32,
    /// Completions so far: futex of the vCPU.
    pub answers: AtomicU32,
    /// Not 0: the vCPU waits for [`Queue::answers`].
    pub is_awaited: AtomicU32,
    /// Not 0: a worker that cannot signal the vCPU has completed requests; the device process
    /// signals it.
    pub pending: AtomicU32,
    /// Not 0: an I/O error was reported to the user.
    pub warned: AtomicU32,
    /// Incremented when the vCPU abandons all requests.
    pub epoch: AtomicU32,
    /// Number of workers between [`Queue::enter`] and [`Queue::leave`].
    pub inside: AtomicU32,
    /// Index of the vCPU to notify of completions.
    pub target: AtomicU32,
    /// Request slots.
    pub requests: [Request; REQUESTS],
}

impl Request {
    const fn new() -> Self {
        Self {
            op: AtomicU32::new(0),
            used: AtomicU32::new(0),
            sector: AtomicU64::new(0),
            count: AtomicU32::new(0),
            status: AtomicU8::new(0),
            answer: AtomicU32::new(0),
            order: AtomicU32::new(0),
            parts: [const { Part { address: AtomicU64::new(0), length: AtomicU32::new(0) } };
                PARTS],
        }
    }
}

impl Queue {
    /// Creates an empty queue, equal to zeroed memory.
    #[expect(clippy::new_without_default, reason = "it is too large for a stack")]
    pub const fn new() -> Self {
        Self {
            waiting: AtomicU64::new(0),
            done: AtomicU64::new(0),
            calls: AtomicU32::new(0),
            sleepers: AtomicU32::new(0),
            pollers: AtomicU32::new(0),
            answers: AtomicU32::new(0),
            is_awaited: AtomicU32::new(0),
            pending: AtomicU32::new(0),
            warned: AtomicU32::new(0),
            epoch: AtomicU32::new(0),
            inside: AtomicU32::new(0),
            target: AtomicU32::new(0),
            requests: [const { Request::new() }; REQUESTS],
        }
    }

    /// Submits a request; returns whether to wake a worker that waits for [`Queue::calls`].
    pub fn give(&self, id: usize) -> bool {
        let bit = 1 << (id % REQUESTS);
        let waiting = self.waiting.fetch_or(bit, SeqCst) | bit;
        self.calls.fetch_add(1, SeqCst);
        waiting.count_ones() > self.pollers.load(SeqCst) && self.sleepers.load(SeqCst) != 0
    }

    /// Polls for requests; returns what `poll` does. The worker then takes a request or calls
    /// [`Queue::sleep`], and in the first case [`Queue::is_short_of_workers`].
    pub fn poll<T>(&self, poll: impl FnOnce() -> T) -> T {
        self.pollers.fetch_add(1, SeqCst);
        let result = poll();
        self.pollers.fetch_sub(1, SeqCst);
        result
    }

    /// Returns whether to wake another worker: a request may have been left to one that polled, and
    /// has taken another one.
    pub fn is_short_of_workers(&self) -> bool {
        self.waiting.load(SeqCst) != 0 && self.sleepers.load(SeqCst) != 0
    }

    /// Takes a pending request, round-robin from `next` on. Several workers may call it
    /// concurrently.
    pub fn take(&self, next: &mut u32) -> Option<usize> {
        loop {
            let waiting = self.waiting.load(SeqCst);
            if waiting == 0 {
                return None;
            }
            let id = (waiting.rotate_right(*next).trailing_zeros() + *next) % REQUESTS as u32;
            if self.claim(id as usize) {
                *next = (id + 1) % REQUESTS as u32;
                return Some(id as usize);
            }
        }
    }

    /// Takes this request if it is pending.
    pub fn claim(&self, id: usize) -> bool {
        let bit = 1 << (id % REQUESTS);
        self.waiting.fetch_and(!bit, SeqCst) & bit != 0
    }

    /// Begins a short access to requests or the memory that they name, for workers whose requests
    /// can be abandoned. Returns the epoch, which is constant until [`Queue::leave`]; requests of
    /// an earlier epoch must not be touched.
    pub fn enter(&self) -> u32 {
        self.inside.fetch_add(1, SeqCst);
        self.epoch.load(SeqCst)
    }

    /// Ends the access begun by [`Queue::enter`]; returns whether to wake the vCPU, which waits for
    /// [`Queue::answers`].
    #[must_use]
    pub fn leave(&self) -> bool {
        self.inside.fetch_sub(1, SeqCst);
        let is_awaited = self.is_awaited.load(SeqCst) != 0;
        if is_awaited {
            self.answers.fetch_add(1, SeqCst);
        }
        is_awaited
    }

    /// Waits for requests. `wait` blocks until [`Queue::calls`] differs from the value that it is
    /// passed, or returns early.
    pub fn sleep(&self, wait: impl FnOnce(&AtomicU32, u32)) {
        let seen = self.calls.load(SeqCst);
        self.sleepers.fetch_add(1, SeqCst);
        if self.waiting.load(SeqCst) == 0 {
            wait(&self.calls, seen);
        }
        self.sleepers.fetch_sub(1, SeqCst);
    }

    /// Completes a taken request; returns whether to wake the vCPU, which waits for
    /// [`Queue::answers`].
    pub fn end(&self, id: usize, status: u8) -> bool {
        let request = &self.requests[id % REQUESTS];
        request.status.store(status, Relaxed);
        request.order.store(self.answers.load(SeqCst), Relaxed);
        self.done.fetch_or(1 << (id % REQUESTS), SeqCst);
        self.answers.fetch_add(1, SeqCst);
        self.is_awaited.load(SeqCst) != 0
    }
}

/// The vCPU's side of a queue.
#[derive(Debug)]
pub struct Client<'a> {
    /// Shared queue.
    pub queue: &'a Queue,
    /// Requests in flight, one bit each.
    outside: u64,
    /// Requests of these that are complete and not reported.
    done: u64,
}

impl<'a> Client<'a> {
    /// Creates a client without requests.
    pub fn new(queue: &'a Queue) -> Self {
        Self { queue, outside: 0, done: 0 }
    }

    /// Returns the slot of a request that was not submitted yet.
    pub fn request(&self, id: u16) -> Option<&'a Request> {
        self.queue.requests.get(usize::from(id))
    }

    /// Submits a request, as [`Queue::give`].
    pub fn give(&mut self, id: u16) -> bool {
        self.outside |= 1 << (usize::from(id) % REQUESTS);
        self.queue.give(id.into())
    }

    /// Returns the next completed request that was not reported, in the order of completion.
    pub fn completed(&mut self) -> Option<(u16, &'a Request)> {
        self.done |= self.queue.done.swap(0, SeqCst) & self.outside;
        let answers = self.queue.answers.load(SeqCst);
        let age =
            |id: &usize| answers.wrapping_sub(self.queue.requests[*id].order.load(Relaxed)) as i32;
        let done = (0..REQUESTS).filter(|id| self.done >> id & 1 != 0);
        let id = done.max_by_key(age)?;
        self.done &= !(1 << id);
        Some((id as u16, &self.queue.requests[id]))
    }

    /// Frees the slot of a reported request.
    pub fn finish(&mut self, id: u16) {
        self.outside &= !(1 << (usize::from(id) % REQUESTS));
    }

    /// Reclaims all requests once no worker owns any, so that no memory is written late. `wait` is
    /// as in [`Queue::sleep`], for [`Queue::answers`].
    pub fn forget(&mut self, wait: impl Fn(&AtomicU32, u32)) {
        let queue = self.queue;
        // Requests that no worker has taken are cancelled.
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
            wait(&queue.answers, answers);
        }
        queue.is_awaited.store(0, SeqCst);
    }

    /// Abandons all requests without waiting for their completion: workers may still carry them
    /// out, but do not write memory nor complete them. For workers that use [`Queue::enter`];
    /// `wait` is as in [`Client::forget`].
    pub fn abandon(&mut self, wait: impl Fn(&AtomicU32, u32)) {
        let queue = self.queue;
        // Order matters: a worker that sees the new epoch finds no request of the old one.
        queue.waiting.store(0, SeqCst);
        queue.epoch.fetch_add(1, SeqCst);
        queue.is_awaited.store(1, SeqCst);
        loop {
            let answers = queue.answers.load(SeqCst);
            if queue.inside.load(SeqCst) == 0 {
                break;
            }
            wait(&queue.answers, answers);
        }
        queue.is_awaited.store(0, SeqCst);
        queue.done.store(0, SeqCst);
        (self.outside, self.done) = (0, 0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn queue() -> &'static Queue {
        Box::leak(Box::new(Queue::new()))
    }

    #[test]
    fn requests_go_in_a_circle() {
        let (queue, mut next) = (queue(), 0);
        assert_eq!(queue.take(&mut next), None);
        assert!(!queue.give(63) && !queue.give(5) && !queue.give(7));
        assert_eq!((queue.take(&mut next), queue.take(&mut next)), (Some(5), Some(7)));
        queue.give(5);
        assert_eq!((queue.take(&mut next), queue.take(&mut next)), (Some(63), Some(5)));
        queue.sleep(|calls, seen| assert_eq!((calls.load(Relaxed), seen), (4, 4)));
        queue.give(1);
        queue.sleep(|_, _| panic!("a request waits"));
    }

    #[test]
    fn a_poller_takes_one_request_without_a_wake() {
        let queue = queue();
        queue.sleepers.store(1, SeqCst);
        assert!(queue.give(0));
        assert_eq!(queue.take(&mut 0), Some(0));
        queue.poll(|| {
            assert!(!queue.give(1), "the poller takes it");
            assert!(queue.give(2), "the poller takes another one");
        });
        assert!(queue.is_short_of_workers());
        assert!(queue.claim(1) && queue.claim(2) && !queue.is_short_of_workers());
        assert!(queue.give(3), "the poller has stopped");
    }

    #[test]
    fn a_request_given_to_a_poller_with_another_one_is_noticed() {
        let queue = queue();
        queue.sleepers.store(1, SeqCst);
        queue.poll(|| {
            assert!(!queue.give(0));
            assert_eq!(queue.take(&mut 0), Some(0));
            assert!(!queue.give(1));
        });
        assert!(queue.is_short_of_workers());
        queue.sleepers.store(0, SeqCst);
        assert!(!queue.is_short_of_workers(), "who is awake looks for requests before it sleeps");
    }

    #[test]
    fn requests_end_once() {
        let queue = queue();
        let mut client = Client::new(queue);
        client.give(3);
        // The guest marks all requests complete.
        queue.done.store(!0, SeqCst);
        assert_eq!(client.completed().map(|(id, _)| id), Some(3));
        assert!(client.completed().is_none());
        client.finish(3);
        queue.end(3, status::DONE);
        assert!(client.completed().is_none());
    }

    #[test]
    fn requests_are_reported_as_they_end() {
        let queue = queue();
        // The counter of completions wraps.
        queue.answers.store(u32::MAX - 1, SeqCst);
        let mut client = Client::new(queue);
        let order = [9, 63, 0, 17, 4];
        for id in order {
            client.give(id);
            assert!(queue.claim(id.into()) && !queue.claim(id.into()));
            queue.end(id.into(), status::DONE);
        }
        let reported = core::array::from_fn(|_| client.completed().map_or(99, |(id, _)| id));
        assert_eq!(reported, order);
        assert!(client.completed().is_none());
    }

    #[test]
    fn a_worker_is_waited_for() {
        let queue = queue();
        let mut client = Client::new(queue);
        client.give(0);
        client.give(1);
        let taken = queue.take(&mut 0).unwrap();
        let waits = AtomicU32::new(0);
        client.forget(|answers, seen| {
            assert_eq!(answers.load(Relaxed), seen);
            waits.fetch_add(1, Relaxed);
            assert!(queue.end(taken, status::DONE), "the vCPU waits");
        });
        assert_eq!((waits.load(Relaxed), queue.take(&mut 0)), (1, None));
        assert!(client.completed().is_none());
    }

    #[test]
    fn requests_are_abandoned() {
        let queue = queue();
        let mut client = Client::new(queue);
        client.give(0);
        client.give(1);
        assert_eq!(queue.enter(), 0);
        assert_eq!(queue.take(&mut 0), Some(0));
        // A worker is inside for a moment.
        let waits = AtomicU32::new(0);
        client.abandon(|answers, seen| {
            assert_eq!(answers.load(Relaxed), seen);
            waits.fetch_add(1, Relaxed);
            queue.end(0, status::DONE);
            assert!(queue.leave(), "the vCPU waits");
        });
        assert_eq!((waits.load(Relaxed), queue.take(&mut 0)), (1, None));
        assert_eq!(queue.enter(), 1);
        assert!(!queue.leave() && client.completed().is_none());
    }
}
