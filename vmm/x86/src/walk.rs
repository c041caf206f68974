//! Location of a vCPU's instruction: translation of its address by the guest's page tables
//! ([`hw_walk`]), and its bytes.

use hw_walk::{Intent, PageFault, PageTables, Paging, leaf};
use hw_x86::msr::efer;
use hw_x86::paging::cr0;
use vmm_mem::GuestMemory;

use crate::registers::{Reg, Seg};
use crate::vcpu::{Event, X86Vcpu};

/// Vector of a page fault.
pub(crate) const PAGE_FAULT: u8 = 14;

/// Page tables in guest memory.
pub struct GuestTables<'a>(pub &'a GuestMemory);

impl PageTables for GuestTables<'_> {
    #[inline(always)]
    fn read(&self, at: u64, bytes: u64) -> Option<u64> {
        if bytes == 4 { self.0.read::<u32>(at).ok().map(u64::from) } else { self.0.read(at).ok() }
    }

    fn replace(&self, at: u64, bytes: u64, old: u64, new: u64) -> bool {
        if bytes == 4 {
            self.0.compare_exchange(at, old as u32, new as u32).is_ok_and(|old| old.is_ok())
        } else {
            self.0.compare_exchange(at, old, new).is_ok_and(|old| old.is_ok())
        }
    }
}

/// Reads the state of a vCPU that translations depend on.
pub fn paging(vcpu: &mut impl X86Vcpu) -> Paging {
    Paging {
        cr0: vcpu.get(Reg::Cr0),
        cr3: vcpu.get(Reg::Cr3),
        cr4: vcpu.get(Reg::Cr4),
        efer: vcpu.get(Reg::Efer),
        rflags: vcpu.get(Reg::Rflags),
        user: vcpu.get(Reg::Cpl) == 3,
    }
}

/// Sets `CR2` and returns the exception.
pub fn raise(fault: PageFault, vcpu: &mut impl X86Vcpu) -> Event {
    vcpu.set(Reg::Cr2, fault.address);
    Event::exception_code(PAGE_FAULT, fault.code)
}

/// Mode of the current code segment.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum CodeSize {
    /// 16-bit segment (or real mode).
    Bits16,
    /// 32-bit segment.
    Bits32,
    /// 64-bit mode.
    Bits64,
}

/// `CS.L`: 64-bit code, in long mode.
const LONG: u16 = 1 << 9;

/// True if the vCPU runs 64-bit code.
#[inline(always)]
pub fn is_64_bit(vcpu: &mut impl X86Vcpu) -> bool {
    vcpu.get(Reg::Efer) & efer::LMA != 0 && has_long_code(vcpu)
}

/// True if `CS.L` is set, which has an effect in long mode only.
#[inline(always)]
pub(crate) fn has_long_code(vcpu: &mut impl X86Vcpu) -> bool {
    vcpu.segment(Seg::Cs).attrib & LONG != 0
}

/// Guest-physical address of code that the CPU has just fetched in 64-bit mode; so rights, reserved
/// bits and accessed bits are valid. `None` if the tables have changed meanwhile.
#[inline]
pub fn locate_64_bit(memory: &GuestMemory, cr3: u64, linear: u64) -> Option<u64> {
    leaf(&GuestTables(memory), cr3, linear).map(|leaf| leaf.address | linear & (leaf.size - 1))
}

/// Location of the current instruction, and the state needed to read it.
#[derive(Clone, Copy, Debug)]
pub struct CodeView {
    /// Linear address of the instruction.
    pub linear: u64,
    /// Mode of the code segment.
    pub size: CodeSize,
    /// Translation state.
    pub paging: Paging,
}

impl CodeView {
    /// State of a vCPU, at its instruction pointer.
    pub fn of(vcpu: &mut impl X86Vcpu) -> Self {
        const BIG: u16 = 1 << 10;
        let paging = paging(vcpu);
        let rip = vcpu.get(Reg::Rip);
        if is_64_bit(vcpu) {
            return Self { linear: rip, size: CodeSize::Bits64, paging };
        }
        let cs = vcpu.segment(Seg::Cs);
        let size = if cs.attrib & BIG != 0 && paging.cr0 & cr0::PE != 0 {
            CodeSize::Bits32
        } else {
            CodeSize::Bits16
        };
        Self { linear: cs.base.wrapping_add(rip) & 0xffff_ffff, size, paging }
    }

    /// Instruction pointer after `length` bytes.
    pub fn advance(&self, rip: u64, length: u64) -> u64 {
        let next = rip.wrapping_add(length);
        if self.size == CodeSize::Bits64 { next } else { next & 0xffff_ffff }
    }

    /// Reads the instruction: up to 15 bytes, fewer at the end of mapped memory. Returns the number
    /// of bytes and the guest-physical address of the first.
    ///
    /// # Errors
    /// The page fault, if the first byte cannot be fetched.
    pub fn fetch(
        &self,
        memory: &GuestMemory,
        bytes: &mut [u8; 15],
    ) -> Result<(usize, u64), PageFault> {
        let tables = GuestTables(memory);
        let translate = |linear| self.paging.translate(&tables, linear, Intent::Fetch, false);
        let found = translate(self.linear)?;
        let address = found.address;
        let first = found.left().min(15) as usize;
        if memory.read_slice(address, &mut bytes[..first]).is_err() {
            // Memory ends within the instruction, or the code is outside memory.
            let readable = (0..first as u64)
                .take_while(|offset| memory.read::<u8>(address + offset).is_ok())
                .count();
            return Ok((readable, address));
        }
        if first == 15 {
            return Ok((15, address));
        }
        let rest = translate(self.linear.wrapping_add(first as u64))
            .is_ok_and(|next| memory.read_slice(next.address, &mut bytes[first..]).is_ok());
        Ok((if rest { 15 } else { first }, address))
    }
}
