//! Requests in shared memory, and guest memory, as a process of another program has them.

use std::io;
use std::os::fd::{FromRawFd, OwnedFd};
use std::sync::atomic::Ordering::{Relaxed, SeqCst};
use std::sync::atomic::{AtomicBool, AtomicU32};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use proto::requests::{PARTS, Queue, REQUESTS, Request, op};
use proto::wedge::{MAX_QUEUES, layout};
use rustix::fs::Timespec;
use rustix::thread::futex;
use vmm_mem::GuestMemory;
use vmm_mem::shared::SharedMemory;

use crate::threads::Threads;

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
    queue: &'a Queue,
    /// [`Queue::epoch`] when it was taken.
    epoch: u32,
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

    /// Copies the first bytes of these parts, as many as there are and `to` has room for; gives their number.
    pub fn read_into(&self, parts: &[Part], to: &mut [u8]) -> usize {
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

    /// Copies bytes to guest memory, into these parts, as far as they have room. Of a request that was abandoned nothing is written.
    pub fn write(&self, parts: &[Part], bytes: &[u8]) -> Option<()> {
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

    /// Bytes of all parts.
    pub fn length(&self) -> usize {
        length(&self.parts)
    }

    /// The length of an answer.
    pub fn set_answer(&self, length: u32) {
        within(self.queue, |epoch| {
            if epoch == self.epoch {
                self.request.answer.store(length, Relaxed);
            }
        });
    }
}

fn length(parts: &[Part]) -> usize {
    parts.iter().map(|part| part.1 as usize).sum()
}

/// What a request says of the order of answers.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Order {
    /// Nothing.
    Free,
    /// It has a name, by which another may wait for it.
    Named(u16),
    /// It is answered after the request with this name, if there is one.
    After(u16),
}

/// What a process does with requests, several at a time.
pub trait Serve: Send + Sync {
    /// Carries a request out; gives its status. It may take as long as the host does.
    fn act(&self, taken: &Taken<'_>) -> u8;

    /// What a request says of the order of answers. It does not wait.
    fn order(&self, _: &Taken<'_>) -> Order {
        Order::Free
    }

    /// No request has ended for a moment since the last one.
    fn idle(&self) {}

    /// The process ends. `is_settled`: no request is being carried out any more.
    fn close(&self, _is_settled: bool) {}
}

/// How long a moment is.
const MOMENT: Duration = Duration::from_millis(200);
/// How often a process without requests looks whether it is to end, if it misses the signal.
const PAUSE: Duration = Duration::from_secs(1);
/// How long the end waits for requests that are being carried out. The process is killed later than that.
const PATIENCE: Duration = Duration::from_secs(2);

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

    /// Says on standard output that requests are served, and lets these threads serve them until `end`, which a signal sets.
    ///
    /// # Errors
    /// Guest memory makes no layout.
    pub fn serve(
        self,
        served: impl Serve + 'static,
        threads: &Threads,
        end: &AtomicBool,
    ) -> io::Result<()> {
        rustix::io::write(rustix::stdio::stdout(), &[READY])?;
        // What threads use lives as long as the process does, since nobody waits for them.
        let Self { guest, shared, doorbell, machine } = self;
        let (guest, shared) = (Box::leak(Box::new(guest)), Box::leak(Box::new(shared)));
        let offset = layout::QUEUES + (machine.queue * size_of::<Queue>()) as u64;
        let queue = shared.at(offset, size_of::<Queue>() as u64)?;
        // SAFETY: it lies in the mapping, which is never undone; it is page-aligned memory at a multiple of its size, and all of it is
        // atomic, with no value that is not allowed.
        let queue = unsafe { &*queue.cast::<Queue>() };
        let hole = vmm_machine::layout_with_pci().hole_start;
        // The copy is of memory that stays mapped and is used by nobody else.
        let memory = guest.with(vmm_boot::ram_ranges(machine.memory, hole), |memory| *memory)?;
        let service = Arc::new(Service::new(queue, memory, doorbell, Box::new(served)));
        let work = service.clone();
        threads.run(move || work.work());
        service.watch(end);
        Ok(())
    }
}

/// Requests that have been taken and not answered, each by its number.
struct Flights {
    /// What they are of: [`Queue::epoch`].
    epoch: u32,
    /// Where the next look begins.
    next: u32,
    /// Those that there are: a bit for each.
    busy: u64,
    names: [Option<u16>; REQUESTS],
    /// For how many ends an answer waits: the request's own, and that of the one that it names.
    left: [u8; REQUESTS],
    /// Those that are answered after this one.
    followers: [u64; REQUESTS],
    statuses: [u8; REQUESTS],
    /// Taken, and nobody has begun.
    taken: Vec<usize>,
}

