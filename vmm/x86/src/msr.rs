//! Model-specific registers that exit to the VMM.
//!
//! Policy: registers that control a modelled feature have their effect; memory-type and probing
//! registers are storage with the values that firmware leaves; every other register is reported and
//! raises `#GP(0)`, which kernels handle when they probe. Performance counters read 0 and ignore
//! writes, which Linux takes for "no counters".

use hw_x86::cpuid::{amd_d, leaf};
use hw_x86::msr::{
    APIC_BASE, CSTAR, DEBUG_CTL, EFER, FS_BASE, GS_BASE, KERNEL_GS_BASE, LSTAR, MTRR_CAP,
    MTRR_DEF_TYPE, PAT, SFMASK, STAR, SYSENTER_CS, SYSENTER_EIP, SYSENTER_ESP, TSC, TSC_AUX,
    TSC_DEADLINE, VM_CR, VM_HSAVE_PA, X2APIC, efer, kvm, probe, vm_cr,
};
use hw_x86::paging::cr0;

use crate::platform::{PcPlatform, Unknown};
use crate::registers::{Reg, Seg};
use crate::run::Cpu;
use crate::vcpu::X86Vcpu;

/// Last MSR of the x2APIC range.
const X2APIC_LAST: u32 = X2APIC + 0xff;
/// Number of variable memory-type ranges.
const VARIABLE: usize = 8;
/// Memory types that exist, one bit each: UC, WC, WT, WP, WB; with bit 7 UC- (PAT only).
const TYPES: u8 = 1 << 0 | 1 << 1 | 1 << 4 | 1 << 5 | 1 << 6;
const TYPE_UC_MINUS: u8 = 1 << 7;
const WRITE_BACK: u64 = 6;
/// [`MTRR_DEF_TYPE`]: ranges are on.
const MTRR_ENABLE: u64 = 1 << 11;
/// [`MTRR_DEF_TYPE`]: fixed ranges are on. In a mask register bit 11 is "valid".
const MTRR_FIXED: u64 = 1 << 10;
/// [`probe::HWCR`]: the TSC counts at the rate of the highest power state.
const HWCR_TSC_RATE: u64 = 1 << 24;
/// [`probe::HWCR`]: bits that a kernel may switch without effect here: TLB cache, INVD as WBINVD,
/// flush filter, MCi_STATUS writable, instructions-retired counter.
const HWCR_WRITABLE: u64 = 1 << 3 | 1 << 4 | 1 << 6 | 1 << 8 | 1 << 18 | HWCR_TSC_RATE | 1 << 30;
/// [`probe::DE_CFG`]: `LFENCE` is dispatch-serialising.
const DE_CFG_LFENCE: u64 = 1 << 1;
/// [`probe::MISC_ENABLE`]: fast string operations.
const FAST_STRINGS: u64 = 1 << 0;
/// [`DEBUG_CTL`]: recording of the last branch (LBR), single steps of branches (BTF). Linux sets
/// BTF for a debugger's `PTRACE_SINGLEBLOCK`, and does not expect a fault.
const DEBUG_CTL_WRITABLE: u64 = 1 << 0 | 1 << 1;
/// A microcode revision that no kernel treats as outdated.
const PATCH: u64 = 0x0100_0065;

/// Registers that are storage.
#[derive(Clone, Debug)]
pub struct Msrs {
    /// Bits of a guest-physical address.
    pub(crate) physical_mask: u64,
    tsc_aux: u64,
    tsc_adjust: u64,
    misc_enable: u64,
    mcg_status: u64,
    /// Without effect.
    debug_ctl: u64,
    mtrr_default: u64,
    mtrr_fixed: [u64; 11],
    mtrr_variable: [u64; 2 * VARIABLE],
    hwcr: u64,
    de_cfg: u64,
    /// Address of the KVM clock structure and its enable bit.
    system_time: u64,
    clock_version: u32,
    wall_clock: u64,
}

