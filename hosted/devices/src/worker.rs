//! Request loop of a device process: requests in shared memory, data in guest memory.

use std::io;
use std::os::fd::{FromRawFd, OwnedFd};
use std::sync::atomic::Ordering::{Relaxed, SeqCst};
use std::sync::atomic::{AtomicBool, AtomicU32};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use proto::hosted::counters::{DeviceCounters, EndedRequests, VmCounters};
use proto::hosted::idle::IdleRecords;
use proto::hosted::{MAX_QUEUES, layout};
use proto::requests::{PARTS, Queue, REQUESTS, Request, op};
use rustix::fs::Timespec;
use rustix::thread::futex;
use vmm_mem::GuestMemory;
use vmm_mem::shared::SharedMemory;

use crate::threads::Threads;

mod notify;
mod poll;
use notify::Notifier;
use poll::Polling;

/// Byte that a process writes to standard output once it serves requests; otherwise it writes the
/// reason of its failure.
pub const READY: u8 = 0;

/// Guest memory and request queue of a device process. It has the descriptors of [`layout`]: guest
/// memory, shared memory, the doorbell and the counters.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct GuestQueue {
    /// Guest memory in bytes.
    pub memory: u64,
    /// Index of the request queue.
    pub queue: usize,
}

/// Mapped memory and doorbell of a device process.
#[derive(Debug)]
pub struct Worker {
    guest: SharedMemory,
    shared: SharedMemory,
    counters: SharedMemory,
    doorbell: OwnedFd,
    machine: GuestQueue,
    polling: Polling,
}

/// Segment of guest memory: address and length. The address is not validated.
pub type Segment = (u64, u32);

/// A request, copied out of shared memory.
#[derive(Debug)]
pub struct TakenRequest<'a> {
    /// Operation: see [`proto::requests::op`].
    pub op: u32,
    /// Segments of its data.
    pub parts: Vec<Segment>,
    /// First sector.
    pub sector: u64,
    /// [`Request::count`].
    pub count: u32,
    request: &'a Request,
    queue: &'a Queue,
    /// [`Queue::epoch`] when it was taken.
    epoch: u32,
    memory: &'a GuestMemory,
}

impl TakenRequest<'_> {
    /// Reads all these segments from guest memory, if they have at most `most` bytes.
    pub fn read(&self, parts: &[Segment], most: usize) -> Option<Vec<u8>> {
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

    /// Reads from the beginning of these segments into `to`, as far as it has room; returns the
    /// number of bytes.
    pub fn read_into(&self, parts: &[Segment], to: &mut [u8]) -> usize {
        let mut done = 0;
        for &(address, length) in parts {
            let now = (to.len() - done).min(length as usize);
            if self.memory.read_slice(address, &mut to[done..done + now]).is_err() {
                break;
            }
            done += now;
        }
        done
    }

    /// Writes bytes to these segments of guest memory, as far as they have room. For an abandoned
    /// request, nothing is written.
    pub fn write(&self, parts: &[Segment], bytes: &[u8]) -> Option<()> {
        within(self.queue, |epoch| {
            let mut rest = bytes;
            for &(address, length) in parts.iter().filter(|_| epoch == self.epoch) {
                let (now, later) = rest.split_at(rest.len().min(length as usize));
                self.memory.write_slice(address, now).ok()?;
                rest = later;
            }
            Some(())
        })
    }

    /// Returns the bytes of all segments.
    pub fn length(&self) -> usize {
        length(&self.parts)
    }

    /// Sets the length of the answer.
    pub fn set_answer(&self, length: u32) {
        within(self.queue, |epoch| {
            if epoch == self.epoch {
                self.request.answer.store(length, Relaxed);
            }
        });
    }
}

fn length(parts: &[Segment]) -> usize {
    parts.iter().map(|part| part.1 as usize).sum()
}

/// Ordering of a request's answer relative to others.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum AnswerOrder {
    /// None.
    Free,
    /// The request has a tag that another one may refer to.
    Named(u16),
    /// It is answered after the request with this tag, if there is one.
    After(u16),
}

