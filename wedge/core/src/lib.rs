//! Software model of the privileged CPU state of a pre-virtualized kernel, and emulation of its
//! sensitive instructions.
//!
//! The model covers 64-bit mode: control and descriptor-table registers, segments, delivery of
//! interrupts and exceptions with their stacks, `IRET`, `SYSCALL` and `SYSRET`. Everything else
//! (ports, most MSRs, `CPUID`, `HLT`) leaves as an [`Exit`] of the VMM library, as from every other
//! back end.
//!
//! Invariants: no allocation; no action of a guest causes a panic; memory is accessed through the
//! guest's own page tables with the guest's rights, so a fault during emulation is injected into
//! the guest, with no state changed before.
//!
//! Not implemented: segment limits and 16-bit code (no 64-bit kernel uses them), hardware task
//! switches, debug-register matches.
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
use hw_walk::PageFault;
pub use segment::thread_area;
pub use vmm_x86::{Event, Exit};

/// TLB flush requested by the kernel (APM vol. 2, section 5.5).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Flush {
    /// This linear address: in the current address space, and global translations.
    Page(u64),
    /// One linear address in one address space (`INVPCID` type 0), without global translations.
    PageOf {
        /// Process-context identifier.
        pcid: u16,
        /// Linear address.
        linear: u64,
    },
    /// One address space, without global translations.
    Space(u16),
    /// All address spaces, without global translations.
    Spaces,
    /// All translations.
    All,
}

/// Host state that the emulation accesses.
pub trait Host {
    /// Base address of `FS`.
    fn fs_base(&mut self) -> u64;
    /// Sets the base address of `FS`.
    fn set_fs_base(&mut self, base: u64);
    /// Base address of `GS`.
    fn gs_base(&mut self) -> u64;
    /// Sets the base address of `GS`.
    fn set_gs_base(&mut self, base: u64);
    /// Flushes translations.
    fn flush(&mut self, what: Flush);
    /// Switches to the address space `cr3`: root page table and PCID. With `keep`, cached
    /// translations of that address space remain valid. The CPU state holds the new value already.
    fn enter_space(&mut self, cr3: u64, keep: bool);
}

/// Result of an emulated instruction.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Outcome {
    /// Completed; execution continues at the next instruction.
    Next,
    /// Completed; the instruction pointer holds the target.
    Jump,
    /// Exception, with no state changed.
    Raise(Event),
    /// Exit to the VMM; the instruction pointer still points to the instruction.
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

/// Exception of an instruction in progress.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Interruption {
    /// Page fault of a memory access.
    Page(PageFault),
    /// Any other exception.
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
