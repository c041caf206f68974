//! Records in the shared memory of a VM and in the private memory of a process, each used by the
//! module that its comment names.

use core::sync::atomic::AtomicU32;

use crate::state::owned::Owned;

/// Number of TLS descriptors.
pub const TLS_COUNT: usize = 3;

/// State of the guest's balloon device. The guest can overwrite it.
#[repr(C)]
pub struct BalloonState {
    /// Pages in the balloon, as the guest reports.
    pub actual: AtomicU32,
}

/// Placement of a vCPU.
#[repr(C)]
pub struct VcpuPlacement {
    /// CPU at the last hand-over.
    pub cpu: Owned<u32>,
    /// TSC at the last hand-over.
    pub handed_over: Owned<u64>,
    /// TSC until which it stays unbound.
    pub unbound_until: Owned<u64>,
}

/// CPU binding of a process.
#[repr(C)]
pub struct ProcessBinding {
    /// CPU to which it is bound, plus 1; 0: none.
    pub cpu: Owned<u32>,
    /// [`VcpuPlacement::handed_over`] at the last timer tick of the guest.
    pub seen_hand_over: Owned<u64>,
    /// TSC at which it was last unbound.
    pub unbound_at: Owned<u64>,
}

/// Accounting of a vCPU. Times are in TSC ticks.
#[derive(Clone, Copy, Debug)]
pub struct StealState {
    /// Start of the running interval that is not accounted yet.
    pub since: u64,
    /// Time of the last hand-over.
    pub handed_over: u64,
    /// Time of the last query of the host clock.
    pub queried: u64,
    /// Total stolen time.
    pub ticks: u64,
}

/// Accounting of a process.
#[derive(Clone, Copy, Debug)]
pub struct TurnTimes {
    /// TSC ticks for which it has held the vCPU, without idle time, since the last query.
    pub held: u64,
    /// CPU time at the last query in nanoseconds.
    pub cpu: u64,
}

/// TLS descriptors of a host process.
#[derive(Clone, Copy, Debug)]
pub struct ThreadLocal {
    /// The guest's descriptors.
    pub descriptors: [u64; TLS_COUNT],
    /// Descriptors that the host has accepted.
    pub usable: [bool; TLS_COUNT],
    /// Number of changes of the guest's descriptors when they were read.
    pub changes: u64,
}

/// Layout of an XSAVE area.
#[derive(Clone, Copy, Debug)]
pub struct XsaveLayout {
    /// Components enabled by the host (`XCR0`).
    pub enabled: u64,
    /// The compacted format (`XSAVEC`) is supported.
    pub is_compacting: bool,
    /// Of each component: offset and length in the standard format, and its alignment in the
    /// compacted format.
    pub each: [(u32, u32, bool); COMPONENTS],
}

impl XsaveLayout {
    /// Returns those of the components `wanted` that the host has enabled. The CPU may have more:
    /// `clearcpuid=` and mitigations of the host kernel disable some.
    pub const fn enabled_of(&self, wanted: u64) -> u64 {
        wanted & self.enabled
    }
}

/// Number of components that a guest may use: all up to `PKRU`.
pub const COMPONENTS: usize = 9;
