//! String instructions.

use hw_walk::Intent;
use vmm_x86::{Gpr, Reg, Seg, X86Vcpu};

use crate::decode::{Alu, Instruction, Op, Repeat, ones};
use crate::{ACCUMULATOR, Devices, Emulator, MOST_REPEATS, Stop, alu};

/// `RFLAGS.TF`.
pub(crate) const RFLAGS_TF: u64 = 1 << 8;

impl<V: X86Vcpu, D: Devices> Emulator<'_, V, D> {
    /// Executes a string instruction; returns true if it is finished.
    pub(super) fn string(&mut self) -> Result<bool, Stop> {
        let Instruction { op, size, address_size, repeat, .. } = self.instruction;
        let mask = ones(address_size);
        let backwards = self.vcpu.get(Reg::Rflags) & alu::DF != 0;
        let step = if backwards { u64::from(size).wrapping_neg() } else { size.into() };
        // Each iteration is a single step.
        let steps = self.vcpu.get(Reg::Rflags) & RFLAGS_TF != 0;
        let most = if steps { 1 } else { MOST_REPEATS };
        let mut round = 0;
        loop {
            if repeat != Repeat::No && self.vcpu.gpr(Gpr::Rcx) & mask == 0 {
                return Ok(true);
            }
            if round == most {
                return Ok(false);
            }
            round += 1;
            let source = self.vcpu.gpr(Gpr::Rsi) & mask;
            let target = self.vcpu.gpr(Gpr::Rdi) & mask;
            self.iterate(source, target)?;
            if matches!(op, Op::Movs | Op::Lods | Op::Outs | Op::Cmps) {
                self.count(Gpr::Rsi, step, mask);
            }
            if matches!(op, Op::Movs | Op::Stos | Op::Ins | Op::Cmps | Op::Scas) {
                self.count(Gpr::Rdi, step, mask);
            }
            if repeat == Repeat::No {
                return Ok(true);
            }
            self.count(Gpr::Rcx, u64::MAX, mask);
            let equal = self.vcpu.get(Reg::Rflags) & alu::ZF != 0;
            if repeat == Repeat::WhileEqual && !equal || repeat == Repeat::WhileDifferent && equal {
                return Ok(true);
            }
        }
    }

    /// Executes an iteration at these offsets.
    fn iterate(&mut self, source: u64, target: u64) -> Result<(), Stop> {
        let Instruction { op, size, segment, .. } = self.instruction;
        let port = self.vcpu.gpr(Gpr::Rdx) as u16;
        match op {
            Op::Movs => {
                let from = self.span(segment, source, size, Intent::Read)?;
                let to = self.span(Seg::Es, target, size, Intent::Write)?;
                let value = self.read(from);
                self.write(to, value);
            }
            Op::Stos => {
                let to = self.span(Seg::Es, target, size, Intent::Write)?;
                let value = self.load(ACCUMULATOR, size);
                self.write(to, value);
            }
            Op::Lods => {
                let from = self.span(segment, source, size, Intent::Read)?;
                let value = self.read(from);
                self.store(ACCUMULATOR, size, value);
            }
            Op::Cmps => {
                let from = self.span(segment, source, size, Intent::Read)?;
                let to = self.span(Seg::Es, target, size, Intent::Read)?;
                let (a, b) = (self.read(from), self.read(to));
                self.compare(a, b, size);
            }
            Op::Scas => {
                let to = self.span(Seg::Es, target, size, Intent::Read)?;
                let (a, b) = (self.load(ACCUMULATOR, size), self.read(to));
                self.compare(a, b, size);
            }
            Op::Ins => {
                let to = self.span(Seg::Es, target, size, Intent::Write)?;
                let value = self.devices.port_in(port, size);
                self.write(to, value.into());
            }
            _ => {
                let from = self.span(segment, source, size, Intent::Read)?;
                let value = self.read(from) as u32;
                self.devices.port_out(port, size, value);
            }
        }
        Ok(())
    }

    /// Sets the flags of `CMP`.
    fn compare(&mut self, first: u64, second: u64, size: u8) {
        let rflags = self.vcpu.get(Reg::Rflags);
        let (_, flags) = alu::alu(Alu::Cmp, first, second, size, rflags);
        self.vcpu.set(Reg::Rflags, flags);
    }

    /// Adds to a counting register of the address size.
    fn count(&mut self, register: Gpr, step: u64, mask: u64) {
        let old = self.vcpu.gpr(register);
        let new = old.wrapping_add(step) & mask;
        // 32-bit results clear the upper half, 16-bit results keep the other bits.
        let kept = if mask == 0xffff { old & !mask } else { 0 };
        self.vcpu.set_gpr(register, kept | new);
    }
}
