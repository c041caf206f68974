//! Choices of the model: bytes of an input, or pseudo-random numbers.

use crate::input::{Input, Random};

/// A source of choices.
pub enum Choices<'a> {
    /// The bytes of an input.
    Bytes(Input<'a>),
    /// Pseudo-random numbers.
    Random(Random),
    /// The bytes of an input, then pseudo-random numbers that are added to it; number of bytes
    /// read.
    Recorded(Random, Vec<u8>, usize),
}

impl Choices<'_> {
    /// Pseudo-random choices after these, kept as the bytes of an input.
    pub fn recorded(random: Random, first: &[u8]) -> Self {
        Self::Recorded(random, first.to_vec(), 0)
    }

    /// Returns the bytes of an input that are the recorded choices.
    pub fn into_bytes(self) -> Vec<u8> {
        if let Self::Recorded(_, bytes, _) = self { bytes } else { Vec::new() }
    }

    /// Returns a number below `limit`, which is at most 65,536.
    pub fn below(&mut self, limit: u64) -> u64 {
        let number = match self {
            Self::Bytes(input) if limit <= 256 => input.byte().into(),
            Self::Bytes(input) => input.half().into(),
            Self::Random(random) => random.below(limit as usize) as u64,
            Self::Recorded(random, bytes, read) => {
                let length = if limit <= 256 { 1 } else { 2 };
                if bytes.len() == *read {
                    let number = random.below(limit as usize) as u64;
                    bytes.extend_from_slice(&number.to_le_bytes()[..length]);
                }
                let mut input = Input::new(&bytes[*read..]);
                *read += length;
                if length == 1 { input.byte().into() } else { input.half().into() }
            }
        };
        number % limit
    }

    /// Returns true at the end of an input.
    pub fn is_empty(&self) -> bool {
        matches!(self, Self::Bytes(input) if input.is_empty())
    }
}
