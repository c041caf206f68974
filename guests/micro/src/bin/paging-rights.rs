//! Rights of pages: which accesses are allowed, the error code and `CR2` of those that are not, and
//! accessed and dirty bits afterwards. All combinations of page size, rights of an entry, place of
//! that entry, access, CPL, `CR0.WP`, `EFER.NXE`, SMEP and SMAP; entries that are not present or
//! have reserved bits; non-canonical addresses (APM vol. 2, §5.3, §5.6 and §8.4.2).
#![no_std]
#![no_main]

use core::sync::atomic::{AtomicU32, Ordering::SeqCst};
use guests_micro::access::{self, AccessFault, Kind, MemoryAccess, UD2};
use guests_micro::paging::{self, ALL, FrameAllocator, RootTable, TOP, address};
use guests_micro::{check, cpu, guest, println, trap};
use hw_x86::cpuid::{extended_b, leaf};
use hw_x86::msr::{self, efer};
use hw_x86::paging::{cr0, cr4, entry, fault};

guest!(main);

/// Contents of the page, with an instruction at its start.
const DATA: u64 = 0x1122_3344_5566_0000 | UD2;
const SIZES: [&str; 3] = ["4 KiB", "2 MiB", "1 GiB"];
const KINDS: [Kind; 3] = [Kind::Read, Kind::Write, Kind::Fetch];
/// Bits that the CPU sets by itself.
const MARKS: u64 = entry::ACCESSED | entry::DIRTY;
/// Bits that the CPU ignores.
const IGNORED: [u32; 5] = [9, 10, 11, 52, 58];

/// State of the CPU that rights depend on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Setting {
    wp: bool,
    nxe: bool,
    smep: bool,
    smap: bool,
    ac: bool,
}

impl Setting {
    const PLAIN: Self = Self { wp: true, nxe: true, smep: false, smap: false, ac: false };

    /// All settings that the CPU has; `RFLAGS.AC` matters with SMAP only.
    fn all() -> impl Iterator<Item = Self> {
        let has = cpu::cpuid(leaf::EXTENDED_FEATURES, 0).ebx;
        (0..32u32).filter_map(move |bits| {
            let bit = |index: u32| bits >> index & 1 != 0;
            let this = Self { wp: bit(0), nxe: bit(1), smep: bit(2), smap: bit(3), ac: bit(4) };
            let exists = (!this.smep || has & extended_b::SMEP != 0)
                && (!this.smap || has & extended_b::SMAP != 0)
                && (this.smap || !this.ac);
            exists.then_some(this)
        })
    }

    /// Applies it, and flushes the TLB.
    fn apply(self, tables: RootTable) {
        let set = |value: u64, bit: u64, on: bool| if on { value | bit } else { value & !bit };
        let four = set(set(cpu::cr4(), cr4::SMEP, self.smep), cr4::SMAP, self.smap);
        let efer = cpu::read_msr(msr::EFER).map(|value| set(value, efer::NXE, self.nxe));
        check!(efer.is_ok(), "no EFER");
        // SAFETY: the program's own pages are writable, executable and for CPL 0 only.
        let written = unsafe {
            cpu::write_cr0(set(cpu::cr0(), cr0::WP, self.wp));
            cpu::write_cr4(four);
            cpu::write_msr(msr::EFER, efer.unwrap_or(0))
        };
        check!(written.is_ok(), "EFER.NXE cannot be {}", self.nxe);
        tables.load();
    }

    /// Part of the error code that depends on the access only.
    fn access_code(self, access: MemoryAccess) -> u64 {
        let when = |condition: bool, bit: u64| if condition { bit } else { 0 };
        when(access.kind == Kind::Write, fault::WRITE)
            | when(access.user, fault::USER)
            | when(access.kind == Kind::Fetch && (self.nxe || self.smep), fault::FETCH)
    }

    /// Error code of an access to a page whose levels grant together `rights`; `None`: it is
    /// allowed.
    fn error(self, access: MemoryAccess, rights: u64) -> Option<u64> {
        let code = fault::PRESENT | self.access_code(access);
        let (writable, user) = (rights & entry::WRITE != 0, rights & entry::USER != 0);
        if rights & entry::NX != 0 && !self.nxe {
            return Some(code | fault::RESERVED);
        }
        let refused = match (access.kind, access.user) {
            (Kind::Fetch, true) => !user || rights & entry::NX != 0,
            (Kind::Fetch, false) => rights & entry::NX != 0 || self.smep && user,
            (kind, true) => !user || kind == Kind::Write && !writable,
            (kind, false) => {
                self.smap && user && !access.ac || kind == Kind::Write && !writable && self.wp
            }
        };
        refused.then_some(code)
    }
}

/// A page, its tables, and its size.
struct Page {
    frames: FrameAllocator,
    tables: RootTable,
    level: u32,
    /// Virtual address, in the middle of a large page.
    address: u64,
}

