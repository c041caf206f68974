//! Resets the machine by the reset control register.
#![no_std]
#![no_main]

use guests_micro::{check, cpu, guest, port, println};

guest!(main);

const RESET: u16 = 0xcf9;
/// Hard reset; the second write raises the bit that does it.
const HARD: u8 = 1 << 1;
const RESET_CPU: u8 = 1 << 2;

fn main() {
    println!("reset: now");
    port::write8(RESET, HARD);
    port::write8(RESET, HARD | RESET_CPU);
    let start = cpu::tsc();
    while cpu::tsc() - start < 1 << 32 {}
    check!(false, "the machine continued");
}
