//! Guest memory in the address spaces of the processes.

pub mod exec_scan;
pub mod frames;
pub mod memory;
pub mod syscall_patch;
