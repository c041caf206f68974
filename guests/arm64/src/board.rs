//! The board `virt` for micro-guests in Rust: UART, GICv3 or GICv2, virtual timer, PSCI. A guest
//! has the function `guest_main`, after which the VM is switched off; interrupts stay masked.
#![allow(dead_code, reason = "no guest uses everything")]

use core::arch::{asm, global_asm};
use core::fmt::{self, Write};
use core::sync::atomic::{AtomicBool, Ordering};

global_asm!(
    include_str!("board.s"),
    "begin: bl {main}",
    "b power_off",
    // Another vCPU begins with its stack in x0.
    "other_start: mov sp, x0",
    "bl {other}",
    "b .",
    main = sym crate::guest_main,
    other = sym crate::other_main,
);

unsafe extern "C" {
    fn other_start();
}

const UART: usize = 0x900_0000;
const UART_FLAGS: usize = UART + 0x18;
const TRANSMIT_FULL: u32 = 1 << 5;
/// Registers of the interrupt controller's distributor.
pub const DISTRIBUTOR: usize = 0x800_0000;
/// Registers of it with a bit for each interrupt: group, enable, disable, make pending, make
/// inactive.
pub const GROUP: usize = 0x80;
/// See [`GROUP`].
pub const ENABLE: usize = 0x100;
/// See [`GROUP`].
pub const DISABLE: usize = 0x180;
/// See [`GROUP`].
pub const PEND: usize = 0x200;
/// See [`GROUP`].
pub const DEACTIVATE: usize = 0x380;
/// GICv2: targets, a byte for each interrupt.
pub const TARGETS: usize = 0x800;
/// Two bits for each interrupt.
const TRIGGERS: usize = 0xc00;
const EDGE: u32 = 0b10;
/// GICv2: sends an SGI.
pub const SEND: usize = 0xf00;
/// GICv2: makes SGIs pending, a byte for each, with a bit for each source.
pub const PEND_SGI: usize = 0xf20;
/// GICv2: registers of the CPU's interface: control, lowest priority, acknowledge, end.
pub const CPU_INTERFACE: usize = 0x801_0000;
const LOWEST: usize = 0x4;
const ACKNOWLEDGE: usize = 0xc;
const END: usize = 0x10;
/// Mask of the number where there is a source.
const NUMBER: u64 = 0x3ff;
/// GICv3: registers of the first CPU's private interrupts; those of the next one follow.
const PRIVATE: usize = 0x80b_0000;
const REDISTRIBUTOR: usize = 0x2_0000;
/// Interrupt of the virtual timer.
pub const TIMER: u64 = 27;
const CPU_ON: u64 = 0xc400_0003;
const SYSTEM_OFF: u64 = 0x8400_0008;

/// Reads a device register.
pub fn read(address: usize) -> u32 {
    let value;
    // SAFETY: a device register, or an external abort, which ends the guest.
    unsafe { asm!("ldr {:w}, [{}]", out(reg) value, in(reg) address, options(nostack)) };
    value
}

/// Writes a device register.
pub fn write(address: usize, value: u32) {
    // SAFETY: as for `read`; no device of the board writes memory.
    unsafe { asm!("str {:w}, [{}]", in(reg) value, in(reg) address, options(nostack)) };
}

/// Reads the flags of the UART: an exit to the VMM.
pub fn uart_flags() -> u32 {
    read(UART_FLAGS)
}

/// The UART.
pub struct ConsoleOutput;

impl Write for ConsoleOutput {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        for byte in text.bytes() {
            while uart_flags() & TRANSMIT_FULL != 0 {}
            write(UART, byte.into());
        }
        Ok(())
    }
}

/// Prints a line.
#[macro_export]
macro_rules! line {
    ($($argument:tt)*) => {{
        use core::fmt::Write;
        let _ = write!($crate::board::ConsoleOutput, $($argument)*);
        let _ = $crate::board::ConsoleOutput.write_str("\r\n");
    }};
}

/// Calls the hypervisor: number or function, and arguments; returns the first result.
#[inline(always)]
pub fn call(function: u64, arguments: [u64; 3]) -> u64 {
    call_all(function, arguments)[0]
}

