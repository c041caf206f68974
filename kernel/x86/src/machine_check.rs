//! Machine checks (APM vol. 2, chapter 9): the hardware reports an error that it could not correct. Nothing that the machine
//! holds can be trusted any more, so the kernel stops it, whoever ran.
//!
//! A processor whose CR4.MCE is clear shuts down instead (APM vol. 2 §9.3.3). The kernel's is set, but while a guest runs the guest's
//! counts, and a shutdown of the guest is an exit like that of a triple fault. The registers of the hardware tell them apart:
//! they are cleared at the start, so an error in them is what has happened since.

use core::arch::naked_asm;

use hw_x86::msr;

use crate::features::features;
use crate::io::{rdmsr, wrmsr};

/// Entry of vector 18, on a stack of its own. It may come anywhere, between SYSCALL and the switch of stacks too, so nothing
/// here uses GS.
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

/// Most banks whose registers are in the range that begins with MC0_STATUS's.
const MAX_BANKS: u32 = 32;

/// Number of banks of this CPU.
fn banks() -> u32 {
    // SAFETY: the processor has the register.
    if features().mca { (unsafe { rdmsr(msr::MCG_CAP) } as u32 & 0xff).min(MAX_BANKS) } else { 0 }
}

/// The status of a bank, one of [`banks`].
fn status(bank: u32) -> u64 {
    // SAFETY: the processor has this bank.
    unsafe { rdmsr(msr::MC0_STATUS + 4 * bank) }
}

/// Whether a bank with this status raised a machine check: it holds an error that was not corrected, and such errors do.
const fn is_fatal(status: u64) -> bool {
    use msr::mc_status::{EN, UC, VAL};
    status & (VAL | UC | EN) == VAL | UC | EN
}

/// Clears what this CPU's registers hold from before the start: it was no error of this system.
pub fn init() {
    for bank in 0..banks() {
        let old = status(bank);
        if old & msr::mc_status::VAL != 0 {
            crate::log!("machine check bank {bank} has an error from before: status {old:#x}");
            // SAFETY: zeros are what every bank takes; an error that is no longer reported harms nothing.
            unsafe { wrmsr(msr::MC0_STATUS + 4 * bank, 0) };
        }
    }
}

/// A guest that was at instruction `ip` has shut down. Does not return if the reason was an error of the hardware while the guest's
/// CR4.MCE was clear.
#[cold]
pub fn check_after_shutdown(ip: u64) {
    if (0..banks()).any(|bank| is_fatal(status(bank))) {
        stop("while a guest ran that masks them", ip);
    }
}

extern "C" fn handler(ip: u64, cs: u64) -> ! {
    let in_kernel = cs & 3 == 0;
    stop(if in_kernel { "in the kernel" } else { "in a native program" }, ip)
}

/// Panics with what the processor reports. `place`: where the machine check came, at instruction `ip`.
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_errors_that_raise_machine_checks_stop_the_machine() {
        // What the bits are in bank 0 of a processor: VAL, OVER, UC, EN, MISCV, ADDRV, PCC from bit 63 down.
        for (status, expected) in [
            (0, false),
            // Corrected, and corrected with an overflow.
            (0x9000_0000_0000_0135, false),
            (0xd000_0000_0000_0135, false),
            // Not corrected, but such errors are masked.
            (0xa000_0000_0000_0135, false),
            // What is left of an error is none.
            (0x3000_0000_0000_0135, false),
            (0xb000_0000_0000_0135, true),
            (0xfe00_0000_0007_0b0f, true),
        ] {
            assert_eq!(is_fatal(status), expected, "{status:#x}");
        }
    }
}