/// A queue whose requests are carried out by several threads.
///
/// Each thread takes a request, carries it out, and answers. A request that waits for the host holds its thread up and nothing else; when
/// all threads are held up, requests stay in the queue, and then in the driver's.
struct Service {
    queue: &'static Queue,
    memory: GuestMemory,
    doorbell: OwnedFd,
    served: Box<dyn Serve>,
    flights: Mutex<Flights>,
    /// There are none any more.
    settled: Condvar,
    /// Counts answers up.
    answered: AtomicU32,
    /// Somebody waits for [`Service::answered`].
    is_watched: AtomicBool,
    is_over: AtomicBool,
}

impl Service {
    fn new(
        queue: &'static Queue,
        memory: GuestMemory,
        doorbell: OwnedFd,
        served: Box<dyn Serve>,
    ) -> Self {
        let flights = Flights {
            epoch: 0,
            next: 0,
            busy: 0,
            names: [None; REQUESTS],
            left: [0; REQUESTS],
            followers: [0; REQUESTS],
            statuses: [0; REQUESTS],
            taken: Vec::new(),
        };
        Self {
            queue,
            memory,
            doorbell,
            served,
            flights: Mutex::new(flights),
            settled: Condvar::new(),
            answered: AtomicU32::new(0),
            is_watched: AtomicBool::new(false),
            is_over: AtomicBool::new(false),
        }
    }

    /// A thread that panics ends the process.
    fn flights(&self) -> MutexGuard<'_, Flights> {
        self.flights.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What each thread does.
    fn work(&self) {
        while !self.is_over.load(SeqCst) {
            match self.begin() {
                Some((id, taken)) => self.end(id, self.served.act(&taken)),
                // It is woken for each request as long as somebody sleeps.
                None => self.queue.sleep(|calls, seen| wait(calls, seen, None)),
            }
        }
    }

    /// Takes a request.
    fn begin(&self) -> Option<(usize, Taken<'_>)> {
        let mut flights = self.flights();
        loop {
            // Those of an earlier epoch end before there are others, which their late effects would undo.
            let is_over = |flights: &mut Flights, epoch| {
                if epoch != flights.epoch {
                    flights.drop_unbegun();
                }
                epoch == flights.epoch || flights.busy == 0
            };
            let found = within(self.queue, |epoch| {
                is_over(&mut flights, epoch).then(|| self.find(&mut flights, epoch))
            });
            match found {
                Some(found) => return found,
                None => {
                    let flown = self.settled.wait(flights);
                    flights = flown.unwrap_or_else(PoisonError::into_inner);
                }
            }
        }
    }

    /// Takes a request of this epoch.
    fn find(&self, flights: &mut Flights, epoch: u32) -> Option<(usize, Taken<'_>)> {
        flights.epoch = epoch;
        if let Some(id) = flights.taken.pop() {
            return Some((id, self.read(id, epoch)));
        }
        loop {
            let id = self.queue.take(&mut flights.next)?;
            // Of a guest that says twice that a request is there, only the first is believed.
            if flights.busy >> id & 1 != 0 {
                continue;
            }
            let taken = self.read(id, epoch);
            let order = self.served.order(&taken);
            flights.enter(id, order);
            if let Order::After(name) = order
                && let Some(first) = flights.find(name).or_else(|| self.claim(name, flights))
            {
                flights.follow(first, id);
            }
            return Some((id, taken));
        }
    }

    /// Takes the request with this name, if it waits: who comes after it in the driver's queue has not overtaken it then.
    fn claim(&self, name: u16, flights: &mut Flights) -> Option<usize> {
        let order = Order::Named(name);
        let waits = |id: usize| {
            flights.busy >> id & 1 == 0
                && self.queue.waiting.load(SeqCst) >> id & 1 != 0
                && self.served.order(&self.read(id, flights.epoch)) == order
                && self.queue.claim(id)
        };
        let id = (0..REQUESTS).find(|&id| waits(id))?;
        flights.enter(id, order);
        // This thread looks there next.
        flights.taken.push(id);
        Some(id)
    }

