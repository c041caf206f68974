//! Device models, each written once for all hosts.
//!
//! A model is a struct of registers that implements [`vmm_bus::Device`]; all its effects go through
//! [`vmm_bus::Env`]. Each module head documents its device: state, features, missing features,
//! manuals. A use of a missing feature is reported through `Env::missing`.
//!
//! Invariants: for any sequence of accesses no model allocates, blocks, panics or loops without
//! bound; the work of one call is bounded by a small constant. A snapshot of a device is its
//! struct.
#![cfg_attr(not(test), no_std)]
#![forbid(unsafe_code)]

pub mod arm64;
pub mod channel;
pub mod pc;
pub mod pci;
pub mod virtio;
