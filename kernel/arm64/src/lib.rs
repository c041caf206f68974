//! AArch64 part of the kernel, at EL2 with VHE: boot, CPUs, interrupts, time, and all hardware
//! access that requires privilege.
//!
//! [`boot`] reads the device tree, builds the kernel's page tables ([`memory`]) and the per-CPU
//! areas ([`cpu`]), and starts the CPUs ([`smp`]). The kernel's tables are in TTBR1, tasks' in
//! TTBR0; HCR_EL2 has E2H and TGE set, so the names of EL1's registers refer to EL2's. Guests run
//! at EL1 ([`vcpu`]). Pure code also compiles on the host, where it is tested.
#![cfg_attr(not(test), no_std)]

#[cfg(target_os = "none")]
pub mod boot;
#[cfg(target_os = "none")]
pub mod context;
#[cfg(target_os = "none")]
pub mod cpu;
#[cfg(target_os = "none")]
pub mod entry;
pub mod format;
#[cfg(target_os = "none")]
pub mod gic;
#[cfg(target_os = "none")]
pub mod io;
#[cfg(target_os = "none")]
pub mod log;
pub mod machine;
#[cfg(target_os = "none")]
pub mod memory;
#[cfg(target_os = "none")]
pub mod panic;
#[cfg(target_os = "none")]
pub mod psci;
#[cfg(target_os = "none")]
pub mod run;
#[cfg(target_os = "none")]
pub mod smp;
#[cfg(target_os = "none")]
pub mod start;
#[cfg(target_os = "none")]
pub mod time;
#[cfg(target_os = "none")]
pub mod vcpu;

/// The AArch64 architecture.
#[derive(Clone, Copy, PartialEq)]
pub struct Arm64;
