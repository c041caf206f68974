//! Micro-guest that measures exits, interrupts and the timer in the counter's time, which is that
//! of executed instructions on a machine with `-icount shift=0`. It prints `VB NAME TIME ns`.
#![no_std]
#![no_main]

mod board;

use core::sync::atomic::{AtomicU64, Ordering};

use abi::vcpu::HYPERCALL_VERSION;
use board::{
    TIMER, call, counter, enable_interrupts, is_pending, report, set_timer, start_other,
    uart_flags, wait,
};
// The figures are those of a GICv3, without a look at the version.
use board::v3::{send, take};

/// Repetitions of what is shorter than a tick of the counter, and of the rest.
const ROUNDS: u64 = 10_000;
const EVENTS: u64 = 200;
/// Time until the timer's interrupt, in ticks.
const DELAY: u64 = 2_000;
/// Number of an interrupt of none.
const NONE: u64 = 1_023;

static mut STACK: [u64; 1024] = [0; 1024];
/// Counter at which the second vCPU has woken up.
static WOKEN: AtomicU64 = AtomicU64::new(0);

/// Measures `ROUNDS` rounds, less those of an empty loop.
#[inline(always)]
fn rounds(name: &str, mut round: impl FnMut()) {
    let begin = counter();
    for _ in 0..ROUNDS {
        round();
    }
    report(name, counter() - begin, ROUNDS);
}

/// Entry of the first vCPU.
pub extern "C" fn guest_main() {
    enable_interrupts(0);
    rounds("arm_hypercall", || {
        call(HYPERCALL_VERSION, [0; 3]);
    });
    rounds("arm_mmio_exit", || {
        uart_flags();
    });
    rounds("arm_self_sgi", || {
        send(0);
        while take() >= NONE {}
    });
    timer("arm_vtimer", || while !is_pending() {});
    timer("arm_vtimer_wfi", wait);
    // SAFETY: the second vCPU alone uses it.
    let stack = unsafe { &mut *(&raw mut STACK) };
    if start_other(1, stack) {
        measure_ipi();
    }
}

/// Measures the time from the timer's deadline to the next instruction after `until`.
#[inline(always)]
fn timer(name: &str, until: impl Fn()) {
    let mut late = 0;
    for _ in 0..EVENTS {
        let deadline = counter() + DELAY;
        set_timer(Some(deadline));
        until();
        late += counter() - deadline;
        set_timer(None);
        while take() != TIMER {}
    }
    report(name, late, EVENTS);
}

/// Measures the time from an SGI to the first instruction of the second vCPU, which waits.
fn measure_ipi() {
    let mut sum = 0;
    // It answers each interrupt with one; the first says that it waits.
    for round in 0..=EVENTS {
        let begin = counter();
        if round != 0 {
            send(1);
        }
        while take() >= NONE {
            wait();
        }
        if round != 0 {
            sum += WOKEN.load(Ordering::Acquire) - begin;
        }
    }
    report("arm_ipi", sum, EVENTS);
}

/// Entry of the second vCPU.
pub extern "C" fn other_main() {
    enable_interrupts(1);
    loop {
        send(0);
        wait();
        WOKEN.store(counter(), Ordering::Release);
        while take() >= NONE {}
    }
}
