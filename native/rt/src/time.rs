//! The counter that tells the time (on x86 the time-stamp counter), and conversions.

use core::time::Duration;
use proto::start::Clock;

use crate::processor;

/// Reads the counter.
#[inline(always)]
pub fn tsc() -> u64 {
    processor::counter()
}

/// Converts nanoseconds to ticks of the time-stamp counter at `khz` kHz, rounded up.
pub const fn ticks(khz: u64, nanos: u64) -> u64 {
    let ticks = (nanos as u128 * khz as u128).div_ceil(1_000_000);
    if ticks > u64::MAX as u128 { u64::MAX } else { ticks as u64 }
}

/// Converts ticks at `khz` kHz to nanoseconds.
pub const fn nanos(khz: u64, ticks: u64) -> u64 {
    let khz = if khz == 0 { 1 } else { khz };
    let nanos = ticks as u128 * 1_000_000 / khz as u128;
    if nanos > u64::MAX as u128 { u64::MAX } else { nanos as u64 }
}

/// Returns the TSC value `nanos` nanoseconds from now.
pub fn after(clock: &Clock, nanos: u64) -> u64 {
    tsc().saturating_add(ticks(clock.tsc_khz, nanos))
}

/// Returns the wall-clock time in seconds since 1970, UTC.
pub fn unix_time(clock: &Clock) -> Duration {
    let since = nanos(clock.tsc_khz, tsc().saturating_sub(clock.tsc));
    Duration::from_secs(clock.unix_seconds).saturating_add(Duration::from_nanos(since))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn conversions_do_not_overflow() {
        assert_eq!(ticks(2_000_000, 1), 2);
        assert_eq!(ticks(1, 1), 1, "rounded up");
        assert_eq!(ticks(u64::MAX, u64::MAX), u64::MAX);
        assert_eq!(nanos(2_000_000, 3), 1);
        assert_eq!(nanos(0, u64::MAX), u64::MAX);
    }
}
