//! Brings its vCPU into a state that VMRUN refuses: CR0.NW without CR0.CD (APM vol. 2, section
//! 15.5.1). A processor refuses it itself, QEMU's does not, and KVM does it for QEMU's; then this
//! executes a device's memory instead, which no host emulates.
#![no_std]
#![no_main]

use core::arch::asm;
use guests_micro::{check, cpu, guest, println, trap};

guest!(main);

const NOT_WRITE_THROUGH: u64 = 1 << 29;
/// The I/O APIC, which start-up maps.
const DEVICE: u64 = 0xfec0_0000;
const PROTECTION: u8 = trap::PROTECTION;

fn main() {
    println!("refused: CR0.NW without CR0.CD");
    let attempt = trap::recover();
    // SAFETY: the caches stay as they are, because this ends; after an exception the program
    // continues at label 2.
    unsafe {
        asm!("lea {tmp}, [rip + 2f]", "mov [{resume}], {tmp}",
            "mov {tmp}, cr0", "or {tmp}, {bit}", "mov cr0, {tmp}", "2:",
            tmp = out(reg) _, resume = in(reg) attempt.resume(), bit = const NOT_WRITE_THROUGH,
            options(nostack));
    }
    match attempt.finish() {
        // The host has to enter once more.
        Ok(()) => _ = cpu::cpuid(0, 0),
        Err(vector) => check!(vector == PROTECTION, "exception {vector}"),
    }
    println!("refused: code in a device");
    // SAFETY: does not return.
    unsafe { asm!("jmp {}", in(reg) DEVICE, options(nostack)) };
    check!(false, "the vCPU continued");
}
