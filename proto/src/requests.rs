//! Requests of a machine's virtual CPU to processes of its host: disks, shared directories.
//!
//! The virtual CPU leaves requests in memory that it shares with workers, as parts of guest memory. A request is one of a set. Invariants: a
//! request's slot belongs to the virtual CPU until its bit is in [`Queue::waiting`], to the worker that takes the bit out until it is in
//! [`Queue::done`], then to the virtual CPU again. The guest can write anything there, so a worker reads each value once and believes none.
//!
//! Waiting and waking is the host's affair: a word that is waited for counts up before somebody is woken.

use core::sync::atomic::{AtomicU8, AtomicU32, AtomicU64, Ordering::Relaxed, Ordering::SeqCst};

/// Requests at a time; each is a bit of a word.
pub const REQUESTS: usize = 64;
/// Most parts of a request, as many as a chain of the device models has.
pub const PARTS: usize = 128;

/// Operations, as [`Request::op`] has them.
pub mod op {
    /// Sectors to the parts.
    pub const READ: u32 = 0;
    /// Sectors from the parts.
    pub const WRITE: u32 = 1;
    /// All that was written before is to last.
    pub const FLUSH: u32 = 2;
    /// The content of sectors is not needed.
    pub const DISCARD: u32 = 3;
    /// Zeros that take room.
    pub const ZERO: u32 = 4;
    /// Zeros that need not.
    pub const UNMAP: u32 = 5;
    /// A message in the first parts, [`Request::count`](super::Request::count) of them; the answer goes to the others.
    pub const MESSAGE: u32 = 6;
}

/// How requests end.
pub mod status {
    /// Done.
    pub const DONE: u8 = 0;
    /// Failed.
    pub const FAILED: u8 = 1;
    /// Nobody can do this.
    pub const UNSUPPORTED: u8 = 2;
}

/// A part of guest memory.
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
    /// What is to be done: see [`op`].
    pub op: AtomicU32,
    /// Parts that are used.
    pub used: AtomicU32,
    /// First sector.
    pub sector: AtomicU64,
    /// Sectors, where there are no parts; parts of a message.
    pub count: AtomicU32,
    /// How it ended: see [`status`].
    pub status: AtomicU8,
    /// Bytes of an answer.
    pub answer: AtomicU32,
    /// What [`Queue::answers`] was when it ended.
    pub order: AtomicU32,
    /// Where its data is.
    pub parts: [Part; PARTS],
}

/// The requests to one device.
#[repr(C)]
#[derive(Debug)]
pub struct Queue {
    /// Requests that no worker has taken.
    pub waiting: AtomicU64,
    /// Requests that are done.
    pub done: AtomicU64,
    /// Counts up with each request.
    pub calls: AtomicU32,
    /// Workers that wait for [`Queue::calls`].
    pub sleepers: AtomicU32,
    /// Counts up with each request that is done.
    pub answers: AtomicU32,
    /// The virtual CPU waits for [`Queue::answers`].
    pub is_awaited: AtomicU32,
    /// A worker that cannot tell the virtual CPU has pending, so that the device process does.
    pub pending: AtomicU32,
    /// A failure of the host has been told.
    pub warned: AtomicU32,
    /// Counts up when the virtual CPU abandons all requests.
    pub epoch: AtomicU32,
    /// Workers that are between [`Queue::enter`] and [`Queue::leave`].
    pub inside: AtomicU32,
    /// The requests.
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
    /// Without requests, as memory of zeros is.
    #[expect(clippy::new_without_default, reason = "it is too large for a stack")]
    pub const fn new() -> Self {
        Self {
            waiting: AtomicU64::new(0),
            done: AtomicU64::new(0),
            calls: AtomicU32::new(0),
            sleepers: AtomicU32::new(0),
            answers: AtomicU32::new(0),
            is_awaited: AtomicU32::new(0),
            pending: AtomicU32::new(0),
            warned: AtomicU32::new(0),
            epoch: AtomicU32::new(0),
            inside: AtomicU32::new(0),
            requests: [const { Request::new() }; REQUESTS],
        }
    }

    /// Gives a request to the workers; whether one is to be woken, who waits for [`Queue::calls`].
    pub fn give(&self, id: usize) -> bool {
        self.waiting.fetch_or(1 << (id % REQUESTS), SeqCst);
        self.calls.fetch_add(1, SeqCst);
        self.sleepers.load(SeqCst) != 0
    }

    /// Takes a request, if one waits: the next one in a circle from `next` on, so that none waits for ever. Several workers may ask at once.
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

