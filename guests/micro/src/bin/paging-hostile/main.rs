//! Page tables that no sensible kernel has: tables that map themselves, a table that is also code
//! and stack, devices behind pages, very many roots, changes of mode, and tables that one processor
//! changes while another one uses them.
#![no_std]
#![no_main]

mod modes;
mod race;

use core::arch::{asm, global_asm};
use core::sync::atomic::{AtomicU64, Ordering::SeqCst};
use guests_micro::access::{self, UD2};
use guests_micro::paging::{
    self, ALL, FrameAllocator, KERNEL, LARGE, PAGE, RootTable, TOP, address,
};
use guests_micro::random::Random;
use guests_micro::{apic, boot, check, cpu, guest, println};
use hw_x86::apic::local;
use hw_x86::paging::{ENTRIES, entry, level_shift};

guest!(main);

/// Distance of the data in the two large pages from their starts.
const OFFSET: u64 = 0x12_3000;
/// Contents of the two pages.
const DATA: [u64; 2] = [0xaaaa_0000 | UD2, 0xbbbb_0000 | UD2];
const INDICES: [u64; 4] = [17, 5, 7, 9];
/// The address that programs map.
const PLACE: u64 = address(INDICES);
/// Slot of the root that leads to the root.
const SLOT: u64 = 300;

/// Tables in which [`PLACE`] leads to the first page, and entries for both.
fn tables(frames: &mut FrameAllocator) -> (RootTable, [u64; 2]) {
    let entries = frames.large.map(|large| (large + OFFSET) | ALL);
    let tables = RootTable::new(frames);
    tables.map(frames, PLACE, 1, entries[0]);
    tables.load();
    (tables, entries)
}

fn expect(what: &str, address: u64, value: u64) {
    let found = access::read(address);
    check!(found == Ok(value), "{what} at {address:#x}: {found:x?} instead of {value:#x}");
}

fn write(what: &str, address: u64, value: u64) {
    let done = access::write(address, value);
    check!(done == Ok(()), "{what}: no write at {address:#x}: {done:x?}");
}

/// Tables that are reached through an entry of the root that leads to the root.
fn recursive(frames: &FrameAllocator) {
    let mut frames = frames.start_over();
    let (tables, entries) = tables(&mut frames);
    let root = &frames.page(tables.0)[SLOT as usize];
    root.store(tables.0 | KERNEL, SeqCst);
    let [four, three, two, one] = INDICES;
    let windows = [
        address([SLOT, four, three, two]) + one * 8,
        address([SLOT, SLOT, four, three]) + two * 8,
        address([SLOT, SLOT, SLOT, four]) + three * 8,
        address([SLOT, SLOT, SLOT, SLOT]) + four * 8,
    ];
    for (window, level) in windows.into_iter().zip(1..=TOP) {
        let found = access::read(window).map(|value| value & entry::ADDRESS);
        let value = tables.entry(&frames, PLACE, level).load(SeqCst) & entry::ADDRESS;
        check!(found == Ok(value), "level {level} by itself: {found:x?} instead of {value:#x}");
    }
    for round in 0..100 {
        let which = 1 - round % 2;
        write("an entry by its window", windows[0], entries[which]);
        cpu::invalidate_page(PLACE);
        expect("after a change by the window", PLACE, DATA[which]);
    }
    // Another table at level 2: the window shows its entries.
    let other = frames.take();
    frames.page(other)[one as usize].store(entries[1], SeqCst);
    let first = access::read(windows[1]).unwrap_or(0);
    for round in 0..100 {
        let (table, which) = if round % 2 == 0 { (other | ALL, 1) } else { (first, 0) };
        write("a table by its window", windows[1], table);
        cpu::invalidate_page(windows[0]);
        cpu::invalidate_page(PLACE);
        expect("by the other table", PLACE, DATA[which]);
        let found = access::read(windows[0]).map(|value| value & entry::ADDRESS);
        check!(found == Ok(entries[which] & entry::ADDRESS), "the window shows {found:x?}");
    }
    // The root as a page: its own entry is its leaf.
    root.store(tables.0 | KERNEL, SeqCst);
    cpu::invalidate_page(windows[3]);
    write("the root by itself", address([SLOT; 4]) + 8 * (SLOT + 1), 0);
    let marks = root.load(SeqCst) & (entry::ACCESSED | entry::DIRTY);
    check!(marks == entry::ACCESSED | entry::DIRTY, "the root's leaf is marked {marks:#x}");
    // The root is read-only for itself, and an entry that takes away the window.
    root.store(tables.0 | entry::PRESENT, SeqCst);
    cpu::invalidate_page(windows[3]);
    check!(access::write(windows[3], 0).is_err(), "a read-only root is written");
    root.store(0, SeqCst);
    cpu::invalidate_page(windows[0]);
    check!(access::read(windows[0]).is_err(), "a window without its entry");
    println!("a root that leads to itself");
}

