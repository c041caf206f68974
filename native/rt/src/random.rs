//! Random numbers from the processor.

use crate::processor::{has_random, random};

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
}
