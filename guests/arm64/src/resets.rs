//! Micro-guest that resets the VM at once.
#![no_std]
#![no_main]

use core::panic::PanicInfo;

core::arch::global_asm!(include_str!("board.s"), include_str!("resets.s"));

#[panic_handler]
fn panic(_: &PanicInfo) -> ! {
    loop {}
}
