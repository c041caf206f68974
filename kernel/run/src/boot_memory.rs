//! Memory map of the machine, and allocation before the kernel's memory exists.

use crate::ranges::{Range, RangeSet};

/// Maximum number of ranges of a memory map.
pub const MAX_RAM: usize = 64;

/// Limit of memory that every part of the start can reach; below it the kernel maps all physical
/// memory, RAM or not.
pub const FOUR_GIB: u64 = 1 << 32;

/// Returns the RAM of a memory map, given by an iterator over pairs of a range and whether it is
/// RAM, in any order. A page counts as RAM only if all of its bytes are RAM and no other entry
/// touches it. RAM beyond `limit` is not used.
pub fn normalise<I: Iterator<Item = (Range, bool)>>(
    limit: u64,
    entries: impl Fn() -> I,
) -> RangeSet<MAX_RAM> {
    let mut ram = RangeSet::EMPTY;
    for (range, _) in entries().filter(|&(_, is_ram)| is_ram) {
        let reachable = Range::new(range.base, range.end.min(limit));
        ram.insert(reachable.inward());
    }
    for (range, _) in entries().filter(|&(range, is_ram)| !is_ram && !range.is_empty()) {
        ram.remove(range.outward());
    }
    ram
}

/// Allocator of physical memory during boot.
#[derive(Clone, Debug)]
pub struct BootMemory {
    /// All RAM.
    pub ram: RangeSet<MAX_RAM>,
    /// Unused RAM.
    pub free: RangeSet<96>,
    /// RAM allocated by [`BootMemory::allocate`].
    pub used: RangeSet<64>,
}

impl BootMemory {
    /// Allocator of this RAM, except for a range.
    pub fn new(ram: RangeSet<MAX_RAM>, reserved: Range) -> Self {
        let mut free = RangeSet::EMPTY;
        ram.as_slice().iter().for_each(|&range| free.insert(range));
        free.remove(reserved);
        Self { ram, free, used: RangeSet::EMPTY }
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
        let mut holes = RangeSet::EMPTY;
        holes.insert(Range::new(0, FOUR_GIB));
        self.ram.as_slice().iter().for_each(|&range| holes.remove(range));
        holes
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMIT: u64 = 14 << 39;

    fn ram(entries: &[(u64, u64, bool)]) -> Vec<(u64, u64)> {
        let set = normalise(LIMIT, || {
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
        assert_eq!(ram(&[(0, u64::MAX, true)]), [(0, LIMIT)]);
        assert_eq!(ram(&[(0, 0x5000, true), (0x2000, 0, false)]), [(0, 0x5000)]);
        assert_eq!(ram(&[(0, 0x5000, true), (0x2000, u64::MAX, false)]), [(0, 0x2000)]);
    }

    #[test]
    fn boot_memory_reports() {
        let mut set = RangeSet::EMPTY;
        set.insert(Range::new(0, 0x9_f000));
        set.insert(Range::new(0x10_0000, 0x100_0000));
        set.insert(Range::new(FOUR_GIB, FOUR_GIB + 0x100_0000));
        let mut memory = BootMemory::new(set, Range::new(0, 0x1_0000));
        assert_eq!(memory.allocate(1, 1, FOUR_GIB), Some(0xff_f000));
        assert_eq!(memory.allocate(0x20_0000, 0x20_0000, FOUR_GIB), Some(0xc0_0000));
        assert_eq!(memory.used.total(), 0x20_1000);
        assert_eq!(memory.free.total() + memory.used.total() + 0x1_0000, memory.ram.total());
        assert_eq!(memory.allocate(u64::MAX, 1, FOUR_GIB), None);
        assert_eq!(memory.holes().total(), FOUR_GIB - 0x9_f000 - 0xf0_0000);
    }
}
