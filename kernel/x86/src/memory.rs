//! The kernel's address space: the image, the direct map of physical memory, and the per-CPU areas.
//!
//! All of it is in slots 256..=271 of the top-level table, which all tasks share. Invariants: no
//! page is both writable and executable; RAM is write-back and everything else below 4 GiB
//! uncached; nothing is accessible from CPL 3. RAM beyond the reach of the direct map is not used.

use crate::format::KernelFormat;
use core::sync::atomic::{AtomicU64, Ordering};
use hw_x86::paging::level_shift;
use kernel_run::boot_memory::FOUR_GIB;

/// Difference between the image's link address and its physical address.
pub const IMAGE_OFFSET: u64 = 0xffff_8000_0000_0000;
/// Base address of the per-CPU areas ([`crate::cpu`]).
pub const CPU_AREAS: u64 = 0xffff_8040_0000_0000;
/// Base address of the direct map: virtual address of physical address 0.
pub const DIRECT_MAP: u64 = 0xffff_8100_0000_0000;
/// Maximum length of the direct map in bytes: up to the end of slot 271.
pub const DIRECT_MAP_LENGTH: u64 = 14 << 39;
/// First kernel slot of the top-level table.
pub const FIRST_SLOT: usize = 256;
/// Number of kernel slots. Slots in use never change after boot.
pub const SLOTS: usize = 16;

/// Kernel virtual address of physical address `physical`.
#[inline]
pub fn direct(physical: u64) -> *mut u8 {
    (DIRECT_MAP + physical) as *mut u8
}

/// Bytes at a physical address. `None` unless the direct map certainly includes them: below 4 GiB.
///
/// # Safety
/// Nothing writes them while the slice lives.
pub unsafe fn bytes(physical: u64, length: usize) -> Option<&'static [u8]> {
    if physical == 0 || physical.checked_add(length as u64)? > FOUR_GIB {
        return None;
    }
    // SAFETY: mapped, by the check; not written, by the caller.
    Some(unsafe { core::slice::from_raw_parts(direct(physical), length) })
}

/// The kernel's page tables under construction.
pub type KernelTables<'a> = kernel_run::tables::KernelTables<'a, KernelFormat>;

/// Publishes the root of finished tables as the kernel's.
pub fn publish(root: u64) {
    ROOT.store(root, Ordering::Release);
}

static ROOT: AtomicU64 = AtomicU64::new(0);

/// Physical address of the kernel's top-level table. All address spaces share its [`SLOTS`] slots
/// from [`FIRST_SLOT`]; its lower half is empty.
pub fn kernel_root() -> u64 {
    ROOT.load(Ordering::Acquire)
}

const _: () = {
    assert!(CPU_AREAS >> level_shift(4) & 511 == FIRST_SLOT as u64);
    assert!(DIRECT_MAP >> level_shift(4) & 511 == FIRST_SLOT as u64 + 2);
    assert!((DIRECT_MAP_LENGTH >> level_shift(4)) as usize == SLOTS - 2);
};

#[cfg(test)]
mod tests {
    use super::*;
    use kernel_core::table::Format;
    use kernel_run::tables::{CODE, DEVICE};

    #[test]
    fn leaves() {
        let device = KernelFormat::leaf(0x20_0000, DEVICE, 1);
        assert_eq!(device, 0x8000_0000_0020_01fb);
        assert_eq!(KernelFormat::leaf(0x1000, CODE, 0), 0x1161);
        assert!(KernelFormat::is_leaf(device, 1) && KernelFormat::address(device) == 0x20_0000);
    }
}
