//! Micro-guest that abuses the board: floods of calls, SGIs to CPUs that do not exist, interrupts
//! made inactive instead of ended, all interrupts pending at once, loops of cache maintenance by
//! set and way, atomic and misaligned accesses to devices, wrong requests for random numbers; a
//! second vCPU has its page tables in device registers. It switches the VM off if everything has
//! the results of the architecture, and resets it otherwise.
#![no_std]
#![no_main]

mod board;

use core::arch::{asm, global_asm};

use board::{
    CPU_INTERFACE, DEACTIVATE, DISABLE, DISTRIBUTOR, ENABLE, GROUP, PEND, PEND_SGI, SEND, TARGETS,
    call, call_all, counter, enable_edge, enable_interrupts, frequency, is_pending, is_v2, private,
    read, send, start_other, take, take_with, v3, write,
};

const UART: usize = 0x900_0000;
/// Registers of it that identify it.
const IDENTITY: usize = 0xfe0;
/// Most interrupts that a GIC has without messages, in words of 32.
const WORDS: usize = 32;
const FLOOD: u64 = 20_000;
/// Interrupts that the board has.
const INTERRUPTS: u64 = 96;
const NONE: u64 = 1_020;
/// Two of them without devices, which become level-triggered and edge-triggered.
const LEVEL: usize = 50;
const EDGE: usize = 51;
/// Random numbers of the firmware (DEN 0098): version, and bits in registers of 64 bits.
const TRNG_VERSION: u64 = 0x8400_0050;
const TRNG_RND64: u64 = 0xc400_0053;
const INVALID: i64 = -2;

static mut STACK: [u64; 256] = [0; 256];

// Vectors that skip the instruction of a synchronous exception and count it in x28's place in
// memory: TPIDR_EL0 has the count.
global_asm!(
    ".align 11",
    "skipping_vectors:",
    ".rept 16",
    "msr tpidr_el1, x0",
    "mrs x0, elr_el1",
    "add x0, x0, #4",
    "msr elr_el1, x0",
    "mrs x0, tpidr_el0",
    "add x0, x0, #1",
    "msr tpidr_el0, x0",
    "mrs x0, tpidr_el1",
    "eret",
    ".align 7",
    ".endr",
);

unsafe extern "C" {
    fn skipping_vectors();
}

/// Number of exceptions so far.
fn exceptions() -> u64 {
    let value;
    // SAFETY: reads a register.
    unsafe { asm!("mrs {}, tpidr_el0", out(reg) value, options(nomem, nostack)) };
    value
}

/// Ends the guest with a failure unless it holds.
fn check(what: &str, holds: bool) {
    if !holds {
        line!("FAILED: {what}");
        // PSCI: system reset.
        call(0x8400_0009, [0; 3]);
    }
}

/// Next random number.
fn random(state: &mut u64) -> u64 {
    *state = state.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(0x3b1);
    *state >> 16
}

/// Entry of the first vCPU.
pub extern "C" fn guest_main() {
    // SAFETY: vectors that change nothing but two thread registers.
    unsafe {
        asm!(
            "msr vbar_el1, {}", "msr tpidr_el0, xzr", "isb",
            in(reg) skipping_vectors as *const (), options(nostack)
        );
    }
    enable_interrupts(0);
    let mut state = 1;
    calls(&mut state);
    random_numbers();
    crash_in_handlers();
    interrupts(&mut state);
    caches();
    undescribed();
    devices();
    // SAFETY: the second vCPU alone uses it.
    let stack = unsafe { &mut *(&raw mut STACK) };
    check("the second vCPU starts", start_other(1, stack));
    // It never gets anywhere, and does not disturb this vCPU.
    let end = counter() + frequency() / 4;
    while counter() < end {
        check("SGI to itself", sgi_arrives());
    }
    line!("abuse ok, {} exceptions", exceptions());
}

fn sgi_arrives() -> bool {
    send(0);
    take_in_time() < NONE
}

/// Takes and ends an interrupt that is pending within a second.
fn take_in_time() -> u64 {
    let end = counter() + frequency();
    loop {
        let number = take();
        if number < NONE || counter() > end {
            return number;
        }
    }
}

/// Interrupts that are not ended, but made inactive, arrive again: a kernel that starts after the
/// crash of another does that (kdump).
fn crash_in_handlers() {
    const WORD: usize = EDGE / 32 * 4;
    if is_v2() {
        // QEMU's GICv2 keeps the priority of an interrupt that is not ended, whatever is written to
        // its register (`gic_cpu_write` in `hw/intc/arm_gic.c`).
        return;
    }
    enable_edge(EDGE);
    write(DISTRIBUTOR + ENABLE + WORD, 1 << (LEVEL % 32));
    for number in [LEVEL, EDGE] {
        let pend = || write(DISTRIBUTOR + PEND + WORD, 1 << (number % 32));
        pend();
        while !is_pending() {}
        let mut second = NONE;
        let first = take_with(|_| {
            write(DISTRIBUTOR + DEACTIVATE + WORD, 1 << (number % 32));
            v3::clear_active_priorities();
            pend();
            second = take_in_time();
        });
        check("an interrupt made inactive", [first, second] == [number as u64; 2]);
    }
}

/// Firmware calls that do not exist, by both instructions.
fn calls(state: &mut u64) {
    for _ in 0..FLOOD {
        // Bits 8 to 15 are 0 in all functions.
        let function = random(state) & 0xffff_ffff | 0x4200;
        let result: u64;
        // SAFETY: no function has this number.
        unsafe {
            asm!(
                "smc #0", inlateout("x0") function => result,
                lateout("x1") _, lateout("x2") _, lateout("x3") _, options(nostack)
            );
        }
        check("unknown call", result as u32 == u32::MAX);
    }
    check("calls without exceptions", exceptions() == 0);
}

