//! Virtual machines as processes of Linux: what `parador run` does before the first process of the guest runs.
//!
//! [`Image`] is a pre-virtualized kernel, checked; [`prepare`] moves it to the lower half of the address space, puts it into memory with all
//! that it needs, and gives the descriptors that the wedge (`wedge/on-linux`) is started with.
#![forbid(unsafe_code)]

mod error;
mod filters;
mod image;
mod prepare;
pub mod symbols;

pub use error::Error;
pub use filters::{confine, confine_relay, confine_switch};
pub use image::Image;
pub use prepare::{Machine, Prepared, check_host, check_memory, empty, has_keys, prepare};
