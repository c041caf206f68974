//! Walk of x86 page tables as the CPU performs it (AMD APM vol. 2, chapter 5), as pure functions
//! over a trait that accesses the tables. The VMM and the wedge share it.
//!
//! All modes: no paging, 32-bit with 4 MiB pages, PAE, 4-level with 2 MiB and 1 GiB pages. Rights
//! follow WP, SMEP, SMAP and NX; accessed and dirty bits are set as by hardware, only once the
//! whole translation is allowed. Missing: protection keys (an access ignores them), 5-level paging
//! (hidden from guests).
#![cfg_attr(not(test), no_std)]
#![forbid(unsafe_code)]

mod copy;
mod leaf;

use hw_x86::msr::efer;
use hw_x86::paging::{cr0, cr4, entry, fault};

pub use copy::PageRights;
pub use leaf::{Leaf, leaf, set_accessed};

/// `RFLAGS.AC`: supervisor accesses to user pages are permitted (SMAP).
const RFLAGS_AC: u64 = 1 << 18;
/// Retries of a walk whose table changed under it. After that the bits stay unset
/// ([`Translation::is_marked`]).
const RETRIES: u32 = 8;
/// Number of levels of the deepest tables.
const MAX_LEVELS: usize = 4;

/// Access to page tables. Other CPUs may change an entry at any time.
pub trait PageTables {
    /// Reads the entry of `bytes` (4 or 8) at a physical address. `None` outside of memory.
    fn read(&self, at: u64, bytes: u64) -> Option<u64>;
    /// Replaces the entry of `bytes` (4 or 8) at `at` by `new` if its value is `old`, and returns
    /// whether it was.
    fn replace(&self, at: u64, bytes: u64, old: u64, new: u64) -> bool;
    /// Address bits of an 8-byte entry that are reserved: those beyond the processor's physical
    /// addresses.
    fn reserved(&self) -> u64 {
        0
    }
}

/// CPU state that a translation depends on.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Paging {
    /// `CR0`.
    pub cr0: u64,
    /// `CR3`.
    pub cr3: u64,
    /// `CR4`.
    pub cr4: u64,
    /// `EFER`.
    pub efer: u64,
    /// `RFLAGS`.
    pub rflags: u64,
    /// True at privilege level 3.
    pub user: bool,
}

/// Kind of access.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Intent {
    /// Reads data.
    Read,
    /// Writes data.
    Write,
    /// Fetches an instruction.
    Fetch,
}

/// A faulting access: values of `CR2` and the error code.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct PageFault {
    /// Linear address.
    pub address: u64,
    /// Error code.
    pub code: u32,
}

/// A table entry that a walk has read.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Entry {
    /// Its physical address.
    pub at: u64,
    /// Its value.
    pub value: u64,
}

/// A translation that is allowed.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Translation {
    /// Physical address.
    pub address: u64,
    /// `log2` of the page size in bytes. Without paging: 12.
    pub page_shift: u32,
    /// [`entry::WRITE`] and [`entry::USER`], as far as all levels grant them.
    pub rights: u64,
    /// A level forbids fetches. Meaningless unless `EFER.NXE` is set.
    pub no_execute: bool,
    /// Entries from the root to the leaf.
    entries: [Entry; MAX_LEVELS],
    depth: usize,
    /// See [`Translation::is_marked`].
    is_marked: bool,
}

impl Translation {
    /// Returns whether the walk has set the accessed and dirty bits that the access requires. If it
    /// has not, another CPU has changed an entry each time: then the access is to be repeated, or
    /// performed as if that CPU had cleared the bits afterwards.
    pub fn is_marked(&self) -> bool {
        self.is_marked
    }

    /// The entries that the walk has read, from the root to the leaf; their values are those before
    /// accessed and dirty bits were set. Empty without paging.
    pub fn entries(&self) -> &[Entry] {
        &self.entries[..self.depth]
    }

    /// Number of bytes from the address to the end of its page, at least 1.
    pub fn left(&self) -> u64 {
        let size = 1 << self.page_shift;
        size - (self.address & (size - 1))
    }
}

/// Geometry of the tables.
#[derive(Clone, Copy)]
struct Shape {
    levels: u32,
    index_bits: u32,
    entry_bytes: u64,
    root: u64,
}

impl Shape {
    fn shift(&self, level: u32) -> u32 {
        12 + self.index_bits * (level - 1)
    }

    /// PAE pointers have no rights and no accessed bit, only an address (APM vol. 2 §5.2.3).
    #[inline(always)]
    fn is_pointer(&self, level: u32) -> bool {
        self.levels == 3 && level == 3
    }

    /// Returns true if bits are set that are reserved in any entry of this level: addresses beyond
    /// the processor's, and the page size of a level 4 entry.
    #[inline(always)]
    fn has_reserved(&self, level: u32, value: u64, beyond: u64) -> bool {
        let large = if level == 4 { entry::LARGE } else { 0 };
        self.entry_bytes == 8 && value & (beyond | large) != 0
    }

