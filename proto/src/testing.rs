//! Helpers of the unit tests.

use std::sync::atomic::AtomicU64;

/// Returns zeroed memory.
pub fn memory(words: usize) -> Vec<AtomicU64> {
    (0..words).map(|_| AtomicU64::new(0)).collect()
}
