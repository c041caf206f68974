//! Time of a vCPU beside one that loads `CR3`, invalidates pages, and faults without end, compared
//! with its time beside one that computes. The other vCPU takes turns; the first prints both times.
//! The command line may have `most`, the most that the time may grow, per mille.
#![no_std]
#![no_main]

use core::hint::spin_loop;
use core::sync::atomic::{AtomicBool, AtomicU64, Ordering::SeqCst};
use guests_micro::paging::{ALL, FrameAllocator, PAGE, RootTable, address};
use guests_micro::{access, apic, boot, check, cpu, guest, println, smp};

guest!(main);

/// Repetitions of both phases; the median counts.
const SAMPLES: usize = 5;
/// Steps of the work that is measured.
const WORK: u64 = 40_000_000;
/// Number of pages that it touches in turn.
const PAGES: u64 = 64;
/// Limit in ticks for the start of a phase.
const PATIENCE: u64 = 20_000_000_000;
const PLACE: u64 = address([17, 5, 7, 9]);

static ROOTS: [AtomicU64; 2] = [const { AtomicU64::new(0) }; 2];
/// The phase that is asked for, and the one that the other vCPU is in.
static STORM: AtomicBool = AtomicBool::new(false);
static STORMS: AtomicBool = AtomicBool::new(false);
static COUNT: AtomicU64 = AtomicU64::new(0);

/// Program of the other vCPU.
fn other() -> ! {
    loop {
        STORMS.store(false, SeqCst);
        while !STORM.load(SeqCst) {
            spin_loop();
        }
        STORMS.store(true, SeqCst);
        while STORM.load(SeqCst) {
            for root in &ROOTS {
                RootTable(root.load(SeqCst)).load();
                // Nothing is there.
                let found = access::read(PLACE);
                check!(found.is_err(), "a page that is not mapped: {found:x?}");
                cpu::invalidate_page(PLACE);
            }
            COUNT.fetch_add(1, SeqCst);
        }
    }
}

/// Ticks of a fixed piece of work.
fn work(first: u64) -> u64 {
    let start = cpu::tsc();
    let mut sum = 0u64;
    for step in 0..WORK {
        // SAFETY: pages of the program, as many as there are.
        let word = unsafe { ((first + step % PAGES * PAGE) as *const u64).read_volatile() };
        sum = sum.rotate_left(5) ^ word;
    }
    // The memory holds zeros.
    check!(sum == 0, "the work gives {sum:#x}");
    cpu::tsc() - start
}

fn main() {
    apic::enable();
    let mut frames = FrameAllocator::new();
    let first = frames.take();
    for _ in 1..PAGES {
        frames.take();
    }
    for root in &ROOTS {
        let tables = RootTable::new(&mut frames);
        tables.map(&mut frames, PLACE + PAGE, 1, first | ALL);
        root.store(tables.0, SeqCst);
    }
    let own = apic::id();
    let Some(id) = boot::processors().map(u32::from).find(|&id| id != own) else {
        return println!("paging-neighbour: one processor has no neighbour");
    };
    smp::start(1, id, other);
    let mut samples = [[0; 2]; SAMPLES];
    for sample in &mut samples {
        for storm in [false, true] {
            STORM.store(storm, SeqCst);
            let begun = smp::wait(PATIENCE, || STORMS.load(SeqCst) == storm);
            check!(begun, "the other vCPU does not begin phase {storm}");
            sample[usize::from(storm)] = work(first);
        }
    }
    smp::stop(id);
    let [calm, storm] = [0, 1].map(|phase| {
        let mut ticks = samples.map(|sample| sample[phase]);
        ticks.sort_unstable();
        ticks[SAMPLES / 2]
    });
    let count = COUNT.load(SeqCst);
    check!(count > 0, "the other vCPU has done nothing");
    let change = (storm as i64 - calm as i64) * 1000 / calm as i64;
    println!("beside one that computes {calm} ticks, beside one that loads CR3 {storm} ticks");
    let most = boot::argument("most");
    check!(most.is_none_or(|most| change <= most as i64), "{change} per mille more");
    println!("paging-neighbour: {change} per mille more, {count} turns");
}
