//! Table of the page frames of guest memory of which guest processes have private copies, in shared
//! memory; [`crate::mmu::frames`] applies it.
//!
//! The table holds the frames in groups, with a log of its changes, which each process applies.

use core::sync::atomic::Ordering::SeqCst;
use core::sync::atomic::{AtomicBool, AtomicU32, AtomicU64};

use host_linux::sys;

use crate::mmu::ram::PAGE;

/// Frames of an entry, one bit each.
const GROUP: u64 = 16;
/// Length of a group in bytes.
const GROUP_LENGTH: u64 = GROUP * PAGE;
/// All frames of an entry.
const ALL: u64 = (1 << GROUP) - 1;
/// Number of groups in the table. As long as frames of a group lie together, they use less than
/// half of the mappings that Linux permits to a process (65,530, `vm.max_map_count`).
const ENTRIES: usize = 1 << ENTRIES_SHIFT;
const ENTRIES_SHIFT: u32 = 13;
/// Number of places of a group.
const PROBES: usize = 16;
/// Capacity of the log.
const LOG: u32 = 1024;
/// Log entry: frames leave the table.
pub const REMOVED: u64 = 1 << 63;
/// Log entry: all frames leave the table.
const EMPTIED: u64 = 0;
/// Capacity in recently written frames.
const WRITTEN: usize = 256;
/// Number of writes after which a frame is not copied for a while.
const OFTEN: u64 = 4;
/// Number of refusals for which that lasts.
const REFUSALS: u64 = 64;
/// Table of the VM, in shared memory.
#[repr(C)]
pub struct CopiedFrames {
    /// A vCPU changes the table.
    is_locked: AtomicBool,
    /// Changes begun so far.
    pub begun: AtomicU32,
    /// Changes completed so far.
    pub changes: AtomicU32,
    /// Last change that has removed a frame.
    pub removals: AtomicU32,
    /// Number of frames.
    used: AtomicU32,
    /// Group number plus 1, and its frames from bit 0 on ([`GROUP`]); 0: free.
    entries: [AtomicU64; ENTRIES],
    /// Last changes: frames that enter, as in [`Self::entries`], or leave, with [`REMOVED`];
    /// [`EMPTIED`].
    log: [AtomicU64; LOG as usize],
    /// Number, refusals and writes of written frames: 48, 8 and 8 bits.
    written: [AtomicU64; WRITTEN],
}

/// Frames of one group.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Frames {
    group: u64,
    bits: u64,
}

impl Frames {
    /// Decodes an entry of the table or the log.
    pub fn of(entry: u64) -> Option<Self> {
        let group = (entry & !REMOVED) >> GROUP;
        Some(Self { group: group.checked_sub(1)?, bits: entry & ALL })
    }

    fn entry(self) -> u64 {
        ((self.group + 1) << GROUP) | self.bits
    }

    /// Returns the frames in a range of guest memory, given by its offset.
    pub fn in_range(offset: u64, length: u64) -> impl Iterator<Item = Self> {
        let (first, last) = (offset / PAGE, (offset + length.max(1) - 1) / PAGE);
        (first / GROUP..=last / GROUP).map(move |group| {
            let from = first.saturating_sub(group * GROUP);
            let to = (last - group * GROUP).min(GROUP - 1);
            Self { group, bits: (ALL << from) & (ALL >> (GROUP - 1 - to)) }
        })
    }

    /// Returns the contiguous ranges as offsets in guest memory and lengths.
    pub fn runs(self) -> impl Iterator<Item = (u64, u64)> {
        let Self { group, bits: mut left } = self;
        core::iter::from_fn(move || {
            let first = u64::from(left.trailing_zeros());
            let length = u64::from((left >> first.min(63)).trailing_ones());
            left &= !((ALL >> (GROUP - length.min(GROUP))) << first.min(63));
            (length != 0).then_some((group * GROUP_LENGTH + first * PAGE, length * PAGE))
        })
    }
}

