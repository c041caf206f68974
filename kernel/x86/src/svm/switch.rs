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
    /// The switch, with the registers other than `rsi` and their offsets.
    macro_rules! switch {
        ($($register:ident $offset:literal)*) => {
            asm!(
                "push rbx",
                "push rbp",
                "push rsi",
                $(concat!("mov ", stringify!($register), ", [rsi + ", $offset, "]"),)*
                "mov rsi, [rsi + 48]",
                "vmrun rax",
                "xchg rsi, [rsp]",
                $(concat!("mov [rsi + ", $offset, "], ", stringify!($register)),)*
                "pop rax",
                "mov [rsi + 48], rax",
                "pop rbp",
                "pop rbx",
                inout("rax") vmcb => _,
                inout("rsi") registers => _,
                out("rcx") _, out("rdx") _, out("rdi") _, out("r8") _, out("r9") _, out("r10") _,
                out("r11") _, out("r12") _, out("r13") _, out("r14") _, out("r15") _,
            )
        };
    }
    // SAFETY: the caller's contract. Every register that the guest may change is declared, or
    // pushed where the compiler reserves it.
    unsafe {
        switch!(rcx 8 rdx 16 rbx 24 rbp 40 rdi 56 r8 64 r9 72 r10 80 r11 88 r12 96 r13 104 r14 112
            r15 120);
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
