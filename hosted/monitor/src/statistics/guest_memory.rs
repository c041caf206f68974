//! The guest's own statistics of its memory, as its balloon driver reports them on request.
//!
//! The guest can report any value, in memory that it can overwrite: values are bounded, and only
//! displayed.

use proto::hosted::balloon::{Reported, tag};
use proto::hosted::layout;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::fs::File;
use std::time::{Duration, Instant};

/// Guest's own statistics of its memory. A guest can report any values.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize, Serialize, JsonSchema)]
#[serde(default)]
#[schemars(!default)]
pub struct GuestMemory {
    /// Time since the report in milliseconds.
    pub age_ms: u64,
    /// Memory that the guest kernel manages, in bytes.
    pub total_bytes: Option<u64>,
    /// Unused memory in bytes.
    pub free_bytes: Option<u64>,
    /// Memory that applications can have without swapping, in bytes.
    pub available_bytes: Option<u64>,
    /// Memory of caches that the guest can return quickly, in bytes.
    pub cache_bytes: Option<u64>,
    /// Bytes swapped in since boot.
    pub swapped_in_bytes: Option<u64>,
    /// Bytes swapped out since boot.
    pub swapped_out_bytes: Option<u64>,
    /// Major page faults since boot.
    pub major_faults: Option<u64>,
    /// Minor page faults since boot.
    pub minor_faults: Option<u64>,
}

/// Shortest interval between two requests to the guest.
const INTERVAL: Duration = Duration::from_millis(500);

/// Requests to the guest of a running VM, and its last report.
#[derive(Debug, Default)]
pub struct GuestReports {
    /// Number of reports, and when that number was first seen.
    seen: Option<(u64, Instant)>,
    /// Last request, and the number of reports before it.
    asked: Option<(u64, Instant)>,
}

/// Decision about a new request to the guest.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Ask {
    /// The last report is recent, or the guest has no driver.
    No,
    /// Request a report.
    Once,
    /// Request a report and wait for it; this is the number of reports before it.
    AndWait(u64),
}

/// Returns the last report in the memory shared with the VM's processes.
pub fn reported(shared: &File) -> Reported {
    Reported::from_words(&super::words(shared, layout::BALLOON))
}

impl GuestReports {
    /// Decides about a request and records it. `reports` is the present number of reports.
    pub fn ask(&mut self, reports: u64, now: Instant) -> Ask {
        // A driver reports once when it starts.
        if reports == 0 {
            return Ask::No;
        }
        let (before, asked) = self.asked.unzip();
        if asked.is_some_and(|asked| now.saturating_duration_since(asked) < INTERVAL) {
            return Ask::No;
        }
        self.asked = Some((reports, now));
        // A guest that has not answered the last request delays nothing.
        if before == Some(reports) { Ask::Once } else { Ask::AndWait(reports) }
    }

    /// Returns the last report; `memory` is the VM's memory in bytes, which bounds its values.
    pub fn latest(&mut self, reported: Reported, memory: u64, now: Instant) -> Option<GuestMemory> {
        let Reported { reports, values } = reported;
        if reports == 0 {
            return None;
        }
        let since = match self.seen {
            Some((seen, since)) if seen == reports => since,
            _ => self.seen.insert((reports, now)).1,
        };
        let age = now.saturating_duration_since(since).as_millis();
        let bytes = |tag: usize| values[tag].map(|value| value.min(memory));
        Some(GuestMemory {
            age_ms: u64::try_from(age).unwrap_or(u64::MAX),
            total_bytes: bytes(tag::TOTAL),
            free_bytes: bytes(tag::FREE),
            available_bytes: bytes(tag::AVAILABLE),
            cache_bytes: bytes(tag::CACHES),
            swapped_in_bytes: values[tag::SWAPPED_IN],
            swapped_out_bytes: values[tag::SWAPPED_OUT],
            major_faults: values[tag::MAJOR_FAULTS],
            minor_faults: values[tag::MINOR_FAULTS],
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proto::hosted::balloon::TAGS;

    #[test]
    fn a_guest_is_asked_seldom_and_waited_for_once() {
        let mut reports = GuestReports::default();
        let start = Instant::now();
        let at = |milliseconds| start + Duration::from_millis(milliseconds);
        assert_eq!(reports.ask(0, start), Ask::No, "no driver");
        assert_eq!(reports.ask(1, start), Ask::AndWait(1));
        assert_eq!(reports.ask(2, at(499)), Ask::No);
        assert_eq!(reports.ask(2, at(500)), Ask::AndWait(2));
        assert_eq!(reports.ask(2, at(1000)), Ask::Once, "it has not answered");
        assert_eq!(reports.ask(3, at(1500)), Ask::AndWait(3));
    }

    #[test]
    fn forged_values_are_bounded() {
        let mut reports = GuestReports::default();
        let start = Instant::now();
        let mut values = [Some(u64::MAX); TAGS];
        values[tag::AVAILABLE] = None;
        assert_eq!(reports.latest(Reported { reports: 0, values }, 9, start), None);
        let memory = reports.latest(Reported { reports: 1, values }, 9, start).unwrap();
        assert_eq!((memory.free_bytes, memory.available_bytes, memory.age_ms), (Some(9), None, 0));
        assert_eq!(memory.minor_faults, Some(u64::MAX));
        let later = start + Duration::from_secs(3);
        let memory = reports.latest(Reported { reports: 1, values }, 9, later).unwrap();
        assert_eq!(memory.age_ms, 3000);
        let memory = reports.latest(Reported { reports: 7, values }, 9, later).unwrap();
        assert_eq!(memory.age_ms, 0);
    }
}
