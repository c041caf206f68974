//! x86-64 part of the kernel: boot, CPUs, interrupts, time, SVM, and all hardware access that
//! requires privilege.
//!
//! [`boot`] turns the boot loader's information into a [`boot_info::Machine`], builds the kernel's
//! page tables ([`memory`]) and the per-CPU areas ([`cpu`]), and starts the CPUs ([`smp`]).
//! [`vcpu`] runs guests on any vendor's virtualization extension ([`hvm`]), of which [`svm`] is
//! one. Pure code (ranges, register sequences, conversions) also compiles on the host, where it is
//! tested.
#![cfg_attr(not(test), no_std)]

#[cfg(feature = "testing")]
extern crate std;

pub mod apic;
#[cfg(target_os = "none")]
pub mod boot;
#[cfg(target_os = "none")]
pub mod boot_info;
#[cfg(target_os = "none")]
pub mod context;
pub mod cpu;
#[cfg(target_os = "none")]
pub mod entry;
#[cfg(target_os = "none")]
pub mod fastpath;
pub mod features;
pub mod format;
#[cfg(target_os = "none")]
pub mod fpu;
pub mod guest_virtual;
pub mod hvm;
pub mod idt;
pub mod io;
pub mod ioapic;
pub mod log;
#[cfg(parador_longest_path)]
mod longest;
#[cfg(target_os = "none")]
pub mod machine_check;
pub mod memory;
#[cfg(target_os = "none")]
pub mod panic;
#[cfg(target_os = "none")]
pub mod run;
pub mod shadow;
#[cfg(target_os = "none")]
pub mod smp;
#[cfg(target_os = "none")]
pub mod start;
pub mod svm;
pub mod time;
#[cfg(target_os = "none")]
pub mod vcpu;
pub mod vectors;

/// The x86-64 architecture.
#[derive(Clone, Copy, Default, PartialEq)]
pub struct X86;

/// Virtualization extension of the processor. A second one makes this a type that chooses at start.
pub type Extension = svm::Svm;
