//! Configuration of the VM, as its processes read it.
//!
//! The device process copies it from shared memory before it forks, and seals the copy ([`seal`]):
//! the guest can write all of shared memory, so it is not read there again. The copy is private
//! memory, inherited by fork(2). The seccomp filters of guest processes refuse to map, unmap or
//! protect memory from [`layout::CONFIG`] on, so a guest kernel cannot change the copy of its own
//! process either. The CPU sets that follow rely on that: seccomp cannot read memory, but it can
//! check for an address in constant memory.

use core::sync::atomic::{AtomicBool, AtomicU32, Ordering::Relaxed};

use host_linux::sys::{self, Backing, Errno};
use linux_raw_sys::general as linux;
use proto::hosted::layout::SLOTS;
use proto::hosted::{
    DiskRecord, Filters, MAX_DISKS, MAX_NETS, MAX_SHARES, NetRecord, ShareRecord, Start, layout,
    option,
};
use vmm_vcpu::MAX_VCPUS;

use crate::state::fixed::Fixed;

/// Largest number of guest processes of all vCPUs together. Slots are a cache, and Linux uses few
/// of them: it has six PCIDs per CPU.
const MAX_PROCESSES: usize = 128;
const _: () = assert!(MAX_PROCESSES / MAX_VCPUS >= 16);

/// The configuration.
#[derive(Debug)]
pub struct Config {
    /// The loader's record.
    pub start: Start,
    /// Disk records.
    pub disks: [DiskRecord; MAX_DISKS],
    /// Network records.
    pub nets: [NetRecord; MAX_NETS],
    /// Records of shared directories.
    pub shares: [ShareRecord; MAX_SHARES],
    /// Seccomp filters.
    pub filters: Filters,
    /// Frequency of the time-stamp counter in kHz.
    pub tsc_khz: u64,
    /// Wall-clock time at which the TSC was 0, in nanoseconds since 1970.
    pub unix_at_zero: u64,
    /// CPU sets exist: the VM was started on several CPUs, and a process can determine its CPU.
    pub has_cpu_sets: bool,
    /// Guest processes and workers may signal each other, and the host confines their signals to
    /// the VM.
    pub kicks: AtomicBool,
    /// Id of the device process, as its children see it: 0 in a PID namespace.
    pub device: AtomicU32,
}

const _: () = assert!(size_of::<Config>() as u64 <= layout::CONFIG_LENGTH);

/// Maps memory for configuration and CPU sets. For the device process, before it forks.
pub fn map() -> Result<(), Errno> {
    let data = linux::PROT_READ | linux::PROT_WRITE;
    let length = layout::CONFIG_LENGTH + layout::CPU_SETS_LENGTH;
    // SAFETY: nothing is mapped there yet.
    unsafe { sys::map(layout::CONFIG, length, data, Backing::Own) }
}

/// Copies the configuration from shared memory. For the device process, before it forks, after
/// [`map`]. `false`: the loader's record has another version.
pub fn load(tsc_khz: u64, unix_at_zero: u64, has_cpu_sets: bool) -> bool {
    let Some(start) = loaded::start() else { return false };
    let config = Config {
        start,
        disks: loaded::disks(),
        nets: loaded::nets(),
        shares: loaded::shares(),
        filters: loaded::filters(),
        tsc_khz,
        unix_at_zero,
        has_cpu_sets,
        kicks: AtomicBool::new(false),
        device: AtomicU32::new(0),
    };
    // SAFETY: the memory is private, aligned and long enough, and no reference to it exists yet.
    unsafe { (layout::CONFIG as *mut Config).write(config) };
    true
}

/// Makes configuration and CPU sets read-only, for this process and its children.
pub fn seal() -> Result<(), Errno> {
    let length = layout::CONFIG_LENGTH + layout::CPU_SETS_LENGTH;
    let rights = linux::PROT_READ;
    let arguments = [layout::CONFIG, length, rights.into(), 0, 0, 0];
    // SAFETY: the memory is not written any more.
    unsafe { sys::call(linux::__NR_mprotect, arguments).map(drop) }
}

