//! Histograms of the times of requests.
//!
//! A process that has been taken over can write any counts: sums saturate, and no decision depends
//! on them.

use proto::hosted::latency::{BUCKETS, bound};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Number of times by length: at index i those of at most 4 · 2^i µs, and longer than those before;
/// at index 22 those above 8.4 s. Zeros at the end are left out.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, Serialize, JsonSchema)]
#[serde(from = "Vec<u64>", into = "Vec<u64>")]
pub struct LatencyHistogram(#[schemars(with = "Vec<u64>")] pub [u64; BUCKETS]);

impl From<Vec<u64>> for LatencyHistogram {
    /// Counts beyond the last bucket, of another version of `parador`, belong to the last one.
    fn from(counts: Vec<u64>) -> Self {
        let mut buckets = [0_u64; BUCKETS];
        for (index, count) in counts.into_iter().enumerate() {
            let bucket = &mut buckets[index.min(BUCKETS - 1)];
            *bucket = bucket.saturating_add(count);
        }
        Self(buckets)
    }
}

impl From<LatencyHistogram> for Vec<u64> {
    fn from(LatencyHistogram(buckets): LatencyHistogram) -> Self {
        let used = buckets.iter().rposition(|count| *count != 0).map_or(0, |last| last + 1);
        buckets[..used].to_vec()
    }
}

impl LatencyHistogram {
    /// Returns for each bucket its longest time in nanoseconds (`None`: the last one has no bound),
    /// and the number of times in it and in those before.
    pub fn cumulative(&self) -> impl Iterator<Item = (Option<u64>, u64)> {
        self.0.iter().enumerate().scan(0_u64, |sum, (index, count)| {
            *sum = sum.saturating_add(*count);
            Some((bound(index), *sum))
        })
    }

    /// Returns the number of all times.
    pub fn count(&self) -> u64 {
        self.cumulative().last().map_or(0, |(_, count)| count)
    }

    /// Returns the times since an earlier histogram. One that is larger is of the time before a
    /// restart, and does not count.
    pub fn since(&self, former: &Self) -> Self {
        let mut buckets = self.0;
        for (bucket, former) in buckets.iter_mut().zip(former.0) {
            *bucket = bucket.saturating_sub(former);
        }
        Self(buckets)
    }

    /// Returns the 99th percentile in nanoseconds, rounded up to the bound of its bucket, or down
    /// to the longest bound; `None`: there are no times.
    pub fn percentile_99(&self) -> Option<u64> {
        let rank = u128::from(self.count()) * 99;
        let reached = |(_, count): &(Option<u64>, u64)| u128::from(*count) * 100 >= rank;
        let (reached, _) = self.cumulative().find(|of| of.1 != 0 && reached(of))?;
        reached.or(bound(BUCKETS - 2))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_add_up_and_saturate() {
        let histogram = LatencyHistogram::from(vec![98, 1, 1]);
        assert_eq!((histogram.count(), histogram.percentile_99()), (100, Some(8000)));
        let all: Vec<_> = histogram.cumulative().collect();
        assert_eq!(all[..3], [(Some(4000), 98), (Some(8000), 99), (Some(16_000), 100)]);
        assert_eq!(all[BUCKETS - 1], (None, 100));
        let hostile = LatencyHistogram([u64::MAX; BUCKETS]);
        assert!(hostile.cumulative().all(|(_, count)| count == u64::MAX));
        assert_eq!(hostile.percentile_99(), Some(4000));
        assert_eq!(LatencyHistogram::default().percentile_99(), None);
        let since = histogram.since(&LatencyHistogram::from(vec![90, 2]));
        assert_eq!(since, LatencyHistogram::from(vec![8, 0, 1]));
    }

    #[test]
    fn json_without_zeros_at_the_end() {
        let json = |histogram| serde_json::to_string::<LatencyHistogram>(&histogram).unwrap();
        let mut histogram = LatencyHistogram::from(vec![0, 7, 0]);
        assert_eq!(
            (json(histogram), json(LatencyHistogram::default())),
            ("[0,7]".into(), "[]".into())
        );
        let more = format!("[{}]", ["1"; BUCKETS + 2].join(","));
        histogram = serde_json::from_str(&more).unwrap();
        assert_eq!((histogram.0[0], histogram.0[BUCKETS - 1]), (1, 3));
        assert!(serde_json::from_str::<LatencyHistogram>("[-1]").is_err());
    }
}
