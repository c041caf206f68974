//! Registers of a KVM vCPU.
//!
//! Each is named once, by the function that finds its place in KVM's structures.

use std::{io, ptr};

use hw_x86::msr::{
    CSTAR, KERNEL_GS_BASE, LSTAR, PAT, SFMASK, STAR, SYSENTER_CS, SYSENTER_EIP, SYSENTER_ESP,
};
use kvm_bindings::{Msrs, kvm_dtable, kvm_msr_entry, kvm_regs, kvm_segment, kvm_sregs, kvm_xcrs};
use kvm_ioctls::SyncReg;
use rustix::io::Errno;
use vmm_x86::registers::{Group, store_each};
use vmm_x86::{Event, Gpr, Groups, InterruptWindow, Reg, Registers, Seg, Segment, X86Vcpu};

use super::{KvmVcpu, Pending};
use crate::calls;

impl KvmVcpu<'_> {
    pub fn regs(&mut self) -> &mut kvm_regs {
        &mut self.fd.sync_regs_mut().regs
    }

    /// Returns the general registers for modification.
    pub fn change_regs(&mut self) -> &mut kvm_regs {
        self.complete();
        // The interruptibility of the guest must be determined again.
        self.fd.get_kvm_run().ready_for_interrupt_injection = 0;
        self.fd.set_sync_dirty_reg(SyncReg::Register);
        self.regs()
    }

    pub fn sregs(&mut self) -> kvm_sregs {
        if let Some(sregs) = self.sregs {
            return sregs;
        }
        let result = self.fd.get_sregs();
        let mut sregs = self.note(result).unwrap_or_default();
        // KVM injects an interrupt that is written back, even if it was cancelled in between.
        sregs.interrupt_bitmap = [0; 4];
        self.sregs = Some(sregs);
        sregs
    }

    pub fn change_sregs(&mut self, change: impl FnOnce(&mut kvm_sregs)) {
        self.complete();
        let mut sregs = self.sregs();
        change(&mut sregs);
        self.sregs = Some(sregs);
        // All together, because some are only valid with others.
        self.sregs_changed = true;
    }

    /// Writes the special registers to KVM if they have changed.
    pub fn put_sregs(&mut self) {
        if let (true, Some(sregs)) = (std::mem::take(&mut self.sregs_changed), self.sregs) {
            let result = self.fd.set_sregs(&sregs);
            self.note(result);
        }
    }

    pub fn msr(&mut self, index: u32) -> u64 {
        let mut one = [kvm_msr_entry { index, ..Default::default() }];
        let Ok(mut msrs) = Msrs::from_entries(&one) else { return 0 };
        let result = self.fd.get_msrs(&mut msrs);
        self.note(result);
        one.copy_from_slice(msrs.as_slice());
        one[0].data
    }

    /// Sets MSRs, each with its value, by one call of KVM.
    pub fn set_msrs(&mut self, values: &[(u32, u64)]) {
        let entry = |&(index, data)| kvm_msr_entry { index, data, ..Default::default() };
        let entries: Vec<_> = values.iter().map(entry).collect();
        let Ok(msrs) = Msrs::from_entries(&entries) else { return };
        // KVM stops at the first MSR or value that it refuses.
        let result = match self.fd.set_msrs(&msrs) {
            Ok(count) if count < entries.len() => Err(Errno::INVAL.into()),
            Ok(_) => Ok(()),
            Err(error) => Err(io::Error::from(error)),
        };
        self.note(result);
    }

    pub fn set_tsc_offset(&mut self, offset: u64) {
        self.tsc_offset = offset;
        let result = calls::set_tsc_offset(&self.fd, offset);
        self.note(result);
    }
}

/// Returns a general register.
fn gpr_slot(regs: &mut kvm_regs, register: Gpr) -> &mut u64 {
    match register {
        Gpr::Rax => &mut regs.rax,
        Gpr::Rcx => &mut regs.rcx,
        Gpr::Rdx => &mut regs.rdx,
        Gpr::Rbx => &mut regs.rbx,
        Gpr::Rsp => &mut regs.rsp,
        Gpr::Rbp => &mut regs.rbp,
        Gpr::Rsi => &mut regs.rsi,
        Gpr::Rdi => &mut regs.rdi,
        Gpr::R8 => &mut regs.r8,
        Gpr::R9 => &mut regs.r9,
        Gpr::R10 => &mut regs.r10,
        Gpr::R11 => &mut regs.r11,
        Gpr::R12 => &mut regs.r12,
        Gpr::R13 => &mut regs.r13,
        Gpr::R14 => &mut regs.r14,
        Gpr::R15 => &mut regs.r15,
    }
}

