//! Kernel entry and exit.
//!
//! The entry code saves a thread's registers directly in its [`Context`]: TSS.RSP0 points to the
//! end of the context, so the processor itself pushes the last five words. The kernel then runs on
//! the CPU's own stack. Interrupts in ring 0, which occur only where the kernel enables them (idle,
//! and after a guest), are recorded in `PerCpu::pending`. Vectors 0 to 31 are always exceptions:
//! the local APIC delivers no interrupt there (`idt::TASK_PRIORITY`).

use core::arch::{global_asm, naked_asm};
use core::mem::offset_of;

use abi::Op;
use hw_x86::msr;
use kernel_run::{exit, lock};

use crate::context::{Context, Registers, SYSCALL, from_end};
use crate::cpu::{self, selector};
use crate::io::{read_cr2, wrmsr};
use crate::{X86, fastpath, run};

/// RFLAGS cleared by SYSCALL: TF, IF, DF, NT, AC.
const SYSCALL_MASK: u64 = 1 << 8 | 1 << 9 | 1 << 10 | 1 << 14 | 1 << 18;

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

/// Assembly of [`syscall_entry`]; it saves the registers passed to it, and those that SYSCALL has
/// changed.
macro_rules! enter {
    ($($register:ident)*) => {
        naked_asm!(
            "swapgs",
            "mov gs:[{scratch}], rsp",
            "mov rsp, gs:[{stack}]",
            // The context keeps `cs` and `ss`, which no task can change.
            "mov [rsp + {rip}], rcx",
            "mov rcx, gs:[{scratch}]",
            "mov [rsp + {rsp_}], rcx",
            "mov [rsp + {rflags}], r11",
            "mov qword ptr [rsp + {vector}], {syscall}",
            $(concat!("mov [rsp + {", stringify!($register), "}], ", stringify!($register)),)*
            "mov rsp, gs:[{kernel_stack}]",
            "cmp rax, {last_ipc}",
            "ja 2f",
            // Returns only if `syscall_handler` must handle the system call.
            "call {fast}",
            "2:",
            "call {handler}",
            scratch = const offset_of!(cpu::PerCpu, scratch),
            stack = const cpu::INTERRUPT_STACK,
            kernel_stack = const offset_of!(cpu::PerCpu, kernel_stack_top),
            syscall = const SYSCALL,
            last_ipc = const Op::GateReplyWait as u64,
            rip = const from_end(offset_of!(Registers, rip)),
            rsp_ = const from_end(offset_of!(Registers, rsp)),
            rflags = const from_end(offset_of!(Registers, rflags)),
            vector = const from_end(offset_of!(Registers, vector)),
            $($register = const from_end(offset_of!(Registers, $register)),)*
            fast = sym fast_ipc_handler,
            handler = sym syscall_handler,
        )
    };
}

#[unsafe(naked)]
unsafe extern "C" fn syscall_entry() {
    enter!(rdi rsi rdx rax r8 r9 r10 rbx rbp r12 r13 r14 r15)
}

// Only these operations have a fast path.
const _: () = assert!(Op::GateCall as u64 == 0 && Op::GateReplyWait as u64 == 1);

/// Assembly that returns to user mode by SYSRET with the registers of the context in `rax`. The
/// instructions passed to it follow the loads of the registers that SYSRET and IRETQ preserve.
macro_rules! leave {
    ($($extra:literal,)*; $($name:ident = const $value:expr,)*) => {
        leave!([rdi rsi rdx r8 r9 r10 rbx rbp r12 r13 r14 r15] $($extra,)*; $($name = const $value,)*)
    };
    ([$($register:ident)*] $($extra:literal,)*; $($name:ident = const $value:expr,)*) => {
        naked_asm!(
            $(concat!("mov ", stringify!($register), ", [rax + {", stringify!($register), "}]"),)*
            $($extra,)*
            // The last page of the lower half is never mapped, so the address after a SYSCALL is
            // canonical.
            "mov rcx, [rax + {rip}]",
            "mov r11, [rax + {rflags}]",
            "mov rsp, [rax + {rsp_}]",
            "mov rax, [rax + {rax_}]",
            "swapgs",
            "sysretq",
            $($register = const offset_of!(Registers, $register),)*
            rip = const offset_of!(Registers, rip),
            rflags = const offset_of!(Registers, rflags),
            rsp_ = const offset_of!(Registers, rsp),
            rax_ = const offset_of!(Registers, rax),
            $($name = const $value,)*
        )
    };
}

