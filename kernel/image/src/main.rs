//! The kernel as a program: the linker script places it, `kernel-x86` holds the entry points.
//! Nothing but the panic handler is left to do here, because a library cannot define one.
#![no_std]
#![no_main]

use core::panic::PanicInfo;

#[panic_handler]
fn panic(info: &PanicInfo) -> ! {
    kernel_x86::panic::die(info)
}
