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

/// Rights that all entries of a translation grant: [`Rights::WRITE`], [`Rights::USER`] and
/// [`Rights::EXECUTE`]; other bits have no meaning.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Rights(pub u64);

impl Rights {
    /// Writes.
    pub const WRITE: u64 = entry::WRITE;
    /// Accesses at privilege level 3.
    pub const USER: u64 = entry::USER;
    /// Fetches.
    pub const EXECUTE: u64 = entry::NX;

    /// Rights of one more entry: NX is the only bit that takes one away.
    #[inline(always)]
    fn and(self, value: u64) -> Self {
        Self(self.0 & (value ^ entry::NX))
    }

    /// Returns whether these rights are granted.
    #[inline(always)]
    pub fn has(self, rights: u64) -> bool {
        rights & !self.0 == 0
    }
}

impl Default for Rights {
    /// Those without any entry: all.
    fn default() -> Self {
        Self(Self::WRITE | Self::USER | Self::EXECUTE)
    }
}

/// A page that an access is allowed to.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct WalkedPage {
    /// Physical address of the access.
    pub address: u64,
    /// Rights of all levels.
    pub rights: Rights,
    /// Entry that maps the page, with the accessed and dirty bits that the access requires.
    pub value: u64,
}

/// A translation that is allowed.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Translation {
    /// Physical address.
    pub address: u64,
    /// `log2` of the page size in bytes. Without paging: 12.
    pub page_shift: u32,
    /// Rights of all levels.
    pub rights: Rights,
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

    /// The entries that the walk has read, from the root to the leaf, with the accessed and dirty
    /// bits that it has set. Empty without paging.
    pub fn entries(&self) -> &[Entry] {
        &self.entries[..self.depth]
    }

    /// The page of the access. Without paging its entry has all rights, and is dirty.
    pub fn page(&self) -> WalkedPage {
        let value = self.entries().last().map_or(entry::DIRTY, |leaf| leaf.value);
        WalkedPage { address: self.address, rights: self.rights, value }
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
        let mut found = Translation::default();
        self.translate_to(tables, (linear, intent), mark, &mut found)?;
        Ok(found)
    }

    /// Like [`Paging::translate`], into `found`. After an error that has the entries that were
    /// read.
    ///
    /// # Errors
    /// The exception that the access raises.
    pub fn translate_to(
        &self,
        tables: &impl PageTables,
        (linear, intent): (u64, Intent),
        mark: bool,
        found: &mut Translation,
    ) -> Result<(), PageFault> {
        let Some(shape) = self.shape() else {
            let address = linear & 0xffff_ffff;
            *found = Translation { address, page_shift: 12, is_marked: true, ..Default::default() };
            return Ok(());
        };
        if shape.levels == 4 {
            // A copy of the code for these constants, which is three times as fast.
            let shape = Shape { levels: 4, index_bits: 9, entry_bytes: 8, root: shape.root };
            return self.translate_in(tables, shape, (linear, intent), mark, found);
        }
        self.translate_in_others(tables, shape, (linear & 0xffff_ffff, intent), mark, found)
    }

    #[inline(never)]
    fn translate_in_others(
        &self,
        tables: &impl PageTables,
        shape: Shape,
        access: (u64, Intent),
        mark: bool,
        found: &mut Translation,
    ) -> Result<(), PageFault> {
        self.translate_in(tables, shape, access, mark, found)
    }

    #[inline(always)]
    fn translate_in(
        &self,
        tables: &impl PageTables,
        shape: Shape,
        access: (u64, Intent),
        mark: bool,
        found: &mut Translation,
    ) -> Result<(), PageFault> {
        self.walk(tables, shape, access, found)?;
        found.is_marked = !mark || set_bits(tables, shape, found, access.1 == Intent::Write);
        if found.is_marked { Ok(()) } else { self.retry(tables, shape, access, found) }
    }

    /// Repeats a walk whose table has changed under it.
    #[cold]
    #[inline(never)]
    fn retry(
        &self,
        tables: &impl PageTables,
        shape: Shape,
        access: (u64, Intent),
        found: &mut Translation,
    ) -> Result<(), PageFault> {
        for _ in 1..RETRIES {
            self.walk(tables, shape, access, found)?;
            found.is_marked = set_bits(tables, shape, found, access.1 == Intent::Write);
            if found.is_marked {
                break;
            }
        }
        Ok(())
    }

    /// Translates a linear address by its entry of the lowest level alone, which has 8 bytes, and
    /// sets accessed and dirty bits. `above`: rights that the levels above grant. `None` if another
    /// CPU has changed the entry meanwhile.
    ///
    /// # Errors
    /// The exception that the access raises.
    #[inline(always)]
    pub fn translate_last(
        &self,
        tables: &impl PageTables,
        (linear, intent): (u64, Intent),
        above: Rights,
        Entry { at, value }: Entry,
    ) -> Result<Option<WalkedPage>, PageFault> {
        let rights = above.and(value);
        let is_malformed = value & (entry::PRESENT | self.reserved(tables, 1)) != entry::PRESENT;
        if is_malformed || !self.allows(intent, rights) {
            let code = match value & self.reserved(tables, 1) {
                _ if value & entry::PRESENT == 0 => 0,
                0 => fault::PRESENT,
                _ => RESERVED,
            };
            return Err(PageFault { address: linear, code: self.code(intent, code) });
        }
        let marked = value | marks(intent == Intent::Write);
        let address = value & entry::ADDRESS | linear & 0xfff;
        let is_marked = value == marked || tables.replace(at, 8, value, marked);
        Ok(is_marked.then_some(WalkedPage { address, rights, value: marked }))
    }

    /// Reads and checks the tables.
    #[inline(always)]
    fn walk(
        &self,
        tables: &impl PageTables,
        shape: Shape,
        (linear, intent): (u64, Intent),
        found: &mut Translation,
    ) -> Result<(), PageFault> {
        (found.address, found.depth, found.rights) = (shape.root, 0, Rights::default());
        let code = match self.steps(tables, shape, linear, found) {
            Ok(_) if self.allows(intent, found.rights) => return Ok(()),
            Ok(_) => fault::PRESENT,
            Err(code) => code,
        };
        Err(PageFault { address: linear, code: self.code(intent, code) })
    }

    /// Reads the entries for an address from the root to the leaf. Fails as [`Paging::step`].
    #[inline(always)]
    fn steps(
        &self,
        tables: &impl PageTables,
        shape: Shape,
        linear: u64,
        found: &mut Translation,
    ) -> Result<bool, u64> {
        // Unrolled: of four levels each is constant.
        Ok((shape.levels == 4 && self.step(tables, shape, (linear, 4), found)?)
            || (shape.levels >= 3 && self.step(tables, shape, (linear, 3), found)?)
            || self.step(tables, shape, (linear, 2), found)?
            || self.step(tables, shape, (linear, 1), found)?)
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
        if shape.entry_bytes == 8 && value & self.reserved(tables, level) != 0 {
            return Err(RESERVED);
        }
        if !shape.is_pointer(level) {
            found.rights = found.rights.and(value);
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

    /// Bits that are reserved in any entry of 8 bytes of this level: addresses beyond the
    /// processor's, NX unless it is enabled, and the page size of a level 4 entry.
    #[inline(always)]
    fn reserved(&self, tables: &impl PageTables, level: u32) -> u64 {
        // NXE is bit 11, NX bit 63.
        const _: () = assert!(efer::NXE << 52 == entry::NX);
        let no_execute = !self.efer << 52 & entry::NX;
        tables.reserved() | no_execute | if level == 4 { entry::LARGE } else { 0 }
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
    #[inline(always)]
    fn allows(&self, intent: Intent, rights: Rights) -> bool {
        let needed = match intent {
            Intent::Read => 0,
            Intent::Write if self.user || self.cr0 & cr0::WP != 0 => Rights::WRITE,
            Intent::Write => 0,
            // Without EFER.NXE the bit is reserved.
            Intent::Fetch => Rights::EXECUTE,
        };
        if self.user {
            return rights.has(needed | Rights::USER);
        }
        rights.has(needed) && !(rights.has(Rights::USER) && self.hides_user_pages(intent))
    }

    /// Returns true if the kernel must not access user pages (SMEP, SMAP).
    #[inline(always)]
    fn hides_user_pages(&self, intent: Intent) -> bool {
        match intent {
            Intent::Fetch => self.cr4 & cr4::SMEP != 0,
            _ => self.cr4 & cr4::SMAP != 0 && self.rflags & RFLAGS_AC == 0,
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
fn set_bits(
    tables: &impl PageTables,
    shape: Shape,
    Translation { entries, depth, .. }: &mut Translation,
    dirty: bool,
) -> bool {
    for (index, entry) in entries[..*depth].iter_mut().enumerate() {
        let old = entry.value;
        // Pointers of three-level tables have no marks.
        let is_pointer = index == 0 && shape.levels == 3;
        entry.value |= if is_pointer { 0 } else { marks(dirty && index + 1 == *depth) };
        if old != entry.value && !tables.replace(entry.at, shape.entry_bytes, old, entry.value) {
            return false;
        }
    }
    true
}

/// Bits that an access sets in an entry; `dirty`: in the leaf, by a write.
#[inline(always)]
fn marks(dirty: bool) -> u64 {
    entry::ACCESSED | if dirty { entry::DIRTY } else { 0 }
}

#[cfg(test)]
mod tests;
