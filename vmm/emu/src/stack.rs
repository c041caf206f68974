//! Instructions that use the stack, which may be in a device (AMD APM vol. 3, `PUSH`, `POP`,
//! `CALL`, `RET`, `ENTER`, `LEAVE`).

use hw_walk::Intent;
use vmm_x86::msr::is_canonical;
use vmm_x86::walk::CodeSize;
use vmm_x86::{Event, Gpr, Seg, X86Vcpu};

use crate::decode::{Op, Operand, ones};
use crate::{Devices, Emulator, PROTECTION, Place, Stop};

/// `B` of the stack segment's descriptor: the stack pointer has 32 bits.
const BIG: u16 = 1 << 10;

impl<V: X86Vcpu, D: Devices> Emulator<'_, V, D> {
    /// Mask of the significant bits of the stack pointer.
    fn stack_mask(&mut self) -> u64 {
        match self.code.size {
            CodeSize::Bits64 => u64::MAX,
            _ if self.vcpu.segment(Seg::Ss).attrib & BIG != 0 => 0xffff_ffff,
            _ => 0xffff,
        }
    }

    /// The stack pointer, or the frame pointer as one, moved by a distance.
    fn stack_at(&mut self, register: Gpr, distance: u64) -> u64 {
        let mask = self.stack_mask();
        let old = self.vcpu.gpr(register);
        old & !mask | old.wrapping_add(distance) & mask
    }

    /// Resolves an operand on the stack.
    fn stack_place(&mut self, pointer: u64, size: u8, intent: Intent) -> Result<Place, Stop> {
        let mask = self.stack_mask();
        self.span(Seg::Ss, pointer & mask, size, intent).map(Place::Memory)
    }

    /// `PUSH`, `POP`, `ENTER`, `LEAVE`.
    pub(crate) fn stack(&mut self, op: Op) -> Result<(), Stop> {
        let size = self.instruction.size;
        let (first, second) = (self.instruction.first, self.instruction.second);
        let bytes = u64::from(size);
        match op {
            Op::Push => {
                let from = self.resolve(second, size, false, Operand::None)?;
                let top = self.stack_at(Gpr::Rsp, bytes.wrapping_neg());
                let to = self.stack_place(top, size, Intent::Write)?;
                let value = self.load(from, size);
                self.store(to, size, value);
                self.vcpu.set_gpr(Gpr::Rsp, top);
            }
            Op::Pop => {
                let old = self.vcpu.gpr(Gpr::Rsp);
                let from = self.stack_place(old, size, Intent::Read)?;
                // An address based on the stack pointer uses its value after the instruction.
                let top = self.stack_at(Gpr::Rsp, bytes);
                self.vcpu.set_gpr(Gpr::Rsp, top);
                let to = self.resolve(first, size, true, Operand::None);
                let to = to.inspect_err(|_| self.vcpu.set_gpr(Gpr::Rsp, old))?;
                let value = self.load(from, size);
                self.store(to, size, value);
            }
            Op::Enter => {
                let Operand::Immediate(length) = second else { return Ok(()) };
                let top = self.stack_at(Gpr::Rsp, bytes.wrapping_neg());
                let to = self.stack_place(top, size, Intent::Write)?;
                let frame = Place::Register { register: Gpr::Rbp, high: false };
                let value = self.load(frame, size);
                self.store(to, size, value);
                self.vcpu.set_gpr(Gpr::Rsp, top);
                self.store(frame, size, top);
                let top = self.stack_at(Gpr::Rsp, length.wrapping_neg());
                self.vcpu.set_gpr(Gpr::Rsp, top);
            }
            _ => {
                let pointer = self.vcpu.gpr(Gpr::Rbp);
                let from = self.stack_place(pointer, size, Intent::Read)?;
                let mask = self.stack_mask();
                let kept = self.vcpu.gpr(Gpr::Rsp) & !mask;
                let top = kept | pointer.wrapping_add(bytes) & mask;
                self.vcpu.set_gpr(Gpr::Rsp, top);
                let value = self.load(from, size);
                self.store(Place::Register { register: Gpr::Rbp, high: false }, size, value);
            }
        }
        Ok(())
    }

    /// Executes near `CALL`, `JMP`, `RET`; returns the target. `next`: address after the
    /// instruction.
    pub(crate) fn branch(&mut self, op: Op, next: u64) -> Result<u64, Stop> {
        let (size, second) = (self.instruction.size, self.instruction.second);
        let bytes = u64::from(size);
        let from = self.resolve(second, size, false, Operand::None)?;
        if op == Op::Return {
            let old = self.vcpu.gpr(Gpr::Rsp);
            let place = self.stack_place(old, size, Intent::Read)?;
            let target = self.load(place, size);
            let target = self.target(target)?;
            let more = self.load(from, 2);
            let top = self.stack_at(Gpr::Rsp, bytes + more);
            self.vcpu.set_gpr(Gpr::Rsp, top);
            return Ok(target);
        }
        let top = self.stack_at(Gpr::Rsp, bytes.wrapping_neg());
        let place = match op {
            Op::Jump => None,
            _ => Some(self.stack_place(top, size, Intent::Write)?),
        };
        let target = match op {
            Op::CallRelative => next.wrapping_add(self.load(from, 8)) & ones(size),
            _ => self.load(from, size),
        };
        let target = self.target(target)?;
        if let Some(place) = place {
            self.store(place, size, next);
            self.vcpu.set_gpr(Gpr::Rsp, top);
        }
        Ok(target)
    }

    /// Checks the address of a branch.
    fn target(&self, target: u64) -> Result<u64, Stop> {
        match self.code.size == CodeSize::Bits64 && !is_canonical(target) {
            true => Err(Stop::Raise(Event::exception_code(PROTECTION, 0))),
            false => Ok(target),
        }
    }
}
