//! SSE registers and devices: `MOVDQU` and `MOVAPS` to and from the local APIC, which sees their
//! lower 32 bits, and all other registers stay, also with other guests beside this one.
#![no_std]
#![no_main]

use core::arch::asm;
use guests_micro::random::Random;
use guests_micro::trap::PROTECTION;
use guests_micro::{apic, check, cpu, guest, println, trap};
use hw_x86::apic::local::{TPR, VERSION};
use hw_x86::paging::cr4;

guest!(main);

const ROUNDS: u32 = 3_000;
const LOCAL_APIC: u64 = 0xfee0_0000;
/// Registers of the accesses.
const STORED: usize = 12;
const LOADED: usize = 3;

/// All SSE registers.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(align(16))]
struct Registers([[u64; 2]; 16]);

fn main() {
    apic::enable();
    // SAFETY: every 64-bit processor has SSE, and code is compiled not to use it.
    unsafe { cpu::set_cr4(cr4::OSFXSR) };
    let version = apic::read(VERSION);
    let mut random = Random(11);
    for round in 0..ROUNDS {
        let mut registers = Registers([[0; 2]; 16]);
        registers.0.iter_mut().flatten().for_each(|half| *half = random.word());
        let priority = random.below(16);
        registers.0[STORED][0] = priority << 4;
        let before = registers;
        access(&mut registers);
        check!(cpu::priority() == priority, "round {round}: stored {:#x}", cpu::priority());
        let loaded = registers.0[LOADED][0] as u32;
        check!(loaded == version, "round {round}: loaded {loaded:#x} instead of {version:#x}");
        registers.0[LOADED] = before.0[LOADED];
        check!(registers == before, "round {round}: {registers:x?} instead of {before:x?}");
    }
    check!(misaligned() == Err(PROTECTION), "MOVAPS at an odd address");
    println!("vectors: {ROUNDS} rounds");
}

/// Loads the registers, stores one to the task priority, loads another from the version, and stores
/// all.
fn access(registers: &mut Registers) {
    let (priority, version) = (LOCAL_APIC + u64::from(TPR), LOCAL_APIC + u64::from(VERSION));
    // SAFETY: start-up maps the local APIC; no other code uses these registers.
    unsafe {
        asm!(
            "movaps xmm0, [{all}]", "movaps xmm1, [{all} + 0x10]",
            "movaps xmm2, [{all} + 0x20]", "movaps xmm3, [{all} + 0x30]",
            "movaps xmm4, [{all} + 0x40]", "movaps xmm5, [{all} + 0x50]",
            "movaps xmm6, [{all} + 0x60]", "movaps xmm7, [{all} + 0x70]",
            "movaps xmm8, [{all} + 0x80]", "movaps xmm9, [{all} + 0x90]",
            "movaps xmm10, [{all} + 0xa0]", "movaps xmm11, [{all} + 0xb0]",
            "movaps xmm12, [{all} + 0xc0]", "movaps xmm13, [{all} + 0xd0]",
            "movaps xmm14, [{all} + 0xe0]", "movaps xmm15, [{all} + 0xf0]",
            "movdqu [{priority}], xmm12",
            "movaps xmm3, [{version}]",
            "movaps [{all}], xmm0", "movaps [{all} + 0x10], xmm1",
            "movaps [{all} + 0x20], xmm2", "movaps [{all} + 0x30], xmm3",
            "movaps [{all} + 0x40], xmm4", "movaps [{all} + 0x50], xmm5",
            "movaps [{all} + 0x60], xmm6", "movaps [{all} + 0x70], xmm7",
            "movaps [{all} + 0x80], xmm8", "movaps [{all} + 0x90], xmm9",
            "movaps [{all} + 0xa0], xmm10", "movaps [{all} + 0xb0], xmm11",
            "movaps [{all} + 0xc0], xmm12", "movaps [{all} + 0xd0], xmm13",
            "movaps [{all} + 0xe0], xmm14", "movaps [{all} + 0xf0], xmm15",
            all = in(reg) registers.0.as_mut_ptr(), priority = in(reg) priority,
            version = in(reg) version, options(nostack),
        );
    }
}

/// An access of a device that must be aligned and is not.
fn misaligned() -> Result<(), u8> {
    let attempt = trap::recover();
    // SAFETY: as above; after the exception the program continues at label 2.
    unsafe {
        asm!("lea {tmp}, [rip + 2f]", "mov [{resume}], {tmp}", "movaps xmm0, [{address}]", "2:",
            tmp = out(reg) _, resume = in(reg) attempt.resume(),
            address = in(reg) LOCAL_APIC + u64::from(VERSION) + 1, options(nostack));
    }
    attempt.finish()
}
