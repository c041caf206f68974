//! Device processes of hosted VMs: their request loops, devices and sandbox.
//!
//! A VM's vCPU places requests in memory shared with the process ([`proto::requests`]); threads of
//! a [`Worker`] take several at a time and answer them. The guest can modify that memory at any
//! time, so requests are copied before they are checked. Before the first request, a process drops
//! all privileges that it does not need ([`confine`]): a forbidden system call kills it, and the VM
//! with it.
// It panics where standard error cannot be written: a full disk or a closed pipe would end the VM.
#![deny(clippy::print_stderr)]

mod confine;
mod footprint;
mod image;
mod ninep;
pub mod report;
mod share;
#[cfg(feature = "testing")]
pub mod testing;
mod threads;
mod vsock;
mod worker;

pub use confine::{SetupError, describe};
pub use footprint::release_memory;
pub use image::{Base, ImageConfig, serve_image};
pub use ninep::Share;
pub use share::serve_share;
pub use vsock::{Vsock, serve_vsock};
pub use worker::{GuestQueue, READY, Worker};
