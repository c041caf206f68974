//! Checks of a guest's files before it runs. Kernels are parsed with the VMM's own code
//! (`vmm_boot`), so both accept the same kernels.

use vmm_boot::Kernel;

/// Least memory of a Linux guest in bytes.
pub const LINUX_MINIMUM: u64 = 16 << 20;

/// Returns the least guest memory in bytes, with an initial RAM disk of this length: room to load
/// both, and the RAM disk a second time, because the guest unpacks it.
pub fn least_memory(kernel: &Kernel<'_>, initrd: u64) -> u64 {
    let least = kernel.memory_needed(initrd.saturating_mul(2));
    match kernel {
        Kernel::BzImage(_) => least.max(LINUX_MINIMUM),
        Kernel::Pvh(_) | Kernel::Multiboot(_) => least,
    }
}
