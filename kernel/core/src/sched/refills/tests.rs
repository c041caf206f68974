use std::vec::Vec;

use super::*;
use crate::testing::Random;

/// Number of runs of each test.
const RUNS: u64 = 2000;

/// Maximum time used in any window of one period. Windows that begin or end with a run are the
/// worst.
pub fn most(runs: &[(u64, u64)], period: u64) -> u64 {
    let used = |from: u64| -> u64 {
        let first = runs.partition_point(|run| run.1 <= from);
        let inside = runs[first..].iter().take_while(|run| run.0 < from + period);
        inside.map(|run| run.1.min(from + period) - run.0.max(from)).sum()
    };
    let ends = runs.iter().map(|run| run.1.saturating_sub(period));
    runs.iter().map(|run| run.0).chain(ends).map(used).max().unwrap_or(0)
}

#[test]
fn no_window_of_a_period_holds_more_than_the_budget() {
    for seed in 0..40 {
        let mut random = Random(seed);
        let period = 100 + random.below(400);
        let budget = 1 + random.below(period - 1);
        let refills = Refills::new(budget, 0);
        let (mut now, mut runs) = (0, Vec::<(u64, u64)>::new());
        for _ in 0..RUNS {
            let parts = 1 + random.below(16);
            now += random.below(1 + period / parts);
            let left = refills.begin(now);
            if left == 0 {
                assert!(refills.next() > now);
                now = now.max(refills.next() - random.below(2));
                continue;
            }
            let used = 1 + random.below(left);
            runs.push((now, now + used));
            now += used;
            refills.end(used, period);
            assert_eq!(refills.total(), budget, "the total is constant");
        }
        let worst = most(&runs, period);
        assert!(worst <= budget, "seed {seed}: {worst} of {budget} in {period}");
        // The budget is also a guarantee: a context that is always ready gets all of it in each
        // period.
        let (from, mut got) = (now + period, 0);
        now = from;
        while now < from + 100 * period {
            match refills.begin(now) {
                0 => now = refills.next(),
                left => {
                    got += left;
                    now += left;
                    refills.end(left, period);
                }
            }
        }
        assert!(got >= 99 * budget, "seed {seed}: {got} of {}", 100 * budget);
    }
}

#[test]
fn a_late_end_of_a_run_is_charged() {
    let refills = Refills::new(100, 0);
    assert_eq!(refills.begin(0), 100);
    refills.end(40, 400);
    assert_eq!(refills.begin(50), 60);
    // 20 too long: charged to the part due at 400, and replenished at 800.
    refills.end(80, 400);
    assert_eq!(refills.begin(399), 0);
    assert_eq!(refills.begin(400), 20);
    refills.end(20, 400);
    assert_eq!(refills.begin(450), 60);
    refills.end(60, 400);
    assert_eq!(refills.begin(799), 0);
    assert_eq!(refills.total(), 100);
}

#[test]
fn many_short_runs_are_merged() {
    let refills = Refills::new(1000, 0);
    for run in 0..100 {
        assert!(refills.begin(run * 5) > 0);
        refills.end(1, 10_000);
        assert!(refills.count.get() <= REFILLS);
    }
    assert_eq!(refills.begin(600), 900);
    // Merged parts are usable at the latest of their times.
    assert_eq!(refills.begin(10_000 + 99 * 5), 1000);
}

#[test]
fn no_change_grants_time_at_once() {
    let mut random = Random(7);
    for _ in 0..1000 {
        let refills = Refills::new(100, 0);
        assert_eq!(refills.begin(0), 100);
        refills.end(100, 400);
        let (mut budget, mut period) = (100, 400);
        for step in 0..10 {
            let new = (20 + random.below(500), 500 + random.below(500));
            refills.change((budget, new.0), (period, new.1), 100 + step);
            (budget, period) = new;
            assert_eq!(refills.total(), budget);
            assert_eq!(refills.begin(100 + step), 0);
        }
        assert!(refills.next() >= 400);
    }
    // A reduction removes unused budget; the rest stays usable.
    let refills = Refills::new(100, 0);
    refills.change((100, 30), (400, 400), 10);
    assert_eq!(refills.begin(10), 30);
}
