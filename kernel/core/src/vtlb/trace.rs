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

use super::defects::{self, breaks};
use super::tables::{Ref, Table};
use super::{ENTRIES, Flush, FrameAccess, SHARED, ShadowFormat, Space, Vtlb, index};

/// Number of counters of each filter of leaves, and of the others.
const LEAVES: usize = 16384;
const TABLES: usize = 1024;
/// Number of aliases that a space remembers.
pub const WATCHED: usize = 32;
/// Bit of [`Trace::direct`].
const IS_KNOWN: u64 = 1;
/// `log2` of the pages of a leaf at level 1.
const LARGE_SHIFT: u32 = 9;

/// Counting filter. A counter that is full stays full.
struct Filter<const BUCKETS: usize>([Cell<u8>; BUCKETS]);

impl<const BUCKETS: usize> Filter<BUCKETS> {
    fn counter(&self, page: u64) -> &Cell<u8> {
        // Fibonacci hashing.
        &self.0[(page.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 48) as usize % BUCKETS]
    }

    fn count(&self, page: u64) -> u8 {
        self.counter(page).get()
    }
}

fn add(counter: &Cell<u8>) {
    counter.set(counter.get().saturating_add(1));
}

fn subtract(counter: &Cell<u8>) {
    if counter.get() != u8::MAX {
        counter.set(counter.get().saturating_sub(1));
    }
}

/// State of tracing.
pub struct Trace {
    /// Writable leaves of the lowest level, by guest page.
    writable: Filter<LEAVES>,
    /// Writable leaves of level 1, by guest page of their first page.
    large: Filter<TABLES>,
    /// First traced table of each list; the page number of a table selects its list.
    lists: [[Cell<Option<Ref>>; 32]; 8],
    /// Traced tables, by the first page of a leaf at level 1.
    regions: Filter<TABLES>,
    /// Differences between linear and guest-physical addresses that large leaves have shown last,
    /// with [`IS_KNOWN`]: one of them is that of the guest's map of its memory. Linux has two more,
    /// those of its image and of its page structures.
    direct: [Cell<u64>; 4],
    /// See [`Vtlb::note_trace`].
    changes: Cell<u64>,
}

/// Writable leaf: table, physical address, linear address.
type Alias = (Ref, u64, u64);

/// State of tracing of a table.
pub struct TableTrace {
    is_traced: Cell<bool>,
    /// Next traced table of the list.
    next: Cell<Option<Ref>>,
    /// A write was seen that the alias does not show any more.
    is_dirty: Cell<bool>,
    /// Number of flushes at which it was not traced.
    attempts: Cell<u8>,
    /// Writable leaf of its page: table, physical address, linear address.
    alias: Cell<Option<Ref>>,
    alias_at: Cell<u64>,
    alias_address: Cell<u64>,
}

impl TableTrace {
    fn alias(&self) -> Option<Alias> {
        Some((self.alias.get()?, self.alias_at.get(), self.alias_address.get()))
    }

    fn set_alias(&self, alias: Option<Alias>) {
        self.alias.set(alias.map(|(table, ..)| table));
        if let Some((_, at, address)) = alias {
            self.alias_at.set(at);
            self.alias_address.set(address);
        }
    }
}

impl Trace {
    /// Returns whether the range of a leaf at `level` may contain a traced table.
    pub fn may_contain(&self, page: u64, level: u32) -> bool {
        level > 1 || self.regions.count(page >> LARGE_SHIFT) != 0
    }

    /// List of the traced tables of a page, among others: pages of tables are often neighbours.
    fn list(&self, page: u64) -> &Cell<Option<Ref>> {
        &self.lists[page as usize / 32 % 8][page as usize % 32]
    }

    /// Notes the difference between the addresses of a large leaf.
    fn learn(&self, difference: u64) {
        let mut new = difference | IS_KNOWN;
        if !self.direct.iter().any(|known| known.get() == new) {
            self.direct.iter().for_each(|known| new = known.replace(new));
        }
    }

    /// Number of changes: see [`Vtlb::note_trace`].
    pub fn changes(&self) -> u64 {
        self.changes.get()
    }

    /// Counter of the writable leaves of a page, at a level. Leaves above level 1 do not exist.
    fn leaves(&self, page: u64, level: u8) -> &Cell<u8> {
        match level {
            0 => self.writable.counter(page),
            _ => self.large.counter(page >> LARGE_SHIFT),
        }
    }
}

