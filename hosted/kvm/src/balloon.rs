//! Memory that the guest gives back to the host: holes in the descriptor of its memory, which read as zeros until somebody writes there.

use std::os::fd::OwnedFd;

use rustix::fs::{FallocateFlags, fallocate};

/// What the guest's device is connected to.
pub struct Balloon {
    memory: OwnedFd,
    /// Guest-physical base and length, one after another in the descriptor.
    ranges: Vec<(u64, u64)>,
    /// Pages that the guest is to give up.
    wanted: u32,
}

impl Balloon {
    /// Of a machine with this memory, whose guest is to give so many pages up at once.
    pub fn new(memory: OwnedFd, ranges: Vec<(u64, u64)>, wanted: u64) -> Self {
        Self { memory, ranges, wanted: u32::try_from(wanted).unwrap_or(u32::MAX) }
    }

    /// Where in the descriptor an address is, and how many bytes are there in one piece.
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

impl vmm_bus::BalloonBackend for Balloon {
    fn target_pages(&self) -> u32 {
        self.wanted
    }

    fn set_inflated(&mut self, _: u32) {
        // The host sees what it has.
    }

    fn discard(&mut self, address: u64, length: u64) {
        let (mut address, mut left) = (address, length);
        while left != 0 {
            let Some((offset, most)) = self.place(address) else { return };
            let piece = left.min(most);
            let hole = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
            // It fails for want of memory; then the host has what it had.
            let _ = fallocate(&self.memory, hole, offset, piece);
            (address, left) = (address + piece, left - piece);
        }
    }

    fn take_statistics_request(&mut self) -> bool {
        false
    }

    fn report_statistic(&mut self, _: u16, _: u64) {}
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
        let mut balloon = Balloon::new(file.into(), ranges, 3);
        assert_eq!(balloon.target_pages(), 3);
        let before = other.metadata().unwrap().blocks();
        balloon.discard(0x1000, 0x1000);
        balloon.discard((1 << 32) + 0x1000, 0x1000);
        // Nothing is there.
        balloon.discard(0x2000, 0x1000);
        balloon.discard(u64::MAX, 1);
        let mut bytes = [1; 0x4000];
        other.read_exact_at(&mut bytes, 0).unwrap();
        let is_left = |page: usize| bytes[page * 0x1000..][..0x1000] == [7; 0x1000];
        assert_eq!([0, 1, 2, 3].map(is_left), [true, false, true, false]);
        assert!(other.metadata().unwrap().blocks() < before);
    }
}
