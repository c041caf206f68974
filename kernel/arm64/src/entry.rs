//! Kernel entry and exit.
//!
//! While a task runs, the stack pointer of EL2 points to its thread's [`ThreadContext`]: the entry
//! code saves the registers there, and continues on the CPU's own stack. Interrupts are masked in
//! the kernel; idle CPUs wait with WFI, which a masked interrupt ends. An exception in the kernel
//! is a bug.

use core::arch::{asm, global_asm};
use core::mem::offset_of;

use hw_arm64::esr::{self, class};
use kernel_core::arch::Context as _;
use kernel_run::{exit, lock};

use crate::context::{ThreadContext, UserRegisters};
use crate::{Arm64, cpu, read_register, run};

global_asm!(
    ".macro save_registers",
    "stp x0, x1, [sp]",
    "stp x2, x3, [sp, #16]",
    "stp x4, x5, [sp, #32]",
    "stp x6, x7, [sp, #48]",
    "stp x8, x9, [sp, #64]",
    "stp x10, x11, [sp, #80]",
    "stp x12, x13, [sp, #96]",
    "stp x14, x15, [sp, #112]",
    "stp x16, x17, [sp, #128]",
    "stp x18, x19, [sp, #144]",
    "stp x20, x21, [sp, #160]",
    "stp x22, x23, [sp, #176]",
    "stp x24, x25, [sp, #192]",
    "stp x26, x27, [sp, #208]",
    "stp x28, x29, [sp, #224]",
    "mrs x1, sp_el0",
    "mrs x2, elr_el1",
    "mrs x3, spsr_el1",
    "mrs x4, tpidr_el0",
    "mrs x0, esr_el1",
    "stp x30, x1, [sp, #240]",
    "stp x2, x3, [sp, #{elr}]",
    "stp x4, x0, [sp, #{tpidr}]",
    "mrs x5, tpidr_el2",
    "ldr x5, [x5, #{kernel_stack}]",
    "mov sp, x5",
    "mov x29, xzr",
    ".endm",
    ".macro bug kind",
    ".balign 128",
    "mrs x3, tpidr_el2",
    "ldr x3, [x3, #{bug_stack}]",
    "mov sp, x3",
    "mov x0, #\\kind",
    "mrs x1, esr_el1",
    "mrs x2, elr_el1",
    "mrs x3, far_el1",
    "b {bug_handler}",
    ".endm",
    ".section .text.vectors, \"ax\"",
    ".balign 2048",
    ".global vectors",
    "vectors:",
    // From the kernel, which always uses its own stack pointer.
    "bug 0",
    "bug 1",
    "bug 2",
    "bug 3",
    "bug 4",
    "bug 5",
    "bug 6",
    "bug 7",
    // From tasks: synchronous, interrupt, fast interrupt (none is in group 0), error.
    ".balign 128",
    "save_registers",
    "ubfx x1, x0, #26, #6",
    "cmp x1, #{call}",
    "b.eq {system_call}",
    "b 3f",
    ".balign 128",
    "b 2f",
    "bug 10",
    "bug 11",
    // No task is 32-bit.
    "bug 12",
    "bug 13",
    "bug 14",
    "bug 15",
    ".balign 128",
    "2:",
    "save_registers",
    "bl {interrupt}",
    "b {leave}",
    "3:",
    "mrs x1, far_el1",
    "bl {exception}",
    "b {leave}",
    ".text",
    elr = const offset_of!(UserRegisters, elr),
    tpidr = const offset_of!(UserRegisters, tpidr),
    kernel_stack = const cpu::KERNEL_STACK_TOP,
    bug_stack = const cpu::BUG_STACK_TOP,
    call = const class::SUPERVISOR_CALL,
    bug_handler = sym kernel_exception,
    system_call = sym system_call_handler,
    interrupt = sym interrupt_handler,
    exception = sym exception_handler,
    leave = sym leave_kernel,
);

unsafe extern "C" {
    /// Vectors of the kernel's exception level.
    pub static vectors: u8;
}

