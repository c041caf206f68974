//! Start of the other CPUs (SDM vol. 3 §9.4, APM vol. 2 §14.1.4 and §15.27): INIT, start-up IPI,
//! and a page of real-mode code (`trampoline` in `boot.s`) that enters the kernel, for one CPU at a
//! time.

use crate::memory::{direct, kernel_root};
use crate::{apic, cpu, log, start, time};
use core::sync::atomic::{AtomicUsize, Ordering};
use kernel_run::ranges::{Range, RangeSet};

/// Time after which a CPU counts as not responding.
const ANSWER_MICROSECONDS: u64 = 200_000;
/// Pause after INIT.
const INIT_MICROSECONDS: u64 = 10_000;
/// Time after which the start-up IPI is repeated.
const STARTUP_MICROSECONDS: u64 = 1_000;

unsafe extern "C" {
    static trampoline: u8;
    static trampoline_data: u8;
    static trampoline_end: u8;
}

/// Parameters of the trampoline, at `trampoline_data`.
#[repr(C)]
struct Handover {
    root: u64,
    stack: u64,
    index: u64,
}

/// Index of the CPU that came up last.
static LAST_ONLINE: AtomicUsize = AtomicUsize::new(0);

/// Finds a page for the trampoline: RAM in the first 64 KiB, which boot does not allocate, except
/// page 0.
pub fn trampoline_page<const N: usize>(ram: &RangeSet<N>) -> Option<u64> {
    (1..16).rev().map(|frame| frame * abi::PAGE_SIZE).find(|&base| {
        let page = Range::sized(base, abi::PAGE_SIZE);
        ram.as_slice().iter().any(|range| range.base <= page.base && page.end <= range.end)
    })
}

/// Starts a CPU whose area is mapped; returns whether it came up.
///
/// # Safety
/// Only the first CPU calls this, with every other startable CPU still in reset; `page` is unused
/// RAM below 1 MiB; the next CPU's area is mapped.
pub unsafe fn start(apic_id: u32, page: u64) -> bool {
    // SAFETY: the caller's contract.
    let index = unsafe { cpu::create(apic_id) };
    let (code, data, end) = (
        &raw const trampoline as usize,
        &raw const trampoline_data as usize,
        &raw const trampoline_end as usize,
    );
    let handover =
        Handover { root: kernel_root(), stack: cpu::kernel_stack_top(index), index: index as u64 };
    // SAFETY: the page is free RAM and the trampoline is shorter than it; its data is aligned.
    unsafe {
        direct(page).copy_from_nonoverlapping(code as *const u8, end - code);
        direct(page).add(data - code).cast::<Handover>().write_volatile(handover);
    }
    let local = apic::local();
    local.send_init(apic_id);
    time::wait_microseconds(INIT_MICROSECONDS);
    for patience in [STARTUP_MICROSECONDS, ANSWER_MICROSECONDS] {
        local.send_startup(apic_id, page);
        if comes_online(index, patience) {
            return true;
        }
    }
    // A CPU that wakes up late must not execute the next CPU's parameters.
    local.send_init(apic_id);
    cpu::discard_last();
    false
}

fn comes_online(index: usize, microseconds: u64) -> bool {
    let end = time::tsc().saturating_add(time::to_ticks(microseconds * 1000));
    while LAST_ONLINE.load(Ordering::Acquire) != index {
        if time::tsc() > end {
            return false;
        }
        core::hint::spin_loop();
    }
    true
}

/// Entry from the trampoline.
///
/// # Safety
/// Only the trampoline calls it, once per CPU, on the CPU's own stack.
pub unsafe extern "C" fn processor_main(index: usize) -> ! {
    // SAFETY: the first function that this CPU executes, and its area exists.
    unsafe { cpu::activate(index) };
    apic::local().enable();
    crate::machine_check::init();
    let id = apic::local().id();
    if id != cpu::current().apic_id {
        log!("CPU {index}: local APIC id is {id}, but the MADT lists {}", cpu::current().apic_id);
    }
    LAST_ONLINE.store(index, Ordering::Release);
    start::ap_main(index)
}
