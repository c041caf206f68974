//! Reports a panic to the machine, as kernels do by pvpanic.
#![no_std]
#![no_main]

use guests_micro::{check, cpu, guest, port, println};

guest!(main);

const PVPANIC: u16 = 0x505;
const PANICKED: u8 = 1 << 0;

fn main() {
    println!("panic: reported");
    port::write8(PVPANIC, PANICKED);
    let start = cpu::tsc();
    while cpu::tsc() - start < 1 << 32 {}
    check!(false, "the machine continued");
}
