//! Words that the device process shares with its children until those have installed their seccomp
//! filters.
//!
//! They are in anonymous shared memory, which a process unmaps before it runs guest code: no guest
//! can access them.

use core::sync::atomic::Ordering::SeqCst;
use core::sync::atomic::{AtomicBool, AtomicU32};

use host_linux::sys::{self, Backing, Errno};
use linux_raw_sys::general as linux;
use proto::hosted::layout;
use vmm_vcpu::MAX_VCPUS;

use crate::state::fixed::Fixed;
use proto::hosted::layout::SLOTS;

/// The words, initially zero.
#[repr(C)]
pub struct Words {
    /// State of the first process of a PID namespace: see [`crate::children::die_with_parent`].
    pub first: AtomicU32,
    /// By [`Kind`], vCPU and slot: the process has installed its filter, so the guest is
    /// responsible for its actions.
    confined: [[[AtomicBool; SLOTS]; MAX_VCPUS]; 2],
}

const _: () = assert!(size_of::<Words>() as u64 <= layout::SETUP_LENGTH);

/// Contents of a slot's process.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Kind {
    /// Guest kernel and wedge, and user mode unless that runs in its own process.
    Guest,
    /// User mode only.
    User,
}

/// Maps the words. For the device process, before it forks.
pub fn map() -> Result<(), Errno> {
    let data = linux::PROT_READ | linux::PROT_WRITE;
    // SAFETY: nothing is mapped there.
    unsafe { sys::map(layout::SETUP, layout::SETUP_LENGTH, data, Backing::Family) }
}

/// Unmaps the words in a process that does not need them any more.
pub fn unmap() -> Result<(), Errno> {
    // SAFETY: the callers do not use them any more.
    unsafe { sys::unmap(layout::SETUP, layout::SETUP_LENGTH) }
}

/// Returns the words. Not in a process that has called [`unmap`].
pub fn words() -> &'static Words {
    Words::get()
}

// SAFETY: `map` has mapped them, zeroed, for as long as the process needs them; all fields are
// atomic.
unsafe impl Fixed for Words {
    const ADDRESS: u64 = layout::SETUP;
}

impl Words {
    /// Returns the mark of a process.
    pub fn confined(&self, kind: Kind, vcpu: usize, slot: usize) -> &AtomicBool {
        &self.confined[kind as usize][vcpu % MAX_VCPUS][slot % SLOTS]
    }
}

/// Marks this process as confined, and unmaps the words.
pub fn finish(kind: Kind, vcpu: usize, slot: usize) -> Result<(), Errno> {
    words().confined(kind, vcpu, slot).store(true, SeqCst);
    unmap()
}
