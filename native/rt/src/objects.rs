//! Typed handles of kernel objects.
//!
//! A handle is a copyable selector. It may name an empty or reused slot; the kernel checks it and
//! returns a status.

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
                /// Names the capability in this slot, which should be of this kind.
                pub const fn at(selector: Selector) -> Self {
                    Self(selector)
                }

                /// Returns the slot.
                pub const fn selector(self) -> Selector {
                    self.0
                }
            }
        )+
    };
}

handles! {
    /// Endpoint for synchronous calls.
    Gate;
    /// Sticky event word.
    Notification;
    /// Hardware interrupt.
    Irq;
    /// Quota of kernel memory.
    Factory;
    /// Right to CPU time.
    SchedContext;
    /// Access to platform operations: kernel log, reset, counters.
    Platform;
    /// Guest-physical address space.
    Vm;
    /// Thread of the running program.
    OwnThread;
}

/// Another task, created by this one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Task(Selector);

/// A thread of another task.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Thread(Selector);

impl Task {
    /// Returns the slot.
    pub const fn selector(self) -> Selector {
        self.0
    }
}

impl Thread {
    /// Returns the slot.
    pub const fn selector(self) -> Selector {
        self.0
    }

    /// Starts the thread at `ip` in its task, with stack pointer `sp` and an argument.
    pub fn start(self, ip: u64, sp: u64, argument: u64) -> Result<(), Status> {
        // SAFETY: the thread runs in another address space.
        unsafe { call(Op::ThreadStart, [self.0, ip, sp, argument, 0, 0]) }.map(drop)
    }

    /// Stops the thread.
    pub fn stop(self) -> Result<(), Status> {
        // SAFETY: no memory changes.
        unsafe { call(Op::ThreadStop, [self.0, 0, 0, 0, 0, 0]) }.map(drop)
    }
}

/// Threads that can serve gates.
pub trait ServerThread {
    /// Returns the thread's slot.
    fn thread(self) -> Selector;

    /// Binds a scheduling context.
    fn bind_sched(self, context: SchedContext) -> Result<(), Status>
    where
        Self: Sized,
    {
        bind(self.thread(), Binding::SchedContext, context.0)
    }

    /// Delivers the thread's faults to a gate.
    fn bind_fault_gate(self, gate: Gate) -> Result<(), Status>
    where
        Self: Sized,
    {
        bind(self.thread(), Binding::FaultGate, gate.0)
    }

    /// Lets a notification wake the thread while it waits for callers.
    fn bind_notification(self, notification: Notification) -> Result<(), Status>
    where
        Self: Sized,
    {
        bind(self.thread(), Binding::Notification, notification.0)
    }
}

impl ServerThread for Thread {
    fn thread(self) -> Selector {
        self.0
    }
}

impl ServerThread for OwnThread {
    fn thread(self) -> Selector {
        self.0
    }
}

fn bind(thread: Selector, binding: Binding, object: Selector) -> Result<(), Status> {
    // SAFETY: no memory changes.
    unsafe { call(Op::ThreadBind, [thread, binding as u64, object, 0, 0, 0]) }.map(drop)
}

impl OwnThread {
    /// Stops the thread and aborts its pending operation.
    pub fn stop(self) -> Result<(), Status> {
        // SAFETY: no memory changes.
        unsafe { call(Op::ThreadStop, [self.0, 0, 0, 0, 0, 0]) }.map(drop)
    }
}

impl Factory {
    fn create(self, kind: Kind, slot: Selector, arguments: [u64; 3]) -> Result<(), Status> {
        let [a, b, c] = arguments;
        // SAFETY: objects are in kernel memory. The kernel maps the pages of threads and vCPUs in
        // unmapped ranges, and only their owners access them, as documented there.
        unsafe { call(Op::Create, [self.0, kind as u64, slot, a, b, c]) }.map(drop)
    }

    /// Creates a task with `slots` capability slots.
    pub fn task(self, slot: Selector, slots: u64) -> Result<Task, Status> {
        self.create(Kind::Task, slot, [slots, 0, 0]).map(|()| Task(slot))
    }

    /// Creates a thread of another task on a CPU, with its message page at `page` there.
    pub fn thread(self, slot: Selector, task: Task, cpu: u32, page: u64) -> Result<Thread, Status> {
        self.create(Kind::Thread, slot, [task.0, cpu as u64, page]).map(|()| Thread(slot))
    }

    /// Creates a thread of this task; [`crate::thread`] starts it.
    pub(crate) fn own_thread(
        self,
        slot: Selector,
        task: Selector,
        cpu: u32,
        page: u64,
    ) -> Result<OwnThread, Status> {
        self.create(Kind::Thread, slot, [task, cpu as u64, page]).map(|()| OwnThread(slot))
    }

    /// Creates a gate that a thread serves.
    pub fn gate(
        self,
        slot: Selector,
        server: impl ServerThread,
        badge: u64,
    ) -> Result<Gate, Status> {
        self.create(Kind::Gate, slot, [server.thread(), badge, 0]).map(|()| Gate(slot))
    }

    /// Creates a notification.
    pub fn notification(self, slot: Selector) -> Result<Notification, Status> {
        self.create(Kind::Notification, slot, [0; 3]).map(|()| Notification(slot))
    }

    /// Creates the object of a hardware interrupt. `flags` as for `Create` in `abi`.
    pub fn irq(
        self,
        slot: Selector,
        platform: Platform,
        gsi: u32,
        flags: u64,
    ) -> Result<Irq, Status> {
        self.create(Kind::Irq, slot, [platform.0, gsi as u64, flags]).map(|()| Irq(slot))
    }

