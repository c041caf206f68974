//! Addresses without memory and without device read as all ones and swallow what is written,
//! whatever instruction accesses them.
#![no_std]
#![no_main]

use core::arch::asm;
use guests_micro::{boot::MAPPED, check, guest, println};

guest!(main);

/// In the PCI hole, and beyond all RAM that a small machine has.
const NOBODYS: [u64; 3] = [0xd000_0000, 0xf000_0ff8, MAPPED - 0x1000];

fn main() {
    for address in NOBODYS {
        words(address);
        strings(address);
        arithmetic(address);
        pages(address & !0xfff | 0xffc);
    }
    println!("memory: {} holes answer as the open bus", NOBODYS.len());
}

/// Moves of every width.
fn words(address: u64) {
    for _ in 0..2 {
        let (byte, half, word, long): (u64, u64, u64, u64);
        let signed: u64;
        // SAFETY: the address is mapped and unused, so the program's memory does not change.
        unsafe {
            asm!(
                "movzx {byte}, byte ptr [{at}]",
                "movzx {half}, word ptr [{at}]",
                "mov {word:e}, dword ptr [{at}]",
                "mov {long}, qword ptr [{at}]",
                "movsx {signed}, byte ptr [{at} + 1]",
                "mov byte ptr [{at}], 0x11",
                "mov word ptr [{at}], 0x1122",
                "mov dword ptr [{at}], 0x11223344",
                "mov qword ptr [{at}], {at}",
                at = in(reg) address,
                byte = out(reg) byte, half = out(reg) half, word = out(reg) word,
                long = out(reg) long, signed = out(reg) signed, options(nostack),
            );
        }
        let expected = (0xff, 0xffff, 0xffff_ffff, u64::MAX);
        check!((byte, half, word, long) == expected, "words at {address:#x}: {long:#x}");
        check!(signed == u64::MAX, "sign-extended byte at {address:#x}: {signed:#x}");
    }
}

/// String instructions from the hole to memory and back.
fn strings(address: u64) {
    let mut buffer = [0u64; 8];
    // SAFETY: reads nobody's memory into the buffer, and back; directions and counts fit the
    // buffer.
    unsafe {
        asm!("rep movsq", inout("rsi") address - 64 => _, inout("rdi") buffer.as_mut_ptr() => _,
            inout("rcx") buffer.len() => _, options(nostack));
    }
    check!(buffer == [u64::MAX; 8], "string read at {address:#x}: {buffer:x?}");
    // SAFETY: as above.
    unsafe {
        asm!("rep movsq", inout("rsi") buffer.as_ptr() => _, inout("rdi") address - 64 => _,
            inout("rcx") buffer.len() => _, options(nostack));
        asm!("rep stosb", in("al") 0u8, inout("rdi") address - 64 => _, inout("rcx") 64 => _,
            options(nostack));
    }
}

/// Instructions that read, compute and write.
fn arithmetic(address: u64) {
    let (sum, exchanged): (u32, u32);
    let equal: u8;
    // SAFETY: as in `words`.
    unsafe {
        asm!(
            "mov {sum:e}, 2",
            "add {sum:e}, dword ptr [{at}]",
            "or dword ptr [{at}], 1",
            "lock and dword ptr [{at}], 1",
            "mov {exchanged:e}, 5",
            "xchg {exchanged:e}, dword ptr [{at}]",
            "cmp dword ptr [{at}], -1",
            "sete {equal}",
            at = in(reg) address, sum = out(reg) sum, exchanged = out(reg) exchanged,
            equal = out(reg_byte) equal, options(nostack),
        );
    }
    check!(sum == 1, "addition of the hole at {address:#x}: {sum:#x}");
    check!(exchanged == u32::MAX, "exchange at {address:#x}: {exchanged:#x}");
    check!(equal == 1, "comparison at {address:#x}");
}

/// An access that crosses into the next page.
fn pages(address: u64) {
    // The last page's successor is not mapped.
    if address + 8 > MAPPED {
        return;
    }
    let value: u64;
    // SAFETY: as in `words`.
    unsafe { asm!("mov {}, qword ptr [{}]", out(reg) value, in(reg) address, options(nostack)) };
    check!(value == u64::MAX, "across pages at {address:#x}: {value:#x}");
}
