//! Starting the other CPUs (SDM vol. 3 §9.4, APM vol. 2 §14.1.4 and §15.27): INIT, start-up, and a page of
//! real-mode code, `trampoline` in `boot.s`, that leads each to the kernel, one at a time.

use crate::memory::{direct, kernel_root};
use crate::ranges::{Range, RangeSet};
use crate::{apic, cpu, log, start, time};
use core::sync::atomic::{AtomicUsize, Ordering};

/// How long a CPU may take to answer.
const ANSWER_MICROSECONDS: u64 = 200_000;
/// Pause after INIT.
const INIT_MICROSECONDS: u64 = 10_000;
/// How long the first start-up message may go unanswered before it is repeated.
const STARTUP_MICROSECONDS: u64 = 1_000;

unsafe extern "C" {
    static trampoline: u8;
    static trampoline_data: u8;
    static trampoline_end: u8;
}

/// What the trampoline reads, at `trampoline_data`.
#[repr(C)]
struct Handover {
    root: u64,
    stack: u64,
    index: u64,
}

/// Number of the last CPU that came up.
static ARRIVED: AtomicUsize = AtomicUsize::new(0);

/// A page for the trampoline: RAM in the first 64 KiB, which boot gives to nobody else, but not page 0.
pub fn trampoline_page<const N: usize>(ram: &RangeSet<N>) -> Option<u64> {
    (1..16).rev().map(|number| number * abi::PAGE_SIZE).find(|&base| {
        let page = Range::sized(base, abi::PAGE_SIZE);
        ram.as_slice().iter().any(|range| range.base <= page.base && page.end <= range.end)
    })
}

/// Starts a CPU whose area is mapped; returns its number if it came up.
///
/// # Safety
/// Only the first CPU does this, with every CPU that could be started still in reset; `page` is
/// RAM below 1 MiB that nobody uses; the next CPU's area is mapped.
pub unsafe fn start(apic_id: u32, page: u64) -> bool {
    // SAFETY: the caller's word.
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
    local.send_startup(apic_id, page);
    if arrives(index, STARTUP_MICROSECONDS) {
        return true;
    }
    local.send_startup(apic_id, page);
    if arrives(index, ANSWER_MICROSECONDS) {
        return true;
    }
    // Should it wake late, it must not run what the page holds for the next CPU.
    local.send_init(apic_id);
    cpu::discard_last();
    false
}

fn arrives(index: usize, microseconds: u64) -> bool {
    let end = time::tsc().saturating_add(time::to_ticks(microseconds * 1000));
    while ARRIVED.load(Ordering::Acquire) != index {
        if time::tsc() > end {
            return false;
        }
        core::hint::spin_loop();
    }
    true
}

/// Where the trampoline leads.
///
/// # Safety
/// Only the trampoline calls it, once per CPU, on the CPU's own stack.
pub unsafe extern "C" fn processor_main(index: usize) -> ! {
    // SAFETY: the first thing that this CPU does, and its area is there.
    unsafe { cpu::activate(index) };
    apic::local().enable();
    crate::machine_check::init();
    let id = apic::local().id();
    if id != cpu::current().apic_id {
        log!("CPU {index}: local APIC says {id}, the firmware {}", cpu::current().apic_id);
    }
    ARRIVED.store(index, Ordering::Release);
    start::ap_main(index)
}
