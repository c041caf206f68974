//! Shadow tables: allocation, removal and eviction.

use core::cell::Cell;
use core::num::NonZeroU16;
use core::sync::atomic::Ordering::Relaxed;

use super::defects;
use super::{
    ENTRIES, Flush, FrameAccess, GuestSource, MAX_SPACES, NeedsFrames, SHARED, ShadowFormat, Vtlb,
};

/// Lowest bit of the number of the child table in the copy of an entry.
const CHILD_SHIFT: u32 = 52;
/// Mask of that number, after the shift.
const CHILD_MASK: u64 = 0xff;

/// Number of a shadow table, plus 1.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(transparent)]
pub struct Ref(NonZeroU16);

impl Ref {
    /// The table with this number.
    pub fn new(number: u16) -> Self {
        Self(NonZeroU16::MIN.saturating_add(number))
    }

    /// Its number.
    #[inline(always)]
    pub fn index(self) -> usize {
        usize::from(self.0.get()) - 1
    }
}

/// Descriptor of a shadow table.
pub struct Table {
    /// Physical address of the table.
    pub shadow: Cell<u64>,
    /// Physical address of the copies of the guest's entries: the frame after the table's.
    pub copies: Cell<u64>,
    /// Guest table, or guest entry of a split page.
    pub source: Cell<GuestSource>,
    /// Bit mask of the entries in use.
    pub filled: [Cell<u64>; ENTRIES / 64],
    /// Bit mask of the entries that were filled ahead, at least, since the last comparison.
    pub ahead: [Cell<u64>; ENTRIES / 64],
    /// Bit mask of the words of `filled` that are not 0, at least.
    pub words: Cell<u8>,
    /// Table that refers to it; `None`: it is a root.
    pub parent: Cell<Option<Ref>>,
    /// Index of the entry that refers to it.
    pub slot: Cell<u16>,
    /// Next spare table.
    next: Cell<Option<Ref>>,
    /// Index of its space, or [`SHARED`].
    pub owner: Cell<u8>,
    /// Level of its entries.
    pub level: Cell<u8>,
    /// It is part of a split page, or there is no paging.
    pub is_split: Cell<bool>,
    /// It may have leaves that are not global.
    pub is_local: Cell<bool>,
    /// Its writable leaves are counted ([`super::trace`]).
    pub is_counted: Cell<bool>,
    /// It is in use: part of a space.
    pub in_use: Cell<bool>,
    /// Value of [`Vtlb::fills`] at the last fill of a leaf.
    pub used: Cell<u64>,
    /// See [`super::trace`].
    pub trace: super::trace::TableTrace,
}

impl Table {
    /// The used entries.
    #[inline(always)]
    pub fn slots(&self) -> impl Iterator<Item = usize> {
        bits(self.words.get().into()).flat_map(|number| bits_of(&self.filled, number))
    }
}

/// Numbers of the bits that are set in a word of a bit mask.
#[inline(always)]
pub fn bits_of(mask: &[Cell<u64>], number: usize) -> impl Iterator<Item = usize> {
    bits(mask[number].get()).map(move |bit| 64 * number + bit)
}

/// Numbers of the bits that are set in a word.
#[inline(always)]
pub fn bits(mut word: u64) -> impl Iterator<Item = usize> {
    core::iter::from_fn(move || {
        let bit = (word != 0).then(|| word.trailing_zeros() as usize);
        word &= word.wrapping_sub(1);
        bit
    })
}

impl<F: ShadowFormat, M: FrameAccess> Vtlb<F, M> {
    /// Number of the child in a copy.
    pub(super) fn link_of(child: Ref) -> u64 {
        (child.index() as u64 + 1) << CHILD_SHIFT
    }

    /// Table that an entry refers to; `None` for a leaf or an unused entry.
    #[inline]
    pub(super) fn child(&self, table: Ref, slot: usize) -> Option<Ref> {
        let copy = self.memory.words(self.table(table).copies.get())[slot].load(Relaxed);
        Self::child_in(copy)
    }

    /// Table that a copy refers to.
    #[inline]
    pub(super) fn child_in(copy: u64) -> Option<Ref> {
        NonZeroU16::new((copy >> CHILD_SHIFT & CHILD_MASK) as u16).map(Ref)
    }

    /// Number of tables of the pool.
    pub fn size(&self) -> u16 {
        self.count.get()
    }

    /// Number of tables that can be allocated without an eviction, at least.
    pub fn free_tables(&self) -> u16 {
        self.spare_count.get()
    }

    /// Number of tables that the pool still lacks.
    pub fn missing_tables(&self) -> u16 {
        self.limit.get() - self.count.get()
    }

    /// Adds a table to the pool: [`FRAMES_PER_TABLE`](super::FRAMES_PER_TABLE) zeroed frames at a
    /// physical address.
    pub fn add_table(&self, frames: u64) {
        let number = self.count.get();
        if number >= self.limit.get() {
            return;
        }
        self.count.set(number + 1);
        let table = Ref::new(number);
        self.table(table).shadow.set(frames);
        self.table(table).copies.set(frames + 8 * ENTRIES as u64);
        self.spare_count.set(self.spare_count.get() + 1);
        // Behind removed ones: tracing counts their leaves until they are emptied.
        let mut link = &self.spare;
        while let Some(spare) = link.get() {
            link = &self.table(spare).next;
        }
        link.set(Some(table));
    }

    /// No more frames can be added: tables are evicted from now on.
    pub fn close_pool(&self) {
        self.limit.set(self.count.get());
    }

