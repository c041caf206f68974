//! Target of the balloon, and statistics of the guest's memory, as its balloon driver reports them.
//!
//! They are in the memory that the guest can overwrite: the statistics are only displayed, and only
//! the guest's own device reads the target. The guest is asked only when a client requests
//! statistics.

use core::sync::atomic::{AtomicU64, Ordering::SeqCst};

use super::layout;

/// Number of tags (VIRTIO 1.2, section 5.5.6.3, and room for later ones).
pub const TAGS: usize = 16;

/// Tags of the statistics.
pub mod tag {
    /// Bytes swapped in.
    pub const SWAPPED_IN: usize = 0;
    /// Bytes swapped out.
    pub const SWAPPED_OUT: usize = 1;
    /// Major page faults.
    pub const MAJOR_FAULTS: usize = 2;
    /// Minor page faults.
    pub const MINOR_FAULTS: usize = 3;
    /// Unused memory in bytes.
    pub const FREE: usize = 4;
    /// Memory in bytes.
    pub const TOTAL: usize = 5;
    /// Memory in bytes that applications can have without swapping.
    pub const AVAILABLE: usize = 6;
    /// Memory in bytes that caches use and can return quickly.
    pub const CACHES: usize = 7;
}

/// Request for statistics, the last report, and the balloon's target.
#[derive(Debug, Default)]
#[repr(C)]
pub struct BalloonReport {
    /// Not 0: a report is requested.
    pub requested: AtomicU64,
    /// Number of reports.
    pub reports: AtomicU64,
    /// Tags of the last report, one bit each.
    pub tags: AtomicU64,
    /// Its values, by [`tag`].
    pub values: [AtomicU64; TAGS],
    /// Target size of the balloon in pages of 4 KiB.
    pub target: AtomicU64,
}

const _: () = assert!(layout::BALLOON + size_of::<BalloonReport>() as u64 <= layout::IDLE);

impl BalloonReport {
    /// Words of request and report in memory: request, number of reports, tags, values.
    pub const WORDS: usize = 3 + TAGS;
    /// Offset of the target in shared memory.
    pub const TARGET: u64 = layout::BALLOON + core::mem::offset_of!(Self, target) as u64;

    /// Returns the target in pages.
    pub fn target_pages(&self) -> u32 {
        u32::try_from(self.target.load(SeqCst)).unwrap_or(u32::MAX)
    }

    /// Requests a report. The caller notifies the vCPU that serves the device.
    pub fn request(&self) {
        self.requested.store(1, SeqCst);
    }

    /// Takes a request.
    pub fn take_request(&self) -> bool {
        self.requested.swap(0, SeqCst) != 0
    }

    /// Stores a report: values by tag.
    pub fn store(&self, values: &[Option<u64>; TAGS]) {
        let mut tags = 0;
        for (index, (place, value)) in self.values.iter().zip(values).enumerate() {
            if let Some(value) = value {
                place.store(*value, SeqCst);
                tags |= 1 << index;
            }
        }
        self.tags.store(tags, SeqCst);
        self.reports.fetch_add(1, SeqCst);
    }
}

/// Copy of the last report.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Reported {
    /// Number of reports so far.
    pub reports: u64,
    /// Values by [`tag`].
    pub values: [Option<u64>; TAGS],
}

impl Reported {
    /// Decodes the words in memory.
    pub fn from_words(words: &[u64; BalloonReport::WORDS]) -> Self {
        let [_, reports, tags, values @ ..] = words;
        let value = |index: usize| (tags >> index & 1 != 0).then_some(values[index]);
        Self { reports: *reports, values: core::array::from_fn(value) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_report_replaces_the_last_one() {
        let report = BalloonReport::default();
        let read = || {
            let BalloonReport { requested, reports, tags, values, .. } = &report;
            let mut words = [requested, reports, tags].into_iter().chain(values);
            let words = core::array::from_fn(|_| words.next().map_or(0, |word| word.load(SeqCst)));
            Reported::from_words(&words)
        };
        assert!(!report.take_request());
        report.request();
        assert!(report.take_request() && !report.take_request());
        assert_eq!(read(), Reported { reports: 0, values: [None; TAGS] });
        let mut values = [None; TAGS];
        (values[tag::FREE], values[15]) = (Some(0), Some(u64::MAX));
        report.store(&values);
        assert_eq!(read(), Reported { reports: 1, values });
        report.target.store(1 << 40, SeqCst);
        assert_eq!(report.target_pages(), u32::MAX);
        values[15] = None;
        report.store(&values);
        assert_eq!(read(), Reported { reports: 2, values });
    }
}
