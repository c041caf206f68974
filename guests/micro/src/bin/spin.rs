//! Loops for ever with interrupts off: only the host can stop it.
#![no_std]
#![no_main]

use core::arch::asm;
use guests_micro::{cpu, guest, println};

guest!(main);

fn main() {
    println!("spinning");
    cpu::disable_interrupts();
    // SAFETY: does nothing. Assembly, so that the loop has no instruction that a hypervisor sees.
    unsafe { asm!("2:", "jmp 2b", options(nomem, nostack)) };
}