/// Returns to user mode with the registers of the context in `rax`, whose thread is in a system
/// call.
#[unsafe(naked)]
unsafe extern "C" fn leave_system_call() {
    leave!(;)
}

/// Returns to user mode with the registers of the context in `rax`.
#[unsafe(naked)]
unsafe extern "C" fn leave_kernel() {
    leave!(
        "cmp qword ptr [rax + {vector}], {syscall}",
        "je 2f",
        "mov r11, [rax + {r11}]",
        "mov rcx, [rax + {rcx}]",
        "lea rsp, [rax + {rip}]",
        "mov rax, [rax + {rax_}]",
        "swapgs",
        "iretq",
        "2:",;
        vector = const offset_of!(Registers, vector),
        syscall = const SYSCALL,
        r11 = const offset_of!(Registers, r11),
        rcx = const offset_of!(Registers, rcx),
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

/// An instruction for each register.
macro_rules! each {
    ($instruction:literal $($register:ident)*) => {
        concat!($($instruction, " ", stringify!($register), "\n"),*)
    };
}

#[unsafe(naked)]
unsafe extern "C" fn interrupt_entry() {
    naked_asm!(
        "cmp dword ptr [rsp], 2",
        "je {nmi}",
        "test byte ptr [rsp + 24], 3",
        "jz 2f",
        "swapgs",
        each!("push" rdi rsi rdx rcx rax r8 r9 r10 r11 rbx rbp r12 r13 r14 r15),
        "cld",
        "mov rdi, [rsp + {vector}]",
        "mov rsp, gs:[{kernel_stack}]",
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
        vector = const offset_of!(Registers, vector),
        kernel_stack = const offset_of!(cpu::PerCpu, kernel_stack_top),
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
        each!("push" rax rcx rdx rsi rdi r8 r9 r10 r11 rbp),
        "mov rbp, rsp",
        "and rsp, -16",
        "cld",
        "call {handler}",
        "mov rsp, rbp",
        each!("pop" rbp r11 r10 r9 r8 rdi rsi rdx rcx rax),
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

/// Attempts a call, or a reply and wait, on the fast path. Returns, without effect, if
/// `syscall_handler` must handle the system call.
extern "C" fn fast_ipc_handler() {
    // SAFETY: called by `syscall_entry` only.
    let context = unsafe { fastpath::fast_ipc() };
    if !context.is_null() {
        // SAFETY: the context of a thread in a system call; the next entry starts on an empty
        // stack.
        unsafe {
            core::arch::asm!("jmp {}", sym leave_system_call, in("rax") context, options(noreturn));
        }
    }
}

/// Handles a system call. Does not return: `leave_kernel` loads all registers anyway.
extern "C" fn syscall_handler() -> ! {
    let cpu_index = cpu::current().id as usize;
    let kernel = lock::lock::<X86>(cpu_index);
    // SAFETY: called by `syscall_entry` only, and `fast_ipc_handler` has had no effect.
    let caller = unsafe { fastpath::calling_thread(&kernel, cpu_index) };
    #[cfg(parador_longest_path)]
    {
        use kernel_core::arch::Context as _;
        crate::longest::caused_by(caller.map_or(0, |(_, thread)| thread.context.operation()));
    }
    let next = caller
        .and_then(|(handle, thread)| kernel.system_call(cpu_index, handle, thread))
        .map(|next| exit::Next::new(&next));
    let context = exit::leave(kernel, cpu_index, next);
    // SAFETY: a thread's context; the next entry starts on an empty stack.
    unsafe { leave_to(context) }
}

/// Handles an interrupt, or an exception in user mode.
extern "C" fn interrupt_handler(vector: u64) -> *const Context {
    let cr2 = read_cr2();
    let cpu_index = cpu::current().id as usize;
    let kernel = lock::lock::<X86>(cpu_index);
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
    exit::leave(kernel, cpu_index, None)
}
