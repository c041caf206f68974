//! Filling: the translations of the guest become entries of shadow tables.

use core::cell::Cell;
use core::sync::atomic::Ordering::Relaxed;

use super::defects::{self, breaks};
use super::tables::{Ref, Table};
use super::{Flush, FrameAccess, NeedsFrames, SHARED, ShadowFormat, UPPER_HALF, Vtlb, index};

/// Number of paths that are kept.
pub const PATHS: usize = 32;
/// Number of entries that are filled together: Linux maps as many pages of a file at a fault.
const GROUP: usize = 16;
/// Number of fills since a load that are not yet many.
pub const FEW: u64 = 16;

/// Guest table, or guest entry of a split page, by its guest-physical address, and the
/// host-physical address of the page. An entry's is not aligned to a page, nor is a root's of
/// three levels.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct GuestSource {
    /// Guest-physical address.
    pub guest: u64,
    /// Host-physical address.
    pub host: u64,
}

/// An entry that a walk of the guest's tables has read.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Step {
    /// Guest-physical address of it.
    pub at: u64,
    /// Its value; that of a [`Fill`] has the accessed and dirty bits that the walk has set.
    pub value: u64,
}

/// A translation to fill.
#[derive(Clone, Copy, Debug)]
pub struct Fill<'a> {
    /// Linear address.
    pub address: u64,
    /// Guest entries from the root to the leaf; empty without paging.
    pub steps: &'a [Step],
    /// Value of the guest's leaf.
    pub value: u64,
    /// Shadow leaf.
    pub leaf: u64,
    /// Its level, at most that of the guest's leaf.
    pub level: u32,
    /// Guest-physical page number of the address.
    pub page: u64,
    /// The guest's leaf is global.
    pub is_global: bool,
    /// The access is a write.
    pub is_write: bool,
}

impl Fill<'_> {
    /// Guest entry that an entry at a level is filled from: below a large page its leaf.
    fn step(&self, top: u32, level: u32) -> Step {
        let depth = (top - level) as usize;
        self.steps.get(depth).or(self.steps.last()).copied().unwrap_or_default()
    }

    /// Guest-physical address of the table, or of the split page's entry, that a table at a level
    /// below the root is filled from, and whether it is part of a split page.
    fn source(&self, top: u32, level: u32) -> (u64, bool) {
        match self.steps.get((top - level) as usize) {
            Some(step) => (step.at & !0xfff, false),
            None => (self.steps.last().map_or(0, |leaf| leaf.at), true),
        }
    }
}

/// Path to a guest table of the lowest level of four: what a processor keeps in its
/// paging-structure caches, but compared with the guest's tables before each use.
pub struct Path {
    /// Number of the range that the table translates.
    range: Cell<u64>,
    /// [`Vtlb::epoch`] at the last walk by it.
    epoch: Cell<u64>,
    /// Shadow table that was filled from it; none before the first fill.
    pub(super) table: Cell<Option<Ref>>,
    source: Cell<GuestSource>,
    /// The guest's entries above it: host-physical address, and value.
    entries: [(Cell<u64>, Cell<u64>); 3],
    /// Bits that all of them have, those of [`ShadowFormat::FORBIDS`] inverted.
    rights: Cell<u64>,
}

/// A table of the lowest level, and the entries of the guest above it.
pub struct Known {
    /// The table. Without one the guest's entry is absent.
    pub table: Option<Ref>,
    /// The guest's entry for the address.
    pub entry: Step,
    /// Bits that all guest entries above have, those of [`ShadowFormat::FORBIDS`] inverted.
    pub rights: u64,
}

impl<F: ShadowFormat, M: FrameAccess> Vtlb<F, M> {
    /// Place for the path to the table for an address, and the number of its range.
    #[inline(always)]
    fn path_of(&self, address: u64) -> (&Path, u64) {
        let range = address >> 21;
        (&self.paths[(range ^ self.epoch.get() << 3) as usize % PATHS], range)
    }

    /// Path to the table for an address, if the current space has it.
    #[inline(always)]
    pub(super) fn path(&self, address: u64) -> Option<&Path> {
        let (path, range) = self.path_of(address);
        (path.range.get() == range && path.epoch.get() == self.epoch.get()).then_some(path)
    }

