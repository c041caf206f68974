//! Decoding of the instructions that access device memory in practice (AMD APM vol. 3, chapter 1
//! and appendix A).
//!
//! Supported: moves of all sizes, the eight arithmetic and logic operations, `TEST`, `XCHG`,
//! `XADD`, `CMPXCHG`, `INC`, `DEC`, `NOT`, `NEG`, `MUL`, `IMUL`, `SHLD`, `SHRD`, bit tests and
//! scans, `MOVS`, `CMPS`, `STOS`, `LODS`, `SCAS`, `INS`, `OUTS`; `PUSH`, `POP`, near `CALL`, `JMP`
//! and `RET`, `ENTER` without nesting, `LEAVE`; `LTR` of an operand in memory; `SMSW`, `LMSW`,
//! `CLTS`, `INVLPG` and moves of control registers; `MOVDQU` and similar between memory and SSE
//! registers; in 16-, 32- and 64-bit code with all prefixes. All other instructions are unknown. A
//! supported instruction has the length and operands of the manual: tests compare with another
//! decoder.

use crate::shift::Shift;
use vmm_x86::walk::CodeSize;
use vmm_x86::{Gpr, Seg};

use crate::vector;

pub use instruction::*;

mod instruction;

/// Reason for not decoding bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum DecodeError {
    /// More bytes are needed.
    Truncated,
    /// Not a supported instruction.
    Unknown,
}

/// Reader of the instruction's bytes.
struct Bytes<'a> {
    bytes: &'a [u8],
    at: usize,
}

impl Bytes<'_> {
    fn byte(&mut self) -> Result<u8, DecodeError> {
        if self.at >= 15 {
            return Err(DecodeError::Unknown);
        }
        let byte = *self.bytes.get(self.at).ok_or(DecodeError::Truncated)?;
        self.at += 1;
        Ok(byte)
    }

    /// A little-endian number of `size` bytes, sign-extended.
    fn number(&mut self, size: u8) -> Result<u64, DecodeError> {
        let mut value = 0;
        for shift in 0..size {
            value |= u64::from(self.byte()?) << (8 * shift);
        }
        Ok(sign_extend(value, size))
    }
}

/// The value of the low `size` bytes, sign-extended.
pub fn sign_extend(value: u64, size: u8) -> u64 {
    let unused = 64 - 8 * u32::from(size.clamp(1, 8));
    ((value << unused) as i64 >> unused) as u64
}

#[derive(Clone, Copy)]
struct Prefixes {
    operand: bool,
    address: bool,
    repeat: Option<u8>,
    lock: bool,
    segment: Option<Seg>,
    rex: u8,
}

impl Prefixes {
    const REX_W: u8 = 1 << 3;

    fn read(bytes: &mut Bytes, mode: CodeSize) -> Result<(Self, u8), DecodeError> {
        let mut found = Self {
            operand: false,
            address: false,
            repeat: None,
            lock: false,
            segment: None,
            rex: 0,
        };
        loop {
            let byte = bytes.byte()?;
            match byte {
                0x66 => found.operand = true,
                0x67 => found.address = true,
                0xf0 => found.lock = true,
                0xf2 | 0xf3 => found.repeat = Some(byte),
                // Ignored in 64-bit mode (APM vol. 3, section 1.2.4).
                0x26 | 0x2e | 0x36 | 0x3e if mode == CodeSize::Bits64 => {}
                0x26 => found.segment = Some(Seg::Es),
                0x2e => found.segment = Some(Seg::Cs),
                0x36 => found.segment = Some(Seg::Ss),
                0x3e => found.segment = Some(Seg::Ds),
                0x64 => found.segment = Some(Seg::Fs),
                0x65 => found.segment = Some(Seg::Gs),
                // REX is effective only directly before the opcode.
                0x40..=0x4f if mode == CodeSize::Bits64 => {
                    found.rex = byte;
                    return Ok((found, bytes.byte()?));
                }
                _ => return Ok((found, byte)),
            }
        }
    }

    fn rex_bit(&self, bit: u8) -> u8 {
        self.rex >> bit & 1
    }
}

