//! The processor that a pre-virtualized kernel sees: its privileged state, and what its sensitive instructions do to it.
//!
//! Everything a processor does for an operating system outside of plain computing is here in software, for 64-bit mode: control
//! and descriptor-table registers, segments, interrupts and exceptions with their stacks, `IRET`, `SYSCALL` and `SYSRET`. What it
//! does not decide itself (ports, most MSRs, `CPUID`, halting) leaves as an [`Exit`], in the vocabulary of every other back end of
//! the VMM library.
//!
//! Invariants: no allocation; nothing that a guest does panics; memory is reached through the guest's own page tables with the
//! guest's rights, so a fault while an instruction is emulated is the guest's own, with nothing changed before.
//!
//! Missing: segment limits and 16-bit code (no 64-bit kernel has them), hardware task switches, debug-register matches.
//!
//! Manual: AMD64 Architecture Programmer's Manual (APM), volumes 2 and 3.
#![cfg_attr(not(test), no_std)]
#![forbid(unsafe_code)]

pub mod cpu;
pub mod decode;
mod event;
mod execute;
pub mod mapped;
pub mod padding;
mod segment;
#[cfg(test)]
mod tests;

pub use cpu::{DescriptorTable, RegisterFrame, VirtualCpu};
pub use decode::{DecodeError, Instruction, Op, decode};
pub use segment::thread_area;
use vmm_cpu::walk::PageFault;
pub use vmm_cpu::{Event, Exit};

/// What a kernel wants forgotten of its page tables (APM vol. 2, section 5.5).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Flush {
    /// The translation of this address: in the current space, and global ones.
    Page(u64),
    /// The translation of an address in one space (`INVPCID` type 0); not global ones.
    PageOf {
        /// Process-context identifier.
        pcid: u16,
        /// Linear address.
        linear: u64,
    },
    /// All translations of one space that are not global.
    Space(u16),
    /// All that are not global, of every space.
    Spaces,
    /// Everything.
    All,
}

/// What the processor's effects reach beyond its own state.
pub trait Host {
    /// Base address of `FS`.
    fn fs_base(&mut self) -> u64;
    /// Sets it.
    fn set_fs_base(&mut self, base: u64);
    /// Base address of `GS`.
    fn gs_base(&mut self) -> u64;
    /// Sets it.
    fn set_gs_base(&mut self, base: u64);
    /// Forgets translations.
    fn flush(&mut self, what: Flush);
    /// `cr3` is loaded: table root and process-context identifier. `keep`: translations of that space may still be used. The state has the
    /// new value already.
    fn enter_space(&mut self, cr3: u64, keep: bool);
}

/// What an instruction led to.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Outcome {
    /// It is done; the next one follows.
    Next,
    /// It is done; the instruction pointer is where it went.
    Jump,
    /// It raises this exception, with nothing changed.
    Raise(Event),
    /// The machine carries it out; the instruction pointer is still at it.
    Exit(Exit),
}

/// Vectors of exceptions (APM vol. 2, table 8-1).
#[allow(missing_docs, reason = "the manual's names")]
pub mod vector {
    pub const DEBUG: u8 = 1;
    pub const BREAKPOINT: u8 = 3;
    pub const UNDEFINED: u8 = 6;
    pub const DOUBLE_FAULT: u8 = 8;
    pub const INVALID_TSS: u8 = 10;
    pub const NOT_PRESENT: u8 = 11;
    pub const STACK: u8 = 12;
    pub const PROTECTION: u8 = 13;
    pub const PAGE_FAULT: u8 = 14;
}

/// `#GP` with an error code.
const fn protection(code: u32) -> Event {
    Event::exception_code(vector::PROTECTION, code)
}

/// `#UD`.
const UNDEFINED: Event = Event::exception(vector::UNDEFINED);

/// An exception on the way to becoming one that is raised.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Interruption {
    /// The page fault of an access.
    Page(PageFault),
    /// Another exception.
    Event(Event),
}

impl From<PageFault> for Interruption {
    fn from(fault: PageFault) -> Self {
        Self::Page(fault)
    }
}

impl From<Event> for Interruption {
    fn from(event: Event) -> Self {
        Self::Event(event)
    }
}