/// Returns a special register of the group [`Group::Control`].
fn sregs_slot(sregs: &mut kvm_sregs, register: Reg) -> Option<&mut u64> {
    Some(match register {
        Reg::Cr0 => &mut sregs.cr0,
        Reg::Cr2 => &mut sregs.cr2,
        Reg::Cr3 => &mut sregs.cr3,
        Reg::Cr4 => &mut sregs.cr4,
        Reg::Efer => &mut sregs.efer,
        _ => return None,
    })
}

/// Returns the MSR of a register.
fn msr_of(register: Reg) -> Option<u32> {
    Some(match register {
        Reg::Star => STAR,
        Reg::Lstar => LSTAR,
        Reg::Cstar => CSTAR,
        Reg::Sfmask => SFMASK,
        Reg::KernelGsBase => KERNEL_GS_BASE,
        Reg::SysenterCs => SYSENTER_CS,
        Reg::SysenterEsp => SYSENTER_ESP,
        Reg::SysenterEip => SYSENTER_EIP,
        Reg::Pat => PAT,
        _ => return None,
    })
}

/// Converts a segment to KVM's format. Attributes are those of a descriptor, without the limit bits
/// (AMD APM vol. 2, section 15.5).
fn to_kvm(segment: Segment) -> kvm_segment {
    let bits = |shift: u32, mask: u16| (segment.attrib >> shift & mask) as u8;
    kvm_segment {
        base: segment.base,
        limit: segment.limit,
        selector: segment.selector,
        type_: bits(0, 15),
        s: bits(4, 1),
        dpl: bits(5, 3),
        present: bits(7, 1),
        avl: bits(8, 1),
        l: bits(9, 1),
        db: bits(10, 1),
        g: bits(11, 1),
        unusable: 1 - bits(7, 1),
        padding: 0,
    }
}

fn from_kvm(segment: &kvm_segment) -> Segment {
    let parts = [
        (segment.type_, 0),
        (segment.s, 4),
        (segment.dpl, 5),
        (segment.present, 7),
        (segment.avl, 8),
        (segment.l, 9),
        (segment.db, 10),
        (segment.g, 11),
    ];
    Segment {
        selector: segment.selector,
        attrib: parts.iter().fold(0, |all, (part, shift)| all | u16::from(*part) << shift),
        limit: segment.limit,
        base: segment.base,
    }
}

/// A segment register or descriptor-table register.
enum SegmentSlot<'a> {
    Segment(&'a mut kvm_segment),
    Table(&'a mut kvm_dtable),
}

fn segment_slot(sregs: &mut kvm_sregs, segment: Seg) -> SegmentSlot<'_> {
    SegmentSlot::Segment(match segment {
        Seg::Es => &mut sregs.es,
        Seg::Cs => &mut sregs.cs,
        Seg::Ss => &mut sregs.ss,
        Seg::Ds => &mut sregs.ds,
        Seg::Fs => &mut sregs.fs,
        Seg::Gs => &mut sregs.gs,
        Seg::Ldtr => &mut sregs.ldt,
        Seg::Tr => &mut sregs.tr,
        Seg::Gdtr => return SegmentSlot::Table(&mut sregs.gdt),
        Seg::Idtr => return SegmentSlot::Table(&mut sregs.idt),
    })
}

