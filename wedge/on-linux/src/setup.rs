//! Words that the device process shares with the processes that it creates, until those have their
//! seccomp filters.
//!
//! They are in shared memory without a descriptor, which a process unmaps before it runs anything of
//! the guest: no guest can read or write them.

use core::sync::atomic::Ordering::SeqCst;
use core::sync::atomic::{AtomicBool, AtomicU32};

use linux_raw_sys::general as linux;
use proto::wedge::layout;
use vmm_cpu::MAX_VCPUS;

use crate::shared::SLOTS;
use crate::sys::{self, Backing, Errno};

/// The words, all zero in the beginning.
#[repr(C)]
pub struct Words {
    /// State of the first process of a PID namespace: see [`crate::processes::die_with_parent`].
    pub first: AtomicU32,
    /// By [`Kind`], vCPU and slot: the process has its filter, so that what it does from then on is
    /// the guest's doing.
    confined: [[[AtomicBool; SLOTS]; MAX_VCPUS]; 2],
}

const _: () = assert!(size_of::<Words>() as u64 <= layout::SETUP_LENGTH);

/// What a process of a slot runs.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Kind {
    /// The guest's kernel and the wedge, and guest user mode if that has no process of its own.
    Guest,
    /// Guest user mode alone.
    User,
}

/// Maps them. For the device process, before there is any other one.
pub fn map() -> Result<(), Errno> {
    let data = linux::PROT_READ | linux::PROT_WRITE;
    // SAFETY: nothing is there.
    unsafe { sys::map(layout::SETUP, layout::SETUP_LENGTH, data, Backing::Family) }
}

/// Unmaps them, in a process that needs them no longer.
pub fn unmap() -> Result<(), Errno> {
    // SAFETY: the callers do not use them any more.
    unsafe { sys::unmap(layout::SETUP, layout::SETUP_LENGTH) }
}

/// The words. Not in a process that has called [`unmap`].
pub fn words() -> &'static Words {
    // SAFETY: mapped by `map`, zeroed, for as long as the process needs them; all of it is atomic.
    unsafe { &*(layout::SETUP as *const Words) }
}

impl Words {
    /// The mark of a process.
    pub fn confined(&self, kind: Kind, vcpu: usize, slot: usize) -> &AtomicBool {
        &self.confined[kind as usize][vcpu % MAX_VCPUS][slot % SLOTS]
    }
}

/// Notes that this process has its filter, and unmaps the words.
pub fn finish(kind: Kind, vcpu: usize, slot: usize) -> Result<(), Errno> {
    words().confined(kind, vcpu, slot).store(true, SeqCst);
    unmap()
}
