//! Triggers the longest kernel paths: destruction of thousands of mappings and capabilities at
//! once, by system calls and by an idle CPU, many callers of a server that stops, many simultaneous
//! timeouts. A kernel built to measure itself logs the longest path.
#![no_std]
#![no_main]
#![forbid(unsafe_code)]

use abi::{Item, Op, PAGE_SHIFT, PAGE_SIZE, ops, rights};
use native_check::Report;
use native_rt::start::windows;
use native_rt::{
    Factory, ServerThread, Slots, Space, Status, Task, Thread, Window, drop_capability, info,
    probe, revoke_capability, time,
};
use proto::start::{RangeKind, Start, slot};

/// Numbers of objects.
const MAPPINGS: u64 = 10_000;
const CAPABILITIES: u64 = 8192;
const CALLERS: u64 = 256;
const SLEEPERS: u64 = 64;
/// Addresses of mappings in this task, and of message pages of the other task's threads.
const FAR: u64 = 1 << 40;
const MESSAGES: u64 = 1 << 30;
/// Address of the words of the other task's threads.
const WORDS: u64 = 1 << 31;
/// Distance of mappings that need page tables of their own.
const APART: u64 = 1 << 30;
const TIME_SLICE: u64 = 1_000_000;
const SECOND: u64 = 1_000_000_000;
/// Slots of the other task: for the objects that its threads use, and for the threads themselves.
const CALLED: u64 = 600;
const THREADS: u64 = 2000;

native_rt::entry!(main);

fn main(start: &Start<'static>) -> u64 {
    let mut report = Report::default();
    let mut load =
        Load { start, factory: Factory::at(slot::FACTORY), slots: Slots::new(slot::FREE) };
    for (name, part) in parts() {
        let result = part(&mut load);
        info!("{name}: {result:?}");
        report.case(name, result.map_err(|_| "refused"));
    }
    report.exit_code()
}

type Part<'a> = fn(&mut Load<'a>) -> Result<(), Status>;

/// All parts, in order.
fn parts<'a>() -> [(&'static str, Part<'a>); 6] {
    [
        ("mappings-end", Load::mappings),
        ("page-tables-end", Load::tables),
        ("capabilities-end", Load::capabilities),
        ("task-ends-itself", Load::ends_itself),
        ("callers-of-a-stopped-server", Load::callers),
        ("timeouts-at-once", Load::sleepers),
    ]
}

/// State shared by the parts.
struct Load<'a> {
    start: &'a Start<'static>,
    factory: Factory,
    slots: Slots<1>,
}

/// A task whose threads perform one system call each.
struct Crowd {
    task: Task,
    slot: u64,
    entry: u64,
}

fn call(operation: Op, arguments: [u64; 4]) -> Result<(), Status> {
    let [a, b, c, d] = arguments;
    let (status, _) = probe::system_call(operation as u64, [a, b, c, d, 0, 0]);
    match Status::from_code(status) {
        Status::Ok => Ok(()),
        status => Err(status),
    }
}