// Runs in a page that is its own table of level 1, with its stack there, too. RDI: the page; RSI: a
// value for the entry of the page behind it. Returns what it reads there.
global_asm!(
    r#"
    .text
    .balign 16
guest_in_table:
    mov rcx, rsp
    lea rsp, [rdi + {page}]
    push rsi
    pop rax
    mov [rdi + {next}], rax
    lea rdx, [rdi + {page}]
    invlpg [rdx]
    push rdx
    call 3f
    pop rdx
    mov rsp, rcx
    ret
3:  mov rax, [rdx]
    ret
    .balign 8
guest_in_table_end:
    "#,
    page = const PAGE,
    next = const (INDICES[3] + 1) * 8,
);

// SAFETY: labels of the code above.
unsafe extern "C" {
    static guest_in_table: u64;
    static guest_in_table_end: u64;
}

/// A page that is a table, code, and a stack.
fn everything_at_once(frames: &FrameAllocator) {
    let mut frames = frames.start_over();
    let (tables, entries) = tables(&mut frames);
    let table = tables.entry(&frames, PLACE, 2).load(SeqCst) & entry::ADDRESS;
    let words = frames.page(table);
    words[INDICES[3] as usize].store(table | KERNEL, SeqCst);
    cpu::invalidate_page(PLACE);
    const CODE: usize = ENTRIES / 2;
    let from = &raw const guest_in_table;
    let count = ((&raw const guest_in_table_end).addr() - from.addr()) / 8;
    for index in 0..count {
        // SAFETY: code between two labels.
        words[CODE + index].store(unsafe { from.add(index).read() }, SeqCst);
    }
    for round in 0..1000 {
        let which = round % 2;
        let found: u64;
        // SAFETY: the code in the page follows the calling convention, changes an entry of a page
        // that nothing uses, and uses the end of its own page as a stack.
        unsafe {
            asm!("call {code}", code = in(reg) PLACE + CODE as u64 * 8, in("rdi") PLACE,
                in("rsi") entries[which], out("rax") found, out("rcx") _, out("rdx") _);
        }
        check!(found == DATA[which], "round {round} in a table: {found:#x}");
    }
    let marks = words[INDICES[3] as usize].load(SeqCst);
    check!(marks & entry::DIRTY != 0, "a page with a stack is not dirty: {marks:#x}");
    println!("a table that is code and stack");
}

