//! The kernel's address space: the image, the direct map of physical memory, and the per-CPU areas.
//!
//! All of it is in slots 256..=271 of the top-level table, which all tasks share. Invariants: no
//! page is both writable and executable; RAM is write-back and everything else below 4 GiB
//! uncached; nothing is accessible from CPL 3. RAM beyond the reach of the direct map is not used.

use crate::format::KernelFormat;
use crate::ranges::{Range, RangeSet};
use abi::Status;
use core::cell::RefCell;
use core::sync::atomic::{AtomicU64, Ordering};
use hw_x86::paging::{ENTRIES, level_shift};
use kernel_core::table::{Access, Tables, map};

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
/// Limit below which the direct map includes all physical memory, RAM or not.
pub const FOUR_GIB: u64 = 1 << 32;

/// Maximum number of ranges of a memory map.
pub const MAX_RAM: usize = 64;

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

/// Returns the RAM of a memory map, given by an iterator over pairs of a range and whether it is
/// RAM, in any order. A page counts as RAM only if all of its bytes are RAM and no other entry
/// touches it.
pub fn normalise<I: Iterator<Item = (Range, bool)>>(entries: impl Fn() -> I) -> RangeSet<MAX_RAM> {
    let mut ram = RangeSet::new();
    for (range, _) in entries().filter(|&(_, is_ram)| is_ram) {
        let reachable = Range::new(range.base, range.end.min(DIRECT_MAP_LENGTH));
        ram.insert(reachable.inward());
    }
    for (range, _) in entries().filter(|&(range, is_ram)| !is_ram && !range.is_empty()) {
        ram.remove(range.outward());
    }
    ram
}

/// Allocator of physical memory during boot.
#[derive(Clone, Debug, Default)]
pub struct BootMemory {
    /// All RAM.
    pub ram: RangeSet<MAX_RAM>,
    /// Unused RAM.
    pub free: RangeSet<96>,
    /// RAM allocated by [`BootMemory::allocate`].
    pub used: RangeSet<64>,
}

impl BootMemory {
    /// Allocator of this RAM, except the first 64 KiB, where memory maps are not always accurate
    /// and where CPUs start.
    pub fn new(ram: RangeSet<MAX_RAM>) -> Self {
        let mut free = RangeSet::new();
        ram.as_slice().iter().for_each(|&range| free.insert(range));
        free.remove(Range::new(0, 0x1_0000));
        Self { ram, free, used: RangeSet::new() }
    }

    /// Allocates `length` bytes (rounded up to pages) of free RAM below `limit`, aligned to
    /// `align`, as high as possible. Not zeroed.
    pub fn allocate(&mut self, length: u64, align: u64, limit: u64) -> Option<u64> {
        let length = length.checked_next_multiple_of(abi::PAGE_SIZE)?;
        let base = self.free.take(length, align.max(abi::PAGE_SIZE), limit)?;
        self.used.insert(Range::sized(base, length));
        Some(base)
    }

    /// Ranges below 4 GiB that are not RAM, rounded outward to pages.
    pub fn holes(&self) -> RangeSet<MAX_RAM> {
        let mut holes = RangeSet::new();
        holes.insert(Range::new(0, FOUR_GIB));
        self.ram.as_slice().iter().for_each(|&range| holes.remove(range));
        holes
    }
}

const READ_ONLY: Access = Access { write: false, execute: false, device: false };
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

    fn ram(entries: &[(u64, u64, bool)]) -> Vec<(u64, u64)> {
        let set = normalise(|| {
            entries.iter().map(|&(base, length, is_ram)| (Range::sized(base, length), is_ram))
        });
        set.as_slice().iter().map(|range| (range.base, range.end)).collect()
    }

    #[test]
    fn a_pc() {
        let map = [
            (0xffc_0000, 0x4_0000, false),
            (0x10_0000, 0xfec_0000, true),
            (0, 0x9_fc00, true),
            (0x9_fc00, 0x400, false),
            (0xf_0000, 0x1_0000, false),
        ];
        assert_eq!(ram(&map), [(0, 0x9_f000), (0x10_0000, 0xffc_0000)]);
    }

    #[test]
    fn overlaps_count_as_not_ram() {
        assert_eq!(
            ram(&[(0, 0x10_0000, true), (0x4_0800, 0x10, false), (0x8_0000, 0x10_0000, true)]),
            [(0, 0x4_0000), (0x4_1000, 0x18_0000)]
        );
        assert_eq!(ram(&[(0x1000, 0x1000, false), (0x1000, 0x1000, true)]), []);
    }

    #[test]
    fn absurd_entries() {
        assert_eq!(ram(&[(u64::MAX - 5, 100, true), (0x1234, 0, true), (7, 8, true)]), []);
        assert_eq!(ram(&[(0, u64::MAX, true)]), [(0, DIRECT_MAP_LENGTH)]);
        assert_eq!(ram(&[(0, 0x5000, true), (0x2000, 0, false)]), [(0, 0x5000)]);
        assert_eq!(ram(&[(0, 0x5000, true), (0x2000, u64::MAX, false)]), [(0, 0x2000)]);
    }

    #[test]
    fn boot_memory_reports() {
        let mut set = RangeSet::new();
        set.insert(Range::new(0, 0x9_f000));
        set.insert(Range::new(0x10_0000, 0x100_0000));
        set.insert(Range::new(FOUR_GIB, FOUR_GIB + 0x100_0000));
        let mut memory = BootMemory::new(set);
        assert_eq!(memory.allocate(1, 1, FOUR_GIB), Some(0xff_f000));
        assert_eq!(memory.allocate(0x20_0000, 0x20_0000, FOUR_GIB), Some(0xc0_0000));
        assert_eq!(memory.used.total(), 0x20_1000);
        assert_eq!(memory.free.total() + memory.used.total() + 0x1_0000, memory.ram.total());
        assert_eq!(memory.allocate(u64::MAX, 1, FOUR_GIB), None);
        assert_eq!(memory.holes().total(), FOUR_GIB - 0x9_f000 - 0xf0_0000);
    }

    #[test]
    fn leaves() {
        let device = KernelFormat::leaf(0x20_0000, DEVICE, 1);
        assert_eq!(device, 0x8000_0000_0020_01fb);
        assert_eq!(KernelFormat::leaf(0x1000, CODE, 0), 0x1161);
        assert!(KernelFormat::is_leaf(device, 1) && KernelFormat::address(device) == 0x20_0000);
    }
}
