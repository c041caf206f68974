//! Allocator of capability slots.

use abi::Selector;

/// Allocator of `64 * WORDS` slots.
#[derive(Clone, Debug)]
pub struct Slots<const WORDS: usize> {
    first: Selector,
    used: [u64; WORDS],
}

impl<const WORDS: usize> Slots<WORDS> {
    /// Creates an allocator with all slots from `first` on free.
    pub const fn new(first: Selector) -> Self {
        Self { first, used: [0; WORDS] }
    }

    /// Allocates a free slot.
    pub fn allocate(&mut self) -> Option<Selector> {
        let (index, word) =
            self.used.iter_mut().enumerate().find(|(_, word)| **word != u64::MAX)?;
        let bit = word.trailing_ones();
        *word |= 1 << bit;
        Some(self.first + 64 * index as u64 + bit as u64)
    }

    /// Frees a slot, which must be empty.
    pub fn free(&mut self, slot: Selector) {
        let index = slot.wrapping_sub(self.first);
        if let Some(word) = self.used.get_mut((index / 64) as usize) {
            *word &= !(1 << (index % 64));
        }
    }

    /// Returns the number of free slots.
    pub fn free_count(&self) -> u32 {
        self.used.iter().map(|word| word.count_zeros()).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_slot_once() {
        let mut slots = Slots::<2>::new(16);
        let taken: Vec<_> = core::iter::from_fn(|| slots.allocate()).collect();
        assert_eq!(taken, (16..144).collect::<Vec<_>>());
        slots.free(77);
        slots.free(3);
        slots.free(1000);
        assert_eq!(slots.free_count(), 1);
        assert_eq!(slots.allocate(), Some(77));
        assert_eq!(slots.allocate(), None);
    }
}
