//! Saved registers of threads.
#![allow(missing_docs, reason = "the fields are registers")]

use core::cell::UnsafeCell;
use core::mem::{offset_of, size_of};

use abi::Status;
use hw_arm64::registers::spsr;

/// Registers of a thread. The entry code stores pairs of them.
#[repr(C, align(16))]
#[derive(Clone, Copy, Default)]
pub struct UserRegisters {
    pub x: [u64; 31],
    pub sp: u64,
    pub elr: u64,
    pub spsr: u64,
    /// Thread pointer, which EL0 can write.
    pub tpidr: u64,
    /// Syndrome of the last entry.
    pub esr: u64,
}

const _: () = {
    assert!(offset_of!(UserRegisters, sp) == 31 * 8);
    assert!(offset_of!(UserRegisters, elr) == 32 * 8);
    assert!(offset_of!(UserRegisters, tpidr) == 34 * 8);
    assert!(size_of::<UserRegisters>() == 36 * 8);
};

/// Index of the word with the address of the next instruction.
const ELR: usize = offset_of!(UserRegisters, elr) / 8;
/// Register with the operation number of a system call, and afterwards its status.
const OPERATION: usize = 8;

/// Saved registers of a thread. While the thread runs, the CPU's stack pointer of EL2 points here.
#[repr(C, align(16))]
#[derive(Default)]
pub struct ThreadContext(UnsafeCell<UserRegisters>);

impl ThreadContext {
    /// Word with this index of the registers. The entry path writes them only while the thread runs
    /// at EL0; the kernel reads and writes single words under the lock, holding no reference.
    fn word(&self, index: usize) -> *mut u64 {
        const LAST: usize = size_of::<UserRegisters>() / 8 - 1;
        self.0.get().cast::<u64>().wrapping_add(index.min(LAST))
    }

    #[inline(always)]
    fn read(&self, index: usize) -> u64 {
        // SAFETY: a word of the registers, by `word`.
        unsafe { self.word(index).read() }
    }

    #[inline(always)]
    fn write(&self, index: usize, value: u64) {
        // SAFETY: as in `read`.
        unsafe { self.word(index).write(value) };
    }
}

impl kernel_core::arch::Context for ThreadContext {
    #[inline(always)]
    fn operation(&self) -> u64 {
        self.read(OPERATION)
    }

    #[inline(always)]
    fn argument(&self, index: usize) -> u64 {
        self.read(index.min(5))
    }

    #[inline(always)]
    fn set_status(&self, status: Status) {
        self.write(OPERATION, status as u64);
    }

    #[inline(always)]
    fn set_result(&self, index: usize, value: u64) {
        self.write(index.min(5), value);
    }

    fn restart(&self) {
        // Repeat the SVC instruction; the operation is still in its register.
        self.write(ELR, self.ip().wrapping_sub(4));
    }

    fn start(&self, ip: u64, sp: u64, argument: u64) {
        let mut fresh = UserRegisters { sp, elr: ip, spsr: spsr::USER, ..UserRegisters::default() };
        fresh.x[0] = argument;
        // SAFETY: the thread is stopped, so no CPU saves registers here.
        unsafe { self.0.get().write(fresh) };
    }

    fn ip(&self) -> u64 {
        self.read(ELR)
    }
}
