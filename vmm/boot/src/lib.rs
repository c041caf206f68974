//! Boots guests: finds out what a kernel image is, puts it with its command line, initial RAM disk and the
//! machine's description into guest memory, and says in which state the first virtual CPU starts.
//!
//! Three protocols: Linux/x86 with the 64-bit entry (`Documentation/arch/x86/boot.rst` in Linux),
//! PVH (Xen, "x86/HVM direct boot ABI"), and Multiboot 0.6.96 (GNU). The machine is described by ACPI tables and a memory
//! map; where its chips are comes from the caller in a [`PcLayout`].
//!
//! Invariants:
//! - Images come from outside: nothing in them may panic, and nothing is written outside
//!   guest RAM or over something else that was placed.
//! - All that the guest needs to start is below 4 GiB, in the range of memory that begins at 0.
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
