//! Two processors: the first changes tables that the second uses.

use super::{DATA, PLACE, tables};
use core::hint::spin_loop;
use core::sync::atomic::{AtomicU64, Ordering::SeqCst};
use guests_micro::access::{self, AccessFault};
use guests_micro::paging::{ALL, FrameAllocator, PAGE, RootTable};
use guests_micro::random::Random;
use guests_micro::{apic, boot, check, cpu, println, smp, trap};
use hw_x86::paging::{entry, fault};

/// Ticks that each race takes at least, and rounds that end it before.
const TIME: u64 = 4_000_000_000;
const ROUNDS: u64 = 20_000;
/// Limit in ticks for an answer of the other processor.
const PATIENCE: u64 = 60_000_000_000;
/// Bits of entries for software.
const SOFTWARE: u64 = 7 << 9 | 0x3f << 52;

/// The root that the second processor loads.
static ROOT: AtomicU64 = AtomicU64::new(0);
/// Orders so far; the second processor stores the number of the last one that it has finished.
static ORDERED: AtomicU64 = AtomicU64::new(0);
static FINISHED: AtomicU64 = AtomicU64::new(0);
/// Kind of the order.
static ORDER: AtomicU64 = AtomicU64::new(0);
/// Value that the second processor has read, or [`FAULTED`].
static FOUND: AtomicU64 = AtomicU64::new(0);
/// Accesses of the second processor, allowed and refused.
static ACCESSES: [AtomicU64; 2] = [const { AtomicU64::new(0) }; 2];
const FAULTED: u64 = 0;

/// Orders: write once after a flush; read and write until the next order; read once after a flush.
const WRITE: u64 = 0;
const STORM: u64 = 1;
const READ: u64 = 2;

/// Program of the second processor.
fn other() -> ! {
    RootTable(ROOT.load(SeqCst)).load();
    let mut finished = 0;
    loop {
        let order = ORDERED.load(SeqCst);
        if order == finished {
            spin_loop();
            continue;
        }
        match ORDER.load(SeqCst) {
            WRITE => {
                cpu::invalidate_page(PLACE);
                let done = access::write(PLACE, DATA[0]);
                check!(done == Ok(()), "the other processor cannot write: {done:x?}");
            }
            READ => {
                cpu::invalidate_page(PLACE);
                FOUND.store(access::read(PLACE).unwrap_or(FAULTED), SeqCst);
            }
            _ => {
                // The first processor waits for the beginning of this.
                FINISHED.store(order, SeqCst);
                while ORDERED.load(SeqCst) == order {
                    storm();
                }
            }
        }
        finished = order;
        FINISHED.store(order, SeqCst);
    }
}

/// Accesses while the entry changes: they find one of its values.
fn storm() {
    cpu::invalidate_page(PLACE);
    let found = access::read(PLACE);
    let absent = AccessFault::page(0, PLACE);
    let read = match found {
        Ok(value) => DATA.contains(&value),
        Err(fault) => fault == absent,
    };
    check!(read, "a read during changes: {found:x?}");
    let done = access::write(PLACE + 8, 1);
    let codes = [fault::WRITE, fault::WRITE | fault::PRESENT];
    let written = match done {
        Ok(()) => true,
        Err(AccessFault { vector, error, address }) => {
            vector == trap::PAGE_FAULT && codes.contains(&error) && address == PLACE + 8
        }
    };
    check!(written, "a write during changes: {done:x?}");
    for good in [found.is_ok(), done.is_ok()] {
        ACCESSES[usize::from(!good)].fetch_add(1, SeqCst);
    }
}

/// Gives an order, and does something until the other processor has finished it or, of a storm,
/// begun it.
fn order(kind: u64, mut meanwhile: impl FnMut()) {
    ORDER.store(kind, SeqCst);
    let number = ORDERED.load(SeqCst) + 1;
    ORDERED.store(number, SeqCst);
    let start = cpu::tsc();
    while FINISHED.load(SeqCst) != number {
        meanwhile();
        check!(cpu::tsc() - start < PATIENCE, "no answer to order {number}, {kind}");
    }
}

/// Accessed and dirty bits that one processor sets, software bits that the first one changes: none
/// is lost.
fn marks(random: &mut Random, place: &AtomicU64) -> u64 {
    const MARKS: u64 = entry::ACCESSED | entry::DIRTY;
    let mut software = 0;
    let start = cpu::tsc();
    for round in 0..ROUNDS {
        let clear = if round % 2 == 0 { MARKS } else { entry::DIRTY };
        place.fetch_and(!clear, SeqCst);
        order(WRITE, || {
            let bits = random.word() & SOFTWARE;
            software ^= bits;
            place.fetch_xor(bits, SeqCst);
        });
        let value = place.load(SeqCst);
        check!(value & MARKS == MARKS, "round {round}: {value:#x} lacks what a write sets");
        check!(value & SOFTWARE == software, "round {round}: {value:#x} has lost {software:#x}");
        if cpu::tsc() - start > TIME {
            return round + 1;
        }
    }
    ROUNDS
}

/// A word of the tables changes between values while the other processor accesses; afterwards the
/// last value holds.
fn changes(random: &mut Random, place: &AtomicU64, values: &[(u64, u64)]) -> u64 {
    const CHANGES: u64 = 500;
    let start = cpu::tsc();
    for round in 0..ROUNDS {
        order(STORM, || {});
        for _ in 0..CHANGES {
            place.store(values[random.below(values.len() as u64) as usize].0, SeqCst);
        }
        let (value, data) = values[random.below(values.len() as u64) as usize];
        place.store(value, SeqCst);
        order(READ, || {});
        let found = FOUND.load(SeqCst);
        check!(found == data, "round {round}: {value:#x} shows {found:#x} instead of {data:#x}");
        if cpu::tsc() - start > TIME {
            return round + 1;
        }
    }
    ROUNDS
}

/// Runs the races, if there are two processors.
pub fn run(frames: &FrameAllocator) {
    let mut frames = frames.start_over();
    let (tables, entries) = tables(&mut frames);
    apic::enable();
    let first = apic::id();
    let Some(id) = boot::processors().map(u32::from).find(|&id| id != first) else {
        return println!("one processor: no races");
    };
    ROOT.store(tables.0, SeqCst);
    smp::start(1, id, other);
    let mut random = Random(3);
    let place = tables.entry(&frames, PLACE, 1);
    let rounds = marks(&mut random, place);
    println!("{rounds} rounds with marks of two processors");
    let values = [
        (entries[0], DATA[0]),
        (entries[1], DATA[1]),
        (entries[1] & !entry::WRITE, DATA[1]),
        (0, FAULTED),
    ];
    let rounds = changes(&mut random, place, &values);
    println!("{rounds} rounds with an entry that changes");
    place.store(entries[0], SeqCst);
    // A table of level 1 is exchanged; both have the same page for the address behind.
    let table = tables.entry(&frames, PLACE, 2);
    let second = frames.take();
    let index = (PLACE / PAGE) as usize % frames.page(second).len();
    frames.page(second)[index].store(entries[1], SeqCst);
    let values = [(table.load(SeqCst), DATA[0]), (second | ALL, DATA[1]), (0, FAULTED)];
    let rounds = changes(&mut random, table, &values);
    let [allowed, refused] = ACCESSES.each_ref().map(|count| count.load(SeqCst));
    println!("{rounds} rounds with a table that changes");
    println!("meanwhile {allowed} accesses were allowed and {refused} refused");
    smp::stop(id);
}
