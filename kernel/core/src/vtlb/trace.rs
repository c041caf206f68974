//! Tracing: which of the guest's page tables were written since the last look.
//!
//! A *traced* table is one whose page has at most one writable shadow leaf, its *alias*, at the
//! lowest level. The alias starts clean, and the processor sets its dirty bit with the first write;
//! or it starts read-only ([`Options::protect`](super::Options)), and the write faults. A table
//! with an alias that is not known, or with a second one, is not traced: every flush compares it.
//! Filters that count writable leaves by page say whether unknown ones may exist; they may count
//! too many, never too few.
//!
//! Writes that do not use these shadow tables, by other vCPUs or by devices, are not seen: the
//! caller traces only guests with one vCPU.

use core::cell::Cell;
use core::sync::atomic::Ordering::Relaxed;

use super::tables::{Ref, Table};
use super::{Fill, Flush, FrameAccess, SHARED, ShadowFormat, Vtlb, index};

/// Number of counters of each filter of leaves, and of the others.
const LEAVES: usize = 8192;
const TABLES: usize = 1024;
/// Number of lists of traced tables.
const LISTS: usize = 256;
/// Bit of [`Trace::direct`].
const IS_KNOWN: u64 = 1;
/// `log2` of the pages of a leaf at level 1.
const LARGE_SHIFT: u32 = 9;

/// Counting filter; `SHIFT` selects its hash. A counter that is full stays full.
struct Filter<const BUCKETS: usize, const SHIFT: u32>([Cell<u8>; BUCKETS]);

impl<const BUCKETS: usize, const SHIFT: u32> Default for Filter<BUCKETS, SHIFT> {
    fn default() -> Self {
        Self([const { Cell::new(0) }; BUCKETS])
    }
}

impl<const BUCKETS: usize, const SHIFT: u32> Filter<BUCKETS, SHIFT> {
    fn counter(&self, page: u64) -> &Cell<u8> {
        // Fibonacci hashing.
        &self.0[(page.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> SHIFT) as usize % BUCKETS]
    }

    fn add(&self, page: u64) {
        let counter = self.counter(page);
        counter.set(counter.get().saturating_add(1));
    }

    fn remove(&self, page: u64) {
        let counter = self.counter(page);
        if counter.get() != u8::MAX {
            counter.set(counter.get().saturating_sub(1));
        }
    }

    fn count(&self, page: u64) -> u8 {
        self.counter(page).get()
    }
}

/// Heads of lists of tables.
struct Lists([Cell<Option<Ref>>; LISTS]);

impl Default for Lists {
    fn default() -> Self {
        Self([const { Cell::new(None) }; LISTS])
    }
}

impl Lists {
    /// List of the traced tables of a page, among others.
    fn of(&self, page: u64) -> &Cell<Option<Ref>> {
        // Pages of tables are often neighbours.
        &self.0[page as usize % LISTS]
    }
}

/// State of tracing.
#[derive(Default)]
pub struct Trace {
    /// Writable leaves of the lowest level, by guest page; twice, since both rarely collide.
    writable: Filter<LEAVES, 51>,
    writable_too: Filter<LEAVES, 24>,
    /// Writable leaves of level 1, by guest page of their first page.
    large: Filter<TABLES, 51>,
    /// First traced table of each list; the hash of its page selects the list.
    lists: Lists,
    /// Traced tables, by the first page of a leaf at level 1.
    regions: Filter<TABLES, 51>,
    /// Differences between linear and guest-physical addresses that large leaves have shown last,
    /// with [`IS_KNOWN`]: one of them is that of the guest's map of its memory.
    direct: [Cell<u64>; 2],
}

/// State of tracing of a table.
#[derive(Default)]
pub struct TableTrace {
    is_traced: Cell<bool>,
    /// Next traced table of the list.
    next: Cell<Option<Ref>>,
    /// A write was seen that the alias does not show any more.
    is_dirty: Cell<bool>,
    /// Number of flushes at which it was not traced.
    attempts: Cell<u8>,
    /// Writable leaf of its page: table, entry, linear address.
    alias: Cell<Option<Ref>>,
    alias_slot: Cell<u16>,
    alias_address: Cell<u64>,
}