/// Decodes an instruction from its first bytes, at most 15.
///
/// # Errors
/// See [`DecodeError`].
pub fn decode(bytes: &[u8], mode: CodeSize) -> Result<Instruction, DecodeError> {
    let mut bytes = Bytes { bytes, at: 0 };
    let (prefixes, opcode) = Prefixes::read(&mut bytes, mode)?;
    let mut decoder = Decoder::new(bytes, prefixes, mode);
    let mut instruction = match opcode {
        0x0f => {
            let second = decoder.bytes.byte()?;
            decoder.two_byte(second)?
        }
        _ => decoder.one_byte(opcode)?,
    };
    instruction.length = decoder.bytes.at as u8;
    // LOCK requires a written memory operand (APM vol. 3, section 1.2.5).
    let lockable = match instruction.op {
        Op::Alu(op) => op != Alu::Cmp,
        Op::Bit(op) => op != BitOp::Test,
        Op::Xchg | Op::Xadd | Op::Cmpxchg | Op::Inc | Op::Dec | Op::Not | Op::Neg => true,
        _ => false,
    };
    let locks_memory = lockable && matches!(instruction.first, Operand::Memory(_));
    // With MOV of CR0 it selects CR8.
    if prefixes.lock && !locks_memory && instruction.op != Op::MoveControl {
        return Err(DecodeError::Unknown);
    }
    Ok(instruction)
}

/// Refuses an instruction without a memory operand, which accesses no device.
fn with_memory(instruction: Instruction) -> Result<Instruction, DecodeError> {
    let is_memory = |operand| matches!(operand, Operand::Memory(_));
    match is_memory(instruction.first) || is_memory(instruction.second) {
        true => Ok(instruction),
        false => Err(DecodeError::Unknown),
    }
}

struct Decoder<'a> {
    bytes: Bytes<'a>,
    prefixes: Prefixes,
    mode: CodeSize,
    /// Operand size of non-byte opcodes.
    wide: u8,
    address_size: u8,
}

impl<'a> Decoder<'a> {
    fn new(bytes: Bytes<'a>, prefixes: Prefixes, mode: CodeSize) -> Self {
        let long = mode == CodeSize::Bits64;
        let wide = match (mode, prefixes.operand) {
            (CodeSize::Bits64, _) if prefixes.rex & Prefixes::REX_W != 0 => 8,
            (CodeSize::Bits16, false) | (CodeSize::Bits32 | CodeSize::Bits64, true) => 2,
            _ => 4,
        };
        let address_size = match (mode, prefixes.address) {
            (_, false) if long => 8,
            (CodeSize::Bits16, false) | (CodeSize::Bits32, true) => 2,
            _ => 4,
        };
        Self { bytes, prefixes, mode, wide, address_size }
    }

    fn size(&self, opcode: u8) -> u8 {
        if opcode & 1 == 0 { 1 } else { self.wide }
    }

    fn make(&self, op: Op, size: u8, first: Operand, second: Operand) -> Instruction {
        Instruction {
            op,
            size,
            source_size: size,
            first,
            second,
            third: Operand::None,
            segment: self.prefixes.segment.unwrap_or(Seg::Ds),
            address_size: self.address_size,
            repeat: Repeat::No,
            length: 0,
        }
    }

    /// An instruction whose first operand is r/m and whose second is a register.
    fn on_memory(&mut self, op: Op, size: u8) -> Result<Instruction, DecodeError> {
        let (memory, register) = self.operands(size, size)?;
        Ok(self.make(op, size, memory, register))
    }

    /// An instruction whose first operand is a register and whose second is r/m.
    fn on_register(&mut self, op: Op, size: u8) -> Result<Instruction, DecodeError> {
        let (memory, register) = self.operands(size, size)?;
        Ok(self.make(op, size, register, memory))
    }