/// Executed request.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Executed {
    /// Status for the driver.
    pub status: u8,
    /// Index of its counters ([`proto::hosted::counters::op`]); `None`: the guest has made up the
    /// operation.
    pub op: Option<usize>,
    /// Length of its data in bytes.
    pub bytes: u64,
    /// The guest gets an error.
    pub is_failed: bool,
}

/// Device that executes requests, several in parallel.
pub trait Serve: Send + Sync {
    /// Executes a request. It may block on the host.
    fn execute(&self, taken: &TakenRequest<'_>) -> Executed;

    /// Returns the ordering of a request. It must not block.
    fn order(&self, _: &TakenRequest<'_>) -> AnswerOrder {
        AnswerOrder::Free
    }

    /// Runs once no request has ended for [`IDLE_DELAY`].
    fn idle(&self) {}

    /// Runs at the end of the process. `is_drained`: no request is in progress.
    fn close(&self, _is_settled: bool) {}
}

/// Delay before [`Serve::idle`].
const IDLE_DELAY: Duration = Duration::from_millis(200);
/// Polling interval for the end of an idle process, in case the signal is missed. `parador run`
/// repeats the signal.
const POLL_INTERVAL: Duration = Duration::from_secs(30);
/// Time limit at the end for requests in progress. The process is killed after a longer time.
const TIMEOUT: Duration = Duration::from_secs(2);

impl Worker {
    /// Takes over the descriptors and maps memory.
    ///
    /// # Errors
    /// The descriptors are not those of a VM.
    pub fn new(machine: GuestQueue) -> io::Result<Self> {
        if machine.queue >= MAX_QUEUES {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        let own = |number: u32| {
            // SAFETY: `parador run` starts the program with these descriptors, and no other code of
            // it uses them.
            unsafe { OwnedFd::from_raw_fd(number as i32) }
        };
        Ok(Self {
            guest: SharedMemory::open(own(layout::MEMORY_FD), machine.memory)?,
            shared: SharedMemory::open(own(layout::SHARED_FD), layout::SHARED_LENGTH)?,
            counters: SharedMemory::open(own(layout::COUNTERS_FD), layout::COUNTERS_LENGTH)?,
            doorbell: own(layout::DOORBELL_FD),
            machine,
            polling: Polling::new(),
        })
    }

    /// Reports READY on standard output and serves requests with these threads until `end`, which a
    /// signal sets.
    ///
    /// # Errors
    /// The size of guest memory is invalid.
    pub fn serve(
        self,
        served: impl Serve + 'static,
        threads: &Threads,
        end: &AtomicBool,
    ) -> io::Result<()> {
        rustix::io::write(rustix::stdio::stdout(), &[READY])?;
        // Leaked, because the threads are never joined and use it until the end of the process.
        let Self { guest, shared, counters, doorbell, machine, polling } = self;
        let (guest, shared) = (Box::leak(Box::new(guest)), Box::leak(Box::new(shared)));
        let counters = Box::leak(Box::new(counters)).at(0, size_of::<VmCounters>() as u64)?;
        // SAFETY: the counters lie in the mapping, which is never undone, at its beginning; all of
        // them are atomic, with no invalid value.
        let counters = unsafe { &*counters.cast::<VmCounters>() }.queue(machine.queue);
        let offset = layout::QUEUES + (machine.queue * size_of::<Queue>()) as u64;
        let queue = shared.at(offset, size_of::<Queue>() as u64)?;
        // SAFETY: the queue lies in the mapping, which is never undone; it is page-aligned memory
        // at a multiple of its size, and all of it is atomic, with no invalid value.
        let queue = unsafe { &*queue.cast::<Queue>() };
        let vcpus = shared.at(layout::IDLE, size_of::<IdleRecords>() as u64)?;
        // SAFETY: as the queue.
        let vcpus = unsafe { &*vcpus.cast::<IdleRecords>() };
        let hole = vmm_machine::layout_with_pci().hole_start;
        // The copied handle refers to memory that stays mapped and has no other user.
        let memory = guest.with(vmm_boot::ram_ranges(machine.memory, hole), |memory| *memory)?;
        let notifier = Notifier { vcpus, doorbell };
        let service = Service::new(queue, counters, memory, notifier, polling, Box::new(served));
        let service = Arc::new(service);
        let work = service.clone();
        threads.run(move || work.work());
        service.watch(end);
        Ok(())
    }
}

/// Requests in progress, by ID.
struct InFlight {
    /// [`Queue::epoch`] of the requests.
    epoch: u32,
    /// Start of the next search.
    next: u32,
    /// Bit mask of the requests.
    busy: u64,
    /// Threads that wait until there are none.
    waiters: usize,
    names: [Option<u16>; REQUESTS],
    /// Completions that an answer waits for: of the request itself, and of the one that it refers
    /// to.
    pending: [u8; REQUESTS],
    /// Bit masks of the requests that are answered after this one.
    followers: [u64; REQUESTS],
    statuses: [u8; REQUESTS],
    /// Taken requests that no thread has started.
    taken: Vec<usize>,
}

/// A queue whose requests are executed by several threads.
///
/// Each thread takes a request, executes it, and answers. A request that blocks on the host
/// occupies its thread only; when all threads are occupied, requests stay in the queue, and then in
/// the driver's.
struct Service {
    queue: &'static Queue,
    counters: &'static DeviceCounters,
    memory: GuestMemory,
    notifier: Notifier,
    polling: Polling,
    served: Box<dyn Serve>,
    in_flight: Mutex<InFlight>,
    /// Signalled when no request is in progress.
    drained: Condvar,
    /// Number of answers.
    answered: AtomicU32,
    /// A thread waits for [`Service::answered`].
    is_watched: AtomicBool,
    is_over: AtomicBool,
}

impl Service {
    fn new(
        queue: &'static Queue,
        counters: &'static DeviceCounters,
        memory: GuestMemory,
        notifier: Notifier,
        polling: Polling,
        served: Box<dyn Serve>,
    ) -> Self {
        let in_flight = InFlight {
            epoch: 0,
            next: 0,
            busy: 0,
            waiters: 0,
            names: [None; REQUESTS],
            pending: [0; REQUESTS],
            followers: [0; REQUESTS],
            statuses: [0; REQUESTS],
            taken: Vec::new(),
        };
        Self {
            queue,
            counters,
            memory,
            notifier,
            polling,
            served,
            in_flight: Mutex::new(in_flight),
            drained: Condvar::new(),
            answered: AtomicU32::new(0),
            is_watched: AtomicBool::new(false),
            is_over: AtomicBool::new(false),
        }
    }

