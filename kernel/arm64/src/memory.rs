//! The kernel's address space: the image, the direct map of physical memory, and the per-CPU areas.
//!
//! It is the upper half of the 48 bits that TTBR0_EL2 translates: without VHE EL2 has no other
//! register. With VHE the lower half has the tables of the task that is loaded, whose root contains
//! the entries of the kernel's (`init_root`).
//!
//! Invariants: no page is both writable and executable; RAM is write-back and everything else below
//! 4 GiB device memory; nothing is accessible from EL0. RAM beyond the reach of the direct map is
//! not used.

use core::sync::atomic::{AtomicU64, Ordering};

use kernel_run::boot_memory::FOUR_GIB;

use crate::format::KernelStage1;
use crate::has_vhe;

/// Base address of the direct map: virtual address of physical address 0.
pub const DIRECT_MAP: u64 = 0x0000_c000_0000_0000;
/// Maximum length of the direct map in bytes.
pub const DIRECT_MAP_LENGTH: u64 = 1 << 46;
/// Bytes that tasks can address on every processor: three levels of tables.
const TASK_LENGTH: u64 = 1 << 39;
/// Virtual address of the image.
pub const IMAGE: u64 = 0x0000_8000_0000_0000;
/// First entry of the root table that is the kernel's: that of the image.
pub const FIRST_SLOT: usize = slot(IMAGE);
/// Base address of the per-CPU areas ([`crate::cpu`]).
pub const CPU_AREAS: u64 = 0x0000_8040_0000_0000;
/// Entry of the first table of the image's 1 GiB with the device tree.
pub const TREE_INDEX: usize = 256;
/// Entry there with the block of the log's UART.
pub const UART_INDEX: usize = 258;
/// Entry there with the block of the log's virtio console.
pub const LOG_INDEX: usize = 259;
/// Bytes that each of these entries maps.
pub const BLOCK: u64 = crate::machine::BLOCK;

/// Entry of the root table with this address.
pub const fn slot(address: u64) -> usize {
    (address >> 39 & 511) as usize
}

/// Kernel virtual address of physical address `physical`.
#[inline(always)]
pub fn direct(physical: u64) -> *mut u8 {
    (DIRECT_MAP + physical) as *mut u8
}

/// The kernel's page tables under construction.
pub type KernelTables<'a> = kernel_run::tables::KernelTables<'a, KernelStage1>;

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

/// End of the physical addresses of RAM that is used: what the direct map reaches, and, without
/// VHE, root's window.
pub fn limit() -> u64 {
    if has_vhe() { DIRECT_MAP_LENGTH } else { TASK_LENGTH - abi::boot::PHYSICAL_WINDOW }
}

/// Entries of the root table at this physical address, of the kernel or of a task that exists.
pub fn root_entries(physical: u64) -> &'static [AtomicU64; 512] {
    // SAFETY: a page of tables in the direct map, of atomics alone; it is used under the lock, or
    // never freed.
    unsafe { &*direct(physical).cast() }
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

const _: () = {
    assert!(DIRECT_MAP_LENGTH > FOUR_GIB);
    // Tasks have what is below.
    assert!(IMAGE == abi::USER_END);
};
