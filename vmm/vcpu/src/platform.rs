//! The interface of the platform (machine model) around a vCPU.

use core::time::Duration;
use vmm_bus::Nanos;
use vmm_mem::GuestMemory;

use crate::clock::CounterClock;
use crate::stop::Outcome;

/// Events pending for a vCPU. `I`: its interrupts, in the form of the guest architecture.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Signals<I> {
    /// Set once the VM has ended.
    pub end: Option<Outcome>,
    /// Next deadline of a timer, in VM time.
    pub deadline: Nanos,
    /// Interrupts, and start or reset of the vCPU.
    pub interrupts: I,
}

/// The platform around a vCPU. `cpu` is the vCPU's index.
pub trait Platform {
    /// Interrupts of a vCPU of this guest architecture.
    type Interrupts;

    /// Guest memory.
    fn memory(&self) -> &GuestMemory;
    /// VM time.
    fn clock(&self) -> &CounterClock;
    /// Current value of the host's counter.
    fn counter(&self) -> u64;
    /// Wall-clock time at VM time 0, since 1970-01-01 UTC.
    fn start_unix(&self) -> Duration;

    /// Reads from a device at an address without memory: at most eight bytes.
    fn mmio_read(&mut self, cpu: usize, address: u64, size: u8) -> u64;
    /// Writes to a device at an address without memory.
    fn mmio_write(&mut self, cpu: usize, address: u64, size: u8, value: u64);

    /// Returns true if events for this vCPU may have occurred since the last
    /// [`Platform::service_timers`].
    fn needs_service(&self, cpu: usize) -> bool;
    /// Services all due timers and returns the events pending for the vCPU.
    fn service_timers(&mut self, cpu: usize) -> Signals<Self::Interrupts>;
}
