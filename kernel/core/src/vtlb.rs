//! vTLB: shadow page tables of one vCPU, which hold translations from linear to host-physical
//! addresses as the TLB of a processor would (Intel SDM vol. 3 §33.3; AMD APM vol. 2 §15.25.1 names
//! the technique).
//!
//! The tables are a cache beside the delegations of the VM: they are private to one vCPU, so they
//! need no lock, and any part of them may be dropped at any time. A *space* is the tree of one root
//! of the guest; several spaces can be kept. Each shadow table remembers the guest table that it
//! was filled from, and for each entry the guest's entry (its *copy*), so that a flush can compare
//! them. A large page of the guest that is not large in the host is *split*: its tables have one
//! guest entry for all entries.
//!
//! With [`Options::global`] the tables of the upper half of the address space are shared by all
//! spaces. They belong to the space [`SHARED`], below a root of its own that no processor loads.
//!
//! # Invariants
//!
//! * Containment: an entry refers to a frame of the pool, or is a leaf that [`Vtlb::fill`] was
//!   given. After [`Vtlb::drop_all`] there is no leaf.
//! * Freshness: after [`Vtlb::load`] no leaf of the space differs from the guest's tables, except
//!   global ones; after [`Vtlb::invalidate`] there is none for the address.
//! * A removed entry may survive in the processor's TLB until the caller has carried out
//!   [`Vtlb::take_flush`], before it enters the guest.
//! * Every function takes a bounded number of steps: at most one table is emptied for each table
//!   that is allocated, and a flush drops tables that it has not begun after [`SYNC_BUDGET`]
//!   entries.

use core::cell::Cell;
use core::sync::atomic::{AtomicU64, Ordering::Relaxed};

use crate::table::Format;

pub mod defects;
mod fill;
mod sync;
mod tables;
mod trace;

use defects::breaks;
pub use fill::{Fill, GuestSource, Known, Step};
use tables::{Ref, Table, bits_of};

/// Maximum number of shadow tables of a vCPU.
pub const MAX_TABLES: usize = 128;
/// Maximum number of spaces that are kept.
pub const MAX_SPACES: usize = 32;
/// Consecutive frames of a table: its entries, and the copies of the guest's.
pub const FRAMES_PER_TABLE: u32 = 2;
/// Number of entries after which a flush begins no other table.
const SYNC_BUDGET: u32 = 2048;
/// Owner of the tables that all spaces share.
const SHARED: u8 = 0xff;
/// First entry of the upper half in a root of the highest level.
const UPPER_HALF: usize = 256;
/// Key of a space without a root table in memory.
const NO_ROOT: u64 = u64::MAX;
/// Width of the index of a space in an epoch.
const SPACE_BITS: u32 = 8;
/// Number of entries of a table.
const ENTRIES: usize = 512;

/// Format of shadow tables and guest tables.
pub trait ShadowFormat: Format {
    /// Accessed and dirty bits of a guest's entry: setting them changes no translation.
    const MARKS: u64;
    /// Bits of a guest's entry that a translation depends on. None of bits 59:52.
    const MEANING: u64;
    /// Bits of a guest's entry that take rights away; others grant them.
    const FORBIDS: u64;
    /// Leaves are writable.
    const WRITE: u64;
    /// The processor has written through the leaf.
    const DIRTY: u64;
    /// Returns an entry that refers to the next table, in a root of three-level tables.
    fn pointer(physical: u64) -> u64;
}

/// Access to the frames of the pool, and to guest pages that hold page tables.
pub trait FrameAccess {
    /// Physical address of the page of RAM at a guest-physical address; 0 if there is none.
    fn guest_page(&self, guest: u64) -> u64;
    /// Words of the page at a physical address.
    fn words(&self, physical: u64) -> &[AtomicU64; ENTRIES];
    /// Word at a physical address.
    fn word(&self, physical: u64) -> &AtomicU64;
}

/// Optimisations, each above the ones before; `abi::vcpu::x86::vtlb` has their words.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Options {
    /// Number of spaces to keep, at least 1 and at most [`MAX_SPACES`].
    pub spaces: u8,
    /// Global translations survive [`Vtlb::load`].
    pub global: bool,
    /// [`Vtlb::load`] compares translations with the guest's tables.
    pub sync: bool,
    /// [`Vtlb::load`] compares only tables that were written.
    pub trace: bool,
    /// With `trace`: write faults show that a table is written, not the processor's dirty bits.
    pub protect: bool,
}

/// Obligation to flush the processor's TLB before the guest is entered again.
// Zero is `None`: see `Vtlb`.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[repr(u8)]
pub enum Flush {
    /// Nothing.
    #[default]
    None,
    /// One address in the current space; with `everywhere`, in all.
    Page {
        /// The address.
        address: u64,
        /// In every space.
        everywhere: bool,
    },
    /// The current space.
    Space,
    /// Every space.
    All,
}

