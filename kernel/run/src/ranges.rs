//! Fixed-capacity sets of physical addresses, for the memory map and for allocation at boot.
//!
//! A set is sorted and disjoint, with adjacent ranges merged. Ranges that exceed the capacity are
//! dropped, which [`RangeSet::overflowed`] reports.

/// Address range `base..end`.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Range {
    /// First byte.
    pub base: u64,
    /// First byte after the range.
    pub end: u64,
}

impl Range {
    /// Range `base..end`.
    pub const fn new(base: u64, end: u64) -> Self {
        Self { base, end }
    }

    /// Range of `length` bytes from `base`, truncated at the end of the address space.
    pub const fn sized(base: u64, length: u64) -> Self {
        Self { base, end: base.saturating_add(length) }
    }

    /// Length in bytes.
    pub const fn length(self) -> u64 {
        self.end.saturating_sub(self.base)
    }

    /// Returns whether the range is empty.
    pub const fn is_empty(self) -> bool {
        self.base >= self.end
    }

    /// Pages completely inside the range.
    pub const fn inward(self) -> Self {
        let mask = abi::PAGE_SIZE - 1;
        Self { base: self.base.saturating_add(mask) & !mask, end: self.end & !mask }
    }

    /// Pages that the range touches.
    pub const fn outward(self) -> Self {
        let mask = abi::PAGE_SIZE - 1;
        Self { base: self.base & !mask, end: self.end.saturating_add(mask) & !mask }
    }
}

/// A set of at most `N` ranges.
#[derive(Clone, Debug)]
pub struct RangeSet<const N: usize> {
    ranges: [Range; N],
    length: usize,
    overflowed: bool,
}

impl<const N: usize> RangeSet<N> {
    /// The empty set.
    pub const EMPTY: Self = Self { ranges: [Range::new(0, 0); N], length: 0, overflowed: false };

    /// Ranges in ascending order.
    pub fn as_slice(&self) -> &[Range] {
        &self.ranges[..self.length]
    }

    /// Total length in bytes.
    pub fn total(&self) -> u64 {
        self.as_slice().iter().map(|range| range.length()).sum()
    }

    /// Returns whether a range was dropped because the set was full.
    pub fn overflowed(&self) -> bool {
        self.overflowed
    }

    /// Adds a range.
    pub fn insert(&mut self, mut range: Range) {
        if range.is_empty() {
            return;
        }
        let mut kept = 0;
        for index in 0..self.length {
            let old = self.ranges[index];
            if old.end < range.base || range.end < old.base {
                self.ranges[kept] = old;
                kept += 1;
            } else {
                range = Range::new(old.base.min(range.base), old.end.max(range.end));
            }
        }
        self.length = kept;
        self.place(self.as_slice().partition_point(|old| old.base < range.base), range);
    }

    /// Removes a range.
    pub fn remove(&mut self, cut: Range) {
        if cut.is_empty() {
            return;
        }
        let mut index = 0;
        while index < self.length {
            let old = self.ranges[index];
            let left = Range::new(old.base, old.end.min(cut.base));
            let right = Range::new(old.base.max(cut.end), old.end);
            match (left.is_empty(), right.is_empty()) {
                (true, true) => {
                    self.ranges.copy_within(index + 1..self.length, index);
                    self.length -= 1;
                    continue;
                }
                (false, true) => self.ranges[index] = left,
                (true, false) => self.ranges[index] = right,
                (false, false) => {
                    self.ranges[index] = left;
                    self.place(index + 1, right);
                    index += 1;
                }
            }
            index += 1;
        }
    }

    /// Removes `length` bytes aligned to `align` (a power of two), as high as possible but ending
    /// at or below `limit`. Returns their base.
    pub fn take(&mut self, length: u64, align: u64, limit: u64) -> Option<u64> {
        let base = self.as_slice().iter().rev().find_map(|range| {
            let base = range.end.min(limit).checked_sub(length)? & !(align - 1);
            (base >= range.base).then_some(base)
        })?;
        self.remove(Range::sized(base, length));
        Some(base)
    }

    fn place(&mut self, at: usize, range: Range) {
        if self.length == N {
            self.overflowed = true;
            return;
        }
        self.ranges.copy_within(at..self.length, at + 1);
        self.ranges[at] = range;
        self.length += 1;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Applies random operations to a set and to 256 flags, and compares.
    #[test]
    fn against_flags() {
        let mut state = 1u64;
        let mut next = |bound: u64| {
            state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            (state >> 33) % bound
        };
        let mut set = RangeSet::<130>::EMPTY;
        let mut flags = [false; 256];
        for _ in 0..5000 {
            let base = next(256);
            let end = (base + next(24)).min(256);
            let add = next(2) == 0;
            let range = Range::new(base, end);
            if add {
                set.insert(range)
            } else {
                set.remove(range)
            }
            (base..end).for_each(|at| flags[at as usize] = add);
            let mut seen = [false; 256];
            let mut last = None;
            for range in set.as_slice() {
                assert!(!range.is_empty() && last.is_none_or(|last| range.base > last), "{set:?}");
                last = Some(range.end);
                (range.base..range.end).for_each(|at| seen[at as usize] = true);
            }
            assert_eq!(seen, flags);
        }
        assert!(!set.overflowed());
    }

    #[test]
    fn full_sets_forget() {
        let mut set = RangeSet::<2>::EMPTY;
        set.insert(Range::new(0, 100));
        set.insert(Range::new(200, 300));
        set.insert(Range::new(400, 500));
        assert!(set.overflowed());
        set.remove(Range::new(40, 60));
        assert_eq!(set.as_slice(), [Range::new(0, 40), Range::new(200, 300)]);
    }

    #[test]
    fn take_from_the_top() {
        let mut set = RangeSet::<4>::EMPTY;
        set.insert(Range::new(0x1000, 0x9000));
        set.insert(Range::new(0x10_0000, 0x20_0000));
        assert_eq!(set.take(0x1000, 0x1000, 0xa000), Some(0x8000));
        assert_eq!(set.take(0x4000, 0x4000, u64::MAX), Some(0x1f_c000));
        assert_eq!(set.take(0x10_0000, 0x1000, u64::MAX), None);
        assert_eq!(set.take(0x2000, 0x4000, 0xa000), Some(0x4000));
        assert_eq!(set.total(), 0x3000 + 0x2000 + 0xf_c000);
    }

    #[test]
    fn rounding_at_the_end_of_the_world() {
        let all = Range::sized(5, u64::MAX);
        assert_eq!(all.end, u64::MAX);
        assert_eq!(all.inward(), Range::new(0x1000, !0xfff));
        assert!(Range::new(0x1001, 0x1fff).inward().is_empty());
        assert_eq!(Range::new(0x1001, 0x1fff).outward(), Range::new(0x1000, 0x2000));
    }
}
