//! Freshness of translations: a change of page tables holds after each kind of flush, whatever
//! level it is made at and through whatever address; rights that are added hold without a flush
//! (APM vol. 2, §5.5).
#![no_std]
#![no_main]

mod encode;
mod model;

use core::sync::atomic::{AtomicU64, Ordering::SeqCst};
use encode::{Form, Prefixes};
use guests_micro::access::{self, AccessFault, Kind, MemoryAccess, UD2};
use guests_micro::paging::{
    self, ALL, FrameAllocator, KERNEL, LARGE, PAGE, RootTable, TOP, address,
};
use guests_micro::{check, cpu, guest, println, trap};
use hw_x86::cpuid::{extended_b, features_c, leaf};
use hw_x86::msr::{self, efer};
use hw_x86::paging::{cr0, cr4, entry, fault, level_shift};

guest!(main);

/// Distance of the words in the two large pages from their starts.
const OFFSET: u64 = 0x12_3000;
/// Contents of the two pages, with an instruction at their starts.
const DATA: [u64; 2] = [0xaaaa_0000 | UD2, 0xbbbb_0000 | UD2];
/// `CR3`: translations of that PCID stay.
const KEEP: u64 = 1 << 63;

/// Address of pages of a level, which differ in all indices.
const fn base(level: u32) -> u64 {
    address([16 + level as u64, 5, 7, 9]) & !((1 << level_shift(level)) - 1)
}

/// Two roots, in which an address leads to the one page and to the other.
struct Pair {
    frames: FrameAllocator,
    one: RootTable,
    two: RootTable,
    level: u32,
    address: u64,
}

impl Pair {
    /// A page of this level; of a huge one the other root maps a large part only.
    fn new(frames: &mut FrameAllocator, level: u32, global: u64) -> Self {
        let (one, two) = (RootTable::new(frames), RootTable::new(frames));
        let [first, second] = frames.large.map(|large| large + OFFSET);
        let mask = (1 << level_shift(level)) - 1;
        let address = base(level) | first & mask;
        one.map(frames, address, level, first & !mask | ALL | global);
        let lower = level.min(2);
        let mask = (1 << level_shift(lower)) - 1;
        two.map(frames, address, lower, second & !mask | ALL | global);
        one.load();
        Self { frames: *frames, one, two, level, address }
    }

    fn entry(&self, level: u32) -> &'static AtomicU64 {
        self.one.entry(&self.frames, self.address, level)
    }

    /// Exchanges the entries of a level in the two roots.
    fn exchange(&self, level: u32) {
        let other = self.two.entry(&self.frames, self.address, level);
        other.store(self.entry(level).swap(other.load(SeqCst), SeqCst), SeqCst);
    }

    /// Reads and compares with the contents of a page.
    fn expect(&self, which: usize, what: &str) {
        let found = access::read(self.address);
        let (level, expected) = (self.level, DATA[which]);
        check!(found == Ok(expected), "{what}, leaf {level}: {found:x?} instead of {expected:x}");
    }

    /// A change at each level, and a flush.
    fn fresh(&self, what: &str, flush: impl Fn(&Self)) {
        for level in self.level..=TOP {
            for which in [1, 0] {
                self.expect(1 - which, "before");
                self.exchange(level);
                flush(self);
                self.expect(which, what);
            }
        }
    }
}

fn invalidate(pair: &Pair) {
    cpu::invalidate_page(pair.address);
}

/// INVLPG of other addresses in the page. The parts of a page of 1 GiB are pages of their own.
fn invalidate_elsewhere(pair: &Pair) {
    let size: u64 = 1 << level_shift(pair.level.min(2));
    cpu::invalidate_page(pair.address & !(size - 1) | (size - 1));
}

fn reload(pair: &Pair) {
    pair.one.load();
}

fn other_and_back(pair: &Pair) {
    pair.two.load();
    pair.one.load();
}

fn toggle_cr4(bit: u64) {
    // SAFETY: for bits that running code does not need.
    unsafe {
        cpu::write_cr4(cpu::cr4() ^ bit);
        cpu::write_cr4(cpu::cr4() ^ bit);
    }
}

