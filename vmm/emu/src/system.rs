//! `LTR` with a selector read from a device (AMD APM vol. 3; descriptors: APM vol. 2, sections
//! 4.8.3 and 12.2.2).

use hw_walk::Intent;
use hw_x86::msr::efer;
use vmm_x86::Segment;
use vmm_x86::msr::is_canonical;
use vmm_x86::{Event, Reg, Seg, X86Vcpu};

use crate::decode::Operand;
use crate::{Devices, Emulator, NOT_PRESENT, PROTECTION, Stop};

/// Bits of a selector: table, privilege level.
const LOCAL: u64 = 1 << 2;
const LEVEL: u64 = 3;
/// Second byte of a descriptor's rights: type and kind, present, and the busy bit.
const KIND: u64 = 0x1f;
const FREE: u64 = 9;
const FREE_16: u64 = 1;
const BUSY: u64 = 2;
const PRESENT: u64 = 1 << 7;
/// The limit counts pages.
const PAGES: u64 = 1 << 55;

impl<V: X86Vcpu, D: Devices> Emulator<'_, V, D> {
    /// Loads the task register, and marks the descriptor busy.
    pub(crate) fn load_task_register(&mut self) -> Result<(), Stop> {
        let refuse = |vector, code: u64| Stop::Raise(Event::exception_code(vector, code as u32));
        if self.vcpu.get(Reg::Cpl) != 0 {
            return Err(refuse(PROTECTION, 0));
        }
        let from = self.resolve(self.instruction.second, 2, false, Operand::None)?;
        let selector = self.load(from, 2);
        let named = selector & !LEVEL;
        if named == 0 || selector & LOCAL != 0 {
            return Err(refuse(PROTECTION, named));
        }
        let long = self.vcpu.get(Reg::Efer) & efer::LMA != 0;
        let table = self.vcpu.segment(Seg::Gdtr);
        let length = if long { 16 } else { 8 };
        if named + length - 1 > u64::from(table.limit) {
            return Err(refuse(PROTECTION, named));
        }
        let place = table.base.wrapping_add(named);
        let low = self.span_at(place, 8, Intent::Read)?;
        let high =
            if long { Some(self.span_at(place.wrapping_add(8), 8, Intent::Read)?) } else { None };
        let (low, high) = (self.read(low), high.map_or(0, |high| self.read(high)));
        let rights = low >> 40 & 0xff;
        let base = low >> 16 & 0xff_ffff | low >> 32 & 0xff00_0000 | high << 32;
        let free = rights & KIND == FREE || rights & KIND == FREE_16 && !long;
        if !free || high >> 40 & KIND != 0 {
            return Err(refuse(PROTECTION, named));
        }
        if rights & PRESENT == 0 {
            return Err(refuse(NOT_PRESENT, named));
        }
        if long && !is_canonical(base) {
            return Err(refuse(PROTECTION, named));
        }
        let mark = self.span_at(place.wrapping_add(5), 1, Intent::Write)?;
        self.write(mark, rights | BUSY);
        let limit = (low & 0xffff | low >> 32 & 0xf_0000) as u32;
        let limit = if low & PAGES == 0 { limit } else { limit << 12 | 0xfff };
        let attrib = (rights | BUSY | low >> 44 & 0xf00) as u16;
        let task = Segment { selector: selector as u16, attrib, limit, base };
        self.vcpu.set_segment(Seg::Tr, task);
        Ok(())
    }
}
