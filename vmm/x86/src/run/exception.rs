//! Exceptions of the guest, and the completion of instructions: single-step mode, breakpoints and
//! interrupt shadows.

use vmm_vcpu::{Flow, Outcome, StopReason};

use super::{Cpu, DR6_SINGLE_STEP, RFLAGS_TF};
use crate::platform::{PcPlatform, Unknown};
use crate::registers::Reg;
use crate::vcpu::{Event, X86Vcpu};
use crate::walk::{CodeView, PAGE_FAULT};

/// `RFLAGS.RF`: no instruction breakpoint at the next instruction.
pub(super) const RFLAGS_RF: u64 = 1 << 16;
/// `DR7.GD`: accesses of debug registers raise `#DB`, until one is delivered.
pub(super) const DR7_GENERAL_DETECT: u64 = 1 << 13;
/// Vector of a debug exception.
pub(super) const DEBUG: u8 = 1;
/// Vector of a double fault.
const DOUBLE_FAULT: u8 = 8;
/// Double fault; its error code is always 0.
pub(super) const DOUBLE_FAULT_EVENT: Event = Event::exception_code(DOUBLE_FAULT, 0);
/// Vector of an alignment check.
pub(super) const ALIGNMENT: u8 = 17;
/// Vector of an undefined opcode.
pub(super) const UNDEFINED: Event = Event::exception(6);
/// General protection, error code 0.
pub(super) const PROTECTION: Event = Event::exception_code(13, 0);

impl Cpu {
    /// Injects `#UD`: the instruction does not match the exit, or cannot be emulated.
    #[cold]
    pub(super) fn inject_ud<V: X86Vcpu, P: PcPlatform>(&mut self, vcpu: &mut V, platform: &mut P) {
        let rip = vcpu.get(Reg::Rip);
        let mut bytes = [0; 15];
        // Unreadable bytes stay 0 in the report.
        let _ = CodeView::of(vcpu).fetch(platform.memory(), &mut bytes);
        let mut first = [0; 8];
        first.copy_from_slice(&bytes[..8]);
        platform.unknown(Unknown::Instruction { rip, bytes: u64::from_le_bytes(first) });
        self.raise(vcpu, UNDEFINED);
    }

    /// Reflects an intercepted exception to the guest. The CPU has already performed the side
    /// effects before delivery: DR6 has the cause of a `#DB` (APM vol. 2, section 15.12.2).
    #[cold]
    pub(super) fn exception<V: X86Vcpu, P: PcPlatform>(
        &mut self,
        vcpu: &mut V,
        platform: &mut P,
        vector: u8,
        code: u32,
    ) -> Flow {
        if vector == DEBUG && self.nmi_mask.ends_return(vcpu) {
            self.needs_service = true;
            return Ok(());
        }
        let event = match vector {
            DEBUG => Event::exception(DEBUG),
            // Its error code is always 0, and EXITINFO1 is undefined (APM vol. 2, section 8.2.18).
            ALIGNMENT => Event::exception_code(ALIGNMENT, 0),
            _ => {
                platform.unknown(Unknown::Other("unexpected intercepted exception", code.into()));
                return Err(StopReason::End(Outcome::HostError(vector.into())));
            }
        };
        // Neither is a cause of a double fault.
        self.interrupt_delivery(vcpu, vector)?;
        if vector == DEBUG {
            raise_debug(vcpu, 0);
            self.needs_service = true;
        } else {
            self.raise(vcpu, event);
        }
        Ok(())
    }

    /// Reflects an intercepted page fault to the guest. `CR2` changes also if it becomes a double
    /// fault.
    #[cold]
    pub(super) fn page_fault<V: X86Vcpu>(&mut self, vcpu: &mut V, address: u64, code: u32) -> Flow {
        let double_fault = self.interrupt_delivery(vcpu, PAGE_FAULT)?;
        vcpu.set(Reg::Cr2, address);
        let event = Event::exception_code(PAGE_FAULT, code);
        self.raise(vcpu, if double_fault { DOUBLE_FAULT_EVENT } else { event });
        Ok(())
    }

    /// Settles the event whose delivery an exception with this vector interrupted. Returns true if
    /// the two are a double fault.
    fn interrupt_delivery<V: X86Vcpu>(
        &mut self,
        vcpu: &mut V,
        vector: u8,
    ) -> Result<bool, StopReason> {
        let first = vcpu.event();
        match interrupted(first, vector) {
            Interrupted::Shutdown => return Err(StopReason::End(Outcome::TripleFault)),
            Interrupted::DoubleFault => return Ok(true),
            Interrupted::Dropped => {}
            Interrupted::Deferred if first == Event::NMI => {
                self.nmi = true;
                self.nmi_mask.clear(vcpu);
            }
            Interrupted::Deferred => self.deferred = first,
        }
        Ok(false)
    }

