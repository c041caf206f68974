//! The kernel's address space: the image, the direct map of physical memory, and the per-CPU areas.
//!
//! All of it is in slots 256..=271 of the top-level table, which all tasks share. Invariants: no
//! page is both writable and executable; RAM is write-back and everything else below 4 GiB
//! uncached; nothing is accessible from CPL 3. RAM beyond the reach of the direct map is not used.

use crate::format::KernelFormat;
use abi::Status;
use core::cell::RefCell;
use core::sync::atomic::{AtomicU64, Ordering};
use hw_x86::paging::{ENTRIES, level_shift};
use kernel_core::table::{Access, Tables, map};
use kernel_run::boot_memory::{BootMemory, FOUR_GIB};
use kernel_run::ranges::Range;

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

const READ_ONLY: Access =
    Access { write: false, execute: false, device: false, user: false, global: true };
const READ_WRITE: Access = Access { write: true, ..READ_ONLY };
const CODE: Access = Access { execute: true, ..READ_ONLY };
const DEVICE: Access = Access { device: true, ..READ_WRITE };

/// The kernel's page tables under construction.
pub struct KernelTables<'a> {
    memory: RefCell<&'a mut BootMemory>,
    root: u64,
}

impl Tables for KernelTables<'_> {
    fn read(&self, table: u64, index: usize) -> u64 {
        assert!(index < ENTRIES);
        // SAFETY: a table that `alloc` returned, in the direct map; the index is inside it.
        unsafe { direct(table).cast::<u64>().add(index).read() }
    }

    fn write(&self, table: u64, index: usize, entry: u64) {
        assert!(index < ENTRIES);
        // SAFETY: as in `read`; the callers below pass correct entries.
        unsafe { direct(table).cast::<u64>().add(index).write_volatile(entry) }
    }

    fn alloc(&self) -> Result<u64, Status> {
        let page = zeroed_pages(&mut self.memory.borrow_mut(), 1);
        page.ok_or(Status::NoQuota)
    }

    fn free(&self, _table: u64) {
        // Nothing is unmapped during construction, so no table is freed.
    }
}

/// Allocates zeroed pages below 4 GiB, which the start-up tables map, too.
fn zeroed_pages(memory: &mut BootMemory, pages: u64) -> Option<u64> {
    let length = pages * abi::PAGE_SIZE;
    let base = memory.allocate(length, abi::PAGE_SIZE, FOUR_GIB)?;
    // SAFETY: free RAM until now, in the direct map.
    unsafe { direct(base).write_bytes(0, length as usize) };
    Some(base)
}

impl<'a> KernelTables<'a> {
    /// Empty tables in `memory`.
    pub fn new(memory: &'a mut BootMemory) -> Option<Self> {
        let root = zeroed_pages(memory, 1)?;
        Some(Self { memory: RefCell::new(memory), root })
    }

    /// Maps a page-aligned range with the largest leaves that its alignment allows.
    fn map_range(&self, address: u64, range: Range, access: Access) -> Result<(), Status> {
        let mut base = range.base;
        while base < range.end {
            let virtual_address = address + (base - range.base);
            let aligned = (base | virtual_address | 1 << 63).trailing_zeros();
            let order = aligned.min((range.end - base).ilog2()) - abi::PAGE_SHIFT;
            // The range is unmapped.
            map::<KernelFormat>(
                self,
                self.root,
                (virtual_address & 0xffff_ffff_ffff) >> abi::PAGE_SHIFT,
                base,
                order as u8,
                access,
            )?;
            base += abi::PAGE_SIZE << order;
        }
        Ok(())
    }

    /// Maps `pages` new zeroed pages, readable and writable.
    pub fn map_new(&self, address: u64, pages: u64) -> Result<(), Status> {
        for page in 0..pages {
            let base = self.alloc()?;
            let range = Range::sized(base, abi::PAGE_SIZE);
            self.map_range(address + page * abi::PAGE_SIZE, range, READ_WRITE)?;
        }
        Ok(())
    }

    /// Maps all RAM, and the rest below 4 GiB as device memory.
    pub fn map_physical(&self) -> Result<(), Status> {
        let (ram, holes) = {
            let memory = self.memory.borrow();
            (memory.ram.clone(), memory.holes())
        };
        for &range in ram.as_slice() {
            self.map_range(DIRECT_MAP + range.base, range, READ_WRITE)?;
        }
        for &range in holes.as_slice() {
            self.map_range(DIRECT_MAP + range.base, range, DEVICE)?;
        }
        Ok(())
    }

    /// Maps the sections of the image, each with the access that it needs.
    pub fn map_image(&self, image: &ImageLayout) -> Result<(), Status> {
        for (range, access) in
            [(image.code, CODE), (image.constants, READ_ONLY), (image.data, READ_WRITE)]
        {
            let physical = Range::new(range.base - IMAGE_OFFSET, range.end - IMAGE_OFFSET);
            self.map_range(range.base, physical, access)?;
        }
        Ok(())
    }

    /// Finishes the tables, publishes their root as the kernel's, and returns it.
    pub fn finish(self) -> u64 {
        ROOT.store(self.root, Ordering::Release);
        self.root
    }
}

/// Sections of the image, page-aligned, by virtual address.
#[derive(Clone, Copy, Debug)]
pub struct ImageLayout {
    /// First physical address: the start-up code.
    pub start: u64,
    /// Code.
    pub code: Range,
    /// Constants.
    pub constants: Range,
    /// Data, including zero-initialised data.
    pub data: Range,
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

    #[test]
    fn leaves() {
        let device = KernelFormat::leaf(0x20_0000, DEVICE, 1);
        assert_eq!(device, 0x8000_0000_0020_01fb);
        assert_eq!(KernelFormat::leaf(0x1000, CODE, 0), 0x1161);
        assert!(KernelFormat::is_leaf(device, 1) && KernelFormat::address(device) == 0x20_0000);
    }
}
