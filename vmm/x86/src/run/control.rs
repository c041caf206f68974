//! Exits of instructions that access control registers or invalidate a page.

use vmm_vcpu::{Flow, Outcome, StopReason};

use super::Cpu;
use super::exception::{PROTECTION, UNDEFINED, retire};
use crate::control::{
    ControlAccess, ControlRegisters, DecodedControl, Refusal, allowed_cr4, operand_mask,
};
use crate::msr::is_canonical;
use crate::platform::{PcPlatform, Unknown};
use crate::registers::{Gpr, Reg};
use crate::vcpu::X86Vcpu;

/// Result of an access that does not complete.
enum Failed {
    /// `#GP(0)`.
    Protection,
    /// `#UD`.
    Undefined,
    /// The guest turned on 2-level paging.
    TwoLevelPaging,
}

impl From<Refusal> for Failed {
    fn from(refusal: Refusal) -> Self {
        match refusal {
            Refusal::Protection => Self::Protection,
            Refusal::TwoLevelPaging => Self::TwoLevelPaging,
        }
    }
}

impl Cpu {
    /// Emulates the current instruction: `MOV` to and from a control register, `LMSW`, `SMSW`,
    /// `CLTS` or `INVLPG`. Its bytes count, not the exit: the guest may have changed them, and each
    /// of these instructions is checked here.
    #[cold]
    pub(super) fn control<V: X86Vcpu, P: PcPlatform>(
        &mut self,
        vcpu: &mut V,
        platform: &mut P,
    ) -> Flow {
        let DecodedControl { access, next } = match platform.decode_control(self.index, vcpu) {
            Ok(decoded) => decoded,
            Err(emulated) => {
                self.emulated(vcpu, emulated);
                return Ok(());
            }
        };
        match self.access_control(vcpu, platform, access) {
            Ok(()) => retire(vcpu, next),
            Err(Failed::Protection) => self.raise(vcpu, PROTECTION),
            Err(Failed::Undefined) => self.raise(vcpu, UNDEFINED),
            Err(Failed::TwoLevelPaging) => {
                let rip = vcpu.get(Reg::Rip);
                let why = "2-level paging in a VM without nested paging (PAE or long mode needed)";
                platform.unknown(Unknown::Other(why, rip));
                return Err(StopReason::End(Outcome::TripleFault));
            }
        }
        Ok(())
    }

    fn access_control<V: X86Vcpu, P: PcPlatform>(
        &mut self,
        vcpu: &mut V,
        platform: &mut P,
        access: ControlAccess,
    ) -> Result<(), Failed> {
        let old = ControlRegisters::of(vcpu);
        match access {
            ControlAccess::Read { control, register } => {
                self.read_control(vcpu, platform, control, register)?;
            }
            ControlAccess::Write { control, register } => {
                let value = vcpu.gpr(register) & operand_mask(vcpu);
                self.write_control(vcpu, platform, control, value)?;
            }
            ControlAccess::LoadStatusWord(word) => old.load_status_word(word)?.store(old, vcpu),
            ControlAccess::ClearTaskSwitched => old.clear_task_switched().store(old, vcpu),
            // The processor ignores an address without a translation.
            ControlAccess::InvalidatePage(address) if !is_canonical(address) => {}
            ControlAccess::InvalidatePage(address) => vcpu.invalidate(address),
        }
        Ok(())
    }

    fn read_control<V: X86Vcpu, P: PcPlatform>(
        &mut self,
        vcpu: &mut V,
        platform: &mut P,
        control: u8,
        register: Gpr,
    ) -> Result<(), Failed> {
        let value = match control {
            0 => vcpu.get(Reg::Cr0),
            2 => vcpu.get(Reg::Cr2),
            3 => vcpu.get(Reg::Cr3),
            4 => vcpu.get(Reg::Cr4),
            8 => platform.cr8(self.index).into(),
            _ => return Err(Failed::Undefined),
        };
        let mask = operand_mask(vcpu);
        vcpu.set_gpr(register, value & mask);
        Ok(())
    }

    fn write_control<V: X86Vcpu, P: PcPlatform>(
        &mut self,
        vcpu: &mut V,
        platform: &mut P,
        control: u8,
        value: u64,
    ) -> Result<(), Failed> {
        let old = ControlRegisters::of(vcpu);
        match control {
            0 => old.write_cr0(value)?.store(old, vcpu),
            2 => vcpu.set(Reg::Cr2, value),
            3 => {
                old.write_cr3(value, self.msrs.physical_mask)?.store(old, vcpu);
                // Also a load of the same value drops translations.
                vcpu.flush_tlb();
            }
            4 => old.write_cr4(value, allowed_cr4(platform.cpuid()))?.store(old, vcpu),
            8 if value > 15 => return Err(Failed::Protection),
            8 => {
                platform.set_cr8(self.index, value as u8);
                self.needs_service = true;
            }
            _ => return Err(Failed::Undefined),
        }
        Ok(())
    }
}
