//! Private memory of a process.

use core::sync::atomic::Ordering::Relaxed;
use core::sync::atomic::{AtomicU8, AtomicU32, AtomicU64};

use wedge_x86::PRIVATE;

use crate::isolation::mailbox::{Mapper, UserProcess};
use crate::mmu::space::AddressSpace;
use crate::state::fixed::Fixed;
use crate::state::owned::Owned;
use crate::state::records::{ProcessBinding, ThreadLocal, TurnTimes, XsaveLayout};
use crate::state::shared::{Slot, vcpu};

/// Private state of a process.
#[repr(C)]
pub struct ProcessState {
    /// First field: selector of system call dispatch, see [`wedge_x86::Private`].
    pub private: wedge_x86::Private,
    /// Slot of the process.
    pub slot: AtomicU32,
    /// Index of its vCPU.
    pub vcpu: AtomicU32,
    /// TSC to which its timer is set.
    pub armed: AtomicU64,
    /// Id of its timer.
    pub timer: AtomicU32,
    /// Host CPU to which it is bound.
    pub binding: ProcessBinding,
    /// Bytes of the signal stack, from its top, that signals have used.
    pub frames: AtomicU64,
    /// Stack areas to clear before user mode runs: see `signal::scrub`.
    pub scrubs: AtomicU8,
    /// Lists of its mappings.
    pub space: Owned<AddressSpace>,
    /// Layout of extended state of the host CPU.
    pub xsave_layout: Owned<XsaveLayout>,
    /// TLS descriptors that the host has for it.
    pub thread_local: Owned<ThreadLocal>,
    /// State of its user process.
    pub peer: Owned<UserProcess>,
    /// Handshake of the threads, in a user process.
    pub mapper: Mapper,
    /// Time accounting of its turns.
    pub turns: Owned<TurnTimes>,
}

/// Returns the process's private state.
pub fn process() -> &'static ProcessState {
    ProcessState::get()
}

// SAFETY: `main` maps it first, zeroed; all shared fields are atomic, and `CurrentProcess` lends
// the others.
unsafe impl Fixed for ProcessState {
    const ADDRESS: u64 = PRIVATE;
}

/// Returns the slot of this process.
pub fn slot() -> &'static Slot {
    &vcpu().slots[process().slot.load(Relaxed) as usize]
}

/// Returns the index of this process's vCPU.
pub fn own_index() -> usize {
    process().vcpu.load(Relaxed) as usize
}