    /// Reads a request, each value once.
    fn read(&self, id: usize, epoch: u32) -> Taken<'_> {
        let request = &self.queue.requests[id];
        let used = (request.used.load(Relaxed) as usize).min(PARTS);
        let parts = request.parts[..used].iter();
        Taken {
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

    /// A request has been carried out.
    fn end(&self, id: usize, status: u8) {
        let mut flights = self.flights();
        flights.statuses[id] = status;
        let is_awaited = within(self.queue, |epoch| {
            let mut is_awaited = false;
            // One after the other: the driver sees them in this order.
            for id in [id].into_iter().chain(bits(flights.leave(id))) {
                if flights.answer(id) {
                    if epoch == flights.epoch {
                        is_awaited |= self.queue.end(id, flights.statuses[id]);
                    }
                    self.answered.fetch_add(1, SeqCst);
                }
            }
            is_awaited
        });
        if flights.busy == 0 {
            self.settled.notify_all();
        }
        drop(flights);
        if is_awaited {
            wake_all(&self.queue.answers);
        }
        self.queue.pending.store(1, SeqCst);
        // The counter of the descriptor does not overflow: each look takes all of it.
        let _ = rustix::io::write(&self.doorbell, &1_u64.to_ne_bytes());
        if self.is_watched.swap(false, SeqCst) {
            wake_all(&self.answered);
        }
    }

    /// Waits for another answer than those `seen`.
    fn await_answer(&self, seen: u32, limit: Duration) {
        self.is_watched.store(true, SeqCst);
        wait(&self.answered, seen, Some(limit));
        self.is_watched.store(false, SeqCst);
    }

    /// What the process itself does beside its threads: notices when nothing is to be done, and the end.
    fn watch(&self, end: &AtomicBool) {
        let nothing = AtomicU32::new(0);
        let mut idle_since = 0;
        while !end.load(SeqCst) {
            let seen = self.answered.load(SeqCst);
            if seen == idle_since {
                self.await_answer(seen, PAUSE);
                continue;
            }
            // A signal ends it early, which does no harm.
            wait(&nothing, 0, Some(MOMENT));
            if self.answered.load(SeqCst) == seen {
                self.served.idle();
                idle_since = seen;
            }
        }
        self.is_over.store(true, SeqCst);
        let until = Instant::now() + PATIENCE;
        let is_settled = loop {
            let seen = self.answered.load(SeqCst);
            let left = until.saturating_duration_since(Instant::now());
            let is_settled = self.flights().busy == 0;
            if is_settled || left.is_zero() {
                break is_settled;
            }
            self.await_answer(seen, left);
        };
        self.served.close(is_settled);
    }
}

impl Flights {
    /// Nobody begins what has not been begun.
    fn drop_unbegun(&mut self) {
        for id in std::mem::take(&mut self.taken) {
            for id in [id].into_iter().chain(bits(self.leave(id))) {
                self.answer(id);
            }
        }
    }

    /// A request is taken.
    fn enter(&mut self, id: usize, order: Order) {
        self.busy |= 1 << id;
        self.left[id] = 1;
        self.followers[id] = 0;
        self.names[id] = match order {
            Order::Named(name) => Some(name),
            Order::Free | Order::After(_) => None,
        };
    }

    /// The request with this name.
    fn find(&self, name: u16) -> Option<usize> {
        bits(self.busy).find(|&id| self.names[id] == Some(name))
    }

    /// `id` is answered after `first`.
    fn follow(&mut self, first: usize, id: usize) {
        self.followers[first] |= 1 << id;
        self.left[id] += 1;
    }

    /// Those that need not wait for `id` any more.
    fn leave(&mut self, id: usize) -> u64 {
        self.names[id] = None;
        std::mem::take(&mut self.followers[id])
    }

    /// Something that an answer waits for has ended; whether it was the last.
    fn answer(&mut self, id: usize) -> bool {
        self.left[id] -= 1;
        if self.left[id] == 0 {
            self.busy &= !(1 << id);
        }
        self.left[id] == 0
    }
}

/// The bits of a word that are set.
fn bits(word: u64) -> impl Iterator<Item = usize> {
    (0..REQUESTS).filter(move |&bit| word >> bit & 1 != 0)
}

/// Something short that requests, or the memory that they name, must not be taken away from.
fn within<T>(queue: &Queue, act: impl FnOnce(u32) -> T) -> T {
    let epoch = queue.enter();
    let done = act(epoch);
    if queue.leave() {
        wake_all(&queue.answers);
    }
    done
}

/// It cannot fail with a mapped word.
fn wake_all(word: &AtomicU32) {
    let _ = futex::wake(word, futex::Flags::empty(), u32::MAX >> 1);
}

fn wait(word: &AtomicU32, seen: u32, limit: Option<Duration>) {
    let limit = limit.map(|limit| Timespec {
        tv_sec: limit.as_secs() as i64,
        tv_nsec: limit.subsec_nanos().into(),
    });
    // An early return is allowed. Other processes wake those that wait for requests.
    let _ = futex::wait(word, futex::Flags::empty(), seen, limit.as_ref());
}

/// Splits the parts of a message: what is to be read, and where the answer goes.
pub fn split<'a>(taken: &'a Taken<'_>) -> Option<(&'a [Part], &'a [Part])> {
    if taken.op != op::MESSAGE {
        return None;
    }
    taken.parts.split_at_checked(taken.count as usize)
}

