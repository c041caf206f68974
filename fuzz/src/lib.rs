//! Fuzz targets: untrusted input of a guest, a client or a file, as a string of bytes.
//!
//! A target accepts any bytes and panics only on a defect. It keeps no state between two inputs,
//! and every run of an input is the same, so findings can be replayed.
#![forbid(unsafe_code)]

pub mod afterburn;
pub mod board;
#[allow(dead_code, reason = "scripts use more of it")]
#[path = "../../vmm/dev/tests/driver/mod.rs"]
mod driver;
mod ends;
pub mod image;
pub mod input;
pub mod kernel;
pub mod proto;
pub mod virt;
pub mod virtio;
pub mod vtlb;

use input::Seed;

/// A fuzz target.
#[derive(Clone, Copy, Debug)]
pub struct FuzzTarget {
    /// Name, also of its folder in `corpus`.
    pub name: &'static str,
    /// Runs an input.
    pub run: fn(&[u8]),
    /// Initial inputs, by name.
    pub seeds: fn() -> Vec<(&'static str, Seed)>,
}

/// All targets.
pub const TARGETS: [FuzzTarget; 8] = [
    FuzzTarget { name: "virtio", run: virtio::run, seeds: virtio::seeds },
    FuzzTarget { name: "board", run: board::run, seeds: board::seeds },
    FuzzTarget { name: "virt", run: virt::run, seeds: virt::seeds },
    FuzzTarget { name: "proto", run: proto::run, seeds: proto::seeds },
    FuzzTarget { name: "kernel", run: kernel::run, seeds: kernel::seeds },
    FuzzTarget { name: "afterburn", run: afterburn::run, seeds: afterburn::seeds },
    FuzzTarget { name: "image", run: image::run, seeds: image::seeds },
    FuzzTarget { name: "vtlb", run: vtlb::run, seeds: vtlb::seeds },
];

/// Returns the target with this name.
pub fn target(name: &str) -> Option<FuzzTarget> {
    TARGETS.into_iter().find(|target| target.name == name)
}
