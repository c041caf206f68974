//! Transitions between guest and wedge, and rewriting of patch sites.
//!
//! A rewritten site jumps to its [`Stub`], which saves the guest's registers for the wedge. Not
//! every site has a usable stack (system-call entry does not), so registers are saved at fixed
//! addresses, in the vCPU's [`Cell`]. All of it is below 2 GiB: kernels in the lower half of the
//! address space reach it with 32-bit displacements, instructions with absolute addresses.
//!
//! The wedge runs on its own stack as a coroutine: [`enter`] runs the guest and returns the
//! [`Cause`] of its next stop. Between the check for events in [`enter`] and the first guest
//! instruction, a signal interrupts [`entry_window`]; a handler that posts an event then resumes at
//! [`abort`], so that the event is handled before the guest runs.
#![cfg_attr(not(test), no_std)]

#[cfg(not(test))]
mod entry;
mod rewrite;

#[cfg(not(test))]
pub use entry::{
    abort, call_entry, call_gate, crossing, enter, entries, entry_window, keyed_handler,
    keyed_handler_window, leave, leave_after, sysret_window,
};
pub use rewrite::{
    JUMP, MAX_SITE, Patch, SiteTarget, Stub, Unwound, Way, decode_all, reads_data_segment,
};

use core::sync::atomic::{AtomicU8, AtomicU32};

use vmm_x86::Segment;
use wedge_core::VirtualCpu;

/// Address of the [`Cell`].
pub const CELL: u64 = 0x7100_1000;
/// Address of a host process's [`Private`] page.
pub const PRIVATE: u64 = 0x7400_0000;

/// Protection key of memory that user mode must not access (SDM vol. 3, 4.6.2).
pub const CLOSED: u32 = 1;
/// Protection key of memory that user mode may read.
pub const READABLE: u32 = 2;
/// `PKRU` while user mode runs: key 0 is open, [`READABLE`] is read-only, all other keys are
/// closed. It differs from the value that the host kernel sets for signal handlers.
pub const USER_PKRU: u32 = !0b01_0011;
/// Flags that user mode may change: arithmetic flags, `DF`, `TF`, `AC`, `ID`, `RF`, `NT`.
pub const USER_FLAGS: u32 = 0x0025_4dd5;
/// `__USER_CS`: selector of 64-bit user code in Linux (`arch/x86/include/asm/segment.h`).
pub const CODE_64: u8 = 0x33;
/// `__USER32_CS`: selector of 32-bit user code.
pub const CODE_32: u8 = 0x23;
/// Address of a host process's [`Crossing`] page.
pub const CROSSING: u64 = PRIVATE + 0x4_0000;
/// Stack of signal handlers that interrupted user mode.
pub const HANDLER_STACK_TOP: u64 = PRIVATE + 0x4_9000;

/// Registers of user mode while entry code uses them to change `PKRU`. User mode can write the
/// page, but only while it is unused; its contents are always user mode's own registers.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Crossing {
    /// `RAX`.
    pub rax: u64,
    /// `RCX`.
    pub rcx: u64,
    /// `RDX`.
    pub rdx: u64,
    /// First word of an `IRET` frame: instruction pointer.
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

/// State shared by entry code and the wedge.
#[repr(C)]
pub struct Cell {
    /// Virtual CPU; its registers come first.
    pub cpu: VirtualCpu,
    /// Stack pointer of the wedge while the guest runs.
    pub wedge_rsp: u64,
    /// Pending events; while not 0, [`enter`] does not run the guest.
    pub events: AtomicU32,
    /// Not 0: events are pending, and must be handled before the guest continues with interrupts
    /// enabled. Signal handlers set it, also while the wedge uses the virtual CPU.
    pub attention: AtomicU8,
    /// Value of [`Private::dispatch`] while the guest runs.
    pub dispatch: u8,
    /// `CS` and `SS` of user mode, as `SYSRET` loads them.
    pub user_segments: [Segment; 2],
    /// `CS` and `SS` of the kernel, as `SYSCALL` loads them.
    pub kernel_segments: [Segment; 2],
    /// Number of system calls that arrived without a signal.
    pub calls: u64,
    /// Guest registers saved by a stub.
    pub saved: [u64; 2],
    /// Stack of stubs, on which they push their own address.
    pub scratch: [u64; 16],
    /// Protection keys are enabled.
    pub keys: u8,
    /// The guest is in user mode, with protection keys: entry code must close the keys.
    pub close: u8,
    /// Code segment of the guest: [`CODE_64`], or [`CODE_32`] for 32-bit user code.
    pub code: u64,
}

/// Jump targets of stubs.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Entries {
    /// Entry to the wedge.
    pub site: u64,
    /// Return to user mode by `SYSRET`.
    pub sysret: u64,
}

/// State of one host process.
#[repr(C)]
pub struct Private {
    /// Owner of system calls: the guest (1) or the wedge (0). It is the selector of Syscall User
    /// Dispatch (`Documentation/admin-guide/syscall-user-dispatch.rst` in Linux).
    pub dispatch: AtomicU8,
}

/// Reason for which the guest stopped.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Cause {
    /// Pending events; the guest did not run.
    Events,
    /// A host signal, described by the process's signal state.
    Signal,
    /// A patch site: address of its [`Stub`].
    Site(u64),
}

impl Cause {
    /// Code of [`Cause::Events`] in entry code.
    pub const EVENTS: u64 = 0;
    /// Code of [`Cause::Signal`] in entry code.
    pub const SIGNAL: u64 = 1;

    /// Decodes the return value of entry code.
    pub const fn from_code(code: u64) -> Self {
        match code {
            Self::EVENTS => Self::Events,
            Self::SIGNAL => Self::Signal,
            stub => Self::Site(stub),
        }
    }
}
