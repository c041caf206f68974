//! 32-bit micro-guest that reads and writes every register of coprocessors 14 and 15, and those of
//! the interrupt controller, with random values, tries to enter every mode, and calls firmware that
//! does not exist. Then it switches the VM off; if an instruction has another result than the
//! architecture permits, it resets the VM. It has no other code than `hostile32.s`.
#![no_std]
#![no_main]

use core::panic::PanicInfo;

core::arch::global_asm!(include_str!("a32.s"), include_str!("hostile32.s"));

#[panic_handler]
fn panic(_: &PanicInfo) -> ! {
    loop {}
}
