//! Raw disks: one file each, whose requests are executed by threads ([`host_linux::disk`]).

use std::fmt;
use std::fs::File;
use std::os::fd::AsRawFd;
use std::process;
use std::sync::Barrier;

use host_linux::disk::{BLOCKING_WORKERS, DiskHost, FlushErrors, Worker};
use host_linux::io_uring::IoUring;
use proto::hosted::counters::DeviceCounters;
use proto::hosted::{DiskRecord, log};
use proto::requests::Queue;
use vmm_mem::{GuestMemory, Transfer};

use crate::Error;
use crate::clock;
use crate::vcpu_thread::{Notify, event};

/// A raw disk.
pub struct RawDisk {
    file: File,
    record: DiskRecord,
    errors: FlushErrors,
}

/// The VM as its disk workers see it.
#[derive(Clone, Copy)]
pub struct DiskVm<'m> {
    /// Guest memory.
    pub memory: &'m GuestMemory,
    /// The vCPU that handles completed requests.
    pub target: &'m (dyn Notify + Sync),
}

// SAFETY: it is guest memory, which is mapped as long as the VM runs.
unsafe impl DiskHost for DiskVm<'_> {
    fn locate(&self, address: u64, length: u64) -> Option<u64> {
        // An empty range has an address, too.
        let (mut found, wanted) = (None, length.max(1));
        let all = self.memory.for_each_part(Transfer::ToGuest, address, wanted, |host, length| {
            found = (length as u64 == wanted).then_some(host as u64);
        });
        all.ok().and(found)
    }

    fn notify(&self) {
        self.target.notify(event::DISK);
    }

    fn now(&self) -> u64 {
        clock::nanoseconds()
    }

    fn warn(&self, text: fmt::Arguments<'_>) {
        eprintln!("<{}>{text}", log::WARN);
    }
}

/// Returns the number of threads per disk, and whether each of them uses io_uring.
pub fn workers() -> (usize, bool) {
    let has_ring = IoUring::is_possible();
    (if has_ring { 1 } else { BLOCKING_WORKERS }, has_ring)
}

impl RawDisk {
    /// Creates a disk from a file.
    pub fn new(file: File, record: DiskRecord) -> Self {
        Self { file, record, errors: FlushErrors::default() }
    }

    /// Loop of a worker thread of the disk with this index, which waits at the barrier before its
    /// first request. Ends the process on an error.
    pub fn work(
        &self,
        index: usize,
        has_ring: bool,
        (queue, counters): (&Queue, &DeviceCounters),
        host: DiskVm<'_>,
        barrier: &Barrier,
    ) {
        let Self { file, record, errors } = self;
        let fd = file.as_raw_fd() as u32;
        let ring = has_ring.then(|| IoUring::new(fd, None)).transpose();
        barrier.wait();
        let worker = Worker { fd, index, record: *record, errors, queue, counters, host };
        let error = ring.map_or_else(|error| error, |ring| worker.serve(ring));
        let error = std::io::Error::from_raw_os_error(error.0);
        let error = Error::host("use io_uring for a disk")(error);
        eprintln!("<{}>{error}", log::ERROR);
        process::exit(error.exit_code().into())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use vmm_mem::testing::memory;

    #[test]
    fn only_guest_memory_has_an_address() {
        let (memory, vcpu_thread) =
            (memory(&[(0, 0x3000)]), crate::vcpu_thread::VcpuThread::default());
        let vm = DiskVm { memory: &memory, target: &vcpu_thread };
        let first = vm.locate(0, 0x3000).unwrap();
        assert_eq!(vm.locate(0x1000, 0x2000), Some(first + 0x1000));
        assert_eq!(vm.locate(0x2fff, 0), Some(first + 0x2fff));
        for (address, length) in [(0x2f00, 0x200), (0x3000, 1), (0, u64::MAX), (u64::MAX, 2)] {
            assert_eq!(vm.locate(address, length), None, "{address:#x}");
        }
    }
}
