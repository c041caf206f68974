//! What tests share.

use std::sync::atomic::AtomicU64;

/// Memory of zeros.
pub fn memory(words: usize) -> Vec<AtomicU64> {
    (0..words).map(|_| AtomicU64::new(0)).collect()
}
