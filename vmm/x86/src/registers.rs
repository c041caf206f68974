//! The registers of an x86 vCPU: their names, their groups, and their values as one type.
//!
//! A group is what a back end transfers at once. Code that sets up or prints a vCPU uses
//! [`Registers`] with [`X86Vcpu::load`] and [`X86Vcpu::store`]; exit handlers read and write single
//! registers.

use core::ops::{BitOr, Index, IndexMut};

use hw_x86::paging::cr0;

use crate::vcpu::X86Vcpu;

pub use hw_x86::vmcb::VmcbSegment as Segment;

/// A group of registers.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u8)]
pub enum Group {
    /// General registers, the stack pointer included.
    General,
    /// Instruction pointer, flags, interrupt shadow.
    Ip,
    /// Control registers, `EFER`, privilege level.
    Control,
    /// MSRs of system calls, and `PAT`.
    Msrs,
    /// Debug registers.
    Debug,
    /// Offset of the time-stamp counter.
    Tsc,
    /// Enabled extended state.
    Xcr0,
    /// The code segment.
    Code,
    /// All other segments and tables.
    Segments,
}

/// A set of groups.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Groups(u16);

impl Groups {
    /// The groups that INIT sets: all but the MSRs, the TSC offset and `XCR0`.
    pub const INIT: Self = Self::of(&[
        Group::General,
        Group::Ip,
        Group::Control,
        Group::Debug,
        Group::Code,
        Group::Segments,
    ]);
    /// The groups that a boot protocol sets: those of INIT, and the MSRs.
    pub const BOOT: Self = Self(Self::INIT.0 | Self::of(&[Group::Msrs]).0);

    /// The set of these groups.
    pub const fn of(groups: &[Group]) -> Self {
        let (mut set, mut at) = (0, 0);
        while at < groups.len() {
            set |= 1 << groups[at] as u8;
            at += 1;
        }
        Self(set)
    }

    /// True if the set contains the group.
    pub const fn contains(self, group: Group) -> bool {
        self.0 & 1 << group as u8 != 0
    }

    /// The set without this group.
    pub const fn without(self, group: Group) -> Self {
        Self(self.0 & !(1 << group as u8))
    }
}

impl BitOr for Groups {
    type Output = Self;

    fn bitor(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }
}

/// General registers, numbered as instructions encode them.
#[allow(missing_docs, reason = "the manual's names")]
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u8)]
pub enum Gpr {
    Rax = 0,
    Rcx = 1,
    Rdx = 2,
    Rbx = 3,
    Rsp = 4,
    Rbp = 5,
    Rsi = 6,
    Rdi = 7,
    R8 = 8,
    R9 = 9,
    R10 = 10,
    R11 = 11,
    R12 = 12,
    R13 = 13,
    R14 = 14,
    R15 = 15,
}

impl Gpr {
    /// All of them, by encoding.
    pub const ALL: [Self; 16] = [
        Self::Rax,
        Self::Rcx,
        Self::Rdx,
        Self::Rbx,
        Self::Rsp,
        Self::Rbp,
        Self::Rsi,
        Self::Rdi,
        Self::R8,
        Self::R9,
        Self::R10,
        Self::R11,
        Self::R12,
        Self::R13,
        Self::R14,
        Self::R15,
    ];

    /// Register with this encoding; the low four bits are used.
    pub const fn from_code(code: u8) -> Self {
        Self::ALL[(code & 15) as usize]
    }
}

/// Registers other than the general and the segment registers.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Reg {
    /// Current privilege level. The first, because a back end may keep the others differently at
    /// different levels.
    Cpl,
    /// Instruction pointer.
    Rip,
    /// Flags.
    Rflags,
    /// Bit 0: interrupt shadow (`STI`, `MOV SS`).
    InterruptShadow,
    /// Control register 0.
    Cr0,
    /// Page-fault address.
    Cr2,
    /// Page-table root.
    Cr3,
    /// Control register 4.
    Cr4,
    /// Extended features; `SVME` reads as 0 and is not written.
    Efer,
    /// `STAR`.
    Star,
    /// `LSTAR`.
    Lstar,
    /// `CSTAR`.
    Cstar,
    /// `SFMASK`.
    Sfmask,
    /// `KernelGSbase`.
    KernelGsBase,
    /// `SYSENTER_CS`.
    SysenterCs,
    /// `SYSENTER_ESP`.
    SysenterEsp,
    /// `SYSENTER_EIP`.
    SysenterEip,
    /// `PAT`.
    Pat,
    /// Debug status.
    Dr6,
    /// Debug control.
    Dr7,
    /// Added to the host's time-stamp counter to give the guest's.
    TscOffset,
    /// Enabled extended state.
    Xcr0,
}

