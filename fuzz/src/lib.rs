//! Fuzz targets: what a guest, a client or a file may say, as a string of bytes.
//!
//! A target takes any bytes and panics only if something is wrong. It has no state between two inputs, and every
//! input means the same each time, so what was found once can be replayed.
#![forbid(unsafe_code)]

pub mod afterburn;
pub mod board;
#[allow(dead_code, reason = "scripts use more of it")]
#[path = "../../vmm/dev/tests/driver/mod.rs"]
mod driver;
pub mod input;
pub mod kernel;
pub mod proto;
pub mod virtio;

use input::Seed;

/// A target.
#[derive(Clone, Copy, Debug)]
pub struct Target {
    /// Its name, also that of its folder in `corpus`.
    pub name: &'static str,
    /// Takes an input.
    pub run: fn(&[u8]),
    /// The inputs to begin with, by name.
    pub seeds: fn() -> Vec<(&'static str, Seed)>,
}

/// All targets.
pub const TARGETS: [Target; 5] = [
    Target { name: "virtio", run: virtio::run, seeds: virtio::seeds },
    Target { name: "board", run: board::run, seeds: board::seeds },
    Target { name: "proto", run: proto::run, seeds: proto::seeds },
    Target { name: "kernel", run: kernel::run, seeds: kernel::seeds },
    Target { name: "afterburn", run: afterburn::run, seeds: afterburn::seeds },
];

/// The target with a name.
pub fn target(name: &str) -> Option<Target> {
    TARGETS.into_iter().find(|target| target.name == name)
}
