//! Saved registers of threads.
#![allow(missing_docs, reason = "the fields are registers")]

use core::cell::UnsafeCell;
use core::mem::{offset_of, size_of};

use abi::Status;

use crate::cpu::selector;

/// Value of `vector` for a context saved by SYSCALL, which SYSRET can restore.
pub const SYSCALL: u64 = 0x100;
/// Initial RFLAGS of a thread: IF. Tasks cannot change IOPL, NT, VM, RF, VIF, VIP.
const USER_FLAGS: u64 = 0x202;
/// Registers of a thread, in reverse order of the pushes at entry.
#[repr(C)]
#[derive(Clone, Copy, Default)]
pub struct Registers {
    pub r15: u64,
    pub r14: u64,
    pub r13: u64,
    pub r12: u64,
    pub rbp: u64,
    pub rbx: u64,
    pub r11: u64,
    pub r10: u64,
    pub r9: u64,
    pub r8: u64,
    pub rax: u64,
    pub rcx: u64,
    pub rdx: u64,
    pub rsi: u64,
    pub rdi: u64,
    pub vector: u64,
    pub error: u64,
    pub rip: u64,
    pub cs: u64,
    pub rflags: u64,
    pub rsp: u64,
    pub ss: u64,
}

/// Saved registers of a thread.
#[repr(C, align(16))]
#[derive(Default)]
pub struct Context(UnsafeCell<Registers>);

const _: () = assert!(size_of::<Context>() == size_of::<Registers>());
// The pushes of `interrupt_entry` end at the start of the context, and those of the processor begin
// at its end.
const _: () = assert!(offset_of!(Registers, r15) == 0);
const _: () = assert!(offset_of!(Registers, ss) + size_of::<u64>() == size_of::<Context>());

/// Offset of a register from the end of a context, where TSS.RSP0 points. `offset`: that in
/// [`Registers`].
pub const fn from_end(offset: usize) -> isize {
    offset as isize - size_of::<Context>() as isize
}

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
    pub fn cause(&self) -> (u64, u64) {
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
