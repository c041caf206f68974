//! Each interrupt of the 8259 pair arrives exactly once while the CPU disables and enables
//! interrupts and accesses a device in between: the pair's vector is acknowledged before the CPU
//! takes the interrupt late.
#![no_std]
#![no_main]

use core::sync::atomic::{AtomicU32, Ordering::Relaxed};
use guests_micro::random::Random;
use guests_micro::trap::TrapFrame;
use guests_micro::{apic, check, cpu, guest, port, println};
use hw_x86::apic::local::{LVT_LINT0, TPR};

guest!(main, trap);

const ROUNDS: u32 = 200;
/// Vector of the timer chip, the pair's first line.
const TIMER: u8 = 0x30;
/// TSC ticks after which an interrupt that has not come counts as lost.
const PATIENCE: u64 = 20_000_000_000;
/// Command and data port of the first 8259.
const COMMAND: u16 = 0x20;
const DATA: u16 = 0x21;
/// Ends the interrupt in service.
const END: u8 = 0x20;
/// Entry of the local vector table: the 8259 pair says the vector.
const EXTERNAL: u32 = 7 << 8;

static INTERRUPTS: AtomicU32 = AtomicU32::new(0);

fn trap(frame: &mut TrapFrame) {
    if frame.vector() != TIMER {
        guests_micro::trap::unexpected(frame);
    }
    INTERRUPTS.fetch_add(1, Relaxed);
    port::write8(COMMAND, END);
}

fn main() {
    apic::enable();
    // Edge-triggered, two chips, four words: vectors, cascade line, 8086 mode. Then the mask: all
    // lines but the first.
    port::write8(COMMAND, 0x11);
    for word in [TIMER, 1 << 2, 1, 0xfe] {
        port::write8(DATA, word);
    }
    apic::write(LVT_LINT0, EXTERNAL);
    let mut random = Random(1);
    for round in 1..=ROUNDS {
        apic::start_pit(20 + random.below(200) as u16);
        let start = cpu::tsc();
        while INTERRUPTS.load(Relaxed) < round {
            cpu::enable_interrupts();
            for _ in 0..random.below(50) {
                core::hint::spin_loop();
            }
            cpu::disable_interrupts();
            check!(apic::read(TPR) == 0, "TPR is not 0");
            check!(cpu::tsc() - start < PATIENCE, "round {round}: the interrupt is lost");
        }
        // None is left.
        cpu::take_interrupts();
        let count = INTERRUPTS.load(Relaxed);
        check!(count == round, "{count} interrupts in {round} rounds");
    }
    println!("pic: {ROUNDS} interrupts, each once");
}