impl Reg {
    /// All of them, in order.
    pub const ALL: [Self; 22] = [
        Self::Cpl,
        Self::Rip,
        Self::Rflags,
        Self::InterruptShadow,
        Self::Cr0,
        Self::Cr2,
        Self::Cr3,
        Self::Cr4,
        Self::Efer,
        Self::Star,
        Self::Lstar,
        Self::Cstar,
        Self::Sfmask,
        Self::KernelGsBase,
        Self::SysenterCs,
        Self::SysenterEsp,
        Self::SysenterEip,
        Self::Pat,
        Self::Dr6,
        Self::Dr7,
        Self::TscOffset,
        Self::Xcr0,
    ];

    /// Group of the register.
    #[inline(always)]
    pub const fn group(self) -> Group {
        match self {
            Self::Rip | Self::Rflags | Self::InterruptShadow => Group::Ip,
            Self::Cpl | Self::Cr0 | Self::Cr2 | Self::Cr3 | Self::Cr4 | Self::Efer => {
                Group::Control
            }
            Self::Star
            | Self::Lstar
            | Self::Cstar
            | Self::Sfmask
            | Self::KernelGsBase
            | Self::SysenterCs
            | Self::SysenterEsp
            | Self::SysenterEip
            | Self::Pat => Group::Msrs,
            Self::Dr6 | Self::Dr7 => Group::Debug,
            Self::TscOffset => Group::Tsc,
            Self::Xcr0 => Group::Xcr0,
        }
    }
}

/// Segment and table registers; the first six numbered as instructions encode them.
#[allow(missing_docs, reason = "the manual's names")]
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u8)]
pub enum Seg {
    Es = 0,
    Cs = 1,
    Ss = 2,
    Ds = 3,
    Fs = 4,
    Gs = 5,
    Gdtr = 6,
    Ldtr = 7,
    Idtr = 8,
    Tr = 9,
}

impl Seg {
    /// All of them, in order.
    pub const ALL: [Self; 10] = [
        Self::Es,
        Self::Cs,
        Self::Ss,
        Self::Ds,
        Self::Fs,
        Self::Gs,
        Self::Gdtr,
        Self::Ldtr,
        Self::Idtr,
        Self::Tr,
    ];

    /// Group of the segment.
    #[inline(always)]
    pub const fn group(self) -> Group {
        match self {
            Self::Cs => Group::Code,
            _ => Group::Segments,
        }
    }
}

/// Values of the registers, indexed by name.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Registers {
    general: [u64; Gpr::ALL.len()],
    other: [u64; Reg::ALL.len()],
    segments: [Segment; Seg::ALL.len()],
}

impl Registers {
    /// State after INIT (AMD APM vol. 2, table 14-1): real mode at linear address `page << 12`.
    /// `signature`: family, model and stepping. The MSRs have their values after power-on.
    pub fn reset(page: u8, signature: u32) -> Self {
        const DATA: u16 = 0x93;
        const CODE: u16 = 0x9b;
        const LDT: u16 = 0x82;
        const BUSY_TSS: u16 = 0x8b;
        let segment = |attrib| Segment { selector: 0, attrib, limit: 0xffff, base: 0 };
        let mut registers = Self::default();
        for data in [Seg::Es, Seg::Ss, Seg::Ds, Seg::Fs, Seg::Gs] {
            registers[data] = segment(DATA);
        }
        let (selector, base) = (u16::from(page) << 8, u64::from(page) << 12);
        registers[Seg::Cs] = Segment { selector, base, ..segment(CODE) };
        registers[Seg::Gdtr] = segment(0);
        registers[Seg::Idtr] = segment(0);
        registers[Seg::Ldtr] = segment(LDT);
        registers[Seg::Tr] = segment(BUSY_TSS);
        registers[Gpr::Rdx] = signature.into();
        registers[Reg::Rflags] = 2;
        registers[Reg::Cr0] = cr0::CD | cr0::NW | cr0::ET;
        registers[Reg::Dr6] = 0xffff_0ff0;
        registers[Reg::Dr7] = 0x400;
        // AMD APM vol. 2, section 7.8.
        registers[Reg::Pat] = 0x0007_0406_0007_0406;
        registers
    }
}

