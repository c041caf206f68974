//! Micro-guest that makes every kind of exit once, in the order that the VMM expects
//! (`native/first/src/guest.rs`), and checks what it reads. It has no other code than `exits.s`.
#![no_std]
#![no_main]

use core::panic::PanicInfo;

use abi::vcpu::{HYPERCALL_DOORBELL, HYPERCALL_VERSION};

core::arch::global_asm!(
    include_str!("exits.s"),
    version = const HYPERCALL_VERSION,
    doorbell = const HYPERCALL_DOORBELL,
);

#[panic_handler]
fn panic(_: &PanicInfo) -> ! {
    loop {}
}