/// The same; returns all results.
#[inline(always)]
pub fn call_all(function: u64, arguments: [u64; 3]) -> [u64; 4] {
    let [mut first, mut second, mut third] = arguments;
    let result;
    // SAFETY: SMCCC: changes x0 to x17 at most; what PSCI starts has a stack of its own.
    unsafe {
        asm!(
            "hvc #0",
            inlateout("x0") function => result,
            inlateout("x1") first, inlateout("x2") second, inlateout("x3") third,
            lateout("x4") _, lateout("x5") _, lateout("x6") _, lateout("x7") _,
            lateout("x8") _, lateout("x9") _, lateout("x10") _, lateout("x11") _,
            lateout("x12") _, lateout("x13") _, lateout("x14") _, lateout("x15") _,
            lateout("x16") _, lateout("x17") _,
            options(nostack),
        );
    }
    [result, first, second, third]
}

/// Ends the VM.
pub fn power_off() {
    call(SYSTEM_OFF, [0; 3]);
}

/// Starts vCPU `index` in `other_main`, with this stack.
pub fn start_other(index: u64, stack: &'static mut [u64]) -> bool {
    let top = stack.as_ptr_range().end as u64 & !15;
    call(CPU_ON, [index, other_start as *const () as u64, top]) == 0
}

/// Reads the virtual counter, after everything before it.
#[inline(always)]
pub fn counter() -> u64 {
    let value;
    // SAFETY: reads a counter.
    unsafe { asm!("isb", "mrs {}, cntvct_el0", out(reg) value, options(nostack)) };
    value
}

/// Ticks of the counter per second.
pub fn frequency() -> u64 {
    let value;
    // SAFETY: reads a register.
    unsafe { asm!("mrs {}, cntfrq_el0", out(reg) value, options(nomem, nostack)) };
    value
}

/// Prints the time of an event that happened `count` times in `ticks`.
pub fn report(name: impl fmt::Display, ticks: u64, count: u64) {
    let tenths = u128::from(ticks) * 10_000_000_000 / u128::from(frequency()) / u128::from(count);
    line!("VB {name} {}.{} ns", tenths / 10, tenths % 10);
}

/// The interrupt controller is a GICv2.
static IS_V2: AtomicBool = AtomicBool::new(false);

/// Returns whether the interrupt controller is a GICv2, once a CPU has enabled its interrupts.
#[inline(always)]
pub fn is_v2() -> bool {
    IS_V2.load(Ordering::Relaxed)
}

/// Registers of a CPU's private interrupts. Those of a GICv2 are this CPU's, whatever the index.
pub fn private(index: usize) -> usize {
    if is_v2() { DISTRIBUTOR } else { PRIVATE + REDISTRIBUTOR * index }
}

/// Enables SGIs and the timer's interrupt on this CPU.
pub fn enable_interrupts(index: usize) {
    let features: u64;
    // SAFETY: reads a register.
    unsafe { asm!("mrs {}, id_aa64pfr0_el1", out(reg) features, options(nomem, nostack)) };
    // The CPU's interface of a GICv3 is in its registers.
    IS_V2.store(features >> 24 & 0xf == 0, Ordering::Relaxed);
    write(DISTRIBUTOR, if is_v2() { 1 } else { 0x12 });
    write(private(index) + GROUP, u32::MAX);
    write(private(index) + ENABLE, 0xffff | 1 << TIMER);
    if is_v2() {
        write(CPU_INTERFACE + LOWEST, 0xf8);
        return write(CPU_INTERFACE, 1);
    }
    // SAFETY: the CPU's interface: system registers, all priorities, group 1. Interrupts stay
    // masked in the processor.
    unsafe {
        asm!(
            "msr S3_0_C12_C12_5, {one}", "isb",
            "msr S3_0_C4_C6_0, {lowest}",
            "msr S3_0_C12_C12_7, {one}", "isb",
            one = in(reg) 1u64, lowest = in(reg) 0xf8u64, options(nostack)
        );
    }
}

