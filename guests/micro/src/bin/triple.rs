//! A triple fault: an exception without a table to handle it.
#![no_std]
#![no_main]

use core::arch::asm;
use guests_micro::{check, guest, println, trap};

guest!(main);

fn main() {
    println!("triple: about to fault three times");
    trap::remove_table();
    // SAFETY: does not return.
    unsafe { asm!("ud2", options(nostack)) };
    check!(false, "the vCPU continued");
}