    /// Not poisoned in practice: a panicking thread ends the process.
    fn in_flight(&self) -> MutexGuard<'_, InFlight> {
        self.in_flight.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Loop of each thread.
    fn work(&self) {
        let mut has_polled = false;
        while !self.is_over.load(SeqCst) {
            let Some((id, taken)) = self.take_request() else {
                has_polled = self.polling.wait(self.queue, |calls, seen| wait(calls, seen, None));
                continue;
            };
            // This request may block for any time; those behind it have woken no thread.
            if std::mem::take(&mut has_polled) && self.queue.is_short_of_workers() {
                wake_one(&self.queue.calls);
            }
            self.complete(id, self.execute(&taken));
        }
    }

    /// Executes and counts a request; returns its status.
    fn execute(&self, taken: &TakenRequest<'_>) -> u8 {
        let began = Instant::now();
        let Executed { status, op, bytes, is_failed } = self.served.execute(taken);
        if let Some(op) = op {
            let time = u64::try_from(began.elapsed().as_nanos()).unwrap_or(u64::MAX);
            self.counters.ops[op].add(&EndedRequests::one(bytes, is_failed, Some(time)));
        }
        status
    }

    /// Takes a request; blocks until one is available in this epoch.
    fn take_request(&self) -> Option<(usize, TakenRequest<'_>)> {
        let mut in_flight = self.in_flight();
        loop {
            // Requests of an earlier epoch must end first: their late effects would overwrite those
            // of new ones.
            let is_over = |in_flight: &mut InFlight, epoch| {
                if epoch != in_flight.epoch {
                    in_flight.drop_unstarted();
                }
                epoch == in_flight.epoch || in_flight.busy == 0
            };
            let found = within(self.queue, |epoch| {
                is_over(&mut in_flight, epoch).then(|| self.find(&mut in_flight, epoch))
            });
            match found {
                Some(found) => return found,
                None => {
                    in_flight.waiters += 1;
                    let flown = self.drained.wait(in_flight);
                    in_flight = flown.unwrap_or_else(PoisonError::into_inner);
                    in_flight.waiters -= 1;
                }
            }
        }
    }

