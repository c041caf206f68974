//! Floating-point and vector registers and TSC_AUX survive exits, preemption by the host and
//! interrupts.
#![no_std]
#![no_main]

use core::arch::asm;
use core::sync::atomic::{AtomicU32, Ordering::Relaxed};
use guests_micro::random::Random;
use guests_micro::trap::TrapFrame;
use guests_micro::{apic, check, cpu, guest, port, println};
use hw_x86::apic::local::TIMER_PERIODIC;
use hw_x86::cpuid::{amd_d, features_c, leaf};
use hw_x86::msr::TSC_AUX;
use hw_x86::paging::{cr4, xcr0};

guest!(main, trap);

const ROUNDS: u64 = 200;
const TIMER: u8 = 0x40;
/// A port that only exits.
const POST: u16 = 0x80;
/// Offsets in the save area (APM vol. 2, figure 11-8 and section 11.5).
const MXCSR: usize = 24;
const X87: usize = 32;
const XMM: usize = 160;
const XMM_END: usize = 416;
const HEADER: usize = 512;
const YMM: usize = 576;
const YMM_END: usize = YMM + 256;
const EXTENDED_LEAF: u32 = 0xd;

/// Save area of `FXSAVE` and `XSAVE`.
#[derive(Clone)]
#[repr(align(64))]
struct Area([u8; 4096]);

static TICKS: AtomicU32 = AtomicU32::new(0);

fn trap(frame: &mut TrapFrame) {
    if frame.vector() != TIMER {
        guests_micro::trap::unexpected(frame);
    }
    TICKS.fetch_add(1, Relaxed);
    apic::end_of_interrupt();
}

fn main() {
    apic::enable();
    apic::start_timer(TIMER_PERIODIC, TIMER, 100_000);
    let mask = enable_extended();
    let mut random = Random(7);
    let aux = set_aux();
    for round in 0..ROUNDS {
        let wanted = pattern(&mut random, mask);
        let mut found = Area([0; 4096]);
        load(&wanted, mask);
        disturb(&mut random);
        save(&mut found, mask);
        compare(&wanted, &found, mask, round);
        check!(aux.is_none_or(|aux| read_aux() == aux), "TSC_AUX in round {round}");
    }
    apic::stop_timer();
    let ticks = TICKS.load(Relaxed);
    check!(ticks > 0, "the timer never interrupted");
    println!("fpu: state {mask:#x} kept over {ROUNDS} rounds");
}

/// Gives TSC_AUX a value that no other guest has: that value, if there is such a register.
fn set_aux() -> Option<u32> {
    if cpu::cpuid(leaf::AMD_FEATURES, 0).edx & amd_d::RDTSCP == 0 {
        return None;
    }
    let aux = cpu::tsc() as u32 | 1;
    // SAFETY: the register is there, and has no effect.
    let written = unsafe { cpu::write_msr(TSC_AUX, aux.into()) };
    check!(written.is_ok(), "TSC_AUX cannot be written");
    Some(aux)
}

fn read_aux() -> u32 {
    let mut aux = 0;
    // SAFETY: there is TSC_AUX, and so this instruction, which writes the value only.
    unsafe { core::arch::x86_64::__rdtscp(&mut aux) };
    aux
}

/// Turns on what `XSAVE` manages of x87, SSE and AVX. 0: there is no `XSAVE`.
fn enable_extended() -> u64 {
    if cpu::cpuid(leaf::FEATURES, 0).ecx & features_c::XSAVE == 0 {
        return 0;
    }
    let supported = u64::from(cpu::cpuid(EXTENDED_LEAF, 0).eax);
    let mask = supported & (xcr0::X87 | xcr0::SSE | xcr0::AVX);
    // SAFETY: the processor has both, and code is compiled to use none of these registers.
    unsafe {
        cpu::set_cr4(cr4::OSXSAVE);
        cpu::set_xcr0(mask);
    }
    // The size is that of what has just been turned on.
    let size = cpu::cpuid(EXTENDED_LEAF, 0).ebx as usize;
    let least = if mask & xcr0::AVX != 0 { YMM_END } else { HEADER + 64 };
    check!((least..=size_of::<Area>()).contains(&size), "state of {size} bytes");
    let enabled = cpu::cpuid(leaf::FEATURES, 0).ecx & features_c::OSXSAVE != 0;
    check!(enabled, "CPUID does not show CR4.OSXSAVE");
    mask
}

/// Random contents of all registers that are compared.
fn pattern(random: &mut Random, mask: u64) -> Area {
    let mut area = Area([0; 4096]);
    // Control words as after reset; status and tags of eight registers in use.
    area.0[0..2].copy_from_slice(&0x037fu16.to_le_bytes());
    area.0[4] = 0xff;
    let rounding = random.below(4) as u32;
    area.0[MXCSR..MXCSR + 4].copy_from_slice(&(0x1f80 | rounding << 13).to_le_bytes());
    for register in area.0[X87..XMM].chunks_exact_mut(16) {
        register[..8].copy_from_slice(&random.word().to_le_bytes());
        register[8..10].copy_from_slice(&(random.word() as u16).to_le_bytes());
    }
    let upper = if mask & xcr0::AVX != 0 { YMM..YMM_END } else { YMM..YMM };
    for range in [XMM..XMM_END, upper] {
        for word in area.0[range].chunks_exact_mut(8) {
            word.copy_from_slice(&random.word().to_le_bytes());
        }
    }
    area.0[HEADER..HEADER + 8].copy_from_slice(&mask.to_le_bytes());
    area
}

fn load(area: &Area, mask: u64) {
    // SAFETY: the area is aligned and valid; code is compiled to use none of these registers.
    unsafe {
        if mask == 0 {
            asm!("fxrstor64 [{}]", in(reg) area, options(nostack, readonly));
        } else {
            asm!("xrstor64 [{}]", in(reg) area, in("eax") mask as u32, in("edx") 0,
                options(nostack, readonly));
        }
    }
}

fn save(area: &mut Area, mask: u64) {
    // SAFETY: the area is aligned and large enough.
    unsafe {
        if mask == 0 {
            asm!("fxsave64 [{}]", in(reg) area, options(nostack));
        } else {
            asm!("xsave64 [{}]", in(reg) area, in("eax") mask as u32, in("edx") 0,
                options(nostack));
        }
    }
}

/// Exits, interrupts, and time for the host to run others.
fn disturb(random: &mut Random) {
    for _ in 0..random.below(20) {
        match random.below(4) {
            0 => {
                cpu::cpuid(0, 0);
            }
            1 => port::write8(POST, 1),
            2 => cpu::enable_and_halt(),
            _ => {
                cpu::enable_interrupts();
                let start = cpu::tsc();
                while cpu::tsc() - start < 50_000 {}
            }
        }
        cpu::disable_interrupts();
    }
}

fn compare(wanted: &Area, found: &Area, mask: u64, round: u64) {
    let control =
        wanted.0[..2] == found.0[..2] && wanted.0[MXCSR..MXCSR + 4] == found.0[MXCSR..MXCSR + 4];
    check!(control, "control words, round {round}");
    check!(wanted.0[X87..XMM] == found.0[X87..XMM], "x87 registers, round {round}");
    check!(wanted.0[XMM..XMM_END] == found.0[XMM..XMM_END], "SSE registers, round {round}");
    if mask & xcr0::AVX != 0 {
        check!(wanted.0[YMM..YMM_END] == found.0[YMM..YMM_END], "AVX registers, round {round}");
    }
}