    fn one_byte(&mut self, opcode: u8) -> Result<Instruction, DecodeError> {
        let size = self.size(opcode);
        match opcode {
            0x00..=0x3f if opcode & 7 < 4 => {
                let op = Op::Alu(alu(opcode >> 3));
                if opcode & 2 == 0 { self.on_memory(op, size) } else { self.on_register(op, size) }
            }
            // The manuals differ on the 16-bit form, which compilers do not emit.
            0x63 if self.mode == CodeSize::Bits64 && self.wide != 2 => {
                let (memory, register) = self.operands(4, self.wide)?;
                let moved = self.make(Op::MovSx, self.wide, register, memory);
                Ok(Instruction { source_size: 4, ..moved })
            }
            0x50..=0x5f | 0x68 | 0x6a | 0x8f | 0xc2 | 0xc3 | 0xc8 | 0xc9 | 0xe8 => {
                self.stack(opcode)
            }
            0x69 | 0x6b => {
                let product = self.on_register(Op::Imul, self.wide)?;
                let bytes = if opcode == 0x6b { 1 } else { self.wide.min(4) };
                Ok(Instruction { third: Operand::Immediate(self.bytes.number(bytes)?), ..product })
            }
            // There is no 64-bit port access.
            0x6c | 0x6d => Ok(self.string(Op::Ins, size.min(4))),
            0x6e | 0x6f => Ok(self.string(Op::Outs, size.min(4))),
            0x84 | 0x85 => self.on_memory(Op::Test, size),
            0x86 | 0x87 => self.on_memory(Op::Xchg, size),
            0x88 | 0x89 => self.on_memory(Op::Mov, size),
            0x8a | 0x8b => self.on_register(Op::Mov, size),
            0xa0..=0xa3 => self.absolute(opcode, size),
            0xa4 | 0xa5 => Ok(self.string(Op::Movs, size)),
            0xa6 | 0xa7 => Ok(self.string(Op::Cmps, size)),
            0xaa | 0xab => Ok(self.string(Op::Stos, size)),
            0xac | 0xad => Ok(self.string(Op::Lods, size)),
            0xae | 0xaf => Ok(self.string(Op::Scas, size)),
            0xff => self.group_of_ff(),
            _ => self.group_opcode(opcode, size),
        }
    }

    /// A move between the accumulator and an address in the instruction.
    fn absolute(&mut self, opcode: u8, size: u8) -> Result<Instruction, DecodeError> {
        let displacement = self.bytes.number(self.address_size)? & ones(self.address_size);
        let segment = self.prefixes.segment.unwrap_or(Seg::Ds);
        let address = Address { segment, base: Base::None, index: None, displacement };
        let memory = Operand::Memory(address);
        let accumulator = Operand::Register { register: Gpr::Rax, high: false };
        let (first, second) =
            if opcode < 0xa2 { (accumulator, memory) } else { (memory, accumulator) };
        Ok(self.make(Op::Mov, size, first, second))
    }

    /// Opcodes of one byte that the ModRM byte extends.
    fn group_opcode(&mut self, opcode: u8, size: u8) -> Result<Instruction, DecodeError> {
        if !matches!(opcode, 0x80 | 0x81 | 0x83 | 0xc0 | 0xc1 | 0xc6 | 0xc7 | 0xd0..=0xd3)
            && !matches!(opcode, 0xf6 | 0xf7 | 0xfe)
        {
            return Err(DecodeError::Unknown);
        }
        let (place, selector) = self.group(size)?;
        let is_memory = matches!(place, Operand::Memory(_));
        Ok(match (opcode, selector) {
            (0x80 | 0x81 | 0x83, _) => {
                let bytes = if opcode == 0x81 { size.min(4) } else { 1 };
                let immediate = Operand::Immediate(self.bytes.number(bytes)?);
                self.make(Op::Alu(alu(selector)), size, place, immediate)
            }
            // The register form accesses no device.
            (0xc0 | 0xc1 | 0xd0..=0xd3, _) if is_memory => {
                let count = match opcode {
                    0xc0 | 0xc1 => Operand::Immediate(self.bytes.byte()?.into()),
                    0xd0 | 0xd1 => Operand::Immediate(1),
                    _ => Operand::Register { register: Gpr::Rcx, high: false },
                };
                let op = Op::Shift(Shift::from_code(selector));
                Instruction { source_size: 1, ..self.make(op, size, place, count) }
            }
            (0xc6 | 0xc7, 0) | (0xf6 | 0xf7, 0 | 1) => {
                let immediate = Operand::Immediate(self.bytes.number(size.min(4))?);
                let op = if opcode < 0xf0 { Op::Mov } else { Op::Test };
                self.make(op, size, place, immediate)
            }
            (0xf6 | 0xf7, 2) => self.make(Op::Not, size, place, Operand::None),
            (0xf6 | 0xf7, 3) => self.make(Op::Neg, size, place, Operand::None),
            (0xf6 | 0xf7, 4 | 5) => {
                self.make(Op::Multiply { signed: selector == 5 }, size, Operand::None, place)
            }
            (0xf6 | 0xf7, _) => {
                self.make(Op::Divide { signed: selector == 7 }, size, Operand::None, place)
            }
            (0xfe, 0) => self.make(Op::Inc, size, place, Operand::None),
            (0xfe, 1) => self.make(Op::Dec, size, place, Operand::None),
            _ => return Err(DecodeError::Unknown),
        })
    }