/// Returns whether a change is not before another one.
pub fn is_after(change: u32, other: u32) -> bool {
    change.wrapping_sub(other) as i32 >= 0
}

impl CopiedFrames {
    /// Returns the places of a group.
    fn places(&self, group: u64) -> impl Iterator<Item = &AtomicU64> {
        let hash = group.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> (64 - ENTRIES_SHIFT);
        (0..PROBES).map(move |probe| &self.entries[(hash as usize + probe) % ENTRIES])
    }

    /// Returns the frames that the table contains.
    pub fn has(&self, frames: Frames) -> u64 {
        if self.used.load(SeqCst) == 0 {
            return 0;
        }
        let entries = self.places(frames.group).map(|place| place.load(SeqCst));
        let found = entries
            .take_while(|entry| *entry != 0)
            .find_map(|entry| Frames::of(entry).filter(|found| found.group == frames.group));
        found.map_or(0, |found| found.bits & frames.bits)
    }

    /// Calls `act` under the table's lock, with a function that executes a change and logs it.
    fn change(&self, act: impl FnOnce(&mut dyn FnMut(u64, &mut dyn FnMut()))) {
        while self.is_locked.swap(true, SeqCst) {
            sys::yield_now();
        }
        act(&mut |record, act| {
            let number = self.changes.load(SeqCst).wrapping_add(1);
            // Before the entries: a vCPU that misses one waits for all vCPUs that may not.
            self.begun.store(number, SeqCst);
            if record == EMPTIED || record & REMOVED != 0 {
                self.removals.store(number, SeqCst);
            }
            act();
            self.log[(number % LOG) as usize].store(record, SeqCst);
            self.changes.store(number, SeqCst);
        });
        self.is_locked.store(false, SeqCst);
    }

    /// Adds frames; removes all other frames first if the table is full.
    pub fn insert(&self, frames: Frames) {
        self.change(|record| {
            let is_same = |place: &&AtomicU64| {
                Frames::of(place.load(SeqCst)).is_some_and(|found| found.group == frames.group)
            };
            let is_free = |place: &&AtomicU64| place.load(SeqCst) & ALL == 0;
            let mut places = self.places(frames.group);
            let place = places.find(is_same);
            let place = place.or_else(|| self.places(frames.group).find(is_free));
            let Some(place) = place else {
                record(EMPTIED, &mut || self.clear());
                return;
            };
            let old = Frames::of(place.load(SeqCst)).filter(|old| old.group == frames.group);
            let bits = old.map_or(0, |old| old.bits);
            let new = frames.bits & !bits;
            if new != 0 {
                record(Frames { bits: new, ..frames }.entry(), &mut || {
                    self.used.fetch_add(new.count_ones(), SeqCst);
                    place.store(Frames { bits: bits | new, ..frames }.entry(), SeqCst);
                });
            }
        });
    }

    /// Removes frames.
    fn remove(&self, frames: Frames) {
        self.change(|record| {
            let bits = self.has(frames);
            if bits == 0 {
                return;
            }
            let gone = Frames { bits, ..frames };
            record(gone.entry() | REMOVED, &mut || {
                for place in self.places(frames.group) {
                    let entry = place.load(SeqCst);
                    if Frames::of(entry).is_some_and(|found| found.group == frames.group) {
                        place.store(entry & !bits, SeqCst);
                    }
                }
                self.used.fetch_sub(bits.count_ones(), SeqCst);
            });
        });
    }

    /// Removes all frames.
    pub fn empty(&self) {
        self.change(|record| record(EMPTIED, &mut || self.clear()));
    }

    fn clear(&self) {
        self.entries.iter().for_each(|place| place.store(0, SeqCst));
        self.used.store(0, SeqCst);
    }

    /// Returns the log entry of a change; `None`: overwritten.
    pub fn record(&self, change: u32) -> Option<u64> {
        let record = self.log[(change % LOG) as usize].load(SeqCst);
        let is_there = self.begun.load(SeqCst).wrapping_sub(change) < LOG;
        (is_there && record != EMPTIED).then_some(record)
    }

