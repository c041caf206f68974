//! Handles of kernel objects: a selector and a type.
//!
//! A handle is a copyable number. It may name an empty or reused slot; the kernel notices and answers
//! with a status.

use abi::{Binding, Kind, Op, PlatformAction, Selector, Status, Tag, reply_wait as flags};

use crate::memory::unmap_capability;
use crate::syscall::{Words, call};

macro_rules! handles {
    ($($(#[$doc:meta])+ $name:ident;)+) => {
        $(
            $(#[$doc])+
            #[derive(Clone, Copy, Debug, PartialEq, Eq)]
            pub struct $name(Selector);

            impl $name {
                /// The capability in this slot, which should be one of this kind.
                pub const fn at(selector: Selector) -> Self {
                    Self(selector)
                }

                /// Its slot.
                pub const fn selector(self) -> Selector {
                    self.0
                }
            }
        )+
    };
}

handles! {
    /// Endpoint for calls.
    Gate;
    /// Event word.
    Notification;
    /// Hardware interrupt.
    Irq;
    /// Quota of kernel memory.
    Factory;
    /// Right to CPU time.
    SchedContext;
    /// The machine.
    Platform;
    /// Guest-physical space.
    Vm;
    /// The running program's own thread.
    OwnThread;
}

/// Another task, made by this one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Task(Selector);

/// A thread of another task.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Thread(Selector);

impl Task {
    /// Its slot.
    pub const fn selector(self) -> Selector {
        self.0
    }
}

impl Thread {
    /// Its slot.
    pub const fn selector(self) -> Selector {
        self.0
    }

    /// Starts it at `ip` of its task, with stack `sp` and an argument.
    pub fn start(self, ip: u64, sp: u64, argument: u64) -> Result<(), Status> {
        // SAFETY: the thread runs in another address space.
        unsafe { call(Op::ThreadStart, [self.0, ip, sp, argument, 0, 0]) }.map(drop)
    }

    /// Stops it.
    pub fn stop(self) -> Result<(), Status> {
        // SAFETY: no memory changes.
        unsafe { call(Op::ThreadStop, [self.0, 0, 0, 0, 0, 0]) }.map(drop)
    }
}

/// Threads that gates can be made for.
pub trait Serves {
    /// The thread's slot.
    fn thread(self) -> Selector;

    /// Gives it a scheduling context.
    fn bind_sched(self, context: SchedContext) -> Result<(), Status>
    where
        Self: Sized,
    {
        bind(self.thread(), Binding::SchedContext, context.0)
    }

    /// Sends its faults to a gate.
    fn bind_fault_gate(self, gate: Gate) -> Result<(), Status>
    where
        Self: Sized,
    {
        bind(self.thread(), Binding::FaultGate, gate.0)
    }

    /// Lets a notification wake it while it waits for callers.
    fn bind_notification(self, notification: Notification) -> Result<(), Status>
    where
        Self: Sized,
    {
        bind(self.thread(), Binding::Notification, notification.0)
    }
}

impl Serves for Thread {
    fn thread(self) -> Selector {
        self.0
    }
}

impl Serves for OwnThread {
    fn thread(self) -> Selector {
        self.0
    }
}

fn bind(thread: Selector, binding: Binding, object: Selector) -> Result<(), Status> {
    // SAFETY: no memory changes.
    unsafe { call(Op::ThreadBind, [thread, binding as u64, object, 0, 0, 0]) }.map(drop)
}

impl OwnThread {
    /// Stops it; what it waits for is aborted.
    pub fn stop(self) -> Result<(), Status> {
        // SAFETY: no memory changes.
        unsafe { call(Op::ThreadStop, [self.0, 0, 0, 0, 0, 0]) }.map(drop)
    }
}

impl Factory {
    fn create(self, kind: Kind, slot: Selector, arguments: [u64; 3]) -> Result<(), Status> {
        let [a, b, c] = arguments;
        // SAFETY: objects live in kernel memory. The pages that come with threads and vCPUs are
        // placed where nothing is mapped, and not touched except as their owners document.
        unsafe { call(Op::Create, [self.0, kind as u64, slot, a, b, c]) }.map(drop)
    }

    /// Makes a task with `slots` capability slots.
    pub fn task(self, slot: Selector, slots: u64) -> Result<Task, Status> {
        self.create(Kind::Task, slot, [slots, 0, 0]).map(|()| Task(slot))
    }

    /// Makes a thread of another task on a CPU, with its message page at `page` there.
    pub fn thread(self, slot: Selector, task: Task, cpu: u32, page: u64) -> Result<Thread, Status> {
        self.create(Kind::Thread, slot, [task.0, cpu as u64, page]).map(|()| Thread(slot))
    }

    /// Makes a thread of this task; [`crate::thread`] starts it.
    pub(crate) fn own_thread(
        self,
        slot: Selector,
        task: Selector,
        cpu: u32,
        page: u64,
    ) -> Result<OwnThread, Status> {
        self.create(Kind::Thread, slot, [task, cpu as u64, page]).map(|()| OwnThread(slot))
    }

    /// Makes a gate that a thread serves.
    pub fn gate(self, slot: Selector, server: impl Serves, badge: u64) -> Result<Gate, Status> {
        self.create(Kind::Gate, slot, [server.thread(), badge, 0]).map(|()| Gate(slot))
    }

    /// Makes a notification.
    pub fn notification(self, slot: Selector) -> Result<Notification, Status> {
        self.create(Kind::Notification, slot, [0; 3]).map(|()| Notification(slot))
    }

    /// Makes the object of a hardware interrupt. `flags` as for `Create` in `abi`.
    pub fn irq(
        self,
        slot: Selector,
        platform: Platform,
        gsi: u32,
        flags: u64,
    ) -> Result<Irq, Status> {
        self.create(Kind::Irq, slot, [platform.0, gsi as u64, flags]).map(|()| Irq(slot))
    }

    /// Splits a factory off, with `pages` pages of quota, a highest priority, and a share of CPU time in units of
    /// 1 / [`abi::SHARE_OF_CPU`] of a CPU; 0: it has no share of its own.
    pub fn factory(
        self,
        slot: Selector,
        pages: u64,
        max_priority: u8,
        share: u64,
    ) -> Result<Factory, Status> {
        self.create(Kind::Factory, slot, [pages, max_priority as u64, share])
            .map(|()| Factory(slot))
    }

    /// Makes a scheduling context; budget and period in ns, 0 period for round robin.
    pub fn sched_context(
        self,
        slot: Selector,
        priority: u8,
        budget: u64,
        period: u64,
    ) -> Result<SchedContext, Status> {
        self.create(Kind::SchedContext, slot, [priority as u64, budget, period])
            .map(|()| SchedContext(slot))
    }

    /// Makes a guest-physical space with nested paging.
    pub fn vm(self, slot: Selector) -> Result<Vm, Status> {
        self.create(Kind::Vm, slot, [0; 3]).map(|()| Vm(slot))
    }

    pub(crate) fn vcpu(
        self,
        slot: Selector,
        vm: Vm,
        page: u64,
        notification: Notification,
    ) -> Result<(), Status> {
        self.create(Kind::Vcpu, slot, [vm.0, page, notification.0])
    }
}

/// A message or its answer, as far as it travels in registers; the rest is in the
/// [message page](crate::Page).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Message {
    /// Label, and how much of the message page belongs to the message.
    pub tag: Tag,
    /// The first four words.
    pub words: [u64; 4],
}

impl Message {
    /// A message in registers only.
    pub const fn new(label: u64, words: [u64; 4]) -> Self {
        Self { tag: Tag::label(label), words }
    }

    /// Adds `words` words of the message page.
    pub const fn with_page(mut self, words: u8) -> Self {
        self.tag.words = words;
        self
    }

    /// Adds `items` items of the message page.
    pub const fn with_items(mut self, items: u8) -> Self {
        self.tag.items = items;
        self
    }

    #[inline(always)]
    fn arguments(self, first: u64) -> Words {
        let [a, b, c, d] = self.words;
        [first, self.tag.pack(), a, b, c, d]
    }

    #[inline(always)]
    fn read(words: Words) -> Self {
        let [_, tag, a, b, c, d] = words;
        Self { tag: Tag::unpack(tag), words: [a, b, c, d] }
    }
}

impl Gate {
    /// Calls the gate and waits for the answer.
    #[inline]
    pub fn call(self, message: Message) -> Result<Message, Status> {
        // SAFETY: delegations come out of windows and go into the range reserved for them.
        unsafe { call(Op::GateCall, message.arguments(self.0)) }.map(Message::read)
    }
}

/// Who woke a server, and why.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Caller {
    /// A caller of the gate with this badge; it waits for a reply.
    Call(u64, Message),
    /// The bound notification, with these events.
    Events(u64),
}

#[inline(always)]
fn reply_wait_flags(flags: u64, message: Message) -> Result<Caller, Status> {
    // SAFETY: as for `Gate::call`.
    let words = unsafe { call(Op::GateReplyWait, message.arguments(flags)) }?;
    let message = Message::read(words);
    Ok(match words[0] {
        abi::NOTIFICATION_BADGE => Caller::Events(message.words[0]),
        badge => Caller::Call(badge, message),
    })
}

/// Waits for a caller or the bound notification. A caller that still waits for its reply is aborted.
#[inline]
pub fn wait() -> Result<Caller, Status> {
    reply_wait_flags(flags::WAIT, Message::new(0, [0; 4]))
}

/// Answers the caller being served, then waits like [`wait`].
#[inline]
pub fn reply_wait(answer: Message) -> Result<Caller, Status> {
    reply_wait_flags(flags::REPLY | flags::WAIT, answer)
}

/// Answers the caller being served.
pub fn reply(answer: Message) -> Result<(), Status> {
    reply_wait_flags(flags::REPLY, answer).map(drop)
}

/// Gives up the rest of the time slice.
pub fn yield_now() {
    // SAFETY: no memory changes. The operation has no way to fail.
    let _ = unsafe { call(Op::Yield, [0; 6]) };
}

impl Notification {
    /// Sets event bits.
    #[inline]
    pub fn signal(self, bits: u64) -> Result<(), Status> {
        // SAFETY: no memory changes.
        unsafe { call(Op::NotificationSignal, [self.0, bits, 0, 0, 0, 0]) }.map(drop)
    }

    /// Takes the events, waiting for some until `deadline`, an absolute TSC value.
    #[inline]
    pub fn wait(self, deadline: u64) -> Result<u64, Status> {
        // SAFETY: no memory changes.
        unsafe { call(Op::NotificationWait, [self.0, deadline, 0, 0, 0, 0]) }.map(|words| words[0])
    }

    /// Takes the events that are there, 0 for none.
    #[inline]
    pub fn poll(self) -> u64 {
        self.wait(0).unwrap_or(0)
    }
}

impl Vm {
    /// Makes the guest's doorbell `index` set `bits` of a notification; 0: it has none.
    pub fn bind_doorbell(
        self,
        index: u64,
        notification: Notification,
        bits: u64,
    ) -> Result<(), Status> {
        // SAFETY: no memory changes.
        unsafe { call(Op::VmDoorbell, [self.0, index, notification.0, bits, 0, 0]) }.map(drop)
    }
}

impl Irq {
    fn control(self, action: u64, notification: u64, bit: u64) -> Result<Words, Status> {
        // SAFETY: no memory changes.
        unsafe { call(Op::IrqControl, [self.0, action, notification, bit, 0, 0]) }
    }

    /// Makes the interrupt set bit number `bit` of a notification.
    pub fn bind(self, notification: Notification, bit: u32) -> Result<(), Status> {
        self.control(0, notification.0, bit as u64).map(drop)
    }

    /// Lets the next interrupt come.
    pub fn acknowledge(self) -> Result<(), Status> {
        self.control(1, 0, 0).map(drop)
    }

    /// Address and data of the message that a device sends to interrupt, if it is of that sort.
    pub fn message(self) -> Result<(u64, u64), Status> {
        self.control(3, 0, 0).map(|words| (words[0], words[1]))
    }

    /// Lets none come.
    pub fn mask(self) -> Result<(), Status> {
        self.control(2, 0, 0).map(drop)
    }
}

impl SchedContext {
    /// Changes priority, budget and period (ns).
    pub fn set(self, priority: u8, budget: u64, period: u64) -> Result<(), Status> {
        // SAFETY: no memory changes.
        unsafe { call(Op::SchedControl, [self.0, priority as u64, budget, period, 0, 0]) }.map(drop)
    }

    /// CPU time used on it so far, in ticks of the time-stamp counter; 0 without the right to know.
    pub fn used(self) -> u64 {
        // SAFETY: no memory changes.
        let words = unsafe { call(Op::SchedControl, [self.0, 0, 0, 0, 0, 0]) };
        words.map_or(0, |words| words[0])
    }
}

impl Platform {
    fn control(self, action: PlatformAction, argument: u64) -> Result<u64, Status> {
        // SAFETY: at most the message page changes.
        let words =
            unsafe { call(Op::PlatformControl, [self.0, action as u64, argument, 0, 0, 0]) };
        words.map(|words| words[0])
    }

    /// Writes `length` bytes, at most 512, from the start of the message page to the kernel's log. Returns the number of
    /// bytes of the log that wait to be sent.
    pub fn log(self, length: u64) -> Result<u64, Status> {
        self.control(PlatformAction::Log, length)
    }

    /// Resets the machine.
    pub fn reset(self) -> Result<(), Status> {
        self.control(PlatformAction::Reset, 0).map(drop)
    }

    /// The kernel's counters.
    pub fn stats(self) -> Result<abi::boot::KernelStats, Status> {
        self.control(PlatformAction::Stats, 0)?;
        let mut words = [0; 8];
        crate::Page::current().words(&mut words);
        let [
            system_calls,
            interrupts,
            vm_entries,
            exits_handled,
            pages_used,
            pages_total,
            switches,
            shootdowns,
        ] = words;
        Ok(abi::boot::KernelStats {
            system_calls,
            interrupts,
            vm_entries,
            exits_handled,
            pages_used,
            pages_total,
            switches,
            shootdowns,
        })
    }
}

/// Empties a slot, after taking back what was delegated from it. The object goes with its last capability.
pub fn drop_capability(selector: Selector) -> Result<(), Status> {
    unmap_capability(selector, true)
}
