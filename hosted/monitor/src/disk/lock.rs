//! Locks of disk files, which `parador rootfs` takes, too.

pub use hosted_command::disk_lock::{lock, open_again, wait_for_writer};