/// Returns to EL0 with the registers of the context in `x0`.
#[unsafe(naked)]
unsafe extern "C" fn leave_kernel() {
    core::arch::naked_asm!(
        // Page-table entries that this CPU has written are visible to its walks.
        "dsb ishst",
        "mov sp, x0",
        "ldp x1, x2, [sp, #{elr}]",
        "ldr x3, [sp, #{tpidr}]",
        "ldp x30, x4, [sp, #240]",
        "msr elr_el1, x1",
        "msr spsr_el1, x2",
        "msr tpidr_el0, x3",
        "msr sp_el0, x4",
        "ldp x0, x1, [sp]",
        "ldp x2, x3, [sp, #16]",
        "ldp x4, x5, [sp, #32]",
        "ldp x6, x7, [sp, #48]",
        "ldp x8, x9, [sp, #64]",
        "ldp x10, x11, [sp, #80]",
        "ldp x12, x13, [sp, #96]",
        "ldp x14, x15, [sp, #112]",
        "ldp x16, x17, [sp, #128]",
        "ldp x18, x19, [sp, #144]",
        "ldp x20, x21, [sp, #160]",
        "ldp x22, x23, [sp, #176]",
        "ldp x24, x25, [sp, #192]",
        "ldp x26, x27, [sp, #208]",
        "ldp x28, x29, [sp, #224]",
        "eret",
        elr = const offset_of!(UserRegisters, elr),
        tpidr = const offset_of!(UserRegisters, tpidr),
    )
}

/// Enters user mode without an interrupted context.
///
/// # Safety
/// `context` is a thread's; nothing on this stack is used again.
#[inline(always)]
pub unsafe fn leave_to(context: *const ThreadContext) -> ! {
    // SAFETY: the caller's contract.
    unsafe { asm!("b {}", sym leave_kernel, in("x0") context, options(noreturn)) }
}

/// Handles a system call.
extern "C" fn system_call_handler() -> ! {
    let cpu_index = cpu::current().id;
    let kernel = lock::lock::<Arm64>(cpu_index);
    let caller = kernel.cpus[cpu_index].current.get();
    let next = caller
        .and_then(|handle| Some((handle, kernel.memory.get(handle)?)))
        .and_then(|(handle, thread)| kernel.system_call(cpu_index, handle, thread))
        .map(|next| exit::Next::new(&next));
    let (kernel, next) = match next {
        Some(next) if !kernel.has_work(cpu_index) => (kernel, next),
        _ => exit::pick_next(kernel, cpu_index),
    };
    let context = exit::leave(kernel, cpu_index, next);
    // SAFETY: a thread's context; the next entry starts on an empty stack.
    unsafe { leave_to(context) }
}

/// Handles interrupts in user mode.
extern "C" fn interrupt_handler() -> *const ThreadContext {
    let cpu_index = cpu::current().id;
    let kernel = lock::lock::<Arm64>(cpu_index);
    run::handle_interrupts(&kernel, cpu_index);
    let (kernel, next) = exit::pick_next(kernel, cpu_index);
    exit::leave(kernel, cpu_index, next)
}

/// Handles an exception in user mode that is no system call.
extern "C" fn exception_handler(syndrome: u64, address: u64) -> *const ThreadContext {
    let cpu_index = cpu::current().id;
    let kernel = lock::lock::<Arm64>(cpu_index);
    let current = kernel.cpus[cpu_index].current.get();
    if let Some(handle) = current
        && let Some(thread) = kernel.memory.get(handle)
    {
        let kind = esr::class(syndrome);
        let has_address = matches!(kind, class::INSTRUCTION_ABORT | class::DATA_ABORT);
        let address = if has_address { address } else { 0 };
        kernel.fault(cpu_index, handle, [kind, syndrome, address, thread.context.ip()]);
    }
    let (kernel, next) = exit::pick_next(kernel, cpu_index);
    exit::leave(kernel, cpu_index, next)
}

extern "C" fn kernel_exception(kind: u64, syndrome: u64, address: u64, far: u64) -> ! {
    crate::panic::stop_if_dying();
    let el = hw_arm64::registers::exception_level(read_register!("CurrentEL"));
    panic!(
        "exception by vector {kind} at EL{el}: syndrome {syndrome:#x} at {address:#x}, \
         address {far:#x}"
    );
}