    /// Guest entry for an address, and the table to fill its translation in, if the current space
    /// has it and the guest's entries above are the same as at the last walk.
    #[inline(always)]
    pub fn known(&self, address: u64) -> Option<Known> {
        let path = self.path(address)?;
        let is_same = |(at, value): &(Cell<u64>, Cell<u64>)| {
            self.memory.word(at.get()).load(Relaxed) == value.get()
        };
        let [top, upper, middle] = &path.entries;
        let is_path = is_same(top) && is_same(upper) && is_same(middle);
        if !is_path && !breaks("path-entries") {
            return None;
        }
        let (source, offset) = (path.source.get(), 8 * index(address, 0) as u64);
        let value = self.memory.word(source.host + offset).load(Relaxed);
        let table = path.table.get();
        if table.is_none() && F::is_present(value) {
            return None;
        }
        let entry = Step { at: source.guest + offset, value };
        Some(Known { table, entry, rights: path.rights.get() })
    }

    /// Notes the path of a walk that has read the entries `steps`, and the shadow table of the
    /// lowest level if there is one. A walk without one must have ended at an absent entry.
    pub fn note_path(&self, address: u64, steps: &[Step], table: Option<Ref>) {
        let [above @ .., last] = steps else { return };
        let (path, range) = self.path_of(address);
        if above.len() != path.entries.len() {
            return;
        }
        path.range.set(range);
        path.epoch.set(self.epoch.get());
        path.table.set(table);
        let guest = last.at & !0xfff;
        path.source.set(GuestSource { guest, host: self.memory.guest_page(guest) });
        path.rights.set(above.iter().fold(!0, |bits, step| bits & (step.value ^ F::FORBIDS)));
        for ((at, value), step) in path.entries.iter().zip(above) {
            at.set(self.memory.guest_page(step.at) | step.at & 0xfff);
            value.set(step.value);
        }
    }

    /// Highest level at which a leaf for guest page number `page` may be, at most `level`: pages
    /// whose writes are traced have leaves of their own.
    pub fn leaf_level(&self, page: u64, level: u32) -> u32 {
        let is_small = self.trace.may_contain(page, level) && !breaks("trace-small-leaves");
        if level > 0 && is_small { 0 } else { level }
    }

    /// Fills a translation in the current space, which must have been loaded.
    ///
    /// # Errors
    /// The pool must grow first.
    pub fn fill(&self, fill: &Fill<'_>) -> Result<(), NeedsFrames> {
        let top = self.top.get();
        let mut table = self.space().root.get().ok_or(NeedsFrames)?;
        let fills = self.count_fill();
        for level in (fill.level + 1..=top).rev() {
            self.table(table).used.set(fills);
            table = match self.matching(table, level, fill) {
                Some(child) => child,
                None => self.descend(table, level, fill)?,
            };
        }
        // A split page was compared by the entry above.
        let is_split = self.table(table).is_split.get();
        let copy = if is_split { fill.page << 12 } else { fill.value & F::MEANING };
        self.set_leaf(table, fill, copy);
        if fill.level == 0 {
            self.note_path(fill.address, fill.steps, Some(table));
        }
        Ok(())
    }

    /// Allocates the table below the entry for an address, which is missing, or replaces it,
    /// because the guest's entry has changed.
    #[inline(never)]
    fn descend(&self, table: Ref, level: u32, fill: &Fill<'_>) -> Result<Ref, NeedsFrames> {
        let slot = index(fill.address, level);
        let value = fill.step(self.top.get(), level).value;
        let (guest, is_split) = fill.source(self.top.get(), level - 1);
        let source = GuestSource { guest, host: self.memory.guest_page(guest) };
        let is_shared = self.options.get().global
            && slot >= UPPER_HALF
            && level == F::ROOT_LEVEL
            && self.shared.get() != Some(table);
        self.remove(table, slot, fill.address);
        let child = if is_shared {
            let shared = self.shared_root()?;
            match self.matching(shared, level, fill) {
                Some(child) => child,
                None => self.descend(shared, level, fill)?,
            }
        } else {
            let owner = self.table(table).owner.get();
            let child = self.take_table(owner, level - 1, source)?;
            let of = self.table(child);
            of.is_split.set(is_split);
            of.parent.set(Some(table));
            of.slot.set(slot as u16);
            self.trace_table(child);
            child
        };
        let physical = self.table(child).shadow.get();
        let is_pointer = level == self.top.get() && level < F::ROOT_LEVEL;
        let entry = if is_pointer { F::pointer(physical) } else { F::table(physical) };
        self.set_link(table, slot, entry, value & F::MEANING | Self::link_of(child));
        Ok(child)
    }

