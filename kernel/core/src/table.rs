//! Page tables of tasks and VMs: one algorithm for any format with tables of 512 entries.
//!
//! A mapping is 2^order pages, naturally aligned on both sides. It is written with the largest
//! leaves that its order allows, so its entries are in one table or fill whole tables of the
//! largest leaf level. Every store takes a table from one valid state to another.

use abi::Status;

use crate::Result;

/// Index bits per level.
const LEVEL_BITS: u32 = 9;

/// Access rights and memory type of a mapping.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Access {
    /// Stores are allowed.
    pub write: bool,
    /// Instruction fetches are allowed.
    pub execute: bool,
    /// Device memory: uncached.
    pub device: bool,
    /// User mode may access it.
    pub user: bool,
    /// The translation is global.
    pub global: bool,
}

/// A page-table format. Level 0 holds 4 KiB leaves.
pub trait Format {
    /// Level of the root table.
    const ROOT_LEVEL: u32;
    /// Highest level at which this machine supports leaves.
    fn max_leaf_level() -> u32;
    /// Returns whether a walker may use an entry of the old kind for a while after a leaf has
    /// replaced a table, until the TLBs are flushed. If not, the processor requires
    /// break-before-make: the TLBs must be flushed between the removal of the table and the leaf.
    fn may_replace_table() -> bool;
    /// Returns a leaf entry at `level`.
    fn leaf(physical: u64, access: Access, level: u32) -> u64;
    /// Returns an entry that refers to the next table.
    fn table(physical: u64) -> u64;
    /// Returns whether the entry is present.
    fn is_present(entry: u64) -> bool;
    /// Returns whether a present entry at `level` is a leaf.
    fn is_leaf(entry: u64, level: u32) -> bool;
    /// Physical address in a present entry.
    fn address(entry: u64) -> u64;
}

/// Storage of page tables.
pub trait Tables {
    /// Index of the first non-zero entry in `range` of the table at physical address `table`.
    fn first(&self, table: u64, mut range: core::ops::Range<usize>) -> Option<usize> {
        range.find(|&index| self.read(table, index) != 0)
    }
    /// Reads entry `index` of the table at physical address `table`.
    fn read(&self, table: u64, index: usize) -> u64;
    /// Writes an entry.
    fn write(&self, table: u64, index: usize, entry: u64);
    /// Writes `count` entries from index `first`, in order: `entry(0)`, `entry(1)`, ...
    fn write_all(&self, table: u64, first: usize, count: u64, entry: impl Fn(u64) -> u64) {
        for offset in 0..count {
            self.write(table, first + offset as usize, entry(offset));
        }
    }
    /// Allocates a zeroed table.
    fn alloc(&self) -> Result<u64>;
    /// Frees a table. A page-table walker may still use it until the TLB flush.
    fn free(&self, table: u64);
}

/// Obligation to flush the TLBs that may hold unmapped translations of an address space, before
/// their absence matters.
#[must_use = "stale translations survive until the space is flushed"]
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Flush(Option<u64>);

impl Flush {
    /// No flush needed.
    pub const NONE: Self = Self(None);

    /// Obligation for the address space with this root table.
    pub const fn of(root: u64) -> Self {
        Self(Some(root))
    }

    /// Root table of the address space to be flushed; `None` if no flush is needed.
    pub const fn root(self) -> Option<u64> {
        self.0
    }

    /// Returns whether a flush is needed.
    pub const fn is_needed(self) -> bool {
        self.0.is_some()
    }
}

fn index(page: u64, level: u32) -> usize {
    (page >> (LEVEL_BITS * level) & 511) as usize
}

/// Level of the entries of a mapping of this order, and their number.
fn shape<F: Format>(order: u8) -> (u32, u64) {
    let level = (order as u32 / LEVEL_BITS).min(F::max_leaf_level());
    (level, 1 << (order as u32 - level * LEVEL_BITS))
}

/// Maps `2^order` pages from page number `page` to physical address `physical`. The range must be
/// unmapped and free of empty tables ([`make_room`]). Fails with `NoQuota` if a table cannot be
/// allocated; then nothing is mapped, but empty tables may remain.
pub fn map<F: Format>(
    tables: &impl Tables,
    root: u64,
    page: u64,
    physical: u64,
    order: u8,
    access: Access,
) -> Result<()> {
    let (level, entries) = shape::<F>(order);
    let size = abi::PAGE_SIZE << (level * LEVEL_BITS);
    // All tables first, then all entries: an entry is usable by other CPUs as soon as it is
    // written, so none may be written before all allocations have succeeded.
    for_each_table(page, level, entries, |start, _, _| {
        walk::<F>(tables, root, start, level, true).map(|_| ())
    })?;
    for_each_table(page, level, entries, |start, done, count| {
        let table = walk::<F>(tables, root, start, level, false)?;
        let first = index(start, level);
        debug_assert!(
            (first..first + count as usize).all(|slot| tables.read(table, slot) == 0),
            "the range is mapped"
        );
        let leaf = |offset| F::leaf(physical + (done + offset) * size, access, level);
        tables.write_all(table, first, count, leaf);
        Ok(())
    })
}