impl Page {
    fn new(frames: &mut FrameAllocator, tables: RootTable, level: u32) -> Self {
        let at = frames.large[0] + 0x12_3000;
        let size = 1 << hw_x86::paging::level_shift(level);
        let base = address([8 + u64::from(level), 5, 7, 9]) & !(size - 1);
        tables.map(frames, base, level, at & !(size - 1) | ALL);
        Self { frames: *frames, tables, level, address: base | at & (size - 1) }
    }

    /// Writes the entries of all levels: all rights and not used yet, but that of `level` with
    /// `change`, which gets and returns the entry.
    fn prepare(&self, level: u32, change: impl Fn(u64) -> u64) {
        for each in self.level..=TOP {
            let place = self.tables.entry(&self.frames, self.address, each);
            let keep = place.load(SeqCst) & (entry::ADDRESS | entry::LARGE) | ALL;
            place.store(if each == level { change(keep) } else { keep }, SeqCst);
        }
        self.frames.word(self.frames.large[0] + 0x12_3000).store(DATA, SeqCst);
        cpu::invalidate_page(self.address);
    }

    /// Undoes `prepare`, so that the next one finds addresses.
    fn restore(&self, level: u32, before: u64) {
        self.tables.entry(&self.frames, self.address, level).store(before, SeqCst);
        cpu::invalidate_page(self.address);
    }

    fn bits(&self, level: u32) -> u64 {
        self.tables.entry(&self.frames, self.address, level).load(SeqCst) & MARKS
    }

    /// Performs an access and compares its result and the accessed and dirty bits.
    fn expect(&self, access: MemoryAccess, error: Option<u64>, case: &dyn core::fmt::Debug) {
        let expected = match (error, access.kind) {
            (Some(code), _) => Err(AccessFault::page(code, self.address)),
            (None, _) => Ok(DATA),
        };
        let found = perform(access, self.address);
        check!(found == expected, "{case:x?} {access:?}: {found:x?} instead of {expected:x?}");
        for level in self.level..=TOP {
            let bits = self.bits(level);
            let leaf = level == self.level;
            let dirty = leaf && error.is_none() && access.kind == Kind::Write;
            check!(
                (bits & entry::DIRTY != 0) == dirty,
                "{case:x?} {access:?}: dirty bits of level {level} are {bits:#x}"
            );
            // A CPU may set the accessed bits of a walk that is refused in the end.
            check!(
                error.is_some() || bits & entry::ACCESSED != 0,
                "{case:x?} {access:?}: level {level} is not accessed"
            );
        }
    }

    /// All rights of each level, all accesses.
    fn rights(&self, setting: Setting) -> u32 {
        let mut cases = 0;
        for level in self.level..=TOP {
            for bits in 0..8u64 {
                let rights = ((bits & 1) * entry::WRITE)
                    | ((bits >> 1 & 1) * entry::USER)
                    | ((bits >> 2) * entry::NX);
                for (kind, user) in accesses() {
                    let access = MemoryAccess { kind, user, ac: setting.ac };
                    self.prepare(level, |all| all & !(entry::WRITE | entry::USER) | rights);
                    let case = ("level", level, "rights", rights, setting);
                    self.expect(access, setting.error(access, rights), &case);
                    cases += 1;
                }
            }
        }
        cases
    }

    /// Entries that are not present, with all other bits set and clear.
    fn absent(&self, setting: Setting) -> u32 {
        let mut cases = 0;
        for level in self.level..=TOP {
            for (kind, user) in accesses() {
                let access = MemoryAccess { kind, user, ac: setting.ac };
                for value in [0, !entry::PRESENT & !MARKS] {
                    self.prepare(level, |all| all);
                    let place = self.tables.entry(&self.frames, self.address, level);
                    let before = place.swap(value, SeqCst);
                    cpu::invalidate_page(self.address);
                    let found = perform(access, self.address);
                    let expected =
                        Err(AccessFault::page(setting.access_code(access), self.address));
                    check!(
                        found == expected,
                        "absent at {level}, {access:?}: {found:x?} instead of {expected:x?}"
                    );
                    let after = place.load(SeqCst);
                    check!(after == value, "an absent entry has become {after:#x}");
                    self.restore(level, before);
                    cases += 1;
                }
            }
        }
        cases
    }

    /// Reserved bits, each alone; and ignored bits.
    fn reserved(&self, setting: Setting) -> u32 {
        let mut cases = 0;
        for level in self.level..=TOP {
            for bit in 0..64 {
                let leaf = level == self.level;
                let physical = (paging::physical_bits()..52).contains(&bit);
                // Bit 12 of a large leaf is part of the memory type.
                let low = leaf && level > 1 && (13..12 + 9 * (level - 1)).contains(&bit);
                let size = level == TOP && bit == entry::LARGE.trailing_zeros();
                let is_reserved = physical || low || size;
                if !is_reserved && !IGNORED.contains(&bit) {
                    continue;
                }
                for (kind, user) in accesses() {
                    let access = MemoryAccess { kind, user, ac: setting.ac };
                    self.prepare(level, |all| all);
                    let place = self.tables.entry(&self.frames, self.address, level);
                    let before = place.fetch_or(1 << bit, SeqCst);
                    cpu::invalidate_page(self.address);
                    let code = setting.access_code(access) | fault::PRESENT | fault::RESERVED;
                    let expected = match is_reserved {
                        true => Err(AccessFault::page(code, self.address)),
                        false => Ok(DATA),
                    };
                    let found = perform(access, self.address);
                    check!(
                        found == expected,
                        "bit {bit} of level {level}, {access:?}: {found:x?}, not {expected:x?}"
                    );
                    let after = place.load(SeqCst);
                    check!(after & !MARKS == before & !MARKS | 1 << bit, "entry {after:#x}");
                    self.restore(level, before);
                    cases += 1;
                }
            }
        }
        cases
    }

