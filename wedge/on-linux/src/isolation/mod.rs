//! Isolation of the guest kernel from guest user mode.

pub mod pkeys;
pub mod user_process;
