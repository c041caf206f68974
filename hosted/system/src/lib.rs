//! Systems for Parador's kernel: `parador system check`, `graph` and `build`, and disk images for
//! guests (`parador rootfs`).
//!
//! A description (`description`) is validated (`validate`) and becomes a bootable image (`image`)
//! or a capability graph (`graph`).
#![forbid(unsafe_code)]

pub mod attach;
mod boot_files;
mod channels;
mod compile;
mod cpu_time;
pub mod description;
pub mod graph;
pub mod guest;
pub mod image;
pub mod initramfs;
mod machine_exit;
mod packed;
pub mod resolved;
pub mod rootfs;
mod summary;
pub mod validate;
mod vtlb;
