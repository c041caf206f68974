//! Instructions that the language has no words for.

use crate::trap::recover;
use core::arch::asm;
use core::arch::x86_64::{__cpuid_count, _rdtsc, CpuidResult};
use hw_x86::cpuid::leaf;
use hw_x86::msr;

/// The time-stamp counter.
pub fn tsc() -> u64 {
    // SAFETY: every x86-64 processor has it.
    unsafe { _rdtsc() }
}

/// `CPUID`.
pub fn cpuid(leaf: u32, subleaf: u32) -> CpuidResult {
    __cpuid_count(leaf, subleaf)
}

/// Features of the KVM paravirtual interface (`hw_x86::cpuid::kvm_a`); 0 without one.
pub fn kvm_features() -> u32 {
    let is_there = cpuid(leaf::HYPERVISOR, 0).ebx.to_le_bytes() == *b"KVMK";
    if is_there { cpuid(leaf::HYPERVISOR_FEATURES, 0).eax } else { 0 }
}

/// Turns interrupts off.
pub fn disable_interrupts() {
    // SAFETY: changes only the interrupt flag.
    unsafe { asm!("cli", options(nomem, nostack)) };
}

/// Turns interrupts on, for what follows the next instruction.
pub fn enable_interrupts() {
    // SAFETY: trap handlers exist from the start and change nothing that a program holds in
    // registers. Memory that they share with programs is atomic; not `nomem`, so that it is read
    // again.
    unsafe { asm!("sti", options(nostack)) };
}

/// Turns interrupts on for one instruction that does nothing, and off again: what is pending and
/// has the priority for it arrives.
pub fn take_interrupts() {
    // SAFETY: as in `enable_interrupts`.
    unsafe { asm!("sti", "nop", "nop", "cli", options(nostack)) };
}

/// Stops until the next interrupt (for good, if interrupts are off).
pub fn halt() {
    // SAFETY: waits; handlers as in `enable_interrupts`.
    unsafe { asm!("hlt", options(nostack)) };
}

/// Turns interrupts on and waits, without a moment in between.
pub fn enable_and_halt() {
    // SAFETY: as in `halt`.
    unsafe { asm!("sti", "hlt", options(nostack)) };
}

/// Waits in `HLT` until there is something.
pub fn sleep_until<T>(mut look: impl FnMut() -> Option<T>) -> T {
    loop {
        disable_interrupts();
        let found = look();
        if let Some(found) = found {
            enable_interrupts();
            return found;
        }
        enable_and_halt();
    }
}

/// Task priority by `CR8`: interrupts of class `priority` (vector / 16) and below are held off.
pub fn set_priority(priority: u64) {
    // SAFETY: holds off interrupts or lets them in; handlers as in `enable_interrupts`.
    unsafe { asm!("mov cr8, {}", in(reg) priority, options(nostack)) };
}

/// The task priority.
pub fn priority() -> u64 {
    let value;
    // SAFETY: reads a register.
    unsafe { asm!("mov {}, cr8", out(reg) value, options(nomem, nostack)) };
    value
}

/// The last address that faulted.
pub fn fault_address() -> u64 {
    let value;
    // SAFETY: reads a register.
    unsafe { asm!("mov {}, cr2", out(reg) value, options(nomem, nostack)) };
    value
}

/// The stack pointer.
pub fn stack_pointer() -> u64 {
    let value;
    // SAFETY: reads a register.
    unsafe { asm!("mov {}, rsp", out(reg) value, options(nomem, nostack)) };
    value
}

/// Sets bits of `CR4`.
///
/// # Safety
///
/// The processor has the features, and they do not change what running code relies on.
pub unsafe fn set_cr4(bits: u64) {
    // SAFETY: the caller knows the bits; all others stay.
    unsafe { write_cr4(cr4() | bits) };
}

/// `CR0`.
pub fn cr0() -> u64 {
    let value;
    // SAFETY: reads a register.
    unsafe { asm!("mov {}, cr0", out(reg) value, options(nomem, nostack)) };
    value
}

/// Writes `CR0`.
///
/// # Safety
///
/// The value does not take away what running code relies on.
pub unsafe fn write_cr0(value: u64) {
    // SAFETY: by contract.
    unsafe { asm!("mov cr0, {}", in(reg) value, options(nostack)) };
}

/// `CR3`.
pub fn cr3() -> u64 {
    let value;
    // SAFETY: reads a register.
    unsafe { asm!("mov {}, cr3", out(reg) value, options(nomem, nostack)) };
    value
}

/// Writes `CR3`.
///
/// # Safety
///
/// The tables map what running code relies on.
pub unsafe fn write_cr3(value: u64) {
    // SAFETY: by contract.
    unsafe { asm!("mov cr3, {}", in(reg) value, options(nostack)) };
}

/// `CR4`.
pub fn cr4() -> u64 {
    let value;
    // SAFETY: reads a register.
    unsafe { asm!("mov {}, cr4", out(reg) value, options(nomem, nostack)) };
    value
}

/// Writes `CR4`.
///
/// # Safety
///
/// As for [`set_cr4`]; and what the value clears is not needed.
pub unsafe fn write_cr4(value: u64) {
    // SAFETY: by contract.
    unsafe { asm!("mov cr4, {}", in(reg) value, options(nostack)) };
}

/// Removes translations of the page of `address` from the TLB of this processor.
pub fn invalidate_page(address: u64) {
    // SAFETY: the page tables stay the source of translations. Not `nomem`, so that earlier stores
    // to the tables are done.
    unsafe { asm!("invlpg [{}]", in(reg) address, options(nostack)) };
}