    /// The root of shared tables.
    fn shared_root(&self) -> Result<Ref, NeedsFrames> {
        if let Some(shared) = self.shared.get() {
            return Ok(shared);
        }
        let shared = self.take_table(SHARED, self.top.get(), GuestSource::default())?;
        self.shared.set(Some(shared));
        Ok(shared)
    }

    /// Table below an entry, if it was filled from the same entry and the same table of the guest.
    #[inline(always)]
    fn matching(&self, table: Ref, level: u32, fill: &Fill<'_>) -> Option<Ref> {
        let top = self.top.get();
        let (slot, value) = (index(fill.address, level), fill.step(top, level).value);
        let (source, _) = fill.source(top, level - 1);
        let word = &self.memory.words(self.table(table).copies.get())[slot];
        let copy = word.load(Relaxed);
        let child = Self::child_in(copy)?;
        let is_same = (copy ^ value) & F::MEANING & !F::MARKS == 0 || breaks("match-entry");
        // A split page may have become dirty: a flush must find that the guest cleared the bit.
        word.store(copy | value & F::MARKS, Relaxed);
        // Where it is in the host follows.
        (is_same && self.table(child).source.get().guest == source).then_some(child)
    }

    /// Fills a translation in its table, which is known.
    #[inline(always)]
    pub fn fill_known(&self, table: Ref, fill: &Fill<'_>) {
        self.count_fill();
        self.set_leaf(table, fill, fill.value & F::MEANING);
    }

    /// Returns whether there were many fills since the last load: more will follow. A process that
    /// ends soon has few, and would not use translations that are filled ahead.
    #[inline(always)]
    pub fn has_many_fills(&self) -> bool {
        self.fills.get() > self.few.get()
    }

    /// Fills translations ahead, as a processor may: those of neighbours of the address `at`, which
    /// was filled, if the guest's entries differ from its own only in their addresses. `leaf`: leaf
    /// of a guest page, made from that of `at`, if there may be one. It must not be writable.
    #[inline(always)]
    pub fn fill_ahead(&self, at: u64, leaf: impl Fn(u64, u64) -> Option<u64>) {
        let Some(path) = self.path(at) else { return };
        let Some(table) = path.table.get() else { return };
        let of = self.table(table);
        let words = |physical: &Cell<u64>| self.memory.words(physical.get());
        let (shadow, copies) = (words(&of.shadow), words(&of.copies));
        let guest = self.memory.words(path.source.get().host);
        let own = index(at, 0);
        let (value, like) = (copies[own].load(Relaxed), shadow[own].load(Relaxed));
        let (first, rights) = (own & !(GROUP - 1), F::MEANING & !F::address(!0));
        let mut added = 0;
        for slot in first..first + GROUP {
            defects::step();
            let entry = guest[slot].load(Relaxed);
            if ((entry ^ value) & rights == 0 || breaks("ahead-rights"))
                && !F::is_present(shadow[slot].load(Relaxed))
                && let Some(leaf) = leaf(F::address(entry), like)
            {
                copies[slot].store(entry & F::MEANING, Relaxed);
                shadow[slot].store(leaf & !F::MARKS, Relaxed);
                added |= 1 << (slot % 64);
            }
        }
        for mask in [&of.filled, &of.ahead] {
            mask[first / 64].set(mask[first / 64].get() | added);
        }
    }

    fn count_fill(&self) -> u64 {
        let fills = &self.fills;
        fills.set(fills.get() + 1);
        fills.get()
    }

