use std::cell::RefCell;
use std::collections::BTreeMap;

use hw_x86::paging::entry::{ACCESSED, DIRTY, LARGE, NX, PRESENT, USER, WRITE};

use super::*;

/// Tables in memory below 16 MiB.
#[derive(Default)]
struct Memory(RefCell<BTreeMap<u64, u64>>);

/// Width of its physical addresses.
const PHYSICAL_BITS: u32 = 40;

const END: u64 = 16 << 20;

impl PageTables for Memory {
    fn read(&self, at: u64, bytes: u64) -> Option<u64> {
        assert!(at.is_multiple_of(bytes));
        (at < END).then(|| *self.0.borrow().get(&at).unwrap_or(&0))
    }

    fn replace(&self, at: u64, bytes: u64, old: u64, new: u64) -> bool {
        let is_old = self.read(at, bytes) == Some(old);
        if is_old {
            self.0.borrow_mut().insert(at, new);
        }
        is_old
    }

    fn reserved(&self) -> u64 {
        entry::ADDRESS >> PHYSICAL_BITS << PHYSICAL_BITS
    }
}

impl Memory {
    fn set(&self, at: u64, value: u64) {
        self.0.borrow_mut().insert(at, value);
    }

    fn get(&self, at: u64) -> u64 {
        self.read(at, 8).unwrap()
    }

    /// 4-level tables at 0x1000 to 0x4000 with one page: 0x5000, at linear address 0x7000.
    fn long(leaf: u64) -> Self {
        let this = Self::default();
        for (at, value) in [(0x1000, 0x2000), (0x2000, 0x3000), (0x3000, 0x4000)] {
            this.set(at, value | PRESENT | WRITE | USER);
        }
        this.set(0x4038, 0x5000 | leaf);
        this
    }
}

const ALL: u64 = PRESENT | WRITE | USER;

fn long() -> Paging {
    let efer = efer::LMA | efer::LME | efer::NXE;
    Paging {
        cr0: cr0::PG | cr0::PE | cr0::WP,
        cr3: 0x1000,
        cr4: cr4::PAE,
        efer,
        ..Default::default()
    }
}

fn code(result: Result<Translation, PageFault>) -> Result<u64, u32> {
    result.map(|found| found.address).map_err(|fault| fault.code)
}

#[test]
fn without_paging_addresses_are_physical() {
    let found = Paging::default().translate(&Memory::default(), 0x1_2345_6789, Intent::Write, true);
    let found = found.unwrap();
    assert_eq!((found.address, found.left(), found.entries()), (0x2345_6789, 0x877, &[][..]));
}

#[test]
fn bits_are_set_once_the_access_is_allowed() {
    let memory = Memory::long(PRESENT | USER);
    let paging = long();
    assert_eq!(code(paging.translate(&memory, 0x7123, Intent::Write, true)), Err(3));
    assert_eq!(memory.get(0x1000) & ACCESSED, 0);
    assert_eq!(code(paging.translate(&memory, 0x7123, Intent::Read, false)), Ok(0x5123));
    assert_eq!(memory.get(0x1000) & ACCESSED, 0);
    assert_eq!(code(paging.translate(&memory, 0x7123, Intent::Read, true)), Ok(0x5123));
    assert_eq!(memory.get(0x4038), 0x5000 | PRESENT | USER | ACCESSED);
    assert_eq!(memory.get(0x3000) & (ACCESSED | DIRTY), ACCESSED);
    // Without WP the kernel may write.
    let paging = Paging { cr0: cr0::PG, ..paging };
    assert_eq!(code(paging.translate(&memory, 0x7123, Intent::Write, true)), Ok(0x5123));
    assert_eq!(memory.get(0x4038) & DIRTY, DIRTY);
}

#[test]
fn rights_of_all_levels_count() {
    let memory = Memory::long(ALL);
    let user = Paging { user: true, ..long() };
    let found = user.translate(&memory, 0x7000, Intent::Write, true).unwrap();
    assert_eq!((found.rights.has(WRITE | USER), found.page_shift), (true, 12));
    let steps = found.entries().iter().map(|step| step.at);
    assert!(steps.eq([0x1000, 0x2000, 0x3000, 0x4038]));
    memory.set(0x2000, 0x3000 | PRESENT | USER);
    assert_eq!(code(user.translate(&memory, 0x7000, Intent::Write, true)), Err(7));
    memory.set(0x2000, 0x3000 | PRESENT | WRITE);
    assert_eq!(code(user.translate(&memory, 0x7000, Intent::Read, true)), Err(5));
    memory.set(0x2000, 0x3000 | ALL | NX);
    assert_eq!(code(user.translate(&memory, 0x7000, Intent::Fetch, true)), Err(0x15));
    let old = Paging { efer: efer::LMA, ..user };
    assert_eq!(code(old.translate(&memory, 0x7000, Intent::Read, true)), Err(0xd));
}

