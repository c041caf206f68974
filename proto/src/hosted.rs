//! Layout of the memory that a loader and the wedge share when a guest runs in Linux processes: the
//! [`Start`] record at offset 0, one record for each disk, network and shared directory, seccomp
//! filters and counters.
//!
//! Records consist of 64-bit little-endian words in the order of the fields.

pub mod balloon;
pub mod console;
pub mod control;
pub mod counters;
pub mod debug;
mod disk;
pub mod exit;
mod filters;
pub mod idle;
pub mod latency;
pub mod layout;
pub mod log;
mod net;
pub mod option;
mod share;
mod start;
mod statistics;

pub use disk::DiskRecord;
pub use filters::Filters;
pub use net::NetRecord;
pub use share::ShareRecord;
pub use start::{MAGIC, Start, VERSION};
pub use statistics::{VcpuStatistics, counter};

/// Largest number of disks of a VM.
pub const MAX_DISKS: usize = 8;
/// Largest number of networks of a VM.
pub const MAX_NETS: usize = 4;
/// Largest number of shared directories of a VM.
pub const MAX_SHARES: usize = 16;
/// Number of request queues.
pub const MAX_QUEUES: usize = MAX_DISKS + MAX_SHARES;

const _: () = assert!(
    layout::QUEUES + size_of::<[crate::requests::Queue; MAX_QUEUES]>() as u64 <= layout::STATISTICS
);

/// Prefix of the names of the processes or threads that run a vCPU; its index follows. They set it
/// before they run the guest, and cannot change it then.
pub const VCPU_NAME: &str = "parador-vcpu";

const _: () = assert!(layout::DISKS + 8 * (MAX_DISKS * DiskRecord::WORDS) as u64 <= layout::NETS);
const _: () = assert!(layout::NETS + 8 * (MAX_NETS * NetRecord::WORDS) as u64 <= layout::SHARES);
const _: () = assert!(layout::DISKS_FD + MAX_DISKS as u32 <= layout::NETS_FD);
const _: () = assert!(layout::SHARES + 8 * (MAX_SHARES * ShareRecord::WORDS) as u64 <= 0x1000);

/// Packs bytes into words; the last word is padded with zeros.
fn pack(bytes: &[u8], to: &mut [u64]) {
    for (word, bytes) in to.iter_mut().zip(bytes.chunks(8)) {
        let mut all = [0; 8];
        all[..bytes.len()].copy_from_slice(bytes);
        *word = u64::from_le_bytes(all);
    }
}

fn unpack(words: &[u64], to: &mut [u8]) {
    for (bytes, word) in to.chunks_mut(8).zip(words) {
        bytes.copy_from_slice(&word.to_le_bytes()[..bytes.len()]);
    }
}
