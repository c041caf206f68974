//! One vCPU of a host.

/// An access to guest-physical memory that is not mapped, or not for this access.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct MemoryFault {
    /// Guest-physical address.
    pub gpa: u64,
    /// A write (else a read).
    pub write: bool,
    /// An instruction fetch.
    pub fetch: bool,
    /// The CPU was walking the guest's page tables.
    pub walk: bool,
}

/// One vCPU of a host, as far as it does not depend on the guest architecture: entry, deadline,
/// steal time. The registers and the injection of events are the architecture's.
///
/// Setters take effect at the next [`Vcpu::run`].
pub trait Vcpu {
    /// Exit reason.
    type Exit;

    /// Sets the value of the host's counter at which to leave the guest with an exit for the
    /// deadline; `u64::MAX` for none. Stays set until changed.
    fn set_deadline(&mut self, ticks: u64);
    /// Steal time: time in which this vCPU was runnable but the host ran other work, in ticks of
    /// the host's counter, up to the last preemption.
    fn stolen(&mut self) -> u64;
    /// Makes each instruction of the guest that waits for an interrupt (`HLT`, `WFI`) exit at once.
    /// Otherwise, and initially, the host may wait in place of the guest.
    fn set_wait_exits(&mut self, exit: bool);
    /// Flushes the guest's TLB, global entries included, before the next entry.
    fn flush_tlb(&mut self);
    /// Runs the guest until it exits.
    fn run(&mut self) -> Self::Exit;
}