/// There is no free table, and the pool can grow ([`Vtlb::add_table`]).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct NeedsFrames;

/// A space: the tree of one root of the guest. Zero: none.
struct Space {
    /// Root of the guest.
    key: Cell<u64>,
    root: Cell<Option<Ref>>,
    /// Value of [`Vtlb::clock`] when it was last loaded.
    used: Cell<u64>,
    /// TLB tag of the space, and its epoch; see [`Vtlb::tag`].
    tag: Cell<(u32, u64)>,
    /// [`Vtlb::shared_changes`] when shared tables were last made part of it; 0: not since its root
    /// has changed.
    linked: Cell<u64>,
    /// Bit mask of its tables, by number.
    members: [Cell<u64>; MAX_TABLES / 64],
    /// Physical addresses of the aliases of its traced tables, their number, and the number of
    /// changes of tracing then.
    watched: [Cell<u64>; trace::WATCHED],
    watches: Cell<u8>,
    watched_at: Cell<u64>,
}

impl Space {
    /// Its tables.
    fn tables(&self) -> impl Iterator<Item = Ref> {
        let numbers = (0..self.members.len()).flat_map(|word| bits_of(&self.members, word));
        numbers.map(|number| Ref::new(number as u16))
    }

    /// Returns whether a table is one of its.
    fn has(&self, table: Ref) -> bool {
        self.members[table.index() / 64].get() >> (table.index() % 64) & 1 != 0
    }
}

/// Shadow page tables of a vCPU. They are too large for a stack: memory that is zero is a valid
/// value. [`Vtlb::start`] must be called before all else.
pub struct Vtlb<F, M> {
    /// Memory that the tables are in and refer to.
    pub memory: M,
    tables: [Table; MAX_TABLES],
    spaces: [Space; MAX_SPACES],
    /// Indices of spaces that may be those of roots; the page number of the root selects the hint.
    hints: [Cell<u8>; 32],
    /// Root of the tables that all spaces share.
    shared: Cell<Option<Ref>>,
    /// Number of tables that have frames; the others have none yet.
    count: Cell<u16>,
    /// Tables that no space has, and their number. Entries of those that were removed are still to
    /// be cleared.
    spare: Cell<Option<Ref>>,
    spare_count: Cell<u16>,
    /// Number of tables that the pool may have.
    limit: Cell<u16>,
    /// Index of the current space, and above [`SPACE_BITS`] the number of removals of tables.
    epoch: Cell<u64>,
    /// Level of roots.
    top: Cell<u32>,
    clock: Cell<u64>,
    /// Value of [`Vtlb::fills`] up to which there were few since the last load.
    few: Cell<u64>,
    flush: Cell<Flush>,
    options: Cell<Options>,
    /// A shared table may have leaves that are not global.
    has_local: Cell<bool>,
    /// Number of changes of the shared root.
    shared_changes: Cell<u64>,
    paths: [fill::Path; fill::PATHS],
    trace: trace::Trace,
    /// Number of translations filled.
    pub fills: Cell<u64>,
    /// Number of tables evicted.
    pub evictions: Cell<u64>,
    /// Number of tables compared with the guest's.
    pub syncs: Cell<u64>,
    format: core::marker::PhantomData<F>,
}

/// Index of the entry for an address at a level.
fn index(address: u64, level: u32) -> usize {
    (address >> (12 + 9 * level)) as usize % ENTRIES
}

impl<F: ShadowFormat, M: FrameAccess> Vtlb<F, M> {
    /// Begins with an empty pool, which may have `limit` tables.
    pub fn start(&self, limit: u16) {
        self.limit.set(limit.min(MAX_TABLES as u16));
        self.top.set(F::ROOT_LEVEL);
        self.set_options(Options { spaces: 1, ..Options::default() });
    }

    /// Sets the optimisations, and drops everything.
    pub fn set_options(&self, options: Options) {
        self.options.set(Options { spaces: options.spaces.clamp(1, MAX_SPACES as u8), ..options });
        self.drop_all();
    }

    /// The optimisations.
    pub fn options(&self) -> Options {
        self.options.get()
    }

    /// Physical address of the current root.
    pub fn root(&self) -> Option<u64> {
        self.space().root.get().map(|root| self.table(root).shadow.get())
    }

    /// Takes the obligation to flush the processor's TLB.
    #[inline]
    pub fn take_flush(&self) -> Flush {
        self.flush.replace(Flush::None)
    }

    /// Returns whether there is such an obligation.
    #[inline(always)]
    pub fn needs_flush(&self) -> bool {
        !matches!(self.flush.get(), Flush::None)
    }