impl TableTrace {
    fn alias(&self) -> Option<(Ref, u16, u64)> {
        let table = self.alias.get()?;
        Some((table, self.alias_slot.get(), self.alias_address.get()))
    }

    fn set_alias(&self, alias: Option<(Ref, u16, u64)>) {
        self.alias.set(alias.map(|(table, ..)| table));
        if let Some((_, slot, address)) = alias {
            self.alias_slot.set(slot);
            self.alias_address.set(address);
        }
    }
}

impl Trace {
    /// Returns whether the range of a leaf at `level` may contain a traced table.
    pub fn may_contain(&self, page: u64, level: u32) -> bool {
        level > 1 || self.regions.count(page >> LARGE_SHIFT) != 0
    }

    /// Number of writable leaves of a page, at least.
    fn writable_leaves(&self, page: u64) -> u8 {
        self.writable.count(page).min(self.writable_too.count(page))
    }

    /// Notes the difference between the addresses of a large leaf.
    fn learn(&self, difference: u64) {
        let [last, before] = &self.direct;
        let new = difference | IS_KNOWN;
        if last.get() != new && before.get() != new {
            before.set(last.replace(new));
        }
    }

    /// Counts a leaf that is removed, or added. Leaves above level 1 do not exist.
    fn count(&self, page: u64, level: u32, adds: bool) {
        match (level, adds) {
            (0, true) => {
                self.writable.add(page);
                self.writable_too.add(page);
            }
            (0, false) => {
                self.writable.remove(page);
                self.writable_too.remove(page);
            }
            (_, true) => self.large.add(page >> LARGE_SHIFT),
            (_, false) => self.large.remove(page >> LARGE_SHIFT),
        }
    }
}

impl<F: ShadowFormat> Vtlb<F> {
    /// Stops tracing a table.
    pub(super) fn forget_table(&self, of: &Table) {
        if of.trace.is_traced.take() {
            let page = of.source.get().guest >> 12;
            self.trace.regions.remove(page >> LARGE_SHIFT);
            let mut link = self.trace.lists.of(page);
            while let Some(table) = link.get().map(|table| self.table(table)) {
                if core::ptr::eq(table, of) {
                    link.set(of.trace.next.take());
                    break;
                }
                link = &table.trace.next;
            }
        }
        of.trace.is_dirty.set(false);
        of.trace.set_alias(None);
    }

    /// Stops tracing of all tables.
    pub(super) fn forget_trace(&self) {
        self.tables.iter().for_each(|table| self.forget_table(table));
        self.trace.direct.iter().for_each(|direct| direct.set(0));
    }

    /// Traces the page of a new table, if it can be traced.
    pub(super) fn trace_table(&self, frames: &impl FrameAccess, table: Ref) {
        let of = self.table(table);
        if !self.options.get().trace || of.is_split.get() || of.trace.is_traced.get() {
            return;
        }
        let page = of.source.get().guest >> 12;
        let alias = self.direct_alias(frames, page);
        if self.trace.writable_leaves(page) > u8::from(alias.is_some())
            || self.trace.large.count(page >> LARGE_SHIFT) != 0
        {
            return;
        }
        of.trace.is_traced.set(true);
        of.trace.set_alias(alias);
        of.trace.next.set(self.trace.lists.of(page).replace(Some(table)));
        self.trace.regions.add(page >> LARGE_SHIFT);
        self.clean_alias(frames, of);
        of.trace.is_dirty.set(false);
    }

    /// Traced tables of a guest page: one in each space that uses it.
    #[inline(always)]
    fn traced_tables(&self, page: u64) -> impl Iterator<Item = &Table> {
        let table = |link: &Cell<Option<Ref>>| link.get().map(|table| self.table(table));
        core::iter::successors(table(self.trace.lists.of(page)), move |of| table(&of.trace.next))
            .filter(move |of| of.source.get().guest >> 12 == page)
    }

