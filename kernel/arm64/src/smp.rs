//! Start of the other CPUs by the firmware (PSCI), one at a time.

use core::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use crate::machine::Machine;
use crate::memory::{self, kernel_root};
use crate::{cpu, gic, log, psci, start, time};

/// Time after which a CPU counts as not responding.
const ANSWER_MICROSECONDS: u64 = 1_000_000;

unsafe extern "C" {
    fn secondary_start();
    /// Root of the kernel's tables and stack of the CPU that starts.
    static secondary_data: [AtomicU64; 2];
}

/// Index of the CPU that came up last.
static LAST_ONLINE: AtomicUsize = AtomicUsize::new(0);
/// Place in the device tree of the CPU that starts.
static PLACE: AtomicUsize = AtomicUsize::new(0);

/// Starts all other CPUs that the device tree lists.
pub fn start_all(machine: &mut Machine) {
    let count = machine.listed_cpus;
    for place in 0..count {
        let affinity = machine.affinities[place];
        if affinity == cpu::affinity() {
            continue;
        }
        if !gic::has_cpu(place) {
            log!(
                "the CPU with affinity {affinity:#x} has no redistributor in the first three \
                 regions below 4 GiB: not used"
            );
            continue;
        }
        // SAFETY: the first CPU, the others off; the areas of all CPUs are mapped.
        if unsafe { start(affinity, place) } {
            machine.cpus += 1;
        } else {
            log!("the CPU with affinity {affinity:#x} does not start: not used");
        }
    }
    log!("{} of {count} CPUs started", machine.cpus);
}

/// Starts a CPU and returns whether it came up.
///
/// # Safety
/// Only the first CPU calls this; the next CPU's area is mapped.
unsafe fn start(affinity: u64, place: usize) -> bool {
    // SAFETY: by the caller.
    let index = unsafe { cpu::create(affinity) };
    PLACE.store(place, Ordering::Relaxed);
    // SAFETY: words in the image, which only this CPU writes, and the starting one reads.
    let data = unsafe { &secondary_data };
    data[0].store(kernel_root(), Ordering::Relaxed);
    data[1].store(cpu::kernel_stack_top(index), Ordering::Relaxed);
    // SAFETY: the other CPU reads memory without caches at first, so the line must be there.
    unsafe {
        core::arch::asm!("dsb sy", "dc cvac, {}", "dsb sy", in(reg) data, options(nostack));
    }
    let entry = memory::physical_of(secondary_start as *const () as *const u8);
    // SAFETY: `boot.s` has the code for it.
    let is_accepted = unsafe { psci::start_cpu(affinity, entry, index as u64) };
    let is_online = || LAST_ONLINE.load(Ordering::Acquire) == index;
    if is_accepted && time::becomes_true(ANSWER_MICROSECONDS, is_online) {
        return true;
    }
    if is_accepted {
        // It may still wake up, on a stack that another one must not get.
        panic!("the CPU with affinity {affinity:#x} was started, but does not respond");
    }
    // SAFETY: the firmware has refused to start it.
    unsafe { cpu::discard_last() };
    false
}

/// Entry from `boot.s`.
///
/// # Safety
/// Only `boot.s` calls it, once per CPU, on the CPU's own stack.
pub unsafe extern "C" fn processor_main(index: usize) -> ! {
    // SAFETY: the first function that this CPU executes, and its area exists.
    unsafe { cpu::activate(index) };
    if !gic::init_cpu(PLACE.load(Ordering::Relaxed)) {
        panic!("CPU {index} has no interrupt controller");
    }
    LAST_ONLINE.store(index, Ordering::Release);
    start::ap_main(index)
}
