//! Descriptor tables, segments, and transfers between code segments.

use super::{Context, Result, merge};
use crate::cpu::{CS, DescriptorTable, VirtualCpu, is_canonical};
use crate::decode::{Address, Op, Operand};
use crate::segment::{self, code_of};
use crate::{Host, Outcome, UNDEFINED, protection};
use vmm_mem::GuestMemory;

/// Types of system descriptors.
const LDT: u16 = 2;
const FREE_TSS: u16 = 9;
const BUSY_TSS: u16 = 11;
/// `RFLAGS.ZF`.
const ZF: u64 = 1 << 6;

impl VirtualCpu {
    pub(super) fn execute_descriptor<H: Host>(
        &mut self,
        context: &mut Context<'_, H>,
        op: Op,
    ) -> Result<Outcome> {
        match op {
            Op::Lgdt(at) => {
                self.gdtr = self.load_table(context, at)?;
                self.user_code = segment::null();
            }
            Op::Lidt(at) => self.idtr = self.load_table(context, at)?,
            Op::Sgdt(at) => self.store_table(context, at, self.gdtr)?,
            Op::Sidt(at) => self.store_table(context, at, self.idtr)?,
            Op::Lldt(from) => {
                let selector = self.load(context, from, 2)? as u16;
                self.ldtr = if selector & !3 == 0 {
                    segment::null()
                } else {
                    self.system_segment(context.memory, selector, LDT)?
                };
            }
            Op::Ltr(from) => self.load_task(context, from)?,
            Op::Sldt(to) => self.store_selector(context, to, self.ldtr.selector)?,
            Op::Str(to) => self.store_selector(context, to, self.tr.selector)?,
            Op::ReadSegment { segment, to } => {
                let selector = self.segments[usize::from(segment)].selector;
                self.store_selector(context, to, selector)?;
            }
            Op::WriteSegment { segment, from } => {
                let selector = self.load(context, from, 2)? as u16;
                self.load_data_segment(context.memory, context.host, segment.into(), selector)?;
            }
            Op::PushSegment(number) => {
                let selector = self.segments[usize::from(number)].selector;
                self.push(context.memory, context.size, selector.into())?;
            }
            Op::PopSegment(number) => {
                let selector = self.top(context)? as u16;
                self.load_data_segment(context.memory, context.host, number.into(), selector)?;
                self.frame.gpr[4] = self.frame.gpr[4].wrapping_add(context.size as u64);
            }
            Op::FarReturn(drop) => {
                return self.far_return(context.memory, context.size, drop.into());
            }
            Op::FarJump(at) => return self.far_transfer(context, at, false),
            Op::FarCall(at) => return self.far_transfer(context, at, true),
            Op::Lar { register, from } => self.load_visible(context, register, from, true)?,
            Op::Lsl { register, from } => self.load_visible(context, register, from, false)?,
            Op::Verr(from) => self.verify(context, from, false)?,
            Op::Verw(from) => self.verify(context, from, true)?,
            _ => return Err(UNDEFINED.into()),
        }
        Ok(Outcome::Next)
    }

    /// Emulates `LTR`.
    fn load_task<H: Host>(&mut self, context: &mut Context<'_, H>, from: Operand) -> Result<()> {
        let selector = self.load(context, from, 2)? as u16;
        let mut segment = self.system_segment(context.memory, selector, FREE_TSS)?;
        segment.attrib |= BUSY_TSS;
        if let Some(at) = self.descriptor_at(selector) {
            let low = self.read_value(context.memory, at, 8)?;
            self.write_value(context.memory, at, 8, low | 1 << 41)?;
        }
        self.tr = segment;
        Ok(())
    }

    /// Stores a selector: zero-extended to a register, as two bytes to memory.
    fn store_selector<H: Host>(
        &mut self,
        context: &mut Context<'_, H>,
        to: Operand,
        selector: u16,
    ) -> Result<()> {
        let size = if matches!(to, Operand::Memory(_)) { 2 } else { context.size };
        self.store(context, to, size, selector.into())
    }

    fn load_table<H: Host>(
        &self,
        context: &mut Context<'_, H>,
        at: Address,
    ) -> Result<DescriptorTable> {
        let linear = self.address(context.host, at, context.length);
        let limit = self.read_value(context.memory, linear, 2)? as u16;
        let base = self.read_value(context.memory, linear.wrapping_add(2), 8)?;
        if !is_canonical(base) {
            return Err(protection(0).into());
        }
        Ok(DescriptorTable { base, limit })
    }

    fn store_table<H: Host>(
        &self,
        context: &mut Context<'_, H>,
        at: Address,
        table: DescriptorTable,
    ) -> Result<()> {
        let linear = self.address(context.host, at, context.length);
        let mut bytes = [0; 10];
        bytes[..2].copy_from_slice(&table.limit.to_le_bytes());
        bytes[2..].copy_from_slice(&table.base.to_le_bytes());
        Ok(self.write(context.memory, linear, &bytes)?)
    }

