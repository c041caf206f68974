//! Conversion between a counter's ticks and nanoseconds.

/// Conversion between ticks and nanoseconds, by fixed-point multiplication with 32 fractional bits.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Scale {
    khz: u64,
    to_nanoseconds: u64,
    to_ticks: u64,
}

impl Scale {
    /// Scale of a counter of `khz` kHz, which must not be 0.
    pub const fn new(khz: u64) -> Self {
        let khz = if khz == 0 { 1 } else { khz };
        Self { khz, to_nanoseconds: (1_000_000 << 32) / khz, to_ticks: (khz << 32) / 1_000_000 }
    }

    /// Frequency in kHz.
    pub const fn khz(&self) -> u64 {
        self.khz
    }

    /// Ticks to nanoseconds, saturating.
    pub const fn nanoseconds(&self, ticks: u64) -> u64 {
        scale(ticks, self.to_nanoseconds)
    }

    /// Nanoseconds to ticks, saturating.
    pub const fn ticks(&self, nanoseconds: u64) -> u64 {
        scale(nanoseconds, self.to_ticks)
    }
}

const fn scale(value: u64, factor: u64) -> u64 {
    let scaled = (value as u128 * factor as u128) >> 32;
    if scaled > u64::MAX as u128 { u64::MAX } else { scaled as u64 }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_gigahertz_is_exact() {
        let scale = Scale::new(1_000_000);
        for value in [0, 1, 12345, u64::MAX] {
            assert_eq!(scale.nanoseconds(value), value);
            assert_eq!(scale.ticks(value), value);
        }
    }

    #[test]
    fn round_trips_stay_close() {
        for khz in [1_000, 999_999, 2_445_406, 3_700_123, 5_000_000] {
            let scale = Scale::new(khz);
            for nanoseconds in [1_000, 1_000_000, 3_600_000_000_000, 86_400_000_000_000] {
                let back = scale.nanoseconds(scale.ticks(nanoseconds));
                let error = nanoseconds.abs_diff(back);
                assert!(error <= 1_000_000 / khz + 1 + nanoseconds / 1_000_000, "{khz} {error}");
            }
        }
    }

    #[test]
    fn far_deadlines_saturate() {
        assert_eq!(Scale::new(3_000_000).ticks(u64::MAX), u64::MAX);
        assert_eq!(Scale::new(500_000).nanoseconds(u64::MAX), u64::MAX);
        assert_eq!(Scale::new(0).khz(), 1, "no division by zero");
    }
}
