//! Flushes: of a space as a whole, or of what differs from the guest's tables.

use core::sync::atomic::{AtomicU64, Ordering::Relaxed};

use super::defects::{self, breaks};
use super::tables::{Ref, Table, bits, bits_of};
use super::trace::WATCHED;
use super::{Flush, FrameAccess, SYNC_BUDGET, ShadowFormat, Vtlb};

/// Entries whose bits are one word of a mask.
type Part = [AtomicU64; 64];

/// Returns whether the guest's entry `now` has the translation of its copy: it may have become
/// accessed or dirty, but not lost these marks.
fn is_same<F: ShadowFormat>(now: u64, copy: u64) -> bool {
    let ignored = if breaks("compare-rights") { F::WRITE } else { 0 };
    let marks = if breaks("compare-marks") { 0 } else { copy };
    (now ^ copy) & F::MEANING & (marks | !F::MARKS) & !ignored == 0
}

/// The rest of a mask of entries, `left`, from the first on that differs from the guest's, and the
/// number of those before it.
#[inline(never)]
fn differing<F: ShadowFormat>(left: u64, copies: &Part, guest: &Part, first: usize) -> (u64, u32) {
    let (mut left, mut same) = (left, 0);
    while left != 0 {
        defects::step();
        let bit = left.trailing_zeros() as usize;
        let now = guest[(first + bit) % 64].load(Relaxed);
        if !is_same::<F>(now, copies[bit].load(Relaxed)) {
            break;
        }
        left &= left - 1;
        same += 1;
    }
    (left, same)
}

impl<F: ShadowFormat, M: FrameAccess> Vtlb<F, M> {
    /// Removes all entries of a root. Shared tables stay.
    pub(super) fn clear(&self, root: Ref) {
        for slot in self.table(root).slots() {
            self.remove(root, slot, 0);
        }
        self.space().linked.set(0);
        self.request(Flush::Space);
    }

    /// Makes the shared tables part of the current space that the guest's root refers to.
    pub(super) fn link_shared(&self) {
        let (Some(shared), Some(root)) = (self.shared.get(), self.space().root.get()) else {
            return;
        };
        let (from, to) = (self.table(shared), self.table(root));
        if to.is_split.get() || !self.options.get().global {
            return;
        }
        // Four-level roots are aligned.
        let guest = self.memory.words(to.source.get().host & !0xfff);
        for slot in from.slots() {
            let copy = self.memory.words(from.copies.get())[slot].load(Relaxed);
            let is_linked = self.memory.words(to.copies.get())[slot].load(Relaxed) != 0;
            if !is_linked && is_same::<F>(guest[slot].load(Relaxed), copy) {
                let entry = self.memory.words(from.shadow.get())[slot].load(Relaxed);
                self.set_link(root, slot, entry, copy);
            }
        }
    }

    /// Removes the entries of the current space that differ from the guest's tables, with all below
    /// them. Tables that were written and that it has not begun after [`SYNC_BUDGET`] entries are
    /// removed without a comparison, except for the root.
    pub(super) fn sync(&self, root: Ref) {
        let space = self.space();
        let (mut budget, mut watches) = (SYNC_BUDGET, 0);
        for table in space.tables() {
            let of = self.table(table);
            // Those below a removed entry are no members any more; a split one was compared by the
            // entry above.
            if !space.has(table) || of.is_split.get() {
                continue;
            }
            if self.is_clean(table) {
                watches += usize::from(self.watch(space, watches, of));
                continue;
            }
            watches = WATCHED + 1;
            if table == root {
                space.linked.set(0);
            }
            if budget == 0 && table != root {
                self.detach(table);
                continue;
            }
            let compared = self.sync_table(table);
            budget =
                if breaks("compare-budget") { budget } else { budget.saturating_sub(compared) };
        }
        if watches <= WATCHED {
            space.watches.set(watches as u8);
            space.watched_at.set(self.trace.changes());
        }
    }

    /// Removes the entries of a table that differ from the guest's, with all below them, and
    /// returns the number of entries that it has compared.
    fn sync_table(&self, table: Ref) -> u32 {
        self.syncs.set(self.syncs.get() + 1);
        let of = self.table(table);
        let source = of.source.get().host;
        let (guest, first) = (self.memory.words(source & !0xfff), source as usize / 8);
        let copies = self.memory.words(of.copies.get());
        let (mut compared, mut removed, mut last) = (0, 0, 0);
        let (guest, _) = guest.as_chunks::<64>();
        let (copies, _) = copies.as_chunks::<64>();
        for number in bits(of.words.get().into()) {
            if self.remove_unused(of, number) {
                // There may be several: the space is flushed as a whole.
                removed += 2;
            }
            let part = &guest[(first / 64 + number) % guest.len()];
            let mut left = of.filled[number].get();
            loop {
                let (rest, same) = differing::<F>(left, &copies[number], part, first % 64);
                compared += same;
                if rest == 0 {
                    break;
                }
                (compared, left) = (compared + 1, rest & (rest - 1));
                let slot = 64 * number + rest.trailing_zeros() as usize;
                if of.level.get() > 0 {
                    self.remove(table, slot, 0);
                } else {
                    (removed, last) = (removed + 1, slot);
                    self.remove_leaf(of, slot);
                }
            }
        }
        match removed {
            0 => {}
            1 => {
                let address = self.base(of) + ((last as u64) << 12);
                self.request_for(of.owner.get(), Flush::Page { address, everywhere: false });
            }
            _ => self.request_for(of.owner.get(), Flush::Space),
        }
        compared
    }

    /// Removes the leaves of a word of a table's entries that were filled ahead and not used;
    /// returns whether there may have been some.
    fn remove_unused(&self, of: &Table, number: usize) -> bool {
        for slot in bits_of(&of.ahead, number) {
            let leaf = self.memory.words(of.shadow.get())[slot].load(Relaxed);
            if F::is_present(leaf) && leaf & F::MARKS == 0 {
                self.remove_leaf(of, slot);
            }
        }
        of.ahead[number].take() != 0
    }

    /// First address that a table translates, without its sign.
    fn base(&self, of: &Table) -> u64 {
        let Some(parent) = of.parent.get() else { return 0 };
        let own = u64::from(of.slot.get()) << (21 + 9 * of.level.get());
        self.base(self.table(parent)) + own
    }
}
