//! Defects and steps of this thread.

use core::cell::{Cell, RefCell};
use core::panic::Location;
use std::collections::BTreeSet;
use std::vec::Vec;

use crate::vtlb::Flush;

/// Place where the code asks for a flush of the TLB: file, line, and kind of flush. Line 0: all
/// places of the kind.
pub type Place = (&'static str, u32, &'static str);

std::thread_local! {
    static RULE: Cell<Option<&'static str>> = const { Cell::new(None) };
    static SKIPPED: Cell<Option<Place>> = const { Cell::new(None) };
    static PLACES: RefCell<BTreeSet<Place>> = const { RefCell::new(BTreeSet::new()) };
    static STEPS: Cell<u64> = const { Cell::new(0) };
}

/// Returns the name of a kind of flush.
pub fn name(flush: Flush) -> &'static str {
    match flush {
        Flush::None => "none",
        Flush::Page { everywhere: false, .. } => "page",
        Flush::Page { .. } => "page everywhere",
        Flush::Space => "space",
        Flush::All => "all",
    }
}

/// Returns whether the code is to break the rule with this name.
pub fn breaks(rule: &str) -> bool {
    RULE.get() == Some(rule)
}

/// Chooses the rule that the code breaks in this thread.
pub fn choose_rule(rule: Option<&'static str>) {
    RULE.set(rule);
}

/// Notes a place that asks for a flush, and returns whether the flush is to be left out.
pub fn skips(at: &'static Location<'static>, kind: &'static str) -> bool {
    let place = (at.file(), at.line(), kind);
    match SKIPPED.get() {
        Some((file, line, kind)) => {
            kind == place.2 && (line == 0 || (file, line) == (at.file(), at.line()))
        }
        None => {
            PLACES.with_borrow_mut(|places| places.insert(place));
            false
        }
    }
}

/// Chooses the place whose flushes the code leaves out in this thread.
pub fn choose_place(place: Option<Place>) {
    SKIPPED.set(place);
}

/// Returns the places that have asked for flushes in this thread.
pub fn places() -> Vec<Place> {
    PLACES.with_borrow(|places| places.iter().copied().collect())
}

/// Counts a step: an entry or table that is looked at.
pub fn step() {
    STEPS.set(STEPS.get() + 1);
}

/// Returns the number of steps so far.
pub fn steps() -> u64 {
    STEPS.get()
}
