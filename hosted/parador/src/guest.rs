//! What can be said about a guest's files before it runs. Kernels are judged by the code that the VMM loads
//! them with (`vmm_boot`), so that what is refused here and there is the same.

use hw_tables::elf::{Elf, Machine};
use vmm_boot::Kernel;

/// Least memory of any guest that runs Linux, in bytes.
pub const LINUX_MINIMUM: u64 = 16 << 20;

/// Least guest memory in bytes, with an initial RAM disk of the given length: what the VMM needs to
/// load both, and the RAM disk once more, because the guest unpacks it.
pub fn least_memory(kernel: &Kernel<'_>, initrd: u64) -> u64 {
    let least = kernel.memory_needed(initrd.saturating_mul(2));
    match kernel {
        Kernel::BzImage(_) => least.max(LINUX_MINIMUM),
        Kernel::Pvh(_) | Kernel::Multiboot(_) => least,
    }
}

/// Whether this is a program for x86-64 Linux that needs no other files.
pub fn is_static_program(bytes: &[u8]) -> bool {
    Elf::parse(bytes).is_ok_and(|elf| elf.machine() == Machine::X86_64 && !elf.has_interpreter())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn other_files_are_no_static_programs() {
        assert!(!is_static_program(b"#!/bin/sh\n"));
        assert!(!is_static_program(&[]));
    }
}
