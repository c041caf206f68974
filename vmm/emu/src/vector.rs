//! Moves of SSE registers (APM vol. 4), the source of 16-byte accesses to a device. A device sees
//! two accesses of 8 bytes.

use hw_walk::Intent;
use vmm_x86::{Event, X86Vcpu};

use crate::decode::{DecodeError, Op, Operand, ones};
use crate::{Devices, Emulator, PROTECTION, Stop};

/// Bytes of a register.
pub(crate) const SIZE: u8 = 16;

/// Decodes `0F` and this opcode, with `F3` or `F2` as the last such prefix and with or without
/// `66`: returns the operation, and true if it stores.
///
/// # Errors
/// If it is not a move of a complete SSE register.
pub(crate) fn operation(
    opcode: u8,
    repeat: Option<u8>,
    operand: bool,
) -> Result<(Op, bool), DecodeError> {
    let is_aligned = match (opcode, repeat, operand) {
        // MOVUPS, MOVUPD; MOVDQU
        (0x10 | 0x11, None, _) | (0x6f | 0x7f, Some(0xf3), _) => false,
        // MOVAPS, MOVAPD; MOVNTPS, MOVNTPD; MOVDQA; MOVNTDQ
        (0x28 | 0x29 | 0x2b, None, _) | (0x6f | 0x7f | 0xe7, None, true) => true,
        _ => return Err(DecodeError::Unknown),
    };
    Ok((Op::VectorMove { is_aligned }, matches!(opcode, 0x11 | 0x29 | 0x2b | 0x7f | 0xe7)))
}

impl<V: X86Vcpu, D: Devices> Emulator<'_, V, D> {
    /// Executes [`Op::VectorMove`]. The decoder rejects the register form.
    pub(crate) fn vector_move(&mut self, is_aligned: bool) -> Result<(), Stop> {
        let (address, register, stores) = match (self.instruction.first, self.instruction.second) {
            (Operand::Memory(address), Operand::Vector(register)) => (address, register, true),
            (Operand::Vector(register), Operand::Memory(address)) => (address, register, false),
            _ => return Ok(()),
        };
        let offset = self.effective(address);
        if is_aligned && !self.linear(address.segment, offset).is_multiple_of(SIZE.into()) {
            return Err(Stop::Raise(Event::exception_code(PROTECTION, 0)));
        }
        let intent = if stores { Intent::Write } else { Intent::Read };
        let next = offset.wrapping_add(8) & ones(self.instruction.address_size);
        let low = self.span(address.segment, offset, 8, intent)?;
        let high = self.span(address.segment, next, 8, intent)?;
        match self.vcpu.vector(register) {
            Some(value) if stores => {
                self.write(low, value[0]);
                self.write(high, value[1]);
            }
            _ => {
                let value = [self.read(low), self.read(high)];
                self.vcpu.set_vector(register, value);
            }
        }
        Ok(())
    }
}