impl Load<'_> {
    fn slot(&mut self) -> Result<u64, Status> {
        self.slots.allocate().ok_or(Status::Overflow)
    }

    fn page(&self, number: u64) -> Result<Window, Status> {
        let window = windows(self.start, RangeKind::Private).next().ok_or(Status::BadArgument)?;
        window.part(number * PAGE_SIZE, PAGE_SIZE).ok_or(Status::BadArgument)
    }

    /// Maps one page at thousands of other addresses, and revokes it from there.
    fn mappings(&mut self) -> Result<(), Status> {
        let page = self.page(0)?.base() >> PAGE_SHIFT;
        let item = Item::memory(0, rights::ALL).pack();
        for number in 0..MAPPINGS {
            call(Op::Delegate, [ops::SELF, item, page, (FAR >> PAGE_SHIFT) + number])?;
        }
        call(Op::Unmap, [item, page, 0, 0])?;
        // An unmap of a wide range without mappings.
        call(Op::Unmap, [Item::memory(Item::MAX_ORDER, 0).pack(), 0, 0, 0])
    }

    /// Creates mappings that are far from each other, in a task that is destroyed.
    fn tables(&mut self) -> Result<(), Status> {
        let slot = self.slot()?;
        let task = self.factory.task(slot, 16)?;
        let page = self.page(1)?;
        for number in 0..150 {
            task.map(page, FAR + number * APART, rights::READ)?;
        }
        drop_capability(slot)
    }

    /// Creates a task with the maximum number of capabilities, which is destroyed.
    fn capabilities(&mut self) -> Result<(), Status> {
        let slot = self.slot()?;
        let task = self.factory.task(slot, CAPABILITIES)?;
        let own = self.slot()?;
        self.factory.notification(own)?;
        for number in 0..CAPABILITIES {
            task.delegate(own, number, rights::ALL)?;
        }
        revoke_capability(own)?;
        // A few per page, in all pages; then the task's end destroys all of the objects.
        for number in 0..CAPABILITIES / 128 {
            task.delegate(own, number * 128, rights::ALL)?;
        }
        drop_capability(slot)
    }

    /// Creates a task with thousands of mappings, which drops the last capability to itself while
    /// no other thread is ready.
    fn ends_itself(&mut self) -> Result<(), Status> {
        let crowd = self.crowd()?;
        let page = self.page(1)?;
        for number in 0..MAPPINGS {
            crowd.task.map(page, FAR + number * PAGE_SIZE, rights::READ)?;
        }
        let below = self.start.priority.saturating_sub(1);
        let item = Item::capability(rights::ALL).pack();
        let words = [Op::Unmap as u64, item, CALLED, ops::UNMAP_SELF];
        let thread = self.thread(&crowd, 0, words, below)?;
        self.grant(&crowd, crowd.slot, CALLED)?;
        self.rest(SECOND / 2)?;
        drop_capability(thread.thread())
    }

    /// Creates a task with room for threads, below this thread's priority.
    fn crowd(&mut self) -> Result<Crowd, Status> {
        let slot = self.slot()?;
        let task = self.factory.task(slot, CAPABILITIES)?;
        let (code, entry) = probe::call_once();
        task.map(code, code.base(), rights::READ | rights::EXECUTE)?;
        Ok(Crowd { task, slot, entry })
    }

    /// Creates the crowd's thread `number`, which performs the system call that the words describe.
    fn thread(
        &mut self,
        crowd: &Crowd,
        number: u64,
        words: [u64; 4],
        priority: u8,
    ) -> Result<Thread, Status> {
        // Each page of words serves 128 threads; the other task maps the same pages.
        let page = self.page(8 + number / 128)?;
        let bytes = words.map(u64::to_le_bytes);
        if !page.write(number % 128 * 32, bytes.as_flattened()) {
            return Err(Status::BadArgument);
        }
        let there = WORDS + number / 128 * PAGE_SIZE;
        if number.is_multiple_of(128) {
            crowd.task.map(page, there, rights::READ)?;
        }
        let (slot, time) = (self.slot()?, self.slot()?);
        let message = MESSAGES + number * PAGE_SIZE;
        let thread = self.factory.thread(slot, crowd.task, self.start.cpu, message)?;
        thread.bind_sched(self.factory.sched_context(time, priority, TIME_SLICE, 0)?)?;
        thread.start(crowd.entry, 0, there + number % 128 * 32)?;
        self.grant(crowd, time, THREADS + 2 * number)?;
        Ok(thread)
    }

    /// Delegates a capability, and frees its slot.
    fn grant(&mut self, crowd: &Crowd, own: u64, slot: u64) -> Result<(), Status> {
        let item = Item { grant: true, ..Item::capability(rights::ALL) };
        call(Op::Delegate, [crowd.slot, item.pack(), own, slot])?;
        self.slots.free(own);
        Ok(())
    }

    /// Lets the crowd run for a while.
    fn rest(&self, nanoseconds: u64) -> Result<(), Status> {
        let notification = native_rt::Notification::at(slot::NOTIFICATION);
        match notification.wait(time::after(&self.start.clock, nanoseconds)) {
            Ok(_) | Err(Status::Timeout) => Ok(()),
            Err(status) => Err(status),
        }
    }

    /// Many threads call a server that never replies, and the server is stopped.
    fn callers(&mut self) -> Result<(), Status> {
        let crowd = self.crowd()?;
        let below = self.start.priority.saturating_sub(1);
        // It yields for ever.
        let server =
            self.thread(&crowd, 0, [Op::Yield as u64, 0, 0, 0], below.saturating_sub(1))?;
        let gate = self.slot()?;
        self.factory.gate(gate, server, 1)?;
        self.grant(&crowd, gate, CALLED)?;
        for number in 1..=CALLERS {
            let caller = self.thread(&crowd, number, [Op::GateCall as u64, CALLED, 0, 0], below)?;
            self.grant(&crowd, caller.thread(), THREADS + 2 * number + 1)?;
        }
        self.rest(SECOND / 2)?;
        server.stop()?;
        self.rest(SECOND / 100)?;
        drop_capability(server.thread())?;
        self.end(crowd)
    }

    /// Many threads wait until the same deadline.
    fn sleepers(&mut self) -> Result<(), Status> {
        let crowd = self.crowd()?;
        let below = self.start.priority.saturating_sub(1);
        let deadline = time::after(&self.start.clock, SECOND);
        for number in 0..SLEEPERS {
            let own = self.slot()?;
            self.factory.notification(own)?;
            self.grant(&crowd, own, CALLED + number)?;
            let words = [Op::NotificationWait as u64, CALLED + number, deadline, 0];
            let sleeper = self.thread(&crowd, number, words, below)?;
            self.grant(&crowd, sleeper.thread(), THREADS + 2 * number + 1)?;
        }
        self.rest(SECOND + SECOND / 2)?;
        self.end(crowd)
    }

    /// Destroys a crowd, with all its resources.
    fn end(&mut self, crowd: Crowd) -> Result<(), Status> {
        drop_capability(crowd.slot)
    }
}
