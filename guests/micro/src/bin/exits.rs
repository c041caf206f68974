//! Cost of VM exits: prints `VB name value ns` for each operation, where the value is in ticks of
//! the time-stamp counter. On the measuring machine a tick is a nanosecond and an instruction.
#![no_std]
#![no_main]

use abi::vcpu::HYPERCALL_VERSION;
use core::arch::asm;
use guests_micro::{cpu, guest, println};

guest!(main);

/// Operations per measurement.
const COUNT: u32 = 10_000;
/// Operations before measuring, so that every table is warm.
const WARM: u32 = 100;
/// A port that only exits.
const POST: u16 = 0x80;

fn main() {
    report("loop", nothing);
    report("cpuid", cpuids);
    report("pio", ports);
    report("cr8_read", reads_of_cr8);
    report("cr8_write", writes_of_cr8);
    // Only a hypervisor has hypercalls, and only ours has this one.
    if cpu::hypercall(HYPERCALL_VERSION) == Ok(abi::ABI_VERSION.into()) {
        report("hypercall", hypercalls);
    }
}

fn nothing(count: u32) {
    // SAFETY: counts a register down.
    unsafe { asm!("2:", "dec esi", "jnz 2b", inout("esi") count => _, options(nomem, nostack)) };
}

fn cpuids(count: u32) {
    // SAFETY: changes what it declares, and `rbx`, which is the compiler's own, not for long.
    unsafe {
        asm!("mov {saved}, rbx", "2:", "xor eax, eax", "xor ecx, ecx", "cpuid", "dec esi", "jnz 2b",
            "mov rbx, {saved}", saved = out(reg) _, inout("esi") count => _,
            out("eax") _, out("ecx") _, out("edx") _, options(nomem, nostack));
    }
}

fn ports(count: u32) {
    // SAFETY: the port's chip changes no memory.
    unsafe {
        asm!("2:", "out dx, al", "dec esi", "jnz 2b", in("dx") POST, in("al") 0u8,
            inout("esi") count => _, options(nomem, nostack));
    }
}

fn reads_of_cr8(count: u32) {
    // SAFETY: reads a register.
    unsafe {
        asm!("2:", "mov rax, cr8", "dec esi", "jnz 2b", inout("esi") count => _, out("rax") _,
            options(nomem, nostack));
    }
}

fn writes_of_cr8(count: u32) {
    // SAFETY: writes the present task priority; interrupts are off.
    unsafe {
        asm!("mov rax, cr8", "2:", "mov cr8, rax", "dec esi", "jnz 2b", inout("esi") count => _,
            out("rax") _, options(nomem, nostack));
    }
}

fn hypercalls(count: u32) {
    // SAFETY: this hypercall changes `rax` only.
    unsafe {
        asm!("2:", "mov rax, rdi", "vmmcall", "dec esi", "jnz 2b", in("rdi") HYPERCALL_VERSION,
            inout("esi") count => _, out("rax") _, options(nomem, nostack));
    }
}

/// Measures a loop that repeats an operation the given number of times.
fn report(name: &str, run: impl Fn(u32)) {
    run(WARM);
    let start = cpu::tsc();
    run(COUNT);
    let tenths = (cpu::tsc() - start) * 10 / u64::from(COUNT);
    println!("VB {name} {}.{} ns", tenths / 10, tenths % 10);
}
