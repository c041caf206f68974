//! Kernel entry and exit.
//!
//! The entry code saves a thread's registers directly in its [`Context`]: TSS.RSP0 points to the
//! end of the context, so the processor itself pushes the last five words. The kernel then runs on
//! the CPU's own stack. Interrupts in ring 0, which occur only where the kernel enables them (idle,
//! and after a guest), are recorded in `PerCpu::pending`. Vectors 0 to 31 are always exceptions:
//! the local APIC delivers no interrupt there (`idt::TASK_PRIORITY`).

use core::arch::{global_asm, naked_asm};
use core::cell::UnsafeCell;
use core::mem::{offset_of, size_of};

use abi::Status;
use hw_x86::msr;

use crate::cpu::{self, selector};
use crate::io::{read_cr2, wrmsr};
use crate::run;

/// Value of `vector` for a context saved by SYSCALL, which SYSRET can restore.
const SYSCALL: u64 = 0x100;
/// Initial RFLAGS of a thread: IF. Tasks cannot change IOPL, NT, VM, RF, VIF, VIP.
const USER_FLAGS: u64 = 0x202;
/// RFLAGS cleared by SYSCALL: TF, IF, DF, NT, AC.
const SYSCALL_MASK: u64 = 1 << 8 | 1 << 9 | 1 << 10 | 1 << 14 | 1 << 18;

/// Registers of a thread, in reverse order of the pushes at entry.
#[repr(C)]
#[derive(Clone, Copy, Default)]
pub struct Registers {
    r15: u64,
    r14: u64,
    r13: u64,
    r12: u64,
    rbp: u64,
    rbx: u64,
    r11: u64,
    r10: u64,
    r9: u64,
    r8: u64,
    rax: u64,
    rcx: u64,
    rdx: u64,
    rsi: u64,
    rdi: u64,
    vector: u64,
    error: u64,
    rip: u64,
    cs: u64,
    rflags: u64,
    rsp: u64,
    ss: u64,
}

/// Saved registers of a thread.
#[repr(C, align(16))]
#[derive(Default)]
pub struct Context(UnsafeCell<Registers>);

const _: () = assert!(size_of::<Context>() == 176 && size_of::<Context>().is_multiple_of(16));
const _: () = assert!(offset_of!(Registers, vector) == 120);

macro_rules! register {
    ($self:ident.$field:ident) => {
        // SAFETY: the entry path writes the context only while its thread runs in user mode; the
        // kernel reads and writes single words of it under the lock, holding no reference.
        unsafe { (&raw const (*$self.0.get()).$field).read() }
    };
    ($self:ident.$field:ident = $value:expr) => {
        // SAFETY: as above.
        unsafe { (&raw mut (*$self.0.get()).$field).write($value) }
    };
}

impl Context {
    /// Initial stack pointer of an entry from user mode.
    pub fn end(this: *const Self) -> u64 {
        this as u64 + size_of::<Self>() as u64
    }

    /// Cause of the kernel entry: vector and error code.
    fn cause(&self) -> (u64, u64) {
        (register!(self.vector), register!(self.error))
    }
}

impl kernel_core::arch::Context for Context {
    #[inline(always)]
    fn operation(&self) -> u64 {
        register!(self.rax)
    }

    #[inline(always)]
    fn argument(&self, index: usize) -> u64 {
        match index {
            0 => register!(self.rdi),
            1 => register!(self.rsi),
            2 => register!(self.rdx),
            3 => register!(self.r10),
            4 => register!(self.r8),
            _ => register!(self.r9),
        }
    }

    #[inline(always)]
    fn set_status(&self, status: Status) {
        register!(self.rax = status as u64);
    }

    #[inline(always)]
    fn set_result(&self, index: usize, value: u64) {
        match index {
            0 => register!(self.rdi = value),
            1 => register!(self.rsi = value),
            2 => register!(self.rdx = value),
            3 => register!(self.r10 = value),
            4 => register!(self.r8 = value),
            _ => register!(self.r9 = value),
        }
    }

    fn restart(&self) {
        // Repeat the SYSCALL instruction, which is two bytes long; `rax` still holds the operation.
        register!(self.rip = self.ip().wrapping_sub(2));
    }

    fn start(&self, ip: u64, sp: u64, argument: u64) {
        let fresh = Registers {
            rdi: argument,
            rip: ip,
            cs: selector::USER_CODE as u64,
            rflags: USER_FLAGS,
            rsp: sp,
            ss: selector::USER_DATA as u64,
            ..Registers::default()
        };
        // SAFETY: the thread is stopped, so no CPU saves registers here.
        unsafe { self.0.get().write(fresh) };
    }

    fn ip(&self) -> u64 {
        register!(self.rip)
    }
}