    /// Takes a request of this epoch.
    fn find(&self, in_flight: &mut InFlight, epoch: u32) -> Option<(usize, TakenRequest<'_>)> {
        in_flight.epoch = epoch;
        if let Some(id) = in_flight.taken.pop() {
            return Some((id, self.read(id, epoch)));
        }
        loop {
            let id = self.queue.take(&mut in_flight.next)?;
            // A request that the guest submits twice is taken once.
            if in_flight.busy >> id & 1 != 0 {
                continue;
            }
            let taken = self.read(id, epoch);
            let order = self.served.order(&taken);
            in_flight.enter(id, order);
            if let AnswerOrder::After(name) = order
                && let Some(first) = in_flight.find(name).or_else(|| self.claim(name, in_flight))
            {
                in_flight.follow(first, id);
            }
            return Some((id, taken));
        }
    }

    /// Takes the request with this tag, if it is still queued. Otherwise a later request would
    /// overtake it.
    fn claim(&self, name: u16, in_flight: &mut InFlight) -> Option<usize> {
        let order = AnswerOrder::Named(name);
        let waits = |id: usize| {
            in_flight.busy >> id & 1 == 0
                && self.queue.waiting.load(SeqCst) >> id & 1 != 0
                && self.served.order(&self.read(id, in_flight.epoch)) == order
                && self.queue.claim(id)
        };
        let id = (0..REQUESTS).find(|&id| waits(id))?;
        in_flight.enter(id, order);
        // This thread starts it next.
        in_flight.taken.push(id);
        Some(id)
    }

    /// Copies a request; each value is read once.
    fn read(&self, id: usize, epoch: u32) -> TakenRequest<'_> {
        let request = &self.queue.requests[id];
        let used = (request.used.load(Relaxed) as usize).min(PARTS);
        let parts = request.parts[..used].iter();
        TakenRequest {
            op: request.op.load(Relaxed),
            parts: parts
                .map(|part| (part.address.load(Relaxed), part.length.load(Relaxed)))
                .collect(),
            sector: request.sector.load(Relaxed),
            count: request.count.load(Relaxed),
            request,
            queue: self.queue,
            epoch,
            memory: &self.memory,
        }
    }

    /// Completes a request.
    fn complete(&self, id: usize, status: u8) {
        let mut in_flight = self.in_flight();
        in_flight.statuses[id] = status;
        let is_awaited = within(self.queue, |epoch| {
            let mut is_awaited = false;
            // One after the other: the driver sees them in this order.
            for id in [id].into_iter().chain(bits(in_flight.leave(id))) {
                if in_flight.answer(id) {
                    if epoch == in_flight.epoch {
                        is_awaited |= self.queue.end(id, in_flight.statuses[id]);
                    }
                    self.answered.fetch_add(1, SeqCst);
                }
            }
            is_awaited
        });
        if in_flight.busy == 0 && in_flight.waiters != 0 {
            self.drained.notify_all();
        }
        drop(in_flight);
        if is_awaited {
            wake_all(&self.queue.answers);
        }
        self.notifier.notify(self.queue, wake_all);
        if self.is_watched.swap(false, SeqCst) {
            wake_all(&self.answered);
        }
    }

