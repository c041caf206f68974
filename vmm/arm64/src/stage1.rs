//! Translation of a guest's own addresses, stage 1 of EL1 and EL0, without its rights: Arm ARM,
//! D8.2 and D8.3. Missing: addresses of 52 bits.

use hw_arm64::registers::sctlr;

/// Registers that the translation depends on.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Stage1 {
    /// SCTLR_EL1.
    pub sctlr: u64,
    /// TCR_EL1.
    pub tcr: u64,
    /// TTBR0_EL1.
    pub ttbr0: u64,
    /// TTBR1_EL1.
    pub ttbr1: u64,
}

/// Bit of an address that selects TTBR1_EL1.
const UPPER: u32 = 55;
/// TCR_EL1.DS: addresses of 52 bits with small pages.
const LONG: u64 = 1 << 59;
/// Address bits of an entry, or of the base of a table.
const ADDRESS: u64 = (1 << 48) - 1;
/// Bits of an entry: valid; a table, or a page at the last level.
const VALID: u64 = 1 << 0;
const TABLE: u64 = 1 << 1;
/// Most levels, beside the page: more than that are no translation.
const MAX_LEVELS: u32 = 4;
/// Most address bits.
const MAX_BITS: u32 = 48;
/// Levels of the last one on that can have blocks.
const BLOCK_LEVELS: u32 = 3;

/// Half of the addresses: base of its tables, address bits, log2 of the page length.
struct Half {
    base: u64,
    bits: u32,
    page: u32,
}

impl Stage1 {
    /// Returns the half of an address; `None`: it has no tables, or settings without a meaning.
    fn half(&self, is_upper: bool) -> Option<Half> {
        let (base, settings) = match is_upper {
            true => (self.ttbr1, self.tcr >> 16),
            false => (self.ttbr0, self.tcr),
        };
        let (is_off, granule) = (settings & 1 << 7 != 0, settings >> 14 & 3);
        // The two halves have different numbers for the lengths of pages.
        let page = match (is_upper, granule) {
            (false, 0) | (true, 2) => 12,
            (false, 2) | (true, 1) => 14,
            (false, 1) | (true, 3) => 16,
            _ => return None,
        };
        let bits = 64 - (settings & 63) as u32;
        let is_there = !is_off && self.tcr & LONG == 0 && bits > page && bits <= MAX_BITS;
        is_there.then_some(Half { base, bits, page })
    }

