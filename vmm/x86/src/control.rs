//! Control registers, for a back end whose guest exits on them: the accesses, and what a processor
//! checks and changes when they are written (APM vol. 2, section 3.1; Intel SDM vol. 3, section
//! 2.5, where it says more).
//!
//! Only a back end that translates in software has such exits (`CR8` excepted). It walks tables of
//! three or four levels; a guest that turns on 2-level paging ends.

use hw_x86::cpuid::{extended_b, extended_c, features_c, features_d, leaf};
use hw_x86::msr::efer;
use hw_x86::paging::{cr0, cr4};

use crate::cpuid::CpuidTable;
use crate::registers::{Gpr, Reg};
use crate::vcpu::X86Vcpu;
use crate::walk::{has_long_code, is_64_bit};

/// An access to a control register, or an `INVLPG`: decoded, its memory operand read, nothing
/// changed yet.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ControlAccess {
    /// `MOV` from a control register.
    Read {
        /// Number of the control register.
        control: u8,
        /// Destination.
        register: Gpr,
    },
    /// `MOV` to a control register.
    Write {
        /// Number of the control register.
        control: u8,
        /// Source.
        register: Gpr,
    },
    /// `LMSW` with this operand.
    LoadStatusWord(u16),
    /// `CLTS`.
    ClearTaskSwitched,
    /// `INVLPG` of this linear address.
    InvalidatePage(u64),
}

/// A decoded access.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct DecodedControl {
    /// The access.
    pub access: ControlAccess,
    /// Address of the next instruction.
    pub next: u64,
}

/// Reason for not writing a control register.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Refusal {
    /// The processor raises `#GP(0)`.
    Protection,
    /// The guest turns on 2-level paging, which the back end does not have.
    TwoLevelPaging,
}

/// `CR0` bits that exist; the processor ignores writes of the others in the low half.
const CR0_BITS: u64 = cr0::PE
    | cr0::MP
    | cr0::EM
    | cr0::TS
    | cr0::ET
    | cr0::NE
    | cr0::WP
    | cr0::AM
    | cr0::NW
    | cr0::CD
    | cr0::PG;
/// `CR0` bits that `LMSW` writes.
const STATUS_WORD: u64 = cr0::PE | cr0::MP | cr0::EM | cr0::TS;
/// `CR3` bit 63 with `CR4.PCIDE`: keep the translations of the PCID. It is not stored.
const CR3_KEEP: u64 = 1 << 63;
/// `CR3`: the PCID.
const CR3_PCID: u64 = 0xfff;

/// `CR4` bits by the feature that permits them: leaf of `CPUID`, index of the result, bit.
const CR4_FEATURES: [(u64, u32, usize, u32); 16] = [
    (cr4::VME | cr4::PVI, leaf::FEATURES, 3, features_d::VME),
    (cr4::TSD, leaf::FEATURES, 3, features_d::TSC),
    (cr4::DE, leaf::FEATURES, 3, features_d::DE),
    (cr4::PSE, leaf::FEATURES, 3, features_d::PSE),
    (cr4::PAE, leaf::FEATURES, 3, features_d::PAE),
    (cr4::MCE, leaf::FEATURES, 3, features_d::MCE),
    (cr4::PGE, leaf::FEATURES, 3, features_d::PGE),
    (cr4::OSFXSR, leaf::FEATURES, 3, features_d::FXSR),
    (cr4::OSXMMEXCPT, leaf::FEATURES, 3, features_d::SSE),
    (cr4::PCIDE, leaf::FEATURES, 2, features_c::PCID),
    (cr4::OSXSAVE, leaf::FEATURES, 2, features_c::XSAVE),
    (cr4::FSGSBASE, leaf::EXTENDED_FEATURES, 1, extended_b::FSGSBASE),
    (cr4::SMEP, leaf::EXTENDED_FEATURES, 1, extended_b::SMEP),
    (cr4::SMAP, leaf::EXTENDED_FEATURES, 1, extended_b::SMAP),
    (cr4::UMIP, leaf::EXTENDED_FEATURES, 2, extended_c::UMIP),
    (cr4::PKE, leaf::EXTENDED_FEATURES, 2, extended_c::PKU),
];

/// Returns the `CR4` bits that the guest may set.
pub(crate) fn allowed_cr4(cpuid: &CpuidTable) -> u64 {
    let offered = |&&(_, number, index, bit): &&(u64, u32, usize, u32)| {
        cpuid.lookup(number, 0).0[index] & bit != 0
    };
    CR4_FEATURES.iter().filter(offered).fold(cr4::PCE, |bits, feature| bits | feature.0)
}

