//! Parsers of ACPI tables, device trees, boot information, PCI configuration space and ELF
//! executables.
//!
//! Every parser works on byte slices, allocates nothing and does not panic on any input: malformed
//! input yields a typed error, or ends an iteration where the format is extensible. The crate
//! defines layouts only; interpretation is up to its users. Integers are little-endian, except in
//! device trees; fields may be unaligned.
#![cfg_attr(not(test), no_std)]
#![forbid(unsafe_code)]

pub mod acpi;
mod bytes;
pub mod elf;
pub mod fdt;
pub mod multiboot2;
pub mod pci;
pub mod pvh;
pub mod virtio_mmio;

#[cfg(test)]
mod random;