impl X86Vcpu for KvmVcpu<'_> {
    fn gpr(&mut self, register: Gpr) -> u64 {
        *gpr_slot(self.regs(), register)
    }

    fn set_gpr(&mut self, register: Gpr, value: u64) {
        *gpr_slot(self.change_regs(), register) = value;
    }

    fn get(&mut self, register: Reg) -> u64 {
        match register {
            Reg::Rip => self.regs().rip,
            Reg::Rflags => self.regs().rflags,
            // KVM keeps the interrupt shadow and takes no interrupt in it.
            Reg::InterruptShadow => 0,
            Reg::Cpl => self.sregs().ss.dpl.into(),
            Reg::Dr6 | Reg::Dr7 => {
                let result = self.fd.get_debug_regs();
                let debug = self.note(result).unwrap_or_default();
                if register == Reg::Dr6 { debug.dr6 } else { debug.dr7 }
            }
            Reg::TscOffset => self.tsc_offset,
            Reg::Xcr0 => {
                let result = self.fd.get_xcrs();
                self.note(result).map_or(0, |xcrs| xcrs.xcrs[0].value)
            }
            _ => match msr_of(register) {
                Some(index) => self.msr(index),
                None => sregs_slot(&mut self.sregs(), register).map_or(0, |found| *found),
            },
        }
    }

    fn set(&mut self, register: Reg, value: u64) {
        match register {
            // After a `HLT`, `RIP` already has this value.
            Reg::Rip if self.regs().rip == value => {}
            Reg::Rip => self.change_regs().rip = value,
            Reg::Rflags => self.change_regs().rflags = value,
            Reg::InterruptShadow => {}
            Reg::Cpl => self.change_sregs(|sregs| sregs.ss.dpl = value as u8 & 3),
            Reg::Dr6 | Reg::Dr7 => {
                let result = self.fd.get_debug_regs().and_then(|mut debug| {
                    *(if register == Reg::Dr6 { &mut debug.dr6 } else { &mut debug.dr7 }) = value;
                    self.fd.set_debug_regs(&debug)
                });
                self.note(result);
            }
            Reg::TscOffset => self.set_tsc_offset(value),
            Reg::Xcr0 => {
                let mut xcrs = kvm_xcrs { nr_xcrs: 1, ..Default::default() };
                xcrs.xcrs[0].value = value;
                let result = self.fd.set_xcrs(&xcrs);
                self.note(result);
            }
            _ => match msr_of(register) {
                Some(index) => self.set_msrs(&[(index, value)]),
                None => self.change_sregs(|sregs| {
                    if let Some(place) = sregs_slot(sregs, register) {
                        *place = value;
                    }
                }),
            },
        }
    }

    fn segment(&mut self, segment: Seg) -> Segment {
        match segment_slot(&mut self.sregs(), segment) {
            SegmentSlot::Segment(found) => from_kvm(found),
            SegmentSlot::Table(table) => {
                Segment { base: table.base, limit: table.limit.into(), ..Segment::default() }
            }
        }
    }

    fn set_segment(&mut self, segment: Seg, value: Segment) {
        self.change_sregs(|sregs| match segment_slot(sregs, segment) {
            SegmentSlot::Segment(place) => *place = to_kvm(value),
            SegmentSlot::Table(table) => {
                table.base = value.base;
                table.limit = value.limit as u16;
            }
        });
    }

    fn store(&mut self, registers: &Registers, groups: Groups) {
        if groups.contains(Group::Msrs) {
            let msr = |register| Some((msr_of(register)?, registers[register]));
            let msrs: Vec<_> = Reg::ALL.into_iter().filter_map(msr).collect();
            self.set_msrs(&msrs);
        }
        store_each(self, registers, groups.without(Group::Msrs));
        if groups.contains(Group::Ip) {
            // KVM keeps the interrupt shadow of this group with the events.
            self.drop_events();
        }
    }

    fn next_rip(&mut self) -> u64 {
        self.next_rip
    }

    fn instruction_bytes(&mut self) -> ([u8; 16], usize) {
        ([0; 16], 0)
    }

    fn complete_access(&mut self, value: Option<u64>) {
        match self.pending {
            Pending::Bytes(place, size) => {
                let bytes = value.unwrap_or(u64::MAX).to_le_bytes();
                // SAFETY: KVM has reported that it reads `size` bytes there, at most eight, in the
                // memory that it shares as long as `fd` is open.
                unsafe { ptr::copy_nonoverlapping(bytes.as_ptr(), place, size.min(bytes.len())) };
            }
            Pending::Msr => {
                let run = self.fd.get_kvm_run();
                run.__bindgen_anon_1.msr.error = u8::from(value.is_none());
                // The value of a write has been read.
                run.__bindgen_anon_1.msr.data = value.unwrap_or(0);
            }
            Pending::Nothing | Pending::Answered => return,
        }
        self.pending = Pending::Answered;
    }

    const KEEPS_CR8: bool = true;

    fn cr8(&mut self) -> u8 {
        self.known_cr8 = self.present_cr8();
        self.known_cr8
    }

    fn set_cr8(&mut self, value: u8) {
        self.known_cr8 = value;
        self.fd.get_kvm_run().cr8 = value.into();
    }

    fn event(&mut self) -> Event {
        self.event
    }

    fn set_event(&mut self, event: Event) {
        self.event = event;
    }

    fn set_window(&mut self, wanted: InterruptWindow) {
        self.window = wanted;
    }

    fn has_window(&mut self) -> bool {
        self.window != InterruptWindow::Nothing
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn segments_round_trip() {
        for attrib in [0xa9b, 0xc93, 0x8b, 0x82, 0xcf3, 0] {
            let segment = Segment { selector: 0x10, attrib, limit: 0xffff_ffff, base: 0x1234 };
            let kvm = to_kvm(segment);
            assert_eq!(from_kvm(&kvm), segment);
            assert_eq!(kvm.unusable, u8::from(attrib & 0x80 == 0));
        }
        let code = to_kvm(Segment { attrib: 0xa9b, ..Segment::default() });
        assert_eq!((code.type_, code.s, code.l, code.db, code.g), (11, 1, 1, 0, 1));
    }
}