/// The control registers that depend on each other. A write returns the new values of all.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(crate) struct ControlRegisters {
    pub cr0: u64,
    pub cr3: u64,
    pub cr4: u64,
    pub efer: u64,
    /// The code segment is a 64-bit one (`CS.L`, also before long mode).
    pub long_code: bool,
}

impl ControlRegisters {
    /// Reads the registers of a vCPU.
    pub(crate) fn of(vcpu: &mut impl X86Vcpu) -> Self {
        Self {
            cr0: vcpu.get(Reg::Cr0),
            cr3: vcpu.get(Reg::Cr3),
            cr4: vcpu.get(Reg::Cr4),
            efer: vcpu.get(Reg::Efer),
            long_code: has_long_code(vcpu),
        }
    }

    /// Sets the registers that differ from `old`.
    pub(crate) fn store(self, old: Self, vcpu: &mut impl X86Vcpu) {
        let pairs = [
            (Reg::Cr0, self.cr0, old.cr0),
            (Reg::Cr3, self.cr3, old.cr3),
            (Reg::Cr4, self.cr4, old.cr4),
            (Reg::Efer, self.efer, old.efer),
        ];
        for (register, new, _) in pairs.into_iter().filter(|(_, new, old)| new != old) {
            vcpu.set(register, new);
        }
    }

    /// Writes `CR0`. Long mode becomes active and inactive with paging.
    pub(crate) fn write_cr0(self, value: u64) -> Result<Self, Refusal> {
        let has = |bit| value & bit != 0;
        let starts = has(cr0::PG) && self.cr0 & cr0::PG == 0;
        let stops = !has(cr0::PG) && self.cr0 & cr0::PG != 0;
        let long = self.efer & efer::LME != 0;
        let refused = value >> 32 != 0
            || has(cr0::PG) && !has(cr0::PE)
            || has(cr0::NW) && !has(cr0::CD)
            || starts && long && (self.cr4 & cr4::PAE == 0 || self.long_code)
            || stops && (self.is_64_bit() || self.cr4 & cr4::PCIDE != 0);
        if refused {
            return Err(Refusal::Protection);
        }
        let efer = match (starts, stops) {
            (true, _) if long => self.efer | efer::LMA,
            (_, true) => self.efer & !efer::LMA,
            _ => self.efer,
        };
        Self { cr0: value & CR0_BITS | cr0::ET, efer, ..self }.with_walkable_tables()
    }

    /// Loads the low bits of `CR0` (`LMSW`), which can set `PE` but not clear it.
    pub(crate) fn load_status_word(self, word: u16) -> Result<Self, Refusal> {
        let bits = u64::from(word) & STATUS_WORD | self.cr0 & cr0::PE;
        self.write_cr0(self.cr0 & !STATUS_WORD | bits)
    }

    /// Clears `CR0.TS` (`CLTS`).
    pub(crate) fn clear_task_switched(self) -> Self {
        Self { cr0: self.cr0 & !cr0::TS, ..self }
    }

    /// Writes `CR3`. `physical_mask`: the bits of a physical address.
    pub(crate) fn write_cr3(self, value: u64, physical_mask: u64) -> Result<Self, Refusal> {
        let keep = if self.cr4 & cr4::PCIDE != 0 { CR3_KEEP } else { 0 };
        let value = value & !keep;
        if value & !physical_mask != 0 {
            return Err(Refusal::Protection);
        }
        Ok(Self { cr3: value, ..self })
    }

    /// Writes `CR4`. `allowed`: see [`allowed_cr4`].
    pub(crate) fn write_cr4(self, value: u64, allowed: u64) -> Result<Self, Refusal> {
        let changed = self.cr4 ^ value;
        let long = self.efer & efer::LMA != 0;
        let sets_pcid = changed & value & cr4::PCIDE != 0;
        let refused = value & !allowed != 0
            || long && value & cr4::PAE == 0
            || sets_pcid && (!long || self.cr3 & CR3_PCID != 0);
        if refused {
            return Err(Refusal::Protection);
        }
        Self { cr4: value, ..self }.with_walkable_tables()
    }

    /// True if the vCPU runs 64-bit code.
    fn is_64_bit(self) -> bool {
        self.efer & efer::LMA != 0 && self.long_code
    }

    fn with_walkable_tables(self) -> Result<Self, Refusal> {
        let two_levels = self.cr0 & cr0::PG != 0 && self.cr4 & cr4::PAE == 0;
        if two_levels { Err(Refusal::TwoLevelPaging) } else { Ok(self) }
    }
}

/// Bits of a control register that `MOV` transfers: 32 outside of 64-bit mode.
pub(crate) fn operand_mask(vcpu: &mut impl X86Vcpu) -> u64 {
    if is_64_bit(vcpu) { u64::MAX } else { u32::MAX.into() }
}

#[cfg(test)]
mod tests;
