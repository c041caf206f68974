//! Random numbers: of the processor, or of a generator with a seed.

use rand_chacha::ChaCha20Rng;
use rand_chacha::rand_core::{Rng, SeedableRng};

use crate::processor::{has_random, random};

/// A seed.
pub use proto::start::Seed;

/// Returns whether the processor has a source.
pub fn is_available() -> bool {
    has_random()
}

/// Fills `to` with unpredictable bytes; returns `false` if the processor has no source of them.
pub fn fill(to: &mut [u8]) -> bool {
    if !has_random() {
        return false;
    }
    for chunk in to.chunks_mut(8) {
        // SAFETY: the processor has a source.
        let Some(number) = (unsafe { random() }) else { return false };
        chunk.copy_from_slice(&number.to_le_bytes()[..chunk.len()]);
    }
    true
}

/// Generator of bytes that are as unpredictable as its seed: ChaCha with 20 rounds. Its state does
/// not reveal what it has made before.
pub struct Generator(ChaCha20Rng);

impl Generator {
    /// Creates a generator. Streams with different numbers of the same seed are independent.
    pub fn new(seed: Seed, stream: u64) -> Self {
        let mut generator = ChaCha20Rng::from_seed(seed);
        generator.set_stream(stream);
        Self(generator)
    }

    /// Fills `to`.
    pub fn fill(&mut self, to: &mut [u8]) {
        // The next seed comes first, so that no state stays from which `to` could be made again.
        let mut next = Seed::default();
        self.0.fill_bytes(&mut next);
        self.0.fill_bytes(to);
        *self = Self::new(next, 0);
    }

    /// Makes a seed for another generator.
    pub fn seed(&mut self) -> Seed {
        let mut seed = Seed::default();
        self.fill(&mut seed);
        seed
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_differ() {
        let (mut first, mut second) = ([0; 21], [0; 21]);
        if fill(&mut first) {
            assert!(fill(&mut second));
            assert_ne!(first, second);
        }
    }

    #[test]
    fn a_seed_determines_its_streams() {
        let bytes = |seed: u8, stream, count: usize| {
            let mut generator = Generator::new([seed; 32], stream);
            (0..count).map(|_| generator.seed()).collect::<Vec<_>>()
        };
        assert_eq!(bytes(1, 0, 9), bytes(1, 0, 9));
        let mut all: Vec<Seed> = [bytes(1, 0, 9), bytes(1, 1, 9), bytes(2, 0, 9)].concat();
        all.sort();
        all.dedup();
        assert_eq!(all.len(), 27, "all of them differ");
    }

    #[test]
    fn the_first_bytes_are_those_of_chacha() {
        // RFC 8439, A.1, test vector 1: key, nonce and counter 0. The first half is the next seed.
        let expected: [u8; 32] = [
            0xda, 0x41, 0x59, 0x7c, 0x51, 0x57, 0x48, 0x8d, 0x77, 0x24, 0xe0, 0x3f, 0xb8, 0xd8,
            0x4a, 0x37, 0x6a, 0x43, 0xb8, 0xf4, 0x15, 0x18, 0xa1, 0x1c, 0xc3, 0x87, 0xb6, 0x69,
            0xb2, 0xee, 0x65, 0x86,
        ];
        assert_eq!(Generator::new([0; 32], 0).seed(), expected);
    }
}
