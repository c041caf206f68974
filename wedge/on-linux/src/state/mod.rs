//! State of the VM, of its vCPUs and of each process, at fixed addresses.

pub mod config;
pub mod current;
pub mod setup;
pub mod shared;
