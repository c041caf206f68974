//! Random numbers from the processor.

use core::arch::x86_64::{__cpuid, _rdrand64_step};

/// `CPUID` leaf 1, `ECX`: `RDRAND` (AMD APM vol. 3, appendix E.3.2).
const RDRAND: u32 = 1 << 30;
/// Attempts to read a number; more do not help (Intel, Digital Random Number Generator guide,
/// section 5.2.1).
const TRIES: u32 = 10;

/// Fills `to` with unpredictable bytes; returns `false` if the processor has no `RDRAND`.
pub fn fill(to: &mut [u8]) -> bool {
    if __cpuid(1).ecx & RDRAND == 0 {
        return false;
    }
    for chunk in to.chunks_mut(8) {
        // SAFETY: the processor has the instruction.
        let Some(number) = (unsafe { random_word() }) else { return false };
        chunk.copy_from_slice(&number.to_le_bytes()[..chunk.len()]);
    }
    true
}

/// # Safety
/// The processor must have `RDRAND`.
#[target_feature(enable = "rdrand")]
unsafe fn random_word() -> Option<u64> {
    let mut number = 0;
    (0..TRIES).any(|_| _rdrand64_step(&mut number) == 1).then_some(number)
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