    /// Takes this request, if it waits.
    pub fn claim(&self, id: usize) -> bool {
        let bit = 1 << (id % REQUESTS);
        self.waiting.fetch_and(!bit, SeqCst) & bit != 0
    }

    /// Begins a short piece of work with requests or the memory that they name, for workers whose requests can be abandoned. Gives the epoch,
    /// which stays what it is for the requests that are taken until [`Queue::leave`]; those of an earlier epoch are not to be touched.
    pub fn enter(&self) -> u32 {
        self.inside.fetch_add(1, SeqCst);
        self.epoch.load(SeqCst)
    }

    /// Ends what [`Queue::enter`] began; whether somebody is to be woken, who waits for [`Queue::answers`].
    #[must_use]
    pub fn leave(&self) -> bool {
        self.inside.fetch_sub(1, SeqCst);
        let is_awaited = self.is_awaited.load(SeqCst) != 0;
        if is_awaited {
            self.answers.fetch_add(1, SeqCst);
        }
        is_awaited
    }

    /// Waits for requests with `wait`, which returns when [`Queue::calls`] has another value than the one that it is given, or earlier.
    pub fn sleep(&self, wait: impl FnOnce(&AtomicU32, u32)) {
        let seen = self.calls.load(SeqCst);
        self.sleepers.fetch_add(1, SeqCst);
        if self.waiting.load(SeqCst) == 0 {
            wait(&self.calls, seen);
        }
        self.sleepers.fetch_sub(1, SeqCst);
    }

    /// A request that was taken has ended; whether somebody is to be woken, who waits for [`Queue::answers`].
    pub fn end(&self, id: usize, status: u8) -> bool {
        let request = &self.requests[id % REQUESTS];
        request.status.store(status, Relaxed);
        request.order.store(self.answers.load(SeqCst), Relaxed);
        self.done.fetch_or(1 << (id % REQUESTS), SeqCst);
        self.answers.fetch_add(1, SeqCst);
        self.is_awaited.load(SeqCst) != 0
    }
}

/// The virtual CPU's side of a queue.
#[derive(Debug)]
pub struct Client<'a> {
    /// The queue.
    pub queue: &'a Queue,
    /// Requests that are not finished.
    outside: u64,
    /// Those of them that are done and have not been reported.
    done: u64,
}

impl<'a> Client<'a> {
    /// Without requests.
    pub fn new(queue: &'a Queue) -> Self {
        Self { queue, outside: 0, done: 0 }
    }

    /// The slot of a request that is not given yet.
    pub fn request(&self, id: u16) -> Option<&'a Request> {
        self.queue.requests.get(usize::from(id))
    }

    /// As [`Queue::give`].
    pub fn give(&mut self, id: u16) -> bool {
        self.outside |= 1 << (usize::from(id) % REQUESTS);
        self.queue.give(id.into())
    }

    /// The next request that has ended and has not been reported, in the order in which they have ended.
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

    /// A request that was reported is over.
    pub fn finish(&mut self, id: u16) {
        self.outside &= !(1 << (usize::from(id) % REQUESTS));
    }

    /// Takes all requests back, when no worker has any: no memory is written late. `wait` is as in [`Queue::sleep`], for [`Queue::answers`].
    pub fn forget(&mut self, wait: impl Fn(&AtomicU32, u32)) {
        let queue = self.queue;
        // What no worker has begun need not begin.
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

    /// Gives all requests up, without waiting for their ends: workers may be carrying them out, but write no memory and answer nothing any more.
    /// For workers that use [`Queue::enter`]; `wait` is as in [`Client::forget`].
    pub fn abandon(&mut self, wait: impl Fn(&AtomicU32, u32)) {
        let queue = self.queue;
        // In this order: who sees the new epoch finds no request of the old one.
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
    fn requests_end_once() {
        let queue = queue();
        let mut client = Client::new(queue);
        client.give(3);
        // The guest says that others have ended, too.
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
        // The count of answers begins anew on the way.
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
            assert!(queue.end(taken, status::DONE), "somebody waits");
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
        // Somebody is at work, for a moment.
        let waits = AtomicU32::new(0);
        client.abandon(|answers, seen| {
            assert_eq!(answers.load(Relaxed), seen);
            waits.fetch_add(1, Relaxed);
            queue.end(0, status::DONE);
            assert!(queue.leave(), "somebody waits");
        });
        assert_eq!((waits.load(Relaxed), queue.take(&mut 0)), (1, None));
        assert_eq!(queue.enter(), 1);
        assert!(!queue.leave() && client.completed().is_none());
    }
}
