//! Guest of the model: its page tables, and what they say, by a walk of its own. The code under
//! test walks the same tables by `hw-walk`.

pub use hw_walk::Intent;
use hw_x86::msr::efer;
use hw_x86::paging::{ENTRIES, cr0, cr4, entry, fault};
use kernel_x86::shadow::testing::{GuestRegisters, Mode, physical_bits};

/// Guest pages: all of its memory, which begins with its page tables.
pub const PAGES: u64 = 1024;
/// Four-level roots: the first pages.
pub const ROOTS: u64 = 5;
/// Tables of each level below the roots. Those of level 2 are also roots of three levels.
pub const KINDS: u64 = 8;
/// Guest pages that hold page tables which change.
pub const TABLES: u64 = ROOTS + 3 * KINDS;
/// Guest tables of its map of its memory, which do not change: of level 2 and 1.
pub const DIRECT_TABLES: [u64; 2] = [TABLES, TABLES + 1];
/// Page of code.
pub const CODE: u64 = TABLES + 2;
/// Pages that the model keeps a copy of: all tables.
pub const KNOWN: usize = TABLES as usize + 2;
/// Entries of a root of three levels that refer to the map of memory.
const DIRECT_POINTERS: [usize; 2] = [3, 7];
/// Entry of a root of four levels that refers to it.
const DIRECT_ROOT: usize = 256;

/// An access of the guest.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct GuestAccess {
    pub address: u64,
    pub intent: Intent,
    /// At privilege level 3.
    pub user: bool,
}

/// Page of the guest and rights that its tables give.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Right {
    /// Guest-physical page number.
    pub page: u64,
    pub write: bool,
    pub user: bool,
    pub execute: bool,
    pub is_global: bool,
    /// `log2` of the pages of the guest's leaf.
    pub order: u32,
}

impl Right {
    /// First page of the guest's leaf, and its order.
    pub fn leaf(self) -> (u64, u32) {
        (self.page >> self.order << self.order, self.order)
    }
}

/// Statement of the guest's tables about an address.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Fact {
    /// An entry is not present.
    Absent,
    /// An entry has reserved bits, or its table is not in memory.
    Reserved,
    /// There is a translation.
    Page(Right),
}

/// Memory that the VM has for a guest page.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Delegation {
    /// Physical page number.
    pub host: u64,
    pub write: bool,
    pub execute: bool,
    pub is_device: bool,
}

/// A walk of the guest's tables.
#[derive(Clone, Debug)]
pub struct Walk {
    pub fact: Fact,
    /// Guest-physical addresses of the entries, from the root.
    pub path: Vec<u64>,
    /// The first one has accessed and dirty bits.
    pub root_has_marks: bool,
}

/// The guest's page tables and control registers, and the memory that it has.
pub struct Guest {
    pub registers: GuestRegisters,
    /// RFLAGS.AC: SMAP does not apply.
    pub has_ac: bool,
    /// Values of all tables.
    pub tables: Vec<[u64; ENTRIES]>,
    /// Memory by guest page.
    pub delegated: Vec<Option<Delegation>>,
}

/// Addresses of entries.
pub fn slot_of(at: u64) -> (usize, usize) {
    ((at >> 12) as usize, (at >> 3) as usize % ENTRIES)
}

fn index(address: u64, level: u32) -> u64 {
    (address >> (12 + 9 * level)) % ENTRIES as u64
}

/// Control registers of a mode, with `cr3`.
pub fn registers(mode: Mode, cr3: u64) -> GuestRegisters {
    let cr0 = cr0::PE | cr0::ET | cr0::NE | cr0::WP;
    let pg = if mode == Mode::Off { 0 } else { cr0::PG };
    let long = if mode == Mode::Long { efer::LME | efer::LMA } else { 0 };
    GuestRegisters { cr0: cr0 | pg, cr3, cr4: cr4::PAE | cr4::PGE, efer: efer::NXE | long }
}