impl Msrs {
    /// Values left by firmware: all memory write-back except 3 GiB to 4 GiB.
    pub fn new(physical_bits: u32) -> Self {
        let physical_mask = (1 << physical_bits.clamp(36, 52)) - 1;
        let mut mtrr_variable = [0; 2 * VARIABLE];
        mtrr_variable[0] = 0xc000_0000;
        mtrr_variable[1] = physical_mask & !0x3fff_ffff | MTRR_ENABLE;
        Self {
            physical_mask,
            tsc_aux: 0,
            tsc_adjust: 0,
            misc_enable: FAST_STRINGS,
            mcg_status: 0,
            debug_ctl: 0,
            mtrr_default: MTRR_ENABLE | MTRR_FIXED | WRITE_BACK,
            mtrr_fixed: [0x0606_0606_0606_0606; 11],
            mtrr_variable,
            hwcr: HWCR_TSC_RATE,
            de_cfg: DE_CFG_LFENCE,
            system_time: 0,
            clock_version: 0,
            wall_clock: 0,
        }
    }

    fn fixed_index(msr: u32) -> Option<usize> {
        Some(match msr {
            probe::MTRR_FIX_64K => 0,
            probe::MTRR_FIX_16K_80000 => 1,
            probe::MTRR_FIX_16K_A0000 => 2,
            probe::MTRR_FIX_4K..=probe::MTRR_FIX_4K_LAST => 3 + (msr - probe::MTRR_FIX_4K) as usize,
            _ => return None,
        })
    }

    fn variable_index(msr: u32) -> Option<usize> {
        let index = msr.checked_sub(probe::MTRR_VARIABLE)? as usize;
        (index < 2 * VARIABLE).then_some(index)
    }

    /// Reads storage and constants. `None` for any other register.
    fn read(&self, msr: u32) -> Option<u64> {
        if let Some(index) = Self::fixed_index(msr) {
            return Some(self.mtrr_fixed[index]);
        }
        if let Some(index) = Self::variable_index(msr) {
            return Some(self.mtrr_variable[index]);
        }
        Some(match msr {
            TSC_AUX => self.tsc_aux,
            probe::TSC_ADJUST => self.tsc_adjust,
            probe::MISC_ENABLE => self.misc_enable,
            // Variable ranges, fixed ranges, write combining.
            MTRR_CAP => VARIABLE as u64 | 1 << 8 | 1 << 10,
            MTRR_DEF_TYPE => self.mtrr_default,
            probe::HWCR => self.hwcr,
            probe::DE_CFG => self.de_cfg,
            probe::PATCH_LEVEL => PATCH,
            probe::MCG_STATUS => self.mcg_status,
            DEBUG_CTL => self.debug_ctl,
            VM_CR => vm_cr::LOCK | vm_cr::SVMDIS,
            kvm::SYSTEM_TIME => self.system_time,
            kvm::WALL_CLOCK => self.wall_clock,
            // No machine-check banks, SMM, power states or extensions.
            probe::MCG_CAP
            | probe::PLATFORM_ID
            | VM_HSAVE_PA
            | probe::EVENT_SELECT_0..=probe::COUNTER_3
            | probe::SYSCFG
            | probe::IORR_BASE_0..=probe::IORR_MASK_1
            | probe::TOP_MEM
            | probe::TOP_MEM2
            | probe::NB_CFG
            | probe::INT_PENDING
            | probe::PSTATE_LIMIT..=probe::PSTATE_STATUS
            | probe::SMM_ADDR
            | probe::SMM_MASK
            | probe::LS_CFG
            | probe::IC_CFG
            | probe::DC_CFG
            | probe::BU_CFG2 => 0,
            _ => return None,
        })
    }