    fn two_byte(&mut self, opcode: u8) -> Result<Instruction, DecodeError> {
        let size = self.size(opcode);
        match opcode {
            0x00 => match self.group(2)? {
                (memory @ Operand::Memory(_), 3) => {
                    Ok(self.make(Op::Ltr, 2, Operand::None, memory))
                }
                _ => Err(DecodeError::Unknown),
            },
            0x01 => self.group_of_0f01(),
            0x06 => Ok(self.make(Op::Clts, 2, Operand::None, Operand::None)),
            0x20 | 0x22 => self.move_control(opcode),
            0x10 | 0x11 | 0x28 | 0x29 | 0x2b | 0x6f | 0x7f | 0xe7 => self.vector_move(opcode),
            0x38 => self.three_byte(),
            0x40..=0x4f => self.on_register(Op::MoveIf(opcode & 15), self.wide),
            0x90..=0x9f => {
                let (memory, _) = self.group(1)?;
                Ok(self.make(Op::SetIf(opcode & 15), 1, memory, Operand::None))
            }
            0xa4 | 0xa5 | 0xac | 0xad => {
                let op = if opcode < 0xac { Op::Shld } else { Op::Shrd };
                let shift = self.on_memory(op, self.wide)?;
                let third = match opcode & 1 {
                    0 => Operand::Immediate(self.bytes.byte()?.into()),
                    _ => Operand::Register { register: Gpr::Rcx, high: false },
                };
                Ok(Instruction { third, ..shift })
            }
            0xaf => self.on_register(Op::Imul, self.wide),
            0xa3 | 0xab | 0xb3 | 0xbb => self.on_memory(Op::Bit(bit_op(opcode >> 3)), self.wide),
            0xb0 | 0xb1 => self.on_memory(Op::Cmpxchg, size),
            0xb6 | 0xb7 | 0xbe | 0xbf => {
                let source_size = if opcode & 1 == 0 { 1 } else { 2 };
                let op = if opcode < 0xb8 { Op::MovZx } else { Op::MovSx };
                let (memory, register) = self.operands(source_size, self.wide)?;
                let moved = self.make(op, self.wide, register, memory);
                Ok(Instruction { source_size, ..moved })
            }
            0xba => self.bit_test(),
            0xbc | 0xbd => self.bit_scan(opcode),
            0xc0 | 0xc1 => self.on_memory(Op::Xadd, size),
            // MOVNTI: a non-temporal move to memory. It has no 16-bit form.
            0xc3 if self.prefixes.repeat.is_none() && !self.prefixes.operand => {
                self.on_memory(Op::Mov, self.wide.max(4)).and_then(with_memory)
            }
            _ => Err(DecodeError::Unknown),
        }
    }

