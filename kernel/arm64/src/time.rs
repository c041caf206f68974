//! The system counter (Arm ARM, D12): the kernel and tasks read the physical one, which all CPUs
//! share. Deadlines use the hypervisor's physical timer.

use hw_arm64::registers::TIMER_ENABLED;
use kernel_run::time::Scale;
use spin::Once;

use crate::{read_register, write_register};

static SCALE: Once<Scale> = Once::new();

/// Scale of the counter. Before [`init`], one tick counts as one nanosecond.
pub fn scale() -> Scale {
    SCALE.get().copied().unwrap_or(const { Scale::new(1_000_000) })
}

/// Reads the counter's frequency, which firmware sets, and returns it in kHz.
pub fn init() -> u64 {
    SCALE.call_once(|| Scale::new(read_register!("cntfrq_el0") / 1000)).khz()
}

/// Current value of the counter. Not ordered with other instructions.
#[inline(always)]
pub fn counter() -> u64 {
    read_register!("cntpct_el0")
}

/// Arms this CPU's timer to interrupt at `deadline`.
#[inline(always)]
pub fn arm(deadline: u64) {
    // SAFETY: the timer only interrupts.
    unsafe {
        write_register!("cnthp_cval_el2", deadline);
        write_register!("cnthp_ctl_el2", TIMER_ENABLED);
    }
}

/// Stops this CPU's timer.
pub fn disarm() {
    // SAFETY: the timer does not interrupt any more.
    unsafe { write_register!("cnthp_ctl_el2", 0) };
}

/// Returns whether `is_done` becomes true within `microseconds`.
pub fn becomes_true(microseconds: u64, is_done: impl Fn() -> bool) -> bool {
    let end = counter().saturating_add(scale().ticks(microseconds.saturating_mul(1000)));
    while !is_done() {
        if counter() > end {
            return false;
        }
        core::hint::spin_loop();
    }
    true
}