    /// Writes storage. `None` for any other register or an invalid value.
    fn write(&mut self, msr: u32, value: u64) -> Option<()> {
        let store = |place: &mut u64, allowed: u64| {
            if value & !allowed != 0 {
                return None;
            }
            *place = value;
            Some(())
        };
        if let Some(index) = Self::fixed_index(msr) {
            let place = &mut self.mtrr_fixed[index];
            return if are_types(value, TYPES) { store(place, !0) } else { None };
        }
        if let Some(index) = Self::variable_index(msr) {
            let mask = index & 1 != 0;
            let low = if mask { MTRR_ENABLE } else { 0xff };
            if !mask && !is_type(value as u8, TYPES) {
                return None;
            }
            return store(&mut self.mtrr_variable[index], self.physical_mask & !0xfff | low);
        }
        match msr {
            TSC_AUX => store(&mut self.tsc_aux, u32::MAX.into()),
            probe::MISC_ENABLE => store(&mut self.misc_enable, !0),
            MTRR_DEF_TYPE if is_type(value as u8, TYPES) => {
                store(&mut self.mtrr_default, MTRR_ENABLE | MTRR_FIXED | 0xff)
            }
            probe::HWCR => store(&mut self.hwcr, HWCR_WRITABLE),
            probe::DE_CFG => {
                // The other bits are chicken bits of one CPU model, without effect here.
                self.de_cfg = value | DE_CFG_LFENCE;
                Some(())
            }
            probe::MCG_STATUS => store(&mut self.mcg_status, 7),
            DEBUG_CTL => store(&mut self.debug_ctl, DEBUG_CTL_WRITABLE),
            probe::PATCH_LEVEL
            | probe::PATCH_LOADER
            | probe::EVENT_SELECT_0..=probe::COUNTER_3
            | probe::SYSCFG
            | probe::NB_CFG
            | probe::INT_PENDING
            | probe::LS_CFG
            | probe::IC_CFG
            | probe::DC_CFG
            | probe::BU_CFG2 => Some(()),
            _ => None,
        }
    }
}

fn is_type(kind: u8, types: u8) -> bool {
    kind < 8 && types & 1 << kind != 0
}

/// Returns true if each byte is one of these memory types.
fn are_types(value: u64, types: u8) -> bool {
    value.to_le_bytes().iter().all(|&kind| is_type(kind, types))
}

/// Returns whether a register holds an address, which must be canonical (APM vol. 2, 5.3.1).
fn is_address(msr: u32) -> bool {
    matches!(msr, LSTAR | CSTAR | KERNEL_GS_BASE | SYSENTER_ESP | SYSENTER_EIP)
}

/// Maps registers that the back end holds.
fn held(msr: u32) -> Option<Reg> {
    Some(match msr {
        STAR => Reg::Star,
        LSTAR => Reg::Lstar,
        CSTAR => Reg::Cstar,
        SFMASK => Reg::Sfmask,
        KERNEL_GS_BASE => Reg::KernelGsBase,
        SYSENTER_CS => Reg::SysenterCs,
        SYSENTER_ESP => Reg::SysenterEsp,
        SYSENTER_EIP => Reg::SysenterEip,
        PAT => Reg::Pat,
        EFER => Reg::Efer,
        _ => return None,
    })
}

impl Cpu {
    /// Reads an MSR (`RDMSR`); `None` raises `#GP(0)`.
    pub(crate) fn read_msr<V: X86Vcpu, P: PcPlatform>(
        &mut self,
        vcpu: &mut V,
        platform: &mut P,
        msr: u32,
    ) -> Option<u64> {
        if is_apic(msr) {
            return platform.apic_read(self.index(), msr);
        }
        if let Some(register) = held(msr) {
            return Some(vcpu.get(register));
        }
        match msr {
            TSC => return Some(platform.counter().wrapping_add(vcpu.get(Reg::TscOffset))),
            FS_BASE => return Some(vcpu.segment(Seg::Fs).base),
            GS_BASE => return Some(vcpu.segment(Seg::Gs).base),
            kvm::EOI => return Some(self.eoi.get()),
            kvm::STEAL_TIME => return Some(self.steal.get()),
            _ => {}
        }
        let value = self.msrs.read(msr);
        if value.is_none() {
            platform.unknown(Unknown::MsrRead(msr));
        }
        value
    }

