//! Record of a shared directory.

use super::{pack, unpack};

/// Record of a shared directory.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct ShareRecord {
    /// Mount tag reported to the guest, padded with zeros.
    pub tag: [u8; 32],
}

impl ShareRecord {
    /// Words of the record.
    pub const WORDS: usize = 4;

    /// Encodes the record.
    pub fn to_words(&self) -> [u64; Self::WORDS] {
        let mut words = [0; Self::WORDS];
        pack(&self.tag, &mut words);
        words
    }

    /// Decodes the record.
    pub fn from_words(words: &[u64; Self::WORDS]) -> Self {
        let mut share = Self::default();
        unpack(words, &mut share.tag);
        share
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_shared_directory_round_trips() {
        let share = ShareRecord { tag: *b"abcdefghijklmnopqrstuvwxyz012345" };
        assert_eq!(ShareRecord::from_words(&share.to_words()), share);
    }
}
