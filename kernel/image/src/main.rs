//! Kernel executable: the linker script defines its layout, `kernel-x86` its entry points. Contains
//! only the panic handler, which a library cannot define.
#![no_std]
#![no_main]

use core::panic::PanicInfo;

#[panic_handler]
fn panic(info: &PanicInfo) -> ! {
    kernel_x86::panic::die(info)
}
