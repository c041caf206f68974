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
pub(crate) fn result_flags(result: u64, size: u8) -> u64 {
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

/// Returns true if a condition holds, by the low four bits of an opcode (APM vol. 3, table A-6).
pub fn holds(condition: u8, rflags: u64) -> bool {
    let is = |flag: u64| rflags & flag != 0;
    let less = is(SF) != is(OF);
    let found = match condition >> 1 & 7 {
        0 => is(OF),
        1 => is(CF),
        2 => is(ZF),
        3 => is(CF) || is(ZF),
        4 => is(SF),
        5 => is(PF),
        6 => less,
        _ => less || is(ZF),
    };
    found != (condition & 1 != 0)
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

/// `INC` or `DEC`: as addition or subtraction of 1, but the carry flag is kept.
pub fn step(up: bool, value: u64, size: u8, rflags: u64) -> (u64, u64) {
    let op = if up { Alu::Add } else { Alu::Sub };
    let (result, flags) = alu(op, value, 1, size, rflags);
    (result, flags & !CF | rflags & CF)
}

/// A bit operation on `value`; `bit` is inside it. The old bit goes to the carry flag.
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

/// Index of the bit that `BSF` (or backwards `BSR`) finds; `None` if no bit is set. Only ZF is
/// defined after it.
pub fn scan(backwards: bool, value: u64, size: u8, rflags: u64) -> (Option<u64>, u64) {
    let value = value & ones(size);
    if value == 0 {
        return (None, rflags | ZF);
    }
    let bit = if backwards { value.ilog2() } else { value.trailing_zeros() };
    (Some(bit.into()), rflags & !ZF)
}

/// `TZCNT`, or backwards `LZCNT`.
pub fn count_zeros(backwards: bool, value: u64, size: u8, rflags: u64) -> (u64, u64) {
    let bits = 8 * u32::from(size);
    let value = value & ones(size);
    let count = match (value, backwards) {
        (0, _) => bits,
        (_, true) => value.leading_zeros() - (64 - bits),
        (_, false) => value.trailing_zeros(),
    };
    let carry = if value == 0 { CF } else { 0 };
    let zero = if count == 0 { ZF } else { 0 };
    (count.into(), rflags & !(CF | ZF) | carry | zero)
}

/// Low and high half of a product. CF and OF show if the high half is significant; the other flags
/// are undefined.
pub fn multiply(signed: bool, first: u64, second: u64, size: u8, rflags: u64) -> ((u64, u64), u64) {
    let bits = 8 * u32::from(size);
    let wide = |value: u64| match signed {
        true => i128::from(sign_extend(value, size) as i64),
        false => i128::from(value & ones(size)),
    };
    // 64 by 64 bits fit: unsigned in 128 bits, whose sign bit then has no meaning.
    let product = wide(first).wrapping_mul(wide(second)) as u128;
    let low = product as u64 & ones(size);
    let high = (product >> bits) as u64 & ones(size);
    let expected = if signed && sign(low, size) { ones(size) } else { 0 };
    let flags = if high == expected { 0 } else { CF | OF };
    ((low, high), rflags & !(CF | OF) | flags)
}

/// Quotient and remainder of `high:low` by `divisor`, toward zero; `None` (`#DE`) if the divisor is
/// 0 or the quotient does not fit. All flags are undefined afterwards.
pub fn divide(signed: bool, high: u64, low: u64, divisor: u64, size: u8) -> Option<(u64, u64)> {
    let bits = 8 * u32::from(size);
    let both = u128::from(high & ones(size)) << bits | u128::from(low & ones(size));
    let (quotient, remainder) = if signed {
        let unused = 128 - 2 * bits;
        let dividend = (both << unused) as i128 >> unused;
        let divisor = i128::from(sign_extend(divisor, size) as i64);
        let quotient = dividend.checked_div(divisor)?;
        if quotient != i128::from(sign_extend(quotient as u64, size) as i64) {
            return None;
        }
        (quotient as u64, dividend.checked_rem(divisor)? as u64)
    } else {
        let divisor = u128::from(divisor & ones(size));
        let quotient = both.checked_div(divisor)?;
        if quotient > u128::from(ones(size)) {
            return None;
        }
        (quotient as u64, both.checked_rem(divisor)? as u64)
    };
    Some((quotient & ones(size), remainder & ones(size)))
}

/// `SHLD`, or backwards `SHRD`; `None` for a shift by 0. AF is undefined, and so is OF after a
/// shift by more than one bit.
pub fn double_shift(
    backwards: bool,
    first: u64,
    second: u64,
    count: u64,
    size: u8,
    rflags: u64,
) -> Option<(u64, u64)> {
    let bits = 8 * u32::from(size);
    let count = count as u32 & if size == 8 { 63 } else { 31 };
    // The shift of a 16-bit operand by more than its width is undefined.
    let count = if count > bits { count % bits } else { count };
    if count == 0 {
        return None;
    }
    let (first, second) = (u128::from(first & ones(size)), u128::from(second & ones(size)));
    let (result, carry) = if backwards {
        let both = second << bits | first;
        ((both >> count) as u64, both >> (count - 1) & 1)
    } else {
        let both = first << bits | second;
        ((both << count >> bits) as u64, first >> (bits - count) & 1)
    };
    let result = result & ones(size);
    let mut flags = result_flags(result, size);
    if carry != 0 {
        flags |= CF;
    }
    if sign(result ^ first as u64, size) {
        flags |= OF;
    }
    Some((result, rflags & !ARITHMETIC | flags))
}
