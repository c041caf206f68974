//! Statistics of VMMs in the log.

use core::fmt;

use proto::control::VmmStatistics;
use proto::vtlb::COUNTER_NAMES;

use crate::platform::EXIT_NAMES;

/// Statistics of a VMM as `name=value`, with the bytes that were taken for it, and those that it
/// shared.
pub(super) struct Counts<'s>(pub &'s VmmStatistics, pub u64, pub u64);

impl fmt::Display for Counts<'_> {
    fn fmt(&self, to: &mut fmt::Formatter) -> fmt::Result {
        let Self(statistics, bytes, shared) = self;
        write!(to, "entries={} settled={}", statistics.entries, statistics.handled_in_kernel)?;
        write!(to, " bytes={bytes} shared={shared}")?;
        let [direct, elsewhere] = statistics.server_events;
        if direct + elsewhere != 0 {
            write!(to, " server_events={direct} server_events_elsewhere={elsewhere}")?;
        }
        for (name, count) in
            EXIT_NAMES.iter().zip(statistics.exits).filter(|(_, count)| *count != 0)
        {
            write!(to, " {name}={count}")?;
        }
        Ok(())
    }
}

/// Counters of a VM's vTLB as `name=value`.
pub(super) struct VtlbCounts<'s>(pub &'s VmmStatistics);

impl fmt::Display for VtlbCounts<'_> {
    fn fmt(&self, to: &mut fmt::Formatter) -> fmt::Result {
        let counters = COUNTER_NAMES.iter().zip(self.0.vtlb);
        for (index, (name, count)) in counters.enumerate() {
            let space = if index == 0 { "" } else { " " };
            write!(to, "{space}{name}={count}")?;
        }
        Ok(())
    }
}
