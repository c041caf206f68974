//! Flushes: of a space as a whole, or of what differs from the guest's tables.

use core::sync::atomic::Ordering::Relaxed;

use super::defects::{self, breaks};
use super::tables::Ref;
use super::{ENTRIES, Flush, FrameAccess, ShadowFormat, Vtlb};

/// Returns whether the guest's entry `now` has the translation of its copy: it may have become
/// accessed or dirty, but not lost these marks.
fn is_same<F: ShadowFormat>(now: u64, copy: u64) -> bool {
    let ignored = if breaks("compare-rights") { F::WRITE } else { 0 };
    let marks = if breaks("compare-marks") { 0 } else { copy };
    (now ^ copy) & F::MEANING & (marks | !F::MARKS) & !ignored == 0
}

impl<F: ShadowFormat> Vtlb<F> {
    /// Removes all entries of a root. Shared tables stay.
    pub(super) fn clear(&self, frames: &impl FrameAccess, root: Ref) {
        for slot in self.table(root).slots() {
            self.remove(frames, root, slot, 0);
        }
        self.request(Flush::Space);
    }

    /// Makes the shared tables part of the current space that the guest's root refers to.
    pub(super) fn link_shared(&self, frames: &impl FrameAccess) {
        let (Some(shared), Some(root)) = (self.shared.get(), self.space().root.get()) else {
            return;
        };
        let (from, to) = (self.table(shared), self.table(root));
        if to.is_split.get() || !self.options.get().global {
            return;
        }
        // Four-level roots are aligned.
        let guest = frames.words(to.source.get().host & !0xfff);
        for slot in from.slots() {
            let copy = frames.words(from.copies.get())[slot].load(Relaxed);
            let is_linked = frames.words(to.copies.get())[slot].load(Relaxed) != 0;
            if !is_linked && is_same::<F>(guest[slot].load(Relaxed), copy) {
                let entry = frames.words(from.shadow.get())[slot].load(Relaxed);
                self.set_link(frames, root, slot, entry, copy);
            }
        }
    }

    /// Removes the entries of a table that differ from the guest's tables, with all below them.
    /// `base`: first address that it translates. `budget`: number of entries after which
    /// tables are removed without a comparison; returns what is left of it.
    pub(super) fn sync(
        &self,
        frames: &impl FrameAccess,
        table: Ref,
        base: u64,
        mut budget: u32,
    ) -> u32 {
        let of = self.table(table);
        let level = u32::from(of.level.get());
        if of.is_split.get() {
            // Compared by the entry above.
            return budget;
        }
        let is_clean = self.is_clean(frames, table);
        if is_clean && level == 0 {
            return budget;
        }
        self.counters.syncs.set(self.counters.syncs.get() + 1);
        let source = of.source.get().host;
        let (guest, first) = (frames.words(source & !0xfff), source as usize / 8);
        let copies = frames.words(of.copies.get());
        for slot in of.slots() {
            defects::step();
            budget = if breaks("compare-budget") { budget } else { budget.saturating_sub(1) };
            let copy = copies[slot].load(Relaxed);
            let now = guest[(first + slot) % ENTRIES].load(Relaxed);
            let is_kept = is_clean || is_same::<F>(now, copy);
            if is_kept && level == 0 {
                continue;
            }
            let address = base + ((slot as u64) << (12 + 9 * level));
            match Self::child_in(copy) {
                Some(child) if is_kept && self.table(child).parent.get() != Some(table) => {}
                Some(child) if is_kept && budget > 0 => {
                    budget = self.sync(frames, child, address, budget);
                }
                None if is_kept => {}
                _ => self.remove(frames, table, slot, address),
            }
        }
        budget
    }
}
