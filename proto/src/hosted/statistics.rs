//! Counters of the vCPUs in shared memory.

use core::sync::atomic::AtomicU64;

use super::layout;

/// Counters of one vCPU. The guest can overwrite them: they are for display only.
#[derive(Debug)]
#[repr(C)]
pub struct VcpuStatistics {
    /// Entries into the wedge by kind of patch site, indexed by the kind's number.
    pub sites: [AtomicU64; 256],
    /// Other counters, indexed by [`counter`].
    pub counters: [AtomicU64; 16],
}

const _: () = assert!(
    layout::STATISTICS + (crate::system::MAX_VCPUS * size_of::<VcpuStatistics>()) as u64
        <= layout::BALLOON
);

/// Indices of [`VcpuStatistics::counters`].
pub mod counter {
    /// Page faults that led to a mapping.
    pub const FILLS: usize = 0;
    /// Page faults injected into the guest.
    pub const FAULTS: usize = 1;
    /// System calls that arrived by signal.
    pub const CALLS: usize = 2;
    /// Switches of the guest process, that is, of the address space.
    pub const SWITCHES: usize = 3;
    /// Full flushes of user-mode mappings.
    pub const FLUSHES: usize = 4;
    /// Emulated sensitive instructions without a patch site.
    pub const UNRECORDED: usize = 5;
    /// Signals from other processes.
    pub const KICKS: usize = 6;
    /// Names of the counters in reports, in their order.
    pub const NAMES: [&str; 7] = [
        "mappings filled in",
        "page faults of the guest",
        "calls by signal",
        "changes of the process",
        "flushes of all of a program",
        "sensitive instructions without a site",
        "signals from outside",
    ];
}
