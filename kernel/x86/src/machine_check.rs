//! Machine checks (APM vol. 2, chapter 9): the hardware reports an uncorrectable error. No state of
//! the machine can be trusted any more, so the kernel panics, regardless of what was running.
//!
//! A processor with CR4.MCE clear shuts down instead (APM vol. 2 §9.3.3). The kernel sets it, but
//! while a guest runs the guest's CR4 applies, and a shutdown of the guest exits like a triple
//! fault. The error registers distinguish the two: they are cleared at start, so an error in them
//! has occurred since.

use core::arch::naked_asm;

use hw_x86::msr;

use crate::features::features;
use crate::io::{rdmsr, wrmsr};

/// Entry of vector 18, on its own stack. It can occur anywhere, even between SYSCALL and the stack
/// switch, so it does not use GS.
///
/// # Safety
/// Only the processor enters here, with the frame of the exception on the stack.
#[unsafe(naked)]
pub unsafe extern "C" fn entry() {
    naked_asm!(
        "cld",
        "mov rdi, [rsp]",
        "mov rsi, [rsp + 8]",
        "and rsp, -16",
        "call {handler}",
        "ud2",
        handler = sym handler,
    )
}

/// Maximum number of banks in the register range that starts with MC0_STATUS.
const MAX_BANKS: u32 = 32;

/// Number of banks of this CPU.
fn banks() -> u32 {
    // SAFETY: the processor has the register.
    if features().mca { (unsafe { rdmsr(msr::MCG_CAP) } as u32 & 0xff).min(MAX_BANKS) } else { 0 }
}

/// Status of a bank below [`banks`].
fn status(bank: u32) -> u64 {
    // SAFETY: the processor has this bank.
    unsafe { rdmsr(msr::MC0_STATUS + 4 * bank) }
}

/// Clears and logs errors recorded on this CPU before the kernel started.
pub fn init() {
    for bank in 0..banks() {
        let old = status(bank);
        if old & msr::mc_status::VAL != 0 {
            crate::log!(
                "machine check bank {bank} holds an error from before the start: status {old:#x}"
            );
            // SAFETY: every bank accepts 0; clearing a reported error has no effect on memory.
            unsafe { wrmsr(msr::MC0_STATUS + 4 * bank, 0) };
        }
    }
}

/// Panics if a guest's shutdown at instruction `ip` was caused by a hardware error while the
/// guest's CR4.MCE was clear.
#[cold]
pub fn check_after_shutdown(ip: u64) {
    if (0..banks()).any(|bank| msr::mc_status::raised_machine_check(status(bank))) {
        stop("while a guest with CR4.MCE clear ran", ip);
    }
}

extern "C" fn handler(ip: u64, cs: u64) -> ! {
    let in_kernel = cs & 3 == 0;
    stop(if in_kernel { "in the kernel" } else { "in a user task" }, ip)
}

/// Panics with the processor's report. `place`: description of the context at instruction `ip`.
#[cold]
pub fn stop(place: &str, ip: u64) -> ! {
    crate::panic::stop_if_dying();
    // SAFETY: a processor that raises machine checks has this register.
    let global = unsafe { rdmsr(msr::MCG_STATUS) };
    for bank in 0..banks() {
        let status = status(bank);
        if status & msr::mc_status::VAL != 0 {
            let address = if status & msr::mc_status::ADDRV != 0 {
                // SAFETY: as above.
                unsafe { rdmsr(msr::MC0_ADDR + 4 * bank) }
            } else {
                0
            };
            panic!(
                "machine check (hardware error) {place} at {ip:#x}: bank {bank}, status {status:#x}, \
                 address {address:#x}, global status {global:#x}"
            );
        }
    }
    panic!("machine check (hardware error) {place} at {ip:#x}: global status {global:#x}");
}
