//! Steal time: time in which a vCPU was runnable but the host ran other work. The host counts it in
//! ticks from a start of its own, a guest reads nanoseconds from its first registration on.

use vmm_bus::Nanos;

use crate::clock::CounterClock;

/// Steal time of a vCPU as its guest knows it.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct StealTime {
    /// Ticks stolen before the guest first registered.
    before: Option<u64>,
    /// Ticks at the last report.
    reported: u64,
}

impl StealTime {
    /// Nothing reported yet.
    pub const UNREPORTED: Self = Self { before: None, reported: 0 };

    /// True if `stolen` ticks ([`crate::Vcpu::stolen`]) differ from the last report.
    #[inline]
    pub const fn has_changed(&self, stolen: u64) -> bool {
        stolen != self.reported
    }

    /// Reports `stolen` ticks: returns the time stolen since the first report.
    pub fn report(&mut self, stolen: u64, clock: &CounterClock) -> Nanos {
        let before = *self.before.get_or_insert(stolen);
        self.reported = stolen;
        clock.duration(stolen.wrapping_sub(before))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn time_counts_from_the_first_report() {
        let clock = CounterClock::new(2_000_000, 77);
        let mut time = StealTime::UNREPORTED;
        assert!(time.has_changed(1000) && !time.has_changed(0));
        assert_eq!(time.report(1000, &clock), 0);
        assert!(!time.has_changed(1000) && time.has_changed(1001));
        assert_eq!(time.report(1501, &clock), 250);
    }
}
