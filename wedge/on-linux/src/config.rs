//! The VM's configuration, as all processes of the VM read it.
//!
//! The device process copies it out of shared memory before there is any other process, and seals
//! the copy ([`seal`]): the guest can write all of shared memory, so nothing is read there a second
//! time. The copy is private memory, which fork(2) hands on. The seccomp filters of guest processes
//! refuse to map, unmap or protect anything from [`layout::CONFIG`] on, so not even a guest kernel can
//! change the copy of its own process. The sets of host CPUs behind it rest on that: seccomp cannot
//! look into memory, but it can insist on an address in memory that nobody can change.

use core::sync::atomic::{AtomicBool, AtomicU32, Ordering::Relaxed};

use linux_raw_sys::general as linux;
use proto::wedge::{
    DiskRecord, Filters, MAX_DISKS, MAX_NETS, MAX_SHARES, NetRecord, ShareRecord, Start, layout,
    option,
};
use vmm_cpu::MAX_VCPUS;
use wedge_x86::CLOSED;

use crate::shared::{SLOTS, loaded};
use crate::sys::{self, Backing, Errno};
use crate::{clock, cpu_affinity, pkeys};

/// Most processes with address spaces of the guest, of all vCPUs together. Slots are a cache, and
/// Linux uses few of them: it has six address-space identifiers on each CPU.
const MAX_PROCESSES: usize = 128;
const _: () = assert!(MAX_PROCESSES / MAX_VCPUS >= 16);

/// The configuration.
#[derive(Debug)]
pub struct Config {
    /// The loader's record.
    pub start: Start,
    /// Disks, as the loader describes them.
    pub disks: [DiskRecord; MAX_DISKS],
    /// Networks.
    pub nets: [NetRecord; MAX_NETS],
    /// Shared directories.
    pub shares: [ShareRecord; MAX_SHARES],
    /// Seccomp filters.
    pub filters: Filters,
    /// Frequency of the time-stamp counter in kHz.
    pub tsc_khz: u64,
    /// Wall-clock time when the counter was 0, in seconds since 1970.
    pub unix_at_zero: u64,
    /// There are sets of host CPUs: the VM was started on several, and a process can tell on which
    /// one it runs.
    pub has_cpu_sets: bool,
    /// Guest processes and workers may signal each other, and the host keeps their signals within
    /// the VM.
    pub kicks: AtomicBool,
    /// The device process's number, as the processes see it that it creates: 0 in a PID namespace of
    /// their own.
    pub device: AtomicU32,
}

const _: () = assert!(size_of::<Config>() as u64 <= layout::CONFIG_LENGTH);

/// Copies the configuration out of shared memory. For the device process, before there is any other
/// one.
///
/// # Errors
/// `Ok(false)`: the loader's record is of another version. An error of the host: it has no memory.
pub fn load() -> Result<bool, Errno> {
    let data = linux::PROT_READ | linux::PROT_WRITE;
    let length = layout::CONFIG_LENGTH + layout::CPU_SETS_LENGTH;
    // SAFETY: nothing is there yet.
    unsafe { sys::map(layout::CONFIG, length, data, Backing::Own) }?;
    let Some(start) = loaded::start() else { return Ok(false) };
    let tsc_khz = clock::tsc_khz();
    let config = Config {
        start,
        disks: loaded::disks(),
        nets: loaded::nets(),
        shares: loaded::shares(),
        filters: loaded::filters(),
        tsc_khz,
        unix_at_zero: clock::unix_at_zero(tsc_khz),
        has_cpu_sets: cpu_affinity::detect(),
        kicks: AtomicBool::new(false),
        device: AtomicU32::new(0),
    };
    // SAFETY: the memory is this process's own, long enough and aligned, and nothing refers to it yet.
    unsafe { (layout::CONFIG as *mut Config).write(config) };
    Ok(true)
}

/// Makes configuration and CPU sets read-only, for this process and those that it creates.
pub fn seal() -> Result<(), Errno> {
    let length = layout::CONFIG_LENGTH + layout::CPU_SETS_LENGTH;
    let rights = linux::PROT_READ;
    let arguments = [layout::CONFIG, length, rights.into(), 0, 0, 0];
    // SAFETY: what is there is not written any more.
    unsafe { sys::call(linux::__NR_mprotect, arguments) }?;
    pkeys::protect(layout::CONFIG, length, rights, CLOSED)
}

/// The configuration.
pub fn config() -> &'static Config {
    // SAFETY: `load` has written it in this process or in the one that has created it, and what is
    // not atomic never changes.
    unsafe { &*(layout::CONFIG as *const Config) }
}

/// Whether one of [`proto::wedge::option`] is asked for.
pub fn has(option: u64) -> bool {
    config().start.options & option != 0
}

/// Number of vCPUs.
pub fn vcpu_count() -> usize {
    (config().start.vcpus as usize).min(MAX_VCPUS)
}

/// Slots of each vCPU: how many processes with address spaces of the guest it has at most.
pub fn slots() -> usize {
    (MAX_PROCESSES / vcpu_count().max(1)).min(SLOTS)
}

/// The slot for the address space with this process-context identifier; the last one serves all that
/// have no slot of their own.
pub fn slot_of(pcid: u16) -> usize {
    let last = if has(option::ONE_SPACE) { 0 } else { slots() - 1 };
    usize::from(pcid).min(last)
}

/// Whether guest processes and workers may signal each other.
pub fn kicks() -> bool {
    config().kicks.load(Relaxed)
}
