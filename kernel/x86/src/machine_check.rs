//! Machine checks (APM vol. 2, chapter 9): the hardware reports an error that it could not correct. Nothing that the machine
//! holds can be trusted any more, so the kernel stops it, whoever ran.

use core::arch::naked_asm;

use hw_x86::msr;

use crate::io::rdmsr;

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

extern "C" fn handler(ip: u64, cs: u64) -> ! {
    let in_kernel = cs & 3 == 0;
    stop(if in_kernel { "in the kernel" } else { "in a native program" }, ip)
}

/// Panics with what the processor reports. `place`: where the machine check came, at instruction `ip`.
#[cold]
pub fn stop(place: &str, ip: u64) -> ! {
    crate::panic::stop_if_dying();
    // SAFETY: a processor that raises machine checks has these registers.
    let (banks, global) = unsafe { (rdmsr(msr::MCG_CAP) as u32 & 0xff, rdmsr(msr::MCG_STATUS)) };
    for bank in 0..banks {
        // SAFETY: the processor has this bank.
        let status = unsafe { rdmsr(msr::MC0_STATUS + 4 * bank) };
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
