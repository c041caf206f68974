//! Control gate of every task: messages about the task's own state to root.
//!
//! | label | words |
//! |---|---|
//! | [`STARTED`] | 0: bytes of memory in use beyond guest memory |
//! | [`EXITED`] | 0: exit code; [`VmmStatistics`] in the page |
//! | [`PANICKED`] | 0: length of the text; text in the page |
//! | [`DRAINED`] | – |
//!
//! Root replies to [`STARTED`] and [`DRAINED`]. After the remaining messages root destroys the task
//! instead.

use crate::vtlb;

/// The task is ready.
pub const STARTED: u64 = 1;
/// The task has ended.
pub const EXITED: u64 = 2;
/// The task has panicked.
pub const PANICKED: u64 = 3;
/// A console server has transmitted all output, as root has requested
/// ([`DRAIN`](crate::console::DRAIN)).
pub const DRAINED: u64 = 4;

/// Exit codes reported to users.
pub mod code {
    /// Clean power-off; the guest chooses 1 to 63.
    pub const OK: u64 = 0;
    /// The description requires resources that the host does not have.
    pub const BAD_CONFIG: u64 = 65;
    /// The VMM or a server has failed.
    pub const INTERNAL: u64 = 70;
    /// Panic of the guest.
    pub const GUEST_PANIC: u64 = 80;
    /// Triple fault, or an unhandled fault.
    pub const GUEST_FAULT: u64 = 81;
    /// A watchdog has expired.
    pub const WATCHDOG: u64 = 82;
    /// Reset by the guest, with resets disabled.
    pub const RESET: u64 = 83;
}

/// Largest number of exit reasons with a counter.
pub const REASONS: usize = 24;

/// Counters of a VMM.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct VmmStatistics {
    /// Entries into the guest.
    pub entries: u64,
    /// Exits that the kernel handled without the VMM.
    pub handled_in_kernel: u64,
    /// Bytes of memory that the VMM uses in addition to guest memory, without kernel objects.
    pub bytes: u64,
    /// Events of servers that the vCPU with the device's interrupt handled, and those that another
    /// one did.
    pub server_events: [u64; 2],
    /// Exits by reason, numbered as in the VMM library.
    pub exits: [u64; REASONS],
    /// Counters of the vTLB ([`vtlb::COUNTER_NAMES`]), the sum over all vCPUs.
    pub vtlb: [u64; vtlb::COUNTERS],
}

impl VmmStatistics {
    /// Words of the encoding.
    pub const WORDS: usize = Self::VTLB + vtlb::COUNTERS;
    /// Index of the first counter of the vTLB.
    const VTLB: usize = Self::EXITS + REASONS;
    /// Index of the first exit reason.
    const EXITS: usize = 5;

    /// All counters zero.
    pub const ZERO: Self = Self {
        entries: 0,
        handled_in_kernel: 0,
        bytes: 0,
        server_events: [0; 2],
        exits: [0; REASONS],
        vtlb: [0; vtlb::COUNTERS],
    };

    /// Encodes the counters.
    pub fn pack(&self) -> [u64; Self::WORDS] {
        let mut words = [0; Self::WORDS];
        words[..3].copy_from_slice(&[self.entries, self.handled_in_kernel, self.bytes]);
        words[3..Self::EXITS].copy_from_slice(&self.server_events);
        words[Self::EXITS..Self::VTLB].copy_from_slice(&self.exits);
        words[Self::VTLB..].copy_from_slice(&self.vtlb);
        words
    }

    /// Decodes counters; missing words are 0.
    pub fn unpack(words: &[u64]) -> Self {
        let word = |index: usize| words.get(index).copied().unwrap_or(0);
        Self {
            entries: word(0),
            handled_in_kernel: word(1),
            bytes: word(2),
            server_events: [word(3), word(4)],
            exits: core::array::from_fn(|index| word(Self::EXITS + index)),
            vtlb: core::array::from_fn(|index| word(Self::VTLB + index)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn statistics_round_trip() {
        let mut statistics =
            VmmStatistics { entries: 1, handled_in_kernel: 2, bytes: 3, ..VmmStatistics::ZERO };
        statistics.server_events = [4, 5];
        statistics.exits[REASONS - 1] = 9;
        assert_eq!(VmmStatistics::unpack(&statistics.pack()), statistics);
        assert_eq!(VmmStatistics::unpack(&[]), VmmStatistics::ZERO);
    }
}
