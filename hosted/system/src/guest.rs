//! Checks of a guest's files before it runs. Kernels are parsed with the VMM's own code
//! (`vmm_boot`), so both accept the same kernels.

use hosted_command::architecture::Architecture;
use vmm_boot::{BootError, Kernel, virt};

use crate::packed;

/// Least memory of a Linux guest in bytes.
pub const LINUX_MINIMUM: u64 = 16 << 20;

/// Returns the least guest memory in bytes for a kernel and an initial RAM disk of this length:
/// room to load both, and the RAM disk a second time, because the guest unpacks it.
///
/// # Errors
/// The file is no kernel for the architecture.
pub fn least_memory(
    architecture: Architecture,
    kernel: &[u8],
    initrd: u64,
) -> Result<u64, BootError> {
    let initrd = initrd.saturating_mul(2);
    if architecture == Architecture::Arm64 {
        return virt::memory_needed(kernel, initrd);
    }
    let kernel = Kernel::detect(kernel)?;
    let least = kernel.memory_needed(initrd);
    Ok(match kernel {
        Kernel::BzImage(_) => least.max(LINUX_MINIMUM),
        Kernel::Pvh(_) | Kernel::Multiboot(_) => least,
    })
}

/// Returns the kernel in a compressed file, if it is compressed and the machine does not unpack it.
///
/// # Errors
/// It cannot be unpacked ([`packed::unpack`]).
pub fn unpack(architecture: Architecture, kernel: &[u8]) -> Result<Option<Vec<u8>>, String> {
    match unpacks_itself(architecture) {
        true => Ok(None),
        false => packed::unpack(kernel),
    }
}

/// Returns whether compressed kernels for this architecture unpack themselves.
pub const fn unpacks_itself(architecture: Architecture) -> bool {
    matches!(architecture, Architecture::X86)
}

/// Returns the remedy for a file that is no kernel.
pub fn kernel_help(architecture: Architecture) -> &'static str {
    match architecture {
        Architecture::X86 => {
            "use a complete bzImage for x86-64 (vmlinuz), a PVH or Multiboot kernel, or \"debian\""
        }
        Architecture::Arm64 => {
            "use a Linux `Image` for AArch64, also compressed (`Image.gz`, `vmlinuz.efi`), or \"debian\""
        }
    }
}