    fn table(&self, value: u64) -> u64 {
        value & if self.entry_bytes == 4 { 0xffff_f000 } else { entry::ADDRESS }
    }
}

impl Paging {
    fn shape(&self) -> Option<Shape> {
        if self.cr0 & cr0::PG == 0 {
            return None;
        }
        Some(if self.efer & efer::LMA != 0 {
            Shape { levels: 4, index_bits: 9, entry_bytes: 8, root: self.cr3 & entry::ADDRESS }
        } else if self.cr4 & cr4::PAE != 0 {
            Shape { levels: 3, index_bits: 9, entry_bytes: 8, root: self.cr3 & 0xffff_ffe0 }
        } else {
            Shape { levels: 2, index_bits: 10, entry_bytes: 4, root: self.cr3 & 0xffff_f000 }
        })
    }

    /// Translates a linear address. `mark`: set accessed and dirty bits.
    ///
    /// # Errors
    /// The exception that the access raises.
    pub fn translate(
        &self,
        tables: &impl PageTables,
        linear: u64,
        intent: Intent,
        mark: bool,
    ) -> Result<Translation, PageFault> {
        let Some(shape) = self.shape() else {
            let address = linear & 0xffff_ffff;
            let rights = entry::WRITE | entry::USER;
            let flat = Translation { address, page_shift: 12, rights, ..Default::default() };
            return Ok(Translation { is_marked: true, ..flat });
        };
        if shape.levels == 4 {
            // A copy of the code for these constants, which is three times as fast.
            let shape = Shape { levels: 4, index_bits: 9, entry_bytes: 8, root: shape.root };
            return self.translate_in(tables, shape, linear, intent, mark);
        }
        self.translate_in_others(tables, shape, linear & 0xffff_ffff, intent, mark)
    }

    #[inline(never)]
    fn translate_in_others(
        &self,
        tables: &impl PageTables,
        shape: Shape,
        linear: u64,
        intent: Intent,
        mark: bool,
    ) -> Result<Translation, PageFault> {
        self.translate_in(tables, shape, linear, intent, mark)
    }

    #[inline(always)]
    fn translate_in(
        &self,
        tables: &impl PageTables,
        shape: Shape,
        linear: u64,
        intent: Intent,
        mark: bool,
    ) -> Result<Translation, PageFault> {
        let mut found = self.walk(tables, shape, linear, intent)?;
        found.is_marked = true;
        if !mark || set_bits(tables, shape, found.entries(), intent == Intent::Write) {
            return Ok(found);
        }
        self.retry(tables, shape, linear, intent)
    }

    /// Repeats a walk whose table has changed under it.
    #[cold]
    #[inline(never)]
    fn retry(
        &self,
        tables: &impl PageTables,
        shape: Shape,
        linear: u64,
        intent: Intent,
    ) -> Result<Translation, PageFault> {
        let mut found = self.walk(tables, shape, linear, intent)?;
        for _ in 1..RETRIES {
            if set_bits(tables, shape, found.entries(), intent == Intent::Write) {
                found.is_marked = true;
                break;
            }
            found = self.walk(tables, shape, linear, intent)?;
        }
        Ok(found)
    }

    /// Reads and checks the tables.
    #[inline(always)]
    fn walk(
        &self,
        tables: &impl PageTables,
        shape: Shape,
        linear: u64,
        intent: Intent,
    ) -> Result<Translation, PageFault> {
        let refuse = |code: u64| PageFault { address: linear, code: self.code(intent, code) };
        let rights = entry::WRITE | entry::USER;
        let mut found = Translation { address: shape.root, rights, ..Default::default() };
        // Unrolled: of four levels each is constant.
        let mut step = |level| self.step(tables, shape, (linear, level), &mut found);
        let is_leaf = (shape.levels == 4 && step(4).map_err(refuse)?)
            || (shape.levels >= 3 && step(3).map_err(refuse)?)
            || step(2).map_err(refuse)?
            || step(1).map_err(refuse)?;
        if is_leaf && self.allows(intent, found.rights, found.no_execute) {
            Ok(found)
        } else {
            Err(refuse(fault::PRESENT))
        }
    }

