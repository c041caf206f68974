//! Messages that are logged once each: a small set of keys that drops no key and reports when it is
//! full.

use core::fmt;

use crate::{Host, Level};

const ENTRIES: usize = 48;

/// Keys of the messages that a VM has logged. The set bounds the log output of a guest over its
/// whole life only if the host passes it to the board of the next boot
/// ([`Pc::keep_logged`](crate::Pc::keep_logged)).
#[derive(Clone, Debug)]
pub struct Once {
    keys: [u64; ENTRIES],
    used: usize,
}

/// Decision about a message.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum LogDecision {
    /// The key is new: log the message.
    Log,
    /// The key is new and fills the set: log the message, and that it is the last.
    LogLast,
    /// The key is known, or the set is full.
    Skip,
}

impl Once {
    /// Creates an empty set.
    pub const fn new() -> Self {
        Self { keys: [0; ENTRIES], used: 0 }
    }

    /// Inserts a key.
    pub fn enter(&mut self, key: u64) -> LogDecision {
        if self.used == ENTRIES || self.keys[..self.used].contains(&key) {
            return LogDecision::Skip;
        }
        self.keys[self.used] = key;
        self.used += 1;
        if self.used == ENTRIES { LogDecision::LogLast } else { LogDecision::Log }
    }

    /// Logs a message unless its key is known, and at the end that it is the last.
    pub fn log(&mut self, host: &mut impl Host, level: Level, key: u64, text: fmt::Arguments<'_>) {
        let decision = self.enter(key);
        if decision != LogDecision::Skip {
            host.log(level, text);
        }
        if decision == LogDecision::LogLast {
            host.log(level, format_args!("further unknown accesses are only counted"));
        }
    }
}

impl Default for Once {
    fn default() -> Self {
        Self::new()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_once_until_full() {
        let mut once = Once::new();
        assert_eq!((once.enter(0), once.enter(0)), (LogDecision::Log, LogDecision::Skip));
        for key in 1..ENTRIES as u64 - 1 {
            assert_eq!(once.enter(key), LogDecision::Log);
        }
        assert_eq!(
            (once.enter(99), once.enter(99), once.enter(100)),
            (LogDecision::LogLast, LogDecision::Skip, LogDecision::Skip)
        );
    }
}