    /// Waits until the number of answers differs from `seen`.
    fn await_answer(&self, seen: u32, limit: Duration) {
        self.is_watched.store(true, SeqCst);
        wait(&self.answered, seen, Some(limit));
        self.is_watched.store(false, SeqCst);
    }

    /// Loop of the main thread: detects idleness and the end.
    fn watch(&self, end: &AtomicBool) {
        let nothing = AtomicU32::new(0);
        let mut idle_since = 0;
        while !end.load(SeqCst) {
            let seen = self.answered.load(SeqCst);
            if seen == idle_since {
                self.await_answer(seen, POLL_INTERVAL);
                continue;
            }
            // A signal ends the wait early, which is harmless.
            wait(&nothing, 0, Some(IDLE_DELAY));
            if self.answered.load(SeqCst) == seen {
                self.served.idle();
                idle_since = seen;
            }
        }
        self.is_over.store(true, SeqCst);
        let until = Instant::now() + TIMEOUT;
        let is_drained = loop {
            let seen = self.answered.load(SeqCst);
            let pending = until.saturating_duration_since(Instant::now());
            let is_drained = self.in_flight().busy == 0;
            if is_drained || pending.is_zero() {
                break is_drained;
            }
            self.await_answer(seen, pending);
        };
        self.served.close(is_drained);
    }
}

impl InFlight {
    /// Drops taken requests that no thread has started.
    fn drop_unstarted(&mut self) {
        for id in std::mem::take(&mut self.taken) {
            for id in [id].into_iter().chain(bits(self.leave(id))) {
                self.answer(id);
            }
        }
    }

    /// Adds a request.
    fn enter(&mut self, id: usize, order: AnswerOrder) {
        self.busy |= 1 << id;
        self.pending[id] = 1;
        self.followers[id] = 0;
        self.names[id] = match order {
            AnswerOrder::Named(name) => Some(name),
            AnswerOrder::Free | AnswerOrder::After(_) => None,
        };
    }

    /// Returns the request with this tag.
    fn find(&self, name: u16) -> Option<usize> {
        bits(self.busy).find(|&id| self.names[id] == Some(name))
    }

    /// Delays the answer of `id` until `first` has ended.
    fn follow(&mut self, first: usize, id: usize) {
        self.followers[first] |= 1 << id;
        self.pending[id] += 1;
    }

    /// Returns the requests that waited for `id`.
    fn leave(&mut self, id: usize) -> u64 {
        self.names[id] = None;
        std::mem::take(&mut self.followers[id])
    }

    /// Records one of the completions that an answer waits for; returns whether it was the last.
    fn answer(&mut self, id: usize) -> bool {
        self.pending[id] -= 1;
        if self.pending[id] == 0 {
            self.busy &= !(1 << id);
        }
        self.pending[id] == 0
    }
}

/// Returns the indices of the set bits.
fn bits(word: u64) -> impl Iterator<Item = usize> {
    (0..REQUESTS).filter(move |&bit| word >> bit & 1 != 0)
}

/// Runs a short operation during which requests and guest memory are not withdrawn.
fn within<T>(queue: &Queue, act: impl FnOnce(u32) -> T) -> T {
    let epoch = queue.enter();
    let done = act(epoch);
    if queue.leave() {
        wake_all(&queue.answers);
    }
    done
}

/// Wakes one thread. Cannot fail for a mapped word.
fn wake_one(word: &AtomicU32) {
    let _ = futex::wake(word, futex::Flags::empty(), 1);
}

/// Cannot fail for a mapped word.
fn wake_all(word: &AtomicU32) {
    let _ = futex::wake(word, futex::Flags::empty(), u32::MAX >> 1);
}

fn wait(word: &AtomicU32, seen: u32, limit: Option<Duration>) {
    let limit = limit.map(|limit| Timespec {
        tv_sec: limit.as_secs() as i64,
        tv_nsec: limit.subsec_nanos().into(),
    });
    // Early returns are allowed. Another process wakes threads that wait for requests.
    let _ = futex::wait(word, futex::Flags::empty(), seen, limit.as_ref());
}

/// Splits the segments of a message into request and answer.
pub fn split<'a>(taken: &'a TakenRequest<'_>) -> Option<(&'a [Segment], &'a [Segment])> {
    if taken.op != op::MESSAGE {
        return None;
    }
    taken.parts.split_at_checked(taken.count as usize)
}