/// Enables SYSCALL on this CPU.
pub fn init() {
    // SAFETY: the selectors are those of this CPU's GDT, the entry is `syscall_entry`, and
    // interrupts are off in it.
    unsafe {
        wrmsr(msr::STAR, selector::STAR);
        wrmsr(msr::LSTAR, syscall_entry as *const () as u64);
        wrmsr(msr::CSTAR, ignore_entry as *const () as u64);
        wrmsr(msr::SFMASK, SYSCALL_MASK);
    }
}

/// SYSCALL from compatibility mode, which tasks cannot enter: there is no 32-bit code segment.
#[unsafe(naked)]
unsafe extern "C" fn ignore_entry() {
    naked_asm!("ud2")
}

#[unsafe(naked)]
unsafe extern "C" fn syscall_entry() {
    naked_asm!(
        "swapgs",
        "mov gs:[16], rsp",
        "mov rsp, gs:[{stack}]",
        "push {data}",
        "push gs:[16]",
        "push r11",
        "push {code}",
        "push rcx",
        // From here as in `interrupt_entry`, but without the error code, `rcx` and `r11`.
        "mov qword ptr [rsp - 16], {syscall}",
        "mov [rsp - 24], rdi",
        "mov [rsp - 32], rsi",
        "mov [rsp - 40], rdx",
        "mov [rsp - 56], rax",
        "mov [rsp - 64], r8",
        "mov [rsp - 72], r9",
        "mov [rsp - 80], r10",
        "mov [rsp - 96], rbx",
        "mov [rsp - 104], rbp",
        "mov [rsp - 112], r12",
        "mov [rsp - 120], r13",
        "mov [rsp - 128], r14",
        "mov [rsp - 136], r15",
        "mov rsp, gs:[8]",
        "call {handler}",
        stack = const cpu::INTERRUPT_STACK,
        data = const selector::USER_DATA,
        code = const selector::USER_CODE,
        syscall = const SYSCALL,
        handler = sym syscall_handler,
    )
}

/// Returns to user mode with the registers of the context in `rax`.
#[unsafe(naked)]
unsafe extern "C" fn leave_kernel() {
    naked_asm!(
        "mov rdi, [rax + 112]",
        "mov rsi, [rax + 104]",
        "mov rdx, [rax + 96]",
        "mov r8, [rax + 72]",
        "mov r9, [rax + 64]",
        "mov r10, [rax + 56]",
        "mov rbx, [rax + 40]",
        "mov rbp, [rax + 32]",
        "mov r12, [rax + 24]",
        "mov r13, [rax + 16]",
        "mov r14, [rax + 8]",
        "mov r15, [rax]",
        "cmp qword ptr [rax + 120], {syscall}",
        "jne 2f",
        // The last page of the lower half is never mapped, so the address after a SYSCALL is
        // canonical.
        "mov rcx, [rax + 136]",
        "mov r11, [rax + 152]",
        "mov rsp, [rax + 160]",
        "mov rax, [rax + 80]",
        "swapgs",
        "sysretq",
        "2:",
        "mov r11, [rax + 48]",
        "mov rcx, [rax + 88]",
        "lea rsp, [rax + 136]",
        "mov rax, [rax + 80]",
        "swapgs",
        "iretq",
        syscall = const SYSCALL,
    )
}

/// Enters user mode without an interrupted context: the first time on a CPU.
///
/// # Safety
/// `context` is a thread's; nothing on this stack is used again.
#[inline(always)]
pub unsafe fn leave_to(context: *const Context) -> ! {
    // SAFETY: the caller's contract.
    unsafe {
        core::arch::asm!("jmp {}", sym leave_kernel, in("rax") context, options(noreturn));
    }
}

// One entry point per vector: normalises the stack (error code, vector) and jumps to the common
// path. The processor pushes an error code for the vectors in the bit mask (APM vol. 2, section
// 8.2).
global_asm!(
    ".section .text.interrupts, \"ax\"",
    ".balign 16",
    "interrupt_stubs:",
    ".set vector, 0",
    ".rept 256",
    ".balign 16",
    ".if (vector < 32) && ((0x60227d00 >> vector) & 1)",
    ".else",
    "push 0",
    ".endif",
    "push vector",
    "jmp {common}",
    ".set vector, vector + 1",
    ".endr",
    ".section .rodata.interrupts, \"a\"",
    ".balign 8",
    ".global interrupt_stub_table",
    "interrupt_stub_table:",
    ".set vector, 0",
    ".rept 256",
    ".quad interrupt_stubs + 16 * vector",
    ".set vector, vector + 1",
    ".endr",
    ".text",
    common = sym interrupt_entry,
);

unsafe extern "C" {
    #[link_name = "interrupt_stub_table"]
    /// Entry point of each vector.
    pub safe static INTERRUPT_STUBS: [unsafe extern "C" fn(); 256];
}