    /// Finds the leaf of a page in the guest's map of its memory. A large one is removed, so that
    /// the page gets its own, and one that is not in the current space, too.
    fn direct_alias(&self, frames: &impl FrameAccess, page: u64) -> Option<(Ref, u16, u64)> {
        let mut found = None;
        let known = self.trace.direct.iter().map(Cell::get).filter(|direct| *direct != 0);
        let spaces = &self.spaces[..self.options.get().spaces.into()];
        let order = core::iter::once(self.space()).chain(spaces);
        for (space, is_first) in order.zip(core::iter::once(true).chain(core::iter::repeat(false)))
        {
            let others = self.trace.writable_leaves(page) > u8::from(found.is_some());
            if !is_first && !others && self.trace.large.count(page >> LARGE_SHIFT) == 0 {
                break;
            }
            for address in known.clone().map(|direct| (direct & !IS_KNOWN).wrapping_add(page << 12))
            {
                if let Some((table, slot)) = self.leaf_in(frames, space.root.get(), address) {
                    found = found.or(self.alias_at(frames, (table, slot), address, page));
                }
            }
        }
        found
    }

    /// Alias of a page at the leaf in an entry. One that can't be the alias is removed.
    fn alias_at(
        &self,
        frames: &impl FrameAccess,
        (table, slot): (Ref, usize),
        address: u64,
        page: u64,
    ) -> Option<(Ref, u16, u64)> {
        let of = self.table(table);
        let is_usable = of.owner.get() == SHARED || of.owner.get() == self.current.get();
        if of.level.get() > 0 || !is_usable {
            self.remove(frames, table, slot, address);
            return None;
        }
        let entry = frames.words(of.shadow.get())[slot].load(Relaxed);
        let copy = frames.words(of.copies.get())[slot].load(Relaxed);
        let is_it = F::address(copy) >> 12 == page && entry & F::WRITE != 0;
        is_it.then_some((table, slot as u16, address))
    }

    /// Table and entry of the leaf for an address, below a root.
    pub(super) fn leaf_in(
        &self,
        frames: &impl FrameAccess,
        root: Option<Ref>,
        address: u64,
    ) -> Option<(Ref, usize)> {
        let mut table = root?;
        for level in (0..=self.top.get()).rev() {
            let (of, slot) = (self.table(table), index(address, level));
            match Self::child_in(frames.words(of.copies.get())[slot].load(Relaxed)) {
                Some(child) => table = child,
                None => {
                    let leaf = frames.words(of.shadow.get())[slot].load(Relaxed);
                    return F::is_present(leaf).then_some((table, slot));
                }
            }
        }
        None
    }

    /// Leaf to be written for a writable fill, in an entry of `table`.
    pub(super) fn traced_leaf(&self, table: Ref, slot: usize, fill: &Fill<'_>) -> u64 {
        let page = fill.page;
        if fill.level > 0 {
            self.trace.learn(fill.address.wrapping_sub(page << 12) & !0xfff);
            return fill.leaf;
        }
        let Some(first) = self.traced_tables(page).next() else { return fill.leaf };
        if self.options.get().protect && !fill.is_write {
            return fill.leaf & !F::WRITE;
        }
        let here = (table, slot as u16, fill.address & !0xfff);
        if first.trace.alias().is_some_and(|(known, at, _)| (known, at) != (here.0, here.1)) {
            // A second alias.
            self.traced_tables(page).for_each(|of| self.forget_table(of));
            return fill.leaf;
        }
        for of in self.traced_tables(page) {
            of.trace.set_alias(Some(here));
            of.trace.is_dirty.set(of.trace.is_dirty.get() || self.options.get().protect);
        }
        if self.options.get().protect {
            return fill.leaf;
        }
        fill.leaf & !F::DIRTY
    }