    /// Opcode `0F 01`: `SMSW`, `LMSW`, `INVLPG`.
    fn group_of_0f01(&mut self) -> Result<Instruction, DecodeError> {
        let none = Operand::None;
        match self.group(2)? {
            (memory @ Operand::Memory(_), 4) => Ok(self.make(Op::Smsw, 2, memory, none)),
            (register, 4) => Ok(self.make(Op::Smsw, self.wide, register, none)),
            (word, 6) => Ok(self.make(Op::Lmsw, 2, none, word)),
            (memory @ Operand::Memory(_), 7) => Ok(self.make(Op::Invlpg, 1, memory, none)),
            _ => Err(DecodeError::Unknown),
        }
    }

    /// `MOV` to and from a control register. The mode bits of ModRM and the operand size have no
    /// effect (APM vol. 3, `MOV CRn`).
    fn move_control(&mut self, opcode: u8) -> Result<Instruction, DecodeError> {
        let modrm = self.bytes.byte()?;
        let size = if self.mode == CodeSize::Bits64 { 8 } else { 4 };
        let register = self.register(modrm & 7 | self.prefixes.rex_bit(0) << 3, size);
        let control = match (modrm >> 3 & 7 | self.prefixes.rex_bit(2) << 3, self.prefixes.lock) {
            (0, true) => 8,
            (_, true) => return Err(DecodeError::Unknown),
            (control, false) => control,
        };
        let control = Operand::Control(control);
        let (first, second) =
            if opcode == 0x22 { (control, register) } else { (register, control) };
        Ok(self.make(Op::MoveControl, size, first, second))
    }

    /// Moves between SSE registers and memory.
    fn vector_move(&mut self, opcode: u8) -> Result<Instruction, DecodeError> {
        let Prefixes { repeat, operand, .. } = self.prefixes;
        let (op, stores) = vector::operation(opcode, repeat, operand)?;
        let (memory, register) = self.group(vector::SIZE)?;
        let register = Operand::Vector(register | self.prefixes.rex_bit(2) << 3);
        let (first, second) = if stores { (memory, register) } else { (register, memory) };
        with_memory(self.make(op, vector::SIZE, first, second))
    }

    /// Bit tests with the bit in the instruction.
    fn bit_test(&mut self) -> Result<Instruction, DecodeError> {
        let (memory, selector) = self.group(self.wide)?;
        if selector < 4 {
            return Err(DecodeError::Unknown);
        }
        // The bit is inside the operand.
        let bit = u64::from(self.bytes.byte()?) & (8 * u64::from(self.wide) - 1);
        Ok(self.make(Op::Bit(bit_op(selector)), self.wide, memory, Operand::Immediate(bit)))
    }

    fn bit_scan(&mut self, opcode: u8) -> Result<Instruction, DecodeError> {
        let op = match (opcode, self.prefixes.repeat) {
            (0xbc, None) => Op::Bsf,
            (_, None) => Op::Bsr,
            (0xbc, Some(0xf3)) => Op::Tzcnt,
            (_, Some(0xf3)) => Op::Lzcnt,
            _ => return Err(DecodeError::Unknown),
        };
        self.on_register(op, self.wide)
    }

    /// Opcodes that begin with `0F 38`: `MOVBE`.
    fn three_byte(&mut self) -> Result<Instruction, DecodeError> {
        let opcode = self.bytes.byte()?;
        // F2 selects CRC32, F3 is undefined.
        match opcode {
            _ if self.prefixes.repeat.is_some() => Err(DecodeError::Unknown),
            0xf0 => self.on_register(Op::MovBe, self.wide).and_then(with_memory),
            0xf1 => self.on_memory(Op::MovBe, self.wide).and_then(with_memory),
            _ => Err(DecodeError::Unknown),
        }
    }

    fn string(&self, op: Op, size: u8) -> Instruction {
        let instruction = self.make(op, size, Operand::None, Operand::None);
        let repeat = match self.prefixes.repeat {
            None => Repeat::No,
            Some(prefix) if matches!(op, Op::Cmps | Op::Scas) => {
                if prefix == 0xf3 {
                    Repeat::WhileEqual
                } else {
                    Repeat::WhileDifferent
                }
            }
            Some(_) => Repeat::Count,
        };
        Instruction { repeat, ..instruction }
    }

