//! A virtual processor as a library: what a host offers for it ([`Vcpu`]), why it stops
//! ([`Exit`]), and what an x86-64 guest sees of it.
//!
//! Invariants:
//! - No event is lost: what an exit cut short is injected again before anything else.
//! - Whatever the guest does ends in an architectural answer (a value, an exception, a reset) or in
//!   a typed outcome, never in a panic.
//! - Everything here is a value: no lock, clock, thread or file. Time comes from the caller.
#![cfg_attr(not(test), no_std)]
#![forbid(unsafe_code)]

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

/// Most virtual CPUs of one machine.
pub const MAX_VCPUS: usize = 8;
