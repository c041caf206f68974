//! Boots guests: finds out what a kernel image is, puts it with its command line, initial RAM disk and the
//! machine's description into guest memory, and says in which state the first virtual CPU starts.
//!
//! Two protocols: Linux/x86 with the 64-bit entry (`Documentation/arch/x86/boot.rst` in Linux) and
//! PVH (Xen, "x86/HVM direct boot ABI"). The machine is described by ACPI tables and a memory
//! map; where its chips are comes from the caller in a [`PcLayout`].
//!
//! Invariants:
//! - Images come from outside: nothing in them may panic, and nothing is written outside
//!   guest RAM or over something else that was placed.
//! - All that the guest needs to start is below 4 GiB, in the range of memory that begins at 0.
#![cfg_attr(not(test), no_std)]
#![forbid(unsafe_code)]

extern crate alloc;
#[cfg(test)]
extern crate std;

mod acpi;
mod bzimage;
mod error;
mod layout;
mod pvh;
mod start;
#[cfg(any(test, feature = "testing"))]
pub mod testing;

pub use bzimage::BzImage;
pub use error::BootError;
pub use layout::{MemoryKind, MemoryRange, PcLayout, PciLayout, memory_map, ram_ranges};
pub use pvh::PvhKernel;
pub use start::InitialState;

use vmm_mem::GuestMemory;

/// What to boot.
#[derive(Clone, Copy, Debug)]
pub struct BootConfig<'a> {
    /// Where the machine's chips are.
    pub layout: &'a PcLayout,
    /// Number of virtual CPUs; their APIC ids are 0, 1, 2 ...
    pub vcpus: u8,
    /// Kernel image.
    pub kernel: &'a [u8],
    /// Initial RAM disk, or for PVH the first module.
    pub initrd: Option<&'a [u8]>,
    /// Command line, without a closing zero.
    pub command_line: &'a [u8],
}

/// A kernel image, checked.
#[derive(Clone, Copy, Debug)]
pub enum Kernel<'a> {
    /// Linux bzImage with a 64-bit entry.
    BzImage(BzImage<'a>),
    /// ELF with the PVH entry note.
    Pvh(PvhKernel<'a>),
}

impl<'a> Kernel<'a> {
    /// Finds out what an image is and checks everything about it that does not depend on the machine.
    pub fn detect(image: &'a [u8]) -> Result<Self, BootError> {
        if pvh::is_elf(image) {
            PvhKernel::parse(image).map(Self::Pvh)
        } else {
            BzImage::parse(image).map(Self::BzImage)
        }
    }

    /// Least RAM in bytes with which the kernel, unpacked, and an initial RAM disk of this length
    /// have room. What the guest needs to do its work comes on top.
    pub fn memory_needed(&self, initrd: u64) -> u64 {
        self.end().saturating_add(initrd.saturating_add(layout::PAGE - 1) & !(layout::PAGE - 1))
    }

    /// First guest-physical address that the kernel does not need.
    fn end(&self) -> u64 {
        match self {
            Self::BzImage(kernel) => kernel.end(),
            Self::Pvh(kernel) => kernel.end(),
        }
    }

    /// First address that the initial RAM disk must not reach.
    fn initrd_limit(&self) -> u64 {
        match self {
            Self::BzImage(kernel) => kernel.initrd_limit(),
            Self::Pvh(_) => layout::FOUR_GIB,
        }
    }
}

/// Puts everything into guest memory. Memory that is not written is expected to be zero or of no
/// concern. On error, memory is left partly written.
pub fn load(memory: &GuestMemory, config: &BootConfig<'_>) -> Result<InitialState, BootError> {
    let kernel = Kernel::detect(config.kernel)?;
    if config.command_line.contains(&0) {
        return Err(BootError::BadCommandLine);
    }
    let initrd_length = config.initrd.map_or(0, <[u8]>::len) as u64;
    let low = layout::low_ram(memory, config.layout)?;
    let needed = kernel.memory_needed(initrd_length);
    if needed > low {
        return Err(BootError::TooLittleMemory { needed, available: low });
    }
    let initrd = match config.initrd {
        None | Some([]) => None,
        Some(bytes) => {
            let top = low.min(kernel.initrd_limit());
            let address = top.checked_sub(initrd_length).map(|start| start & !(layout::PAGE - 1));
            let address = address.filter(|&start| start >= kernel.end());
            let address = address.ok_or(BootError::InitrdTooLarge {
                limit: top.saturating_sub(kernel.end()),
                length: initrd_length,
            })?;
            memory.write_slice(address, bytes)?;
            Some((address, initrd_length))
        }
    };
    let rsdp = acpi::write(memory, config.layout, config.vcpus)?;
    match kernel {
        Kernel::BzImage(kernel) => {
            bzimage::load(memory, &kernel, config.command_line, initrd, rsdp)
        }
        Kernel::Pvh(kernel) => pvh::load(memory, &kernel, config.command_line, initrd, rsdp),
    }
}