impl Guest {
    /// A guest in long mode with empty tables, but for the map of its memory; `host`: first
    /// physical page of its memory.
    pub fn new(host: u64) -> Self {
        let whole = |page| {
            Some(Delegation { host: host + page, write: true, execute: true, is_device: false })
        };
        let mut this = Self {
            registers: registers(Mode::Long, 0),
            has_ac: false,
            tables: vec![[0; ENTRIES]; KNOWN],
            delegated: (0..PAGES).map(whole).collect(),
        };
        let [upper, middle] = DIRECT_TABLES;
        let table = |page: u64| page << 12 | entry::PRESENT | entry::WRITE;
        for root in 0..ROOTS {
            this.tables[root as usize][DIRECT_ROOT] = table(upper);
        }
        for root in this.pae_roots() {
            for slot in DIRECT_POINTERS {
                this.tables[root as usize][slot] = middle << 12 | entry::PRESENT;
            }
        }
        this.tables[upper as usize][0] = table(middle);
        for part in 0..PAGES >> 9 {
            this.tables[middle as usize][part as usize] =
                table(part << 9) | entry::LARGE | entry::GLOBAL;
        }
        this
    }

    fn pae_roots(&self) -> core::ops::Range<u64> {
        ROOTS..ROOTS + KINDS
    }

    /// Linear address at which the guest's map of its memory has a guest-physical address.
    pub fn direct(&self, physical: u64) -> u64 {
        match self.registers.mode() {
            Mode::Long => 0xffff_8000_0000_0000 + physical,
            Mode::Pae => 0xc000_0000 + physical,
            Mode::Off | Mode::TwoLevel => physical,
        }
    }

    /// Value of CR3 for a choice among the roots of the mode.
    pub fn root(&self, mode: Mode, choice: u64) -> u64 {
        match mode {
            // Two roots in each page.
            Mode::Pae => (ROOTS + choice / 2 % KINDS) << 12 | (choice % 2) << 5,
            _ => (choice % ROOTS) << 12,
        }
    }

    /// Number of choices for [`Guest::root`].
    pub fn roots(mode: Mode) -> u64 {
        if mode == Mode::Pae { 4 } else { ROOTS }
    }

    /// Value of an entry; `None`: not in memory. Pages of data have no entry that is present.
    fn read(&self, at: u64) -> Option<u64> {
        let (page, slot) = slot_of(at);
        let memory = self.delegated.get(page).copied().flatten()?;
        let value = self.tables.get(page).map_or(0, |table| table[slot]);
        (!memory.is_device).then_some(value)
    }

    /// Returns whether the processor can set bits in the entry.
    pub fn keeps_marks(&self, at: u64) -> bool {
        let page = slot_of(at).0;
        self.delegated[page].is_some_and(|memory| memory.write && !memory.is_device)
    }

    /// Walks the tables.
    pub fn walk(&self, address: u64) -> Walk {
        let GuestRegisters { cr3, efer: efer_value, .. } = self.registers;
        let (levels, root) = match self.registers.mode() {
            Mode::Long => (4, cr3 & entry::ADDRESS),
            Mode::Pae => (3, cr3 & 0xffff_ffe0),
            Mode::Off | Mode::TwoLevel => return Self::flat(address),
        };
        let has_nx = efer_value & efer::NXE != 0;
        let mut right = Self::whole(0);
        let (mut table, mut path) = (root, Vec::with_capacity(4));
        let ends = |fact, path| Walk { fact, path, root_has_marks: levels == 4 };
        for level in (0..levels).rev() {
            let is_pointer = levels == 3 && level == 2;
            let slots = if is_pointer { 4 } else { ENTRIES as u64 };
            let at = table + 8 * (index(address, level) % slots);
            path.push(at);
            let Some(value) = self.read(at) else { return ends(Fact::Reserved, path) };
            if value & entry::PRESENT == 0 {
                return ends(Fact::Absent, path);
            }
            let beyond = entry::ADDRESS >> physical_bits() << physical_bits();
            let is_large = value & entry::LARGE != 0 && !is_pointer;
            if value & beyond != 0 || value & entry::NX != 0 && !has_nx || level == 3 && is_large {
                return ends(Fact::Reserved, path);
            }
            if !is_pointer {
                right.write &= value & entry::WRITE != 0;
                right.user &= value & entry::USER != 0;
                right.execute &= value & entry::NX == 0;
            }
            if level > 0 && !is_large {
                table = value & entry::ADDRESS;
                continue;
            }
            let size = 1_u64 << (12 + 9 * level);
            if level > 0 && value & entry::ADDRESS & (size - 1) & !(1 << 12) != 0 {
                return ends(Fact::Reserved, path);
            }
            let base = value & entry::ADDRESS & !(size - 1);
            right.order = 9 * level;
            right.page = (base | address & (size - 1)) >> 12;
            right.is_global = value & entry::GLOBAL != 0 && self.registers.cr4 & cr4::PGE != 0;
            return ends(Fact::Page(right), path);
        }
        unreachable!("level 0 has leaves")
    }

