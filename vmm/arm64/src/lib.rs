//! The AArch64 vCPU: run loop, exits, calls of firmware and exceptions for the guest.
//!
//! The host implements [`Arm64Vcpu`], the board [`Arm64Platform`]; [`VcpuLoop::run`] connects the
//! two. The virtual timer is the host's: a vCPU that waits for an interrupt reports its deadline
//! ([`Exit::Wait`]).
//!
//! Invariants: those of `vmm_vcpu`. What a guest does that is not emulated ends in an exception for
//! it, never in a silent success, except writes of debug registers, which have no effect.
#![cfg_attr(not(test), no_std)]
#![forbid(unsafe_code)]

mod exception;
mod platform;
mod psci;
mod run;
mod stage1;
mod stolen_time;
#[cfg(any(test, feature = "testing"))]
pub mod testing;
mod trng;
mod vcpu;

pub use platform::{Arm64Platform, Interrupts, PowerState, StartRequest, Unknown};
pub use run::VcpuLoop;
pub use run::aarch32::memory_fault as memory_fault_of_32_bit;
pub use vcpu::{Arm64Vcpu, EXIT_NAMES, Exit, Sgis, System, Virq, Width};