    /// Physical addresses of the frames of all tables of the pool, for the end of the vCPU.
    pub fn frames(&self) -> impl Iterator<Item = u64> {
        self.tables.iter().take(self.count.get().into()).map(|table| table.shadow.get())
    }

    /// Removes a table, with all below it: it is spare.
    pub(super) fn put_removed(&self, table: Ref) {
        let of = self.table(table);
        self.note_change();
        of.in_use.set(false);
        self.leave(table);
        self.forget_table(of);
        self.spare_count.set(self.spare_count.get() + 1);
        of.next.set(self.spare.replace(Some(table)));
    }

    /// Makes a table a member of its space, or not.
    fn set_member(&self, table: Ref, is_member: bool) {
        let owner = self.table(table).owner.get();
        self.note_trace();
        if owner != SHARED {
            let members = &self.spaces[usize::from(owner) % MAX_SPACES].members;
            let (word, bit) = (&members[table.index() / 64], 1 << (table.index() % 64));
            word.set(if is_member { word.get() | bit } else { word.get() & !bit });
        }
    }

    /// Makes a removed table, and all below it, no members of their space any more.
    fn leave(&self, table: Ref) {
        defects::step();
        let of = self.table(table);
        self.set_member(table, false);
        if of.level.get() == 0 {
            return;
        }
        for slot in of.slots() {
            if let Some(child) = self.child(table, slot)
                && self.table(child).parent.get() == Some(table)
            {
                self.leave(child);
            }
        }
    }

    /// Allocates an empty table.
    pub(super) fn take_table(
        &self,
        owner: u8,
        level: u32,
        source: GuestSource,
    ) -> Result<Ref, NeedsFrames> {
        if self.spare.get().is_none() {
            if self.missing_tables() > 0 {
                return Err(NeedsFrames);
            }
            self.evict(level == self.top.get() && owner != SHARED);
        }
        let found = self.spare.get().ok_or(NeedsFrames)?;
        let table = self.table(found);
        self.spare.set(table.next.get());
        self.spare_count.set(self.spare_count.get() - 1);
        self.empty(found);
        table.source.set(source);
        table.parent.set(None);
        table.slot.set(0);
        table.owner.set(owner);
        table.level.set(level as u8);
        table.is_split.set(false);
        table.is_local.set(false);
        table.is_counted.set(self.options.get().trace);
        table.used.set(self.fills.get());
        table.in_use.set(true);
        self.set_member(found, true);
        Ok(found)
    }

    /// Clears the entries of a spare table; the tables below it become spare ones.
    fn empty(&self, table: Ref) {
        let of = self.table(table);
        let (shadow, copies) =
            (self.memory.words(of.shadow.get()), self.memory.words(of.copies.get()));
        for slot in of.slots() {
            defects::step();
            let (entry, copy) = (shadow[slot].swap(0, Relaxed), copies[slot].swap(0, Relaxed));
            match Self::child_in(copy) {
                None => self.leaf_removed(of, slot, entry, copy),
                Some(child) if self.table(child).parent.get() == Some(table) => {
                    if self.table(child).in_use.get() {
                        self.put_removed(child);
                    }
                }
                Some(_) => {}
            }
        }
        of.filled.iter().chain(&of.ahead).for_each(|word| word.set(0));
        of.words.set(0);
    }

    /// Removes the least useful table: in the space that was used longest ago, of the lowest level,
    /// the one that was filled longest ago. One that was just filled stays, since the guest's
    /// instruction may need it together with the next; but a load needs none (`for_root`).
    #[cold]
    fn evict(&self, for_root: bool) {
        let age = |table: &Table| match table.owner.get() {
            SHARED => self.clock.get(),
            owner => self.spaces[usize::from(owner) % MAX_SPACES].used.get(),
        };
        let all = (0..self.count.get()).map(Ref::new);
        let victim = all.filter(|&table| self.is_evictable(table, for_root)).min_by_key(|&table| {
            let of = self.table(table);
            (age(of), of.level.get(), of.used.get())
        });
        if let Some(victim) = victim {
            self.evictions.set(self.evictions.get() + 1);
            self.detach(victim);
        }
    }

    fn is_evictable(&self, table: Ref, for_root: bool) -> bool {
        let of = self.table(table);
        let is_current_root = self.space().root.get() == Some(table);
        // The current fill needs those that it has used.
        defects::step();
        let is_used = of.used.get() == self.fills.get() && !for_root;
        let is_needed = is_current_root || is_used;
        of.in_use.get() && !is_needed && self.shared.get() != Some(table)
    }

    /// Removes a table from its parent, or its space if it is a root.
    #[cfg_attr(feature = "testing", track_caller)]
    pub(super) fn detach(&self, table: Ref) {
        let of = self.table(table);
        self.request_for(of.owner.get(), Flush::Space);
        self.put_removed(table);
        match of.parent.get() {
            Some(parent) => self.unlink(parent, of.slot.get().into()),
            None => {
                for space in self.spaces.iter().filter(|space| space.root.get() == Some(table)) {
                    space.root.set(None);
                }
            }
        }
    }

    /// Requests a flush for tables of an owner.
    #[cfg_attr(feature = "testing", track_caller)]
    pub(super) fn request_for(&self, owner: u8, flush: Flush) {
        match (owner, flush) {
            (SHARED, Flush::Page { address, .. }) => {
                self.request(Flush::Page { address, everywhere: true });
            }
            (SHARED, _) => self.request(Flush::All),
            _ if owner == self.current() => self.request(flush),
            #[cfg(feature = "testing")]
            _ if defects::skips(core::panic::Location::caller(), "tag") => {}
            _ => self.spaces[usize::from(owner) % MAX_SPACES].tag.set((0, 0)),
        }
    }
}