    /// Bytes that an instruction moves to or from the stack (APM vol. 3, section 1.2.2 and table
    /// B-5).
    fn stack_size(&self) -> u8 {
        match self.mode {
            CodeSize::Bits64 if self.wide != 2 => 8,
            _ => self.wide,
        }
    }

    /// Bytes of a near branch's target. With a prefix CPUs differ in 64-bit mode; in other modes it
    /// is not supported.
    fn branch_size(&self) -> Result<u8, DecodeError> {
        match self.mode {
            _ if self.prefixes.operand => Err(DecodeError::Unknown),
            CodeSize::Bits64 => Ok(8),
            _ => Ok(self.wide),
        }
    }

    /// `PUSH`, `POP`, near branches through the stack, `ENTER`, `LEAVE`.
    fn stack(&mut self, opcode: u8) -> Result<Instruction, DecodeError> {
        let size = self.stack_size();
        let nothing = Operand::None;
        let register = |decoder: &Self| {
            let code = opcode & 7 | decoder.prefixes.rex_bit(0) << 3;
            Operand::Register { register: Gpr::from_code(code), high: false }
        };
        Ok(match opcode {
            0x50..=0x57 => self.make(Op::Push, size, nothing, register(self)),
            0x58..=0x5f => self.make(Op::Pop, size, register(self), nothing),
            0x68 | 0x6a => {
                let bytes = if opcode == 0x6a { 1 } else { size.min(4) };
                let value = Operand::Immediate(self.bytes.number(bytes)?);
                self.make(Op::Push, size, nothing, value)
            }
            0x8f => match self.group(size)? {
                (place, 0) => self.make(Op::Pop, size, place, nothing),
                _ => return Err(DecodeError::Unknown),
            },
            0xc2 | 0xc3 => {
                let size = self.branch_size()?;
                let more = if opcode == 0xc2 { self.bytes.number(2)? & 0xffff } else { 0 };
                self.make(Op::Return, size, nothing, Operand::Immediate(more))
            }
            0xc8 => {
                let length = Operand::Immediate(self.bytes.number(2)? & 0xffff);
                if self.bytes.byte()? & 31 != 0 {
                    return Err(DecodeError::Unknown);
                }
                self.make(Op::Enter, size, nothing, length)
            }
            0xc9 => self.make(Op::Leave, size, nothing, nothing),
            0xe8 => {
                let size = self.branch_size()?;
                let distance = Operand::Immediate(self.bytes.number(size.min(4))?);
                self.make(Op::CallRelative, size, nothing, distance)
            }
            _ => return Err(DecodeError::Unknown),
        })
    }

    /// Opcode `FF`, whose extension also determines the size.
    fn group_of_ff(&mut self) -> Result<Instruction, DecodeError> {
        let modrm = self.bytes.byte()?;
        let (op, size) = match modrm >> 3 & 7 {
            0 => (Op::Inc, self.wide),
            1 => (Op::Dec, self.wide),
            2 => (Op::Call, self.branch_size()?),
            4 => (Op::Jump, self.branch_size()?),
            6 => (Op::Push, self.stack_size()),
            _ => return Err(DecodeError::Unknown),
        };
        let place = self.place(modrm, size)?;
        Ok(match op {
            Op::Inc | Op::Dec => self.make(op, size, place, Operand::None),
            _ => self.make(op, size, Operand::None, place),
        })
    }

    /// A general register of `size` bytes by its encoding with REX bit.
    fn register(&self, code: u8, size: u8) -> Operand {
        if size == 1 && self.prefixes.rex == 0 && code & 0xc == 4 {
            return Operand::Register { register: Gpr::from_code(code & 3), high: true };
        }
        Operand::Register { register: Gpr::from_code(code), high: false }
    }

    /// The r/m operand and the register operand of a ModRM byte, of these sizes.
    fn operands(&mut self, memory: u8, register: u8) -> Result<(Operand, Operand), DecodeError> {
        let modrm = self.bytes.byte()?;
        let code = modrm >> 3 & 7 | self.prefixes.rex_bit(2) << 3;
        let register = self.register(code, register);
        Ok((self.place(modrm, memory)?, register))
    }