    /// Returns the frames of all entries.
    pub fn all(&self) -> impl Iterator<Item = Frames> {
        self.entries.iter().filter_map(|place| Frames::of(place.load(SeqCst)))
    }

    /// Returns whether the table has no frames.
    pub fn is_empty(&self) -> bool {
        self.used.load(SeqCst) == 0
    }

    /// Inserts the frames of a range that the table does not have; returns whether some were
    /// missing.
    pub fn insert_range(&self, offset: u64, length: u64) -> bool {
        let mut was_missing = false;
        for frames in Frames::in_range(offset, length) {
            if self.has(frames) != frames.bits {
                self.insert(frames);
                was_missing = true;
            }
        }
        was_missing
    }

    /// Returns whether the table has all frames of a range.
    pub fn has_all(&self, offset: u64, length: u64) -> bool {
        Frames::in_range(offset, length).all(|frames| self.has(frames) == frames.bits)
    }

    /// Handles a write of the guest to a range of guest memory, given by its offset: all copies of
    /// these frames are dropped before the guest continues. Returns whether the table contained
    /// one.
    pub fn write(&self, offset: u64, length: u64) -> bool {
        let mut is_listed = false;
        for frames in Frames::in_range(offset, length) {
            let bits = self.has(frames);
            if bits == 0 {
                continue;
            }
            is_listed = true;
            self.remove(frames);
            (0..GROUP)
                .filter(|bit| bits >> bit & 1 != 0)
                .for_each(|bit| self.note_written(frames.group * GROUP + bit));
        }
        is_listed
    }

    /// Returns whether the table contains a frame of this range of guest memory.
    pub fn holds(&self, offset: u64, length: u64) -> bool {
        self.used.load(SeqCst) != 0
            && Frames::in_range(offset, length).any(|frames| self.has(frames) != 0)
    }

    /// Returns whether a frame, given by its number, was written so often that it is not copied for
    /// now.
    pub fn is_written_often(&self, frame: u64) -> bool {
        let place = &self.written[frame as usize % WRITTEN];
        let value = place.load(SeqCst);
        let (writes, refusals) = (value & 0xff, value >> 8 & 0xff);
        if value >> 16 != frame || writes < OFTEN {
            return false;
        }
        let next = if refusals + 1 == REFUSALS { 0 } else { value + 0x100 };
        // A concurrent count of another vCPU is equally good.
        let _ = place.compare_exchange(value, next, SeqCst, SeqCst);
        true
    }

