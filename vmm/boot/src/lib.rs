//! Boots guests: detects the format of a kernel image, loads it with its command line, initial RAM
//! disk and firmware tables into guest memory, and returns the initial state of the first vCPU.
//!
//! Three protocols: Linux/x86 with the 64-bit entry (`Documentation/arch/x86/boot.rst` in Linux),
//! PVH (Xen, "x86/HVM direct boot ABI"), and Multiboot 0.6.96 (GNU). ACPI tables and a memory map
//! describe the VM; the caller passes the addresses of its devices in a [`PcLayout`].
//!
//! Invariants:
//! - Images are untrusted: no content causes a panic, and the loader writes only to guest RAM and
//!   never over data that it has loaded before.
//! - All data that the guest needs to start is below 4 GiB, in the range of memory that begins at
//!   0.
#![cfg_attr(not(test), no_std)]
#![forbid(unsafe_code)]

#[cfg(feature = "load")]
extern crate alloc;
#[cfg(test)]
extern crate std;

#[cfg(feature = "load")]
mod acpi;
#[cfg(feature = "load")]
mod bzimage;
mod error;
#[cfg_attr(not(feature = "load"), expect(dead_code, reason = "what the loaders use of it"))]
mod layout;
#[cfg(feature = "load")]
mod load;
#[cfg(feature = "load")]
mod multiboot;
#[cfg(feature = "load")]
mod pvh;
#[cfg(feature = "load")]
mod start;
#[cfg(any(test, feature = "testing"))]
pub mod testing;
pub mod virt;
#[cfg(feature = "load")]
mod zimage;

#[cfg(feature = "load")]
pub use bzimage::BzImage;
pub use error::BootError;
pub use layout::{MemoryKind, MemoryRange, PcLayout, PciLayout, memory_map, ram_ranges};
#[cfg(feature = "load")]
pub use load::{BootConfig, Kernel, Rest, load, load_rest};
#[cfg(feature = "load")]
pub use multiboot::MultibootKernel;
#[cfg(feature = "load")]
pub use pvh::PvhKernel;
#[cfg(feature = "load")]
pub use start::InitialState;