    /// Writes an MSR (`WRMSR`); `None` raises `#GP(0)`.
    pub(crate) fn write_msr<V: X86Vcpu, P: PcPlatform>(
        &mut self,
        vcpu: &mut V,
        platform: &mut P,
        msr: u32,
        value: u64,
    ) -> Option<()> {
        if is_apic(msr) {
            return platform.apic_write(self.index(), msr, value);
        }
        let done = match msr {
            EFER => write_efer(vcpu, platform, value),
            PAT if !are_types(value, TYPES | TYPE_UC_MINUS) => None,
            TSC => {
                let offset = value.wrapping_sub(platform.counter());
                self.set_tsc_offset(vcpu, platform, offset);
                Some(())
            }
            probe::TSC_ADJUST => {
                let delta = value.wrapping_sub(self.msrs.tsc_adjust);
                let offset = vcpu.get(Reg::TscOffset).wrapping_add(delta);
                self.set_tsc_offset(vcpu, platform, offset);
                Some(())
            }
            FS_BASE => set_base(vcpu, Seg::Fs, value),
            GS_BASE => set_base(vcpu, Seg::Gs, value),
            kvm::SYSTEM_TIME => {
                self.msrs.system_time = value;
                self.update_clock(vcpu, platform);
                Some(())
            }
            kvm::EOI => self.eoi.set(platform.memory(), value),
            kvm::STEAL_TIME => {
                let stolen = vcpu.stolen();
                let done = self.steal.set(platform.memory(), platform.clock(), value, stolen);
                // The record must be marked while the vCPU waits.
                vcpu.set_wait_exits(self.steal.is_on());
                done
            }
            kvm::WALL_CLOCK => {
                self.msrs.wall_clock = value;
                write_wall_clock(platform, value)
            }
            _ => match held(msr) {
                Some(_) if is_address(msr) && !is_canonical(value) => None,
                Some(register) => {
                    vcpu.set(register, value);
                    Some(())
                }
                None => self.msrs.write(msr, value),
            },
        };
        if done.is_none() {
            platform.unknown(Unknown::MsrWrite(msr, value));
        }
        done
    }

    /// Moves the guest's time-stamp counter and updates its dependants.
    fn set_tsc_offset<V: X86Vcpu, P: PcPlatform>(
        &mut self,
        vcpu: &mut V,
        platform: &mut P,
        offset: u64,
    ) {
        let before = vcpu.get(Reg::TscOffset);
        self.msrs.tsc_adjust = self.msrs.tsc_adjust.wrapping_add(offset.wrapping_sub(before));
        vcpu.set(Reg::TscOffset, offset);
        platform.tsc_written(self.index(), platform.counter().wrapping_add(offset));
        self.update_clock(vcpu, platform);
    }

    /// Writes the clock structure (`struct pvclock_vcpu_time_info` of Linux' documentation) if the
    /// guest has registered one. It stays valid until the guest moves its time-stamp counter.
    fn update_clock<V: X86Vcpu, P: PcPlatform>(&mut self, vcpu: &mut V, platform: &mut P) {
        const ENABLE: u64 = 1;
        const STABLE: u8 = 1;
        if self.msrs.system_time & ENABLE == 0 {
            return;
        }
        let address = self.msrs.system_time & !ENABLE;
        let host = platform.counter();
        let (factor, shift) = platform.clock().kvm_scale();
        let nanos = platform.clock().nanos(host);
        let tsc = host.wrapping_add(vcpu.get(Reg::TscOffset));
        let (unfinished, version) = next_versions(self.msrs.clock_version);
        self.msrs.clock_version = version;
        let mut raw = [0; 32];
        raw[0..4].copy_from_slice(&unfinished.to_le_bytes());
        raw[8..16].copy_from_slice(&tsc.to_le_bytes());
        raw[16..24].copy_from_slice(&nanos.to_le_bytes());
        raw[24..28].copy_from_slice(&factor.to_le_bytes());
        raw[28] = shift as u8;
        raw[29] = STABLE;
        let memory = platform.memory();
        let written = memory
            .write_slice(address, &raw)
            .and_then(|()| memory.write_slice(address, &version.to_le_bytes()));
        if written.is_err() {
            platform.unknown(Unknown::Other("clock structure outside memory", address));
        }
    }
}

