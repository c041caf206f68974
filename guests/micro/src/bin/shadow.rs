//! Interrupt shadows (APM vol. 2 §8.5): after `STI` and `MOV SS` one instruction runs before an
//! interrupt, also if that instruction is `HLT` or leaves the guest. No wake-up is lost.
//!
//! `early`: the number of interrupts that may come before that instruction; none if absent. QEMU's
//! processor forgets the shadow of a guest that its host interrupts there.
#![no_std]
#![no_main]

use core::arch::asm;
use core::sync::atomic::{AtomicU32, AtomicU64, Ordering::Relaxed};
use guests_micro::random::Random;
use guests_micro::trap::TrapFrame;
use guests_micro::{apic, boot, check, cpu, guest, println};
use hw_x86::apic::local::{TIMER_CURRENT, TIMER_ONE_SHOT};

guest!(main, trap);

const MESSAGE: u8 = 0x44;
const TIMER: u8 = 0x55;
const ROUNDS: u32 = 1000;
/// Enough where time is counted in instructions. Elsewhere it is a sample.
const MOST_MOMENTS: u32 = 4000;

static INTERRUPTS: AtomicU32 = AtomicU32::new(0);
/// Interrupted address of the last interrupt.
static RIP: AtomicU64 = AtomicU64::new(0);
/// Interrupts at the end of `STI`.
static EARLY: AtomicU32 = AtomicU32::new(0);

fn trap(frame: &mut TrapFrame) {
    if !matches!(frame.vector(), MESSAGE | TIMER) {
        guests_micro::trap::unexpected(frame);
    }
    RIP.store(frame.rip, Relaxed);
    INTERRUPTS.fetch_add(1, Relaxed);
    apic::end_of_interrupt();
}

/// Makes an interrupt pending, runs `STI` and the given instructions with label 2 where the
/// interrupt must come (3: where it may come too), and checks that.
macro_rules! shadow {
    ($name:literal, $($line:literal),+) => {{
        send_message();
        let (early, first, second): (u64, u64, u64);
        // SAFETY: the instructions change what is declared; the handler changes nothing.
        unsafe {
            asm!(
                "mov {saved}, rbx",
                "lea {early}, [rip + 4f]",
                "lea {first}, [rip + 2f]", "lea {second}, [rip + 3f]",
                "mov ecx, ss", "xor eax, eax",
                "sti", "4:", $($line,)+ "cli",
                "mov rbx, {saved}",
                saved = out(reg) _, early = out(reg) early,
                first = out(reg) first, second = out(reg) second,
                out("rax") _, out("rcx") _, out("rdx") _,
            );
        }
        let (count, rip) = (INTERRUPTS.load(Relaxed), RIP.load(Relaxed));
        check!(count == 1, "{}: {count} interrupts", $name);
        let is_right = rip == first || rip == second || (rip == early && is_permitted());
        check!(is_right, "{}: at {rip:#x} instead of {first:#x}", $name);
    }};
}

/// Counts an interrupt at the end of `STI`.
fn is_permitted() -> bool {
    let count = EARLY.fetch_add(1, Relaxed) + 1;
    u64::from(count) <= boot::argument("early").unwrap_or(0)
}

fn main() {
    apic::enable();
    for _ in 0..ROUNDS / 10 {
        shadow!("sti; nop", "nop", "2:", "3: nop");
        shadow!("sti; hlt", "hlt", "2:", "3: nop");
        shadow!("sti; cpuid", "cpuid", "2:", "3: nop");
        shadow!("sti; out", "out 0x80, al", "2:", "3: nop");
        shadow!("sti; in", "in al, 0x61", "2:", "3: nop");
        // One shadow ends when the other begins, or the second counts as well: both are right.
        shadow!("sti; mov ss", "mov ss, ecx", "3:", "nop", "2: nop");
        shadow!("sti; mov ss; cpuid", "mov ss, ecx", "3:", "cpuid", "2: nop");
    }
    no_shadow_without_interrupts();
    wake_ups();
    let moments = every_moment();
    println!("shadow: {} wake-ups, none lost", ROUNDS + moments);
}

/// `STI; CLI` lets nothing in.
fn no_shadow_without_interrupts() {
    send_message();
    for _ in 0..ROUNDS {
        // SAFETY: the handler of interrupts changes nothing.
        unsafe { asm!("sti", "cli", options(nostack)) };
        if INTERRUPTS.load(Relaxed) > 0 {
            check!(is_permitted(), "an interrupt between STI and CLI");
            send_message();
        }
    }
    check!(INTERRUPTS.load(Relaxed) == 0, "an interrupt between STI and CLI");
    cpu::take_interrupts();
    check!(INTERRUPTS.load(Relaxed) == 1, "the interrupt was lost");
}

/// Makes an interrupt pending, the first that is counted.
fn send_message() {
    INTERRUPTS.store(0, Relaxed);
    apic::send_self(MESSAGE);
    while !apic::requested(MESSAGE) {}
}

/// A timer that may come before, in and after `STI; HLT` always ends the wait.
fn wake_ups() {
    let mut random = Random(3);
    for round in 1..=ROUNDS {
        INTERRUPTS.store(0, Relaxed);
        apic::start_timer(TIMER_ONE_SHOT, TIMER, 1 + random.below(20_000) as u32);
        for _ in 0..random.below(100) {
            core::hint::spin_loop();
        }
        cpu::enable_and_halt();
        cpu::disable_interrupts();
        let count = INTERRUPTS.load(Relaxed);
        check!(count == 1, "round {round}: woken by {count} interrupts");
    }
}

/// The timer comes at every moment before `STI; HLT` and in it, one tick later each time. Where
/// each run takes the same course, one of these moments is between the two instructions.
fn every_moment() -> u32 {
    const LONG: u32 = 1_000_000_000;
    apic::start_timer(TIMER_ONE_SHOT, TIMER, LONG);
    // More than passes from the start of the timer to `STI`.
    let moments = (LONG - apic::read(TIMER_CURRENT)).min(MOST_MOMENTS);
    for ticks in 1..=moments {
        INTERRUPTS.store(0, Relaxed);
        apic::start_timer(TIMER_ONE_SHOT, TIMER, ticks);
        cpu::enable_and_halt();
        cpu::disable_interrupts();
        let count = INTERRUPTS.load(Relaxed);
        check!(count == 1, "{ticks} ticks: woken by {count} interrupts");
    }
    moments
}