fn toggle_global(_: &Pair) {
    toggle_cr4(cr4::PGE);
}

/// Name of a flush, and the flush of a pair.
type NamedFlush = (&'static str, fn(&Pair));

/// All flushes, for page sizes, global and not.
fn flushes(frames: &FrameAllocator, levels: u32) {
    const FLUSHES: [NamedFlush; 5] = [
        ("INVLPG", invalidate),
        ("INVLPG elsewhere in the page", invalidate_elsewhere),
        ("PGE", toggle_global),
        ("CR3", reload),
        ("another CR3 and back", other_and_back),
    ];
    for pge in [false, true] {
        // SAFETY: nothing that is mapped globally changes but what is flushed.
        unsafe { cpu::write_cr4(cpu::cr4() & !cr4::PGE | if pge { cr4::PGE } else { 0 }) };
        for (global, level) in [0, entry::GLOBAL]
            .iter()
            .flat_map(|&global| (1..=levels).map(move |level| (global, level)))
        {
            let mut frames = frames.start_over();
            let pair = Pair::new(&mut frames, level, global);
            toggle_global(&pair);
            // CR3 loads leave global translations.
            let count = if pge && global != 0 { 3 } else { FLUSHES.len() };
            for (what, flush) in &FLUSHES[..count] {
                pair.fresh(what, flush);
            }
            println!("leaf {level}, global {}, PGE {pge}: {count} flushes", global != 0);
        }
    }
    global_of_another(frames.start_over());
    // SAFETY: as above.
    unsafe { cpu::write_cr4(cpu::cr4() & !cr4::PGE) };
}

/// A global translation of another root is gone after PGE was off.
fn global_of_another(mut frames: FrameAllocator) {
    let pair = Pair::new(&mut frames, 1, entry::GLOBAL);
    let none = RootTable::new(&mut frames);
    pair.expect(0, "global");
    none.load();
    toggle_global(&pair);
    let found = access::read(pair.address);
    check!(found == Err(AccessFault::page(0, pair.address)), "global of another root: {found:x?}");
    println!("global translations end with PGE");
}

/// Rights that are added hold at the next access, and those that are taken away after a flush.
fn rights(frames: &FrameAllocator, levels: u32) {
    let cases = [
        ("present", entry::PRESENT, 0, MemoryAccess::kernel(Kind::Read), 0),
        ("present", entry::PRESENT, 0, MemoryAccess::user(Kind::Write), fault::USER | fault::WRITE),
        (
            "writable",
            entry::WRITE,
            0,
            MemoryAccess::kernel(Kind::Write),
            fault::PRESENT | fault::WRITE,
        ),
        ("user", entry::USER, 0, MemoryAccess::user(Kind::Read), fault::PRESENT | fault::USER),
        (
            "executable",
            0,
            entry::NX,
            MemoryAccess::kernel(Kind::Fetch),
            fault::PRESENT | fault::FETCH,
        ),
    ];
    for level in 1..=levels {
        let mut frames = frames.start_over();
        let pair = Pair::new(&mut frames, level, 0);
        for (place, number) in (level..=TOP).map(|number| (pair.entry(number), number)) {
            for &(what, cleared, set, access, code) in &cases {
                let flushes: [fn(&Pair); 3] = [invalidate, reload, other_and_back];
                for flush in flushes {
                    let full = place.load(SeqCst);
                    let perform = || access.perform(pair.address, DATA[0]);
                    check!(perform() == Ok(DATA[0]), "{what}: refused at first");
                    place.store(full & !cleared | set, SeqCst);
                    flush(&pair);
                    let found = perform();
                    let fault = Err(AccessFault::page(code, pair.address));
                    check!(found == fault, "not {what} at {number}: {found:x?}, not {fault:x?}");
                    // A read, where it is allowed, puts the translation with fewer rights into the
                    // TLB.
                    let _ = access::read(pair.address);
                    check!(perform() == fault, "not {what} at {number} after a read");
                    place.store(full, SeqCst);
                    let found = perform();
                    check!(found == Ok(DATA[0]), "{what} at {number} without a flush: {found:x?}");
                }
            }
        }
        println!("leaf {level}: rights come without a flush and go with one");
    }
}

/// `CR0.WP` and `EFER.NXE`, which change what a translation allows.
fn controls(frames: &FrameAllocator) {
    let mut frames = frames.start_over();
    let pair = Pair::new(&mut frames, 1, 0);
    let place = pair.entry(1);
    let full = place.load(SeqCst);
    let write = |wp: bool| {
        let bit = if wp { cr0::WP } else { 0 };
        // SAFETY: the program's pages are writable.
        unsafe { cpu::write_cr0(cpu::cr0() & !cr0::WP | bit) };
        access::write(pair.address, DATA[0])
    };
    place.store(full & !entry::WRITE, SeqCst);
    invalidate(&pair);
    let fault = Err(AccessFault::page(fault::PRESENT | fault::WRITE, pair.address));
    for _ in 0..3 {
        check!(write(true) == fault, "a write of a read-only page with WP");
        check!(write(false) == Ok(()), "a write of a read-only page without WP");
        check!(write(false) == Ok(()), "a second write without WP");
        pair.expect(0, "after writes");
    }
    check!(write(true) == fault, "a write of a read-only page with WP at last");
    place.store(full | entry::NX, SeqCst);
    invalidate(&pair);
    for nxe in [true, false, true, false, true] {
        set_nxe(nxe);
        reload(&pair);
        let found = MemoryAccess::kernel(Kind::Fetch).perform(pair.address, 0).map_err(|fault| {
            // P: see `paging-rights`.
            fault.error & !fault::PRESENT
        });
        let code = if nxe { fault::FETCH } else { fault::RESERVED };
        check!(found == Err(code), "a fetch with NXE {nxe}: {found:x?}");
        check!(access::read(pair.address).is_ok() == nxe, "a read with NXE {nxe}");
    }
    println!("WP and NXE hold at once");
}

/// Protection of user pages from CPL 0.
fn user_pages(frames: &FrameAllocator) {
    let mut frames = frames.start_over();
    let pair = Pair::new(&mut frames, 1, 0);
    let has = cpu::cpuid(leaf::EXTENDED_FEATURES, 0).ebx;
    for (feature, bit, kind, extra) in [
        (extended_b::SMEP, cr4::SMEP, Kind::Fetch, fault::FETCH),
        (extended_b::SMAP, cr4::SMAP, Kind::Read, 0),
    ] {
        if has & feature == 0 {
            println!("no {kind:?} protection of user pages");
            continue;
        }
        for on in [true, false, true, false] {
            // SAFETY: the program's pages are for CPL 0 only.
            unsafe { cpu::write_cr4(cpu::cr4() ^ bit) };
            let found = MemoryAccess::kernel(kind).perform(pair.address, DATA[0]);
            let expected = match on {
                true => Err(AccessFault::page(fault::PRESENT | extra, pair.address)),
                false => Ok(DATA[0]),
            };
            check!(found == expected, "{kind:?} of a user page, {on}: {found:x?}");
            let found = MemoryAccess { kind, user: false, ac: true }.perform(pair.address, DATA[0]);
            let allowed = !on || kind == Kind::Read;
            check!(found.is_ok() == allowed, "{kind:?} of a user page with AC, {on}: {found:x?}");
        }
    }
    println!("SMEP and SMAP hold at once");
}

fn set_nxe(on: bool) {
    let value = cpu::read_msr(msr::EFER).unwrap_or(0) & !efer::NXE;
    // SAFETY: the program's pages are executable.
    let written = unsafe { cpu::write_msr(msr::EFER, value | if on { efer::NXE } else { 0 }) };
    check!(written.is_ok(), "EFER.NXE cannot be {on}");
}

/// Tables that are changed through other addresses, shared by two addresses, and used as data.
fn aliases(frames: &FrameAllocator) {
    let mut frames = frames.start_over();
    let pair = Pair::new(&mut frames, 1, 0);
    let values = [pair.one, pair.two].map(|tables| tables.entry(&frames, pair.address, 1));
    let values = values.map(|entry| entry.load(SeqCst));
    let place = address_of(pair.entry(1));
    let (small, large) = (base(2), base(3));
    pair.one.map(&mut frames, small, 1, place & !(PAGE - 1) | KERNEL);
    pair.one.map(&mut frames, large, 2, place & !(LARGE - 1) | KERNEL);
    let doors = [place, small | (place % PAGE), large | (place % LARGE)];
    for round in 0..12 {
        let which = 1 - round % 2;
        let door = doors[round % doors.len()];
        check!(access::write(door, values[which]).is_ok(), "no way to the table by {door:#x}");
        invalidate(&pair);
        pair.expect(which, "changed through an alias");
    }
    println!("tables have {} addresses, 2 MiB pages too", doors.len());
    // Another address by the same table.
    let twin = pair.address + LARGE;
    let table = pair.entry(2).load(SeqCst);
    pair.one.entry(&frames, twin, 2).store(table, SeqCst);
    for which in [1, 0] {
        check!(access::read(twin) == Ok(DATA[1 - which]), "the twin before");
        pair.entry(1).store(values[which], SeqCst);
        invalidate(&pair);
        cpu::invalidate_page(twin);
        pair.expect(which, "a shared table");
        check!(access::read(twin) == Ok(DATA[which]), "a shared table by its other address");
    }
    println!("a table serves two addresses");
    // What was a table is data, and the other way round.

    let old = pair.entry(1);
    let new = frames.take();
    let copy = paging::entry_in(&frames, new, pair.address, 1);
    for round in 0..8u64 {
        copy.store(values[1], SeqCst);
        pair.entry(2).store(new | ALL, SeqCst);
        invalidate(&pair);
        pair.expect(1, "another table");
        old.store(round << 12, SeqCst);
        pair.expect(1, "the old table as data");
        check!(access::read(place) == Ok(round << 12), "data in an old table");
        old.store(values[0], SeqCst);
        pair.entry(2).store(table, SeqCst);
        invalidate(&pair);
        pair.expect(0, "the old table again");
    }
    println!("tables become data and tables again");
}

/// The address of a word, virtual and physical.
fn address_of(word: &AtomicU64) -> u64 {
    word.as_ptr().addr() as u64
}

/// Every encoding of INVLPG, with and without a segment and narrow addresses.
fn encodings(frames: &FrameAllocator) {
    /// Below 2 GiB, where displacements reach it.
    const NEAR: u64 = 0x5432_1000;
    const SEGMENTS: [(u32, u64); 2] =
        [(msr::FS_BASE, 0x1234_5000), (msr::GS_BASE, 0xffff_ffff_e000_0000)];
    let mut frames = frames.start_over();
    let [first, second] = frames.large.map(|large| large + OFFSET);
    let code = frames.take();
    let tables = RootTable::new(&mut frames);
    let far = address([0x1f3, 1, 2, 3]);
    for at in [NEAR, far] {
        tables.map(&mut frames, at, 1, first | ALL);
    }
    tables.load();
    for (register, base) in SEGMENTS {
        // SAFETY: nothing uses these segments.
        check!(unsafe { cpu::write_msr(register, base) }.is_ok(), "no base of a segment");
    }
    let with = |form: Form, prefixes: Prefixes, at: u64| {
        let place = tables.entry(&frames, at, 1);
        place.store(first | ALL, SeqCst);
        cpu::invalidate_page(at);
        check!(access::read(at) == Ok(DATA[0]), "before INVLPG");
        place.store(second | ALL, SeqCst);
        let words = frames.page(code);
        let done = encode::execute(form, prefixes, at + PAGE / 2, code, words);
        let found = access::read(at);
        check!(
            !done || found == Ok(DATA[1]),
            "INVLPG of {at:#x} by {form:x?} {prefixes:x?}: {found:x?}"
        );
        u32::from(done)
    };
    for rex in [0, 0x40, 0x41, 0x42, 0x43, 0x44, 0x48, 0x4f] {
        let near: u32 = Form::all(rex, 1).map(|form| with(form, Prefixes::NONE, NEAR)).sum();
        let far: u32 = Form::all(rex, 3).map(|form| with(form, Prefixes::NONE, far)).sum();
        println!("INVLPG with REX {rex:#x}: {near} and {far} encodings");
    }
    let [(_, fs), (_, gs)] = SEGMENTS;
    for (first, base) in [
        (0x64, fs),
        (0x65, gs),
        (0, 0),
        (0x66, 0),
        (0x2e, 0),
        (0x36, 0),
        (0x3e, 0),
        (0x26, 0),
        (0xf2, 0),
        (0xf3, 0),
    ] {
        for second in [0, 0x67] {
            let prefixes = Prefixes { bytes: [first, second], base };
            let forms = [0, 0x43].into_iter().flat_map(|rex| Form::all(rex, 7));
            let count: u32 = forms.map(|form| with(form, prefixes, NEAR)).sum();
            println!("INVLPG with prefixes {first:#x}, {second:#x}: {count} encodings");
        }
    }
}

/// INVLPG that does nothing, and one that is not allowed.
fn other_addresses(frames: &FrameAllocator) {
    let mut frames = frames.start_over();
    let pair = Pair::new(&mut frames, 1, 0);
    let absent = [0x7777_7777_7000, 0xffff_8888_8888_8888, 0xe000_0000];
    for address in absent.into_iter().chain([1 << 47, 1 << 63, (u64::MAX << 47) - 1]) {
        let found = MemoryAccess::kernel(Kind::Invalidate).perform(address, 0);
        check!(found == Ok(0), "INVLPG of {address:#x}: {found:x?}");
        pair.expect(0, "after INVLPG of another address");
    }
    let fault = Err(AccessFault { vector: trap::PROTECTION, error: 0, address: 0 });
    for address in [pair.address, 1 << 47] {
        let found = MemoryAccess::user(Kind::Invalidate).perform(address, 0);
        check!(found == fault, "INVLPG of {address:#x} at CPL 3: {found:x?}");
    }
    println!("INVLPG of absent and non-canonical addresses does nothing");
}

/// Tagged translations, if the CPU has them.
fn contexts(frames: &FrameAllocator) {
    if cpu::cpuid(leaf::FEATURES, 0).ecx & features_c::PCID == 0 {
        return println!("no PCID");
    }
    let mut frames = frames.start_over();
    let pair = Pair::new(&mut frames, 1, 0);
    // SAFETY: the processor has it, and CR3 has PCID 0.
    unsafe { cpu::set_cr4(cr4::PCIDE) };
    // SAFETY: both roots map the program.
    let load = |tables: RootTable, context: u64| unsafe { cpu::write_cr3(tables.0 | context) };
    for _ in 0..3 {
        for (tables, context, which) in [(pair.one, 1, 0), (pair.two, 2, 1)] {
            load(tables, context | KEEP);
            pair.expect(which, "PCID");
        }
        pair.exchange(1);
        for (tables, context, which) in [(pair.one, 1, 1), (pair.two, 2, 0)] {
            load(tables, context);
            pair.expect(which, "changed while another PCID ran");
        }
        pair.exchange(1);
        load(pair.one, 1);
        load(pair.two, 2);
    }
    pair.one.load();
    // SAFETY: CR3 has PCID 0.
    unsafe { cpu::write_cr4(cpu::cr4() & !cr4::PCIDE) };
    println!("translations of two PCIDs");
}

fn main() {
    access::init();
    set_nxe(true);
    let frames = FrameAllocator::new();
    for (large, data) in frames.large.into_iter().zip(DATA) {
        frames.word(large + OFFSET).store(data, SeqCst);
    }
    let levels = if paging::has_huge_pages() { 3 } else { 2 };
    flushes(&frames, levels);
    rights(&frames, levels);
    controls(&frames);
    user_pages(&frames);
    aliases(&frames);
    other_addresses(&frames);
    encodings(&frames);
    contexts(&frames);
    model::run(frames.start_over());
    println!("paging-flush: every translation is fresh");
}
