//! Deliberate faults on x86-64, for programs that test the kernel: see the module above.

use core::arch::x86_64::{__cpuid, __rdtscp};
use core::arch::{asm, global_asm};

use abi::{Op, reply_wait};

use crate::port::Ports;

/// Ways to fault that only this architecture has, with their names.
pub const FAULTS: &[(&str, fn())] = &[
    ("privileged", privileged),
    ("bases", set_fs_base),
    ("divide", divide_by_zero),
    ("port", port),
];

/// Reads a byte at any address.
pub fn read(address: u64) -> u8 {
    let value;
    // SAFETY: reading is harmless, or faults and stops the thread.
    unsafe {
        asm!("mov {}, byte ptr [{}]", out(reg_byte) value, in(reg) address, options(nostack, readonly))
    }
    value
}

/// Writes a byte at any address.
pub fn write(address: u64, value: u8) {
    // SAFETY: none; see the module's head.
    unsafe { asm!("mov byte ptr [{}], {}", in(reg) address, in(reg_byte) value, options(nostack)) }
}

/// Jumps to any address.
pub fn jump(address: u64) -> ! {
    // SAFETY: none; see the module's head.
    unsafe { asm!("jmp {}", in(reg) address, options(noreturn)) }
}

/// Executes an undefined instruction.
pub fn undefined() -> ! {
    // SAFETY: faults and stops the thread.
    unsafe { asm!("ud2", options(noreturn)) }
}

/// Executes a privileged instruction.
fn privileged() {
    // SAFETY: faults and stops the thread.
    unsafe { asm!("cli", options(nomem, nostack)) }
}

/// Writes the base of FS, which is not part of a thread's registers.
fn set_fs_base() {
    // SAFETY: faults and stops the thread; nothing here uses FS.
    unsafe { asm!("wrfsbase {}", in(reg) 0x1234_5000_u64, options(nomem, nostack)) }
}

/// Reads a port that belongs to another program.
fn port() {
    let _ = Ports::new(0x3f8, 8).map(|ports| ports.read(0));
}

/// Returns a register that no program can write and the kernel clears: TSC_AUX, if the processor
/// has `RDTSCP`.
pub fn foreign_register() -> Option<u64> {
    const RDTSCP: u32 = 1 << 27;
    let features = __cpuid(0x8000_0001).edx;
    let mut value = 0;
    // SAFETY: the processor has the instruction, which writes the value only.
    (features & RDTSCP != 0).then(|| unsafe { __rdtscp(&mut value) })?;
    Some(value.into())
}

/// Pushes until the stack overflows.
pub fn exhaust_stack() -> ! {
    // SAFETY: writes to the unused part of the stack, then faults at the guard page.
    unsafe { asm!("2: push rax", "jmp 2b", options(noreturn)) }
}

/// Divides by zero.
fn divide_by_zero() {
    // SAFETY: faults and stops the thread.
    unsafe {
        asm!("div ecx", inout("eax") 1 => _, inout("edx") 0 => _, inout("ecx") 0 => _, options(nomem, nostack));
    }
}

/// Fills every general register with a pattern derived from `seed`, spins for `loops` rounds, and
/// returns the number of registers that changed.
pub fn check_registers(seed: u64, loops: u64) -> u64 {
    let mismatches: u64;
    // SAFETY: `rbx` and `rbp` are saved on the stack, all others are declared; balanced stack.
    unsafe {
        asm!(
            "push rbx",
            "push rbp",
            "lea rdx, [rax + 1]",
            "lea rbx, [rax + 2]",
            "lea rbp, [rax + 3]",
            "lea rsi, [rax + 4]",
            "lea rdi, [rax + 5]",
            "lea r8, [rax + 6]",
            "lea r9, [rax + 7]",
            "lea r10, [rax + 8]",
            "lea r11, [rax + 9]",
            "lea r12, [rax + 10]",
            "lea r13, [rax + 11]",
            "lea r14, [rax + 12]",
            "lea r15, [rax + 13]",
            "2:",
            "dec rcx",
            "jnz 2b",
            // Each expected difference to rax cancels out; any other leaves bits in rcx.
            "sub rdx, rax", "xor rdx, 1", "or rcx, rdx",
            "sub rbx, rax", "xor rbx, 2", "or rcx, rbx",
            "sub rbp, rax", "xor rbp, 3", "or rcx, rbp",
            "sub rsi, rax", "xor rsi, 4", "or rcx, rsi",
            "sub rdi, rax", "xor rdi, 5", "or rcx, rdi",
            "sub r8, rax", "xor r8, 6", "or rcx, r8",
            "sub r9, rax", "xor r9, 7", "or rcx, r9",
            "sub r10, rax", "xor r10, 8", "or rcx, r10",
            "sub r11, rax", "xor r11, 9", "or rcx, r11",
            "sub r12, rax", "xor r12, 10", "or rcx, r12",
            "sub r13, rax", "xor r13, 11", "or rcx, r13",
            "sub r14, rax", "xor r14, 12", "or rcx, r14",
            "sub r15, rax", "xor r15, 13", "or rcx, r15",
            "pop rbp",
            "pop rbx",
            inout("rax") seed => _,
            inout("rcx") loops.max(1) => mismatches,
            out("rdx") _, out("rsi") _, out("rdi") _,
            out("r8") _, out("r9") _, out("r10") _, out("r11") _,
            out("r12") _, out("r13") _, out("r14") _, out("r15") _,
        );
    }
    (mismatches != 0) as u64
}

// A server that replies to every call with the caller's words, the last of them replaced by the
// gate's badge. It uses no memory, so a task needs only its page to run it. Aligned to lie in one
// page.
global_asm!(
    ".pushsection .text.native_echo, \"ax\", @progbits",
    ".balign 64",
    "native_echo:",
    "mov edi, {wait}",
    "xor esi, esi",
    "2:",
    "mov eax, {reply_wait}",
    "syscall",
    "mov r9, rdi",
    "mov edi, {both}",
    "jmp 2b",
    ".popsection",
    wait = const reply_wait::WAIT,
    both = const reply_wait::REPLY | reply_wait::WAIT,
    reply_wait = const Op::GateReplyWait as u64,
);

// A thread that performs the system call that its argument points to: four words, the operation and
// three arguments; then it waits for ever. It needs no stack.
global_asm!(
    ".pushsection .text.native_call_once, \"ax\", @progbits",
    ".balign 64",
    "native_call_once:",
    "mov rax, [rdi]",
    "mov rsi, [rdi + 16]",
    "mov rdx, [rdi + 24]",
    "mov rdi, [rdi + 8]",
    "syscall",
    "2:",
    "jmp 2b",
    ".popsection",
);
