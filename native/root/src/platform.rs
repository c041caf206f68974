//! Parts of root that depend on the machine: its serial port for the console, wall clock, end,
//! faults of its processor. A module per architecture has the same items:
//!
//! - `PROCESSOR`: processor that programs must be for;
//! - `pci_host`, `pci_line`: the host bridge for PCI, and the interrupts of its functions' lines;
//! - `EXIT_NAMES`: names of a VM's exits in a VMM's statistics;
//! - `prepare`: called once before anything else;
//! - `wall_clock`: the counter, and seconds since 1970 at that time, 0 without a clock;
//! - `seed`: secret of the firmware for random numbers, if it passes one;
//! - `add_serial`: gives a child a serial port; returns its interrupt, and its first I/O port or 0;
//! - `serial_place`: registers and interrupt of a serial port, if it is a device of a device tree;
//! - `leave`: ends the machine with an outcome, if it can be ended;
//! - `describe`: writes the text of a [`Fault`].

use core::fmt;

#[cfg(any(test, target_arch = "aarch64"))]
pub mod arm64;
#[cfg(target_arch = "x86_64")]
mod cmos;
#[cfg(target_arch = "x86_64")]
pub mod x86;

#[cfg(target_arch = "aarch64")]
pub use arm64::{
    EXIT_NAMES, PROCESSOR, add_serial, describe, leave, pci_host, pci_line, prepare, seed,
    serial_place, wall_clock,
};
#[cfg(target_arch = "x86_64")]
pub use x86::{
    EXIT_NAMES, PROCESSOR, add_serial, describe, leave, pci_host, pci_line, prepare, seed,
    serial_place, wall_clock,
};

/// A fault of a child, as the kernel reports it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fault {
    /// Exception vector; on AArch64 the class of the exception.
    pub vector: u64,
    /// Error code; on AArch64 the syndrome.
    pub error: u64,
    /// Address of a page fault.
    pub address: u64,
    /// Instruction pointer.
    pub ip: u64,
}

impl fmt::Display for Fault {
    fn fmt(&self, to: &mut fmt::Formatter) -> fmt::Result {
        describe(self, to)
    }
}
