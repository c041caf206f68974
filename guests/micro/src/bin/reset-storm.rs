//! Resets the machine as fast as it can, and has something to be logged each time: accesses to
//! ports where nothing is, others at each boot. Ends never.
#![no_std]
#![no_main]

use guests_micro::{cpu, guest, port};

guest!(main);

const RESET: u16 = 0xcf9;
/// Hard reset; the second write raises the bit that does it.
const HARD: u8 = 1 << 1;
const RESET_CPU: u8 = 1 << 2;
/// Ports where no machine has anything.
const FIRST_PORT: u16 = 0x2000;
const PORTS: u64 = 0x4000;
/// Accesses of a boot.
const ACCESSES: u64 = 10;

fn main() {
    let seed = cpu::tsc() / 64;
    for access in 0..ACCESSES {
        port::read8(FIRST_PORT + ((seed + 97 * access) % PORTS) as u16);
    }
    port::write8(RESET, HARD);
    port::write8(RESET, HARD | RESET_CPU);
    loop {
        cpu::halt();
    }
}
