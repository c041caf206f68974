//! System calls. One macro defines the operation codes and the text of the generated specification,
//! so that they cannot differ.

/// Documentation of one operation, for the generated specification.
#[derive(Clone, Copy, Debug)]
pub struct OpDoc {
    /// Name of the [`Op`] variant.
    pub name: &'static str,
    /// Operation code, in `rax`.
    pub code: u64,
    /// Arguments, in the order `rdi, rsi, rdx, r10, r8, r9`.
    pub args: &'static str,
    /// Results besides the status, in the same order.
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
            /// Operation with this code.
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
    /// Calls a gate and waits for the reply. A server on the same CPU runs on the caller's
    /// scheduling context. The items of a message are delegated all or none; only the last one may
    /// be a grant, of one capability or one mapping. Rights: gate `CALL`.
    GateCall = 0 ("gate, tag, word0, word1, word2, word3") -> ("–, tag, word0, word1, word2, word3");
    /// Replies to the caller being served (flag `REPLY`) and waits for the next one (flag `WAIT`).
    /// Returns the badge of the called gate, or `NOTIFICATION_BADGE` with the events in `word0` if
    /// the thread's bound notification was signalled. `WAIT` without `REPLY` aborts the call being
    /// served.
    GateReplyWait = 1 ("flags, tag, word0, word1, word2, word3") -> ("badge, tag, word0, word1, word2, word3");
    /// Sets bits of a notification and wakes the thread that waits for it. Rights: notification
    /// `SIGNAL`.
    NotificationSignal = 2 ("notification, bits") -> ("");
    /// Waits until a notification has pending bits, and takes them all. `deadline` is an absolute
    /// time in ticks (x86-64: of the TSC); 0 polls, `FOREVER` waits without limit. Fails with
    /// `Timeout` if the deadline passes first. Rights: notification `WAIT`.
    NotificationWait = 3 ("notification, deadline") -> ("bits");
    /// Creates an object from a factory's quota and inserts a capability to it, with all rights,
    /// into the caller's free slot `slot`. `kind` is a `Kind`, on which the arguments depend:
    ///
    /// * Task: number of capability slots (1..=8192).
    /// * Thread: task (`THREAD`), CPU index, address of the message page in that task.
    /// * Gate: thread (`SERVE`), badge.
    /// * Notification: none.
    /// * Irq: platform (`MAKE_IRQ`), global system interrupt number, flags (bit 0 level-triggered,
    ///   bit 1 active low, bit 2 message-signalled: the number is ignored, and `IrqControl` returns
    ///   address and data).
    /// * Factory: quota in pages, taken from this factory; maximum priority of scheduling contexts
    ///   created from it, at most this factory's; share of CPU time in units of 1 / `SHARE_OF_CPU`
    ///   of a CPU, taken from this factory's share (0: its objects are charged to this factory's
    ///   share).
    /// * SchedContext: priority (0..=63, 63 is the highest; at most the factory's maximum), budget
    ///   in ns, period in ns (0 or equal to the budget: round robin). It uses at most the budget in
    ///   any interval of one period. It is charged budget / period to the factory's share, if there
    ///   is one; a whole CPU for round robin (`NoQuota`).
    /// * Vm: mode ([`crate::vm_mode`]).
    /// * Vcpu: vm (`VCPU`), address of the state page in the caller's task, notification (`WAIT`)
    ///   whose events make `VcpuRun` return.
    ///
    /// The new capability is a delegation of the factory's: it is removed with that one, in any
    /// task to which it was granted. Fails with `BadRights` also for a priority above the factory's
    /// maximum. Rights: factory `CREATE`.
    Create = 4 ("factory, kind, slot, arg0, arg1, arg2") -> ("");
    /// Delegates `item` from the caller's space at `source` to the space of `target` (a Task or,
    /// for memory and ports, a Vm; selector `SELF` is the caller's own task) at `destination`.
    /// Bases count pages, selectors or ports and are multiples of the item's size. The whole source
    /// must exist (`BadArgument`) and the whole destination be free (`Busy`). Fails with
    /// `BadRights` for a page placed by the kernel, and with `Overflow` for more than 64
    /// capabilities or more than 250 nested delegations. To grant, nothing in the range may have
    /// been delegated further, and memory and ports must be one mapping (`Busy`). All or nothing,
    /// except that mappings made so far remain if the quota is exhausted, or if source or
    /// destination change meanwhile. May be preempted and then continues by itself; `r8`, initially
    /// 0, holds the progress. Rights: target `MAP`; capabilities `DELEGATE`.
    Delegate = 5 ("target, item, source, destination") -> ("");
    /// Revokes all direct and indirect delegations from the given range of the caller's own space;
    /// with flag bit 0 (`UNMAP_SELF`) also unmaps the range itself. Unmapped parts of the range are
    /// ignored. `UNMAP_SELF` removes only whole mappings of memory and ports: it fails with
    /// `BadArgument` where the range cuts one and with `BadRights` where the kernel placed the
    /// page, after mappings above it in the range have been removed. Removing the last capability
    /// to an object destroys it. May be preempted and then continues by itself; `r10`, initially 0,
    /// holds the progress.
    Unmap = 6 ("item, base, flags") -> ("");
    /// Starts (or restarts) a stopped thread at `ip` with stack pointer `sp` and `argument` in
    /// `rdi`. Rights: thread `CONTROL`.
    ThreadStart = 7 ("thread, ip, sp, argument") -> ("");
    /// Stops a thread and aborts its pending call and its callers. Rights: thread `CONTROL`.
    ThreadStop = 8 ("thread") -> ("");
    /// Binds an object to a thread (`Binding`). Rights: thread `CONTROL`; scheduling context
    /// `SCHEDULE`, gate `CALL`, notification `WAIT`.
    ThreadBind = 9 ("thread, binding, object") -> ("");
    /// Enters the guest until an event that the kernel does not handle. The reason, and the state
    /// needed to handle it, are in the vCPU's state page. Rights: vcpu `RUN`.
    VcpuRun = 10 ("vcpu") -> ("");
    /// Copies the given state groups (`vcpu::group`) from the processor structures to the state
    /// page, and marks them valid, except those that another CPU, on which the vCPU ran last, may
    /// have loaded. Rights: vcpu `RUN`.
    VcpuState = 11 ("vcpu, groups") -> ("");
    /// Binds an interrupt to bit `bit` of a notification and unmasks it (action 0; notification
    /// `SIGNAL`), acknowledges and unmasks it (action 1), masks it (action 2), or returns the
    /// address and data of its message (action 3), also of one that an I/O APIC sends for its
    /// input. Rights: irq `IRQ`.
    IrqControl = 12 ("irq, action, notification, bit") -> ("address, data");
    /// Changes priority (at most the maximum of the factory that it was created from), budget and
    /// period; with budget 0 changes nothing. Budget used so far stays used. Returns the CPU time
    /// used in total, in ticks. Fails with `BadRights` if the priority is too high, and with
    /// `NoQuota` if the factory's share is exceeded. Rights: scheduling context `SCHEDULE`.
    SchedControl = 13 ("sched_context, priority, budget, period") -> ("used");
    /// Writes the log, resets the machine or reads counters, by `PlatformAction`, which lists the
    /// rights.
    PlatformControl = 14 ("platform, action, argument") -> ("value");
    /// Yields the rest of the time slice; with a period, the currently usable budget counts as
    /// used.
    Yield = 15 ("") -> ("");
    /// Binds a doorbell of a VM: the hypercall `HYPERCALL_DOORBELL` with this index (below
    /// `vcpu::DOORBELLS`) sets these bits of a notification. With bits 0, unbinds it; no
    /// notification is needed. Destroying the notification unbinds it, too. Rights: vm `VCPU`,
    /// notification `SIGNAL`.
    VmDoorbell = 16 ("vm, index, notification, bits") -> ("");
    /// Removes the mappings of memory or ports that overlap the range of `item` at `destination` in
    /// the space of `target` (as for `Delegate`), completely, as far as they were delegated from
    /// the caller's task. Other mappings of the same memory remain. Whatever was delegated further
    /// from a removed mapping is revoked. With flag bit 0 (`FREE_TABLES`) also frees the page
    /// tables of the range, unless something in it is still mapped. May be preempted and then
    /// continues by itself; `r8`, initially 0, holds the progress. Rights: target `MAP`.
    UnmapAt = 17 ("target, item, destination, flags") -> ("");
    /// Makes the kernel look at the state page of a vCPU again, whose guest may run: what the page
    /// says about pending interrupts takes effect without an exit to the VMM, and ends the guest's
    /// wait for one. Returns 1 if a thread is in `VcpuRun`, else 0: it takes effect with the next
    /// one. On x86-64 the state page has no such words, and a halted guest exits. Rights: vcpu
    /// `RUN`.
    VcpuNotify = 18 ("vcpu") -> ("running");
    /// Makes a vCPU of the VM the target with this index (below `vcpu::SGI_TARGETS`) of interrupts
    /// that the guest sends by software. On AArch64 the index is the affinity. If the sender is a
    /// target, and all targets that it addresses are in `VcpuRun` and have the interrupt enabled
    /// (`sgi_enabled` of their state pages), the kernel delivers it; indices without a target are
    /// absent CPUs. Otherwise the sender's VMM gets the exit. On x86-64 it has no effect. Fails
    /// with `BadArgument` for a vCPU of another VM. Rights: vm `VCPU`, vcpu `RUN`.
    VmSgiTarget = 19 ("vm, index, vcpu") -> ("");
}

/// Selector of the caller's own task in [`Op::Delegate`].
pub const SELF: u64 = u64::MAX;

/// Share of CPU time that is one whole CPU.
pub const SHARE_OF_CPU: u64 = 1_000_000;

/// Flag of [`Op::Unmap`]: also remove the caller's own mappings (whole ones only) or capabilities.
pub const UNMAP_SELF: u64 = 1;

/// Flag of [`Op::UnmapAt`]: also free page tables of the range.
pub const FREE_TABLES: u64 = 1;

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
