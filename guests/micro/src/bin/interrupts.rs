//! Many interrupt sources pending at once: all arrive, each once, in order of priority, none lost.
//!
//! Sources: messages from the processor to itself, its local timer, and the timer chip through the
//! I/O APIC. The order is that of the local APIC: higher vectors first (APM vol. 2 §16.6.3).
#![no_std]
#![no_main]

use core::sync::atomic::{AtomicU8, AtomicUsize, Ordering::Relaxed};
use guests_micro::random::Random;
use guests_micro::trap::TrapFrame;
use guests_micro::{apic, check, cpu, guest, println};
use hw_x86::apic::local::{TIMER_ONE_SHOT, TPR};

guest!(main, trap);

const ROUNDS: u64 = 300;
/// First vector that is sent; classes 0 and 1 do not exist.
const FIRST: u8 = 0x30;
/// The spurious vector is the only one above.
const LAST: u8 = 0xfe;
/// During the handler of this vector, further ones are sent in `nesting`.
const NESTED: u8 = 0x61;
/// TSC ticks after which an interrupt that has not come counts as lost.
const PATIENCE: u64 = 20_000_000_000;

/// Vectors in the order of arrival.
static ARRIVED: [AtomicU8; 512] = [const { AtomicU8::new(0) }; 512];
static COUNT: AtomicUsize = AtomicUsize::new(0);
/// Set while the handler of [`NESTED`] is to send others.
static NESTING: AtomicU8 = AtomicU8::new(0);

fn trap(frame: &mut TrapFrame) {
    let vector = frame.vector();
    if vector < FIRST {
        guests_micro::trap::unexpected(frame);
    }
    let index = COUNT.fetch_add(1, Relaxed);
    check!(index < ARRIVED.len(), "more interrupts than were sent, the last {vector:#x}");
    ARRIVED[index].store(vector, Relaxed);
    if vector == NESTED && NESTING.swap(0, Relaxed) != 0 {
        apic::send_self(NESTED - 0x20);
        apic::send_self(NESTED + 1);
        apic::send_self(NESTED + 0x20);
        wait_for(NESTED + 0x20);
        // Only the last one has a higher class than what is in service.
        cpu::take_interrupts();
        check!(COUNT.load(Relaxed) == index + 2, "nesting: {} more", COUNT.load(Relaxed) - index);
    }
    apic::end_of_interrupt();
}

fn main() {
    apic::enable();
    let mut random = Random(1);
    let mut total = 0;
    for paravirtual in [false, true] {
        if paravirtual && !apic::use_paravirtual_eoi() {
            println!("interrupts: no paravirtual end of interrupt");
            break;
        }
        for round in 0..ROUNDS {
            total += all_at_once(&mut random, round);
        }
        nesting();
        priorities();
        late_priorities();
        let ends = apic::quiet_ends();
        check!(paravirtual == (ends > 0), "{ends} interrupts were ended in memory");
    }
    println!("interrupts: {total} of {total} in {ROUNDS} rounds arrived in order");
}

/// Waits until a vector is requested.
fn wait_for(vector: u8) {
    let start = cpu::tsc();
    while !apic::requested(vector) {
        check!(cpu::tsc() - start < PATIENCE, "vector {vector:#x} was never requested");
    }
}

/// Makes a random set of vectors pending with interrupts off, then lets them in.
fn all_at_once(random: &mut Random, round: u64) -> usize {
    COUNT.store(0, Relaxed);
    let mut wanted = [false; 256];
    let mut add = |random: &mut Random| loop {
        let vector = FIRST + random.below(u64::from(LAST - FIRST) + 1) as u8;
        if !core::mem::replace(&mut wanted[usize::from(vector)], true) {
            return vector;
        }
    };
    let timer = add(random);
    apic::start_timer(TIMER_ONE_SHOT, timer, 1000 + random.below(5000) as u32);
    let chip = add(random);
    apic::route_pit(Some(chip));
    apic::start_pit(20 + random.below(200) as u16);
    for _ in 0..random.below(40) {
        let vector = add(random);
        apic::send_self(vector);
        // Twice before it is taken is once.
        if random.below(4) == 0 {
            apic::send_self(vector);
        }
    }
    for vector in FIRST..=LAST {
        if wanted[usize::from(vector)] {
            wait_for(vector);
        }
    }
    check!(COUNT.load(Relaxed) == 0, "an interrupt came while they were off");
    if random.below(2) == 0 {
        cpu::take_interrupts();
    } else {
        cpu::enable_and_halt();
        cpu::disable_interrupts();
    }
    apic::route_pit(None);
    let mut index = 0;
    for vector in (FIRST..=LAST).rev() {
        if wanted[usize::from(vector)] {
            let arrived = ARRIVED[index].load(Relaxed);
            check!(
                index < COUNT.load(Relaxed) && arrived == vector,
                "round {round}: {arrived:#x} instead of {vector:#x} as number {index} of {}",
                COUNT.load(Relaxed)
            );
            index += 1;
        }
    }
    check!(COUNT.load(Relaxed) == index, "round {round}: more interrupts than sources");
    index
}

