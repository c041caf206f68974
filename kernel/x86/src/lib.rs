//! The kernel on x86-64: boot, CPUs, interrupts, time, and the parts of the machine that only
//! privileged code can reach.
//!
//! Boot runs through [`boot`]: the loader's information becomes a [`boot::Machine`], the kernel's
//! own page tables are built ([`memory`]), the CPUs get their areas ([`cpu`]) and are started
//! ([`smp`]). What is pure (ranges, register sequences, conversions) also compiles and is tested on
//! the host.
#![cfg_attr(not(test), no_std)]

pub mod apic;
#[cfg(target_os = "none")]
pub mod boot;
pub mod cpu;
#[cfg(target_os = "none")]
pub mod entry;
pub mod features;
pub mod format;
pub mod idt;
pub mod intercepts;
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
pub mod ranges;
#[cfg(target_os = "none")]
pub mod run;
#[cfg(target_os = "none")]
pub mod smp;
#[cfg(target_os = "none")]
pub mod start;
#[cfg(target_os = "none")]
pub mod svm;
pub mod time;
pub mod vectors;
pub mod virq;
