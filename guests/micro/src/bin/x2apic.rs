//! The local APIC in both modes, and its timer in all three.
#![no_std]
#![no_main]

use core::sync::atomic::{AtomicU32, Ordering::Relaxed};
use guests_micro::trap::{PROTECTION, TrapFrame};
use guests_micro::{apic, check, cpu, guest, println};
use hw_x86::apic::local;
use hw_x86::cpuid::{features_c, leaf};
use hw_x86::msr::{TSC_DEADLINE, X2APIC};

guest!(main, trap);

const TIMER: u8 = 0x50;
const MESSAGE: u8 = 0x60;
/// MSR of the register that sends an interrupt to this processor (APM vol. 2 §16.11).
const SELF_IPI: u32 = X2APIC + 0x3f;
const TICKS: u32 = 200_000;
const PERIODS: u32 = 20;

static TIMERS: AtomicU32 = AtomicU32::new(0);
static MESSAGES: AtomicU32 = AtomicU32::new(0);

fn trap(frame: &mut TrapFrame) {
    match frame.vector() {
        TIMER => TIMERS.fetch_add(1, Relaxed),
        MESSAGE => MESSAGES.fetch_add(1, Relaxed),
        _ => guests_micro::trap::unexpected(frame),
    };
    apic::end_of_interrupt();
}

fn main() {
    let features = cpu::cpuid(leaf::FEATURES, 0).ecx;
    apic::enable();
    exercise("xAPIC", features);
    if features & features_c::X2APIC == 0 {
        println!("x2apic: this processor has no x2APIC");
        return;
    }
    for _ in 0..3 {
        let id = apic::read(local::ID) >> 24;
        let entered = apic::enter_x2apic();
        check!(entered.is_ok(), "entering x2APIC mode: {entered:?}");
        check!(apic::read(local::ID) == id, "the id changed: {:#x}", apic::read(local::ID));
        let logical = apic::read(local::LDR);
        let expected = (id >> 4) << 16 | 1 << (id & 15);
        check!(logical == expected, "logical id {logical:#x} instead of {expected:#x}");
        exercise("x2APIC", features);
        self_ipi();
        refusals();
        let left = apic::leave_x2apic();
        check!(left.is_ok(), "leaving x2APIC mode: {left:?}");
        // Off and on again means after reset.
        check!(apic::read(local::SVR) & local::SVR_ENABLE == 0, "the APIC kept its state");
        apic::enable();
        exercise("xAPIC", features);
    }
    println!("x2apic: both modes work");
}

/// Operations of both modes.
fn exercise(mode: &str, features: u32) {
    let version = apic::read(local::VERSION);
    check!(version & 0xff >= 0x10 && version >> 16 & 0xff >= 3, "{mode}: version {version:#x}");

    MESSAGES.store(0, Relaxed);
    apic::send_self(MESSAGE);
    cpu::take_interrupts();
    check!(MESSAGES.load(Relaxed) == 1, "{mode}: a message to itself did not arrive");
    task_priority(mode);

    TIMERS.store(0, Relaxed);
    apic::start_timer(local::TIMER_ONE_SHOT, TIMER, TICKS);
    let running = apic::read(local::TIMER_CURRENT);
    check!(running <= TICKS, "{mode}: the timer counts from {running}");
    wait_for(1);
    check!(apic::read(local::TIMER_CURRENT) == 0, "{mode}: the timer kept running");

    TIMERS.store(0, Relaxed);
    apic::start_timer(local::TIMER_PERIODIC, TIMER, TICKS);
    // On a slow machine more than one period may pass between two looks.
    while TIMERS.load(Relaxed) < PERIODS {
        cpu::enable_and_halt();
        cpu::disable_interrupts();
    }
    apic::stop_timer();
    // A last period may have passed before the timer stopped.
    cpu::take_interrupts();

    if features & features_c::TSC_DEADLINE != 0 {
        TIMERS.store(0, Relaxed);
        apic::write(local::LVT_TIMER, local::TIMER_TSC_DEADLINE | u32::from(TIMER));
        for count in 1..=PERIODS {
            let deadline = cpu::tsc() + u64::from(TICKS);
            // SAFETY: causes an interrupt.
            let armed = unsafe { cpu::write_msr(TSC_DEADLINE, deadline) };
            check!(armed.is_ok(), "{mode}: TSC deadline: {armed:?}");
            wait_for(count);
            check!(cpu::tsc() >= deadline, "{mode}: the deadline came early");
            check!(cpu::read_msr(TSC_DEADLINE) == Ok(0), "{mode}: the deadline is still armed");
        }
        // One that has passed comes at once.
        // SAFETY: as above.
        let armed = unsafe { cpu::write_msr(TSC_DEADLINE, 1) };
        check!(armed.is_ok(), "{mode}: TSC deadline in the past: {armed:?}");
        wait_for(PERIODS + 1);
        apic::stop_timer();
    }
}

/// A write of `CR8` sets the whole register: bits 3:0 become 0, even where the class does not
/// change.
fn task_priority(mode: &str) {
    for priority in [3, 9, 0] {
        apic::write(local::TPR, 0x35);
        cpu::set_priority(priority);
        let register = u64::from(apic::read(local::TPR));
        check!(register == priority << 4, "{mode}: TPR is {register:#x} at CR8 {priority:#x}");
    }
}

/// Sleeps until the timer has interrupted so often.
fn wait_for(count: u32) {
    while TIMERS.load(Relaxed) < count {
        cpu::enable_and_halt();
        cpu::disable_interrupts();
    }
    check!(TIMERS.load(Relaxed) == count, "{} timer interrupts", TIMERS.load(Relaxed));
}

fn self_ipi() {
    MESSAGES.store(0, Relaxed);
    // SAFETY: causes an interrupt.
    let sent = unsafe { cpu::write_msr(SELF_IPI, MESSAGE.into()) };
    check!(sent.is_ok(), "SELF_IPI: {sent:?}");
    cpu::take_interrupts();
    check!(MESSAGES.load(Relaxed) == 1, "SELF_IPI did not arrive");
}

/// Accesses that x2APIC mode refuses.
fn refusals() {
    let high = cpu::read_msr(apic::x2apic_msr(local::ICR_HIGH));
    check!(high == Err(PROTECTION), "ICR high half: {high:x?}");
    let format = cpu::read_msr(apic::x2apic_msr(local::DFR));
    check!(format == Err(PROTECTION), "destination format: {format:x?}");
    // SAFETY: must be refused: the register is read-only, or the bit reserved.
    let (id, end) = unsafe {
        (
            cpu::write_msr(apic::x2apic_msr(local::ID), 1),
            cpu::write_msr(apic::x2apic_msr(local::EOI), 1),
        )
    };
    check!(id == Err(PROTECTION), "the id was written: {id:?}");
    check!(end == Err(PROTECTION), "EOI took 1: {end:?}");
}
