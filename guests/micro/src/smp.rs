//! Other processors: started one after the other by the first, each with a stack and a number of
//! its own. The first is number 0.
//!
//! Documentation: Intel MultiProcessor Specification 1.4, appendix B.4; SDM vol. 3, "MP
//! initialization protocol".

use crate::{BUG, apic, cpu, exit, println, trap};
use core::cell::UnsafeCell;
use core::hint::spin_loop;
use core::sync::atomic::{AtomicU32, AtomicU64, Ordering::SeqCst};
use hw_x86::apic::local;

/// Processors that a program can use.
pub const MOST: usize = 8;

const STACK_LENGTH: usize = 0x4000;
/// Start address of application processors: a page below 1 MiB that loaders do not use.
const FIRST_CODE: u64 = 0x4_0000;
/// Ticks that `INIT` takes (10 ms at 1 GHz; a longer time is harmless).
const INIT_TICKS: u64 = 10_000_000;
/// Ticks after which a processor that has not started gets another start-up IPI.
const STARTUP_TICKS: u64 = 1_000_000_000;
/// Number of start-up IPIs before giving up on a processor.
const ATTEMPTS: u32 = 20;

#[repr(C, align(16))]
struct Stacks(UnsafeCell<[[u8; STACK_LENGTH]; MOST]>);
// SAFETY: used as stacks only, each by one processor.
unsafe impl Sync for Stacks {}
static STACKS: Stacks = Stacks(UnsafeCell::new([[0; STACK_LENGTH]; MOST]));

/// Stack of the processor that is being started; 0 when it has begun.
pub(crate) static STACK: AtomicU64 = AtomicU64::new(0);
/// Program of that processor.
static PROGRAM: AtomicU64 = AtomicU64::new(0);

// SAFETY: labels of the start-up code.
unsafe extern "C" {
    static guest_cpu_start: u8;
    static guest_cpu_start_end: u8;
}

/// The number of the processor that asks.
pub fn index() -> usize {
    let offset = (cpu::stack_pointer() as usize).wrapping_sub(STACKS.0.get().addr());
    if offset < size_of::<Stacks>() { offset / STACK_LENGTH } else { 0 }
}

/// Starts the processor with local APIC id `id` as number `index` (1 to [`MOST`] - 1), whatever it
/// does now, and waits until it has begun. `program` runs with interrupts off.
pub fn start(index: usize, id: u32, program: fn() -> !) {
    let begin = (&raw const guest_cpu_start).addr();
    let length = (&raw const guest_cpu_start_end).addr() - begin;
    // SAFETY: the code is position-independent but for absolute addresses; nothing else is in that
    // page.
    unsafe {
        core::ptr::copy_nonoverlapping(begin as *const u8, FIRST_CODE as *mut u8, length);
    }
    let end = STACKS.0.get().addr() + (index + 1) * STACK_LENGTH;
    PROGRAM.store(program as usize as u64, SeqCst);
    STACK.store(end as u64, SeqCst);
    stop(id);
    for _ in 0..ATTEMPTS {
        let page = (FIRST_CODE >> 12) as u32;
        apic::send(id, local::DELIVER_STARTUP | local::ICR_ASSERT | page);
        if wait(STARTUP_TICKS, || STACK.load(SeqCst) == 0) {
            return;
        }
    }
    println!("processor {index} does not start");
    exit(crate::FAILED);
}

/// Stops a processor until it is started again.
pub fn stop(id: u32) {
    apic::send(id, local::DELIVER_INIT | local::ICR_ASSERT);
    wait(INIT_TICKS, || false);
}

/// Waits for a condition, for at most `ticks`; returns true if it holds.
pub fn wait(ticks: u64, condition: impl Fn() -> bool) -> bool {
    let start = cpu::tsc();
    loop {
        if condition() {
            return true;
        }
        if cpu::tsc().wrapping_sub(start) > ticks {
            return false;
        }
        spin_loop();
    }
}

/// Entry of application processors in 64-bit mode.
pub(crate) extern "C" fn main() -> ! {
    trap::load_table();
    let program = PROGRAM.load(SeqCst);
    STACK.store(0, SeqCst);
    if program == 0 {
        exit(BUG);
    }
    // SAFETY: `start` stored the address of such a function.
    let program = unsafe { core::mem::transmute::<usize, fn() -> !>(program as usize) };
    program()
}

/// A counter for each processor.
pub struct Counters([AtomicU32; MOST]);

impl Counters {
    /// All are 0.
    pub const fn new() -> Self {
        Self([const { AtomicU32::new(0) }; MOST])
    }

    /// Counts for the processor that asks.
    pub fn count(&self) {
        self.0[index()].fetch_add(1, SeqCst);
    }

    /// The count of a processor.
    pub fn get(&self, index: usize) -> u32 {
        self.0[index].load(SeqCst)
    }

    /// Waits until a processor's count is `expected`; whether that came within `ticks`.
    pub fn reaches(&self, index: usize, expected: u32, ticks: u64) -> bool {
        wait(ticks, || self.get(index) == expected)
    }
}

impl Default for Counters {
    fn default() -> Self {
        Self::new()
    }
}
