//! Kernel builds: `parador kernel`, `parador afterburn`, and the Linux driver for channels.
//!
//! The recipe of a pre-virtualized kernel is in `guests/linux/kernel` and is compiled in.
#![forbid(unsafe_code)]

pub mod afterburn;
pub mod kernel;
pub mod module;
mod refusal;

pub use refusal::refused;
