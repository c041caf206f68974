//! The host below the MMU, as traits: the kernel's memory calls, and the listeners to changes of
//! mappings. Unit tests have their own.

use core::fmt;

use proto::errno::Errno;
use vmm_mem::GuestMemory;

use crate::mmu::exec_scan::Page;

/// The host's page tables of this process.
///
/// Contract: the caller names addresses of the guest only, reads only pages that it has mapped by
/// [`HostMap::map_private`], and offsets in guest memory.
pub trait HostMap {
    /// Maps the file of guest memory from an offset on, and populates the mapping.
    fn map(&mut self, linear: u64, length: u64, rights: u32, offset: u64) -> Result<(), Errno>;
    /// Maps a page of private memory with these contents and rights, in place of the previous one.
    fn map_private(&mut self, page: u64, contents: &Page, rights: u32) -> Result<(), Errno>;
    /// Unmaps the pages between two addresses.
    fn unmap(&mut self, start: u64, end: u64) -> Result<(), Errno>;
    /// Changes the rights of pages.
    fn protect(&mut self, linear: u64, length: u64, rights: u32) -> Result<(), Errno>;
    /// Sets the rights of pages of the guest kernel, with protection keys, and closes them to user
    /// mode; else does nothing.
    fn close(&mut self, linear: u64, length: u64, rights: u32) -> Result<(), Errno>;
    /// Returns a private page.
    fn page(&self, page: u64) -> &Page;
    /// Reads bytes of private pages.
    fn read(&self, linear: u64, to: &mut [u8]);
    /// Returns the copy, for execution, of the page at an offset in guest memory.
    fn code_copy(&mut self, offset: u64) -> &mut Page;
    /// Returns a stub of a rewritten system call.
    fn stub(&self, index: u32) -> [u8; STUB];
    /// Writes a stub of a rewritten system call, and the slot that refers to it.
    fn put_stub(&mut self, index: u32, code: &[u8; STUB]);
    /// Serialises the CPU after a write to code.
    fn serialize(&mut self);
}

/// Length of a stub of a rewritten system call in bytes.
pub const STUB: usize = 32;

/// The parts of the VM that follow the mappings of a process, or act on other vCPUs for it.
pub trait MappingListener {
    /// User-mode pages of guest memory were mapped.
    fn on_map(&mut self, linear: u64, length: u64, rights: u32, offset: u64);
    /// User-mode pages were unmapped.
    fn on_unmap(&mut self, start: u64, end: u64);
    /// The rights of user-mode pages were reduced.
    fn on_narrow(&mut self, start: u64, end: u64, rights: u32);
    /// The address space has changed: data of the previous user mode is stale.
    fn on_stale(&mut self);
    /// The page tables of `root` have translated an address.
    fn on_walk(&mut self, memory: &GuestMemory, root: u64, linear: u64);
    /// This process applies the changes of its vCPU.
    fn on_follow(&mut self);
    /// Increments a counter of [`proto::hosted::counter`].
    fn count(&mut self, counter: usize);
    /// Makes another vCPU stop and check its events.
    fn interrupt(&mut self, vcpu: usize);
    /// Lets other threads use this CPU.
    fn yield_now(&mut self);
    /// Ends the VM: the host has refused a call that isolation depends on.
    fn fatal(&mut self, what: fmt::Arguments<'_>) -> !;
}
