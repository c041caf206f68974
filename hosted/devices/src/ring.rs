//! Detects io_uring(7) for the raw disk processes of hosted VMs, which use it without a library.

use rustix::io_uring::{IoringSetupFlags, io_uring_params, io_uring_setup};

/// Returns whether this process may create a ring like that of a disk process. The required
/// features are a separate check: Linux 6.7.
pub fn has_rings() -> bool {
    let mut params = io_uring_params::default();
    params.flags = IoringSetupFlags::R_DISABLED
        | IoringSetupFlags::SINGLE_ISSUER
        | IoringSetupFlags::DEFER_TASKRUN
        | IoringSetupFlags::NO_SQARRAY;
    // SAFETY: the parameters refer to no other ring.
    unsafe { io_uring_setup(1, &mut params) }.is_ok()
}
