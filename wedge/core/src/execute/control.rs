//! Control and debug registers, MSRs, and flushes of translations.

use hw_x86::msr::{CSTAR, FS_BASE, GS_BASE, KERNEL_GS_BASE, LSTAR, SFMASK, STAR};
use hw_x86::paging::{cr0, cr4};

use super::{Context, Result};
use crate::cpu::{VirtualCpu, is_canonical};
use crate::decode::{Address, Op, Operand};
use crate::{Exit, Flush, Host, Outcome, UNDEFINED, protection};

/// `CR3` bit 63: keep cached translations of the new address space.
const KEEP: u64 = 1 << 63;
/// `CR3`: root page table and PCID.
const CR3_VALID: u64 = 0x000f_ffff_ffff_ffff;
/// Supported bits of control register 4.
const CR4_VALID: u64 = cr4::TSD
    | cr4::PSE
    | cr4::PAE
    | cr4::MCE
    | cr4::PGE
    | cr4::PCE
    | cr4::OSFXSR
    | cr4::OSXMMEXCPT
    | cr4::FSGSBASE
    | cr4::PCIDE
    | cr4::OSXSAVE
    // No effect in 64-bit mode, or without debug registers.
    | cr4::VME
    | cr4::PVI
    | cr4::DE;

impl VirtualCpu {
    pub(super) fn execute_control<H: Host>(
        &mut self,
        context: &mut Context<'_, H>,
        op: Op,
    ) -> Result<Outcome> {
        match op {
            Op::ReadControl { control: 8, .. } | Op::WriteControl { control: 8, .. } => {
                let write = matches!(op, Op::WriteControl { .. });
                return Ok(Outcome::Exit(Exit::CrAccess { register: 8, write }));
            }
            Op::ReadControl { control, register } => {
                let value = match control {
                    0 => self.cr0,
                    2 => self.cr2,
                    3 => self.cr3,
                    4 => self.cr4,
                    _ => return Err(UNDEFINED.into()),
                };
                self.set(register, value);
            }
            Op::WriteControl { control, register } => {
                let value = self.get(register);
                match control {
                    0 => self.write_cr0(context.host, value)?,
                    2 => self.cr2 = value,
                    3 => self.write_cr3(context.host, value)?,
                    4 => self.write_cr4(context.host, value)?,
                    _ => return Err(UNDEFINED.into()),
                }
            }
            Op::ReadDebug { debug, register } => self.set(register, self.dr[alias(debug)]),
            Op::WriteDebug { debug, register } => self.write_debug(debug, self.get(register))?,
            Op::Rdmsr => {
                let Some(value) = self.own_msr(context.host) else {
                    return Ok(Outcome::Exit(Exit::Msr { write: false }));
                };
                self.set(0, value & 0xffff_ffff);
                self.set(2, value >> 32);
            }
            Op::Wrmsr => return self.write_msr(context.host),
            Op::Smsw(to) => {
                let memory = matches!(to, Operand::Memory(_));
                self.store(context, to, if memory { 2 } else { context.size }, self.cr0)?;
            }
            Op::Lmsw(from) => {
                let value = self.load(context, from, 2)?;
                // LMSW sets PE, but does not clear it.
                let low = value & 0xf | self.cr0 & cr0::PE;
                self.write_cr0(context.host, self.cr0 & !0xf | low)?;
            }
            Op::Clts => self.cr0 &= !cr0::TS,
            Op::Invlpg(at) => {
                let linear = self.address(context.host, at, context.length);
                context.host.flush(Flush::Page(linear));
            }
            Op::Invpcid { kind, descriptor } => self.invalidate(context, kind, descriptor)?,
            _ => return self.execute_descriptor(context, op),
        }
        Ok(Outcome::Next)
    }

    /// Emulates `INVPCID`.
    fn invalidate<H: Host>(
        &self,
        context: &mut Context<'_, H>,
        kind: u8,
        descriptor: Address,
    ) -> Result<()> {
        let at = self.address(context.host, descriptor, context.length);
        let pcid = self.read_value(context.memory, at, 8)?;
        let linear = self.read_value(context.memory, at.wrapping_add(8), 8)?;
        if pcid > 0xfff {
            return Err(protection(0).into());
        }
        let pcid = pcid as u16;
        context.host.flush(match self.get(kind) {
            0 if is_canonical(linear) => Flush::PageOf { pcid, linear },
            1 => Flush::Space(pcid),
            2 => Flush::All,
            3 => Flush::Spaces,
            _ => return Err(protection(0).into()),
        });
        Ok(())
    }