#[cfg(test)]
pub mod testing {
    //! Driver and threads for tests of a device.

    use super::*;
    use proto::hosted::idle::IdleRecord;
    use proto::requests::{Client, op};
    use std::fs::File;

    /// Time limit of a test.
    pub const LIMIT: Duration = Duration::from_secs(60);

    pub struct Rig {
        pub client: Client<'static>,
        pub memory: GuestMemory,
        pub counters: &'static DeviceCounters,
        pub vcpus: &'static IdleRecords,
        service: Arc<Service>,
    }

    impl Rig {
        pub fn new(served: impl Serve + 'static, threads: usize) -> Self {
            let queue: &Queue = Box::leak(Box::new(Queue::new()));
            let memory = vmm_mem::testing::memory(&[(0, 1 << 20)]);
            let doorbell = File::options().write(true).open("/dev/null").unwrap().into();
            let counters: &DeviceCounters = Box::leak(Box::default());
            let vcpus: &IdleRecords =
                Box::leak(Box::new(std::array::from_fn(|_| IdleRecord::new())));
            let notifier = Notifier { vcpus, doorbell };
            let (polling, served) = (Polling::new(), Box::new(served));
            let service = Service::new(queue, counters, memory, notifier, polling, served);
            let service = Arc::new(service);
            let work = service.clone();
            Threads::start(threads).unwrap().run(move || work.work());
            Self { client: Client::new(queue), memory, counters, vcpus, service }
        }

        /// Submits a request with these segments; `count` is as [`Request::count`].
        pub fn submit(&mut self, id: u16, op: u32, sector: u64, parts: &[Segment], count: u32) {
            let request = self.client.request(id).unwrap();
            request.op.store(op, Relaxed);
            request.sector.store(sector, Relaxed);
            request.count.store(count, Relaxed);
            request.used.store(parts.len() as u32, Relaxed);
            for (place, part) in request.parts.iter().zip(parts) {
                place.address.store(part.0, Relaxed);
                place.length.store(part.1, Relaxed);
            }
            if self.client.give(id) {
                let _ = futex::wake(&self.client.queue.calls, futex::Flags::empty(), 1);
            }
        }

        /// Submits a message; it and its answer have a page each.
        pub fn say(&mut self, id: u16, message: &[u8]) {
            let place = u64::from(id) << 13;
            self.memory.write_slice(place, message).unwrap();
            let parts = [(place, message.len() as u32), (place + 4096, 4096)];
            self.submit(id, op::MESSAGE, 0, &parts, 1);
        }

        /// Returns the next completed request and its status.
        pub fn ended(&mut self) -> (u16, u8) {
            let until = Instant::now() + LIMIT;
            while Instant::now() < until {
                let seen = self.client.queue.answers.load(SeqCst);
                if let Some((id, request)) = self.client.completed() {
                    self.client.finish(id);
                    return (id, request.status.load(Relaxed));
                }
                wait(&self.client.queue.answers, seen, Some(Duration::from_millis(10)));
            }
            panic!("no request ends");
        }

        /// Does what the driver does at a device reset.
        pub fn abandon(&mut self) {
            self.client.abandon(|answers, seen| wait(answers, seen, Some(LIMIT)));
        }

        /// Wakes the main thread, as a signal does.
        pub fn signal(&self) {
            self.service.answered.fetch_add(1, SeqCst);
            wake_all(&self.service.answered);
        }

        /// Runs the loop of the main thread.
        pub fn watch(&self, end: &AtomicBool) {
            self.service.watch(end);
        }
    }
}

#[cfg(test)]
mod tests;
