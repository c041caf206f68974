//! Boot configuration, and loading into guest memory.

use vmm_mem::GuestMemory;

use crate::{
    BootError, BzImage, InitialState, MultibootKernel, PcLayout, PvhKernel, acpi, bzimage, layout,
    multiboot, pvh,
};

/// Kernel, initial RAM disk and command line to boot.
#[derive(Clone, Copy, Debug)]
pub struct BootConfig<'a> {
    /// Addresses of the board's devices.
    pub layout: &'a PcLayout,
    /// Number of vCPUs; their APIC ids are 0, 1, 2 ...
    pub vcpus: u8,
    /// Kernel image.
    pub kernel: &'a [u8],
    /// Initial RAM disk, or for PVH and Multiboot the first module.
    pub initrd: Option<&'a [u8]>,
    /// Command line, without a closing zero.
    pub command_line: &'a [u8],
}

/// A validated kernel image.
#[derive(Clone, Copy, Debug)]
pub enum Kernel<'a> {
    /// Linux bzImage with a 64-bit entry.
    BzImage(BzImage<'a>),
    /// ELF with the PVH entry note.
    Pvh(PvhKernel<'a>),
    /// Any file with a Multiboot header.
    Multiboot(MultibootKernel<'a>),
}

impl<'a> Kernel<'a> {
    /// Detects the format of an image and validates it, as far as it is independent of the VM.
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

    /// Minimum RAM in bytes for the unpacked kernel and an initial RAM disk of this length, without
    /// the memory that the guest needs to run.
    pub fn memory_needed(&self, initrd: u64) -> u64 {
        self.end().saturating_add(initrd.saturating_add(layout::PAGE - 1) & !(layout::PAGE - 1))
    }

    /// First guest-physical address after the kernel.
    fn end(&self) -> u64 {
        match self {
            Self::BzImage(kernel) => kernel.end(),
            Self::Pvh(kernel) => kernel.end(),
            Self::Multiboot(kernel) => kernel.end(),
        }
    }

    /// Limit of the initial RAM disk: the first address that it must not reach.
    fn initrd_limit(&self) -> u64 {
        match self {
            Self::BzImage(kernel) => kernel.initrd_limit(),
            Self::Pvh(_) | Self::Multiboot(_) => layout::FOUR_GIB,
        }
    }
}

/// Loads all parts into guest memory. Memory that is not written must be zero or irrelevant. On
/// error, memory is written in part.
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
        // Multiboot kernels search for the tables.
        Kernel::Multiboot(kernel) => multiboot::load(memory, &kernel, config.command_line, initrd),
    }
}

/// Data for a kernel that is loaded already.
#[derive(Clone, Copy, Debug)]
pub struct Rest<'a> {
    /// Addresses of the board's devices.
    pub layout: &'a PcLayout,
    /// Number of vCPUs.
    pub vcpus: u8,
    /// First guest-physical address after the kernel.
    pub end: u64,
    /// Initial RAM disk.
    pub initrd: Option<&'a [u8]>,
    /// Command line, without a closing zero.
    pub command_line: &'a [u8],
}

/// Loads all parts except the kernel; returns the address of `boot_params`, for a kernel that is
/// entered directly at its 64-bit code.
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

/// Loads an initial RAM disk below `top`; returns address and length.
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
