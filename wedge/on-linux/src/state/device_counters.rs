//! Counters of the VM's devices, in a memory file that no guest process has: the device process
//! maps it, creates the workers, which keep it, and unmaps and closes it before it creates guest
//! processes.

use host_linux::sys::{self, Backing, Errno};
use linux_raw_sys::general as linux;
use proto::hosted::counters::VmCounters;
use proto::hosted::layout;

use crate::state::fixed::Fixed;

/// Maps the counters. For the device process, before it creates workers.
pub fn map() -> Result<(), Errno> {
    let data = linux::PROT_READ | linux::PROT_WRITE;
    let file = Backing::Shared(layout::COUNTERS_FD, 0);
    // SAFETY: nothing is mapped there.
    unsafe { sys::map(layout::COUNTERS, layout::COUNTERS_LENGTH, data, file) }
}

/// Unmaps the counters. For the device process, once it has created the workers.
pub fn unmap() -> Result<(), Errno> {
    // SAFETY: only workers use them, each its own mapping.
    unsafe { sys::unmap(layout::COUNTERS, layout::COUNTERS_LENGTH) }
}

/// Returns the counters. For workers.
pub fn counters() -> &'static VmCounters {
    VmCounters::get()
}

// SAFETY: `map` has mapped them in the parent of each worker; all fields are atomic.
unsafe impl Fixed for VmCounters {
    const ADDRESS: u64 = layout::COUNTERS;
}
