//! Micro-guest whose four vCPUs send each other SGIs in every way: to one, to several, to all
//! others, to itself; all numbers at once, while they are disabled, to CPUs that do not exist,
//! and by random values. It switches the VM off if each SGI that the architecture delivers
//! arrives, once and where it should, and resets it otherwise.
#![no_std]
#![no_main]

mod board;

use core::arch::asm;
use core::sync::atomic::{AtomicU64, Ordering};

use board::{
    DISABLE, DISTRIBUTOR, ENABLE, SEND, call, counter, enable_interrupts, frequency, is_v2,
    private, start_other, take, wait, write,
};

const CPUS: usize = 4;
const SGIS: usize = 16;
/// Bit of ICC_SGI1R_EL1: to all other CPUs.
const TO_OTHERS: u64 = 1 << 40;
/// Bits of it with affinities of targets beyond the first 16 CPUs.
const AFFINITIES: u64 = 0xff << 16 | 0xff << 32 | 0xf << 44 | 0xff << 48;
const NONE: u64 = 1_020;
const FLOOD: u64 = 5_000;

static mut STACKS: [[u64; 512]; CPUS] = [[0; 512]; CPUS];
/// Number of SGIs that have arrived: by CPU, which alone writes them, and number.
static SEEN: [[AtomicU64; SGIS]; CPUS] = [const { [const { AtomicU64::new(0) }; SGIS] }; CPUS];
/// CPUs that receive: a word each.
static READY: [AtomicU64; CPUS] = [const { AtomicU64::new(0) }; CPUS];

/// Ends the guest with a failure unless it holds.
fn check(what: &str, holds: bool) {
    if !holds {
        line!("FAILED: {what}");
        // PSCI: system reset.
        call(0x8400_0009, [0; 3]);
    }
}

/// Value of a GICv2's register for one of ICC_SGI1R_EL1: filter, CPUs, number. It has no CPUs with
/// other affinities.
const fn send_register(value: u64) -> u32 {
    let (number, is_to_others) = ((value >> 24 & 15) as u32, value & TO_OTHERS != 0);
    let list = if value & AFFINITIES == 0 { value as u32 & 0xff } else { 0 };
    (is_to_others as u32) << 24 | list << 16 | number
}

/// Writes ICC_SGI1R_EL1, or what has the same meaning with a GICv2.
fn send(value: u64) {
    if is_v2() {
        // SAFETY: a barrier: the receivers see what this CPU has written.
        unsafe { asm!("dsb sy", options(nostack)) };
        return write(DISTRIBUTOR + SEND, send_register(value));
    }
    // SAFETY: interrupts, which stay masked.
    unsafe { asm!("dsb sy", "msr S3_0_C12_C11_5, {}", "isb", in(reg) value, options(nostack)) };
}

/// Takes the SGIs that are pending for a CPU.
fn receive(cpu: usize) {
    loop {
        let number = take();
        if number >= NONE {
            return;
        }
        let seen = &SEEN[cpu][number as usize % SGIS];
        seen.store(seen.load(Ordering::Relaxed) + 1, Ordering::Release);
    }
}

fn seen() -> [[u64; SGIS]; CPUS] {
    core::array::from_fn(|cpu| {
        core::array::from_fn(|number| SEEN[cpu][number].load(Ordering::Acquire))
    })
}

/// Sends, and then waits until these CPUs have got the SGI `number` once more; no CPU gets another.
fn expect(what: &str, value: u64, number: usize, cpus: &[usize]) {
    let mut expected = seen();
    for &cpu in cpus {
        expected[cpu][number] += 1;
    }
    send(value | (number as u64) << 24);
    arrive(what, &expected);
}

/// Waits until exactly these SGIs have arrived.
fn arrive(what: &str, expected: &[[u64; SGIS]; CPUS]) {
    let end = counter() + 20 * frequency();
    while seen() != *expected {
        receive(0);
        check(what, counter() < end);
    }
    // A wrong one would come by now.
    for _ in 0..100 {
        receive(0);
    }
    check(what, seen() == *expected);
}

/// Entry of the first vCPU.
pub extern "C" fn guest_main() {
    enable_interrupts(0);
    for cpu in 1..CPUS {
        // SAFETY: this vCPU alone uses it.
        let stack = unsafe { &mut (&mut *(&raw mut STACKS))[cpu] };
        check("the other vCPUs start", start_other(cpu as u64, stack));
        let end = counter() + 20 * frequency();
        while READY[cpu].load(Ordering::Acquire) == 0 {
            check("the other vCPUs run", counter() < end);
        }
    }
    for number in 0..SGIS {
        expect("to itself", 1, number, &[0]);
        expect("to one", 1 << 2, number, &[2]);
        expect("to several", 0b1011, number, &[0, 1, 3]);
        expect("to all others", TO_OTHERS, number, &[1, 2, 3]);
        expect("to all others, with a list", TO_OTHERS | 1 << 44 | 0xffff, number, &[1, 2, 3]);
    }
    absent();
    at_once();
    disabled();
    random();
    line!("sgi ok");
}

/// To CPUs that do not exist.
fn absent() {
    for value in [0, 0xfff0, 1 << 44 | 1, 1 << 16 | 1, 1 << 32 | 1, 1 << 48 | 1, 15 << 44 | 0xffff]
    {
        expect("to no CPU", value, 7, &[]);
    }
    expect("to one and to CPUs that do not exist", 0xfff2, 7, &[1]);
}

/// All numbers at once: more than there are list registers.
fn at_once() {
    for (what, list, cpus) in [("all to itself", 1, 0..1), ("all to all", 0b1111, 0..CPUS)] {
        let mut expected = seen();
        for number in 0..SGIS {
            send(list | (number as u64) << 24);
        }
        cpus.for_each(|cpu| expected[cpu].iter_mut().for_each(|seen| *seen += 1));
        arrive(what, &expected);
    }
}

/// While the target has disabled them, they stay pending. The CPUs of a GICv2 can only disable
/// their own.
fn disabled() {
    for cpu in if is_v2() { 0..1 } else { 0..2 } {
        write(private(cpu) + DISABLE, 1 << 5);
        expect("a disabled SGI", 1 << cpu, 5, &[]);
        expect("another SGI", 1 << cpu, 6, &[cpu]);
        let mut expected = seen();
        expected[cpu][5] += 1;
        write(private(cpu) + ENABLE, 1 << 5);
        arrive("an SGI that is enabled again", &expected);
    }
}

/// Random values: no vCPU is lost.
fn random() {
    let mut state = 1u64;
    for _ in 0..FLOOD {
        state = state.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(0x3b1);
        send(state >> 8);
        receive(0);
    }
    // Until the last ones have arrived.
    let end = counter() + frequency() / 2;
    while counter() < end {
        receive(0);
    }
    expect("after random values", 0b1111, 9, &[0, 1, 2, 3]);
}

/// Entry of the other vCPUs.
pub extern "C" fn other_main() {
    let affinity: u64;
    // SAFETY: reads a register.
    unsafe { asm!("mrs {}, mpidr_el1", out(reg) affinity, options(nomem, nostack)) };
    let cpu = affinity as usize % CPUS;
    enable_interrupts(cpu);
    READY[cpu].store(1, Ordering::Release);
    loop {
        receive(cpu);
        wait();
    }
}