/// Pages of devices and of nothing, beside memory and in its place.
fn devices(frames: &FrameAllocator) {
    const APIC: u64 = 0xfee0_0000;
    const HOLE: u64 = 0xd000_0000;
    const ONES: u64 = u64::MAX;
    let mut frames = frames.start_over();
    let (tables, entries) = tables(&mut frames);
    apic::enable();
    let version = apic::read(local::VERSION);
    let place = tables.entry(&frames, PLACE, 1);
    for round in 0..20 {
        place.store(APIC | ALL, SeqCst);
        cpu::invalidate_page(PLACE);
        // SAFETY: the page is the local APIC's.
        let found = unsafe { ((PLACE + u64::from(local::VERSION)) as *const u32).read_volatile() };
        check!(found == version, "round {round}: the APIC's version is {found:#x}");
        place.store(HOLE | ALL, SeqCst);
        cpu::invalidate_page(PLACE);
        expect("nothing", PLACE, ONES);
        write("nothing", PLACE, round);
        expect("nothing, written", PLACE, ONES);
        place.store(entries[round as usize % 2], SeqCst);
        cpu::invalidate_page(PLACE);
        expect("memory again", PLACE, DATA[round as usize % 2]);
    }
    // Large pages, with memory and without.
    let large = address([17, 6, 0, 0]);
    let memory = frames.large[1];
    tables.map(&mut frames, large, 2, memory | ALL);
    expect("a large page", large + OFFSET, DATA[1]);
    for base in [HOLE, APIC, frames.large[0]] {
        tables.entry(&frames, large, 2).store(base | ALL | entry::LARGE, SeqCst);
        cpu::invalidate_page(large);
        match base {
            HOLE => expect("a large page of nothing", large + OFFSET, ONES),
            APIC => {
                let at = large + u64::from(local::VERSION);
                // SAFETY: the page begins with the local APIC.
                let found = unsafe { (at as *const u32).read_volatile() };
                check!(found == version, "a large page of the APIC: {found:#x}");
            }
            _ => expect("a large page of memory again", large + OFFSET, DATA[0]),
        }
    }
    if paging::has_huge_pages() {
        let huge = address([18, 0, 0, 0]);
        tables.map(&mut frames, huge, 3, ALL);
        expect("memory in a huge page", huge + frames.large[0] + OFFSET, DATA[0]);
        expect("nothing in a huge page", huge + (1 << 29), ONES);
        expect("memory after nothing", huge + frames.large[1] + OFFSET, DATA[1]);
    }
    println!("pages of devices and of nothing");
}

/// Tables that lead nowhere, but that no access needs: they do nothing.
fn unused(frames: &FrameAllocator) {
    let mut frames = frames.start_over();
    let (tables, _) = tables(&mut frames);
    let bases = [0xd000_0000, 0xfee0_0000, 1 << 36, (1 << paging::physical_bits()) - PAGE];
    let root = frames.page(tables.0);
    for (word, base) in root[20..].iter().zip(bases) {
        word.store(base | ALL, SeqCst);
    }
    for level in 1..TOP {
        let at = address([30, 0, 0, 0]) + (1 << level_shift(level + 1));
        tables.map(&mut frames, at, level + 1, 0);
        tables.entry(&frames, at, level + 1).store(bases[level as usize] | ALL, SeqCst);
    }
    tables.load();
    expect("beside tables that lead nowhere", PLACE, DATA[0]);
    for index in 20..24 {
        cpu::invalidate_page(address([index, 1, 1, 1]));
    }
    expect("beside tables that lead nowhere, flushed", PLACE, DATA[0]);
    println!("tables outside memory that no access needs");
}

/// Entries of roots by which [`PLACE`] leads to different pages, whose contents are 1, 2, and so
/// on.
fn chains(frames: &mut FrameAllocator) -> [u64; CHAINS] {
    core::array::from_fn(|index| {
        let data = frames.take();
        frames.word(data).store(index as u64 + 1, SeqCst);
        let chain = RootTable::new(frames);
        chain.map(frames, PLACE, 1, data | ALL);
        chain.entry(frames, PLACE, TOP).load(SeqCst)
    })
}

