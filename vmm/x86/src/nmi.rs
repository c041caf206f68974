//! NMI masking: NMIs are masked from the delivery of one to the end of the next `IRET` (APM vol. 2,
//! section 8.2.3).
//!
//! A CPU without virtual NMIs does not mask them for a guest. So the VMM intercepts the `IRET` and
//! single-steps it: an NMI injected before it would use the stack of the handler, which may be its
//! own. `IRET` loads the flags, so single-step mode stays hidden from the guest, unless the `IRET`
//! faults: then the saved flags have TF.

use crate::registers::Reg;
use crate::run::{DR6_SINGLE_STEP, RFLAGS_TF};
use crate::vcpu::X86Vcpu;

/// `DR6`: breakpoint conditions that were met.
const DR6_BREAKPOINTS: u64 = 0xf;

/// NMI masking state of a vCPU.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(crate) enum NmiMask {
    /// NMIs are delivered.
    #[default]
    Open,
    /// After delivery: masked until the next `IRET`.
    Handler,
    /// During that `IRET`, which is single-stepped.
    Returning {
        /// Address of the `IRET`.
        rip: u64,
        /// `DR6` before the step.
        dr6: u64,
        /// The guest had single-step mode enabled itself.
        steps: bool,
    },
}

impl NmiMask {
    pub(crate) fn is_open(self) -> bool {
        self == Self::Open
    }

    /// Masks NMIs: one has been put into the injection slot.
    pub(crate) fn delivered(&mut self, vcpu: &mut impl X86Vcpu) {
        if vcpu.set_iret_exits(true) {
            *self = Self::Handler;
        }
    }

    /// Unmasks NMIs: after INIT, or when the delivery of an NMI was interrupted and must be
    /// repeated.
    pub(crate) fn clear(&mut self, vcpu: &mut impl X86Vcpu) {
        vcpu.set_iret_exits(false);
        *self = Self::Open;
    }

    /// Begins to single-step the `IRET`.
    pub(crate) fn begin_return(&mut self, vcpu: &mut impl X86Vcpu) {
        vcpu.set_iret_exits(false);
        let rflags = vcpu.get(Reg::Rflags);
        let (rip, dr6) = (vcpu.get(Reg::Rip), vcpu.get(Reg::Dr6));
        *self = Self::Returning { rip, dr6, steps: rflags & RFLAGS_TF != 0 };
        vcpu.set(Reg::Rflags, rflags | RFLAGS_TF);
    }

    /// Handles `#DB`. Returns true if it is only the end of the `IRET`, which the guest must not
    /// see.
    pub(crate) fn ends_return(&mut self, vcpu: &mut impl X86Vcpu) -> bool {
        let Self::Returning { rip, dr6, steps } = *self else { return false };
        let found = vcpu.get(Reg::Dr6);
        if found & DR6_SINGLE_STEP == 0 && vcpu.get(Reg::Rip) == rip {
            // A breakpoint at the instruction itself; its step follows. (Bochs does not report the
            // step in DR6.)
            return false;
        }
        *self = Self::Open;
        let is_own = !steps && found & DR6_BREAKPOINTS & !dr6 == 0;
        if is_own {
            vcpu.set(Reg::Dr6, dr6);
        } else if !steps {
            vcpu.set(Reg::Dr6, found & !DR6_SINGLE_STEP | dr6 & DR6_SINGLE_STEP);
        }
        is_own
    }
}
