//! Loader for VMs as Linux processes: everything that `parador run` does before the guest's first
//! process runs.
//!
//! [`KernelReader`] is a kernel file, [`Image`] a validated pre-virtualized kernel; [`prepare`]
//! writes it to memory with its boot data, relocates it to the lower half of the address space, and
//! returns the descriptors for the wedge (`wedge/on-linux`).
#![forbid(unsafe_code)]

mod error;
mod image;
mod prepare;
mod reader;
pub mod symbols;

pub use error::Error;
pub use image::Image;
pub use prepare::{Prepared, VmSpec, check_host, check_memory, empty, has_keys, prepare};
pub use reader::{KernelReader, MAX_KERNEL};