    /// Reads a system descriptor of the GDT, which has 16 bytes in long mode.
    fn system_segment(
        &self,
        memory: &GuestMemory,
        selector: u16,
        kind: u16,
    ) -> Result<vmm_x86::Segment> {
        let refuse = protection(code_of(selector));
        let at = if selector & 4 == 0 { self.descriptor_at(selector) } else { None };
        let at = at.ok_or(refuse)?;
        let mut found = segment::unpack(selector, self.read_value(memory, at, 8)?);
        let high = self.read_value(memory, at.wrapping_add(8), 8)?;
        found.base |= high << 32;
        if segment::system_type(&found) != Some(kind) {
            return Err(refuse.into());
        }
        if !segment::is_present(&found) {
            let code = code_of(selector);
            return Err(crate::Event::exception_code(crate::vector::NOT_PRESENT, code).into());
        }
        Ok(found)
    }

    fn far_transfer<H: Host>(
        &mut self,
        context: &mut Context<'_, H>,
        at: Address,
        link: bool,
    ) -> Result<Outcome> {
        let (memory, size) = (context.memory, context.size);
        let linear = self.address(context.host, at, context.length);
        let target = self.read_value(memory, linear, size)?;
        let selector = self.read_value(memory, linear.wrapping_add(size as u64), 2)? as u16;
        let refuse = protection(code_of(selector));
        if selector & !3 == 0 {
            return Err(protection(0).into());
        }
        let code = self.descriptor(memory, selector)?;
        // Call gates and 32-bit code are not supported here.
        if !segment::is_64_bit(&code) || segment::level(&code) != self.cpl {
            return Err(refuse.into());
        }
        if !is_canonical(target) {
            return Err(protection(0).into());
        }
        if link {
            let back = self.frame.rip.wrapping_add(context.length as u64);
            let top = self.frame.gpr[4];
            self.push(memory, size, self.segments[CS].selector.into())?;
            if let Err(interruption) = self.push(memory, size, back) {
                self.frame.gpr[4] = top;
                return Err(interruption);
            }
        }
        let level = u16::from(self.cpl);
        self.segments[CS] = vmm_x86::Segment { selector: selector & !3 | level, ..code };
        self.frame.rip = target;
        Ok(Outcome::Jump)
    }

    /// Emulates `LAR` (`rights`) and `LSL` (APM vol. 3): 16-bit operands get the lower half of the
    /// result.
    fn load_visible<H: Host>(
        &mut self,
        context: &mut Context<'_, H>,
        register: u8,
        from: Operand,
        rights: bool,
    ) -> Result<()> {
        let selector = self.load(context, from, 2)? as u16;
        let value = self.visible(context.memory, selector, rights)?;
        self.set_zero_flag(value.is_some());
        if let Some(value) = value {
            let mut target = self.get(register);
            merge(&mut target, context.size, value);
            self.set(register, target);
        }
        Ok(())
    }

    /// `LAR`, `LSL`: returns the descriptor's rights or limit, if visible at this privilege level.
    fn visible(&self, memory: &GuestMemory, selector: u16, rights: bool) -> Result<Option<u64>> {
        let Some(at) = self.descriptor_at(selector) else { return Ok(None) };
        let descriptor = self.read_value(memory, at, 8)?;
        let found = segment::unpack(selector, descriptor);
        let level = self.cpl.max((selector & 3) as u8);
        let known = match segment::system_type(&found) {
            None => true,
            Some(kind) => matches!(kind, LDT | FREE_TSS | BUSY_TSS) || rights && kind == 0xc,
        };
        if !known || segment::is_inner_data(&found, level) {
            return Ok(None);
        }
        Ok(Some(if rights { descriptor >> 32 & 0x00f0_ff00 } else { found.limit.into() }))
    }

    /// Emulates `VERR` and `VERW` (`write`).
    fn verify<H: Host>(
        &mut self,
        context: &mut Context<'_, H>,
        from: Operand,
        write: bool,
    ) -> Result<()> {
        let selector = self.load(context, from, 2)? as u16;
        let mut allowed = false;
        if let Some(at) = self.descriptor_at(selector) {
            let found = segment::unpack(selector, self.read_value(context.memory, at, 8)?);
            let level = self.cpl.max((selector & 3) as u8);
            let suits = match write {
                true => segment::is_writable_data(&found),
                false => segment::is_readable(&found),
            };
            allowed = suits && !segment::is_inner_data(&found, level);
        }
        self.set_zero_flag(allowed);
        Ok(())
    }

    fn set_zero_flag(&mut self, on: bool) {
        self.frame.rflags = self.frame.rflags & !ZF | if on { ZF } else { 0 };
    }
}
