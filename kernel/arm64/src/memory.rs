//! The kernel's address space, by TTBR1: the image, the direct map of physical memory, and the
//! per-CPU areas.
//!
//! Invariants: no page is both writable and executable; RAM is write-back and everything else below
//! 4 GiB device memory; nothing is accessible from EL0. RAM beyond the reach of the direct map is
//! not used.

use core::sync::atomic::{AtomicU64, Ordering};

use kernel_run::boot_memory::FOUR_GIB;

use crate::format::Stage1;

/// Base address of the direct map: virtual address of physical address 0.
pub const DIRECT_MAP: u64 = 0xffff_0000_0000_0000;
/// Maximum length of the direct map in bytes.
pub const DIRECT_MAP_LENGTH: u64 = 1 << 47;
/// Virtual address of the image.
pub const IMAGE: u64 = 0xffff_8000_0000_0000;
/// Entry of the root table with the image.
pub const IMAGE_SLOT: usize = (IMAGE >> 39 & 511) as usize;
/// Base address of the per-CPU areas ([`crate::cpu`]).
pub const CPU_AREAS: u64 = 0xffff_8040_0000_0000;
/// Entry of the first table of the image's 1 GiB with the device tree.
pub const TREE_INDEX: usize = 256;
/// Entry there with the block of the log's UART.
pub const UART_INDEX: usize = 258;
/// Entry there with the block of the log's virtio console.
pub const LOG_INDEX: usize = 259;
/// Bytes that each of these entries maps.
pub const BLOCK: u64 = crate::machine::BLOCK;

/// Kernel virtual address of physical address `physical`.
#[inline(always)]
pub fn direct(physical: u64) -> *mut u8 {
    (DIRECT_MAP + physical) as *mut u8
}

/// The kernel's page tables under construction.
pub type KernelTables<'a> = kernel_run::tables::KernelTables<'a, Stage1>;

static ROOT: AtomicU64 = AtomicU64::new(0);
static IMAGE_PHYSICAL: AtomicU64 = AtomicU64::new(0);

/// Publishes the root of finished tables as the kernel's.
pub fn publish(root: u64) {
    ROOT.store(root, Ordering::Release);
}

/// Physical address of the kernel's root table.
pub fn kernel_root() -> u64 {
    ROOT.load(Ordering::Acquire)
}

/// Records where the image was loaded.
pub fn set_image(physical: u64) {
    IMAGE_PHYSICAL.store(physical, Ordering::Release);
}

/// Physical address of the image.
pub fn image_physical() -> u64 {
    IMAGE_PHYSICAL.load(Ordering::Acquire)
}

/// Physical address of something in the image.
pub fn physical_of<T>(item: *const T) -> u64 {
    item as u64 - IMAGE + image_physical()
}

const _: () = assert!(DIRECT_MAP_LENGTH > FOUR_GIB);
