//! Boards: the devices of a VM, their addresses and their interrupt wiring.
//!
//! The VMM implements [`Host`] for the VM and [`vmm_x86::X86Vcpu`] for each vCPU, then calls
//! [`Pc::run`] in a loop:
//!
//! ```text
//! // PcConfig, &GuestMemory, impl Fn(leaf, subleaf) -> [eax, ebx, ecx, edx] of the host
//! let pc = Pc::new(config, memory, host_cpuid);
//! let mut cpu = pc.cpu(0);                          // index of the vCPU
//! // initial registers: from vmm-boot, through vmm_x86::X86Vcpu; TSC offset and XCR0: by `run`
//! loop {
//!     match pc.run(&mut cpu, &mut vcpu, &mut host) {
//!         StopReason::Recall(events) => { /* handle them */ pc.input(Some(&cpu), &mut host); }
//!         StopReason::Idle { deadline_ticks } => { /* wait for a notification or the deadline */ }
//!         StopReason::End(outcome) => break,
//!     }
//! }
//! ```
//!
//! Invariants: time comes from the host's counter only; the order of calls determines
//! the behaviour of the VM; no guest operation causes a panic, and one call does a bounded amount
//! of work beside running the guest.
#![cfg_attr(not(test), no_std)]
#![forbid(unsafe_code)]

pub mod functions;
mod hypercalls;
mod interrupts;
pub mod layout;
mod once;
mod pc;
mod pci;
#[cfg(feature = "load")]
pub mod registers;
mod virt;

use core::fmt;
use core::time::Duration;

pub use functions::{Functions, Model, Slots};
pub use layout::{layout, layout_with_pci};
pub use once::Once;
pub use pc::{Counters, Pc};
pub use virt::{Virt, VirtBus, VirtConfig};
pub use vmm_arm64::{Sgis, Virq};
use vmm_bus::BackendRef;
pub use vmm_dev::pci::pass_through::PassThroughFunction;
use vmm_vcpu::CounterClock;
pub use vmm_vcpu::{Outcome, StopReason};

/// Configuration of a board.
#[derive(Clone, Copy, Debug)]
pub struct PcConfig {
    /// Number of vCPUs, 1 to the capacity of the [`Pc`].
    pub vcpus: u8,
    /// VM time: frequency of the host's counter, and its value at the start of the VM.
    pub clock: CounterClock,
    /// `XCR0` bits that the host switches for guests.
    pub xcr0_mask: u64,
    /// Wall-clock time at VM time 0, since 1970-01-01 UTC.
    pub start_unix: Duration,
    /// Offer the KVM paravirtual clock.
    pub kvmclock: bool,
    /// Offer the KVM steal-time record.
    pub steal_time: bool,
    /// Offer TLB flushes of other CPUs that are requested in that record.
    pub pv_flush: bool,
    /// Offer IPIs to several CPUs by one KVM hypercall. Not for hosts where the guest's hypercalls
    /// may reach another hypervisor.
    pub pv_ipi: bool,
    /// The host translates guest-physical addresses in hardware; without it, features of address
    /// translation are hidden.
    pub nested_paging: bool,
    /// Id of the VM among all VMs of its host, from 1.
    pub id: u32,
}

/// Severity of a message.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Level {
    /// The VM cannot continue.
    Error,
    /// The guest used a feature that the VM does not support.
    Warning,
    /// Information.
    Info,
}

impl Level {
    /// Returns 0 for the most severe level, and one more for each further one.
    pub const fn number(self) -> u64 {
        self as u64
    }
}

/// Services of the VMM process for a board.
pub trait Host {
    /// Current value of the host's counter.
    fn counter(&self) -> u64;
    /// Back end of the serial line. When it has room again, the host calls [`Pc::input`].
    fn serial(&mut self) -> BackendRef<'_> {
        BackendRef::None
    }
    /// Logs a message of one line.
    fn log(&mut self, level: Level, text: fmt::Arguments<'_>);
    /// Puts interrupts that `take` returns into the interface of vCPU `index` (board `virt`), which
    /// may run meanwhile, while that has room. Returns whether it has put one; a host that cannot
    /// takes none.
    fn put_virqs(&mut self, _index: usize, _take: &mut dyn FnMut() -> Option<Virq>) -> bool {
        false
    }
    /// Sets the SGIs of vCPU `index` (board `virt`), which may run meanwhile. A host that delivers
    /// none by itself ignores them.
    fn set_sgis(&mut self, _index: usize, _sgis: Sgis) {}
    /// Sets the interrupts of the channels' doorbells (board `virt`): `virq` returns that of the
    /// channel in a slot, if vCPU 0, whose thread peers signal, is to get one at each doorbell; it
    /// may run meanwhile. A host that delivers none by itself ignores them.
    fn set_doorbells(&mut self, _virq: &mut dyn FnMut(usize) -> Option<Virq>) {}
    /// The guest has ended a level-triggered interrupt of device `number` that it drives itself
    /// (board `virt`): the device may interrupt again.
    fn end_pass_through(&mut self, _number: usize) {}
    /// Maps the registers of base address `index` of PCI function `number` that the guest drives
    /// itself (board `virt`) at a guest-physical address, or unmaps them (`None`). Returns whether
    /// they are mapped; a host without such functions maps none.
    fn place_registers(&mut self, _number: usize, _index: usize, _address: Option<u64>) -> bool {
        false
    }
    /// Makes interrupts of [`Host::put_virqs`] take effect on a vCPU that runs; returns `false` if
    /// it does not run.
    fn notify(&mut self, _index: usize) -> bool {
        false
    }
    /// Wakes vCPU `index`, which may run on another host CPU or be idle. Never called for the vCPU
    /// that is being run.
    fn kick(&mut self, index: usize);
}