    /// The r/m operand and the opcode extension of a ModRM byte.
    fn group(&mut self, size: u8) -> Result<(Operand, u8), DecodeError> {
        let modrm = self.bytes.byte()?;
        Ok((self.place(modrm, size)?, modrm >> 3 & 7))
    }

    fn place(&mut self, modrm: u8, size: u8) -> Result<Operand, DecodeError> {
        if modrm >> 6 == 3 {
            return Ok(self.register(modrm & 7 | self.prefixes.rex_bit(0) << 3, size));
        }
        let address =
            if self.address_size == 2 { self.address_16(modrm)? } else { self.address_32(modrm)? };
        Ok(Operand::Memory(address))
    }

    /// 16-bit addressing (APM vol. 3, table A-33).
    fn address_16(&mut self, modrm: u8) -> Result<Address, DecodeError> {
        let (mode, place) = (modrm >> 6, modrm & 7);
        let direct = mode == 0 && place == 6;
        let (base, index) = match place {
            0 => (Gpr::Rbx, Some((Gpr::Rsi, 0))),
            1 => (Gpr::Rbx, Some((Gpr::Rdi, 0))),
            2 => (Gpr::Rbp, Some((Gpr::Rsi, 0))),
            3 => (Gpr::Rbp, Some((Gpr::Rdi, 0))),
            4 => (Gpr::Rsi, None),
            5 => (Gpr::Rdi, None),
            6 => (Gpr::Rbp, None),
            _ => (Gpr::Rbx, None),
        };
        let displacement = match mode {
            0 if direct => self.bytes.number(2)? & 0xffff,
            0 => 0,
            1 => self.bytes.number(1)?,
            _ => self.bytes.number(2)?,
        };
        let stack = base == Gpr::Rbp && !direct;
        Ok(Address {
            segment: self.segment(stack),
            base: if direct { Base::None } else { Base::Register(base) },
            index,
            displacement,
        })
    }

    /// 32- and 64-bit addressing (APM vol. 3, tables ).
    fn address_32(&mut self, modrm: u8) -> Result<Address, DecodeError> {
        let mode = modrm >> 6;
        let mut code = modrm & 7;
        let mut index = None;
        let with_sib = code == 4;
        if with_sib {
            let sib = self.bytes.byte()?;
            let index_code = sib >> 3 & 7 | self.prefixes.rex_bit(1) << 3;
            // Code 4 without REX.X is "no index".
            index = (index_code != 4).then(|| (Gpr::from_code(index_code), sib >> 6));
            code = sib & 7;
        }
        let absolute = mode == 0 && code == 5;
        let base = if !absolute {
            Base::Register(Gpr::from_code(code | self.prefixes.rex_bit(0) << 3))
        } else if with_sib || self.mode != CodeSize::Bits64 {
            Base::None
        } else {
            Base::Next
        };
        let displacement = match mode {
            0 if absolute => self.bytes.number(4)?,
            0 => 0,
            1 => self.bytes.number(1)?,
            _ => self.bytes.number(4)?,
        };
        let stack = matches!(base, Base::Register(Gpr::Rsp | Gpr::Rbp));
        Ok(Address { segment: self.segment(stack), base, index, displacement })
    }

    fn segment(&self, stack: bool) -> Seg {
        self.prefixes.segment.unwrap_or(if stack { Seg::Ss } else { Seg::Ds })
    }
}

/// All bits of `size` bytes.
pub fn ones(size: u8) -> u64 {
    u64::MAX >> (64 - 8 * u32::from(size.clamp(1, 8)))
}

fn alu(code: u8) -> Alu {
    match code & 7 {
        0 => Alu::Add,
        1 => Alu::Or,
        2 => Alu::Adc,
        3 => Alu::Sbb,
        4 => Alu::And,
        5 => Alu::Sub,
        6 => Alu::Xor,
        _ => Alu::Cmp,
    }
}

fn bit_op(code: u8) -> BitOp {
    match code & 3 {
        0 => BitOp::Test,
        1 => BitOp::Set,
        2 => BitOp::Reset,
        _ => BitOp::Complement,
    }
}

#[cfg(test)]
mod tests;
