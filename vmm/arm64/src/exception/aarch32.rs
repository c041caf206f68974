//! Exceptions for a guest's kernel of AArch32 (Arm ARM, G1.12).

use hw_arm64::aarch32::{psr, sctlr};

use crate::vcpu::{Arm64Vcpu, System};

/// TTBCR: the translation tables have the long format, as the fault status has then.
const LONG_FORMAT: u64 = 1 << 31;
/// Fault status: synchronous external abort, in the short and in the long format.
const EXTERNAL: (u64, u64) = (0x08, 1 << 9 | 0x10);
/// Fault status: the access was a write.
const WRITE: u64 = 1 << 11;
/// Fault status: the address register is not valid.
const NO_ADDRESS: u64 = 1 << 16;

/// Bits of the processor state that an exception sets.
const CHANGED: u64 = psr::MODE | psr::IT | psr::E | psr::T | psr::ILLEGAL;

/// A kind of exceptions: mode that is entered, offset of its vector, register of AArch64 that has
/// the mode's link register, register for the processor state before, and bits that are set.
struct Kind {
    mode: u64,
    vector: u64,
    link: usize,
    saved: System,
    masks: u64,
}

/// Makes the guest's kernel handle an undefined instruction.
pub fn undefined(vcpu: &mut impl Arm64Vcpu) {
    let after = if vcpu.state() & psr::T != 0 { 2 } else { 4 };
    let saved = System::SpsrUndefined;
    let kind = Kind { mode: psr::UNDEFINED, vector: 0x4, link: 22, saved, masks: psr::I };
    raise(vcpu, &kind, after);
}

/// Makes the guest's kernel handle an access to nothing. `is_fetch`: of an instruction.
pub fn external_abort(vcpu: &mut impl Arm64Vcpu, is_fetch: bool, is_write: bool) {
    let is_long = vcpu.system(System::Tcr) & LONG_FORMAT != 0;
    let status = if is_long { EXTERNAL.1 } else { EXTERNAL.0 } | NO_ADDRESS;
    let (register, status, vector, after) = match is_fetch {
        true => (System::Ifsr, status, 0xc, 4),
        false => (System::Esr, status | if is_write { WRITE } else { 0 }, 0x10, 8),
    };
    vcpu.set_system(register, status);
    let (saved, masks) = (System::SpsrAbort, psr::A | psr::I);
    raise(vcpu, &Kind { mode: psr::ABORT, vector, link: 20, saved, masks }, after);
}

/// Enters the guest's vector; the link register points this far behind the instruction.
fn raise(vcpu: &mut impl Arm64Vcpu, kind: &Kind, after: u64) {
    let (before, pc, control) = (vcpu.state(), vcpu.pc(), vcpu.system(System::Sctlr));
    let has = |bit: u64| control & bit != 0;
    let base = if has(sctlr::V) { sctlr::HIGH_VECTORS } else { vcpu.system(System::Vbar) };
    let mut state = before & !CHANGED | kind.mode | kind.masks;
    for (bit, condition) in
        [(psr::T, has(sctlr::TE)), (psr::E, has(sctlr::EE)), (psr::PAN, !has(sctlr::SPAN))]
    {
        state |= if condition { bit } else { 0 };
    }
    vcpu.set_general(kind.link, pc.wrapping_add(after) & 0xffff_ffff);
    vcpu.set_system(kind.saved, before);
    vcpu.set_pc(base.wrapping_add(kind.vector) & 0xffff_ffff);
    vcpu.set_state(state);
}