impl<F: ShadowFormat, M: FrameAccess> Vtlb<F, M> {
    /// Stops tracing a table.
    pub(super) fn forget_table(&self, of: &Table) {
        if of.trace.is_traced.take() {
            let page = of.source.get().guest >> 12;
            subtract(self.trace.regions.counter(page >> LARGE_SHIFT));
            let mut link = self.trace.list(page);
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
        self.note_trace();
    }

    /// Stops tracing of all tables.
    pub(super) fn forget_trace(&self) {
        self.tables.iter().for_each(|table| self.forget_table(table));
        self.trace.direct.iter().for_each(|direct| direct.set(0));
    }

    /// Traces the page of a new table, if it can be traced.
    pub(super) fn trace_table(&self, table: Ref) {
        let of = self.table(table);
        if !self.options.get().trace || of.is_split.get() || of.trace.is_traced.get() {
            return;
        }
        let page = of.source.get().guest >> 12;
        let alias = self.direct_alias(page);
        let has_unknown = self.trace.writable.count(page) > u8::from(alias.is_some())
            || self.trace.large.count(page >> LARGE_SHIFT) != 0;
        if has_unknown && !breaks("trace-unknown-leaves") {
            return;
        }
        self.note_trace();
        of.trace.is_traced.set(true);
        of.trace.set_alias(alias);
        of.trace.next.set(self.trace.list(page).replace(Some(table)));
        add(self.trace.regions.counter(page >> LARGE_SHIFT));
        self.clean_alias(of);
        of.trace.is_dirty.set(false);
    }

    /// Traced tables of a guest page: one in each space that uses it.
    #[inline(always)]
    fn traced_tables(&self, page: u64) -> impl Iterator<Item = &Table> {
        let table = |link: &Cell<Option<Ref>>| link.get().map(|table| self.table(table));
        core::iter::successors(table(self.trace.list(page)), move |of| table(&of.trace.next))
            .filter(move |of| {
                defects::step();
                of.source.get().guest >> 12 == page
            })
    }

    /// Finds the leaf of a page in the guest's map of its memory. A large one is removed, so that
    /// the page gets its own, and one that is not in the current space, too.
    fn direct_alias(&self, page: u64) -> Option<Alias> {
        let mut found = None;
        let known = &self.trace.direct;
        for direct in known.iter().filter(|direct| direct.get() != 0) {
            let address = (direct.get() & !IS_KNOWN).wrapping_add(page << 12);
            // Of shared tables all spaces have the same leaf.
            let others = if self.is_shared(address) { 0 } else { self.options.get().spaces.into() };
            for space in core::iter::once(self.space()).chain(&self.spaces[..others]) {
                let is_last = self.trace.writable.count(page) <= u8::from(found.is_some());
                if is_last && self.trace.large.count(page >> LARGE_SHIFT) == 0 {
                    return found;
                }
                if let Some(leaf) = self.leaf_in(space.root.get(), address) {
                    let is_first = found.is_none();
                    found = found.or(self.alias_at(leaf, address, page));
                    if found.is_some() && is_first {
                        // The next search begins here.
                        known[0].swap(direct);
                    }
                }
            }
        }
        found
    }

    /// Alias of a page at the leaf in an entry. One that can't be the alias is removed.
    fn alias_at(&self, (table, at): (Ref, u64), address: u64, page: u64) -> Option<Alias> {
        let (of, slot) = (self.table(table), at as usize / 8 % ENTRIES);
        let is_usable = of.owner.get() == SHARED || of.owner.get() == self.current();
        if of.level.get() > 0 || !is_usable {
            self.remove(table, slot, address);
            return None;
        }
        let copy = self.memory.words(of.copies.get())[slot].load(Relaxed);
        let is_writable = self.memory.word(at).load(Relaxed) & F::WRITE != 0;
        (is_writable && F::address(copy) >> 12 == page).then_some((table, at, address))
    }

    /// Table and physical address of the leaf for an address, below a root.
    pub(super) fn leaf_in(&self, root: Option<Ref>, address: u64) -> Option<(Ref, u64)> {
        let mut table = root?;
        for level in (0..=self.top.get()).rev() {
            let (of, slot) = (self.table(table), index(address, level));
            match Self::child_in(self.memory.words(of.copies.get())[slot].load(Relaxed)) {
                Some(child) => table = child,
                None => {
                    let at = of.shadow.get() + 8 * slot as u64;
                    return F::is_present(self.memory.word(at).load(Relaxed))
                        .then_some((table, at));
                }
            }
        }
        None
    }

    /// Leaf to be written instead of a writable one of a page, at a level, as the alias `here`.
    pub(super) fn traced_leaf(
        &self,
        here: Alias,
        (page, level): (u64, u32),
        is_write: bool,
        leaf: u64,
    ) -> u64 {
        let (_, at, address) = here;
        if level > 0 {
            self.trace.learn(address.wrapping_sub(page << 12));
            return leaf;
        }
        let Some(first) = self.traced_tables(page).next() else { return leaf };
        if self.options.get().protect && !is_write {
            return leaf & !F::WRITE;
        }
        let is_second = first.trace.alias().is_some_and(|(_, known, _)| known != at);
        if is_second && !breaks("trace-second-alias") {
            // A second alias.
            self.traced_tables(page).for_each(|of| self.forget_table(of));
            return leaf;
        }
        self.note_trace();
        for of in self.traced_tables(page) {
            of.trace.set_alias(Some(here));
            of.trace.is_dirty.set(of.trace.is_dirty.get() || self.options.get().protect);
        }
        if self.options.get().protect { leaf } else { leaf & !F::DIRTY }
    }

    /// Counts a leaf that was written; its copy has the guest's page.
    pub(super) fn leaf_added(&self, of: &Table, leaf: u64, copy: u64) {
        if of.is_counted.get() && leaf & F::WRITE != 0 {
            add(self.trace.leaves(F::address(copy) >> 12, of.level.get()));
        }
    }

    /// Counts a leaf that is removed, and keeps what its dirty bit says.
    pub(super) fn leaf_removed(&self, of: &Table, slot: usize, leaf: u64, copy: u64) {
        // A removed table may be of a time with other options.
        if !of.is_counted.get() || leaf & F::WRITE == 0 {
            return;
        }
        let page = F::address(copy) >> 12;
        subtract(self.trace.leaves(page, of.level.get()));
        if of.level.get() > 0 {
            return;
        }
        for traced in self.traced_tables(page) {
            let here = of.shadow.get() + 8 * slot as u64;
            if traced.trace.alias().is_some_and(|(_, at, _)| at == here) {
                self.note_trace();
                traced.trace.set_alias(None);
                let is_dirty = leaf & F::DIRTY != 0 && !breaks("trace-keeps-dirty");
                traced.trace.is_dirty.set(traced.trace.is_dirty.get() || is_dirty);
            }
        }
    }

    /// Returns whether a table was not written since the last call; from now on its writes are
    /// seen again.
    pub(super) fn is_clean(&self, table: Ref) -> bool {
        let of = self.table(table);
        if !of.trace.is_traced.get() {
            // What prevented it lasts, most often.
            let attempts = of.trace.attempts.get().wrapping_add(1);
            of.trace.attempts.set(attempts);
            if attempts.is_multiple_of(8) {
                self.trace_table(table);
            }
            return false;
        }
        if breaks("trace-writes") {
            return true;
        }
        self.clean_alias(of);
        !of.trace.is_dirty.take()
    }

    /// Returns whether no table of the current space was written since the last look at all of
    /// them, which has found all clean and traced, and no state has changed.
    pub(super) fn is_space_clean(&self) -> bool {
        let space = self.space();
        let is_known = space.watched_at.get() == self.trace.changes.get();
        if !self.options.get().trace || !is_known {
            return breaks("trace-space");
        }
        let is_dirty = |at: &Cell<u64>| self.memory.word(at.get()).load(Relaxed) & F::DIRTY != 0;
        let mut watched = space.watched.iter().take(space.watches.get().into());
        !watched.any(is_dirty) || breaks("trace-space")
    }

    /// Remembers the alias of a clean table as one of those of its space; returns whether it has
    /// one.
    pub(super) fn watch(&self, space: &Space, index: usize, of: &Table) -> bool {
        let is_known = of.trace.alias.get().is_some();
        if is_known && let Some(watched) = space.watched.get(index) {
            watched.set(of.trace.alias_at.get());
        }
        is_known
    }

    /// Notes that a table is traced or dirty, or is not, has another alias, or another space.
    pub(super) fn note_trace(&self) {
        self.trace.changes.set(self.trace.changes.get() + 1);
    }

    /// Makes the alias of a table show the next write. All tables of the page become dirty if it
    /// has shown one.
    #[inline(always)]
    fn clean_alias(&self, of: &Table) {
        if let Some(alias) = of.trace.alias()
            && self.memory.word(alias.1).load(Relaxed) & F::DIRTY != 0
        {
            self.clean_dirty(of, alias);
        }
    }

    /// Makes an alias whose dirty bit is set show the next write.
    #[inline(never)]
    fn clean_dirty(&self, of: &Table, alias: Alias) {
        let (table, at, address) = alias;
        let leaf = self.memory.word(at);
        let old = leaf.load(Relaxed);
        let alias = self.table(table);
        leaf.store(old & !F::DIRTY, Relaxed);
        if self.options.get().protect {
            // It has no writable leaf then.
            let slot = at as usize / 8 % ENTRIES;
            let copy = self.memory.words(alias.copies.get())[slot].load(Relaxed);
            self.leaf_removed(alias, slot, old & !F::DIRTY, copy);
            leaf.store(old & !F::DIRTY & !F::WRITE, Relaxed);
        } else {
            self.note_trace();
            let page = of.source.get().guest >> 12;
            self.traced_tables(page).for_each(|traced| traced.trace.is_dirty.set(true));
        }
        self.request_for(alias.owner.get(), Flush::Page { address, everywhere: false });
    }
}