/// Very many values of `CR3`, some of whose tables change while others are in use.
fn roots(frames: &FrameAllocator) {
    /// Pages that stay free.
    const REST: u64 = 64;
    /// Bits of `CR3` that name no table without PCIDs: values that differ in these only are
    /// different, too.
    const SPARE: u64 = 0xff8;
    let mut frames = frames.start_over();
    let (first, _) = tables(&mut frames);
    let chains = chains(&mut frames);
    let count = frames.left().saturating_sub(REST).min(4096);
    let begin = frames.take();
    for _ in 1..count {
        frames.take();
    }
    let slot = |root: u64| &frames.page(begin + root * PAGE)[INDICES[0] as usize];
    let shown = |root: u64, chain: usize| slot(root).store(chains[chain], SeqCst);
    for root in 0..count {
        let words = frames.page(begin + root * PAGE);
        for (word, value) in words.iter().zip(frames.page(first.0)) {
            word.store(value.load(SeqCst), SeqCst);
        }
        shown(root, root as usize % CHAINS);
    }
    let limit = boot::argument("roots").unwrap_or(ROOTS);
    let mut random = Random(7);
    let mut total = 0;
    let start = cpu::tsc();
    for load in 0..limit {
        if load % 1024 == 0 && cpu::tsc() - start > TIME {
            println!("{load} of {limit} values of CR3, after which the time is over");
            break;
        }
        total = load + 1;
        let root = load % count;
        let value = (begin + root * PAGE) | ((load / count * 8) & SPARE);
        // SAFETY: all of these map the program to itself.
        unsafe { cpu::write_cr3(value) };
        // Not every root is used, and another one changes now and then.
        if load % 3 == 0 {
            // SAFETY: every root maps this page.
            let found = unsafe { (PLACE as *const u64).read_volatile() };
            let chain = chains.iter().position(|chain| {
                chain & entry::ADDRESS == slot(root).load(SeqCst) & entry::ADDRESS
            });
            check!(chain == Some(found as usize - 1), "root {root} shows page {found}");
        }
        if load % 7 == 0 {
            shown((root + random.below(count)) % count, random.below(CHAINS as u64) as usize);
            // The change may have been one of the root in use.
            cpu::invalidate_page(PLACE);
        }
    }
    let each = (cpu::tsc() - start) / total.max(1);
    println!("{total} values of CR3, {count} roots, {each} ticks each");
    fast(&mut frames);
}

/// Entries that roots share.
const CHAINS: usize = 16;
/// Values of `CR3`, unless the command line has `roots`.
const ROOTS: u64 = 1_000_000;
/// Ticks after which there are no more of them.
const TIME: u64 = 150_000_000_000;

/// Loads of `CR3` at full speed: the same value, and two in turn.
fn fast(frames: &mut FrameAllocator) {
    const LOADS: u64 = 200_000;
    let mut frames = frames.start_over();
    let (one, _) = tables(&mut frames);
    let two = RootTable::share(&mut frames, one);
    for (what, pair) in [("one root", [one, one]), ("two roots in turn", [one, two])] {
        let start = cpu::tsc();
        for _ in 0..LOADS / 2 {
            pair.iter().for_each(|tables| tables.load());
        }
        let each = (cpu::tsc() - start) / LOADS;
        expect("after many loads", PLACE, DATA[0]);
        println!("{LOADS} loads of {what}, {each} ticks each");
    }
}

/// The address of a word, virtual and physical.
fn address_of(word: &AtomicU64) -> u64 {
    word.as_ptr().addr() as u64
}

fn main() {
    access::init();
    let frames = FrameAllocator::new();
    for (large, data) in frames.large.into_iter().zip(DATA) {
        frames.word(large + OFFSET).store(data, SeqCst);
    }
    check!(frames.large[0] < LARGE * 64, "RAM begins at {:#x}", frames.large[0]);
    recursive(&frames);
    everything_at_once(&frames);
    devices(&frames);
    unused(&frames);
    modes::run(&frames);
    race::run(&frames);
    roots(&frames);
    println!("paging-hostile: the machine bears it");
}
