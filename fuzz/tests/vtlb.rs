//! The model of the vTLB with pseudo-random operations, and with defects that it must notice.
//!
//! `PARADOR_STRESS_SECONDS` (`cargo xtask test --long`) above 10, or a build without debug
//! assertions, selects 10 million operations, which take a minute or two.

use kernel_x86::shadow::testing::{Place, choose_place, choose_rule, places};
use parador_fuzz::vtlb::{Figures, STEPS, run_random};
use std::collections::BTreeSet;
use std::panic::catch_unwind;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::thread;

/// Operations of a run.
const OPERATIONS: u32 = 2000;
/// Runs of a short test and of a long one.
const RUNS: u64 = 400;
const LONG_RUNS: u64 = 5000;
/// Runs in which a defect must be noticed.
const SEARCHED: u64 = 3000;

/// Rules of `kernel_core::vtlb` and `kernel_x86::shadow`, by the names that their code has. Broken,
/// each must be noticed.
const RULES: [&str; 35] = [
    // A path to a table of the lowest level is used while the entries above are the same; a table
    // is used again if it was filled from the guest's entry above it.
    "path-entries",
    "match-entry",
    // A translation that is filled ahead has the rights of the one beside it in the guest's tables.
    "ahead-rights",
    // A comparison with the guest's tables includes rights, and bits that the guest has cleared; it
    // ends with its budget.
    "compare-rights",
    "compare-marks",
    "compare-budget",
    // A look at a traced table, or at all of a space, finds whether it was written.
    "trace-writes",
    "trace-space",
    // Pages of traced tables have small leaves; a second alias ends the trace, as does a root that
    // becomes another page; a leaf that is removed leaves its dirty bit; a table with unknown
    // aliases is not traced.
    "trace-small-leaves",
    "trace-second-alias",
    "trace-forgets-root",
    "trace-keeps-dirty",
    "trace-unknown-leaves",
    // INVLPG removes small leaves, all leaves of a split page, whichever of them were filled, and
    // those of shared tables.
    "invalidate-small",
    "invalidate-split",
    "invalidate-split-unfilled",
    "invalidate-shared",
    // A load of CR3 drops shared tables with leaves that are not global.
    "drop-local",
    // Everything is dropped.
    "drop-spaces",
    // Containment: rights of the nested tables, now and after an unmapping.
    "contain-writes",
    "contain-fetches",
    "unmap-drops",
    // A leaf is writable only when the guest's entry is dirty.
    "dirty-before-write",
    // Rights of the guest's tables, with and without CR0.WP and SMEP.
    "user-right",
    "execute-right",
    "supervisor-override",
    "supervisor-override-execute",
    // Changes of control registers drop everything, or load a space.
    "drop-at-cr0",
    "drop-at-cr4",
    "drop-at-efer",
    "drop-at-same-value",
    "load-at-cr3",
    // Shared leaves leave the TLB in every space. ASIDs, when they are exhausted.
    "invalidate-everywhere",
    "flush-at-epoch",
    "compare-epoch",
];

/// Places whose flushes are left out one at a time in long runs: end of the file, kind of flush.
/// Others are not noticed alone: `clear` and links to shared tables (`sync.rs`, `space`), because
/// other places ask, too; leaves that a fill replaces (`fill.rs`), because the page fault before it
/// has dropped the translation; evictions of shared tables (`tables.rs`, `all`) and aliases in
/// other spaces (`trace.rs`, `tag`), which are rare.
const PLACES: [(&str, &str); 11] = [
    ("vtlb.rs", "all"),
    ("vtlb.rs", "page"),
    ("vtlb.rs", "page everywhere"),
    ("vtlb.rs", "space"),
    ("sync.rs", "page"),
    ("tables.rs", "space"),
    ("tables.rs", "tag"),
    ("trace.rs", "all"),
    ("trace.rs", "page"),
    ("trace.rs", "page everywhere"),
    ("trace.rs", "space"),
];

/// Returns whether the run is a long one.
fn is_long() -> bool {
    let seconds = std::env::var("PARADOR_STRESS_SECONDS").ok().and_then(|text| text.parse().ok());
    !cfg!(debug_assertions) || seconds.is_some_and(|seconds: u32| seconds > 10)
}

/// Runs `first`, `first + 2`, ... below `end`: the largest figures, or the error of the first that
/// fails.
fn runs(first: u64, end: u64) -> Result<Figures, String> {
    let mut most = Figures::default();
    for start in (first..end).step_by(2) {
        let Figures { steps, asids } = run_random(start, OPERATIONS)?;
        most = Figures { steps: most.steps.max(steps), asids: most.asids.max(asids) };
    }
    Ok(most)
}

#[test]
fn accesses_end_as_the_guest_s_tables_and_memory_say() {
    let end = if is_long() { LONG_RUNS } else { RUNS };
    let other = thread::spawn(move || runs(1, end));
    for most in [runs(0, end).unwrap(), other.join().unwrap().unwrap()] {
        assert!(most.asids > 15, "no run exhausts the ASIDs");
        assert!(most.steps > STEPS / 2, "no run comes near the limit of steps: {most:?}");
    }
}

/// Returns whether the model notices the defect that `choose` chooses for a thread.
fn is_noticed(choose: impl Fn() + Sync) -> bool {
    let is_found = AtomicBool::new(false);
    let search = |first: u64| {
        choose();
        for start in (first..SEARCHED).step_by(2) {
            let run = || run_random(start, OPERATIONS);
            if is_found.load(Relaxed) || !matches!(catch_unwind(run), Ok(Ok(_))) {
                is_found.store(true, Relaxed);
                break;
            }
        }
    };
    thread::scope(|scope| {
        scope.spawn(|| search(0));
        scope.spawn(|| search(1));
    });
    is_found.into_inner()
}

#[test]
fn the_model_notices_each_broken_rule() {
    let mut rules = RULES.to_vec();
    rules.retain(|&rule| !is_noticed(|| choose_rule(Some(rule))));
    assert!(rules.is_empty(), "{rules:?} are not noticed");
}

#[test]
fn the_model_notices_each_missing_flush() {
    let other = thread::spawn(|| runs(1, RUNS).map(|_| places()));
    runs(0, RUNS).unwrap();
    let mut found: BTreeSet<Place> = places().into_iter().collect();
    found.extend(other.join().unwrap().unwrap());
    let kinds: BTreeSet<&str> = found.iter().map(|place| place.2).collect();
    assert_eq!(kinds.len(), 5, "{kinds:?}");
    let mut skipped: Vec<Place> = kinds.into_iter().map(|kind| ("", 0, kind)).collect();
    if is_long() {
        let is_listed = |place: &Place| {
            PLACES.iter().any(|(file, kind)| place.0.ends_with(file) && place.2 == *kind)
        };
        skipped.extend(found.into_iter().filter(is_listed));
    }
    skipped.retain(|&place| !is_noticed(|| choose_place(Some(place))));
    assert!(skipped.is_empty(), "{skipped:?} are not noticed");
}
