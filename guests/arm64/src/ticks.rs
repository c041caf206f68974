//! Micro-guest that prints a number each second, and waits in between.
#![no_std]
#![no_main]

use core::panic::PanicInfo;

core::arch::global_asm!(include_str!("board.s"), include_str!("ticks.s"));

#[panic_handler]
fn panic(_: &PanicInfo) -> ! {
    loop {}
}
