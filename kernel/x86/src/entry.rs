//! Entry points of exceptions and interrupts.

use core::arch::naked_asm;

/// Entry point of each vector.
pub static INTERRUPT_STUBS: [unsafe extern "C" fn(); 256] = [unexpected; 256];

#[unsafe(naked)]
unsafe extern "C" fn unexpected() {
    naked_asm!(
        "mov rdi, [rsp]",
        "mov rsi, [rsp + 8]",
        "mov rdx, rsp",
        "and rsp, -16",
        "call {}",
        "ud2",
        sym report
    )
}

extern "C" fn report(first: u64, second: u64, stack: u64) -> ! {
    crate::panic::stop_if_dying();
    panic!("unexpected interrupt: {first:#x} {second:#x}, on stack {stack:#x}");
}
