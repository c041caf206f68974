//! Entry into the wedge and back, and rewriting of sites.
//!
//! A rewritten site jumps to its [`Stub`], which hands the guest's registers to the wedge. There is no stack that could be used at every
//! site (system-call entry has none), so registers go to fixed addresses: the [`Cell`] of the virtual CPU. All of it is below 2 GiB,
//! where kernels in the lower half of the address space reach it with 32-bit displacements and instructions with absolute addresses.
//!
//! The wedge runs on a stack of its own as a coroutine: [`enter`] goes to the guest and returns with the [`Cause`] of the next stop.
//! Between the look for events in [`enter`] and the first guest instruction a signal finds the processor in [`entry_window`]; a handler that
//! leaves an event then goes on at [`abort`], so that no event waits for the guest to stop by itself.
#![cfg_attr(not(test), no_std)]

#[cfg(not(test))]
mod entry;
mod rewrite;

#[cfg(not(test))]
pub use entry::{
    abort, call_entry, call_gate, crossing, enter, entries, entry_window, keyed_handler,
    keyed_handler_window, leave, leave_after, sysret_window,
};
pub use rewrite::{JUMP, MAX_SITE, Patch, Stub, Target, Unwound, Way, decode_all};

use core::sync::atomic::{AtomicU8, AtomicU32};

use vmm_cpu::vcpu::Segment;
use wedge_core::VirtualCpu;

/// Address of the [`Cell`].
pub const CELL: u64 = 0x7100_1000;
/// Address of the [`Private`] page of the host's process.
pub const PRIVATE: u64 = 0x7400_0000;

/// Protection key of all memory that programs must not reach (SDM vol. 3, 4.6.2).
pub const CLOSED: u32 = 1;
/// Protection key of memory that they may read.
pub const READABLE: u32 = 2;
/// `PKRU` while a program runs: key 0 is open, [`READABLE`] cannot be written, all others are closed. It is another value than the host's
/// kernel gives to signal handlers.
pub const PROGRAM_RIGHTS: u32 = !0b01_0011;
/// Flags that programs change: of arithmetic, direction, single step, alignment check, identification, resume, nested task.
pub const PROGRAM_FLAGS: u32 = 0x0025_4dd5;
/// `__USER_CS`: the selector of 64-bit code of Linux' programs (`arch/x86/include/asm/segment.h`).
pub const CODE_64: u8 = 0x33;
/// `__USER32_CS`, that of 32-bit code.
pub const CODE_32: u8 = 0x23;
/// Address of the [`Crossing`] page of the host's process.
pub const CROSSING: u64 = PRIVATE + 0x4_0000;
/// Stack of signal handlers that found a program running.
pub const HANDLER_STACK_TOP: u64 = PRIVATE + 0x4_9000;

/// Registers of a program while entry code needs them to change `PKRU`. Programs can write them, at times at which nothing is there; they are
/// never anything but a program's own registers.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Crossing {
    /// `RAX`.
    pub rax: u64,
    /// `RCX`.
    pub rcx: u64,
    /// `RDX`.
    pub rdx: u64,
    /// As `IRET` takes them, from here on.
    pub rip: u64,
    /// Selector of `CS`.
    pub cs: u64,
    /// Flags.
    pub rflags: u64,
    /// `RSP`.
    pub rsp: u64,
    /// Selector of `SS`.
    pub ss: u64,
}

/// What entry code shares with the wedge.
#[repr(C)]
pub struct Cell {
    /// The virtual CPU; its registers come first.
    pub cpu: VirtualCpu,
    /// Stack pointer of the wedge while the guest runs.
    pub wedge_rsp: u64,
    /// Events that the wedge is to look at before the guest goes on; not 0 keeps [`enter`] from going there.
    pub events: AtomicU32,
    /// [`Private::dispatch`] while the guest runs.
    pub dispatch: u8,
    /// `CS` and `SS` of programs and of the kernel, as `SYSRET` and `SYSCALL` load them.
    pub program: [Segment; 2],
    /// See above.
    pub kernel: [Segment; 2],
    /// System calls that came without a signal.
    pub calls: u64,
    /// Registers of the guest while a stub needs them.
    pub saved: [u64; 2],
    /// Stack of stubs: they push the address of what they are.
    pub scratch: [u64; 16],
    /// Protection keys are used.
    pub keys: u8,
    /// The guest is a program, from which memory is to be closed.
    pub close: u8,
    /// [`CODE_64`], or [`CODE_32`] if the guest is a program that executes such code.
    pub code: u64,
}

/// Where stubs go.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Entries {
    /// To the wedge.
    pub site: u64,
    /// To a program, by `SYSRET`.
    pub sysret: u64,
}

/// What each process of the host has for itself.
#[repr(C)]
pub struct Private {
    /// Whether system calls are the guest's (1) or the host's (0): the selector of Syscall User Dispatch
    /// (`Documentation/admin-guide/syscall-user-dispatch.rst` in Linux).
    pub dispatch: AtomicU8,
}

/// Why the guest stopped.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Cause {
    /// Events, before it went on at all.
    Events,
    /// A signal of the host, which is described elsewhere.
    Signal,
    /// A site: the address of its [`Stub`].
    Site(u64),
}

impl Cause {
    /// The number by which entry code says [`Cause::Events`].
    pub const EVENTS: u64 = 0;
    /// The number by which entry code says [`Cause::Signal`].
    pub const SIGNAL: u64 = 1;

    /// From entry code's number.
    pub const fn from_code(code: u64) -> Self {
        match code {
            Self::EVENTS => Self::Events,
            Self::SIGNAL => Self::Signal,
            stub => Self::Site(stub),
        }
    }
}