    /// Returns the guest-physical address of an address. `read`: the word of 64 bits at a
    /// guest-physical address, if there is memory. `None`: it has no translation.
    pub fn translate(&self, address: u64, mut read: impl FnMut(u64) -> Option<u64>) -> Option<u64> {
        if self.sctlr & sctlr::M == 0 {
            return Some(address);
        }
        let is_upper = address >> UPPER & 1 != 0;
        let Half { base, bits, page } = self.half(is_upper)?;
        let expected = if is_upper { u64::MAX } else { 0 };
        if (address ^ expected) << (63 - UPPER) >> (63 - UPPER) >> bits != 0 {
            return None;
        }
        let stride = page - 3;
        let levels = (bits - page).div_ceil(stride).min(MAX_LEVELS);
        // The first table may be shorter or longer than a page.
        let mut shift = page + stride * (levels - 1);
        let mut index_bits = bits - shift;
        let mut table = base & ADDRESS & !((8 << index_bits) - 1);
        loop {
            let index = address >> shift & ((1 << index_bits) - 1);
            let entry = read(table + 8 * index)?;
            let is_last = shift == page;
            if entry & VALID == 0 || is_last && entry & TABLE == 0 {
                return None;
            }
            if is_last || entry & TABLE == 0 {
                let has_blocks = shift < page + BLOCK_LEVELS * stride;
                let offset = (1 << shift) - 1;
                return has_blocks.then_some(entry & ADDRESS & !offset | address & offset);
            }
            table = entry & ADDRESS & !((1 << page) - 1);
            (shift, index_bits) = (shift - stride, stride);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeMap;

    /// TCR_EL1 of Linux: both halves of 48 bits with pages of 4 KiB.
    const LINUX: u64 = 2 << 30 | 16 << 16 | 16;

    fn stage1(tcr: u64) -> Stage1 {
        Stage1 { sctlr: sctlr::M, tcr, ttbr0: 0x1_0000 | 7 << 48 | 1, ttbr1: 0x2_0000 }
    }

    fn look(registers: &Stage1, entries: &[(u64, u64)], address: u64) -> Option<u64> {
        let memory: BTreeMap<u64, u64> = entries.iter().copied().collect();
        registers.translate(address, |at| memory.get(&at).copied())
    }

    #[test]
    fn pages_and_blocks() {
        let registers = stage1(LINUX);
        let lower = [
            (0x1_0000, 0x3003),
            (0x3008, 0x4003),
            (0x4010, 0x5003),
            (0x5018, 0x60_0000_0007_7703),
            (0x4018, 0x8a0_0701),
        ];
        let address = 1 << 30 | 2 << 21 | 3 << 12;
        assert_eq!(look(&registers, &lower, address | 0x123), Some(0x7_7123));
        assert_eq!(look(&registers, &lower, 1 << 30 | 3 << 21 | 0x1f_fff8), Some(0x8bf_fff8));
        assert_eq!(look(&registers, &lower, address + 0x1000), None, "no entry");
        let upper = [(0x2_0ff8, 0x3003), (0x3ff8, 0x4000_0701)];
        assert_eq!(look(&registers, &upper, u64::MAX << 12), Some(0x7fff_f000));
        assert_eq!(look(&registers, &upper, !(1 << 50)), None, "not canonical");
        let wrong = [(0x1_0000, 0x3001)];
        assert_eq!(look(&registers, &wrong, 0), None, "a block of 512 GiB");
        let page = [(0x1_0000, 0x3003), (0x3000, 0x4003), (0x4000, 0x5003), (0x5000, 0x7_7701)];
        assert_eq!(look(&registers, &page, 0), None, "a block of a page");
    }

    #[test]
    fn other_lengths() {
        // 39 bits; 16 KiB with 47 bits; 64 KiB with 42 bits.
        let registers = stage1(25);
        assert_eq!(look(&registers, &[(0x1_0ff8, 0x4000_0701)], 0x7f_c000_0010), Some(0x4000_0010));
        let registers = stage1(2 << 14 | 17);
        let tables = [(0x1_0000, 0x4003), (0x4008, 0x8003), (0x8010, 0x1_c703)];
        assert_eq!(look(&registers, &tables[1..], 0), None);
        let address = 1 << 25 | 2 << 14;
        assert_eq!(look(&registers, &tables, address | 0x3ffc), Some(0x1_fffc));
        let registers = stage1(1 << 14 | 22);
        assert_eq!(look(&registers, &[(0x1_0008, 0x2000_0701)], 1 << 29 | 4), Some(0x2000_0004));
    }

    #[test]
    fn without_translation() {
        assert_eq!(look(&Stage1 { sctlr: 0, ..stage1(LINUX) }, &[], 0x8000), Some(0x8000));
        for tcr in [0, LINUX | 1 << 7, LINUX | LONG, 3 << 14 | 16, 63] {
            assert_eq!(look(&stage1(tcr), &[(0x1_0000, 0x701)], 0), None, "{tcr:#x}");
        }
    }

    #[test]
    fn any_registers_and_entries_end() {
        let mut state = 1_u64;
        let mut random = || {
            state = state.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(0x3b1);
            state ^ state >> 29
        };
        for _ in 0..100_000 {
            let [tcr, ttbr0, ttbr1, address] = [(); 4].map(|()| random());
            let registers = Stage1 { sctlr: sctlr::M, tcr: tcr & !LONG, ttbr0, ttbr1 };
            let mut reads = 0;
            registers.translate(address & 1 << UPPER | address & ADDRESS, |_| {
                reads += 1;
                Some(random() | VALID | TABLE)
            });
            assert!(reads <= MAX_LEVELS);
        }
    }
}
