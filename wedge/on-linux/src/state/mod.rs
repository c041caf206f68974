//! State of the VM, of its vCPUs and of each process, at fixed addresses.

pub mod config;
pub mod current;
pub mod device_counters;
pub mod doorbell;
pub mod fixed;
pub mod owned;
pub mod process;
pub mod records;
pub mod setup;
pub mod shared;
pub mod statistics;
