//! Cost of an IPI: prints `VB name value ns`, in ticks of the time-stamp counter. On the measuring
//! machine a tick is a nanosecond and an instruction. Needs a hypervisor whose virtual CPUs have
//! the same counter.
//!
//! The processors take turns: one sends a message and sleeps, the other is woken by it and sends
//! the next. A message takes from before the instruction that sends it to the beginning of its
//! handler.
#![no_std]
#![no_main]

use core::sync::atomic::{AtomicU32, AtomicU64, Ordering::SeqCst};
use guests_micro::trap::TrapFrame;
use guests_micro::{apic, boot, check, cpu, guest, println, smp};
use hw_x86::apic::local;
use hw_x86::cpuid::{features_c, leaf};

guest!(main, trap);

const MESSAGE: u8 = 0x40;
/// Messages before measuring, so that every table is warm.
const WARM: u32 = 200;
/// Messages measured.
const COUNT: u32 = 10_000;

/// Messages sent, and received, by both.
static SENT: AtomicU32 = AtomicU32::new(0);
static RECEIVED: AtomicU32 = AtomicU32::new(0);
/// When the last message was sent.
static AT: AtomicU64 = AtomicU64::new(0);
/// Ticks that all messages measured took, and the round trips with everything in between.
static TICKS: AtomicU64 = AtomicU64::new(0);
static FIRST: AtomicU64 = AtomicU64::new(0);

fn trap(frame: &mut TrapFrame) {
    let now = cpu::tsc();
    match (frame.vector(), RECEIVED.load(SeqCst)) {
        (MESSAGE, ..WARM) => FIRST.store(now, SeqCst),
        (MESSAGE, _) => {
            TICKS.fetch_add(now - AT.load(SeqCst), SeqCst);
        }
        _ => guests_micro::trap::unexpected(frame),
    }
    RECEIVED.fetch_add(1, SeqCst);
    apic::end_of_interrupt();
}

/// Sends the next message, unless it was the last.
fn send(id: u32) {
    if SENT.fetch_add(1, SeqCst) < WARM + COUNT {
        AT.store(cpu::tsc(), SeqCst);
        apic::send(id, u32::from(MESSAGE) | local::ICR_ASSERT);
    }
}

/// The second processor answers the first.
fn other() -> ! {
    check!(apic::switch_to_x2apic().is_ok(), "the second processor has no x2APIC mode");
    let first = IDS[0].load(SeqCst);
    READY.store(1, SeqCst);
    while READY.load(SeqCst) == 1 {
        core::hint::spin_loop();
    }
    apic::enable();
    READY.store(3, SeqCst);
    loop {
        cpu::enable_and_halt();
        cpu::disable_interrupts();
        send(first);
    }
}

/// 1: the second processor is in x2APIC mode; 2: so is the first; 3: messages may come.
static READY: AtomicU32 = AtomicU32::new(0);
static IDS: [AtomicU32; 1] = [AtomicU32::new(0)];

fn main() {
    let first = apic::id();
    IDS[0].store(first, SeqCst);
    let Some(second) = boot::processors().map(u32::from).find(|&id| id != first) else {
        println!("ipi: needs two processors");
        return;
    };
    if cpu::cpuid(leaf::FEATURES, 0).ecx & features_c::X2APIC == 0 {
        println!("ipi: this processor has no x2APIC");
        return;
    }
    apic::enable();
    smp::start(1, second, other);
    while READY.load(SeqCst) != 1 {
        core::hint::spin_loop();
    }
    check!(apic::enter_x2apic().is_ok(), "the first processor has no x2APIC mode");
    READY.store(2, SeqCst);
    while READY.load(SeqCst) != 3 {
        core::hint::spin_loop();
    }
    while RECEIVED.load(SeqCst) < WARM + COUNT {
        send(second);
        cpu::enable_and_halt();
        cpu::disable_interrupts();
    }
    let round = (cpu::tsc() - FIRST.load(SeqCst)) * 10 / u64::from(COUNT);
    let tenths = TICKS.load(SeqCst) * 10 / u64::from(COUNT);
    println!("VB ipi {}.{} ns", tenths / 10, tenths % 10);
    println!("VB ipi_turn {}.{} ns", round / 10, round % 10);
}
