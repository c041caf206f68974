//! Control gate of every task: what a task tells root about itself.
//!
//! | label | words |
//! |---|---|
//! | [`STARTED`] | 0: bytes of memory in use beyond guest memory |
//! | [`EXITED`] | 0: exit code; [`VmmStatistics`] in the page |
//! | [`PANICKED`] | 0: length of the text; text in the page |
//! | [`DRAINED`] | – |
//!
//! Root answers [`STARTED`] and [`DRAINED`]. It does not answer the others: the caller is taken apart instead.

/// The task is ready for work.
pub const STARTED: u64 = 1;
/// The task has ended by itself.
pub const EXITED: u64 = 2;
/// The task has found itself broken.
pub const PANICKED: u64 = 3;
/// A console server has sent everything, as root has asked it to ([`DRAIN`](crate::console::DRAIN)).
pub const DRAINED: u64 = 4;

/// Exit codes, as users see them.
pub mod code {
    /// Clean power-off; 1 to 63 are the guest's own.
    pub const OK: u64 = 0;
    /// The description asks for what the machine cannot give.
    pub const BAD_CONFIG: u64 = 65;
    /// The VMM or a server broke.
    pub const INTERNAL: u64 = 70;
    /// The guest panicked.
    pub const GUEST_PANIC: u64 = 80;
    /// Triple fault, or a fault that nobody handles.
    pub const GUEST_FAULT: u64 = 81;
    /// A watchdog ran out.
    pub const WATCHDOG: u64 = 82;
    /// The guest asked for a reset, and was not to be reset.
    pub const RESET: u64 = 83;
}

/// Most exit reasons that are counted apart.
pub const REASONS: usize = 24;

/// What a VMM counted.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct VmmStatistics {
    /// World switches into the guest.
    pub entries: u64,
    /// Exits that the kernel settled itself.
    pub settled: u64,
    /// Bytes of memory that the VMM uses beyond guest memory and without kernel objects.
    pub bytes: u64,
    /// Exits by reason, numbered as the VMM library does.
    pub exits: [u64; REASONS],
}

impl VmmStatistics {
    /// Words of the packed form.
    pub const WORDS: usize = 3 + REASONS;

    /// Nothing counted.
    pub const ZERO: Self = Self { entries: 0, settled: 0, bytes: 0, exits: [0; REASONS] };

    /// The packed form.
    pub fn pack(&self) -> [u64; Self::WORDS] {
        let mut words = [0; Self::WORDS];
        words[..3].copy_from_slice(&[self.entries, self.settled, self.bytes]);
        words[3..].copy_from_slice(&self.exits);
        words
    }

    /// Reads the packed form; missing words are 0.
    pub fn unpack(words: &[u64]) -> Self {
        let word = |index: usize| words.get(index).copied().unwrap_or(0);
        Self {
            entries: word(0),
            settled: word(1),
            bytes: word(2),
            exits: core::array::from_fn(|index| word(3 + index)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn statistics_round_trip() {
        let mut statistics =
            VmmStatistics { entries: 1, settled: 2, bytes: 3, ..VmmStatistics::ZERO };
        statistics.exits[REASONS - 1] = 9;
        assert_eq!(VmmStatistics::unpack(&statistics.pack()), statistics);
        assert_eq!(VmmStatistics::unpack(&[]), VmmStatistics::ZERO);
    }
}