    fn write_cr0(&mut self, host: &mut impl Host, value: u64) -> Result<()> {
        let bad = value & cr0::NW != 0 && value & cr0::CD == 0
            || value >> 32 != 0
            // Leaving long mode is not supported.
            || value & (cr0::PG | cr0::PE) != cr0::PG | cr0::PE;
        if bad {
            return Err(protection(0).into());
        }
        let changed = self.cr0 ^ value;
        self.cr0 = value | cr0::ET;
        if changed & cr0::WP != 0 {
            host.flush(Flush::All);
        }
        Ok(())
    }

    fn write_cr3(&mut self, host: &mut impl Host, value: u64) -> Result<()> {
        let with_pcid = self.cr4 & cr4::PCIDE != 0;
        if value & !(CR3_VALID | if with_pcid { KEEP } else { 0 }) != 0 {
            return Err(protection(0).into());
        }
        self.cr3 = value & CR3_VALID;
        let root = if with_pcid { self.cr3 } else { self.cr3 & !0xfff };
        host.enter_space(root, value & KEEP != 0);
        Ok(())
    }

    fn write_cr4(&mut self, host: &mut impl Host, value: u64) -> Result<()> {
        let changed = self.cr4 ^ value;
        let bad = value & !CR4_VALID != 0
            || value & cr4::PAE == 0
            // APM vol. 2, section 5.5.1: PCIDE may be set only while the PCID is 0.
            || changed & value & cr4::PCIDE != 0 && self.cr3 & 0xfff != 0;
        if bad {
            return Err(protection(0).into());
        }
        self.cr4 = value;
        if changed & (cr4::PGE | cr4::PSE | cr4::PCIDE) != 0 {
            host.flush(Flush::All);
        }
        Ok(())
    }

    fn write_debug(&mut self, debug: u8, value: u64) -> Result<()> {
        let number = alias(debug);
        self.dr[number] = match number {
            6 | 7 if value >> 32 != 0 => return Err(protection(0).into()),
            6 => value & 0xe00f | 0xffff_0ff0,
            7 => value & 0xffff_27ff | 0x400,
            _ if !is_canonical(value) => return Err(protection(0).into()),
            _ => value,
        };
        Ok(())
    }

    /// Returns the value of an MSR that this model implements itself.
    fn own_msr(&self, host: &mut impl Host) -> Option<u64> {
        Some(match self.frame.gpr[1] as u32 {
            FS_BASE => host.fs_base(),
            GS_BASE => host.gs_base(),
            KERNEL_GS_BASE => self.kernel_gs_base,
            STAR => self.star,
            LSTAR => self.lstar,
            CSTAR => self.cstar,
            SFMASK => self.sfmask,
            _ => return None,
        })
    }

    fn write_msr(&mut self, host: &mut impl Host) -> Result<Outcome> {
        let value = self.frame.gpr[2] << 32 | self.frame.gpr[0] & 0xffff_ffff;
        let msr = self.frame.gpr[1] as u32;
        let address = matches!(msr, FS_BASE | GS_BASE | KERNEL_GS_BASE | LSTAR | CSTAR);
        if address && !is_canonical(value) {
            return Err(protection(0).into());
        }
        match msr {
            FS_BASE => host.set_fs_base(value),
            GS_BASE => host.set_gs_base(value),
            KERNEL_GS_BASE => self.kernel_gs_base = value,
            STAR => self.star = value,
            LSTAR => self.lstar = value,
            CSTAR => self.cstar = value,
            SFMASK => self.sfmask = value & 0xffff_ffff,
            _ => return Ok(Outcome::Exit(Exit::Msr { write: true })),
        }
        Ok(Outcome::Next)
    }
}

/// Maps debug registers 4 and 5 to 6 and 7.
fn alias(debug: u8) -> usize {
    match debug & 7 {
        4 => 6,
        5 => 7,
        other => other.into(),
    }
}
