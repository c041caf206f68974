//! Segments and descriptors (APM vol. 2, chapter 4).

use vmm_mem::GuestMemory;
use vmm_x86::Segment;

use crate::cpu::{CS, FS, GS, SS, VirtualCpu};
use crate::{Host, Interruption, protection, vector};
use vmm_x86::Event;

/// Attributes in the VMCB's format: descriptor bits 47:40 and 55:52.
pub(crate) const DATA_64: u16 = 0xc93;
pub(crate) const USABLE_CODE_64: u16 = 0xa9b;
/// 64-bit code (`L`).
const LONG: u16 = 1 << 9;
const PRESENT: u16 = 1 << 7;
/// Not a system descriptor.
const ORDINARY: u16 = 1 << 4;
const CODE: u16 = 1 << 3;
/// Code: conforming; data: expands down.
const CONFORMING: u16 = 1 << 2;
/// Code: readable; data: writable.
const READ_WRITE: u16 = 1 << 1;
const DPL_SHIFT: u16 = 5;

/// Returns the code segment after `SYSCALL`, or of a gate: flat, 64-bit.
pub(crate) const fn kernel_code(selector: u16) -> Segment {
    Segment { selector: selector & !3, attrib: USABLE_CODE_64, limit: u32::MAX, base: 0 }
}

/// Returns the stack segment after `SYSCALL` and `SYSRET`.
pub(crate) const fn flat_data(selector: u16) -> Segment {
    let level = (selector & 3) << DPL_SHIFT;
    Segment { selector, attrib: DATA_64 | level, limit: u32::MAX, base: 0 }
}

/// Returns the code segment after `SYSRET` to 64-bit code.
pub(crate) const fn user_code_64(selector: u16) -> Segment {
    Segment {
        selector: selector | 3,
        attrib: USABLE_CODE_64 | 3 << DPL_SHIFT,
        limit: u32::MAX,
        base: 0,
    }
}

/// Returns the code segment after `SYSRET` to 32-bit code.
pub(crate) const fn user_code_32(selector: u16) -> Segment {
    let bits_32 = USABLE_CODE_64 & !LONG | 1 << 10;
    Segment { attrib: bits_32 | 3 << DPL_SHIFT, ..user_code_64(selector) }
}

pub(crate) fn is_readable(segment: &Segment) -> bool {
    segment.attrib & ORDINARY != 0 && (!is_code(segment) || segment.attrib & READ_WRITE != 0)
}

/// Decodes a descriptor as `MOV` to a segment register does.
pub(crate) fn unpack(selector: u16, descriptor: u64) -> Segment {
    const GRANULARITY: u64 = 1 << 55;
    let limit = (descriptor & 0xffff | descriptor >> 32 & 0xf_0000) as u32;
    let base = descriptor >> 16 & 0xff_ffff | descriptor >> 32 & 0xff00_0000;
    Segment {
        selector,
        attrib: (descriptor >> 40 & 0xff | descriptor >> 44 & 0xf00) as u16,
        limit: if descriptor & GRANULARITY == 0 { limit } else { limit << 12 | 0xfff },
        base,
    }
}

pub(crate) fn is_present(segment: &Segment) -> bool {
    segment.attrib & PRESENT != 0
}

pub(crate) fn level(segment: &Segment) -> u8 {
    (segment.attrib >> DPL_SHIFT & 3) as u8
}

pub(crate) fn is_code(segment: &Segment) -> bool {
    segment.attrib & (ORDINARY | CODE) == ORDINARY | CODE
}

/// Returns the type of a system descriptor.
pub(crate) fn system_type(segment: &Segment) -> Option<u16> {
    (segment.attrib & ORDINARY == 0).then_some(segment.attrib & 0xf)
}

pub(crate) fn is_64_bit(segment: &Segment) -> bool {
    is_code(segment) && segment.attrib & LONG != 0
}

/// Returns a null segment.
pub(crate) const fn null() -> Segment {
    Segment { selector: 0, attrib: 0, limit: 0, base: 0 }
}

/// Returns the stack selector of user mode after `SYSRET`.
pub(crate) const fn user_stack(star: u64) -> u16 {
    ((star >> 48) as u16).wrapping_add(8) | 3
}

pub(crate) fn is_writable_data(segment: &Segment) -> bool {
    segment.attrib & (ORDINARY | CODE | READ_WRITE) == ORDINARY | READ_WRITE
}

/// Returns whether a segment is data or non-conforming code of a level inside of `level`.
pub(crate) fn is_inner_data(segment: &Segment, level: u8) -> bool {
    let conforming = is_code(segment) && segment.attrib & CONFORMING != 0;
    is_present(segment) && !conforming && self::level(segment) < level
}

/// Returns the error code for a selector.
pub(crate) fn code_of(selector: u16) -> u32 {
    u32::from(selector & !3)
}

/// Encodes a data descriptor as `struct user_desc` for set_thread_area(2)
/// (`arch/x86/include/uapi/asm/ldt.h` in Linux): entry number, base, limit and flags. Only the
/// number is not 0: no segment.
pub fn thread_area(number: u32, descriptor: u64) -> [u32; 4] {
    if descriptor == 0 {
        return [number, 0, 0, 0];
    }
    let bit = |at: u32| (descriptor >> at) as u32 & 1;
    let base = (descriptor >> 16) as u32 & 0xff_ffff | (descriptor >> 32) as u32 & 0xff00_0000;
    let limit = descriptor as u32 & 0xffff | (descriptor >> 32) as u32 & 0xf_0000;
    // `seg_32bit`, `contents` (two bits), `read_exec_only`, `limit_in_pages`, `seg_not_present`,
    // `useable`.
    let contents = (descriptor >> 42) as u32 & 3;
    let flags = bit(54)
        | contents << 1
        | (bit(41) ^ 1) << 3
        | bit(55) << 4
        | (bit(47) ^ 1) << 5
        | bit(52) << 6;
    [number, base, limit, flags]
}

