//! Balloon: returns guest memory to the host by punching holes in its file.
//!
//! A hole uses no host memory and reads as zeros in all processes until it is written. The vCPU
//! punches holes itself: its seccomp filter permits no more than it could achieve by writing zeros.

use core::sync::atomic::{Ordering::Relaxed, Ordering::SeqCst};

use host_linux::sys;
use linux_raw_sys::general as linux;
use proto::hosted::balloon::{BalloonReport, TAGS};
use proto::hosted::{Start, layout};
use vmm_bus::BalloonBackend;

use crate::mmu::ram::Ram;
use crate::state::fixed::Fixed;
use crate::state::shared::shared;

/// Back end of the balloon device.
pub struct BalloonEndpoint {
    ram: Ram,
}

impl BalloonEndpoint {
    /// Creates the back end if the loader requests a balloon.
    pub fn new(start: &Start) -> Option<Self> {
        let wanted = start.balloon.checked_sub(1)?;
        report().target.store(wanted, SeqCst);
        Some(Self { ram: Ram::new(start) })
    }
}

impl BalloonBackend for BalloonEndpoint {
    fn target_pages(&self) -> u32 {
        report().target_pages()
    }

    fn set_inflated(&mut self, pages: u32) {
        shared().balloon.actual.store(pages, Relaxed);
    }

    fn discard(&mut self, address: u64, length: u64) {
        let (mut address, mut left) = (address, length);
        // A range of guest memory may cross the hole below 4 GiB and then has two parts in the
        // file.
        while left != 0 {
            let Some((offset, most)) = self.ram.offset(address) else { return };
            let piece = left.min(most);
            let how = u64::from(linux::FALLOC_FL_PUNCH_HOLE | linux::FALLOC_FL_KEEP_SIZE);
            let arguments = [layout::MEMORY_FD.into(), how, offset, piece, 0, 0];
            // SAFETY: guest memory, where no Rust object is; its contents are discarded. The call
            // fails without memory, and then nothing is freed.
            let _ = unsafe { sys::call(linux::__NR_fallocate, arguments) };
            (address, left) = (address + piece, left - piece);
        }
    }

    fn take_statistics_request(&mut self) -> bool {
        report().take_request()
    }

    fn report_statistics(&mut self, values: &[Option<u64>; TAGS]) {
        report().store(values);
    }
}

/// Returns the guest's statistics, and the target.
pub fn report() -> &'static BalloonReport {
    BalloonReport::get()
}

// SAFETY: the device process has mapped the shared memory, initially zero; all fields are atomic.
unsafe impl Fixed for BalloonReport {
    const ADDRESS: u64 = layout::SHARED + layout::BALLOON;
}
