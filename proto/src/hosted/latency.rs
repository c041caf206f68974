//! Buckets of the histograms of times: powers of two, from 4 µs to 8.4 s, and one for longer times.

/// Number of buckets.
pub const BUCKETS: usize = 23;
/// Longest time of the first bucket in microseconds; each further one has twice that of the former.
pub const FIRST_US: u64 = 4;

/// Returns the bucket for a time in nanoseconds.
pub const fn bucket(nanoseconds: u64) -> usize {
    let microseconds = nanoseconds.div_ceil(1000);
    if microseconds <= FIRST_US {
        return 0;
    }
    // Doublings of the first bound until it holds the time.
    let doublings = (FIRST_US - 1).leading_zeros() - (microseconds - 1).leading_zeros();
    let bucket = doublings as usize;
    if bucket < BUCKETS { bucket } else { BUCKETS - 1 }
}

/// Returns the longest time of a bucket in nanoseconds; `None`: the last one has no bound.
pub const fn bound(bucket: usize) -> Option<u64> {
    if bucket < BUCKETS - 1 { Some((FIRST_US * 1000) << bucket) } else { None }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_time_is_in_the_first_bucket_that_holds_it() {
        assert_eq!((bucket(0), bucket(4000), bucket(4001), bucket(8000)), (0, 0, 1, 1));
        for index in 0..BUCKETS - 1 {
            let bound = bound(index).unwrap();
            assert_eq!((bucket(bound), bucket(bound + 1)), (index, index + 1));
        }
        assert_eq!(bound(BUCKETS - 2), Some(8_388_608_000));
        assert_eq!((bound(BUCKETS - 1), bound(usize::MAX)), (None, None));
        assert_eq!(bucket(u64::MAX), BUCKETS - 1);
    }
}
