//! AArch64 part of the kernel, at EL2: boot, CPUs, interrupts, time, and all hardware
//! access that requires privilege.
//!
//! [`boot`] reads the device tree, builds the kernel's page tables ([`memory`]) and the per-CPU
//! areas ([`cpu`]), and starts the CPUs ([`smp`]). Tasks run at EL0 with HCR_EL2.TGE. With VHE
//! (HCR_EL2.E2H) TTBR0_EL2 has the tables of a task and the kernel; without it, it has those of the
//! kernel, and tasks' tables are stage 2. What differs is chosen once, at boot
//! ([`alternative`], [`has_vhe`]). Guests run at EL1 ([`vcpu`]). Pure code also compiles on the
//! host, where it is tested.
#![cfg_attr(not(test), no_std)]

#[cfg(target_os = "none")]
pub mod boot;
#[cfg(target_os = "none")]
pub mod context;
#[cfg(target_os = "none")]
pub mod cpu;
#[cfg(target_os = "none")]
pub mod entry;
#[cfg(target_os = "none")]
pub mod fastpath;
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

#[cfg(not(target_os = "none"))]
pub use format::has_vhe;
#[cfg(target_os = "none")]
pub use io::has_vhe;

/// The AArch64 architecture.
#[derive(Clone, Copy, Default, PartialEq)]
pub struct Arm64;
