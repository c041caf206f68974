//! Boards: which chips a virtual machine has, where they sit and how they are wired.
//!
//! The program that hosts a machine implements [`Host`] for the machine's outside and
//! [`vmm_cpu::Vcpu`] for each virtual CPU, then calls [`Pc::run`] in a loop:
//!
//! ```text
//! // PcConfig, &GuestMemory, impl Fn(leaf, subleaf) -> [eax, ebx, ecx, edx] of the host
//! let mut pc = Pc::new(config, memory, host_cpuid);
//! // initial registers: from vmm-boot, through vmm_cpu::Vcpu; TSC offset and XCR0: by `run`
//! loop {
//!     match pc.run(0, &mut vcpu, &mut host) {       // index of the vCPU
//!         StopReason::Recall(events) => { /* host's own events */ pc.input(Some(&cpu), &mut host); }
//!         StopReason::Idle { deadline_tsc } => { /* wait for a notification or the deadline */ }
//!         StopReason::End(outcome) => break,
//!     }
//! }
//! ```
//!
//! Invariants: time comes from the host's time-stamp counter only; the order of calls determines what the
//! machine does; nothing that a guest does panics, and one call does a bounded amount of work beside
//! running the guest.
#![cfg_attr(not(test), no_std)]
#![forbid(unsafe_code)]

pub mod functions;
mod hypercalls;
mod interrupts;
pub mod layout;
mod once;
mod pc;
#[cfg(feature = "load")]
pub mod registers;

use core::fmt;

pub use functions::{DeviceBackend, Functions, Model, Slots};
pub use layout::{layout, layout_with_pci};
pub use once::Once;
pub use pc::{Counters, Pc};
use proto::wedge::log;
use vmm_cpu::TscClock;
pub use vmm_cpu::{Outcome, StopReason};

/// What a machine is made of.
#[derive(Clone, Copy, Debug)]
pub struct PcConfig {
    /// Virtual CPUs, 1 to as many as the [`Pc`] has room for.
    pub vcpus: u8,
    /// Machine time: the host's counter frequency, and its value when the machine starts.
    pub clock: TscClock,
    /// `XCR0` bits that the host switches for guests.
    pub xcr0_mask: u64,
    /// Wall-clock time at machine time 0, in seconds since 1970-01-01 UTC.
    pub start_unix: u64,
    /// Offer the KVM paravirtual clock.
    pub kvmclock: bool,
    /// Offer the KVM record of stolen time.
    pub steal_time: bool,
    /// Offer flushes of other CPUs' TLBs that are asked for in that record.
    pub pv_flush: bool,
    /// Offer interrupts to several CPUs by one KVM hypercall. Not where the guest's hypercalls may reach somebody else.
    pub pv_ipi: bool,
    /// Number of the machine among all of its host, from 1.
    pub id: u32,
}

/// How grave a message is.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Level {
    /// The machine cannot go on.
    Error,
    /// The guest did something that this machine does not support.
    Warning,
    /// Worth knowing.
    Info,
}

impl Level {
    /// Its number among those of [`proto::wedge::log`].
    pub const fn number(self) -> u64 {
        match self {
            Self::Error => log::ERROR,
            Self::Warning => log::WARN,
            Self::Info => log::INFO,
        }
    }
}

/// The outside of a machine.
pub trait Host {
    /// The host's time-stamp counter, now.
    fn tsc(&self) -> u64;
    /// Puts a byte to the serial line. `false`: no room now; the machine keeps the byte and
    /// tries again when [`Pc::input`] is called.
    fn put(&mut self, byte: u8) -> bool;
    /// Takes a byte from the serial line, if there is one.
    fn take(&mut self) -> Option<u8>;
    /// A message for the log, one line.
    fn log(&mut self, level: Level, text: fmt::Arguments<'_>);
    /// Virtual CPU `index`, which may be running on another host CPU or be idle, has something to do.
    /// Never called for the vCPU that is being run.
    fn kick(&mut self, index: usize);
}
