//! The guest's wall clock, which follows the host's with each control connection: the real-time
//! clock, from which the kernel takes the time, has seconds only, and a host may be suspended.

use rustix::time::{ClockId, Timespec, clock_gettime, clock_settime};
use std::time::Duration;

/// Smallest difference that is corrected.
const TOLERANCE: Duration = Duration::from_millis(10);

/// Sets the clock to this time, since 1970-01-01 UTC, if it differs. A failure is printed.
pub fn follow(time: Duration) {
    let now = Duration::try_from(clock_gettime(ClockId::Realtime)).unwrap_or_default();
    if now.abs_diff(time) < TOLERANCE {
        return;
    }
    let set = Timespec::try_from(time).map_err(|_| rustix::io::Errno::INVAL);
    if let Err(error) = set.and_then(|time| clock_settime(ClockId::Realtime, time)) {
        eprintln!("parador-agent: cannot set the clock: {error}");
    }
}
