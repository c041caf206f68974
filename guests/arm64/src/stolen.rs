//! Micro-guest with two vCPUs that both compute all the time: on one CPU, each loses half of it to
//! the other, and their records of stolen time (DEN 0057) say so. It switches the VM off then, and
//! resets it otherwise.
#![no_std]
#![no_main]

mod board;

use core::sync::atomic::{AtomicU64, Ordering};

use board::{call, counter, frequency, start_other};

const FEATURES: u64 = 0xc500_0020;
const RECORD: u64 = 0xc500_0021;
/// Function of the calling convention: returns whether there is a function.
const ARCH_FEATURES: u64 = 0x8000_0001;
const NOT_SUPPORTED: u64 = u64::MAX;

static mut STACK: [u64; 512] = [0; 512];
/// Times stolen from the vCPUs, in nanoseconds, plus 1; 0: not known yet.
static STOLEN: [AtomicU64; 2] = [const { AtomicU64::new(0) }; 2];

/// Ends the guest with a failure unless it holds.
fn check(what: &str, holds: bool) {
    if !holds {
        line!("FAILED: {what}");
        // PSCI: system reset.
        call(0x8400_0009, [0; 3]);
    }
}

/// A word of 64 bits of a record.
fn word(record: u64, offset: u64) -> u64 {
    // SAFETY: a record of 64 bytes, which the hypervisor writes.
    unsafe { core::ptr::read_volatile((record + offset) as *const u64) }
}

/// Computes for a second. Returns the time stolen meanwhile, in nanoseconds.
fn compute() -> u64 {
    let record = call(RECORD, [0; 3]);
    check("a record", record != NOT_SUPPORTED && record.is_multiple_of(64));
    check("its first words", word(record, 0) == 0);
    let (before, end) = (word(record, 8), counter() + frequency());
    while counter() < end {}
    word(record, 8) - before
}

/// Entry of the first vCPU.
pub extern "C" fn guest_main() {
    check("the interface", call(ARCH_FEATURES, [FEATURES, 0, 0]) == 0);
    check("the function", call(FEATURES, [RECORD, 0, 0]) == 0);
    check("another function", call(FEATURES, [RECORD + 1, 0, 0]) == NOT_SUPPORTED);
    // SAFETY: the second vCPU alone uses it.
    let stack = unsafe { &mut *(&raw mut STACK) };
    check("the second vCPU starts", start_other(1, stack));
    let own = compute();
    STOLEN[0].store(own + 1, Ordering::Release);
    while STOLEN[1].load(Ordering::Acquire) == 0 {}
    let other = STOLEN[1].load(Ordering::Acquire) - 1;
    line!("stolen: {own} and {other} ns of a second");
    for stolen in [own, other] {
        check("half of the time", (250_000_000..750_000_000).contains(&stolen));
    }
}

/// Entry of the second vCPU.
pub extern "C" fn other_main() {
    STOLEN[1].store(compute() + 1, Ordering::Release);
    // It competes until the first one has ended, too.
    loop {
        core::hint::spin_loop();
    }
}
