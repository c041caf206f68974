//! Models of devices, each written once for every host.
//!
//! A model is a struct of registers that implements [`vmm_bus::Device`]; all it does to the world goes
//! through [`vmm_bus::Env`]. Each module head is the chip's card: state, features, what is missing,
//! documentation. An access to a missing feature is reported through `Env::missing`.
//!
//! Invariants: no model allocates, blocks, panics or loops longer for any sequence of accesses; the work
//! of one call is bounded by a small constant. A snapshot of a device is its struct.
#![cfg_attr(not(test), no_std)]
#![forbid(unsafe_code)]

pub mod channel;
pub mod pc;
mod ticks;
pub mod virtio;
