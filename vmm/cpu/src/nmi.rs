//! Non-maskable interrupts are masked from the delivery of one to the end of the next `IRET` (APM vol. 2, section 8.2.3).
//!
//! A processor without virtual NMIs does not do that for a guest. So the guest is left at the `IRET`, and executes it in
//! single-step mode: an interrupt in front of it would find the stack of the handler, which may be the one that it gets, too.
//! `IRET` loads the flags, so the guest sees nothing of the mode, unless its `IRET` faults: then the saved flags have TF.

use crate::run::{DR6_SINGLE_STEP, RFLAGS_TF};
use crate::vcpu::{Reg, Vcpu};

/// `DR6`: the breakpoints that were hit.
const DR6_BREAKPOINTS: u64 = 0xf;

/// Whether a virtual CPU takes a non-maskable interrupt.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(crate) enum NmiMask {
    /// It does.
    #[default]
    Open,
    /// After the delivery of one: not before the next `IRET`.
    Handler,
    /// During that `IRET`, which is executed in single-step mode.
    Returning {
        /// Where it is.
        rip: u64,
        /// `DR6` before.
        dr6: u64,
        /// The guest was in single-step mode by itself.
        steps: bool,
    },
}

impl NmiMask {
    pub(crate) fn is_open(self) -> bool {
        self == Self::Open
    }

    /// One is put into the slot.
    pub(crate) fn delivered(&mut self, vcpu: &mut impl Vcpu) {
        if vcpu.set_iret_exits(true) {
            *self = Self::Handler;
        }
    }

    /// None is in a handler: after INIT, or when the delivery of one was cut short and has to begin again.
    pub(crate) fn clear(&mut self, vcpu: &mut impl Vcpu) {
        vcpu.set_iret_exits(false);
        *self = Self::Open;
    }

    /// The guest is at the `IRET`.
    pub(crate) fn begin_return(&mut self, vcpu: &mut impl Vcpu) {
        vcpu.set_iret_exits(false);
        let rflags = vcpu.get(Reg::Rflags);
        let (rip, dr6) = (vcpu.get(Reg::Rip), vcpu.get(Reg::Dr6));
        *self = Self::Returning { rip, dr6, steps: rflags & RFLAGS_TF != 0 };
        vcpu.set(Reg::Rflags, rflags | RFLAGS_TF);
    }

    /// The guest has raised `#DB`. Whether that is only the end of the `IRET`, of which the guest gets to know nothing.
    pub(crate) fn ends_return(&mut self, vcpu: &mut impl Vcpu) -> bool {
        let Self::Returning { rip, dr6, steps } = *self else { return false };
        let found = vcpu.get(Reg::Dr6);
        if found & DR6_SINGLE_STEP == 0 && vcpu.get(Reg::Rip) == rip {
            // A breakpoint at the instruction itself, which follows. (Bochs' processors do not say that it was a step.)
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
