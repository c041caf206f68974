//! Micro-guest that prints a line and switches the VM off.
#![no_std]
#![no_main]

use core::panic::PanicInfo;

core::arch::global_asm!(include_str!("board.s"), include_str!("hello.s"));

#[panic_handler]
fn panic(_: &PanicInfo) -> ! {
    loop {}
}