    /// Creates a factory with a quota of `pages` pages from this one, with a highest priority and a
    /// share of CPU time in units of 1 / [`abi::SHARE_OF_CPU`] of a CPU; 0: no share of its own.
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

    /// Creates a scheduling context; budget and period in ns, period 0 for round robin.
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

    /// Creates a guest-physical space, translated as `mode` tells ([`abi::vm_mode`]).
    pub fn vm(self, slot: Selector, mode: u64) -> Result<Vm, Status> {
        self.create(Kind::Vm, slot, [mode, 0, 0]).map(|()| Vm(slot))
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

/// Register part of a message or reply; the remaining words are in the [message page](crate::Page).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Message {
    /// Label, and the amount of the message page that belongs to the message.
    pub tag: Tag,
    /// The first four words.
    pub words: [u64; 4],
}

impl Message {
    /// Creates a message in registers only.
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
    /// Calls the gate and waits for the reply.
    #[inline]
    pub fn call(self, message: Message) -> Result<Message, Status> {
        // SAFETY: delegated memory comes out of windows, received memory goes into the reserved
        // range.
        unsafe { call(Op::GateCall, message.arguments(self.0)) }.map(Message::read)
    }
}

/// Event that woke a server thread.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Incoming {
    /// A caller of the gate with this badge, which waits for a reply.
    Call(u64, Message),
    /// The bound notification, with these events.
    Events(u64),
}

#[inline(always)]
fn reply_wait_flags(flags: u64, message: Message) -> Result<Incoming, Status> {
    // SAFETY: as for `Gate::call`.
    let words = unsafe { call(Op::GateReplyWait, message.arguments(flags)) }?;
    let message = Message::read(words);
    Ok(match words[0] {
        abi::NOTIFICATION_BADGE => Incoming::Events(message.words[0]),
        badge => Incoming::Call(badge, message),
    })
}

/// Waits for a caller or the bound notification. Aborts a caller that still waits for its reply.
#[inline]
pub fn wait() -> Result<Incoming, Status> {
    reply_wait_flags(flags::WAIT, Message::new(0, [0; 4]))
}

/// Replies to the current caller, then waits like [`wait`].
#[inline]
pub fn reply_wait(answer: Message) -> Result<Incoming, Status> {
    reply_wait_flags(flags::REPLY | flags::WAIT, answer)
}

/// Replies to the current caller.
pub fn reply(answer: Message) -> Result<(), Status> {
    reply_wait_flags(flags::REPLY, answer).map(drop)
}

/// Yields the rest of the time slice.
pub fn yield_now() {
    // SAFETY: no memory changes. The operation cannot fail.
    let _ = unsafe { call(Op::Yield, [0; 6]) };
}

impl Notification {
    /// Sets event bits.
    #[inline]
    pub fn signal(self, bits: u64) -> Result<(), Status> {
        // SAFETY: no memory changes.
        unsafe { call(Op::NotificationSignal, [self.0, bits, 0, 0, 0, 0]) }.map(drop)
    }

    /// Takes the events; waits for an event until `deadline`, an absolute TSC value.
    #[inline]
    pub fn wait(self, deadline: u64) -> Result<u64, Status> {
        // SAFETY: no memory changes.
        unsafe { call(Op::NotificationWait, [self.0, deadline, 0, 0, 0, 0]) }.map(|words| words[0])
    }

    /// Takes the pending events, 0 if there are none.
    #[inline]
    pub fn poll(self) -> u64 {
        self.wait(0).unwrap_or(0)
    }
}

impl Vm {
    /// Binds the guest's doorbell `index` to `bits` of a notification; 0 unbinds it.
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

    /// Binds the interrupt to bit number `bit` of a notification.
    pub fn bind(self, notification: Notification, bit: u32) -> Result<(), Status> {
        self.control(0, notification.0, bit as u64).map(drop)
    }

    /// Acknowledges and unmasks the interrupt.
    pub fn acknowledge(self) -> Result<(), Status> {
        self.control(1, 0, 0).map(drop)
    }

    /// Returns address and data of the message (MSI) that the device must send, if the object is of
    /// that kind.
    pub fn message(self) -> Result<(u64, u64), Status> {
        self.control(3, 0, 0).map(|words| (words[0], words[1]))
    }

    /// Masks the interrupt.
    pub fn mask(self) -> Result<(), Status> {
        self.control(2, 0, 0).map(drop)
    }
}

impl SchedContext {
    /// Sets priority, budget and period (ns).
    pub fn set(self, priority: u8, budget: u64, period: u64) -> Result<(), Status> {
        // SAFETY: no memory changes.
        unsafe { call(Op::SchedControl, [self.0, priority as u64, budget, period, 0, 0]) }.map(drop)
    }

    /// Returns the CPU time consumed so far, in TSC ticks; 0 without the right to read it.
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

    /// Writes `length` bytes, at most 512, from the start of the message page to the kernel's log.
    /// Returns the number of bytes of the log that the kernel has yet to send.
    pub fn log(self, length: u64) -> Result<u64, Status> {
        self.control(PlatformAction::Log, length)
    }

    /// Resets the machine.
    pub fn reset(self) -> Result<(), Status> {
        self.control(PlatformAction::Reset, 0).map(drop)
    }

    /// Returns the kernel's counters.
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

/// Empties a slot and revokes all delegations of its capability. The last capability destroys the
/// object.
pub fn drop_capability(selector: Selector) -> Result<(), Status> {
    unmap_capability(selector, true)
}
