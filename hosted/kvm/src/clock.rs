//! The host's clock.

use std::sync::LazyLock;
use std::time::Instant;

static START: LazyLock<Instant> = LazyLock::new(Instant::now);

/// Returns the time in nanoseconds since the first call.
pub fn nanoseconds() -> u64 {
    // The C library's clock, by the vDSO or by clock_gettime(2), which the process' filter permits.
    // Others look for the vDSO at their first call, by system calls that it does not permit.
    u64::try_from(START.elapsed().as_nanos()).unwrap_or(u64::MAX)
}