#[unsafe(naked)]
unsafe extern "C" fn interrupt_entry() {
    naked_asm!(
        "cmp dword ptr [rsp], 2",
        "je {nmi}",
        "test byte ptr [rsp + 24], 3",
        "jz 2f",
        "swapgs",
        "push rdi",
        "push rsi",
        "push rdx",
        "push rcx",
        "push rax",
        "push r8",
        "push r9",
        "push r10",
        "push r11",
        "push rbx",
        "push rbp",
        "push r12",
        "push r13",
        "push r14",
        "push r15",
        "cld",
        "mov rdi, [rsp + 120]",
        "mov rsp, gs:[8]",
        "call {handler}",
        "jmp {leave}",
        // From ring 0.
        "2:",
        "cmp dword ptr [rsp], 32",
        "jb 3f",
        "push rax",
        "mov rax, [rsp + 8]",
        "bts qword ptr gs:[{pending}], rax",
        "pop rax",
        "add rsp, 16",
        "iretq",
        "3:",
        "mov rdi, [rsp]",
        "mov rsi, [rsp + 8]",
        "mov rdx, [rsp + 16]",
        "and rsp, -16",
        "call {bug}",
        "ud2",
        pending = const offset_of!(cpu::PerCpu, pending),
        nmi = sym nmi_entry,
        handler = sym interrupt_handler,
        leave = sym leave_kernel,
        bug = sym kernel_exception,
    )
}

/// NMIs have their own stack and can occur anywhere, so all registers of the interrupted code are
/// preserved.
#[unsafe(naked)]
unsafe extern "C" fn nmi_entry() {
    naked_asm!(
        "push rax",
        "push rcx",
        "push rdx",
        "push rsi",
        "push rdi",
        "push r8",
        "push r9",
        "push r10",
        "push r11",
        "push rbp",
        "mov rbp, rsp",
        "and rsp, -16",
        "cld",
        "call {handler}",
        "mov rsp, rbp",
        "pop rbp",
        "pop r11",
        "pop r10",
        "pop r9",
        "pop r8",
        "pop rdi",
        "pop rsi",
        "pop rdx",
        "pop rcx",
        "pop rax",
        "add rsp, 16",
        "iretq",
        handler = sym nmi_handler,
    )
}

extern "C" fn nmi_handler() {
    crate::panic::stop_if_dying();
}

extern "C" fn kernel_exception(vector: u64, error: u64, rip: u64) -> ! {
    crate::panic::stop_if_dying();
    panic!("exception {vector} in the kernel at {rip:#x}, error code {error:#x}");
}

/// Handles a system call. Does not return: `leave_kernel` loads all registers anyway.
extern "C" fn syscall_handler() -> ! {
    let cpu_index = cpu::current().id as usize;
    let kernel = run::lock(cpu_index);
    #[cfg(parador_longest_path)]
    {
        use kernel_core::arch::Context as _;
        let caller =
            kernel.cpus[cpu_index].current.get().and_then(|thread| kernel.memory.get(thread));
        crate::longest::caused_by(caller.map_or(0, |thread| thread.context.operation()));
    }
    let next = kernel.system_call(cpu_index).map(|next| run::Next::new(&next));
    let (kernel, next) = match next {
        Some(next) if !kernel.has_work(cpu_index) => (kernel, next),
        _ => run::pick_next(kernel, cpu_index),
    };
    let context = run::leave(kernel, cpu_index, next);
    // SAFETY: a thread's context; the next entry starts on an empty stack.
    unsafe { leave_to(context) }
}

/// Handles an interrupt, or an exception in user mode.
extern "C" fn interrupt_handler(vector: u64) -> *const Context {
    let cr2 = read_cr2();
    let cpu_index = cpu::current().id as usize;
    let kernel = run::lock(cpu_index);
    #[cfg(parador_longest_path)]
    crate::longest::caused_by(crate::longest::VECTOR | vector);
    if vector >= crate::idt::FIRST_INTERRUPT as u64 {
        run::handle_vector(&kernel, cpu_index, vector as u8);
    } else {
        let current = kernel.cpus[cpu_index].current.get();
        if let Some(handle) = current
            && let Some(thread) = kernel.memory.get(handle)
        {
            use kernel_core::arch::Context as _;
            const PAGE_FAULT: u64 = 14;
            let (_, error) = thread.context.cause();
            let address = if vector == PAGE_FAULT { cr2 } else { 0 };
            kernel.fault(cpu_index, handle, [vector, error, address, thread.context.ip()]);
        }
    }
    let (kernel, next) = run::pick_next(kernel, cpu_index);
    run::leave(kernel, cpu_index, next)
}