#[cfg(test)]
pub mod testing {
    //! A driver and threads that serve it.

    use super::*;
    use proto::requests::{Client, op};
    use std::fs::File;

    /// How long a test waits for what must come before it fails.
    pub const LIMIT: Duration = Duration::from_secs(60);

    pub struct Rig {
        pub client: Client<'static>,
        pub memory: GuestMemory,
        service: Arc<Service>,
    }

    impl Rig {
        pub fn new(served: impl Serve + 'static, threads: usize) -> Self {
            let queue: &Queue = Box::leak(Box::new(Queue::new()));
            let memory = vmm_mem::testing::memory(&[(0, 1 << 20)]);
            let doorbell = File::options().write(true).open("/dev/null").unwrap().into();
            let service = Service::new(queue, memory, doorbell, Box::new(served));
            let service = Arc::new(service);
            let work = service.clone();
            Threads::start(threads).unwrap().run(move || work.work());
            Self { client: Client::new(queue), memory, service }
        }

        /// Gives a request of these parts; `count` is as [`Request::count`].
        pub fn give(&mut self, id: u16, op: u32, sector: u64, parts: &[Part], count: u32) {
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

        /// Gives a message, whose bytes and whose answer have a page each.
        pub fn say(&mut self, id: u16, message: &[u8]) {
            let place = u64::from(id) << 13;
            self.memory.write_slice(place, message).unwrap();
            let parts = [(place, message.len() as u32), (place + 4096, 4096)];
            self.give(id, op::MESSAGE, 0, &parts, 1);
        }

        /// The next request that has ended, and its status.
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

        /// As the driver resets the device.
        pub fn abandon(&mut self) {
            self.client.abandon(|answers, seen| wait(answers, seen, Some(LIMIT)));
        }

        /// As the process does.
        pub fn watch(&self, end: &AtomicBool) {
            self.service.watch(end);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::testing::{LIMIT, Rig};
    use super::*;
    use std::sync::mpsc::{Receiver, Sender, channel};

    /// Operations: nothing, what waits until it is let go, something with a name, what is answered after that.
    const QUICK: u32 = 0;
    const SLOW: u32 = 1;
    const AFTER: u32 = 2;

    /// Tells what has begun, and waits with slow requests. The sector is the name.
    struct Slow {
        begun: Sender<u64>,
        go: Mutex<Receiver<()>>,
        idle: Sender<()>,
    }

    impl Serve for Slow {
        fn act(&self, taken: &Taken<'_>) -> u8 {
            self.begun.send(taken.sector).unwrap();
            if taken.op == SLOW {
                self.go.lock().unwrap().recv().unwrap();
            }
            taken.write(&taken.parts, &[taken.sector as u8]).unwrap();
            taken.sector as u8
        }

        fn order(&self, taken: &Taken<'_>) -> Order {
            if taken.op == AFTER {
                Order::After(taken.count as u16)
            } else {
                Order::Named(taken.sector as u16)
            }
        }

        fn idle(&self) {
            self.idle.send(()).unwrap();
        }

        fn close(&self, is_settled: bool) {
            assert!(is_settled);
            self.idle.send(()).unwrap();
        }
    }

    fn rig(threads: usize) -> (Rig, Receiver<u64>, Sender<()>, Receiver<()>) {
        let ((begun, begins), (go, gone), (idle, idles)) = (channel(), channel(), channel());
        let slow = Slow { begun, go: Mutex::new(gone), idle };
        (Rig::new(slow, threads), begins, go, idles)
    }

    #[test]
    fn a_slow_request_holds_nothing_up() {
        let (mut rig, begins, go, _idles) = rig(2);
        rig.give(5, SLOW, 5, &[], 0);
        assert_eq!(begins.recv_timeout(LIMIT), Ok(5));
        for id in [0, 9, 63] {
            rig.give(id, QUICK, id.into(), &[], 0);
            assert_eq!(rig.ended(), (id, id as u8));
        }
        go.send(()).unwrap();
        assert_eq!(rig.ended(), (5, 5));
    }

    #[test]
    fn more_than_there_are_threads_wait_in_the_queue() {
        let (mut rig, begins, go, _idles) = rig(2);
        for id in 0..64 {
            rig.give(id, SLOW, id.into(), &[], 0);
        }
        for _ in 0..2 {
            begins.recv_timeout(LIMIT).unwrap();
        }
        assert_eq!(rig.client.queue.waiting.load(SeqCst).count_ones(), 62);
        (0..64).for_each(|_| go.send(()).unwrap());
        let mut ended: Vec<_> = (0..64).map(|_| rig.ended().0).collect();
        ended.sort_unstable();
        assert!(ended.into_iter().eq(0..64));
    }

    #[test]
    fn an_answer_waits_for_the_one_before_it() {
        let (mut rig, begins, go, _idles) = rig(2);
        rig.give(5, SLOW, 5, &[], 0);
        assert_eq!(begins.recv_timeout(LIMIT), Ok(5));
        rig.give(1, AFTER, 1, &[], 5);
        rig.give(2, AFTER, 2, &[], 77);
        // Nothing has the other's name, and the first was taken before it.
        assert_eq!(rig.ended(), (2, 2));
        assert!(rig.client.completed().is_none());
        go.send(()).unwrap();
        assert_eq!((rig.ended(), rig.ended()), ((5, 5), (1, 1)));
    }

    #[test]
    fn nothing_is_overtaken_in_the_queue() {
        let (mut rig, begins, go, _idles) = rig(1);
        rig.give(0, SLOW, 0, &[], 0);
        assert_eq!(begins.recv_timeout(LIMIT), Ok(0));
        // The thread takes the lower number first.
        rig.give(60, QUICK, 60, &[], 0);
        rig.give(1, AFTER, 1, &[], 60);
        go.send(()).unwrap();
        assert_eq!([rig.ended(), rig.ended(), rig.ended()], [(0, 0), (60, 60), (1, 1)]);
        assert_eq!(begins.try_iter().collect::<Vec<_>>(), [1, 60]);
    }

    #[test]
    fn a_request_is_there_once() {
        let (mut rig, begins, go, _idles) = rig(2);
        rig.give(5, SLOW, 5, &[], 0);
        assert_eq!(begins.recv_timeout(LIMIT), Ok(5));
        // The guest says so again.
        rig.give(5, SLOW, 5, &[], 0);
        rig.give(6, QUICK, 6, &[], 0);
        assert_eq!(rig.ended(), (6, 6));
        go.send(()).unwrap();
        assert_eq!(rig.ended(), (5, 5));
        rig.give(5, QUICK, 7, &[], 0);
        assert_eq!(rig.ended(), (5, 7));
        assert_eq!(begins.try_iter().collect::<Vec<_>>(), [6, 7]);
    }

    #[test]
    fn a_reset_does_not_wait() {
        let (mut rig, begins, go, _idles) = rig(2);
        rig.give(5, SLOW, 5, &[(0x1000, 1)], 0);
        assert_eq!(begins.recv_timeout(LIMIT), Ok(5));
        // One that is answered after it, and one of the same name, which comes later.
        rig.give(6, AFTER, 6, &[], 5);
        assert_eq!(begins.recv_timeout(LIMIT), Ok(6));
        rig.abandon();
        rig.give(5, QUICK, 7, &[(0x1001, 1)], 0);
        // What the old one still does it has done before others begin.
        assert!(begins.recv_timeout(MOMENT).is_err());
        go.send(()).unwrap();
        assert_eq!(rig.ended(), (5, 7));
        assert!(rig.client.completed().is_none());
        assert_eq!(rig.memory.read::<u16>(0x1000).unwrap(), 0x700, "nothing is written late");
    }

    #[test]
    fn the_end_waits_for_what_has_begun() {
        let (mut rig, begins, go, idles) = rig(1);
        rig.give(5, SLOW, 5, &[], 0);
        assert_eq!(begins.recv_timeout(LIMIT), Ok(5));
        std::thread::scope(|scope| {
            scope.spawn(|| rig.watch(&AtomicBool::new(true)));
            assert!(idles.recv_timeout(MOMENT).is_err());
            go.send(()).unwrap();
        });
        // What is kept goes to the file when nothing is in flight any more, once.
        assert_eq!(rig.ended(), (5, 5));
        assert_eq!(idles.try_iter().count(), 1);
    }

    #[test]
    fn a_moment_without_requests_is_noticed() {
        let (mut rig, _begins, _go, idles) = rig(1);
        let end = AtomicBool::new(false);
        rig.give(5, QUICK, 5, &[], 0);
        assert_eq!(rig.ended(), (5, 5));
        std::thread::scope(|scope| {
            scope.spawn(|| rig.watch(&end));
            assert_eq!(idles.recv_timeout(LIMIT), Ok(()));
            end.store(true, SeqCst);
        });
    }
}