    /// Writes the leaf of a fill in its table, and its copy.
    #[inline(always)]
    fn set_leaf(&self, table: Ref, fill: &Fill<'_>, copy: u64) {
        let slot = index(fill.address, fill.level);
        let of = self.table(table);
        of.used.set(self.fills.get());
        let old = self.memory.words(of.shadow.get())[slot].load(Relaxed);
        if F::is_present(old) {
            self.replace_leaf((table, slot), (old, fill.leaf), fill.address);
        }
        let mut leaf = fill.leaf;
        if leaf & F::WRITE != 0 && self.options.get().trace {
            let here = (table, of.shadow.get() + 8 * slot as u64, fill.address & !0xfff);
            leaf = self.traced_leaf(here, (fill.page, fill.level), fill.is_write, leaf);
            self.leaf_added(of, leaf, copy);
        }
        self.write(of, slot, leaf, copy);
        if of.owner.get() == SHARED && !fill.is_global {
            of.is_local.set(true);
            self.has_local.set(true);
        }
    }

    /// Removes what the entry for a fill holds.
    #[inline(never)]
    fn replace_leaf(&self, (table, slot): (Ref, usize), (old, new): (u64, u64), address: u64) {
        let of = self.table(table);
        let copy = self.memory.words(of.copies.get())[slot].load(Relaxed);
        // The processor has forgotten the translation that faulted: if the fill only adds rights,
        // nothing stale remains.
        if Self::child_in(copy).is_some() || old & !new & !F::DIRTY != 0 {
            self.remove(table, slot, address);
        } else {
            self.leaf_removed(of, slot, old, copy);
        }
    }

    #[inline(always)]
    fn write(&self, of: &Table, slot: usize, entry: u64, copy: u64) {
        self.memory.words(of.copies.get())[slot].store(copy, Relaxed);
        self.memory.words(of.shadow.get())[slot].store(entry, Relaxed);
        let word = &of.filled[slot / 64];
        word.set(word.get() | 1 << (slot % 64));
        of.words.set(of.words.get() | 1 << (slot / 64));
    }

    /// Sets an entry that refers to a table.
    pub(super) fn set_link(&self, table: Ref, slot: usize, entry: u64, copy: u64) {
        self.write(self.table(table), slot, entry, copy);
        if self.shared.get() == Some(table) {
            self.shared_changes.set(self.shared_changes.get() + 1);
        }
    }

    /// Clears an entry in use, with all below it. `address`: an address that it translates.
    #[cfg_attr(feature = "testing", track_caller)]
    pub(super) fn remove(&self, table: Ref, slot: usize, address: u64) {
        let of = self.table(table);
        let entry = self.memory.words(of.shadow.get())[slot].load(Relaxed);
        if !F::is_present(entry) {
            return;
        }
        let copy = self.memory.words(of.copies.get())[slot].load(Relaxed);
        let flush = match of.level.get() {
            0 => Flush::Page { address, everywhere: false },
            _ => Flush::Space,
        };
        self.request_for(of.owner.get(), flush);
        match Self::child_in(copy) {
            None => self.remove_leaf(of, slot),
            Some(child) => {
                if self.table(child).parent.get() == Some(table) {
                    self.put_removed(child);
                }
                self.unlink(table, slot);
            }
        }
    }

    /// Clears a leaf; the caller flushes the TLB.
    #[inline(always)]
    pub(super) fn remove_leaf(&self, of: &Table, slot: usize) {
        let leaf = self.memory.words(of.shadow.get())[slot].load(Relaxed);
        let copy = self.memory.words(of.copies.get())[slot].load(Relaxed);
        self.leaf_removed(of, slot, leaf, copy);
        self.clear_entry(of, slot);
    }

    /// Clears an entry that refers to a table; of the shared root also in the root of every space.
    pub(super) fn unlink(&self, table: Ref, slot: usize) {
        self.note_change();
        self.clear_entry(self.table(table), slot);
        if self.shared.get() == Some(table) {
            self.shared_changes.set(self.shared_changes.get() + 1);
            let roots = self.spaces.iter().filter_map(|space| space.root.get());
            roots.for_each(|root| self.clear_entry(self.table(root), slot));
        }
    }

    #[inline(always)]
    fn clear_entry(&self, of: &Table, slot: usize) {
        defects::step();
        self.memory.words(of.shadow.get())[slot].store(0, Relaxed);
        self.memory.words(of.copies.get())[slot].store(0, Relaxed);
        let word = &of.filled[slot / 64];
        word.set(word.get() & !(1 << (slot % 64)));
    }
}
