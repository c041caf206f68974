//! The relation between the host's time-stamp counter and machine time.
//!
//! Machine time starts at 0 when the virtual machine does. Both directions use one fixed
//! multiplier each, so a conversion is one multiplication, and a deadline converted to ticks is
//! never early: `nanos(tsc(t)) >= t`.

use vmm_bus::{NEVER, Nanos};

/// Machine time from the time-stamp counter.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct TscClock {
    khz: u64,
    base: u64,
    /// Nanoseconds per tick, 32 fraction bits.
    nanos_per_tick: u64,
}

impl TscClock {
    /// A clock that reads 0 at host tick `base`; `khz` is the counter's frequency in kHz, taken as
    /// 1 if it is 0.
    pub const fn new(khz: u64, base: u64) -> Self {
        let khz = if khz == 0 { 1 } else { khz };
        Self { khz, base, nanos_per_tick: ((1_000_000u128 << 32) / khz as u128) as u64 }
    }

    /// Frequency in kHz.
    pub const fn khz(&self) -> u64 {
        self.khz
    }

    /// The host tick at machine time 0.
    pub const fn base(&self) -> u64 {
        self.base
    }

    /// Machine time at host tick `tsc`.
    #[inline]
    pub const fn nanos(&self, tsc: u64) -> Nanos {
        let ticks = tsc.saturating_sub(self.base);
        ((ticks as u128 * self.nanos_per_tick as u128) >> 32) as u64
    }

    /// The first host tick at which machine time has reached `nanos`; `u64::MAX` for [`NEVER`].
    pub const fn tsc(&self, nanos: Nanos) -> u64 {
        if nanos == NEVER {
            return u64::MAX;
        }
        let scaled = (nanos as u128) << 32;
        let ticks = scaled.div_ceil(self.nanos_per_tick as u128);
        let tsc = ticks + self.base as u128;
        if tsc >= u64::MAX as u128 { u64::MAX } else { tsc as u64 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn never_early() {
        for khz in [1, 1_000_000, 2_294_608, 3_400_000] {
            let clock = TscClock::new(khz, 12_345);
            for nanos in [0, 1, 999, 1_000_000_007, 86_400_000_000_000] {
                let tsc = clock.tsc(nanos);
                assert!(clock.nanos(tsc) >= nanos, "{khz} kHz, {nanos} ns");
                if nanos > 0 {
                    assert!(clock.nanos(tsc - 1) < nanos, "{khz} kHz, {nanos} ns");
                }
            }
            assert_eq!(clock.tsc(NEVER), u64::MAX);
            assert_eq!(clock.nanos(0), 0);
        }
    }
}
