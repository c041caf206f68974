//! Loader for VMs as Linux processes: everything that `parador run` does before the guest's first
//! process runs.
//!
//! [`Image`] is a validated pre-virtualized kernel; [`prepare`] relocates it to the lower half of
//! the address space, places it in memory with its boot data, and returns the descriptors for the
//! wedge (`wedge/on-linux`).
#![forbid(unsafe_code)]

mod error;
mod image;
mod prepare;
pub mod symbols;

pub use error::Error;
pub use image::Image;
pub use prepare::{Prepared, VmSpec, check_host, check_memory, empty, has_keys, prepare};