/// Enables a shared interrupt for the first CPU, which is edge-triggered.
pub fn enable_edge(number: usize) {
    let (word, bit) = (number / 32 * 4, 1 << (number % 32));
    if is_v2() {
        let (targets, shift) = (DISTRIBUTOR + TARGETS + number / 4 * 4, 8 * (number % 4));
        write(targets, read(targets) | 1 << shift);
    }
    let (triggers, shift) = (DISTRIBUTOR + TRIGGERS + number / 16 * 4, 2 * (number % 16));
    write(triggers, read(triggers) | EDGE << shift);
    write(DISTRIBUTOR + GROUP + word, u32::MAX);
    write(DISTRIBUTOR + ENABLE + word, bit);
}

/// The CPU's interface of a GICv3.
pub mod v3 {
    use super::*;

    /// Sends SGI 1 to a CPU.
    #[inline(always)]
    pub fn send(index: u64) {
        let value = 1u64 << 24 | 1 << index;
        // SAFETY: an interrupt, which stays masked.
        unsafe { asm!("msr S3_0_C12_C11_5, {}", "isb", in(reg) value, options(nostack)) };
    }

    /// Makes the interface forget the priorities of interrupts that are not ended.
    pub fn clear_active_priorities() {
        // SAFETY: accesses the CPU's interface.
        unsafe { asm!("msr S3_0_C12_C9_0, xzr", "isb", options(nostack)) };
    }

    /// Takes and ends the most urgent pending interrupt; above 1,019: none.
    #[inline(always)]
    pub fn take() -> u64 {
        let number;
        // SAFETY: accesses the CPU's interface.
        unsafe {
            asm!(
                "mrs {0}, S3_0_C12_C12_0", "msr S3_0_C12_C12_1, {0}", "isb",
                out(reg) number, options(nostack)
            );
        }
        number
    }
}

/// Sends SGI 1 to a CPU.
pub fn send(index: u64) {
    match is_v2() {
        true => write(DISTRIBUTOR + SEND, 1 << (16 + index) | 1),
        false => v3::send(index),
    }
}

/// Takes the most urgent pending interrupt, and ends it after `while_active`. Returns its number;
/// above 1,019: none.
pub fn take_with(while_active: impl FnOnce(u64)) -> u64 {
    let value: u64;
    if is_v2() {
        value = read(CPU_INTERFACE + ACKNOWLEDGE).into();
        while_active(value & NUMBER);
        write(CPU_INTERFACE + END, value as u32);
        return value & NUMBER;
    }
    // SAFETY: accesses the CPU's interface.
    unsafe { asm!("mrs {}, S3_0_C12_C12_0", out(reg) value, options(nostack)) };
    while_active(value);
    // SAFETY: as before.
    unsafe { asm!("msr S3_0_C12_C12_1, {}", "isb", in(reg) value, options(nostack)) };
    value
}

/// Takes and ends the most urgent pending interrupt; above 1,019: none.
pub fn take() -> u64 {
    take_with(|_| {})
}

/// Waits for an interrupt.
#[inline(always)]
pub fn wait() {
    // SAFETY: interrupts are masked, and end the wait.
    unsafe { asm!("wfi", options(nostack)) };
}

/// Returns whether an interrupt is pending.
#[inline(always)]
pub fn is_pending() -> bool {
    let value: u64;
    // SAFETY: reads a register.
    unsafe { asm!("mrs {}, isr_el1", out(reg) value, options(nostack)) };
    value != 0
}

/// Sets the virtual timer to a value of the counter; `None`: off.
#[inline(always)]
pub fn set_timer(deadline: Option<u64>) {
    let (value, control) = deadline.map_or((0, 0), |value| (value, 1u64));
    // SAFETY: an interrupt, which stays masked.
    unsafe {
        asm!(
            "msr cntv_cval_el0, {}", "msr cntv_ctl_el0, {}", "isb",
            in(reg) value, in(reg) control, options(nostack)
        );
    }
}

#[panic_handler]
fn panic(_: &core::panic::PanicInfo) -> ! {
    line!("FAILED: panic");
    // PSCI: system reset.
    call(0x8400_0009, [0; 3]);
    loop {}
}
