//! Micro-guest that reads and writes every system register, and every register of the interrupt
//! controller, with random values, and calls firmware that does not exist. Then it switches the VM
//! off; if an instruction has another result than the architecture permits, it resets the VM. It
//! has no other code than `hostile.s`.
#![no_std]
#![no_main]

use core::panic::PanicInfo;

core::arch::global_asm!(include_str!("hostile.s"));

#[panic_handler]
fn panic(_: &PanicInfo) -> ! {
    loop {}
}