#[test]
fn supervisor_access_to_user_pages() {
    let memory = Memory::long(ALL);
    let paging = Paging { cr4: cr4::PAE | cr4::SMEP | cr4::SMAP, ..long() };
    assert_eq!(code(paging.translate(&memory, 0x7000, Intent::Fetch, true)), Err(0x11));
    assert_eq!(code(paging.translate(&memory, 0x7000, Intent::Read, true)), Err(1));
    let paging = Paging { rflags: RFLAGS_AC, ..paging };
    assert_eq!(code(paging.translate(&memory, 0x7000, Intent::Read, true)), Ok(0x5000));
}

#[test]
fn large_pages_and_their_reserved_bits() {
    let memory = Memory::long(0);
    memory.set(0x3008, 0x40_0000 | ALL | LARGE | 1 << 12);
    memory.set(0x2008, 0x8000_0000 | ALL | LARGE);
    let read = |linear| long().translate(&memory, linear, Intent::Read, true);
    let found = read(0x32_1234).unwrap();
    assert_eq!((found.address, found.page_shift, found.left()), (0x52_1234, 21, 0xd_edcc));
    assert_eq!(code(read(0x4123_4567)), Ok(0x8123_4567));
    memory.set(0x3008, 0x40_2000 | ALL | LARGE);
    assert_eq!(code(read(0x32_1234)), Err(9));
    assert_eq!(code(read(0x8000_0000)), Err(0));
}

#[test]
fn reserved_bits_of_every_level() {
    let reads = |memory: &Memory| code(long().translate(memory, 0x7000, Intent::Read, true));
    for at in [0x1000, 0x2000, 0x3000, 0x4038] {
        for bit in PHYSICAL_BITS..52 {
            let memory = Memory::long(ALL);
            memory.set(at, memory.get(at) | 1 << bit);
            assert_eq!(reads(&memory), Err(9), "bit {bit} of the entry at {at:#x}");
        }
        let memory = Memory::long(ALL);
        memory.set(at, memory.get(at) | 1 << 52);
        assert_eq!(reads(&memory), Ok(0x5000));
    }
    let memory = Memory::long(ALL);
    memory.set(0x1000, memory.get(0x1000) | LARGE);
    assert_eq!(reads(&memory), Err(9));
}

#[test]
fn tables_outside_of_memory() {
    let memory = Memory::long(0);
    memory.set(0x3000, END | ALL);
    assert_eq!(code(long().translate(&memory, 0x7000, Intent::Read, true)), Err(9));
    memory.set(0x2000, END | ALL);
    assert_eq!(code(long().translate(&memory, 0x7000, Intent::Read, true)), Err(9));
    assert_eq!(leaf(&memory, 0x1000, 0x7000), None);
}

#[test]
fn tables_of_32_bit_guests() {
    let memory = Memory::default();
    // 2 levels: a page, and 4 MiB beyond 4 GiB (PSE-36).
    memory.set(0x1004, 0x2000 | ALL);
    memory.set(0x2004, 0x6000 | ALL);
    memory.set(0x1008, 0x0080_0000 | 1 << 13 | ALL | LARGE);
    let paging = Paging { cr0: cr0::PG, cr3: 0x1000, cr4: cr4::PSE, ..Default::default() };
    let read = |linear| paging.translate(&memory, linear, Intent::Write, true);
    assert_eq!(code(read(0x1_0040_1004)), Ok(0x6004));
    assert_eq!(code(read(0x80_1234)), Ok(0x1_0080_1234));
    // PAE: pointers have neither rights nor an accessed bit.
    memory.set(0x8020, 0x9000 | PRESENT);
    memory.set(0x9008, 0x20_0000 | ALL | LARGE);
    let paging = Paging { cr4: cr4::PAE, cr3: 0x8020, user: true, ..paging };
    let found = paging.translate(&memory, 0x21_0000, Intent::Write, true);
    assert_eq!(code(found), Ok(0x21_0000));
    assert_eq!((memory.get(0x8020), memory.get(0x9008) & DIRTY), (0x9000 | PRESENT, DIRTY));
}

