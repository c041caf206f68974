//! Tests the kernel's contracts: notifications, gates, messages, delegation, revocation, rights,
//! quotas, priorities, budgets.
#![no_std]
#![no_main]
#![forbid(unsafe_code)]

use core::sync::atomic::{AtomicU64, Ordering};

use abi::{Item, Op, PAGE_SIZE, rights};
use native_check::{Report, same};
use native_rt::start::windows;
use native_rt::thread::{Stack, ThreadResources, spawn};
use native_rt::{
    Factory, Gate, Incoming, Message, Notification, OwnThread, Page, SchedContext, ServerThread,
    Slots, Space, Status, Window, accept_memory, copy_capability, drop_capability, probe,
    received_memory, reply_wait, revoke_capability, time, wait,
};
use proto::start::{MESSAGE_PAGE, RangeKind, Start, slot};

type Case = Result<(), &'static str>;

const MILLISECOND: u64 = 1_000_000;
/// Time slice of every thread here, in ns.
const TIME_SLICE: u64 = 10 * MILLISECOND;
/// Base of a port range that this task does not own.
const FOREIGN_PORT: u16 = 0x3f8;

native_rt::entry!(main);

fn main(start: &Start<'static>) -> u64 {
    let mut report = Report::default();
    // Below the highest priority that this task may assign, so that other threads can preempt this
    // one.
    let below = start.priority.saturating_sub(1);
    if SchedContext::at(slot::SCHED).set(below, TIME_SLICE, 0).is_err() {
        report.case("own-priority", Err("cannot lower it"));
    }
    let mut tests =
        Tests { start, factory: Factory::at(slot::FACTORY), slots: Slots::new(slot::FREE) };
    for (name, case) in cases() {
        let result = case(&mut tests);
        report.case(name, result);
    }
    report.exit_code()
}

type NamedCase<'a> = (&'static str, fn(&mut Tests<'a>) -> Case);

/// All cases, in order.
fn cases<'a>() -> [NamedCase<'a>; 18] {
    [
        ("notification-is-sticky", Tests::sticky),
        ("notification-times-out", Tests::timeout),
        ("rights-only-shrink", Tests::rights),
        ("revocation-is-recursive", Tests::revocation),
        ("slots-are-not-overwritten", Tests::busy),
        ("wrong-selectors-are-refused", Tests::selectors),
        ("quota-is-a-limit", Tests::quota),
        ("gate-call-and-badge", Tests::call),
        ("gate-of-a-dead-task", Tests::dead_server),
        ("message-page", Tests::words),
        ("message-too-long", Tests::overflow),
        ("capability-in-a-message", Tests::capability),
        ("memory-in-a-message", Tests::memory),
        ("memory-granted-and-revoked", Tests::grant),
        ("stopped-server-aborts-its-caller", Tests::abort),
        ("priorities-have-a-ceiling", Tests::ceiling),
        ("priority-preempts", Tests::priority),
        ("budget-is-a-limit", Tests::budget),
    ]
}

/// State shared by the cases.
struct Tests<'a> {
    start: &'a Start<'static>,
    factory: Factory,
    slots: Slots<1>,
}

