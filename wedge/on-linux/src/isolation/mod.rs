//! Isolation of the guest kernel from guest user mode.

pub mod mailbox;
pub mod pkeys;
pub mod user_process;
pub mod user_thread;
