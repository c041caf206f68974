//! Arithmetic with flags (AMD APM vol. 1, section 3.1.4).

use crate::decode::{Alu, BitOp, ones, sign_extend};

/// Carry.
pub const CF: u64 = 1 << 0;
/// Even parity of the low byte.
pub const PF: u64 = 1 << 2;
/// Carry out of bit 3.
pub const AF: u64 = 1 << 4;
/// Zero.
pub const ZF: u64 = 1 << 6;
/// Sign.
pub const SF: u64 = 1 << 7;
/// Direction of string instructions.
pub const DF: u64 = 1 << 10;
/// Signed overflow.
pub const OF: u64 = 1 << 11;
const ARITHMETIC: u64 = CF | PF | AF | ZF | SF | OF;

fn sign(value: u64, size: u8) -> bool {
    sign_extend(value, size) >> 63 != 0
}

/// Zero, sign and parity of a result.
fn result_flags(result: u64, size: u8) -> u64 {
    let mut flags = 0;
    if result & ones(size) == 0 {
        flags |= ZF;
    }
    if sign(result, size) {
        flags |= SF;
    }
    if (result as u8).count_ones().is_multiple_of(2) {
        flags |= PF;
    }
    flags
}

/// `first + second + carry` and the arithmetic flags.
fn add(first: u64, second: u64, carry: u64, size: u8) -> (u64, u64) {
    let (first, second) = (first & ones(size), second & ones(size));
    let wide = u128::from(first) + u128::from(second) + u128::from(carry);
    let result = wide as u64 & ones(size);
    let mut flags = result_flags(result, size);
    if wide > u128::from(ones(size)) {
        flags |= CF;
    }
    flags |= (first ^ second ^ result) & AF;
    if sign((first ^ result) & (second ^ result), size) {
        flags |= OF;
    }
    (result, flags)
}

/// `first - second - borrow` and the arithmetic flags.
fn subtract(first: u64, second: u64, borrow: u64, size: u8) -> (u64, u64) {
    let (first, second) = (first & ones(size), second & ones(size));
    let result = first.wrapping_sub(second).wrapping_sub(borrow) & ones(size);
    let mut flags = result_flags(result, size);
    if u128::from(second) + u128::from(borrow) > u128::from(first) {
        flags |= CF;
    }
    flags |= (first ^ second ^ result) & AF;
    if sign((first ^ second) & (first ^ result), size) {
        flags |= OF;
    }
    (result, flags)
}

/// Result of an operation on `size` bytes, and `RFLAGS` after it. (`CMP` has the result of `SUB`.)
pub fn alu(op: Alu, first: u64, second: u64, size: u8, rflags: u64) -> (u64, u64) {
    let carry = rflags & CF;
    let logic = |result: u64| (result & ones(size), result_flags(result, size));
    let (result, flags) = match op {
        Alu::Add => add(first, second, 0, size),
        Alu::Adc => add(first, second, carry, size),
        Alu::Sub | Alu::Cmp => subtract(first, second, 0, size),
        Alu::Sbb => subtract(first, second, carry, size),
        Alu::And => logic(first & second),
        Alu::Or => logic(first | second),
        Alu::Xor => logic(first ^ second),
    };
    (result, rflags & !ARITHMETIC | flags)
}

/// `INC` or `DEC`: as addition or subtraction of 1, but the carry stays.
pub fn step(up: bool, value: u64, size: u8, rflags: u64) -> (u64, u64) {
    let op = if up { Alu::Add } else { Alu::Sub };
    let (result, flags) = alu(op, value, 1, size, rflags);
    (result, flags & !CF | rflags & CF)
}

/// A bit operation on `value`; `bit` is within it. The old bit goes to the carry.
pub fn bit(op: BitOp, value: u64, bit: u64, rflags: u64) -> (u64, u64) {
    let mask = 1 << (bit & 63);
    let result = match op {
        BitOp::Test => value,
        BitOp::Set => value | mask,
        BitOp::Reset => value & !mask,
        BitOp::Complement => value ^ mask,
    };
    (result, rflags & !CF | if value & mask != 0 { CF } else { 0 })
}
