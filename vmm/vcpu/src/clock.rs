//! The relation between the host's counter (TSC, generic timer) and VM time.
//!
//! VM time starts at 0 when the VM does. Both directions use one fixed multiplier each, so a
//! conversion is one multiplication, and a deadline converted to ticks is never early:
//! `nanos(ticks(t)) >= t`.

use vmm_bus::{NEVER, Nanos};

/// VM time from the host's counter.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct CounterClock {
    khz: u64,
    base: u64,
    /// Nanoseconds per tick, `to_shift` fraction bits.
    to_nanos: u64,
    to_shift: u32,
    /// Ticks per nanosecond, `from_shift` fraction bits.
    from_nanos: u64,
    from_shift: u32,
}

impl CounterClock {
    /// Creates a clock that reads 0 at host tick `base`; `khz` is the counter's frequency in kHz, 0
    /// is taken as 1.
    pub const fn new(khz: u64, base: u64) -> Self {
        const NANOS_PER_MILLI: u64 = 1_000_000;
        let khz = if khz == 0 { 1 } else { khz };
        let (to_nanos, to_shift) = ratio(NANOS_PER_MILLI, khz);
        let (from_nanos, from_shift) = ratio(khz, NANOS_PER_MILLI);
        Self { khz, base, to_nanos, to_shift, from_nanos, from_shift }
    }

    /// Frequency in kHz.
    pub const fn khz(&self) -> u64 {
        self.khz
    }

    /// The host tick at VM time 0.
    pub const fn base(&self) -> u64 {
        self.base
    }

    /// VM time at host tick `ticks`.
    #[inline]
    pub const fn nanos(&self, ticks: u64) -> Nanos {
        scale(ticks.saturating_sub(self.base), self.to_nanos, self.to_shift)
    }

    /// A length of time in ticks.
    pub const fn duration(&self, ticks: u64) -> Nanos {
        scale(ticks, self.to_nanos, self.to_shift)
    }

    /// First host tick at which VM time has reached `nanos`; `u64::MAX` for [`NEVER`].
    pub const fn ticks(&self, nanos: Nanos) -> u64 {
        if nanos == NEVER {
            return u64::MAX;
        }
        // Both factors are rounded down, so the estimate is low, by a tick or two.
        let mut ticks = scale(nanos, self.from_nanos, self.from_shift).saturating_add(self.base);
        while self.nanos(ticks) < nanos && ticks < u64::MAX {
            ticks += 1;
        }
        ticks
    }

    /// Scale of the KVM paravirtual clock: nanoseconds are `(ticks << shift) * factor >> 32`; a
    /// negative shift shifts right.
    pub const fn kvm_scale(&self) -> (u32, i8) {
        // The factor of `ratio` has its top bit set, and so has its upper half.
        ((self.to_nanos >> 32) as u32, 64 - self.to_shift as i8)
    }
}

/// `numerator / denominator` (neither 0) as a factor with its top bit set and its fraction bits.
const fn ratio(numerator: u64, denominator: u64) -> (u64, u32) {
    let mut shift = 64 + denominator.ilog2() - numerator.ilog2();
    loop {
        // At most 64 + 64 bits, since the shift is at most 64 more than the difference in length.
        let factor = wide_div(numerator, shift, denominator);
        if factor <= u64::MAX as u128 {
            return (factor as u64, shift);
        }
        shift -= 1;
    }
}

/// `(value << shift) / divisor`.
const fn wide_div(value: u64, shift: u32, divisor: u64) -> u128 {
    ((value as u128) << shift) / divisor as u128
}

/// `value * factor >> shift`, or the largest value.
#[inline]
const fn scale(value: u64, factor: u64, shift: u32) -> u64 {
    let wide = (value as u128 * factor as u128) >> shift;
    if wide > u64::MAX as u128 { u64::MAX } else { wide as u64 }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn never_early() {
        for khz in [1, 1_000_000, 2_294_608, 3_400_000] {
            let clock = CounterClock::new(khz, 12_345);
            for nanos in [0, 1, 999, 1_000_000_007, 86_400_000_000_000] {
                let ticks = clock.ticks(nanos);
                assert!(clock.nanos(ticks) >= nanos, "{khz} kHz, {nanos} ns");
                if nanos > 0 {
                    assert!(clock.nanos(ticks - 1) < nanos, "{khz} kHz, {nanos} ns");
                }
            }
            assert_eq!(clock.ticks(NEVER), u64::MAX);
            assert_eq!(clock.nanos(0), 0);
        }
    }

    #[test]
    fn long_runs_do_not_drift() {
        let clock = CounterClock::new(2_294_608, 0);
        let year = 365 * 86_400 * 2_294_608_000_u64;
        assert!(clock.nanos(year).abs_diff(365 * 86_400_000_000_000) <= 1);
    }

    #[test]
    fn kvm_scale_agrees() {
        for khz in [200_000, 1_000_000, 1_500_000, 2_000_000, 2_294_608, 5_000_000] {
            let clock = CounterClock::new(khz, 0);
            let (factor, shift) = clock.kvm_scale();
            let ticks: u64 = 3_600_000 * khz;
            let scaled = if shift < 0 { ticks >> -shift } else { ticks << shift };
            let nanos = (u128::from(scaled) * u128::from(factor)) >> 32;
            let expected = u128::from(clock.nanos(ticks));
            assert!(nanos.abs_diff(expected) < 2_000_000, "{khz}: {nanos} {expected}");
        }
    }
}
