//! Model-specific registers that do not exist raise #GP, and the guest lives on.
#![no_std]
#![no_main]

use guests_micro::{check, cpu, guest, println, trap};
use hw_x86::msr;

guest!(main);

/// Numbers that no processor uses.
const NOBODYS: [u32; 4] = [0x1234_5678, 0x0000_4fff, 0xbfff_ffff, 0xc0ff_ffff];

fn main() {
    for register in NOBODYS {
        for _ in 0..2 {
            let read = cpu::read_msr(register);
            check!(read == Err(trap::PROTECTION), "reading MSR {register:#x}: {read:x?}");
            // SAFETY: there is no such register.
            let written = unsafe { cpu::write_msr(register, 1) };
            check!(written == Err(trap::PROTECTION), "writing MSR {register:#x}: {written:?}");
        }
    }
    let mask = cpu::read_msr(msr::SFMASK);
    // SAFETY: `SYSCALL` is not used; the register keeps its value but for these bits.
    let written = unsafe { cpu::write_msr(msr::SFMASK, 0x4_7700) };
    check!(mask.is_ok() && written.is_ok(), "SFMASK: {mask:x?}, {written:?}");
    check!(cpu::read_msr(msr::SFMASK) == Ok(0x4_7700), "SFMASK does not keep its value");
    println!("msr: {} unknown registers raise #GP", NOBODYS.len());
}
