//! Disks: worker processes that read and write host files ([`host_linux::disk`]).
//!
//! The vCPU writes requests to shared memory ([`proto::requests`]); a disk's workers execute them.
//! Workers are processes, because the wedge has no threads. Only they have the descriptor of the
//! disk.

use core::fmt;
use core::sync::atomic::AtomicU32;
use core::sync::atomic::Ordering::Relaxed;

use host_linux::disk::{BLOCKING_WORKERS, DiskHost, FlushErrors, Worker};
use host_linux::io_uring::IoUring;
use host_linux::sys::{self, Errno};
use linux_raw_sys::general as linux;
use proto::hosted::{DiskRecord, Filters, MAX_DISKS, MAX_QUEUES, Start, layout};
use proto::requests::Queue;
use vmm_bus::requests::{Futex, Requests};

use crate::mmu::ram::Ram;
use crate::report::{self, HOST};
use crate::state::device_counters::counters;
use crate::state::shared::event;
use crate::{children as processes, clock, kick};

/// Largest number of disk workers.
pub const MAX_WORKERS: usize = MAX_DISKS * BLOCKING_WORKERS;

/// Device side of a request queue.
pub type RequestEndpoint = Requests<'static, Sleep>;

/// Futex words in shared memory.
pub struct Sleep;

impl Futex for Sleep {
    fn wake_one(word: &AtomicU32) {
        sys::wake_one(word);
    }

    fn wait(word: &AtomicU32, value: u32) {
        sys::wait(word, value, None);
    }

    fn guest_memory_written(address: u64, length: u32) {
        crate::mmu::frames::write_by_device(address, length.into());
    }
}

/// Returns a request queue.
pub fn queue(index: usize) -> &'static Queue {
    // SAFETY: `main` has mapped the shared memory for the life of the process; all fields are
    // atomic.
    let queues = unsafe { &*((layout::SHARED + layout::QUEUES) as *const [Queue; MAX_QUEUES]) };
    &queues[index]
}

/// Returns the vCPU to notify of completions of a request queue.
pub fn target(queue_index: usize) -> usize {
    queue(queue_index).target.load(Relaxed) as usize
}

/// Creates the workers of all disks; returns their ids. For the device process, before the guest
/// runs.
pub fn make_workers(start: &Start, filters: &Filters) -> Result<[u32; MAX_WORKERS], Errno> {
    let count = (start.disks as usize).min(MAX_DISKS);
    let mut workers = [0; MAX_WORKERS];
    // Read now: the guest may change it before a worker runs.
    let disks: [DiskRecord; MAX_DISKS] = core::array::from_fn(crate::state::config::disk);
    let is_ours = |disk: &DiskRecord| !disk.is_external;
    let has_rings = disks[..count].iter().any(is_ours) && IoUring::is_possible();
    let each = if has_rings { 1 } else { BLOCKING_WORKERS };
    let flush_errors = AllFlushErrors::new()?;
    for (index, place) in workers.iter_mut().take(count * each).enumerate() {
        let disk_index = index / each;
        if !is_ours(&disks[disk_index]) {
            continue;
        }
        match processes::fork()? {
            0 => work(
                disk_index,
                disks[disk_index],
                flush_errors.of(disk_index),
                has_rings,
                start,
                filters,
            ),
            worker => *place = worker,
        }
    }
    flush_errors.unmap()?;
    Ok(workers)
}

/// Flush errors of all disks, mapped in the device process until it has created the workers.
struct AllFlushErrors(u64);

impl AllFlushErrors {
    const LENGTH: u64 = 4096;

    fn new() -> Result<Self, Errno> {
        let rights = linux::PROT_READ | linux::PROT_WRITE;
        let flags = linux::MAP_SHARED | linux::MAP_ANONYMOUS;
        let arguments = [0, Self::LENGTH, rights.into(), flags.into(), u64::MAX, 0];
        // SAFETY: the kernel chooses a free address.
        unsafe { sys::call(linux::__NR_mmap, arguments) }.map(Self)
    }

    /// Returns the flush errors of a disk. They stay mapped in its workers.
    fn of(&self, disk_index: usize) -> &'static FlushErrors {
        const { assert!(size_of::<[FlushErrors; MAX_DISKS]>() as u64 <= AllFlushErrors::LENGTH) };
        // SAFETY: the memory is initially zero, which is valid for both words, and all fields are
        // atomic.
        let all = unsafe { &*(self.0 as *const [FlushErrors; MAX_DISKS]) };
        &all[disk_index]
    }

    fn unmap(self) -> Result<(), Errno> {
        // SAFETY: only children of this process refer to the memory.
        unsafe { sys::unmap(self.0, Self::LENGTH) }
    }
}

/// The VM as its disk workers see it.
struct Vm {
    ram: Ram,
    /// Index of the disk.
    disk: usize,
}

// SAFETY: all guest memory is mapped from `layout::DIRECT` on, and no Rust object is there.
unsafe impl DiskHost for Vm {
    fn locate(&self, address: u64, length: u64) -> Option<u64> {
        let (_, most) = self.ram.offset(address)?;
        (length <= most).then_some(layout::DIRECT + address)
    }

    fn notify(&self) {
        kick::raise_event(target(self.disk), event::DISK);
    }

    fn now(&self) -> u64 {
        clock::nanoseconds()
    }

    fn warn(&self, text: fmt::Arguments<'_>) {
        report::warn(text);
    }
}

/// Runs a worker of the disk with index `index`.
fn work(
    index: usize,
    record: DiskRecord,
    errors: &'static FlushErrors,
    has_ring: bool,
    start: &Start,
    filters: &Filters,
) -> ! {
    let fd = layout::DISKS_FD + index as u32;
    let make = || has_ring.then(|| IoUring::new(fd, Some(layout::RING_FD))).transpose();
    let made = sys::ignore(linux::SIGXFSZ)
        .and_then(|()| processes::become_worker(fd, make, filters, Filters::WORKER));
    let host = Vm { ram: Ram::new(start), disk: index };
    let counters = counters().queue(index);
    let worker = Worker { fd, index, record, errors, queue: queue(index), counters, host };
    match made.map(|ring| worker.serve(ring)) {
        Ok(error) => report::warn(format_args!("disk {index}: cannot wait for io_uring: {error}")),
        Err(error) => report::warn(format_args!("cannot set up a worker of disk {index}: {error}")),
    }
    sys::exit(HOST)
}