/// Turns a failure of the preparation into a failed case.
fn ready<T>(what: &'static str, result: Result<T, Status>) -> Result<T, &'static str> {
    result.map_err(|status| {
        native_rt::error!("{what}: {status:?}");
        what
    })
}

impl Tests<'_> {
    fn slot(&mut self) -> Result<u64, &'static str> {
        self.slots.allocate().ok_or("no slot left")
    }

    fn notification(&mut self) -> Result<Notification, &'static str> {
        let slot = self.slot()?;
        ready("make a notification", self.factory.notification(slot))
    }

    fn window(&self) -> Result<Window, &'static str> {
        windows(self.start, RangeKind::Private).next().ok_or("no private memory")
    }

    fn sched(
        &mut self,
        priority: u8,
        budget: u64,
        period: u64,
    ) -> Result<SchedContext, &'static str> {
        let slot = self.slot()?;
        ready("make a context", self.factory.sched_context(slot, priority, budget, period))
    }

    fn thread<const BYTES: usize>(
        &mut self,
        sched: SchedContext,
        stack: &'static Stack<BYTES>,
        body: extern "C" fn(u64) -> !,
        argument: u64,
    ) -> Result<OwnThread, &'static str> {
        let slot = self.slot()?;
        let resources = ThreadResources {
            factory: self.factory,
            task: slot::TASK,
            slot,
            cpu: self.start.cpu,
            sched,
        };
        ready("start a thread", spawn(resources, stack, body, argument))
    }

    /// Creates a server thread of this task with a higher priority than the first thread, and a
    /// gate to it.
    fn server<const BYTES: usize>(
        &mut self,
        stack: &'static Stack<BYTES>,
    ) -> Result<(OwnThread, Gate), &'static str> {
        let sched = self.sched(self.above(), TIME_SLICE, 0)?;
        let slot = self.slot()?;
        let thread = self.thread(sched, stack, serve, slot)?;
        let slot = self.slot()?;
        let gate = ready("make a gate", self.factory.gate(slot, thread, 5))?;
        Ok((thread, gate))
    }

    /// Returns the highest priority that this task can assign, which is above its own.
    fn above(&self) -> u8 {
        self.start.priority
    }

    // ---- notifications -----------------------------------------------------------------------

    fn sticky(&mut self) -> Case {
        let notification = self.notification()?;
        same("signal", notification.signal(0b100), Ok(()))?;
        same("signal", notification.signal(0b001), Ok(()))?;
        same("bits", notification.wait(0), Ok(0b101))?;
        same("nothing left", notification.wait(0), Err(Status::Timeout))
    }

    fn timeout(&mut self) -> Case {
        let notification = self.notification()?;
        let khz = self.start.clock.tsc_khz;
        let begin = time::tsc();
        let deadline = time::after(&self.start.clock, MILLISECOND);
        same("wait", notification.wait(deadline), Err(Status::Timeout))?;
        let nanos = time::nanos(khz, time::tsc() - begin);
        if time::tsc() < deadline {
            return Err("too early");
        }
        if nanos > 100 * MILLISECOND { Err("much too late") } else { Ok(()) }
    }

    // ---- capabilities ------------------------------------------------------------------------

    fn rights(&mut self) -> Case {
        let notification = self.notification()?;
        let weak = Notification::at(self.slot()?);
        let copied = copy_capability(notification.selector(), weak.selector(), rights::WAIT);
        same("copy", copied, Ok(()))?;
        same("signal without the right", weak.signal(1), Err(Status::BadRights))?;
        let third = self.slot()?;
        let copied = copy_capability(weak.selector(), third, rights::ALL);
        same("copy without the right to delegate", copied, Err(Status::BadRights))?;
        let full = Notification::at(third);
        let all = rights::SIGNAL | rights::DELEGATE;
        same("copy", copy_capability(notification.selector(), third, all), Ok(()))?;
        let fourth = Notification::at(self.slot()?);
        let copied = copy_capability(full.selector(), fourth.selector(), rights::ALL);
        same("copy of a copy", copied, Ok(()))?;
        same("wait with rights that the giver lacked", fourth.wait(0), Err(Status::BadRights))?;
        same("signal through both", fourth.signal(2), Ok(()))?;
        same("bits", weak.wait(0), Ok(2))
    }

    fn revocation(&mut self) -> Case {
        let first = self.notification()?;
        let second = Notification::at(self.slot()?);
        let third = Notification::at(self.slot()?);
        let copy = |from: Notification, to: Notification| {
            copy_capability(from.selector(), to.selector(), rights::ALL)
        };
        same("copy", copy(first, second), Ok(()))?;
        same("copy", copy(second, third), Ok(()))?;
        same("revoke", revoke_capability(first.selector()), Ok(()))?;
        same("child", second.signal(1), Err(Status::BadCapability))?;
        same("grandchild", third.signal(1), Err(Status::BadCapability))?;
        same("own", first.signal(1), Ok(()))?;
        same("copy", copy(first, second), Ok(()))?;
        same("drop", drop_capability(first.selector()), Ok(()))?;
        same("all gone", second.signal(1), Err(Status::BadCapability))?;
        same("all gone", first.signal(1), Err(Status::BadCapability))
    }

    fn busy(&mut self) -> Case {
        let notification = self.notification()?;
        let at = notification.selector();
        same("create", self.factory.notification(at).map(drop), Err(Status::Busy))?;
        same("copy", copy_capability(slot::NOTIFICATION, at, rights::ALL), Err(Status::Busy))
    }

    fn selectors(&mut self) -> Case {
        let empty = self.slot()?;
        let message = Message::new(0, [0; 4]);
        same("empty", Gate::at(empty).call(message), Err(Status::BadCapability))?;
        same("far", Gate::at(u64::MAX - 1).call(message), Err(Status::BadCapability))?;
        let kind = Gate::at(slot::NOTIFICATION).call(message);
        same("wrong kind", kind, Err(Status::BadCapability))?;
        let (status, _) = probe::system_call(abi::OPERATIONS.len() as u64, [0; 6]);
        same("no operation", status, Status::BadOperation as u64)?;
        let (status, _) = probe::system_call(u64::MAX, [0; 6]);
        same("no operation", status, Status::BadOperation as u64)?;
        // Foreign ports cannot be delegated either.
        let item = Item::ports(0).pack();
        let port = FOREIGN_PORT as u64;
        let arguments = [abi::ops::SELF, item, port, port, 0, 0];
        let (status, _) = probe::system_call(Op::Delegate as u64, arguments);
        same("foreign port", status, Status::BadArgument as u64)
    }

    fn quota(&mut self) -> Case {
        const PAGES: u64 = 4;
        let at = self.slot()?;
        let small = ready("split the quota", self.factory.factory(at, PAGES, 0, 0))?;
        let inner = self.slot()?;
        let too_much = small.factory(inner, PAGES + 1, 0, 0).map(drop);
        same("more than there is", too_much, Err(Status::NoQuota))?;
        let task = small.task(inner, abi::PAGE_SIZE).map(drop);
        let refused = matches!(task, Ok(()) | Err(Status::NoQuota | Status::BadArgument));
        if !refused {
            return Err("a task of many slots");
        }
        if task.is_ok() {
            same("drop", drop_capability(inner), Ok(()))?;
        }
        same("again", small.notification(inner).map(drop), Ok(()))
    }

    // ---- gates -------------------------------------------------------------------------------

    /// Creates a server in a task of its own; returns the slots of thread and task, and its gate.
    fn echo(&mut self) -> Result<([u64; 2], Gate), &'static str> {
        let task_slot = self.slot()?;
        let task = ready("make a task", self.factory.task(task_slot, 16))?;
        let (code, entry) = probe::echo_server();
        let mapped = task.map(code, code.base(), rights::READ | rights::EXECUTE);
        ready("map code", mapped)?;
        let at = self.slot()?;
        let thread =
            ready("make a thread", self.factory.thread(at, task, self.start.cpu, MESSAGE_PAGE))?;
        let sched = self.sched(self.above(), TIME_SLICE, 0)?;
        ready("bind", thread.bind_sched(sched))?;
        ready("start", thread.start(entry, 0, 0))?;
        let at_gate = self.slot()?;
        let gate = ready("make a gate", self.factory.gate(at_gate, thread, 0x1234_5678_9abc))?;
        Ok(([at, task_slot], gate))
    }

    fn call(&mut self) -> Case {
        let (_, gate) = self.echo()?;
        for round in 0..100 {
            let message = Message::new(round, [round, !round, u64::MAX, 0]);
            let answer = Message::new(round, [round, !round, u64::MAX, 0x1234_5678_9abc]);
            same("answer", gate.call(message), Ok(answer))?;
        }
        Ok(())
    }

    fn dead_server(&mut self) -> Case {
        let (server, gate) = self.echo()?;
        let message = Message::new(0, [0; 4]);
        ready("call", gate.call(message))?;
        for at in server {
            same("drop", drop_capability(at), Ok(()))?;
        }
        match gate.call(message) {
            Err(Status::Aborted | Status::BadCapability) => Ok(()),
            other => same("call", other, Err(Status::Aborted)),
        }
    }

    fn words(&mut self) -> Case {
        static STACK: Stack<{ 16 << 10 }> = Stack::new();
        let (_, gate) = self.server(&STACK)?;
        let page = Page::current();
        let words: [u64; Page::WORDS] = core::array::from_fn(|index| index as u64 * 3);
        page.set_words(&words);
        let message = Message::new(REVERSE, [9, 8, 7, 6]).with_page(Page::WORDS as u8);
        let answer = ready("call", gate.call(message))?;
        same("registers", answer.words, [6, 7, 8, 9])?;
        same("length", answer.tag.words as usize, Page::WORDS)?;
        let mut got = [0; Page::WORDS];
        page.words(&mut got);
        got.reverse();
        same("words", got, words)
    }

    fn overflow(&mut self) -> Case {
        static STACK: Stack<{ 16 << 10 }> = Stack::new();
        let (_, gate) = self.server(&STACK)?;
        let long = Message::new(REVERSE, [0; 4]).with_page(Page::WORDS as u8 + 1);
        same("words", gate.call(long), Err(Status::Overflow))?;
        let long = Message::new(REVERSE, [0; 4]).with_items(17);
        same("items", gate.call(long), Err(Status::Overflow))
    }

    fn capability(&mut self) -> Case {
        static STACK: Stack<{ 16 << 10 }> = Stack::new();
        let (_, gate) = self.server(&STACK)?;
        let notification = self.notification()?;
        let send = |rights| {
            Page::current().set_capability(0, notification.selector(), rights);
            gate.call(Message::new(SIGNAL, [0b1010, 0, 0, 0]).with_items(1))
        };
        let answer = ready("call", send(rights::SIGNAL))?;
        same("signal", answer.words[0], Status::Ok as u64)?;
        same("wait without the right", answer.words[1], Status::BadRights as u64)?;
        same("bits", notification.wait(0), Ok(0b1010))?;
        // The server accepts capabilities only before that call.
        same("refused", send(rights::SIGNAL), Err(Status::Overflow))
    }

    fn memory(&mut self) -> Case {
        static STACK: Stack<{ 16 << 10 }> = Stack::new();
        let (_, gate) = self.server(&STACK)?;
        let window = self.window()?.part(0, PAGE_SIZE).ok_or("no page")?;
        if !window.write(100, b"from the caller") {
            return Err("cannot write");
        }
        Page::current().set_memory(0, window, rights::READ | rights::WRITE, false);
        let answer = ready("call", gate.call(Message::new(SHARE, [100, 0, 0, 0]).with_items(1)))?;
        same("read by the server", answer.words[0], u64::from(b'f'))?;
        let mut got = [0; 15];
        if !window.read(100, &mut got) {
            return Err("cannot read");
        }
        same("written by the server", got, *b"FROM THE CALLER")?;
        same("revoke", window.revoke(), Ok(()))
    }

    fn grant(&mut self) -> Case {
        static STACK: Stack<{ 16 << 10 }> = Stack::new();
        let (_, gate) = self.server(&STACK)?;
        let window = self.window()?.part(16 * PAGE_SIZE, PAGE_SIZE).ok_or("no page")?;
        Page::current().set_memory(0, window, rights::READ | rights::WRITE, true);
        ready("call", gate.call(Message::new(SHARE, [0; 4]).with_items(1)))?;
        // The memory is gone from this task: it cannot be shared again.
        Page::current().set_memory(0, window, rights::READ, false);
        let again = gate.call(Message::new(SHARE, [0; 4]).with_items(1));
        if again.is_ok() { Err("granted memory is still mapped") } else { Ok(()) }
    }

    fn abort(&mut self) -> Case {
        static SERVER: Stack<{ 16 << 10 }> = Stack::new();
        static CALLER: Stack<{ 16 << 10 }> = Stack::new();
        let (server, gate) = self.server(&SERVER)?;
        RESULT.store(u64::MAX, Ordering::Relaxed);
        let sched = self.sched(self.above(), TIME_SLICE, 0)?;
        self.thread(sched, &CALLER, call_for_ever, gate.selector())?;
        same("the caller waits", RESULT.load(Ordering::Relaxed), u64::MAX)?;
        same("stop", server.stop(), Ok(()))?;
        let notification = self.notification()?;
        let deadline = time::after(&self.start.clock, 10 * MILLISECOND);
        same("sleep", notification.wait(deadline), Err(Status::Timeout))?;
        same("the caller's status", RESULT.load(Ordering::Relaxed), Status::Aborted as u64)
    }

    // ---- scheduling --------------------------------------------------------------------------

    fn ceiling(&mut self) -> Case {
        let too_high = self.above() + 1;
        let at = self.slot()?;
        let made = self.factory.sched_context(at, too_high, TIME_SLICE, 0).map(drop);
        same("made too high", made, Err(Status::BadRights))?;
        let split = self.factory.factory(at, 1, too_high, 0).map(drop);
        same("a factory for more", split, Err(Status::BadRights))?;
        let sched = self.sched(self.above(), TIME_SLICE, 0)?;
        same("raised", sched.set(too_high, TIME_SLICE, 0), Err(Status::BadRights))?;
        same("lowered", sched.set(0, TIME_SLICE, 0), Ok(()))
    }

    fn priority(&mut self) -> Case {
        static STACK: Stack<{ 16 << 10 }> = Stack::new();
        let notification = self.notification()?;
        COUNT.store(0, Ordering::Relaxed);
        let sched = self.sched(self.above(), TIME_SLICE, 0)?;
        self.thread(sched, &STACK, count_signals, notification.selector())?;
        for round in 1..=10 {
            same("signal", notification.signal(1), Ok(()))?;
            same("ran at once", COUNT.load(Ordering::Relaxed), round)?;
        }
        Ok(())
    }

    fn budget(&mut self) -> Case {
        static STACK: Stack<{ 16 << 10 }> = Stack::new();
        let khz = self.start.clock.tsc_khz;
        COUNT.store(0, Ordering::Relaxed);
        // Above this thread, but with a tenth of the time only.
        let sched = self.sched(self.above(), MILLISECOND, 10 * MILLISECOND)?;
        let spinner = self.thread(sched, &STACK, spin, khz)?;
        let begin = time::tsc();
        let wanted = time::ticks(khz, 50 * MILLISECOND);
        let mut own = OwnTime::new(khz);
        while own.last - begin < wanted {
            own.look();
        }
        same("stop", spinner.stop(), Ok(()))?;
        let (ours, theirs) = (own.sum, COUNT.load(Ordering::Relaxed));
        let percent = theirs * 100 / (ours + theirs).max(1);
        native_rt::info!("{percent} % for a spinning thread with a budget of 10 %");
        if percent > 20 { Err("the budget was exceeded") } else { Ok(()) }
    }
}

