//! Instructions that are neither string nor control-transfer instructions.

use vmm_x86::{Event, Gpr, Reg, X86Vcpu};

use crate::decode::{Alu, BitOp, Instruction, Op, Operand, sign_extend};
use crate::{ACCUMULATOR, Devices, Emulator, Place, Stop, alu, shift};

/// Vector of a divide error.
const DIVIDE: u8 = 0;

/// Resolved operands, and the flags before the instruction.
#[derive(Clone, Copy)]
struct Operands {
    to: Place,
    from: Place,
    size: u8,
    source_size: u8,
    rflags: u64,
}

impl<V: X86Vcpu, D: Devices> Emulator<'_, V, D> {
    /// Executes the instruction.
    pub(super) fn single(&mut self) -> Result<(), Stop> {
        let Instruction { op, size, source_size, first, second, .. } = self.instruction;
        let rflags = self.vcpu.get(Reg::Rflags);
        // Both operands are resolved before the first access, since a device must not see an
        // instruction that faults.
        let to = self.resolve(first, size, writes(op), second)?;
        let from = self.resolve(second, source_size, op == Op::Xchg || op == Op::Xadd, first)?;
        let operands = Operands { to, from, size, source_size, rflags };
        match op {
            Op::Mov | Op::MovZx | Op::MovSx | Op::MovBe | Op::MoveIf(_) | Op::SetIf(_) => {
                self.move_value(op, operands);
            }
            Op::Xchg | Op::Xadd | Op::Cmpxchg => self.exchange(op, operands),
            Op::Bsf | Op::Bsr | Op::Tzcnt | Op::Lzcnt => self.scan(op, operands),
            Op::Imul | Op::Multiply { .. } => self.multiply(op, operands),
            Op::Divide { signed } => self.divide(signed, operands)?,
            Op::Shift(_) | Op::Shld | Op::Shrd => self.shift(op, operands),
            Op::Smsw => {
                let value = self.vcpu.get(Reg::Cr0);
                self.store(to, size, value);
            }
            _ => self.calculate(op, operands),
        }
        Ok(())
    }

    fn move_value(&mut self, op: Op, Operands { to, from, size, source_size, rflags }: Operands) {
        if let Op::SetIf(condition) = op {
            return self.store(to, 1, alu::holds(condition, rflags).into());
        }
        let value = self.load(from, source_size);
        let value = match op {
            Op::MovSx => sign_extend(value, source_size),
            Op::MovBe => value.swap_bytes() >> (64 - 8 * u32::from(size)),
            // In any case the operand is read and the upper half cleared.
            Op::MoveIf(condition) if !alu::holds(condition, rflags) => self.load(to, size),
            _ => value,
        };
        self.store(to, size, value);
    }

    /// Operations on the first operand, or on both, whose result becomes the first.
    fn calculate(&mut self, op: Op, Operands { to, from, size, rflags, .. }: Operands) {
        let a = self.load(to, size);
        let (result, flags) = match op {
            Op::Alu(op) => alu::alu(op, a, self.load(from, size), size, rflags),
            Op::Test => alu::alu(Alu::And, a, self.load(from, size), size, rflags),
            Op::Inc | Op::Dec => alu::step(op == Op::Inc, a, size, rflags),
            Op::Not => (!a, rflags),
            Op::Neg => alu::alu(Alu::Sub, 0, a, size, rflags),
            Op::Bit(bit) => {
                let index = self.load(from, size) & (8 * u64::from(size) - 1);
                alu::bit(bit, a, index, rflags)
            }
            // Handled elsewhere.
            _ => return,
        };
        if writes(op) {
            self.store(to, size, result);
        }
        self.vcpu.set(Reg::Rflags, flags);
    }

    fn exchange(&mut self, op: Op, Operands { to, from, size, rflags, .. }: Operands) {
        let (a, b) = (self.load(to, size), self.load(from, size));
        let flags = match op {
            Op::Xchg => {
                self.store(to, size, b);
                self.store(from, size, a);
                return;
            }
            Op::Xadd => {
                let (sum, flags) = alu::alu(Alu::Add, a, b, size, rflags);
                self.store(from, size, a);
                self.store(to, size, sum);
                flags
            }
            _ => {
                let expected = self.load(ACCUMULATOR, size);
                let (_, flags) = alu::alu(Alu::Cmp, expected, a, size, rflags);
                if flags & alu::ZF != 0 {
                    self.store(to, size, b);
                } else {
                    // The CPU writes the old value back in this case.
                    self.store(to, size, a);
                    self.store(ACCUMULATOR, size, a);
                }
                flags
            }
        };
        self.vcpu.set(Reg::Rflags, flags);
    }

    fn scan(&mut self, op: Op, Operands { to, from, size, rflags, .. }: Operands) {
        let value = self.load(from, size);
        let (result, flags) = match op {
            // Without a set bit the register is kept, its upper half too (APM vol. 3, BSF).
            Op::Bsf | Op::Bsr => alu::scan(op == Op::Bsr, value, size, rflags),
            _ => {
                let (count, flags) = alu::count_zeros(op == Op::Lzcnt, value, size, rflags);
                (Some(count), flags)
            }
        };
        if let Some(result) = result {
            self.store(to, size, result);
        }
        self.vcpu.set(Reg::Rflags, flags);
    }

    fn multiply(&mut self, op: Op, Operands { to, from, size, rflags, .. }: Operands) {
        let flags = if let Op::Multiply { signed } = op {
            let (a, b) = (self.load(ACCUMULATOR, size), self.load(from, size));
            let ((low, high), flags) = alu::multiply(signed, a, b, size, rflags);
            self.store(ACCUMULATOR, size, low);
            self.store(upper_half(size), size, high);
            flags
        } else {
            let other = match self.instruction.third {
                Operand::Immediate(value) => value,
                _ => self.load(to, size),
            };
            let value = self.load(from, size);
            let ((product, _), flags) = alu::multiply(true, value, other, size, rflags);
            self.store(to, size, product);
            flags
        };
        self.vcpu.set(Reg::Rflags, flags);
    }

    fn divide(&mut self, signed: bool, Operands { from, size, .. }: Operands) -> Result<(), Stop> {
        let upper = upper_half(size);
        let (high, low) = (self.load(upper, size), self.load(ACCUMULATOR, size));
        let divisor = self.load(from, size);
        let (quotient, remainder) = alu::divide(signed, high, low, divisor, size)
            .ok_or(Stop::Raise(Event::exception(DIVIDE)))?;
        self.store(ACCUMULATOR, size, quotient);
        self.store(upper, size, remainder);
        Ok(())
    }

    fn shift(&mut self, op: Op, Operands { to, from, size, rflags, .. }: Operands) {
        let value = self.load(to, size);
        let shifted = if let Op::Shift(kind) = op {
            let count = self.load(from, 1);
            shift::shift(kind, value, count, size, rflags)
        } else {
            let count = match self.instruction.third {
                Operand::Immediate(count) => count,
                _ => self.vcpu.gpr(Gpr::Rcx),
            };
            let filler = self.load(from, size);
            alu::double_shift(op == Op::Shrd, value, filler, count, size, rflags)
        };
        if let Some((result, flags)) = shifted {
            self.store(to, size, result);
            self.vcpu.set(Reg::Rflags, flags);
        } else if !matches!(op, Op::Shift(_)) && size == 4 && matches!(to, Place::Register { .. }) {
            // The upper half is cleared nevertheless.
            self.store(to, size, value);
        }
    }
}

/// Returns whether an instruction writes its first operand.
fn writes(op: Op) -> bool {
    !matches!(op, Op::Test | Op::Alu(Alu::Cmp) | Op::Bit(BitOp::Test))
}

/// Location of the upper half of a product or dividend: AH for bytes, which use AX.
fn upper_half(size: u8) -> Place {
    match size {
        1 => Place::Register { register: Gpr::Rax, high: true },
        _ => Place::Register { register: Gpr::Rdx, high: false },
    }
}