impl VirtualCpu {
    /// Returns the address of a selector's descriptor; `None`: beyond the limit, or the null
    /// selector.
    pub(crate) fn descriptor_at(&self, selector: u16) -> Option<u64> {
        let index = u64::from(selector & !7);
        let (base, limit) = if selector & 4 != 0 {
            if !is_present(&self.ldtr) {
                return None;
            }
            (self.ldtr.base, u64::from(self.ldtr.limit))
        } else {
            if index == 0 {
                return None;
            }
            (self.gdtr.base, u64::from(self.gdtr.limit))
        };
        (index + 7 <= limit).then_some(base.wrapping_add(index))
    }

    /// Reads the descriptor of a selector.
    pub(crate) fn descriptor(
        &self,
        memory: &GuestMemory,
        selector: u16,
    ) -> Result<Segment, Interruption> {
        let at = self.descriptor_at(selector).ok_or(protection(code_of(selector)))?;
        Ok(unpack(selector, self.read_value(memory, at, 8)?))
    }

    /// Returns whether the CPU executes 64-bit code.
    pub fn is_64_bit(&self) -> bool {
        is_64_bit(&self.segments[CS])
    }

    /// Takes over the code segment of interrupted user mode, which switches between 64-bit and
    /// 32-bit code itself. The kernel is always 64-bit code.
    pub fn sync_code_segment(&mut self, long: bool) {
        if self.cpl == 3 && self.is_64_bit() != long {
            let selector = (self.star >> 48) as u16;
            self.segments[CS] = match long {
                true => user_code_64(selector.wrapping_add(16)),
                false => user_code_32(selector),
            };
        }
    }

    /// Takes over a data segment register of user mode, which user mode loads itself from equal
    /// descriptors of the host.
    pub fn sync_data_segment(&mut self, register: usize, selector: u16) {
        if self.segments[register].selector != selector {
            let rest = if selector & !3 == 0 { null() } else { flat_data(selector | 3) };
            self.segments[register] = Segment { selector, ..rest };
        }
    }

    /// Reads GDT descriptors from a selector on; missing ones are 0.
    pub fn descriptors<const N: usize>(&self, memory: &GuestMemory, selector: u16) -> [u64; N] {
        core::array::from_fn(|index| {
            let at = self.descriptor_at((selector & !7).wrapping_add(8 * index as u16));
            at.and_then(|at| self.read_value(memory, at, 8).ok()).unwrap_or(0)
        })
    }

    /// Loads a data or stack segment register as `MOV` or `POP` do (APM vol. 2, section 4.10).
    /// `register` is its encoding.
    pub(crate) fn load_data_segment(
        &mut self,
        memory: &GuestMemory,
        host: &mut impl Host,
        register: usize,
        selector: u16,
    ) -> Result<(), Interruption> {
        let segment = if selector & !3 == 0 {
            // In 64-bit mode SS may be null, except at level 3.
            if register == SS && (self.cpl == 3 || selector as u8 & 3 != self.cpl) {
                return Err(protection(0).into());
            }
            Segment { selector, ..null() }
        } else {
            let segment = self.descriptor(memory, selector)?;
            let requested = (selector & 3) as u8;
            let refuse = || Interruption::from(protection(code_of(selector)));
            if segment.attrib & ORDINARY == 0 {
                return Err(refuse());
            }
            let code = is_code(&segment);
            let suits = if register == SS {
                let writable = !code && segment.attrib & READ_WRITE != 0;
                writable && requested == self.cpl && level(&segment) == self.cpl
            } else {
                let readable = !code || segment.attrib & READ_WRITE != 0;
                let conforming = code && segment.attrib & CONFORMING != 0;
                let visible = conforming || level(&segment) >= self.cpl.max(requested);
                readable && visible
            };
            if !suits {
                return Err(refuse());
            }
            if !is_present(&segment) {
                let missing = if register == SS { vector::STACK } else { vector::NOT_PRESENT };
                return Err(Event::exception_code(missing, code_of(selector)).into());
            }
            segment
        };
        self.segments[register] = segment;
        // As on Intel CPUs, the null selector sets the base too.
        match register {
            FS => host.set_fs_base(segment.base),
            GS => host.set_gs_base(segment.base),
            _ => {}
        }
        Ok(())
    }

    /// Returns the code segment of a far return, and its privilege level.
    pub(crate) fn return_segment(
        &mut self,
        memory: &GuestMemory,
        selector: u16,
    ) -> Result<(Segment, u8), Interruption> {
        let target = (selector & 3) as u8;
        if target < self.cpl || selector & !3 == 0 {
            return Err(protection(code_of(selector)).into());
        }
        if self.segments[CS].selector == selector {
            return Ok((self.segments[CS], target));
        }
        if self.user_code.selector == selector {
            return Ok((self.user_code, target));
        }
        let segment = self.descriptor(memory, selector)?;
        let conforming = segment.attrib & CONFORMING != 0;
        let suits = is_code(&segment)
            && if conforming { level(&segment) <= target } else { level(&segment) == target };
        if !suits {
            return Err(protection(code_of(selector)).into());
        }
        if !is_present(&segment) {
            return Err(Event::exception_code(vector::NOT_PRESENT, code_of(selector)).into());
        }
        if target == 3 {
            self.user_code = segment;
        }
        Ok((segment, target))
    }
}