// ---- other threads -----------------------------------------------------------------------------

/// Operations of [`serve`].
const REVERSE: u64 = 1;
const SIGNAL: u64 = 2;
const SHARE: u64 = 3;
const HANG: u64 = 4;

static RESULT: AtomicU64 = AtomicU64::new(0);
static COUNT: AtomicU64 = AtomicU64::new(0);

/// Serves calls; accepts one capability into `slot`, and one page at a time.
extern "C" fn serve(slot: u64) -> ! {
    Page::current().accept_capabilities(slot, 1);
    accept_memory(0, PAGE_SIZE);
    let mut next = wait();
    loop {
        next = match next {
            Ok(Incoming::Call(_, message)) if message.tag.label == HANG => sleep(),
            Ok(Incoming::Call(_, message)) => reply_wait(answer(slot, message)),
            _ => wait(),
        };
    }
}

fn answer(slot: u64, message: Message) -> Message {
    let page = Page::current();
    match message.tag.label {
        REVERSE => {
            let mut words = [0; Page::WORDS];
            page.words(&mut words);
            words.reverse();
            page.set_words(&words);
            let [a, b, c, d] = message.words;
            Message::new(0, [d, c, b, a]).with_page(message.tag.words)
        }
        SIGNAL => {
            let notification = Notification::at(slot);
            let code = |result: Result<(), Status>| result.err().unwrap_or(Status::Ok) as u64;
            let signalled = code(notification.signal(message.words[0]));
            let waited = code(notification.wait(0).map(drop));
            page.accept_capabilities(0, 0);
            Message::new(0, [signalled, waited, 0, 0])
        }
        SHARE => {
            let Some(window) = received_memory(0) else { return Message::new(0, [0; 4]) };
            let mut bytes = [0; 15];
            let read = window.read(message.words[0], &mut bytes);
            let first = u64::from(bytes[0]);
            bytes.make_ascii_uppercase();
            let written = window.write(message.words[0], &bytes);
            Message::new(u64::from(read && written), [first, 0, 0, 0])
        }
        _ => Message::new(0, [0; 4]),
    }
}