/// A handler that lets interrupts in gets those of a higher class, the others after its end.
fn nesting() {
    COUNT.store(0, Relaxed);
    NESTING.store(1, Relaxed);
    apic::send_self(NESTED);
    wait_for(NESTED);
    cpu::take_interrupts();
    let arrived: [u8; 4] = core::array::from_fn(|index| ARRIVED[index].load(Relaxed));
    let expected = [NESTED, NESTED + 0x20, NESTED + 1, NESTED - 0x20];
    check!(arrived == expected, "nesting: {arrived:x?} instead of {expected:x?}");
    check!(COUNT.load(Relaxed) == 4, "nesting: {} interrupts", COUNT.load(Relaxed));
}

/// The task priority holds off its class and those below.
fn priorities() {
    COUNT.store(0, Relaxed);
    let vectors = [0x45, 0x8f, 0x90, 0xc0];
    for vector in vectors {
        apic::send_self(vector);
        wait_for(vector);
    }
    for (priority, arrived) in [(0xf, 0), (0x9, 1), (0x8, 2), (0x4, 3), (0x3, 4)] {
        cpu::set_priority(priority);
        cpu::take_interrupts();
        let count = COUNT.load(Relaxed);
        check!(count == arrived, "priority {priority:#x} let {count} interrupts in, not {arrived}");
    }
    cpu::set_priority(0);
}

/// The task priority is one register with two names, and holds off what comes while it is high:
/// also what the local timer sends later, and what waits for interrupts to be on when it is raised.
fn late_priorities() {
    const SHORT: u32 = 2_000;
    const VECTOR: u8 = 0x61;
    for priority in 0..16 {
        cpu::set_priority(priority);
        let (register, shown) = (apic::read(TPR), cpu::priority());
        check!(shown == priority, "CR8 is {shown:#x}, not {priority:#x}");
        // Its lower half is compared with nothing; a host may not see that a write of CR8 clears
        // it.
        let class = u64::from(register >> 4);
        check!(class == priority, "TPR is {register:#x} at CR8 {priority:#x}");
        apic::write(TPR, 0xf0 - (register & 0xf0) + 5);
        let shown = cpu::priority();
        check!(shown == 0xf - priority, "CR8 is {shown:#x} after TPR {:#x}", 0xf - priority);
    }
    COUNT.store(0, Relaxed);
    let arrive = |what, wanted| {
        cpu::take_interrupts();
        let count = COUNT.swap(0, Relaxed);
        check!(count == wanted, "{what}: {count} interrupts instead of {wanted}");
    };
    for round in 0..20 {
        // Raised and lowered while nothing is there, as most often.
        for priority in [0xf, 0, 7, round & 5] {
            cpu::set_priority(priority);
        }
        apic::start_timer(TIMER_ONE_SHOT, VECTOR, SHORT);
        let start = cpu::tsc();
        while COUNT.load(Relaxed) == 0 {
            cpu::take_interrupts();
            check!(cpu::tsc() - start < PATIENCE, "the timer is held off by a low priority");
        }
        arrive("once", 1);
        apic::start_timer(TIMER_ONE_SHOT, VECTOR, SHORT);
        cpu::set_priority(6);
        wait_for(VECTOR);
        arrive("class 6 at priority 6", 0);
        cpu::set_priority(9);
        arrive("class 6 at priority 9", 0);
        cpu::set_priority(5);
        arrive("class 6 at priority 5", 1);
        // It waits already when the priority is raised.
        apic::send_self(VECTOR);
        wait_for(VECTOR);
        cpu::set_priority(8);
        arrive("class 6 at priority 8", 0);
        cpu::set_priority(0);
        arrive("class 6 at priority 0", 1);
    }
}
