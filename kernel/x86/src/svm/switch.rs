//! World switch (APM vol. 2 §15.5): VMRUN between the general-purpose registers of the guest and
//! those of the kernel.

use core::arch::asm;

use crate::idt;

/// Runs the guest until the next exit: loads its general-purpose registers from `registers`
/// (`VcpuState::gpr`), executes VMRUN, and saves them there. `rax` and `rsp` are in the VMCB. GIF
/// is clear on return.
///
/// # Safety
/// GIF is clear and IF set; host state was saved and guest state loaded (VMSAVE, VMLOAD); the VMCB
/// is complete.
#[inline(always)]
pub unsafe fn world_switch(vmcb: u64, registers: *mut u64) {
    // SAFETY: the caller's contract. Every register that the guest may change is declared, or
    // pushed where the compiler reserves it.
    unsafe {
        asm!(
            "push rbx",
            "push rbp",
            "push rsi",
            "mov rcx, [rsi + 8]",
            "mov rdx, [rsi + 16]",
            "mov rbx, [rsi + 24]",
            "mov rbp, [rsi + 40]",
            "mov rdi, [rsi + 56]",
            "mov r8, [rsi + 64]",
            "mov r9, [rsi + 72]",
            "mov r10, [rsi + 80]",
            "mov r11, [rsi + 88]",
            "mov r12, [rsi + 96]",
            "mov r13, [rsi + 104]",
            "mov r14, [rsi + 112]",
            "mov r15, [rsi + 120]",
            "mov rsi, [rsi + 48]",
            "vmrun rax",
            "xchg rsi, [rsp]",
            "mov [rsi + 8], rcx",
            "mov [rsi + 16], rdx",
            "mov [rsi + 24], rbx",
            "mov [rsi + 40], rbp",
            "mov [rsi + 56], rdi",
            "mov [rsi + 64], r8",
            "mov [rsi + 72], r9",
            "mov [rsi + 80], r10",
            "mov [rsi + 88], r11",
            "mov [rsi + 96], r12",
            "mov [rsi + 104], r13",
            "mov [rsi + 112], r14",
            "mov [rsi + 120], r15",
            "pop rax",
            "mov [rsi + 48], rax",
            "pop rbp",
            "pop rbx",
            inout("rax") vmcb => _,
            inout("rsi") registers => _,
            out("rcx") _, out("rdx") _, out("rdi") _, out("r8") _, out("r9") _, out("r10") _,
            out("r11") _, out("r12") _, out("r13") _, out("r14") _, out("r15") _,
        );
    }
}

/// Sets GIF, and with `interrupts` takes pending host interrupts, which are recorded in
/// `PerCpu::pending`.
///
/// # Safety
/// Host state is loaded, the kernel lock is not held, GIF is clear and IF set.
#[inline(always)]
pub unsafe fn end_guest_mode(interrupts: bool) {
    // SAFETY: the caller's contract.
    unsafe {
        if interrupts {
            asm!("stgi", "nop", "cli", options(nostack));
        } else {
            asm!("cli", "stgi", options(nostack));
        }
    }
}

/// Saves host state in the page at `host_state` and loads that of the VMCB at `vmcb` (physical
/// addresses), with GIF clear and IF set.
///
/// # Safety
/// The page is this CPU's own; the VMCB is complete. Until [`restore_host`] nothing uses GS or
/// SYSCALL.
#[inline(always)]
pub unsafe fn load_guest(vmcb: u64, host_state: u64) {
    // SAFETY: the caller's contract. With GIF clear, no interrupt occurs before VMRUN.
    unsafe {
        asm!("clgi", "sti", "vmsave rax", in("rax") host_state, options(nostack));
        asm!("vmload rax", in("rax") vmcb, options(nostack));
    }
}

/// Reverses [`load_guest`]: saves guest state in the VMCB and restores host state.
///
/// # Safety
/// As for [`load_guest`], whose arguments these are.
#[inline(always)]
pub unsafe fn restore_host(vmcb: u64, host_state: u64) {
    // SAFETY: the caller's contract.
    unsafe {
        asm!("vmsave rax", in("rax") vmcb, options(nostack));
        asm!("vmload rax", in("rax") host_state, options(nostack));
    }
}

/// Makes the local APIC re-evaluate its interrupts, by a write of its task priority.
///
/// QEMU TCG's VMRUN raises V_IRQ without a lock, and may clear the pending state of a host
/// interrupt that arrives at that moment. The interrupt stays in the local APIC unnoticed until
/// that re-evaluates it.
#[inline(always)]
pub fn reevaluate_interrupts() {
    // SAFETY: the kernel's constant task priority.
    unsafe {
        asm!("mov cr8, {}", in(reg) idt::TASK_PRIORITY as u64, options(nostack, preserves_flags));
    }
}
