//! Conversion between VM time and the ticks of a counter, without division at run time.

use crate::Nanos;

/// `x * numerator / denominator` as one wide multiplication.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Ratio {
    factor: u64,
    shift: u32,
}

impl Ratio {
    /// Creates the ratio with all bits that fit, rounded up. Both values must not be 0.
    const fn new(numerator: u64, denominator: u64) -> Self {
        let mut shift = 63 + numerator.leading_zeros();
        loop {
            let factor = ((numerator as u128) << shift).div_ceil(denominator as u128);
            if factor <= u64::MAX as u128 {
                return Self { factor: factor as u64, shift };
            }
            shift -= 1;
        }
    }

    /// Rounded down; the rounded factor adds up to one part in 2^63.
    #[inline]
    const fn apply(self, x: u64) -> u64 {
        let wide = (x as u128 * self.factor as u128) >> self.shift;
        if wide > u64::MAX as u128 { u64::MAX } else { wide as u64 }
    }
}

/// A clock that ticks `hz` times a second from VM time 0.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Ticks {
    from_nanos: Ratio,
    to_nanos: Ratio,
}

impl Ticks {
    /// Creates a clock; 0 is taken as 1.
    pub const fn new(hz: u64) -> Self {
        let hz = if hz == 0 { 1 } else { hz };
        const SECOND: u64 = 1_000_000_000;
        Self { from_nanos: Ratio::new(hz, SECOND), to_nanos: Ratio::new(SECOND, hz) }
    }

    /// Ticks elapsed in `nanos`.
    #[inline]
    pub const fn in_nanos(self, nanos: Nanos) -> u64 {
        self.from_nanos.apply(nanos)
    }

    /// A time by which `ticks` have elapsed, at most three nanoseconds late. `in_nanos` of it is
    /// never less than `ticks`, else a device would re-arm the same deadline without end.
    #[inline]
    pub const fn nanos(self, ticks: u64) -> Nanos {
        self.to_nanos.apply(ticks).saturating_add(1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn a_deadline_is_never_early_and_hardly_late(hz in 1_u64..6_000_000_000, ticks: u64, shift in 0..64) {
            let ticks = ticks >> shift;
            let clock = Ticks::new(hz);
            let nanos = clock.nanos(ticks);
            if nanos < u64::MAX {
                let exact = u128::from(ticks) * 1_000_000_000 / u128::from(hz);
                prop_assert!(clock.in_nanos(nanos) >= ticks);
                prop_assert!(clock.in_nanos(nanos) <= ticks + 1 + 3 * hz / 1_000_000_000);
                prop_assert!(u128::from(nanos) >= exact && u128::from(nanos) <= exact + 3);
            }
        }
    }

    #[test]
    fn extremes_saturate() {
        let clock = Ticks::new(0);
        assert_eq!(clock.nanos(u64::MAX), u64::MAX);
        assert_eq!(Ticks::new(u64::MAX).in_nanos(u64::MAX), u64::MAX);
    }
}
