//! Sporadic replenishment: the remaining budget of a scheduling context with a period, and the
//! times from which its parts are usable.
//!
//! Time used in one run is replenished one period after the start of that run (B. Sprunt, L. Sha,
//! J. Lehoczky: "Aperiodic task scheduling for hard-real-time systems", 1989; runs as defined by M.
//! Stanovich et al.: "Defects of the POSIX sporadic server and how to correct them", RTAS 2010).
//!
//! # Invariants
//!
//! * The amounts sum up to the budget and are ordered by time.
//! * No part of the budget is used twice within one period, so no window of one period contains
//!   more than the budget: a run begins when its context is dispatched, ends when it leaves its
//!   CPU, and uses the parts in order.
//! * There are at most [`REFILLS`] parts. If one more were needed, the last two are merged at the
//!   later time, which delays time but never adds any.

use core::cell::Cell;

/// Maximum number of pending refills.
pub const REFILLS: usize = 8;

/// A part of the budget.
#[derive(Clone, Copy, Default, PartialEq, Eq, Debug)]
struct Refill {
    /// Time from which it is usable, in ticks.
    at: u64,
    /// Length in ticks.
    amount: u64,
}

/// Ring of the parts of a budget; by default, of none.
#[derive(Default)]
pub struct Refills {
    ring: [Cell<Refill>; REFILLS],
    first: Cell<usize>,
    count: Cell<usize>,
}

impl Refills {
    /// The whole budget, usable from `at`.
    pub fn new(budget: u64, at: u64) -> Self {
        let refills = Self::default();
        refills.append(budget, at);
        refills
    }

    fn slot(&self, index: usize) -> &Cell<Refill> {
        &self.ring[(self.first.get() + index) % REFILLS]
    }

    fn pop(&self) {
        self.first.set((self.first.get() + 1) % REFILLS);
        self.count.set(self.count.get() - 1);
    }

    /// Appends a part usable from `at`, but not before the existing parts.
    fn append(&self, amount: u64, at: u64) {
        let count = self.count.get();
        if amount == 0 {
            return;
        }
        let last = count.checked_sub(1).map(|last| self.slot(last));
        let at = last.map_or(at, |last| at.max(last.get().at));
        match last {
            Some(last) if count == REFILLS || last.get().at == at => {
                last.set(Refill { at, amount: last.get().amount + amount });
            }
            _ => {
                self.slot(count).set(Refill { at, amount });
                self.count.set(count + 1);
            }
        }
    }

    /// Time from which the first part is usable.
    pub fn next(&self) -> u64 {
        self.slot(0).get().at
    }

    /// Begins a run: merges all due parts into one that is used from `now`. Returns its length in
    /// ticks, 0 if none is due.
    pub fn begin(&self, now: u64) -> u64 {
        let mut head = self.slot(0).get();
        if head.at > now {
            return 0;
        }
        while self.count.get() > 1 && self.slot(1).get().at <= now {
            let amount = head.amount;
            self.pop();
            head = self.slot(0).get();
            head.amount += amount;
        }
        head.at = now;
        self.slot(0).set(head);
        head.amount
    }

    /// Ends a run of `used` ticks, which are replenished one period after the start of the run. A
    /// run longer than its part, because its end was detected late, uses the next parts as well.
    pub fn end(&self, mut used: u64, period: u64) {
        for _ in 0..self.count.get() {
            let head = self.slot(0).get();
            let part = used.min(head.amount);
            if part == 0 {
                return;
            }
            if part == head.amount {
                self.pop();
            } else {
                self.slot(0).set(Refill { amount: head.amount - part, ..head });
            }
            self.append(part, head.at.saturating_add(period));
            used -= part;
        }
    }

    /// Changes budget and period. Used time is replenished no earlier than before, and additional
    /// budget after one period: no change grants time immediately.
    pub fn change(&self, (old, budget): (u64, u64), (before, period): (u64, u64), now: u64) {
        for index in 0..self.count.get() {
            let Refill { at, amount } = self.slot(index).get();
            if at > now {
                let at = at.saturating_add(period.saturating_sub(before));
                self.slot(index).set(Refill { at, amount });
            }
        }
        self.append(budget.saturating_sub(old), now.saturating_add(period));
        let mut less = old.saturating_sub(budget);
        while less != 0 && self.count.get() != 0 {
            let last = self.slot(self.count.get() - 1);
            let Refill { at, amount } = last.get();
            let part = less.min(amount);
            last.set(Refill { at, amount: amount - part });
            if part == amount {
                self.count.set(self.count.get() - 1);
            }
            less -= part;
        }
    }

    /// Sum of all parts.
    pub fn total(&self) -> u64 {
        (0..self.count.get()).map(|index| self.slot(index).get().amount).sum()
    }
}

#[cfg(test)]
pub(crate) mod tests;
