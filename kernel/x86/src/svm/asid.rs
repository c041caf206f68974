//! Address-space identifiers: tags of TLB entries (APM vol. 2 §15.16). Each CPU assigns its own.

use core::cell::Cell;

use hw_x86::vmcb::{ControlArea, tlb_control};
use kernel_core::vtlb::defects::breaks;

#[cfg(not(feature = "testing"))]
use crate::features::features;

#[cfg(feature = "testing")]
use crate::shadow::testing::available;

/// Number of ASIDs, including the host's ASID 0.
#[cfg(not(feature = "testing"))]
fn available() -> u32 {
    features().asids
}

/// ASIDs of a CPU.
pub struct Asids {
    /// Next unused ASID.
    next: Cell<u32>,
    /// Number of times that the ASIDs were exhausted, from 1.
    epoch: Cell<u64>,
}

impl Asids {
    /// State before the first guest.
    #[expect(clippy::new_without_default, reason = "only in constants")]
    pub const fn new() -> Self {
        Self { next: Cell::new(1), epoch: Cell::new(1) }
    }

    /// Current epoch. ASIDs of other epochs are invalid.
    #[inline(always)]
    pub fn epoch(&self) -> u64 {
        self.epoch.get()
    }

    /// Assigns an ASID without TLB entries, which is how a guest's TLB is flushed. Returns its
    /// epoch.
    pub fn assign(&self, control: &ControlArea) -> u64 {
        if self.next.get() >= available() {
            self.next.set(1);
            self.epoch.set(self.epoch.get() + 1);
            if !breaks("flush-at-epoch") {
                control.tlb_control.set(tlb_control::FLUSH_ALL);
            }
        }
        control.guest_asid.set(self.next.replace(self.next.get() + 1));
        self.epoch.get()
    }
}