    fn note_written(&self, frame: u64) {
        let place = &self.written[frame as usize % WRITTEN];
        let value = place.load(SeqCst);
        let writes = if value >> 16 == frame { (value & 0xff) + 1 } else { 1 };
        place.store(frame << 16 | writes.min(OFTEN), SeqCst);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::boxed::Box;
    use std::collections::BTreeSet;
    use std::vec::Vec;

    fn table() -> Box<CopiedFrames> {
        // SAFETY: zeros are the initial state.
        unsafe { Box::new_zeroed().assume_init() }
    }

    #[test]
    fn frames_enter_and_leave() {
        let table = table();
        assert!(table.is_empty() && !table.holds(0, u64::from(u32::MAX)));
        assert!(table.insert_range(3 * PAGE, 2 * PAGE));
        assert!(!table.insert_range(3 * PAGE, 2 * PAGE));
        assert!(table.has_all(3 * PAGE, 2 * PAGE) && !table.has_all(3 * PAGE, 3 * PAGE));
        assert!(table.holds(0, 4 * PAGE) && !table.holds(0, 3 * PAGE));
        assert!(table.write(4 * PAGE + 8, 1));
        assert!(table.holds(3 * PAGE, 1) && !table.holds(4 * PAGE, PAGE));
        assert!(!table.write(4 * PAGE, PAGE));
    }

    #[test]
    fn ranges_are_split_into_groups() {
        let all: Vec<Frames> = Frames::in_range(15 * PAGE, 3 * PAGE).collect();
        assert_eq!(all, [Frames { group: 0, bits: 1 << 15 }, Frames { group: 1, bits: 3 }]);
        let runs: Vec<_> = Frames { group: 1, bits: 0b1101 }.runs().collect();
        assert_eq!(runs, [(16 * PAGE, PAGE), (18 * PAGE, 2 * PAGE)]);
        let whole: Vec<_> = Frames { group: 2, bits: ALL }.runs().collect();
        assert_eq!(whole, [(32 * PAGE, 16 * PAGE)]);
    }

    #[test]
    fn entries_are_decoded() {
        let frames = Frames { group: 77, bits: 0x8001 };
        assert_eq!(Frames::of(frames.entry()), Some(frames));
        assert_eq!(Frames::of(frames.entry() | REMOVED), Some(frames));
        assert_eq!(Frames::of(0), None);
    }

    #[test]
    fn changes_are_logged() {
        let table = table();
        table.insert_range(0, PAGE);
        table.write(0, PAGE);
        let [added, removed] = [1, 2].map(|change| table.record(change).unwrap());
        assert_eq!((added & REMOVED, removed & REMOVED), (0, REMOVED));
        assert_eq!(Frames::of(added), Frames::of(removed));
        assert_eq!(table.removals.load(SeqCst), 2);
        assert_eq!(table.record(3), None);
    }

    #[test]
    fn an_overwritten_log_says_so() {
        let table = table();
        for change in 0..u64::from(LOG) + 1 {
            table.insert_range(change * PAGE, PAGE);
        }
        assert_eq!(table.record(1), None);
        assert!(table.record(LOG).is_some());
        table.empty();
        assert_eq!(table.record(LOG + 2), None);
        assert!(table.is_empty() && table.all().all(|frames| frames.bits == 0));
    }

    #[test]
    fn a_full_table_is_emptied() {
        let table = table();
        // All of these groups may be stored at the same places only if their hashes agree; many
        // groups fill them sooner or later.
        let mut group = 0;
        while !table.insert_fails(group) {
            group += 1;
        }
        assert!(table.is_empty() && group > PROBES as u64);
    }

    impl CopiedFrames {
        fn insert_fails(&self, group: u64) -> bool {
            self.insert(Frames { group, bits: 1 });
            self.is_empty()
        }
    }

    #[test]
    fn frames_that_are_written_often_rest_for_a_while() {
        let table = table();
        for _ in 0..OFTEN {
            assert!(!table.is_written_often(5));
            table.insert_range(5 * PAGE, PAGE);
            table.write(5 * PAGE, PAGE);
        }
        let refused = (0..2 * REFUSALS).take_while(|_| table.is_written_often(5)).count();
        assert_eq!(refused as u64, REFUSALS);
        assert!(!table.is_written_often(6));
    }

    #[test]
    fn changes_are_ordered_across_an_overflow() {
        assert!(is_after(5, 5) && is_after(6, 5) && !is_after(4, 5));
        assert!(is_after(1, u32::MAX) && !is_after(u32::MAX, 1));
    }

    proptest! {
        #[test]
        fn the_table_is_a_set_of_frames(steps in proptest::collection::vec((any::<bool>(), 0..64_u64, 1..20_u64), 0..40)) {
            let table = table();
            let mut model = BTreeSet::new();
            for (enters, first, count) in steps {
                if enters {
                    table.insert_range(first * PAGE, count * PAGE);
                    model.extend(first..first + count);
                } else {
                    let held = model.range(first..first + count).next().is_some();
                    prop_assert_eq!(table.write(first * PAGE, count * PAGE), held);
                    model.retain(|frame| !(first..first + count).contains(frame));
                }
            }
            for frame in 0..90 {
                prop_assert_eq!(table.holds(frame * PAGE, PAGE), model.contains(&frame));
            }
        }
    }
}