/// Calls a gate whose server does not reply.
extern "C" fn call_for_ever(gate: u64) -> ! {
    let status = Gate::at(gate).call(Message::new(HANG, [0; 4])).err().unwrap_or(Status::Ok);
    RESULT.store(status as u64, Ordering::Relaxed);
    sleep()
}

extern "C" fn count_signals(notification: u64) -> ! {
    loop {
        if Notification::at(notification).wait(abi::FOREVER).is_ok() {
            COUNT.fetch_add(1, Ordering::Relaxed);
        }
    }
}

/// Accumulates the time that it runs.
extern "C" fn spin(khz: u64) -> ! {
    let mut own = OwnTime::new(khz);
    loop {
        own.look();
        COUNT.store(own.sum, Ordering::Relaxed);
    }
}

/// Run time of a thread, in ticks: the sum of steps between reads of the clock that are too short
/// for a preemption, by another thread here or by another program on the host of an emulator.
struct OwnTime {
    sum: u64,
    last: u64,
    short: u64,
}

impl OwnTime {
    fn new(khz: u64) -> Self {
        Self { sum: 0, last: time::tsc(), short: time::ticks(khz, MILLISECOND / 20) }
    }

    fn look(&mut self) {
        let now = time::tsc();
        let step = now - self.last;
        if step < self.short {
            self.sum += step;
        }
        self.last = now;
    }
}

/// Waits for events that never arrive.
fn sleep() -> ! {
    loop {
        let _ = Notification::at(slot::NOTIFICATION).wait(abi::FOREVER);
    }
}
