//! The system calls. One macro defines the numbers and the text of the generated specification,
//! so that they cannot differ.

/// Documentation of one operation, for the generated specification.
#[derive(Clone, Copy, Debug)]
pub struct OpDoc {
    /// Name as in [`Op`].
    pub name: &'static str,
    /// Number in `rax`.
    pub code: u64,
    /// Arguments, in the order `rdi, rsi, rdx, r10, r8, r9`.
    pub args: &'static str,
    /// Results beside the status, in the same order.
    pub results: &'static str,
    /// Contract.
    pub text: &'static str,
}

macro_rules! operations {
    ($($(#[doc = $text:literal])+ $name:ident = $code:literal ($args:literal) -> ($results:literal);)+) => {
        /// A system call, in `rax`.
        #[derive(Clone, Copy, PartialEq, Eq, Debug)]
        #[repr(u64)]
        pub enum Op {
            $($(#[doc = $text])+ $name = $code,)+
        }

        impl Op {
            /// The operation with this number.
            pub const fn from_code(code: u64) -> Option<Self> {
                match code {
                    $($code => Some(Self::$name),)+
                    _ => None,
                }
            }
        }

        /// All operations, for the generated specification.
        pub const OPERATIONS: &[OpDoc] = &[
            $(OpDoc {
                name: stringify!($name),
                code: $code,
                args: $args,
                results: $results,
                text: concat!($($text, "\n"),+),
            },)+
        ];
    };
}

operations! {
    /// Calls a gate and waits for the reply. The serving thread runs on the caller's scheduling
    /// context if it is on the same CPU. Rights: gate `CALL`.
    GateCall = 0 ("gate, tag, word0, word1, word2, word3") -> ("–, tag, word0, word1, word2, word3");
    /// Answers the caller being served (flag `REPLY`) and waits for the next one (flag `WAIT`).
    /// Returns the called gate's badge, or `NOTIFICATION_BADGE` with the events in `word0`
    /// when the thread's bound notification was signalled. `WAIT` without `REPLY` aborts the call being
    /// served.
    GateReplyWait = 1 ("flags, tag, word0, word1, word2, word3") -> ("badge, tag, word0, word1, word2, word3");
    /// Sets bits in the event word and wakes who waits for it. Rights: notification `SIGNAL`.
    NotificationSignal = 2 ("notification, bits") -> ("");
    /// Waits until the event word is not zero, takes all its bits and clears it.
    /// `deadline` is an absolute TSC value; 0 polls, `FOREVER` waits without end.
    /// `Timeout` if the deadline passes first. Rights: notification `WAIT`.
    NotificationWait = 3 ("notification, deadline") -> ("bits");
    /// Creates an object from a factory's quota and puts its capability, with all rights, into the
    /// caller's free slot `slot`. `kind` is a `Kind`; the arguments depend on it.
    /// Task: number of capability slots (1..=8192).
    /// Thread: task (`THREAD`), CPU number, address of the message page in that task.
    /// Gate: thread (`SERVE`), badge.
    /// Notification: none.
    /// Irq: platform (`MAKE_IRQ`), global interrupt number, flags (bit 0 level triggered, bit 1 active
    /// low, bit 2 message-signalled: the number is then ignored and `arg0`/`arg1` of `IrqControl` query
    /// give address and data).
    /// Factory: quota in pages, taken from this factory; the highest priority of scheduling contexts made from it,
    /// at most this factory's; its share of CPU time in units of 1 / `SHARE_OF_CPU` of a CPU, taken from this
    /// factory's (0: what is made from it takes part of this factory's share).
    /// SchedContext: priority (0..=63, 63 first; at most the factory's highest), budget in ns, period in ns
    /// (0 or = budget: round robin). In any time of one period it uses at most the budget. It takes budget / period of
    /// the factory's share, if that has one: a whole CPU for round robin (`NoQuota`).
    /// Vm: mode (0 nested paging).
    /// Vcpu: vm (`VCPU`), address of the state page in the caller's task, notification (`WAIT`) whose
    /// events make `VcpuRun` return.
    /// `BadRights` also for a priority above the factory's highest. Rights: factory `CREATE`.
    Create = 4 ("factory, kind, slot, arg0, arg1, arg2") -> ("");
    /// Delegates `item` from the caller's space at `source` to the space of `target` (a Task or, for
    /// memory and ports, a Vm; selector `SELF` names the caller's own task) at `destination`.
    /// Bases count pages, selectors or ports and are multiples of the item's size. All of the source
    /// must be there (`BadArgument`) and nothing at the destination (`Busy`). `BadRights`: a page
    /// that the kernel placed. `Overflow`: more than 64 capabilities, or more than 250
    /// delegations in a row. To grant, no mapping in the range may be larger than the item, and nothing
    /// may have been delegated from it (`Busy`). All or nothing, but when the quota ends in
    /// the middle of several mappings, or source or destination change meanwhile, those before stay.
    /// May be preempted and then continues by itself: `r8`, 0 at first, says how far it is.
    /// Rights: target `MAP`; capabilities `DELEGATE`.
    Delegate = 5 ("target, item, source, destination") -> ("");
    /// Takes back everything that was delegated, at any remove, from the given range of the caller's
    /// own space; with flag bit 0 (`UNMAP_SELF`) also from the caller's space itself. What is not
    /// there counts as taken back. `UNMAP_SELF` removes whole mappings of memory and ports only:
    /// `BadArgument` where the range cuts one, `BadRights` where the kernel placed the page; what
    /// lies above it in the range is gone then. An object whose last
    /// capability goes is destroyed. May be preempted and then continues by itself: `r10`, 0 at first, says how far it is.
    Unmap = 6 ("item, base, flags") -> ("");
    /// Starts (or restarts) a stopped thread at `ip` with stack `sp`; `argument` arrives in `rdi`.
    /// Rights: thread `CONTROL`.
    ThreadStart = 7 ("thread, ip, sp, argument") -> ("");
    /// Stops a thread; what it waits for is aborted. Rights: thread `CONTROL`.
    ThreadStop = 8 ("thread") -> ("");
    /// Binds an object to a thread (`Binding`). Rights: thread `CONTROL`; scheduling context
    /// `SCHEDULE`, gate `CALL`, notification `WAIT`.
    ThreadBind = 9 ("thread, binding, object") -> ("");
    /// Enters the guest until something happens that the kernel does not settle. The reason and the
    /// state that it needs are in the vCPU's state page. Rights: vcpu `RUN`.
    VcpuRun = 10 ("vcpu") -> ("");
    /// Copies the given state groups (`vcpu::group`) from the processor structure to the state page.
    /// Rights: vcpu `RUN`.
    VcpuState = 11 ("vcpu, groups") -> ("");
    /// Binds an interrupt to bit `bit` of a notification (action 0; notification `SIGNAL`), acknowledges
    /// and unmasks it (action 1), masks it (action 2), or returns message address and data (action 3), those
    /// too that an I/O APIC sends for its input.
    /// Rights: irq `IRQ`.
    IrqControl = 12 ("irq, action, notification, bit") -> ("address, data");
    /// Changes priority (up to the highest of the factory that it was made from), budget and period; with budget 0
    /// nothing. What has been used of the budget stays used. Returns the CPU time used on it, in ticks of the
    /// time-stamp counter. `BadRights`: the priority is too high. `NoQuota`: it is more than the factory's share. Rights: scheduling context `SCHEDULE`.
    SchedControl = 13 ("sched_context, priority, budget, period") -> ("used");
    /// Writes the log, resets the machine, reads counters (`PlatformAction`). Rights: see there.
    PlatformControl = 14 ("platform, action, argument") -> ("value");
    /// Gives up the rest of the time slice; of a budget, what could be used now counts as used.
    Yield = 15 ("") -> ("");
    /// Makes the guest's hypercall `HYPERCALL_DOORBELL` with this index (below `vcpu::DOORBELLS`) set these bits of
    /// a notification; bits 0: there is no such doorbell, and no notification needed. The doorbell of a notification
    /// that has ended is dead. Rights: vm `VCPU`, notification `SIGNAL`.
    VmDoorbell = 16 ("vm, index, notification, bits") -> ("");
}

/// Selector that names the caller's own task in [`Op::Delegate`].
pub const SELF: u64 = u64::MAX;

/// CPU time of one CPU, in the units of a factory's share.
pub const SHARE_OF_CPU: u64 = 1_000_000;

/// Flag of [`Op::Unmap`]: also remove the caller's own mappings, each as a whole, or capabilities.
pub const UNMAP_SELF: u64 = 1;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_dense_and_round_trip() {
        for (index, doc) in OPERATIONS.iter().enumerate() {
            assert_eq!(doc.code, index as u64);
            assert_eq!(Op::from_code(doc.code).map(|op| op as u64), Some(doc.code));
        }
        assert_eq!(Op::from_code(OPERATIONS.len() as u64), None);
    }
}