    /// Accessed and dirty bits of one access after the other.
    fn marks(&self) {
        let leaf = || self.bits(self.level);
        let place = self.tables.entry(&self.frames, self.address, self.level);
        for user in [false, true] {
            let perform = |kind| MemoryAccess { kind, user, ac: false }.perform(self.address, DATA);
            let size = SIZES[self.level as usize - 1];
            self.prepare(self.level, |all| all);
            check!(leaf() == 0, "{size}: marked without an access");
            check!(perform(Kind::Read).is_ok() && leaf() == entry::ACCESSED, "{size}: read");
            // The translation is in the TLB as one of a clean page.
            check!(perform(Kind::Write).is_ok() && leaf() == MARKS, "{size}: read, written");
            for cleared in [entry::DIRTY, entry::ACCESSED, MARKS] {
                place.fetch_and(!cleared, SeqCst);
                cpu::invalidate_page(self.address);
                check!(leaf() == MARKS & !cleared, "{size}: INVLPG marks");
                check!(perform(Kind::Read).is_ok(), "{size}: read after {cleared:#x}");
                check!(leaf() == MARKS & !cleared | entry::ACCESSED, "{size}: marks {:#x}", leaf());
                check!(perform(Kind::Write).is_ok() && leaf() == MARKS, "{size}: {:#x}", leaf());
            }
            for upper in self.level + 1..=TOP {
                let table = self.tables.entry(&self.frames, self.address, upper);
                table.fetch_and(!entry::ACCESSED, SeqCst);
                cpu::invalidate_page(self.address);
                check!(perform(Kind::Read).is_ok(), "{size}: read by level {upper}");
                let bits = self.bits(upper);
                check!(bits == entry::ACCESSED, "{size}: level {upper} is {bits:#x}");
            }
        }
    }
}

/// Number of reserved bits that were reported without [`fault::PRESENT`].
static WITHOUT_PRESENT: AtomicU32 = AtomicU32::new(0);

/// Performs an access. QEMU 7.2 clears [`fault::PRESENT`] in error codes of reserved bits; this
/// counts such codes, and returns the architectural one.
fn perform(access: MemoryAccess, address: u64) -> Result<u64, AccessFault> {
    let mut found = access.perform(address, DATA);
    if let Err(fault) = &mut found
        && fault.error & (fault::RESERVED | fault::PRESENT) == fault::RESERVED
    {
        fault.error |= fault::PRESENT;
        WITHOUT_PRESENT.fetch_add(1, SeqCst);
    }
    found
}

/// Every access at both CPLs.
fn accesses() -> impl Iterator<Item = (Kind, bool)> {
    KINDS.into_iter().flat_map(|kind| [(kind, false), (kind, true)])
}

fn main() {
    access::init();
    let mut frames = FrameAllocator::new();
    let tables = RootTable::new(&mut frames);
    tables.load();
    let levels = if paging::has_huge_pages() { 3 } else { 2 };
    println!("paging-rights: pages of {:?}", &SIZES[..levels as usize]);
    for level in 1..=levels {
        let page = Page::new(&mut frames, tables, level);
        let size = SIZES[level as usize - 1];
        for setting in Setting::all() {
            setting.apply(tables);
            let cases = page.rights(setting);
            let absent = page.absent(setting);
            println!("{size}: {cases} rights, {absent} absent entries, {setting:?}");
        }
        for nxe in [true, false] {
            let setting = Setting { nxe, ..Setting::PLAIN };
            setting.apply(tables);
            println!("{size}: {} reserved and ignored bits, {setting:?}", page.reserved(setting));
        }
        Setting::PLAIN.apply(tables);
        page.marks();
        println!("{size}: accessed and dirty bits");
    }
    non_canonical();
    let without = WITHOUT_PRESENT.load(SeqCst);
    if without > 0 {
        println!("the error codes of {without} reserved bits have P clear");
    }
    println!("paging-rights: all cases");
}

/// Addresses whose upper bits differ.
fn non_canonical() {
    let fault = Err(AccessFault { vector: trap::PROTECTION, error: 0, address: 0 });
    for address in [1 << 47, 0x1234 << 48, (u64::MAX << 47) - 8, 1 << 63] {
        for (kind, user) in accesses() {
            let found = MemoryAccess { kind, user, ac: false }.perform(address, DATA);
            check!(found == fault, "{kind:?} at {address:#x}: {found:x?}");
        }
    }
    println!("non-canonical addresses");
}
