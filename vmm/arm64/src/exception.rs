//! Exceptions for the guest's kernel (Arm ARM, D1.3.4).

pub mod aarch32;

use hw_arm64::esr::{self, class};
use hw_arm64::registers::{sctlr, spsr};

use crate::vcpu::{Arm64Vcpu, System};

/// Syndrome: the instruction has 32 bits.
const WIDE: u64 = 1 << 25;
/// Status of an abort: synchronous external abort.
const EXTERNAL: u64 = 0x10;
/// Bit of the syndrome of an abort: the address register is not valid.
const NO_ADDRESS: u64 = 1 << 10;
/// Offsets of a vector for a synchronous exception and for an error, among those of one kind of
/// states.
const SYNCHRONOUS: u64 = 0;
const ERROR: u64 = 0x180;
/// Exception classes of aborts at the same exception level are higher by one.
const SAME_LEVEL: u64 = 1;

/// Makes the guest's kernel handle an undefined instruction.
pub fn undefined(vcpu: &mut impl Arm64Vcpu) {
    raise(vcpu, SYNCHRONOUS, class::UNKNOWN << esr::CLASS_SHIFT | WIDE);
}

/// Makes the guest's kernel handle an error that an earlier access has caused. It gets that also
/// while it masks errors: it cannot continue in any case.
pub fn system_error(vcpu: &mut impl Arm64Vcpu) {
    raise(vcpu, ERROR, class::SYSTEM_ERROR << esr::CLASS_SHIFT | WIDE);
}

/// Makes the guest's kernel handle an access to nothing. `is_fetch`: of an instruction.
pub fn external_abort(vcpu: &mut impl Arm64Vcpu, is_fetch: bool) {
    let class = if is_fetch { class::INSTRUCTION_ABORT } else { class::DATA_ABORT };
    let is_kernel = !is_user(vcpu.state());
    let class = class + if is_kernel { SAME_LEVEL } else { 0 };
    raise(vcpu, SYNCHRONOUS, class << esr::CLASS_SHIFT | WIDE | NO_ADDRESS | EXTERNAL);
}

fn is_user(state: u64) -> bool {
    matches!(state & spsr::MODE, spsr::EL0 | spsr::EL0_32)
}

/// Enters the guest's vector with this offset.
fn raise(vcpu: &mut impl Arm64Vcpu, kind: u64, syndrome: u64) {
    let (state, pc) = (vcpu.state(), vcpu.pc());
    let offset = match state & spsr::MODE {
        spsr::EL1_WITH_SP_EL0 => 0,
        spsr::EL0 => 0x400,
        spsr::EL0_32 => 0x600,
        _ => 0x200,
    };
    let keeps_pan = vcpu.system(System::Sctlr) & sctlr::SPAN != 0;
    let pan = if keeps_pan { state & spsr::PAN } else { spsr::PAN };
    vcpu.set_system(System::Esr, syndrome);
    vcpu.set_system(System::Elr, pc);
    vcpu.set_system(System::Spsr, state);
    let vector = vcpu.system(System::Vbar).wrapping_add(offset + kind);
    vcpu.set_pc(vector);
    vcpu.set_state(spsr::EL1_MASKED | pan);
}
