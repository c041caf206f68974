//! Programs that test the kernel from user mode, started by root as tasks. Each prints a line
//! `CHECK name ok` or `CHECK name FAIL why` per case; its exit code is the number of failures.
#![cfg_attr(not(test), no_std)]
#![forbid(unsafe_code)]

use core::fmt::Debug;

use native_rt::{error, info};
use proto::start::{Role, Start};

/// Returns argument `index` of the program.
pub fn argument(start: &Start<'static>, index: usize) -> Option<&'static str> {
    match &start.role {
        Role::Program(arguments) => arguments.get(index).copied(),
        _ => None,
    }
}

/// Returns argument `index` as a number, or `default` if it is absent.
pub fn number(start: &Start<'static>, index: usize, default: u64) -> u64 {
    argument(start, index).and_then(|text| text.parse().ok()).unwrap_or(default)
}

/// A pseudo-random generator: xorshift64* (Vigna, "An experimental exploration of Marsaglia's
/// xorshift generators").
#[derive(Clone, Debug)]
pub struct Random(u64);

impl Random {
    /// Starts a sequence.
    pub const fn new(seed: u64) -> Self {
        Self(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)
    }

    /// Draws the next number.
    pub fn draw(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }

    /// Draws a number below `limit`, which is not 0.
    pub fn below(&mut self, limit: u64) -> u64 {
        self.draw() % limit
    }
}

/// Results of a program.
#[derive(Debug, Default)]
pub struct Report {
    failures: u64,
}

impl Report {
    /// Prints the result of a case.
    pub fn case(&mut self, name: &str, result: Result<(), &str>) {
        match result {
            Ok(()) => info!("CHECK {name} ok"),
            Err(why) => {
                self.failures += 1;
                error!("CHECK {name} FAIL {why}");
            }
        }
    }

    /// Returns the number of failed cases, as an exit code.
    pub fn exit_code(&self) -> u64 {
        self.failures.min(63)
    }
}

/// Compares two values; logs them and returns an error if they differ.
pub fn same<T: PartialEq + Debug>(
    what: &'static str,
    got: T,
    expected: T,
) -> Result<(), &'static str> {
    if got == expected {
        return Ok(());
    }
    error!("{what}: {got:?}, not {expected:?}");
    Err(what)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn random_numbers_differ() {
        let mut random = Random::new(0);
        let mut seen: Vec<u64> = (0..1000).map(|_| random.draw()).collect();
        seen.sort();
        seen.dedup();
        assert_eq!(seen.len(), 1000);
        assert!((0..100).all(|_| random.below(7) < 7));
    }
}