/// Number of page-table entries of a mapping of this order.
pub fn entries<F: Format>(order: u8) -> u64 {
    shape::<F>(order).1
}

/// Frees the empty tables in the range of a mapping, one at a time while `may_continue` returns
/// `true`. Returns whether the range can be mapped now, and whether page-table walkers may have
/// cached any of the tables. If tables were freed and [`Format::may_replace_table`] is `false`, the
/// range can be mapped only after the flush: the caller then repeats the call.
pub fn make_room<F: Format>(
    tables: &impl Tables,
    root: u64,
    page: u64,
    order: u8,
    may_continue: &mut impl FnMut() -> bool,
) -> (bool, Flush) {
    let (level, entries) = shape::<F>(order);
    let mut flush = Flush::NONE;
    if level == 0 {
        return (true, flush);
    }
    let done = for_each_table(page, level, entries, |start, _, count| {
        let Ok(table) = walk::<F>(tables, root, start, level, false) else { return Ok(()) };
        let first = index(start, level);
        for slot in first..first + count as usize {
            while F::is_present(tables.read(table, slot)) {
                if !may_continue() {
                    return Err(Status::Busy);
                }
                free_lowest::<F>(tables, table, slot, level);
                flush = Flush::of(root);
            }
        }
        Ok(())
    });
    (done.is_ok() && (F::may_replace_table() || !flush.is_needed()), flush)
}

/// Calls `visit(page, entries before, entries)` for the part of a mapping in each table of `level`.
fn for_each_table(
    page: u64,
    level: u32,
    entries: u64,
    mut visit: impl FnMut(u64, u64, u64) -> Result<()>,
) -> Result<()> {
    let mut done = 0;
    while done < entries {
        // The entries from here to the end of this table.
        let start = page + (done << (level * LEVEL_BITS));
        let count = (512 - index(start, level) as u64).min(entries - done);
        visit(start, done, count)?;
        done += count;
    }
    Ok(())
}

/// Removes a mapping made by [`map`] with the same page and order.
pub fn unmap<F: Format>(tables: &impl Tables, root: u64, page: u64, order: u8) -> Flush {
    let (level, entries) = shape::<F>(order);
    let mut flush = Flush::NONE;
    let cleared = for_each_table(page, level, entries, |start, _, count| {
        let table = walk::<F>(tables, root, start, level, false)?;
        let first = index(start, level);
        tables.write_all(table, first, count, |_| 0);
        flush = Flush::of(root);
        Ok(())
    });
    debug_assert!(cleared.is_ok(), "nothing was mapped here");
    flush
}

/// Returns the table at `level` that covers `page`, allocating missing tables if `make` is set.
fn walk<F: Format>(of: &impl Tables, root: u64, page: u64, level: u32, make: bool) -> Result<u64> {
    let mut table = root;
    for at in (level + 1..=F::ROOT_LEVEL).rev() {
        let slot = index(page, at);
        let entry = of.read(table, slot);
        table = if F::is_present(entry) {
            if F::is_leaf(entry, at) {
                return Err(Status::Busy);
            }
            F::address(entry)
        } else if make {
            let new = of.alloc()?;
            of.write(table, slot, F::table(new));
            new
        } else {
            return Err(Status::BadArgument);
        };
    }
    Ok(table)
}

/// Returns the physical address of `page`, its leaf entry and the level of that. `read` reads an
/// entry of the table at a physical address.
pub fn translate<F: Format>(
    read: impl Fn(u64, usize) -> u64,
    root: u64,
    page: u64,
) -> Option<(u64, u64, u32)> {
    let mut table = root;
    for level in (0..=F::ROOT_LEVEL).rev() {
        let entry = read(table, index(page, level));
        if !F::is_present(entry) {
            return None;
        }
        if F::is_leaf(entry, level) {
            let within = page & ((1 << (level * LEVEL_BITS)) - 1);
            return Some((F::address(entry) + within * abi::PAGE_SIZE, entry, level));
        }
        table = F::address(entry);
    }
    None
}

/// Frees the tables below `range` of the root, which must map nothing, one at a time while
/// `may_continue` returns `true`. Returns `false` if tables remain.
pub fn clear<F: Format>(
    tables: &impl Tables,
    root: u64,
    range: core::ops::Range<usize>,
    may_continue: &mut impl FnMut() -> bool,
) -> bool {
    // One table per round, lowest first, so that every interruption leaves a consistent tree.
    while let Some(slot) = tables.first(root, range.clone()) {
        if !may_continue() {
            return false;
        }
        free_lowest::<F>(tables, root, slot, F::ROOT_LEVEL);
    }
    true
}

fn free_lowest<F: Format>(tables: &impl Tables, mut parent: u64, mut slot: usize, mut level: u32) {
    loop {
        let table = F::address(tables.read(parent, slot));
        level -= 1;
        let below = if level > 0 { tables.first(table, 0..512) } else { None };
        match below {
            Some(index) => {
                debug_assert!(!F::is_leaf(tables.read(table, index), level), "an empty table");
                (parent, slot) = (table, index);
            }
            None => {
                tables.write(parent, slot, 0);
                tables.free(table);
                return;
            }
        }
    }
}

#[cfg(test)]
mod tests;