impl Index<Gpr> for Registers {
    type Output = u64;

    fn index(&self, register: Gpr) -> &u64 {
        &self.general[register as usize]
    }
}

impl IndexMut<Gpr> for Registers {
    fn index_mut(&mut self, register: Gpr) -> &mut u64 {
        &mut self.general[register as usize]
    }
}

impl Index<Reg> for Registers {
    type Output = u64;

    fn index(&self, register: Reg) -> &u64 {
        &self.other[register as usize]
    }
}

impl IndexMut<Reg> for Registers {
    fn index_mut(&mut self, register: Reg) -> &mut u64 {
        &mut self.other[register as usize]
    }
}

impl Index<Seg> for Registers {
    type Output = Segment;

    fn index(&self, segment: Seg) -> &Segment {
        &self.segments[segment as usize]
    }
}

impl IndexMut<Seg> for Registers {
    fn index_mut(&mut self, segment: Seg) -> &mut Segment {
        &mut self.segments[segment as usize]
    }
}

/// Reads the registers of these groups one by one; all others are 0.
pub fn load_each(vcpu: &mut impl X86Vcpu, groups: Groups) -> Registers {
    let mut registers = Registers::default();
    if groups.contains(Group::General) {
        for register in Gpr::ALL {
            registers[register] = vcpu.gpr(register);
        }
    }
    for register in Reg::ALL {
        if groups.contains(register.group()) {
            registers[register] = vcpu.get(register);
        }
    }
    for segment in Seg::ALL {
        if groups.contains(segment.group()) {
            registers[segment] = vcpu.segment(segment);
        }
    }
    registers
}

/// Sets the registers of these groups one by one.
pub fn store_each(vcpu: &mut impl X86Vcpu, registers: &Registers, groups: Groups) {
    if groups.contains(Group::General) {
        for register in Gpr::ALL {
            vcpu.set_gpr(register, registers[register]);
        }
    }
    for register in Reg::ALL {
        if groups.contains(register.group()) {
            vcpu.set(register, registers[register]);
        }
    }
    for segment in Seg::ALL {
        if groups.contains(segment.group()) {
            vcpu.set_segment(segment, registers[segment]);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::ScriptedVcpu;

    #[test]
    fn names_are_in_order() {
        assert!((0..16).all(|code| Gpr::from_code(code) as u8 == code));
        assert!(Reg::ALL.iter().enumerate().all(|(at, register)| *register as usize == at));
        assert!(Seg::ALL.iter().enumerate().all(|(at, segment)| *segment as usize == at));
    }

    #[test]
    fn only_the_groups_are_transferred() {
        let mut registers = Registers::reset(3, 0x800f12);
        registers[Reg::TscOffset] = 5;
        let mut vcpu = ScriptedVcpu::new();
        vcpu.set(Reg::Star, 7);
        vcpu.store(&registers, Groups::INIT);
        assert_eq!((vcpu.gpr(Gpr::Rdx), vcpu.segment(Seg::Cs).base), (0x800f12, 0x3000));
        assert_eq!((vcpu.get(Reg::Star), vcpu.get(Reg::TscOffset)), (7, 0));
        let msrs = Groups::of(&[Group::Msrs]);
        let found = vcpu.load(msrs);
        assert_eq!((found[Reg::Star], found[Gpr::Rdx], found[Reg::Dr7]), (7, 0, 0));
        assert_eq!(Groups::INIT | msrs, Groups::BOOT);
        assert_eq!(Groups::BOOT.without(Group::Msrs), Groups::INIT);
        vcpu.store(&registers, Groups::BOOT);
        assert_eq!((vcpu.get(Reg::Star), vcpu.get(Reg::Pat)), (0, 0x0007_0406_0007_0406));
    }
}