/// Returns the configuration.
pub fn config() -> &'static Config {
    Config::get()
}

// SAFETY: `load` has written it in this process or in its parent; all non-atomic fields are
// constant.
unsafe impl Fixed for Config {
    const ADDRESS: u64 = layout::CONFIG;
}

/// Returns whether an option of [`proto::hosted::option`] is set.
pub fn has(option: u64) -> bool {
    config().start.options & option != 0
}

/// Returns the number of vCPUs.
pub fn vcpu_count() -> usize {
    (config().start.vcpus as usize).min(MAX_VCPUS)
}

/// Returns the number of slots of each vCPU, that is, of its guest processes.
pub fn slots() -> usize {
    (MAX_PROCESSES / vcpu_count().max(1)).min(SLOTS)
}

/// Returns the slot of the address space with this PCID; the last slot serves all address spaces
/// without their own slot.
pub fn slot_of(pcid: u16) -> usize {
    let last = if has(option::ONE_SPACE) { 0 } else { slots() - 1 };
    usize::from(pcid).min(last)
}

/// Returns whether guest processes and workers may signal each other.
pub fn kicks() -> bool {
    config().kicks.load(Relaxed)
}

/// Returns the loader's record.
pub fn start() -> Option<Start> {
    Some(config().start)
}

/// Returns the record of a disk.
pub fn disk(number: usize) -> DiskRecord {
    config().disks.get(number).copied().unwrap_or_default()
}

/// Returns the record of a network.
pub fn net(number: usize) -> NetRecord {
    config().nets.get(number).copied().unwrap_or_default()
}

/// Returns the record of a shared directory.
pub fn share(number: usize) -> ShareRecord {
    config().shares.get(number).copied().unwrap_or_default()
}

/// Records that the loader has left in shared memory. The guest can overwrite them: only
/// [`load`] reads them, once, before the guest runs.
mod loaded {
    use super::{
        DiskRecord, Filters, MAX_DISKS, MAX_NETS, MAX_SHARES, NetRecord, ShareRecord, Start, layout,
    };

    /// Returns a copy of the words at this offset.
    fn words<const COUNT: usize>(offset: u64) -> [u64; COUNT] {
        assert!(offset.is_multiple_of(8) && offset + 8 * COUNT as u64 <= layout::SHARED_LENGTH);
        // SAFETY: the device process has mapped all of the shared memory, and no other process
        // exists.
        unsafe { ((layout::SHARED + offset) as *const [u64; COUNT]).read_volatile() }
    }

    /// Returns the seccomp filters.
    pub fn filters() -> Filters {
        const EACH: u64 = 8 * Filters::WORDS as u64;
        let program = |index: usize| words(layout::FILTERS + index as u64 * EACH);
        Filters { programs: core::array::from_fn(program) }
    }

    /// Returns the loader's record; `None`: another version.
    pub fn start() -> Option<Start> {
        Start::from_words(&words(0))
    }

    /// Returns all disk records.
    pub fn disks() -> [DiskRecord; MAX_DISKS] {
        const EACH: u64 = 8 * DiskRecord::WORDS as u64;
        core::array::from_fn(|index| {
            DiskRecord::from_words(&words(layout::DISKS + index as u64 * EACH))
        })
    }

    /// Returns all network records.
    pub fn nets() -> [NetRecord; MAX_NETS] {
        const EACH: u64 = 8 * NetRecord::WORDS as u64;
        core::array::from_fn(|index| {
            NetRecord::from_words(&words(layout::NETS + index as u64 * EACH))
        })
    }

    /// Returns all records of shared directories.
    pub fn shares() -> [ShareRecord; MAX_SHARES] {
        const EACH: u64 = 8 * ShareRecord::WORDS as u64;
        core::array::from_fn(|index| {
            ShareRecord::from_words(&words(layout::SHARES + index as u64 * EACH))
        })
    }
}
