//! Sets of vectors.

/// A set of vectors, with a summary bit for each non-empty word.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub(super) struct Vectors {
    pub(super) words: [u32; 8],
    pub(super) filled: u8,
}

impl Vectors {
    pub(super) const EMPTY: Self = Self { words: [0; 8], filled: 0 };

    #[inline]
    pub(super) fn set(&mut self, vector: u8) {
        let word = vector >> 5;
        self.words[usize::from(word)] |= 1 << (vector & 31);
        self.filled |= 1 << word;
    }

    #[inline]
    pub(super) fn clear(&mut self, vector: u8) {
        let word = vector >> 5;
        self.words[usize::from(word)] &= !(1 << (vector & 31));
        if self.words[usize::from(word)] == 0 {
            self.filled &= !(1 << word);
        }
    }

    #[inline]
    pub(super) fn has(&self, vector: u8) -> bool {
        self.words[usize::from(vector >> 5)] & 1 << (vector & 31) != 0
    }

    /// True if `vector` is the only member of the set.
    #[inline]
    pub(super) fn is_only(&self, vector: u8) -> bool {
        let word = vector >> 5;
        self.filled == 1 << word && self.words[usize::from(word)] == 1 << (vector & 31)
    }

    #[inline]
    pub(super) fn highest(&self) -> Option<u8> {
        let word = self.filled.checked_ilog2()?;
        let bit = self.words[word as usize & 7].checked_ilog2()?;
        Some((word * 32 + bit) as u8)
    }
}
