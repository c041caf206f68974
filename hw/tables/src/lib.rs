//! Readers of the tables that firmware and boot loaders leave in memory, and of ELF executables.
//!
//! Every reader works on byte slices, allocates nothing and panics on no input: what does not fit
//! is a typed error, or ends an iteration where the format allows extension. The
//! crate interprets nothing beyond the layout: what a table means for the machine is its
//! reader's business. Integers are little-endian, fields may be unaligned.
#![cfg_attr(not(test), no_std)]
#![forbid(unsafe_code)]

pub mod acpi;
mod bytes;
pub mod elf;
pub mod multiboot2;
pub mod pci;
pub mod pvh;

#[cfg(test)]
mod random;
