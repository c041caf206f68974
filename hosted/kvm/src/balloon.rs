//! Balloon: returns guest memory to the host as holes in its file, which read as zeros until they
//! are written.

use std::os::fd::OwnedFd;
use std::sync::atomic::Ordering::SeqCst;

use proto::hosted::balloon::{BalloonReport, TAGS};
use rustix::fs::{FallocateFlags, fallocate};

/// Back end of the balloon device.
pub struct HostBalloon<'o> {
    memory: OwnedFd,
    /// Guest-physical base and length of ranges, consecutive in the file.
    ranges: Vec<(u64, u64)>,
    /// Target size; requests for the guest's statistics, and the last ones.
    report: &'o BalloonReport,
}

impl<'o> HostBalloon<'o> {
    /// Creates the back end for this memory; `wanted` is the initial size in pages.
    pub fn new(
        memory: OwnedFd,
        ranges: Vec<(u64, u64)>,
        wanted: u64,
        report: &'o BalloonReport,
    ) -> Self {
        report.target.store(wanted, SeqCst);
        Self { memory, ranges, report }
    }

    /// Returns the file offset of an address, and the length of the contiguous range there.
    fn place(&self, address: u64) -> Option<(u64, u64)> {
        let mut offset = 0;
        for &(base, length) in &self.ranges {
            if let Some(within) = address.checked_sub(base).filter(|within| *within < length) {
                return Some((offset + within, length - within));
            }
            offset += length;
        }
        None
    }
}

impl vmm_bus::BalloonBackend for HostBalloon<'_> {
    fn target_pages(&self) -> u32 {
        self.report.target_pages()
    }

    fn set_inflated(&mut self, _: u32) {
        // The host accounts the memory.
    }

    fn discard(&mut self, address: u64, length: u64) {
        let (mut address, mut left) = (address, length);
        while left != 0 {
            let Some((offset, most)) = self.place(address) else { return };
            let piece = left.min(most);
            let hole = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
            // Fails for lack of host memory; the memory then stays allocated.
            let _ = fallocate(&self.memory, hole, offset, piece);
            (address, left) = (address + piece, left - piece);
        }
    }

    fn take_statistics_request(&mut self) -> bool {
        self.report.take_request()
    }

    fn report_statistics(&mut self, values: &[Option<u64>; TAGS]) {
        self.report.store(values);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::File;
    use std::os::unix::fs::{FileExt, MetadataExt};
    use vmm_bus::BalloonBackend as _;

    #[test]
    fn what_is_given_up_is_the_hosts() {
        let file = tempfile::tempfile().unwrap();
        file.write_all_at(&[7; 0x4000], 0).unwrap();
        let ranges = vec![(0, 0x2000), (1 << 32, 0x2000)];
        let other: File = file.try_clone().unwrap();
        let report = BalloonReport::default();
        let mut balloon = HostBalloon::new(file.into(), ranges, 3, &report);
        report.request();
        assert!(balloon.take_statistics_request() && !balloon.take_statistics_request());
        assert_eq!(balloon.target_pages(), 3);
        report.target.store(5, SeqCst);
        assert_eq!(balloon.target_pages(), 5);
        let before = other.metadata().unwrap().blocks();
        balloon.discard(0x1000, 0x1000);
        balloon.discard((1 << 32) + 0x1000, 0x1000);
        // A hole.
        balloon.discard(0x2000, 0x1000);
        balloon.discard(u64::MAX, 1);
        let mut bytes = [1; 0x4000];
        other.read_exact_at(&mut bytes, 0).unwrap();
        let is_left = |page: usize| bytes[page * 0x1000..][..0x1000] == [7; 0x1000];
        assert_eq!([0, 1, 2, 3].map(is_left), [true, false, true, false]);
        assert!(other.metadata().unwrap().blocks() < before);
    }
}