/// Random numbers have as many bits as asked for, and differ.
fn random_numbers() {
    check("the version of random numbers", call(TRNG_VERSION, [0; 3]) == 0x1_0000);
    let numbers = |bits| call_all(TRNG_RND64, [bits, 0, 0]);
    let ([result, a, b, c], other) = (numbers(192), numbers(192));
    check("random numbers", result == 0 && a != b && b != c && [0, a, b, c] != other);
    let [result, a, b, c] = numbers(68);
    check("random bits", result == 0 && a == 0 && b < 16 && c != 0);
    for bits in [0, 193, u64::MAX] {
        check("wrong number of bits", numbers(bits) == [INVALID as u64, 0, 0, 0]);
    }
}

/// SGIs to any CPUs, and all interrupts pending at once.
fn interrupts(state: &mut u64) {
    for _ in 0..FLOOD {
        let value = random(state) & !(1 << 40);
        if is_v2() {
            write(DISTRIBUTOR + SEND, value as u32);
            continue;
        }
        // SAFETY: an interrupt, which stays masked.
        unsafe { asm!("msr S3_0_C12_C11_5, {}", in(reg) value, options(nostack)) };
    }
    while take() < NONE {}
    if is_v2() {
        // Everything to the first CPU, and its SGIs as if it had sent them.
        (0..8 * WORDS).for_each(|word| write(DISTRIBUTOR + TARGETS + 4 * word, 0x0101_0101));
        (0..4).for_each(|word| write(DISTRIBUTOR + PEND_SGI + 4 * word, 0x0101_0101));
    }
    for word in 0..WORDS {
        for block in [GROUP, ENABLE, PEND] {
            write(DISTRIBUTOR + block + 4 * word, u32::MAX);
        }
    }
    write(private(0) + ENABLE, u32::MAX);
    write(private(0) + PEND, u32::MAX);
    let (mut taken, end) = (0, counter() + 10 * frequency());
    while taken < INTERRUPTS && counter() < end {
        let number = take();
        taken += u64::from(number < NONE);
    }
    check("all interrupts", taken == INTERRUPTS);
}

/// Maintenance of caches by set and way.
fn caches() {
    for value in 0..FLOOD {
        // SAFETY: caches hold nothing while the MMU is off.
        unsafe {
            asm!(
                "dc isw, {0}", "dc csw, {0}", "dc cisw, {0}",
                in(reg) value << 4, options(nostack)
            );
        }
    }
    check("caches", exceptions() == 0);
}

/// Loads of pairs and with an index, which no syndrome describes, have their effect.
fn undescribed() {
    let (mut pair, mut after, mut before) = ([0_u32; 2], 0_u32, 0_u32);
    let (first, mut address) = (UART + IDENTITY, UART + IDENTITY);
    // SAFETY: registers of the UART that only identify it.
    unsafe {
        asm!(
            "ldp {0:w}, {1:w}, [{4}]", "ldr {2:w}, [{4}], #8", "ldr {3:w}, [{4}, #-4]!",
            "stp wzr, wzr, [{4}]",
            out(reg) pair[0], out(reg) pair[1], out(reg) after, out(reg) before,
            inout(reg) address, options(nostack)
        );
    }
    check("a pair", pair == [read(first), read(first + 4)] && pair[0] != pair[1]);
    check("an index", [after, before] == pair && address == first + 4);
    check("described accesses", exceptions() == 0);
}

/// Accesses to devices that the board does not carry out, or that are not aligned.
fn devices() {
    for (base, count) in [(UART, 64), (DISTRIBUTOR, 64), (UART + 0x10_0000, 8)] {
        for offset in 0..count {
            let before = exceptions();
            access(base + offset);
            check("exceptions of devices", exceptions() > before);
        }
    }
    if is_v2() {
        // The registers of the CPU itself, which may permit this. One of them acknowledges an
        // interrupt, of which none is left.
        (0..WORDS).for_each(|word| write(DISTRIBUTOR + DISABLE + 4 * word, u32::MAX));
        while take() < NONE {}
        (0..64).for_each(|offset| access(CPU_INTERFACE + offset));
        enable_interrupts(0);
    }
    check("the UART", read(UART + 0x18) & 1 << 5 == 0);
}

/// Atomic accesses and pairs at an address.
fn access(address: usize) {
    // SAFETY: exceptions are skipped; no device writes memory.
    unsafe {
        asm!(
            ".arch_extension lse", "ldadd x1, x2, [{0}]", "ldxr x2, [{0}]", "stxr w3, x2, [{0}]", "clrex",
            "ldp x1, x2, [{0}]", "stp x1, x2, [{0}]", "ldr x2, [{0}], #8",
            inout(reg) address => _,
            out("x1") _, out("x2") _, out("x3") _, options(nostack)
        );
    }
}

/// Entry of the second vCPU: its page tables are the registers of the UART.
pub extern "C" fn other_main() {
    // SAFETY: this vCPU gets nowhere afterwards.
    unsafe {
        asm!(
            "msr ttbr0_el1, {tables}", "msr tcr_el1, {control}", "isb",
            "mrs {value}, sctlr_el1", "orr {value}, {value}, #1", "msr sctlr_el1, {value}", "isb",
            tables = in(reg) UART, control = in(reg) 25u64 | 1 << 23, value = out(reg) _,
            options(nostack)
        );
    }
}