    /// Puts a fault into the injection slot and requests service, because the slot is occupied now.
    /// The saved flags of a fault have RF set, so that the instruction breakpoint is not reported
    /// again (APM vol. 2, section 13.1.1); a CPU does not set RF for an injected event.
    pub(super) fn raise<V: X86Vcpu>(&mut self, vcpu: &mut V, event: Event) {
        let rflags = vcpu.get(Reg::Rflags);
        vcpu.set(Reg::Rflags, rflags | RFLAGS_RF);
        vcpu.set_event(event);
        self.needs_service = true;
    }
}

/// Fate of an event whose delivery an exception interrupted.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Interrupted {
    /// No event; or an exception or `INT n`, which is raised again if its cause persists.
    Dropped,
    /// An interrupt, which is delivered after the exception.
    Deferred,
    /// The two exceptions become a double fault.
    DoubleFault,
    /// The vCPU shuts down (triple fault).
    Shutdown,
}

/// Class of an exception for double faults.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Class {
    Benign,
    Contributory,
    PageFault,
    DoubleFault,
}

impl Class {
    const fn of(vector: u8) -> Self {
        match vector {
            DOUBLE_FAULT => Self::DoubleFault,
            PAGE_FAULT => Self::PageFault,
            0 | 10..=13 => Self::Contributory,
            _ => Self::Benign,
        }
    }
}

/// Decides the fate of `first`, whose delivery an exception interrupted (APM vol. 2, table 8-5). An
/// exception during the delivery of a double fault shuts the vCPU down, also a benign one, as in
/// KVM.
pub(super) fn interrupted(first: Event, second: u8) -> Interrupted {
    if !first.is_some() || first.is_software_interrupt() {
        return Interrupted::Dropped;
    }
    if !first.is_exception() {
        return Interrupted::Deferred;
    }
    match (Class::of(first.vector()), Class::of(second)) {
        (Class::DoubleFault, _) => Interrupted::Shutdown,
        (Class::Contributory, Class::Contributory)
        | (Class::PageFault, Class::Contributory | Class::PageFault) => Interrupted::DoubleFault,
        _ => Interrupted::Dropped,
    }
}

/// Completes the current instruction, with the side effects of its completion.
#[inline(always)]
pub(super) fn retire(vcpu: &mut impl X86Vcpu, next: u64) {
    vcpu.set(Reg::Rip, next);
    // The shadow ends; of `STI; HLT` every time.
    if vcpu.get(Reg::InterruptShadow) != 0 {
        vcpu.set(Reg::InterruptShadow, 0);
    }
    if vcpu.get(Reg::Rflags) & (RFLAGS_TF | RFLAGS_RF) != 0 {
        retire_marked(vcpu);
    }
}

/// Completes an instruction after an instruction breakpoint (breakpoints are armed again for the
/// next instruction), or in single-step mode.
#[cold]
fn retire_marked(vcpu: &mut impl X86Vcpu) {
    let rflags = vcpu.get(Reg::Rflags);
    if rflags & RFLAGS_RF != 0 {
        vcpu.set(Reg::Rflags, rflags & !RFLAGS_RF);
    }
    single_step(vcpu, rflags);
}

/// Handles the boundary between two iterations of a repeated string instruction. As on a CPU, an
/// instruction breakpoint at it has been reported already, and single-step mode traps here (APM
/// vol. 2, sections 13.1.1 and 13.1.4).
#[cold]
pub(super) fn interrupt_repetition(vcpu: &mut impl X86Vcpu) {
    vcpu.set(Reg::InterruptShadow, 0);
    let rflags = vcpu.get(Reg::Rflags);
    vcpu.set(Reg::Rflags, rflags | RFLAGS_RF);
    single_step(vcpu, rflags);
}

/// Raises the `#DB` of single-step mode if `RFLAGS.TF` is set.
pub(super) fn single_step(vcpu: &mut impl X86Vcpu, rflags: u64) {
    if rflags & RFLAGS_TF == 0 {
        return;
    }
    raise_debug(vcpu, DR6_SINGLE_STEP);
}

/// Puts a `#DB` into the injection slot with its side effects: adds `causes` to DR6 and clears
/// general detection. An injected event has neither.
pub(super) fn raise_debug(vcpu: &mut impl X86Vcpu, causes: u64) {
    if causes != 0 {
        let dr6 = vcpu.get(Reg::Dr6);
        vcpu.set(Reg::Dr6, dr6 | causes);
    }
    let dr7 = vcpu.get(Reg::Dr7);
    if dr7 & DR7_GENERAL_DETECT != 0 {
        vcpu.set(Reg::Dr7, dr7 & !DR7_GENERAL_DETECT);
    }
    vcpu.set_event(Event::exception(DEBUG));
}
