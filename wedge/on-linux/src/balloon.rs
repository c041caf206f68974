//! Memory that the guest gives back to the host: holes in the descriptor of its memory.
//!
//! A hole takes nothing of the host and reads as zeros, in all processes, until somebody writes there. The virtual CPU makes holes itself:
//! its filter lets it do no more to its memory than it could by writing zeros.

use core::sync::atomic::{AtomicU32, AtomicU64, Ordering::Relaxed, Ordering::SeqCst};

use linux_raw_sys::general as linux;
use proto::wedge::{Start, layout};
use vmm_bus::BalloonBackend;

use crate::memory::Ram;
use crate::shared::shared;
use crate::sys;

/// What the guest and who looks after the machine tell each other. The guest can write anything there.
#[repr(C)]
pub struct State {
    /// Pages that the guest is to give up. After a change the virtual CPU is told [`event::BALLOON`](crate::shared::event::BALLOON).
    pub wanted: AtomicU32,
    /// Pages that it has given up, as it says.
    pub actual: AtomicU32,
    /// Not 0: fresh statistics are wanted. Told as a change of [`State::wanted`].
    pub asks: AtomicU32,
    /// Statistics by tag (VIRTIO 1.2, section 5.5.6.3), as the guest has said last.
    pub statistics: [AtomicU64; 16],
}

/// What the guest's device is connected to.
pub struct Link {
    ram: Ram,
}

impl Link {
    /// For a machine that the loader wants to have a balloon.
    pub fn new(start: &Start) -> Option<Self> {
        let wanted = start.balloon.checked_sub(1)?;
        shared().balloon.wanted.store(u32::try_from(wanted).unwrap_or(u32::MAX), Relaxed);
        Some(Self { ram: Ram::new(start) })
    }
}

impl BalloonBackend for Link {
    fn target_pages(&self) -> u32 {
        shared().balloon.wanted.load(SeqCst)
    }

    fn set_inflated(&mut self, pages: u32) {
        shared().balloon.actual.store(pages, Relaxed);
    }

    fn discard(&mut self, address: u64, length: u64) {
        let (mut address, mut left) = (address, length);
        // What the guest has in one piece may be two in the descriptor, on the two sides of the hole below 4 GiB.
        while left != 0 {
            let Some((offset, most)) = self.ram.offset(address) else { return };
            let piece = left.min(most);
            let how = u64::from(linux::FALLOC_FL_PUNCH_HOLE | linux::FALLOC_FL_KEEP_SIZE);
            let arguments = [layout::MEMORY_FD.into(), how, offset, piece, 0, 0];
            // SAFETY: guest memory, where no Rust object is; the guest does not care what is there.
            // It fails for want of memory; then the host has what it had.
            let _ = unsafe { sys::call(linux::__NR_fallocate, arguments) };
            (address, left) = (address + piece, left - piece);
        }
    }

    fn take_statistics_request(&mut self) -> bool {
        shared().balloon.asks.swap(0, SeqCst) != 0
    }

    fn report_statistic(&mut self, tag: u16, value: u64) {
        if let Some(place) = shared().balloon.statistics.get(usize::from(tag)) {
            place.store(value, Relaxed);
        }
    }
}
