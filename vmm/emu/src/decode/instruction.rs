//! Decoded instructions.

use vmm_x86::{Gpr, Seg};

use crate::shift::Shift;

/// Arithmetic and logic operations, numbered as opcodes encode them.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Alu {
    /// Addition.
    Add,
    /// Inclusive or.
    Or,
    /// Addition with carry.
    Adc,
    /// Subtraction with borrow.
    Sbb,
    /// And.
    And,
    /// Subtraction.
    Sub,
    /// Exclusive or.
    Xor,
    /// Subtraction without result.
    Cmp,
}

/// Bit tests, numbered as opcodes encode them (from 4).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum BitOp {
    /// Test only.
    Test,
    /// Then set.
    Set,
    /// Then clear.
    Reset,
    /// Then invert.
    Complement,
}

/// Operation of an instruction. "First" and "second" are its operands in manual order.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Op {
    /// First becomes the second.
    Mov,
    /// First becomes the second, which is narrower, zero-extended.
    MovZx,
    /// First becomes the second, which is narrower, sign-extended.
    MovSx,
    /// First becomes the second with its bytes reversed.
    MovBe,
    /// First becomes the result, except of `CMP`.
    Alu(Alu),
    /// Flags of the "and" of both.
    Test,
    /// First becomes the second under a condition ([`holds`](crate::alu::holds)).
    MoveIf(u8),
    /// First becomes 1 if a condition holds, else 0.
    SetIf(u8),
    /// First is shifted or rotated by the second.
    Shift(Shift),
    /// Exchange.
    Xchg,
    /// Exchange, then first becomes the sum.
    Xadd,
    /// First becomes the second if it equals the accumulator, which becomes the first otherwise.
    Cmpxchg,
    /// First plus 1.
    Inc,
    /// First minus 1.
    Dec,
    /// Inverted bits.
    Not,
    /// Negative.
    Neg,
    /// A bit of the first, selected by the second.
    Bit(BitOp),
    /// `[rDI]` becomes `[rSI]`.
    Movs,
    /// `[rDI]` becomes the accumulator.
    Stos,
    /// The accumulator becomes `[rSI]`.
    Lods,
    /// `[rDI]` becomes the value read from the port in `dx`.
    Ins,
    /// The port in `dx` is written with `[rSI]`.
    Outs,
    /// Flags of `[rSI]` minus `[rDI]`.
    Cmps,
    /// Flags of the accumulator minus `[rDI]`.
    Scas,
    /// First becomes the index of the second's lowest set bit.
    Bsf,
    /// First becomes the index of the second's highest set bit.
    Bsr,
    /// First becomes the number of trailing zeros of the second.
    Tzcnt,
    /// First becomes the number of leading zeros of the second.
    Lzcnt,
    /// `rDX:rAX` becomes the product of the accumulator and the second.
    Imul,
    /// `rDX:rAX` becomes the product of the accumulator and the second, signed or not.
    Multiply {
        /// As signed numbers.
        signed: bool,
    },
    /// `rAX` becomes the quotient of `rDX:rAX` by the second, `rDX` the remainder, signed or not.
    Divide {
        /// As signed numbers.
        signed: bool,
    },
    /// First is shifted left by the third, filled from the second.
    Shld,
    /// First is shifted right by the third, filled from the second.
    Shrd,
    /// First becomes `CR0`, or its low half.
    Smsw,
    /// First becomes the second; one of them is a control register.
    MoveControl,
    /// The low four bits of `CR0` become those of the second; `PE` is not cleared.
    Lmsw,
    /// `CR0.TS` is cleared.
    Clts,
    /// The translation of the first's address is dropped.
    Invlpg,
    /// The task register is loaded with the descriptor selected by the second.
    Ltr,
    /// The second is pushed.
    Push,
    /// First is popped.
    Pop,
    /// The next instruction's address is pushed; jump to the second.
    Call,
    /// As [`Op::Call`]; the second is relative to the next instruction.
    CallRelative,
    /// Jump to the second.
    Jump,
    /// Jump to the popped address, then drop the second's number of bytes.
    Return,
    /// A stack frame of the second's length is created.
    Enter,
    /// The stack frame is removed.
    Leave,
    /// First becomes the second; one is an SSE register.
    VectorMove {
        /// A memory address that is not a multiple of 16 raises `#GP`.
        is_aligned: bool,
    },
}

impl Op {
    /// True if it advances rSI or rDI.
    pub fn is_string(self) -> bool {
        matches!(
            self,
            Self::Movs | Self::Stos | Self::Lods | Self::Ins | Self::Outs | Self::Cmps | Self::Scas
        )
    }
}

/// Repetition of a string instruction.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Repeat {
    /// Once.
    No,
    /// rCX times.
    Count,
    /// At most rCX times, while the comparison is equal (`REPE`).
    WhileEqual,
    /// At most rCX times, while the comparison differs (`REPNE`).
    WhileDifferent,
}

/// Base of an effective address.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Base {
    /// None.
    None,
    /// A register.
    Register(Gpr),
    /// The next instruction's address.
    Next,
}

/// A memory operand.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Address {
    /// Segment.
    pub segment: Seg,
    /// Base.
    pub base: Base,
    /// Index and its scale as a power of two.
    pub index: Option<(Gpr, u8)>,
    /// Displacement, sign-extended.
    pub displacement: u64,
}

/// An operand.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Operand {
    /// None.
    None,
    /// In memory.
    Memory(Address),
    /// A general register; `high`: its bits 15:8 (`AH`, `CH`, `DH`, `BH`).
    Register {
        /// The register.
        register: Gpr,
        /// The high byte.
        high: bool,
    },
    /// A constant, sign-extended according to the manual.
    Immediate(u64),
    /// An SSE register.
    Vector(u8),
    /// A control register, by number.
    Control(u8),
}

/// A decoded instruction.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Instruction {
    /// Operation.
    pub op: Op,
    /// Bytes of its operands: 1, 2, 4 or 8; of SSE registers 16.
    pub size: u8,
    /// Bytes of the second operand, if it is narrower.
    pub source_size: u8,
    /// First operand.
    pub first: Operand,
    /// Second operand.
    pub second: Operand,
    /// Third operand: a constant, or `CL`.
    pub third: Operand,
    /// Segment of `[rSI]` of a string instruction.
    pub segment: Seg,
    /// Bytes of an address: 2, 4 or 8.
    pub address_size: u8,
    /// `REP` and similar prefixes.
    pub repeat: Repeat,
    /// Bytes of the instruction.
    pub length: u8,
}
