//! Whether the host has rings (io_uring(7)) for the disks of hosted machines, whose processes use them without a library.

use rustix::io_uring::{IoringSetupFlags, io_uring_params, io_uring_setup};

/// Whether this process may make a ring like that of a disk's process. That it can do all that is needed is another question: that is Linux 6.7.
pub fn has_rings() -> bool {
    let mut params = io_uring_params::default();
    params.flags = IoringSetupFlags::R_DISABLED
        | IoringSetupFlags::SINGLE_ISSUER
        | IoringSetupFlags::DEFER_TASKRUN
        | IoringSetupFlags::NO_SQARRAY;
    // SAFETY: it names no other ring.
    unsafe { io_uring_setup(1, &mut params) }.is_ok()
}
