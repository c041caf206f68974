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

    /// The processor has not entered a guest: it had not flushed the TLB for it, either (APM
    /// vol. 3, `VMRUN`). The next assignment does.
    #[cold]
    pub fn refused(&self, control: &ControlArea) {
        if control.tlb_control.get() != tlb_control::NOTHING {
            self.next.set(u32::MAX);
            self.epoch.set(self.epoch.get() + 1);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_flush_that_was_not_carried_out_is_made_up_for() {
        // SAFETY: all fields are integers.
        let control: ControlArea = unsafe { core::mem::zeroed() };
        let asids = Asids { next: Cell::new(u32::MAX), epoch: Cell::new(1) };
        let flushes = || control.tlb_control.replace(tlb_control::NOTHING) != tlb_control::NOTHING;
        assert_eq!((asids.assign(&control), control.guest_asid.get()), (2, 1));
        asids.refused(&control);
        assert!(flushes());
        // The ASID that was assigned is not valid any more, and the next one follows a flush.
        assert_eq!((asids.epoch(), asids.assign(&control)), (3, 4));
        assert!(flushes());
        asids.refused(&control);
        assert_eq!(asids.epoch(), 4, "it has carried it out before");
    }
}