    /// Reads the entry for an address at one level, in the table at `found.address`. Returns
    /// whether it is the leaf; then that is the address of the access, else that of the next table.
    /// Fails with the error code of an absent or malformed entry.
    #[inline(always)]
    fn step(
        &self,
        tables: &impl PageTables,
        shape: Shape,
        (linear, level): (u64, u32),
        found: &mut Translation,
    ) -> Result<bool, u64> {
        let index = linear >> shape.shift(level) & ((1 << shape.index_bits) - 1);
        let at = found.address + index * shape.entry_bytes;
        // Outside of memory no device responds, so all bits read as 1, which faults as reserved or
        // leads to an address that is not mapped either.
        let ones = u64::MAX >> (64 - 8 * shape.entry_bytes);
        let value = tables.read(at, shape.entry_bytes).unwrap_or(ones);
        found.entries[found.depth] = Entry { at, value };
        found.depth += 1;
        if value & entry::PRESENT == 0 {
            return Err(0);
        }
        let no_execute = shape.entry_bytes == 8 && value & entry::NX != 0;
        let forbidden_nx = no_execute && self.efer & efer::NXE == 0;
        if forbidden_nx || shape.has_reserved(level, value, tables.reserved()) {
            return Err(RESERVED);
        }
        if !shape.is_pointer(level) {
            found.rights &= value;
            found.no_execute |= no_execute;
        }
        if !self.is_leaf(shape, level, value) {
            found.address = shape.table(value);
            return Ok(false);
        }
        found.page_shift = shape.shift(level);
        let offset = linear & ((1 << found.page_shift) - 1);
        found.address = leaf_base(shape, level, value).ok_or(RESERVED)? | offset;
        Ok(true)
    }

    #[inline(always)]
    fn is_leaf(&self, shape: Shape, level: u32, value: u64) -> bool {
        match (shape.levels, level) {
            (_, 1) => true,
            (2, 2) => value & entry::LARGE != 0 && self.cr4 & cr4::PSE != 0,
            (3, 2) | (4, 2 | 3) => value & entry::LARGE != 0,
            _ => false,
        }
    }

    /// Returns true if a page with these rights allows the access (APM vol. 2 §5.6).
    fn allows(&self, intent: Intent, rights: u64, no_execute: bool) -> bool {
        let user_page = rights & entry::USER != 0;
        if self.user && !user_page {
            return false;
        }
        match intent {
            Intent::Fetch => {
                let forbidden = no_execute && self.efer & efer::NXE != 0;
                let smep = !self.user && user_page && self.cr4 & cr4::SMEP != 0;
                !forbidden && !smep
            }
            Intent::Read | Intent::Write => {
                let smap = !self.user
                    && user_page
                    && self.cr4 & cr4::SMAP != 0
                    && self.rflags & RFLAGS_AC == 0;
                let protects = self.user || self.cr0 & cr0::WP != 0;
                let read_only = intent == Intent::Write && rights & entry::WRITE == 0 && protects;
                !smap && !read_only
            }
        }
    }

    fn code(&self, intent: Intent, why: u64) -> u32 {
        let mut code = why;
        if self.user {
            code |= fault::USER;
        }
        match intent {
            Intent::Read => {}
            Intent::Write => code |= fault::WRITE,
            Intent::Fetch if self.efer & efer::NXE != 0 || self.cr4 & cr4::SMEP != 0 => {
                code |= fault::FETCH;
            }
            Intent::Fetch => {}
        }
        code as u32
    }
}

/// Error code of a reserved bit.
const RESERVED: u64 = fault::PRESENT | fault::RESERVED;

/// Returns the address of the page that a leaf maps, or `None` if reserved bits are set.
#[inline(always)]
fn leaf_base(shape: Shape, level: u32, value: u64) -> Option<u64> {
    if shape.entry_bytes == 4 && level == 2 {
        // Bits 20:13 are bits 39:32 of the address (PSE-36).
        return Some(value & 0xffc0_0000 | (value >> 13 & 0xff) << 32);
    }
    let offset_mask = (1_u64 << shape.shift(level)) - 1;
    // Bit 12 of a large page's entry is its PAT bit; the other bits must be 0.
    if level > 1 && value & entry::ADDRESS & offset_mask & !(1 << 12) != 0 {
        return None;
    }
    Some(value & entry::ADDRESS & !offset_mask)
}

/// Sets accessed bits, and the leaf's dirty bit; `false` if an entry has changed meanwhile.
#[inline(always)]
fn set_bits(tables: &impl PageTables, shape: Shape, entries: &[Entry], dirty: bool) -> bool {
    let mut missing = 0;
    for (depth, entry) in entries.iter().enumerate() {
        missing |= !entry.value & marks(shape, depth, entries.len(), dirty);
    }
    missing == 0
        || entries.iter().enumerate().all(|(depth, &Entry { at, value })| {
            let wanted = marks(shape, depth, entries.len(), dirty);
            value & wanted == wanted || tables.replace(at, shape.entry_bytes, value, value | wanted)
        })
}

/// Bits that an access sets in the entry at a depth below the root, of a translation with `count`
/// entries. A pointer has none.
#[inline(always)]
fn marks(shape: Shape, depth: usize, count: usize, dirty: bool) -> u64 {
    match depth {
        0 if shape.levels == 3 => 0,
        _ if dirty && depth + 1 == count => entry::ACCESSED | entry::DIRTY,
        _ => entry::ACCESSED,
    }
}

#[cfg(test)]
mod tests;