#[test]
fn a_leaf_is_what_a_walk_finds() {
    let memory = Memory::long(ALL | DIRTY);
    memory.set(0x3008, 0x40_0000 | PRESENT | NX | LARGE);
    for linear in [0x7123, 0x32_1234, 0x8000, 0x4000_0000] {
        let walked = long().translate(&memory, linear, Intent::Read, false).ok();
        let found = leaf(&memory, 0x1000, linear);
        assert_eq!(found.map(|leaf| leaf.size), walked.map(|walk| 1 << walk.page_shift));
        let Some((leaf, walk)) = found.zip(walked) else { continue };
        assert_eq!(leaf.address | linear & (leaf.size - 1), walk.address);
        assert_eq!((leaf.writable, leaf.user), (walk.rights.has(WRITE), walk.rights.has(USER)));
        assert_eq!(leaf.executable, walk.rights.has(Rights::EXECUTE));
        assert_eq!(Some((leaf.at, leaf.entry)), walk.entries().last().map(|e| (e.at, e.value)));
    }
}

#[test]
fn the_accessed_bit_is_set_only_on_an_unchanged_entry() {
    let memory = Memory::long(ALL);
    assert!(!set_accessed(&memory, 0x4038, 0x9000 | ALL));
    assert!(set_accessed(&memory, 0x4038, 0x5000 | ALL));
    assert_eq!(memory.get(0x4038), 0x5000 | ALL | ACCESSED);
}

/// The rights of a copy are those of the translation, and none that would hide an event from the
/// guest's tables.
#[test]
fn rights_of_copies() {
    const ALL_RIGHTS: u64 = Rights::WRITE | Rights::USER | Rights::EXECUTE;
    let copied = |paging: &Paging, leaf: u64, intent| {
        let found = paging.translate(&Memory::long(leaf), 0x7000, intent, true).unwrap().page();
        (paging.rights_of_copy(intent, &found).0 & ALL_RIGHTS, paging.is_global(&found))
    };
    let read_only = Rights::USER | Rights::EXECUTE;
    let kernel = Rights::WRITE | Rights::EXECUTE;
    let cases = [
        (ALL | DIRTY, Intent::Read, ALL_RIGHTS),
        (ALL, Intent::Read, read_only),
        (ALL, Intent::Write, ALL_RIGHTS),
        (PRESENT | WRITE, Intent::Write, kernel),
        (PRESENT | USER | DIRTY, Intent::Read, read_only),
        // Only a clear CR0.WP allows it.
        (PRESENT | USER, Intent::Write, kernel),
        (ALL | DIRTY | NX, Intent::Read, Rights::WRITE | Rights::USER),
    ];
    let paging = Paging { cr0: cr0::PG | cr0::PE, cr4: cr4::PAE | cr4::PGE, ..long() };
    for (leaf, intent, expected) in cases {
        assert_eq!(copied(&paging, leaf, intent), (expected, false), "{leaf:#x} {intent:?}");
    }
    let smep = Paging { cr4: paging.cr4 | cr4::SMEP, ..paging };
    // A user page that the kernel may not execute.
    let (rights, _) = copied(&smep, PRESENT | USER, Intent::Write);
    assert_eq!(rights, Rights::WRITE);
    let global = ALL | DIRTY | entry::GLOBAL;
    assert_eq!(copied(&paging, global, Intent::Read), (ALL_RIGHTS, true));
    let local = Paging { cr4: cr4::PAE, ..paging };
    assert_eq!(copied(&local, global, Intent::Read), (ALL_RIGHTS, false));
    assert_eq!(copied(&Paging::default(), 0, Intent::Read), (ALL_RIGHTS, false), "without paging");
}

#[test]
fn accesses_of_page_faults() {
    let paging = Paging { user: true, rflags: RFLAGS_AC, ..long() };
    let (user, intent) = paging.of_fault(fault::USER | fault::WRITE | fault::PRESENT);
    assert_eq!((user, intent), (Paging { rflags: 0, ..paging }, Intent::Write));
    assert_eq!(paging.of_fault(fault::FETCH | fault::USER).1, Intent::Fetch);
    let (implicit, intent) = paging.of_fault(0);
    assert_eq!(intent, Intent::Read);
    assert!(!implicit.user && implicit.rflags & RFLAGS_AC == 0);
    let (kernel, _) = Paging { user: false, ..paging }.of_fault(0);
    assert_ne!(kernel.rflags & RFLAGS_AC, 0);
}
