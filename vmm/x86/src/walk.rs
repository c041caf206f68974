//! Walk of the guest's page tables, as the CPU performs it (AMD APM vol. 2, chapter 5).
//!
//! All modes: no paging, 32-bit with 4 MiB pages, PAE, 4-level with 2 MiB and 1 GiB pages. Rights
//! follow WP, SMEP, SMAP and NX; accessed and dirty bits are set as by hardware, only once the
//! whole translation is allowed. Missing: protection keys (an emulated access ignores them),
//! 5-level paging (hidden from the guest).

use hw_x86::msr::efer;
use hw_x86::paging::{cr0, cr4, entry, fault};
use vmm_mem::GuestMemory;

use crate::registers::{Reg, Seg};
use crate::vcpu::{Event, X86Vcpu};

/// `RFLAGS.AC`: supervisor accesses to user pages are permitted (SMAP).
const RFLAGS_AC: u64 = 1 << 18;
/// Vector of a page fault.
const PAGE_FAULT: u8 = 14;
/// Retries of a walk whose table changed under it. After that the bits stay unset, which a guest
/// that changes its tables at that rate cannot distinguish.
const RETRIES: u32 = 8;

/// CPU state that a translation depends on.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Paging {
    /// `CR0`.
    pub cr0: u64,
    /// `CR3`.
    pub cr3: u64,
    /// `CR4`.
    pub cr4: u64,
    /// `EFER`.
    pub efer: u64,
    /// `RFLAGS`.
    pub rflags: u64,
    /// True at privilege level 3.
    pub user: bool,
}

/// Kind of access.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Intent {
    /// Reads data.
    Read,
    /// Writes data.
    Write,
    /// Fetches an instruction.
    Fetch,
}

/// A faulting access: values of `CR2` and the error code.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct PageFault {
    /// Linear address.
    pub address: u64,
    /// Error code.
    pub code: u32,
}

impl PageFault {
    /// Sets `CR2` and returns the exception.
    pub fn raise(self, vcpu: &mut impl X86Vcpu) -> Event {
        vcpu.set(Reg::Cr2, self.address);
        Event::exception_code(PAGE_FAULT, self.code)
    }
}

/// Geometry of the tables.
struct Shape {
    levels: u32,
    index_bits: u32,
    entry_bytes: u64,
    root: u64,
}

/// Entries of one walk: address and value read.
#[derive(Clone, Copy, Default)]
struct Step {
    at: u64,
    value: u64,
}

impl Paging {
    /// Reads the state of a vCPU.
    pub fn of(vcpu: &mut impl X86Vcpu) -> Self {
        Self {
            cr0: vcpu.get(Reg::Cr0),
            cr3: vcpu.get(Reg::Cr3),
            cr4: vcpu.get(Reg::Cr4),
            efer: vcpu.get(Reg::Efer),
            rflags: vcpu.get(Reg::Rflags),
            user: vcpu.get(Reg::Cpl) == 3,
        }
    }

    fn shape(&self) -> Option<Shape> {
        if self.cr0 & cr0::PG == 0 {
            return None;
        }
        Some(if self.efer & efer::LMA != 0 {
            Shape { levels: 4, index_bits: 9, entry_bytes: 8, root: self.cr3 & entry::ADDRESS }
        } else if self.cr4 & cr4::PAE != 0 {
            Shape { levels: 3, index_bits: 9, entry_bytes: 8, root: self.cr3 & 0xffff_ffe0 }
        } else {
            Shape { levels: 2, index_bits: 10, entry_bytes: 4, root: self.cr3 & 0xffff_f000 }
        })
    }

    /// Translates `linear` to the guest-physical address and the number of bytes that follow it in
    /// its page (at least 1). `mark`: set accessed and dirty bits.
    ///
    /// # Errors
    /// The exception that the access raises.
    pub fn translate(
        &self,
        memory: &GuestMemory,
        linear: u64,
        intent: Intent,
        mark: bool,
    ) -> Result<(u64, u64), PageFault> {
        let Some(shape) = self.shape() else {
            let address = linear & 0xffff_ffff;
            return Ok((address, 0x1000 - (address & 0xfff)));
        };
        let linear = if shape.levels == 4 { linear } else { linear & 0xffff_ffff };
        for _ in 0..RETRIES {
            let (steps, depth, address, left) = self.walk(memory, &shape, linear, intent)?;
            let dirty = intent == Intent::Write;
            if !mark || Self::mark(memory, &shape, &steps[..depth], dirty) {
                return Ok((address, left));
            }
        }
        let (_, _, address, left) = self.walk(memory, &shape, linear, intent)?;
        Ok((address, left))
    }