/// Versions of a clock structure after `version`: odd while it is being written, even when
/// complete.
const fn next_versions(version: u32) -> (u32, u32) {
    (version.wrapping_add(1), version.wrapping_add(2))
}

fn is_apic(msr: u32) -> bool {
    matches!(msr, APIC_BASE | TSC_DEADLINE | X2APIC..=X2APIC_LAST)
}

fn set_base(vcpu: &mut impl X86Vcpu, segment: Seg, base: u64) -> Option<()> {
    if !is_canonical(base) {
        return None;
    }
    let mut value = vcpu.segment(segment);
    value.base = base;
    vcpu.set_segment(segment, value);
    Some(())
}

/// True if bits 63:47 are equal (48-bit linear addresses).
pub const fn is_canonical(address: u64) -> bool {
    (address as i64) << 16 >> 16 == address as i64
}

/// Writes EFER (APM vol. 2, section 3.1.7).
fn write_efer<V: X86Vcpu, P: PcPlatform>(vcpu: &mut V, platform: &P, value: u64) -> Option<()> {
    let (features, _) = platform.cpuid().lookup(leaf::AMD_FEATURES, 0);
    let mut allowed = efer::SCE | efer::LME | efer::LMA;
    if features[3] & amd_d::NX != 0 {
        allowed |= efer::NXE;
    }
    if features[3] & amd_d::FFXSR != 0 {
        allowed |= efer::FFXSR;
    }
    let old = vcpu.get(Reg::Efer);
    let paging = vcpu.get(Reg::Cr0) & cr0::PG != 0;
    if value & !allowed != 0 || paging && (value ^ old) & efer::LME != 0 {
        return None;
    }
    vcpu.set(Reg::Efer, value & !efer::LMA | old & efer::LMA);
    Some(())
}

/// Writes `struct pvclock_wall_clock`: the wall-clock time at VM time 0.
fn write_wall_clock<P: PcPlatform>(platform: &P, address: u64) -> Option<()> {
    let mut raw = [0; 12];
    raw[0] = 2; // a version: even means complete
    let start = platform.start_unix();
    raw[4..8].copy_from_slice(&(start.as_secs() as u32).to_le_bytes());
    raw[8..].copy_from_slice(&start.subsec_nanos().to_le_bytes());
    platform.memory().write_slice(address, &raw).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn single_steps_of_branches_are_storage() {
        let mut msrs = Msrs::new(40);
        assert_eq!(msrs.read(DEBUG_CTL), Some(0));
        for value in [2, 3, 0, 1] {
            assert_eq!(msrs.write(DEBUG_CTL, value), Some(()));
            assert_eq!(msrs.read(DEBUG_CTL), Some(value));
        }
        for value in [1 << 2, 1 << 6, 1 << 14, 1 << 63] {
            assert_eq!(msrs.write(DEBUG_CTL, value), None, "{value:#x}");
        }
        assert_eq!(msrs.read(DEBUG_CTL), Some(1));
    }

    /// A guest may request the structure any number of times.
    #[test]
    fn versions_of_the_clock_wrap() {
        assert_eq!(next_versions(0), (1, 2));
        assert_eq!(next_versions(u32::MAX - 1), (u32::MAX, 0));
    }
}