    /// TLB tag of the current space and its epoch, which the caller defines; epoch 0: none, because
    /// the TLB may have stale entries with the last tag.
    #[inline]
    pub fn tag(&self) -> (u32, u64) {
        self.space().tag.get()
    }

    /// Sets the TLB tag of the current space.
    pub fn set_tag(&self, tag: u32, epoch: u64) {
        self.space().tag.set((tag, epoch));
    }

    /// Tags of all spaces with an epoch.
    pub fn tags(&self, epoch: u64) -> impl Iterator<Item = u32> {
        let valid = move |space: &Space| space.root.get().is_some() && space.tag.get().1 == epoch;
        let kept = &self.spaces[..self.options.get().spaces.into()];
        kept.iter().filter(move |space| valid(space)).map(|space| space.tag.get().0)
    }

    /// Takes the tags of all spaces away.
    pub fn drop_tags(&self) {
        for space in &self.spaces[..self.options.get().spaces.into()] {
            space.tag.set((0, 0));
        }
    }

    /// Level of roots: that of `F`, or one less for three-level tables and without paging.
    /// Everything is dropped if it changes.
    pub fn set_top(&self, top: u32) {
        if self.top.replace(top) != top {
            self.drop_all();
        }
    }

    /// Number of the tables that translate an address: another one for another space, and after
    /// any table was removed.
    #[inline(always)]
    pub fn epoch(&self, address: u64) -> u64 {
        // Below three-level tables no address is in the upper half.
        let is_shared = self.options.get().global && address >> 47 & 1 != 0;
        self.epoch.get() | if is_shared { SHARED.into() } else { 0 }
    }

    /// Returns whether an address is translated by shared tables.
    #[inline(always)]
    fn is_shared(&self, address: u64) -> bool {
        self.options.get().global
            && self.top.get() == F::ROOT_LEVEL
            && index(address, F::ROOT_LEVEL) >= UPPER_HALF
    }

    /// Notes that tables are not part of a space any more, or belong to another one.
    fn note_change(&self) {
        self.epoch.set(self.epoch.get() + (1 << SPACE_BITS));
    }

    /// Index of the current space.
    fn current(&self) -> u8 {
        self.epoch.get() as u8
    }

    fn space(&self) -> &Space {
        &self.spaces[usize::from(self.current()) % MAX_SPACES]
    }

    fn table(&self, table: Ref) -> &Table {
        // No number is larger: the remainder takes the place of a comparison.
        &self.tables[table.index() % MAX_TABLES]
    }

    /// Makes the space of the guest's root table at a guest-physical address current, and removes
    /// what may be stale in it, except for global translations. Without paging there is none.
    ///
    /// # Errors
    /// The pool must grow first. Nothing is current until the call is repeated.
    pub fn load(&self, root: Option<u64>) -> Result<(), NeedsFrames> {
        let key = root.unwrap_or(NO_ROOT);
        self.clock.set(self.clock.get() + 1);
        self.few.set(self.fills.get() + fill::FEW);
        self.drop_local();
        let (index, is_known) = self.choose(key);
        self.epoch.set(self.epoch.get() >> SPACE_BITS << SPACE_BITS | index as u64);
        let space = self.space();
        space.used.set(self.clock.get());
        if !is_known || !self.is_space_clean() {
            self.renew(key, is_known)?;
        }
        if space.linked.get() != self.shared_changes.get() {
            space.linked.set(self.shared_changes.get());
            self.link_shared();
        }
        Ok(())
    }

    /// Removes what may be stale in the current space, and makes it that of a root, if it was
    /// another's.
    fn renew(&self, key: u64, is_known: bool) -> Result<(), NeedsFrames> {
        let space = self.space();
        let page = if key == NO_ROOT { 0 } else { self.memory.guest_page(key & !0xfff) };
        let host = if page == 0 { 0 } else { page | key & 0xfff };
        let source = GuestSource { guest: key, host };
        let known = space.root.get();
        let root = match known {
            Some(root) => root,
            None => {
                let root = self.take_table(self.current(), self.top.get(), source)?;
                space.root.set(Some(root));
                space.tag.set((0, 0));
                space.linked.set(0);
                root
            }
        };
        let of = self.table(root);
        if !is_known && !breaks("trace-forgets-root") {
            // Its page is another one from now on.
            self.note_change();
            self.forget_table(of);
        }
        // A root that is not in memory may be there at the next load.
        space.key.set(if host == 0 { NO_ROOT } else { key });
        of.source.set(source);
        of.is_split.set(host == 0);
        match known {
            Some(_) if self.options.get().sync && host != 0 => self.sync(root),
            Some(_) => self.clear(root),
            None => {}
        }
        Ok(())
    }