    /// Reads and checks the tables.
    fn walk(
        &self,
        memory: &GuestMemory,
        shape: &Shape,
        linear: u64,
        intent: Intent,
    ) -> Result<([Step; 4], usize, u64, u64), PageFault> {
        let refuse = |code: u64| PageFault { address: linear, code: self.code(intent, code) };
        let mut steps = [Step::default(); 4];
        let mut table = shape.root;
        let mut rights = entry::WRITE | entry::USER;
        let mut no_execute = false;
        for (depth, level) in (1..=shape.levels).rev().enumerate() {
            let shift = 12 + shape.index_bits * (level - 1);
            let index = linear >> shift & ((1 << shape.index_bits) - 1);
            let at = table + index * shape.entry_bytes;
            let value = read_entry(memory, at, shape.entry_bytes);
            steps[depth] = Step { at, value };
            if value & entry::PRESENT == 0 {
                return Err(refuse(0));
            }
            // PAE pointers have no rights, only an address (APM vol. 2, section 5.2.3).
            let pointer = shape.levels == 3 && level == 3;
            if !pointer {
                rights &= value;
                no_execute |= value & entry::NX != 0 && shape.entry_bytes == 8;
            }
            if shape.entry_bytes == 8 && value & entry::NX != 0 && self.efer & efer::NXE == 0 {
                return Err(refuse(fault::PRESENT | fault::RESERVED));
            }
            let large = match (shape.levels, level) {
                (_, 1) => true,
                (2, 2) => value & entry::LARGE != 0 && self.cr4 & cr4::PSE != 0,
                (3, 2) | (4, 2 | 3) => value & entry::LARGE != 0,
                _ => false,
            };
            if !large {
                table = if shape.entry_bytes == 4 {
                    value & 0xffff_f000
                } else {
                    value & entry::ADDRESS
                };
                continue;
            }
            let offset_mask = (1_u64 << shift) - 1;
            let base = if shape.entry_bytes == 4 && level == 2 {
                // Bits 20:13 are bits 39:32 of the address (PSE-36).
                value & 0xffc0_0000 | (value >> 13 & 0xff) << 32
            } else {
                let base = value & entry::ADDRESS & !offset_mask;
                // Bit 12 of a large page's entry is its PAT bit; the other bits must be 0.
                if level > 1 && value & entry::ADDRESS & offset_mask & !(1 << 12) != 0 {
                    return Err(refuse(fault::PRESENT | fault::RESERVED));
                }
                base
            };
            if !self.allowed(intent, rights, no_execute) {
                return Err(refuse(fault::PRESENT));
            }
            let offset = linear & offset_mask;
            return Ok((steps, depth + 1, base | offset, offset_mask + 1 - offset));
        }
        Err(refuse(0))
    }

    /// Returns true if a page with these rights allows the access (APM vol. 2, section 5.6).
    fn allowed(&self, intent: Intent, rights: u64, no_execute: bool) -> bool {
        let user_page = rights & entry::USER != 0;
        if self.user && !user_page {
            return false;
        }
        match intent {
            Intent::Fetch => {
                let forbidden = no_execute && self.efer & efer::NXE != 0;
                let smep = !self.user && user_page && self.cr4 & cr4::SMEP != 0;
                !forbidden && !smep
            }
            Intent::Read | Intent::Write => {
                let smap = !self.user
                    && user_page
                    && self.cr4 & cr4::SMAP != 0
                    && self.rflags & RFLAGS_AC == 0;
                let protects = self.user || self.cr0 & cr0::WP != 0;
                let read_only = intent == Intent::Write && rights & entry::WRITE == 0 && protects;
                !smap && !read_only
            }
        }
    }

    fn code(&self, intent: Intent, why: u64) -> u32 {
        let mut code = why;
        if self.user {
            code |= fault::USER;
        }
        match intent {
            Intent::Read => {}
            Intent::Write => code |= fault::WRITE,
            Intent::Fetch if self.efer & efer::NXE != 0 || self.cr4 & cr4::SMEP != 0 => {
                code |= fault::FETCH;
            }
            Intent::Fetch => {}
        }
        code as u32
    }

    /// Sets accessed bits, and the leaf's dirty bit; `false` if an entry has changed meanwhile.
    fn mark(memory: &GuestMemory, shape: &Shape, steps: &[Step], dirty: bool) -> bool {
        for (depth, step) in steps.iter().enumerate() {
            if shape.levels == 3 && depth == 0 {
                continue; // PAE pointers have no accessed bit
            }
            let leaf = depth + 1 == steps.len();
            let wanted = entry::ACCESSED | if leaf && dirty { entry::DIRTY } else { 0 };
            if step.value & wanted == wanted {
                continue;
            }
            let new = step.value | wanted;
            let unchanged = if shape.entry_bytes == 4 {
                memory
                    .compare_exchange(step.at, step.value as u32, new as u32)
                    .is_ok_and(|old| old.is_ok())
            } else {
                memory.compare_exchange(step.at, step.value, new).is_ok_and(|old| old.is_ok())
            };
            if !unchanged {
                return false;
            }
        }
        true
    }
}

/// Reads a table entry. Outside memory no device responds, so all bits read as 1, which faults as
/// reserved or leads to an address that is not mapped either.
fn read_entry(memory: &GuestMemory, at: u64, bytes: u64) -> u64 {
    if bytes == 4 {
        memory.read::<u32>(at).unwrap_or(u32::MAX).into()
    } else {
        memory.read::<u64>(at).unwrap_or(u64::MAX)
    }
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
    vcpu.get(Reg::Efer) & efer::LMA != 0 && vcpu.segment(Seg::Cs).attrib & LONG != 0
}

/// Guest-physical address of code that the CPU has just fetched in 64-bit mode; so rights, reserved
/// bits and accessed bits are valid. `None` if the tables have changed meanwhile.
#[inline]
pub fn locate_64_bit(memory: &GuestMemory, cr3: u64, linear: u64) -> Option<u64> {
    let mut value = cr3;
    for shift in [39, 30, 21, 12] {
        let at = value & entry::ADDRESS | (linear >> shift & 0x1ff) << 3;
        value = memory.read::<u64>(at).ok()?;
        if value & entry::PRESENT == 0 {
            return None;
        }
        if shift == 12 || shift != 39 && value & entry::LARGE != 0 {
            let offset = (1 << shift) - 1;
            return Some(value & entry::ADDRESS & !offset | linear & offset);
        }
    }
    None
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
        let paging = Paging::of(vcpu);
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
        let translate = |linear| self.paging.translate(memory, linear, Intent::Fetch, false);
        let (address, left) = translate(self.linear)?;
        let first = left.min(15) as usize;
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
            .is_ok_and(|(next, _)| memory.read_slice(next, &mut bytes[first..]).is_ok());
        Ok((if rest { 15 } else { first }, address))
    }
}