    /// Counts a leaf that was written; its copy has the guest's page.
    pub(super) fn leaf_added(&self, of: &Table, leaf: u64, copy: u64) {
        if leaf & F::WRITE != 0 {
            self.trace.count(F::address(copy) >> 12, of.level.get().into(), true);
        }
    }

    /// Counts a leaf that is removed, and keeps what its dirty bit says.
    pub(super) fn leaf_removed(&self, of: &Table, slot: usize, leaf: u64, copy: u64) {
        if !self.options.get().trace || leaf & F::WRITE == 0 {
            return;
        }
        let page = F::address(copy) >> 12;
        self.trace.count(page, of.level.get().into(), false);
        if of.level.get() > 0 {
            return;
        }
        for traced in self.traced_tables(page) {
            if let Some((table, at, _)) = traced.trace.alias()
                && core::ptr::eq(self.table(table), of)
                && usize::from(at) == slot
            {
                traced.trace.set_alias(None);
                traced.trace.is_dirty.set(traced.trace.is_dirty.get() || leaf & F::DIRTY != 0);
            }
        }
    }

    /// Returns whether a table was not written since the last call; from now on its writes are
    /// seen again.
    pub(super) fn is_clean(&self, frames: &impl FrameAccess, table: Ref) -> bool {
        let of = self.table(table);
        if !of.trace.is_traced.get() {
            // What prevented it lasts, most often.
            let attempts = of.trace.attempts.get().wrapping_add(1);
            of.trace.attempts.set(attempts);
            if attempts.is_multiple_of(8) {
                self.trace_table(frames, table);
            }
            return false;
        }
        #[cfg(test)]
        if super::tests::finds_all_clean() {
            return true;
        }
        self.clean_alias(frames, of);
        !of.trace.is_dirty.take()
    }

    /// Returns whether no table of the current space was written since the last call; then all are
    /// traced.
    pub(super) fn is_space_clean(&self, frames: &impl FrameAccess) -> bool {
        if !self.options.get().trace {
            return false;
        }
        let is_clean = |number: u16| {
            let of = self.table(Ref::new(number));
            let trace = &of.trace;
            of.is_split.get()
                || trace.is_traced.get()
                    && !trace.is_dirty.get()
                    && !self.alias_is_dirty(frames, of)
        };
        self.space().members.iter().zip([0, 64]).all(|(word, first)| {
            let mut left = word.get();
            while left != 0 {
                if !is_clean(first + left.trailing_zeros() as u16) {
                    return false;
                }
                left &= left - 1;
            }
            true
        })
    }

    fn alias_is_dirty(&self, frames: &impl FrameAccess, of: &Table) -> bool {
        of.trace.alias().is_some_and(|(table, slot, _)| {
            let leaf = &frames.words(self.table(table).shadow.get())[usize::from(slot)];
            !self.options.get().protect && leaf.load(Relaxed) & F::DIRTY != 0
        })
    }

    /// Makes the alias of a table show the next write. All tables of the page become dirty if it
    /// has shown one.
    fn clean_alias(&self, frames: &impl FrameAccess, of: &Table) {
        let Some((table, slot, address)) = of.trace.alias() else { return };
        let is_protected = self.options.get().protect;
        if !is_protected && !self.alias_is_dirty(frames, of) {
            return;
        }
        let alias = self.table(table);
        let leaf = &frames.words(alias.shadow.get())[usize::from(slot)];
        let old = leaf.load(Relaxed);
        if is_protected {
            // It has no writable leaf then.
            let copy = frames.words(alias.copies.get())[usize::from(slot)].load(Relaxed);
            self.leaf_removed(alias, slot.into(), old & !F::DIRTY, copy);
            leaf.store(old & !F::WRITE, Relaxed);
        } else {
            leaf.store(old & !F::DIRTY, Relaxed);
            let page = of.source.get().guest >> 12;
            self.traced_tables(page).for_each(|traced| traced.trace.is_dirty.set(true));
        }
        self.request_for(alias.owner.get(), Flush::Page { address, everywhere: false });
    }
}
