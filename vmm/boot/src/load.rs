//! What to boot, and putting it into memory.

use vmm_mem::GuestMemory;

use crate::{
    BootError, BzImage, InitialState, MultibootKernel, PcLayout, PvhKernel, acpi, bzimage, layout,
    multiboot, pvh,
};

/// What to boot.
#[derive(Clone, Copy, Debug)]
pub struct BootConfig<'a> {
    /// Where the machine's chips are.
    pub layout: &'a PcLayout,
    /// Number of virtual CPUs; their APIC ids are 0, 1, 2 ...
    pub vcpus: u8,
    /// Kernel image.
    pub kernel: &'a [u8],
    /// Initial RAM disk, or for PVH and Multiboot the first module.
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
    /// ELF, or anything else, with a Multiboot header.
    Multiboot(MultibootKernel<'a>),
}

impl<'a> Kernel<'a> {
    /// Finds out what an image is and checks everything about it that does not depend on the machine.
    pub fn detect(image: &'a [u8]) -> Result<Self, BootError> {
        let found = match pvh::is_elf(image) {
            true => PvhKernel::parse(image).map(Self::Pvh),
            false => BzImage::parse(image).map(Self::BzImage),
        };
        match found {
            Err(error @ (BootError::NoPvhEntry | BootError::UnknownFormat)) => {
                let other = MultibootKernel::parse(image).ok_or(error)?;
                other.map(Self::Multiboot)
            }
            found => found,
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
            Self::Multiboot(kernel) => kernel.end(),
        }
    }

    /// First address that the initial RAM disk must not reach.
    fn initrd_limit(&self) -> u64 {
        match self {
            Self::BzImage(kernel) => kernel.initrd_limit(),
            Self::Pvh(_) | Self::Multiboot(_) => layout::FOUR_GIB,
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
    let top = low.min(kernel.initrd_limit());
    let initrd = place_initrd(memory, config.initrd, kernel.end(), top)?;
    let rsdp = acpi::write(memory, config.layout, config.vcpus)?;
    match kernel {
        Kernel::BzImage(kernel) => {
            bzimage::load(memory, &kernel, config.command_line, initrd, rsdp)
        }
        Kernel::Pvh(kernel) => pvh::load(memory, &kernel, config.command_line, initrd, rsdp),
        // Those find the tables by themselves.
        Kernel::Multiboot(kernel) => multiboot::load(memory, &kernel, config.command_line, initrd),
    }
}

/// What goes with a kernel that is in memory already.
#[derive(Clone, Copy, Debug)]
pub struct Rest<'a> {
    /// Where the machine's chips are.
    pub layout: &'a PcLayout,
    /// Number of virtual CPUs.
    pub vcpus: u8,
    /// First guest-physical address behind the kernel.
    pub end: u64,
    /// Initial RAM disk.
    pub initrd: Option<&'a [u8]>,
    /// Command line, without a closing zero.
    pub command_line: &'a [u8],
}

/// Puts everything but the kernel into memory; gives the address of `boot_params`, for a kernel whose 64-bit code is entered directly.
pub fn load_rest(memory: &GuestMemory, rest: &Rest<'_>) -> Result<u64, BootError> {
    if rest.command_line.contains(&0) {
        return Err(BootError::BadCommandLine);
    }
    let low = layout::low_ram(memory, rest.layout)?;
    let end = rest.end.next_multiple_of(layout::PAGE);
    let initrd = place_initrd(memory, rest.initrd, end, low)?;
    let rsdp = acpi::write(memory, rest.layout, rest.vcpus)?;
    let line = layout::write_command_line(memory, rest.command_line, layout::COMMAND_LINE_ROOM)?;
    bzimage::boot_params(memory, &[], line, initrd, rsdp)?;
    Ok(layout::BOOT_PARAMS)
}

/// Puts an initial RAM disk below `top`: address and length.
fn place_initrd(
    memory: &GuestMemory,
    initrd: Option<&[u8]>,
    end: u64,
    top: u64,
) -> Result<Option<(u64, u64)>, BootError> {
    Ok(match initrd {
        None | Some([]) => None,
        Some(bytes) => {
            let length = bytes.len() as u64;
            let address = top.checked_sub(length).map(|start| start & !(layout::PAGE - 1));
            let address = address.filter(|&start| start >= end);
            let address = address
                .ok_or(BootError::InitrdTooLarge { limit: top.saturating_sub(end), length })?;
            memory.write_slice(address, bytes)?;
            Some((address, length))
        }
    })
}
