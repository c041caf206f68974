//! vTLB of a VM: software translation of guest-physical memory, as `root` and the VMM know it.

use serde::{Deserialize, Serialize};

/// Smallest and largest pool of a vCPU, in pages of 4 KiB.
pub const MIN_POOL: u32 = 64;
/// See [`MIN_POOL`].
pub const MAX_POOL: u32 = 256;
/// Largest number of address spaces that a vCPU keeps.
pub const MAX_SPACES: u8 = 32;
/// Default number of these.
pub const DEFAULT_SPACES: u8 = 8;

/// vTLB of a VM.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Vtlb {
    /// Pool of kernel memory for translations of each vCPU, in pages: [`MIN_POOL`] to
    /// [`MAX_POOL`].
    pub pool: u32,
    /// Optimisations in use: this one and all below it.
    pub rung: Rung,
    /// Address spaces that a vCPU keeps, from [`Rung::Cache`] on: 1 to [`MAX_SPACES`].
    pub spaces: u8,
    /// [`Rung::Trace`] finds written page tables by write faults, instead of dirty bits.
    pub trace_writes: bool,
}

/// Optimisations of a vTLB, each above the ones before.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub enum Rung {
    /// None, and the VMM translates instead of the kernel.
    User,
    /// None: every load of `CR3` drops all translations.
    Kernel,
    /// Global translations survive a load of `CR3`.
    Global,
    /// Translations of several address spaces are kept.
    Cache,
    /// A flush drops only translations that differ from the guest's tables.
    Sync,
    /// A flush compares only tables that the guest has written.
    Trace,
    /// Each kept address space has an address-space identifier.
    Asid,
    /// Single translations are invalidated in the TLB.
    InvalidatePage,
}

/// Number of counters of a vTLB.
pub const COUNTERS: usize = 8;
/// Their names, in the order of the kernel's state page of a vCPU.
pub const COUNTER_NAMES: [&str; COUNTERS] =
    ["fills", "faults", "loads", "invalidations", "evictions", "syncs", "asids", "flushes"];
