//! vCPUs as a library: the interface to a host's vCPU ([`Vcpu`]), the exit reasons ([`Exit`]), and
//! the x86-64 CPU that the guest sees.
//!
//! Invariants:
//! - No event is lost: an event whose delivery an exit interrupted is injected again before any
//!   other.
//! - Every guest operation ends in an architectural result (a value, an exception, a reset) or in a
//!   typed outcome, never in a panic.
//! - All state is plain data: no lock, clock, thread or file. Time is passed by the caller.
#![cfg_attr(not(test), no_std)]
#![forbid(unsafe_code)]

pub mod apic;
pub mod board;
pub mod clock;
pub mod cpuid;
pub mod exit;
pub mod length;
pub mod msr;
mod nmi;
pub mod pv;
pub mod run;
pub mod svm;
pub mod vcpu;
pub mod walk;

#[cfg(any(test, feature = "testing"))]
pub mod testing;

pub use board::{Acknowledged, Board, Outcome, PendingInterrupt, Signals, Unknown};
pub use clock::TscClock;
pub use exit::{Access, Exit, IoExit, MemoryFault, Space};
pub use run::{Cpu, StopReason};
pub use vcpu::{Event, Gpr, InterruptWindow, Reg, Seg, Segment, Vcpu};

/// Maximum number of vCPUs of a VM.
pub const MAX_VCPUS: usize = 8;