/// Sets extended control register 0.
///
/// # Safety
///
/// `CR4.OSXSAVE` is set and the processor has these states.
pub unsafe fn set_xcr0(bits: u64) {
    // SAFETY: by contract; code is compiled to use no extended state.
    unsafe {
        asm!("xsetbv", in("ecx") 0, in("eax") bits as u32, in("edx") (bits >> 32) as u32,
            options(nomem, nostack));
    }
}

/// Reads a model-specific register; `Err` is the vector of the exception that this raised.
pub fn read_msr(register: u32) -> Result<u64, u8> {
    let (low, high): (u32, u32);
    let attempt = recover();
    // SAFETY: reading changes nothing; after an exception the program continues at label 2.
    unsafe {
        asm!("lea {tmp}, [rip + 2f]", "mov [{resume}], {tmp}", "rdmsr", "2:",
            tmp = out(reg) _, resume = in(reg) attempt.resume(),
            in("ecx") register, inout("eax") 0u32 => low, inout("edx") 0u32 => high,
            options(nostack));
    }
    attempt.finish().map(|()| u64::from(high) << 32 | u64::from(low))
}

/// Writes a model-specific register; `Err` is the vector of the exception that this raised.
///
/// # Safety
///
/// The value does not take away what running code relies on.
pub unsafe fn write_msr(register: u32, value: u64) -> Result<(), u8> {
    let attempt = recover();
    // SAFETY: the caller vouches for the value; after an exception the program continues at label
    // 2.
    unsafe {
        asm!("lea {tmp}, [rip + 2f]", "mov [{resume}], {tmp}", "wrmsr", "2:",
            tmp = out(reg) _, resume = in(reg) attempt.resume(),
            in("ecx") register, in("eax") value as u32, in("edx") (value >> 32) as u32,
            options(nostack));
    }
    attempt.finish()
}

/// `VMMCALL` with a number in `rax` and arguments; what is in `rax` and the further registers
/// afterwards: `rcx`, `rdx`, `rsi`, `rdi`, `r8`. The hypervisor must be ours.
pub fn hypercall_with(number: u64, rbx: u64, mut words: [u64; 5]) -> (u64, [u64; 5]) {
    let result;
    let [rcx, rdx, rsi, rdi, r8] = &mut words;
    // SAFETY: the hypervisor changes these registers only. RBX is not an operand's.
    unsafe {
        asm!("xchg rbx, {rbx}", "vmmcall", "xchg rbx, {rbx}",
            rbx = inout(reg) rbx => _, inout("rax") number => result, inout("rcx") *rcx,
            inout("rdx") *rdx, inout("rsi") *rsi, inout("rdi") *rdi, inout("r8") *r8,
            options(nostack));
    }
    (result, words)
}

/// [`hypercall_with`] from user mode, with zeros as further arguments; what is in `rax` afterwards.
/// The stack is not used there: `SYSRET` enters user mode, `SYSCALL` returns from it, and neither
/// reads a descriptor.
pub fn hypercall_as_user(number: u64, rbx: u64) -> u64 {
    // Interrupts from user mode would need a stack of their own: flags with nothing but the bit
    // that is always 1.
    const FLAGS: u32 = 2;
    // Selectors: the kernel's code; user data and code are 8 and 16 after the kernel's.
    const SELECTORS: u32 = 0x08 | 0x10 << 16;
    let result;
    disable_interrupts();
    // SAFETY: start-up has mapped everything for user mode too, and the selectors are its own. Who
    // has no SYSCALL raises an exception, which no handler expects. The hypervisor changes `rax`
    // only; RBX is not an operand's.
    unsafe {
        asm!(
            "mov ecx, {efer}", "rdmsr", "or eax, {sce}", "wrmsr",
            "mov ecx, {star}", "xor eax, eax", "mov edx, {selectors}", "wrmsr",
            "lea rax, [rip + 3f]", "mov rdx, rax", "shr rdx, 32", "mov ecx, {lstar}", "wrmsr",
            "xchg rbx, {rbx}",
            "lea rcx, [rip + 2f]", "mov r11d, {flags}", "mov rax, {number}", "xor edx, edx",
            "sysretq",
            "2:", "xor ecx, ecx", "vmmcall", "syscall",
            "3:", "xchg rbx, {rbx}",
            efer = const msr::EFER, sce = const msr::efer::SCE, star = const msr::STAR,
            lstar = const msr::LSTAR, selectors = const SELECTORS, flags = const FLAGS,
            number = in(reg) number, rbx = inout(reg) rbx => _, out("rax") result,
            out("rcx") _, out("rdx") _, out("r11") _, in("rsi") 0, in("rdi") 0, in("r8") 0,
            options(nostack),
        );
    }
    enable_interrupts();
    result
}

/// `VMMCALL` with a number in `rax`; `Err` is the vector of the exception that this raised.
pub fn hypercall(number: u64) -> Result<u64, u8> {
    let result;
    let attempt = recover();
    // SAFETY: a hypervisor changes `rax` only; after an exception the program continues at label 2.
    unsafe {
        asm!("lea {tmp}, [rip + 2f]", "mov [{resume}], {tmp}", "vmmcall", "2:",
            tmp = out(reg) _, resume = in(reg) attempt.resume(),
            inout("rax") number => result, options(nostack));
    }
    attempt.finish().map(|()| result)
}
