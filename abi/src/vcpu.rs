//! vCPU interface: the parts that every processor architecture has.
//!
//! Each vCPU has a *state page* in memory that kernel and VMM share. Its layout is that of the
//! architecture ([`x86`], [`arm64`]), with [`RunControl`] in it. State is copied in *groups*: on
//! exit the kernel fills the groups that the exit needs and sets [`RunControl::valid`]; before the
//! next `vcpu_run` the VMM sets [`RunControl::dirty`] for the groups that it has changed.
//!
//! Exit reasons, events and register formats are those of this interface: the kernel translates
//! from and to the formats of the processor's virtualization extension. Times are values of the
//! architecture's counter (x86-64: the TSC; AArch64: CNTPCT_EL0).

pub mod arm64;
pub mod x86;

use core::sync::atomic::Ordering::Relaxed;
use core::sync::atomic::{AtomicU8, AtomicU64};

/// Exit reasons of every architecture. An architecture adds its own from `FIRST_OF_ARCH` upwards.
pub mod exit {
    /// The vCPU's notification has events, which are in [`super::RunControl::events`]. Without
    /// events: a host interrupt hit the guest in an interrupt shadow, which the processor may lose
    /// on the next entry.
    pub const RECALL: u64 = 1;
    /// [`super::RunControl::deadline`] has passed.
    pub const DEADLINE: u64 = 2;
    /// The guest executed the instruction that waits for an interrupt.
    pub const HALT: u64 = 3;
    /// As [`HALT`], and the kernel waited ([`super::RunControl::halt`]) until the vCPU's
    /// notification had events, which are in [`super::RunControl::events`], or without events until
    /// [`super::RunControl::deadline`].
    pub const HALTED: u64 = 4;
    /// A hypercall that the kernel does not handle.
    pub const HYPERCALL: u64 = 5;
    /// Access to guest-physical memory that is not mapped, or not for this access.
    /// [`super::RunControl::exit_info`] is of [`super::memory_fault`],
    /// [`super::RunControl::fault_address`] the address.
    pub const MEMORY_FAULT: u64 = 6;
    /// Any other exit. [`super::RunControl::exit_info`] is the processor's code.
    pub const UNKNOWN: u64 = 7;
    /// First reason of an architecture. Smaller values are reserved.
    pub const FIRST_OF_ARCH: u64 = 16;
}

/// Bits of [`RunControl::exit_info`] for [`exit::MEMORY_FAULT`].
pub mod memory_fault {
    /// The access was a write (else a read).
    pub const WRITE: u64 = 1 << 0;
    /// The access was an instruction fetch.
    pub const FETCH: u64 = 1 << 1;
    /// The processor was walking the guest's page tables.
    pub const WALK: u64 = 1 << 2;
}

/// Number of the hypercall that returns [`crate::ABI_VERSION`]. Handled by the kernel, also in
/// user mode and in single-step mode, where no trap follows it.
pub const HYPERCALL_VERSION: u64 = 0x5041_5241_0000;
/// Number of the hypercall that rings a doorbell, whose index is its argument. Handled by the
/// kernel, with a result of [`doorbell`], if the guest's kernel calls; else the VMM gets the exit.
pub const HYPERCALL_DOORBELL: u64 = 0x5041_5241_0001;
/// Number of doorbells of a VM.
pub const DOORBELLS: usize = 4;

/// Number of vCPUs of a VM that may be targets of [`crate::Op::VmSgiTarget`].
pub const SGI_TARGETS: usize = 16;

/// Results of [`HYPERCALL_DOORBELL`].
pub mod doorbell {
    /// The doorbell's notification was signalled.
    pub const RUNG: u64 = 0;
    /// No such doorbell, or it is not bound to an existing notification.
    pub const UNBOUND: u64 = 1;
}

/// A word of type `u8` in memory that kernel and VMM share.
#[derive(Debug, Default)]
#[repr(transparent)]
pub struct SharedU8(AtomicU8);

impl SharedU8 {
    /// Reads the word once.
    #[inline(always)]
    pub fn get(&self) -> u8 {
        self.0.load(Relaxed)
    }

    /// Writes the word once.
    #[inline(always)]
    pub fn set(&self, value: u8) {
        self.0.store(value, Relaxed);
    }
}

/// A word of type `u64` in memory that kernel and VMM share.
#[derive(Debug, Default)]
#[repr(transparent)]
pub struct SharedU64(AtomicU64);

impl SharedU64 {
    /// Reads the word once.
    #[inline(always)]
    pub fn get(&self) -> u64 {
        self.0.load(Relaxed)
    }

    /// Writes the word once.
    #[inline(always)]
    pub fn set(&self, value: u64) {
        self.0.store(value, Relaxed);
    }

    /// Adds to the word. Reads and writes it once each, not as one atomic operation: for counters
    /// with one writer.
    #[inline(always)]
    pub fn add(&self, value: u64) {
        self.set(self.get().wrapping_add(value));
    }
}

/// Part of a state page that every architecture has.
#[derive(Debug, Default)]
#[repr(C)]
pub struct RunControl {
    /// Exit reason, one of [`exit`] or of the architecture. Out.
    pub exit_reason: SharedU64,
    /// Details of the exit, in the format that its reason states; otherwise undefined. Out.
    pub exit_info: SharedU64,
    /// Guest-physical address of an [`exit::MEMORY_FAULT`]. Out.
    pub fault_address: SharedU64,
    /// Events taken from the notification with [`exit::RECALL`] or [`exit::HALTED`]. Out.
    pub events: SharedU64,
    /// Groups that the kernel filled on this exit. Out.
    pub valid: SharedU64,
    /// Groups that the VMM has changed; cleared by the kernel. In.
    pub dirty: SharedU64,
    /// Absolute counter value at which to exit with [`exit::DEADLINE`] or [`exit::HALTED`];
    /// [`crate::FOREVER`] for none. Read on every `vcpu_run`. In.
    pub deadline: SharedU64,
    /// If not 0 and the guest halts with nothing to inject and no window, the kernel waits for an
    /// event or the deadline and exits with [`exit::HALTED`]. Otherwise, or if it cannot wait, the
    /// VMM gets the exit at once. In.
    pub halt: SharedU64,
    /// Counter ticks that the kernel has waited in this way. Out.
    pub halted: SharedU64,
    /// Number of world switches into this vCPU. Out.
    pub entries: SharedU64,
    /// Exits handled in the kernel, without the VMM: host interrupts, kernel hypercalls. Out.
    pub handled_in_kernel: SharedU64,
    /// Number of times that the scheduler preempted the vCPU's thread while it was in the guest.
    /// Out.
    pub preemptions: SharedU64,
}
