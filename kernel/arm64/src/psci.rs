//! Calls of the firmware (PSCI). At EL2 they are made by SMC.

use core::sync::atomic::{AtomicBool, Ordering};

use hw_arm64::psci;

static IS_PRESENT: AtomicBool = AtomicBool::new(false);

/// Records that the firmware has PSCI by SMC.
pub fn init() {
    IS_PRESENT.store(true, Ordering::Release);
}

/// Calls the firmware; negative: an error (DEN 0022, 5.2.2).
///
/// # Safety
/// What the function does, as starting a CPU, is safe.
unsafe fn call(function: u64, arguments: [u64; 3]) -> i64 {
    let [first, second, third] = arguments;
    let result: i64;
    // SAFETY: SMCCC: the call changes x0 to x17 at most; by the caller otherwise.
    unsafe {
        core::arch::asm!(
            "smc #0",
            inlateout("x0") function => result,
            in("x1") first, in("x2") second, in("x3") third,
            clobber_abi("C"),
            options(nostack),
        );
    }
    result
}

/// Starts the CPU with this affinity at a physical address, with `argument` in `x0`. Returns
/// whether the firmware accepts.
///
/// # Safety
/// The code there is prepared for it.
pub unsafe fn start_cpu(affinity: u64, entry: u64, argument: u64) -> bool {
    // SAFETY: by the caller.
    IS_PRESENT.load(Ordering::Acquire)
        && unsafe { call(psci::CPU_ON, [affinity, entry, argument]) } == psci::SUCCESS
}

/// Resets the machine, or switches it off. Returns if there is no firmware that does it.
pub fn end(is_reset: bool) {
    if IS_PRESENT.load(Ordering::Acquire) {
        let function = if is_reset { psci::SYSTEM_RESET } else { psci::SYSTEM_OFF };
        // SAFETY: nothing happens after it.
        unsafe { call(function, [0; 3]) };
    }
}