    /// Index of the space for `key`, and whether it is that of `key` already.
    fn choose(&self, key: u64) -> (usize, bool) {
        let kept = &self.spaces[..self.options.get().spaces.into()];
        let known =
            |space: &Space| space.key.get() == key && key != NO_ROOT && space.root.get().is_some();
        let hint = &self.hints[(key >> 12) as usize % self.hints.len()];
        if kept.get(usize::from(hint.get())).is_some_and(known) {
            return (hint.get().into(), true);
        }
        let age = |space: &Space| space.root.get().map(|_| space.used.get());
        let oldest = || (0..kept.len()).min_by_key(|&index| age(&kept[index]));
        let found = kept.iter().position(known);
        let index = found.or_else(oldest).unwrap_or(0);
        hint.set(index as u8);
        (index, found.is_some())
    }

    /// Removes the translation of an address from the current space. Of a split page all go: for
    /// the guest they are one translation.
    pub fn invalidate(&self, address: u64) {
        // A root may refer to other tables than the shared ones, which keep global translations.
        let is_upper = index(address, self.top.get()) >= UPPER_HALF;
        let is_shared = is_upper && !breaks("invalidate-shared");
        if !is_upper && let Some(table) = self.path(address).and_then(|path| path.table.get()) {
            if !breaks("invalidate-small") {
                self.remove(table, index(address, 0), address);
            }
            return;
        }
        let roots = [self.space().root.get(), self.shared.get()];
        for root in roots.into_iter().take(1 + usize::from(is_shared)).flatten() {
            self.invalidate_below(root, address);
        }
    }

    fn invalidate_below(&self, root: Ref, address: u64) {
        let (mut at, mut split) = (root, None);
        for level in (0..=self.top.get()).rev() {
            let is_split = at != root && self.table(at).is_split.get();
            if split.is_none() && is_split && !breaks("invalidate-split") {
                split = Some(at);
            }
            let slot = index(address, level);
            if let Some(child) = self.child(at, slot) {
                at = child;
                continue;
            }
            let entry = self.memory.words(self.table(at).shadow.get())[slot].load(Relaxed);
            let is_present = F::is_present(entry);
            match split {
                // Other addresses of the page may have been filled.
                Some(split) if !breaks("invalidate-split-unfilled") || is_present => {
                    self.detach(split);
                }
                None if !breaks("invalidate-small") => self.remove(at, slot, address),
                _ => {}
            }
            return;
        }
    }

    /// Physical addresses of the leaf for a linear address and of the page, if the current space
    /// has a translation.
    pub fn translate(&self, address: u64) -> Option<(u64, u64)> {
        let (table, at) = self.leaf_in(self.space().root.get(), address)?;
        let leaf = self.memory.word(at).load(Relaxed);
        let within = address & ((1 << (12 + 9 * self.table(table).level.get())) - 1) & !0xfff;
        Some((at, F::address(leaf) + within))
    }

    /// Removes all translations.
    pub fn drop_all(&self) {
        if breaks("drop-spaces") {
            return;
        }
        for space in &self.spaces {
            if let Some(root) = space.root.take() {
                self.put_removed(root);
            }
            space.tag.set((0, 0));
        }
        if let Some(shared) = self.shared.take() {
            self.put_removed(shared);
        }
        self.has_local.set(false);
        self.forget_trace();
        self.note_change();
        self.shared_changes.set(self.shared_changes.get() + 1);
        self.flush.set(Flush::All);
    }

    /// Removes shared tables with leaves that are not global.
    fn drop_local(&self) {
        if !self.has_local.take() || breaks("drop-local") {
            return;
        }
        for number in 0..self.count.get() {
            let table = Ref::new(number);
            let of = self.table(table);
            if of.in_use.get() && of.is_local.get() && of.owner.get() == SHARED {
                self.detach(table);
            }
        }
    }

    /// Adds an obligation to flush the TLB.
    #[inline(always)]
    #[cfg_attr(feature = "testing", track_caller)]
    fn request(&self, new: Flush) {
        #[cfg(feature = "testing")]
        if defects::skips(core::panic::Location::caller(), defects::name(new)) {
            return;
        }
        const LOCAL: Flush = Flush::Space;
        let merged = match (self.flush.get(), new) {
            (Flush::All, _) | (LOCAL, LOCAL | Flush::Page { everywhere: false, .. }) => return,
            (Flush::None, new) => new,
            (old, new) if old == new => return,
            (
                Flush::Page { everywhere: false, .. },
                LOCAL | Flush::Page { everywhere: false, .. },
            ) => LOCAL,
            _ => Flush::All,
        };
        self.flush.set(merged);
    }
}