    /// All rights to a page.
    fn whole(page: u64) -> Right {
        Right { page, write: true, user: true, execute: true, is_global: false, order: 0 }
    }

    /// Without paging.
    fn flat(address: u64) -> Walk {
        let page = (address & 0xffff_ffff) >> 12;
        Walk { fact: Fact::Page(Self::whole(page)), path: Vec::new(), root_has_marks: false }
    }

    /// Right of an access, or the error code of its page fault.
    pub fn check(&self, fact: Fact, access: GuestAccess) -> Result<Right, u64> {
        self.check_with(fact, access, self.has_ac)
    }

    /// The same without SMAP, if the code may miss it: with CR0.WP = 0 it makes a read-only user
    /// page that the guest kernel has written a supervisor page (note 0020).
    pub fn check_without_smap(&self, fact: Fact, access: GuestAccess) -> Option<Right> {
        let may_miss = self.registers.cr0 & cr0::WP == 0 && access.intent != Intent::Fetch;
        self.check_with(fact, access, true).ok().filter(|_| may_miss)
    }

    fn check_with(&self, fact: Fact, access: GuestAccess, has_ac: bool) -> Result<Right, u64> {
        let GuestRegisters { cr0, cr4, efer, .. } = self.registers;
        let (has_nx, smep) = (efer & efer::NXE != 0, cr4 & cr4::SMEP != 0);
        let smap = cr4 & cr4::SMAP != 0 && !has_ac;
        let mut code = if access.user { fault::USER } else { 0 };
        code |= match access.intent {
            Intent::Write => fault::WRITE,
            Intent::Fetch if has_nx || smep => fault::FETCH,
            Intent::Read | Intent::Fetch => 0,
        };
        let right = match fact {
            Fact::Absent => return Err(code),
            Fact::Reserved => return Err(code | fault::PRESENT | fault::RESERVED),
            Fact::Page(right) => right,
        };
        if self.registers.mode() == Mode::Off {
            return Ok(right);
        }
        let protects = access.user || cr0 & cr0::WP != 0;
        let is_hidden = right.user && !access.user;
        let refused = access.user && !right.user
            || match access.intent {
                Intent::Read => smap && is_hidden,
                Intent::Write => !right.write && protects || smap && is_hidden,
                Intent::Fetch => has_nx && !right.execute || smep && is_hidden,
            };
        if refused { Err(code | fault::PRESENT) } else { Ok(right) }
    }

    /// Sets the accessed and dirty bits of an access that the tables allow.
    pub fn mark(&mut self, walk: &Walk, intent: Intent) {
        let last = walk.path.len().saturating_sub(1);
        for (depth, &at) in walk.path.iter().enumerate() {
            let bits = match (depth == last, depth) {
                (false, 0) if !walk.root_has_marks => 0,
                (true, _) if intent == Intent::Write => entry::ACCESSED | entry::DIRTY,
                _ => entry::ACCESSED,
            };
            if self.keeps_marks(at) {
                let (page, slot) = slot_of(at);
                self.tables[page][slot] |= bits;
            }
        }
    }

    /// Returns whether the bits of an access are set.
    pub fn is_marked(&self, walk: &Walk, intent: Intent) -> bool {
        let last = walk.path.len().saturating_sub(1);
        walk.path.iter().enumerate().all(|(depth, &at)| {
            let (page, slot) = slot_of(at);
            let value = self.tables[page][slot];
            let has_bits = depth > 0 || walk.root_has_marks;
            let dirty = depth < last || intent != Intent::Write || value & entry::DIRTY != 0;
            !has_bits || !self.keeps_marks(at) || value & entry::ACCESSED != 0 && dirty
        })
    }
}
