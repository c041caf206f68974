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
use super::{Fill, Flush, Frames, ShadowFormat, Vtlb, index};

/// Number of counters of the filter of leaves, and of the others.
const LEAVES: usize = 2048;
const TABLES: usize = 256;
/// `log2` of the pages of a leaf at level 1.
const LARGE_SHIFT: u32 = 9;

/// Counting filter. A counter that is full stays full.
struct Filter<const BUCKETS: usize>([Cell<u8>; BUCKETS]);

impl<const BUCKETS: usize> Filter<BUCKETS> {
    const fn new() -> Self {
        Self([const { Cell::new(0) }; BUCKETS])
    }

    fn counter(&self, page: u64) -> &Cell<u8> {
        // Fibonacci hashing.
        &self.0[(page.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32) as usize % BUCKETS]
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

/// State of tracing.
pub struct Trace {
    /// Writable leaves of the lowest level, by guest page.
    writable: Filter<LEAVES>,
    /// Writable leaves of level 1, by guest page of their first page.
    large: Filter<TABLES>,
    /// Traced tables by page, and by the first page of a leaf at level 1.
    tables: Filter<TABLES>,
    regions: Filter<TABLES>,
    /// Difference between the linear and the guest-physical addresses of the guest's map of its
    /// memory, as a large leaf has shown it; 0: none has.
    direct: Cell<u64>,
}

/// State of tracing of a table.
pub struct TableTrace {
    is_traced: Cell<bool>,
    /// A write was seen that the alias does not show any more.
    is_dirty: Cell<bool>,
    /// Writable leaf of its page: table, entry, linear address.
    alias: Cell<Option<Ref>>,
    alias_slot: Cell<u16>,
    alias_address: Cell<u64>,
}

impl TableTrace {
    pub const fn new() -> Self {
        Self {
            is_traced: Cell::new(false),
            is_dirty: Cell::new(false),
            alias: Cell::new(None),
            alias_slot: Cell::new(0),
            alias_address: Cell::new(0),
        }
    }

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
    pub const fn new() -> Self {
        Self {
            writable: Filter::new(),
            large: Filter::new(),
            tables: Filter::new(),
            regions: Filter::new(),
            direct: Cell::new(0),
        }
    }

    /// Returns whether the range of a leaf at `level` may contain a traced table.
    pub fn may_contain(&self, page: u64, level: u32) -> bool {
        level > 1 || self.regions.count(page >> LARGE_SHIFT) != 0
    }

    /// Stops tracing a table.
    pub fn forget_table(&self, of: &Table) {
        if of.trace.is_traced.take() {
            let page = of.source.get().guest >> 12;
            self.tables.remove(page);
            self.regions.remove(page >> LARGE_SHIFT);
        }
        of.trace.is_dirty.set(false);
        of.trace.set_alias(None);
    }

    /// Counts a leaf that is removed, or added. Leaves above level 1 do not exist.
    fn count(&self, page: u64, level: u32, adds: bool) {
        match (level, adds) {
            (0, true) => self.writable.add(page),
            (0, false) => self.writable.remove(page),
            (_, true) => self.large.add(page >> LARGE_SHIFT),
            (_, false) => self.large.remove(page >> LARGE_SHIFT),
        }
    }
}

impl<F: ShadowFormat> Vtlb<F> {
    /// Stops tracing of all tables.
    pub(super) fn forget_trace(&self) {
        self.tables.iter().for_each(|table| self.trace.forget_table(table));
        self.trace.direct.set(0);
    }

    /// Traces the page of a new table, if it can be traced.
    pub(super) fn trace_table(&self, frames: &impl Frames, table: Ref) {
        let of = self.table(table);
        if !self.options.get().trace || of.is_split.get() || of.trace.is_traced.get() {
            return;
        }
        let page = of.source.get().guest >> 12;
        let alias = self.direct_alias(frames, page);
        let unknown = self.trace.writable.count(page) > u8::from(alias.is_some());
        if unknown || self.trace.large.count(page >> LARGE_SHIFT) != 0 || self.is_page_traced(page)
        {
            return;
        }
        of.trace.is_traced.set(true);
        of.trace.is_dirty.set(false);
        of.trace.set_alias(alias);
        self.trace.tables.add(page);
        self.trace.regions.add(page >> LARGE_SHIFT);
        self.make_clean(frames, of);
    }

    fn is_page_traced(&self, page: u64) -> bool {
        self.trace.tables.count(page) != 0 && self.traced_table(page).is_some()
    }

    /// Traced table in a guest page.
    fn traced_table(&self, page: u64) -> Option<&Table> {
        if self.trace.tables.count(page) == 0 {
            return None;
        }
        let of_page =
            |table: &&Table| table.trace.is_traced.get() && table.source.get().guest >> 12 == page;
        self.tables[..usize::from(self.count.get())].iter().find(of_page)
    }

    /// Finds the leaf of a page in the guest's map of its memory. A large one is removed, so that
    /// the page gets its own.
    fn direct_alias(&self, frames: &impl Frames, page: u64) -> Option<(Ref, u16, u64)> {
        let direct = self.trace.direct.get();
        let address = direct.wrapping_add(page << 12);
        let mut table = self.space().root.get().filter(|_| direct != 0)?;
        for level in (0..=self.top.get()).rev() {
            let slot = index(address, level);
            let entry = frames.words(self.table(table).shadow.get())[slot].load(Relaxed);
            if !F::is_present(entry) {
                return None;
            }
            if let Some(child) = self.child(frames, table, slot) {
                table = child;
                continue;
            }
            let copy = frames.words(self.table(table).copies.get())[slot].load(Relaxed);
            if level > 0 {
                self.remove(frames, table, slot, address);
                return None;
            }
            let is_it = F::address(copy) >> 12 == page;
            return (is_it && entry & F::WRITE != 0).then_some((table, slot as u16, address));
        }
        None
    }

    /// Leaf to be written for a fill, in an entry of `table`.
    pub(super) fn traced_leaf(&self, table: Ref, slot: usize, fill: &Fill<'_>) -> u64 {
        if !self.options.get().trace || fill.leaf & F::WRITE == 0 {
            return fill.leaf;
        }
        let page = fill.page;
        if fill.level > 0 {
            if slot_is_upper(fill.address) {
                self.trace.direct.set(fill.address.wrapping_sub(page << 12) & !0xfff);
            }
            return fill.leaf;
        }
        let Some(of) = self.traced_table(page) else { return fill.leaf };
        if self.options.get().protect && !fill.is_write {
            return fill.leaf & !F::WRITE;
        }
        let here = (table, slot as u16, fill.address & !0xfff);
        match of.trace.alias() {
            None => of.trace.set_alias(Some(here)),
            Some((known, at, _)) if (known, at) == (here.0, here.1) => {}
            Some(_) => {
                // A second alias.
                self.trace.forget_table(of);
                return fill.leaf;
            }
        }
        if self.options.get().protect {
            of.trace.is_dirty.set(true);
            return fill.leaf;
        }
        fill.leaf & !F::DIRTY
    }

    /// Counts a leaf that was written; its copy has the guest's page.
    pub(super) fn leaf_added(&self, of: &Table, leaf: u64, copy: u64) {
        if self.options.get().trace && leaf & F::WRITE != 0 {
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
        if of.level.get() == 0
            && let Some(traced) = self.traced_table(page)
            && let Some((table, at, _)) = traced.trace.alias()
            && core::ptr::eq(self.table(table), of)
            && usize::from(at) == slot
        {
            traced.trace.set_alias(None);
            if leaf & F::DIRTY != 0 {
                traced.trace.is_dirty.set(true);
            }
        }
    }

    /// Returns whether a table was not written since the last call; from now on its writes are
    /// seen again.
    pub(super) fn is_clean(&self, frames: &impl Frames, table: Ref) -> bool {
        let of = self.table(table);
        if !of.trace.is_traced.get() {
            self.trace_table(frames, table);
            return false;
        }
        #[cfg(test)]
        if super::tests::finds_all_clean() {
            return true;
        }
        let is_dirty = of.trace.is_dirty.get() || self.alias_is_dirty(frames, of);
        if is_dirty {
            of.trace.is_dirty.set(false);
            self.make_clean(frames, of);
        }
        !is_dirty
    }

    fn alias_is_dirty(&self, frames: &impl Frames, of: &Table) -> bool {
        of.trace.alias().is_some_and(|(table, slot, _)| {
            let leaf = &frames.words(self.table(table).shadow.get())[usize::from(slot)];
            !self.options.get().protect && leaf.load(Relaxed) & F::DIRTY != 0
        })
    }

    /// Makes the alias of a table show the next write.
    fn make_clean(&self, frames: &impl Frames, of: &Table) {
        let Some((table, slot, address)) = of.trace.alias() else { return };
        let alias = self.table(table);
        let leaf = &frames.words(alias.shadow.get())[usize::from(slot)];
        let old = leaf.load(Relaxed);
        if self.options.get().protect {
            // It has no writable leaf then.
            let copy = frames.words(alias.copies.get())[usize::from(slot)].load(Relaxed);
            self.leaf_removed(alias, slot.into(), old & !F::DIRTY, copy);
            leaf.store(old & !F::WRITE, Relaxed);
        } else {
            leaf.store(old & !F::DIRTY, Relaxed);
        }
        self.request_for(alias.owner.get(), Flush::Page { address, everywhere: false });
    }
}

/// Returns whether an address is in the upper half of the address space.
fn slot_is_upper(address: u64) -> bool {
    address >> 63 != 0
}
