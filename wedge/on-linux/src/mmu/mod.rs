//! Guest memory in the address space of a process: the host's page tables serve as the TLB of the
//! guest.
//!
//! All guest-physical memory (the kernel's direct map) and its beginning once more (the kernel
//! image) are always mapped ([`permanent`]). All other pages are mapped on demand ([`fill`]). A
//! flush of an address space unmaps exactly the pages whose translation has changed ([`flush`]),
//! from the process's list of user-mode mappings ([`space`]). Pages of code may be private copies:
//! with rewritten system calls ([`syscall_patch`], [`rewrite`]), or, with protection keys, scanned
//! ones ([`exec_scan`], [`copies`], [`steps`]); [`frames`] keeps copies and their originals equal.
//!
//! [`Mmu`] has the operations. It owns nothing: it is made for each operation from the process's
//! lists, the VM's shared state and the host's calls ([`host`]), of which unit tests have their
//! own.
//!
//! Invariants: each mapping was in the guest's page tables at some time since its last flush, with
//! no more rights than they gave: while CR0.WP is clear they give the kernel writes to its own
//! addresses, but those of user mode are mapped as with WP. Pages without accessed or dirty bit are
//! not accessible in the way that would set it. The rights of the direct map and the image are not
//! restricted.

pub mod copies;
pub mod exec_scan;
pub mod fill;
pub mod flush;
pub mod frame_table;
pub mod frames;
pub mod guest_range;
pub mod host;
pub mod kernel_code;
pub mod permanent;
pub mod ram;
pub mod rewrite;
pub mod space;
pub mod steps;
pub mod syscall_patch;
#[cfg(test)]
pub(crate) mod testing;
pub mod walk;

use core::ops::Range;

use vmm_mem::GuestMemory;

use crate::mmu::frame_table::CopiedFrames;
use crate::mmu::ram::Ram;
use crate::mmu::space::AddressSpace;
use crate::state::shared::{SharedVcpu, Slot};

/// The MMU of the vCPU in one process.
pub struct Mmu<'a, H> {
    /// The process's lists.
    pub space: &'a mut AddressSpace,
    /// The host.
    pub host: H,
    /// The VM.
    pub vm: VmView<'a>,
}

/// The VM, as the MMU of one vCPU sees it.
#[derive(Clone, Copy)]
pub struct VmView<'a> {
    /// Layout of guest memory.
    pub ram: Ram,
    /// Guest memory.
    pub memory: &'a GuestMemory,
    /// All vCPUs.
    pub vcpus: &'a [SharedVcpu],
    /// Index of this vCPU.
    pub index: usize,
    /// This vCPU.
    pub vcpu: &'a SharedVcpu,
    /// The process's address space.
    pub slot: &'a Slot,
    /// Frames with copies.
    pub table: &'a CopiedFrames,
    /// First address and end of the kernel's code.
    pub code: (u64, u64),
    /// Ways in which pages are mapped.
    pub modes: Modes,
}

/// Ways in which pages are mapped.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Modes {
    /// Protection keys separate user mode from the kernel.
    pub keys: bool,
    /// Contiguous pages are mapped by one call, and stale ones unmapped selectively.
    pub batches: bool,
    /// The profiler watches page tables.
    pub profile: bool,
}

impl VmView<'_> {
    /// Returns the part of the file of guest memory with this vCPU's code copies.
    fn copies(&self) -> Range<u64> {
        let start = self.ram.copies(self.index);
        start..start + self.ram.length()
    }

    /// Returns the offset of the original page for a mapped offset in the copies.
    fn original(&self, offset: u64) -> Option<u64> {
        offset.checked_sub(self.copies().start)
    }
}
