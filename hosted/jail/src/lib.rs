//! Devices of hosted machines that are processes of their own: what such a process does and may do.
//!
//! A machine's virtual CPU leaves requests in memory that it shares with the process ([`proto::requests`]); threads of a [`Worker`] take them,
//! several at a time, and answer. The guest can change that memory at any time, so requests are copied before they are looked at. Before the
//! first request a process gives up what it does not need ([`confine`]): it ends, and the machine with it, if it asks for more.

mod confine;
mod footprint;
mod image;
mod ninep;
mod ring;
mod sandbox;
mod share;
#[cfg(feature = "testing")]
pub mod testing;
mod threads;
mod vsock;
mod worker;

pub use confine::{Failed, describe, drop_capabilities};
pub use footprint::give_back;
pub use image::{Image, serve_image};
pub use ring::has_rings;
pub use sandbox::{Refused, enter, forbid_files};
pub use share::{Share, serve_share};
pub use vsock::{Vsock, serve_vsock};
pub use worker::{Machine, READY, Worker};
