//! Shifts and rotations (AMD APM vol. 3: `SHL`, `SHR`, `SAR`, `ROL`, `ROR`, `RCL`, `RCR`).

use crate::alu::{AF, CF, OF, result_flags};
use crate::decode::{ones, sign_extend};

/// Kind of shift or rotation.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Shift {
    /// `ROL`.
    RotateLeft,
    /// `ROR`.
    RotateRight,
    /// `RCL`: with the carry flag as one more bit.
    RotateCarryLeft,
    /// `RCR`: with the carry flag as one more bit.
    RotateCarryRight,
    /// `SHL`, which is `SAL`.
    Left,
    /// `SHR`.
    Right,
    /// `SAR`: filled with the sign.
    SignedRight,
}

impl Shift {
    /// Decodes the low three bits of an opcode extension.
    pub fn from_code(code: u8) -> Self {
        match code & 7 {
            0 => Self::RotateLeft,
            1 => Self::RotateRight,
            2 => Self::RotateCarryLeft,
            3 => Self::RotateCarryRight,
            4 | 6 => Self::Left,
            5 => Self::Right,
            _ => Self::SignedRight,
        }
    }
}

/// Result and `RFLAGS`; `None` for a shift by 0, which keeps the flags. OF is defined after one bit
/// only, AF never.
pub fn shift(kind: Shift, value: u64, count: u64, size: u8, rflags: u64) -> Option<(u64, u64)> {
    let count = count as u32 & if size == 8 { 63 } else { 31 };
    if count == 0 {
        return None;
    }
    let bits = 8 * u32::from(size);
    let value = value & ones(size);
    let wide = u128::from(value);
    let bit = |number: u128, at: u32| number >> at & 1 != 0;
    // With the carry flag on top, in the rotations through it.
    let ring = wide | u128::from(rflags & CF) << bits;
    let turned = |left: u32| (ring << left | ring >> (bits + 1 - left)) & ((2 << bits) - 1);
    let rotated = |left: u32| wide << left | wide >> (bits - left);
    let signed = i128::from(sign_extend(value, size) as i64);
    let through = count % (bits + 1);
    // The result, and the carry flag.
    let (result, carry) = match kind {
        Shift::Left => (wide << count, bit(wide << count, bits)),
        Shift::Right => (wide >> count, bit(wide, count - 1)),
        Shift::SignedRight => ((signed >> count) as u128, signed >> (count - 1) & 1 != 0),
        Shift::RotateLeft => (rotated(count % bits), bit(rotated(count % bits), 0)),
        Shift::RotateRight => {
            let result = rotated((bits - count % bits) % bits);
            (result, bit(result, bits - 1))
        }
        Shift::RotateCarryLeft => (turned(through), bit(turned(through), bits)),
        Shift::RotateCarryRight => {
            let ring = turned((bits + 1 - through) % (bits + 1));
            (ring, bit(ring, bits))
        }
    };
    let top = bit(result, bits - 1);
    let overflow = match kind {
        Shift::Left | Shift::RotateLeft | Shift::RotateCarryLeft => top != carry,
        Shift::Right => bit(wide, bits - 1),
        Shift::SignedRight => false,
        Shift::RotateRight | Shift::RotateCarryRight => top != bit(result, bits - 2),
    };
    let result = result as u64 & ones(size);
    // Rotations keep the flags of a result.
    let (kept, flags) = match kind {
        Shift::Left | Shift::Right | Shift::SignedRight => {
            let results = result_flags(0, 1) | result_flags(u64::MAX, 8);
            (!(results | CF | OF | AF), result_flags(result, size))
        }
        _ => (!(CF | OF), 0),
    };
    let carry = if carry { CF } else { 0 };
    let overflow = if overflow { OF } else { 0 };
    Some((result, rflags & kept | flags | carry | overflow))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::alu::{PF, SF, ZF};
    use proptest::prelude::*;

    /// One bit at a time, as the manual draws it: value and carry.
    fn step(kind: Shift, value: u64, carry: bool, size: u8) -> (u64, bool) {
        let top = 1 << (8 * u32::from(size) - 1);
        let (low, high) = (value & 1 != 0, value & top != 0);
        let left = |new: bool| (value << 1 & ones(size) | u64::from(new), high);
        let right = |new: bool| (value >> 1 | if new { top } else { 0 }, low);
        match kind {
            Shift::Left => left(false),
            Shift::RotateLeft => left(high),
            Shift::RotateCarryLeft => left(carry),
            Shift::Right => right(false),
            Shift::SignedRight => right(high),
            Shift::RotateRight => right(low),
            Shift::RotateCarryRight => right(carry),
        }
    }

    proptest! {
        #[test]
        fn as_many_steps(value: u64, count: u8, code in 0_u8..8, width in 0_u32..4, carry: bool) {
            let (kind, size) = (Shift::from_code(code), 1 << width);
            let steps = count & if size == 8 { 63 } else { 31 };
            let start = value & ones(size);
            let expected = (0..steps).fold((start, carry), |(value, carry), _| step(kind, value, carry, size));
            let found = shift(kind, value, count.into(), size, u64::from(carry));
            let found = found.map_or((start, carry), |(value, flags)| (value, flags & CF != 0));
            prop_assert_eq!(found, expected);
        }
    }

    #[test]
    fn flags() {
        let all = CF | PF | AF | ZF | SF | OF;
        let one = |kind, value| shift(kind, value, 1, 1, 0).unwrap();
        assert_eq!(one(Shift::Left, 0x40), (0x80, SF | OF));
        assert_eq!(one(Shift::Left, 0xc0), (0x80, SF | CF));
        assert_eq!(one(Shift::Right, 0x81), (0x40, CF | OF));
        assert_eq!(one(Shift::SignedRight, 0x81), (0xc0, CF | SF | PF));
        assert_eq!(one(Shift::RotateLeft, 0x80), (1, CF | OF));
        assert_eq!(one(Shift::RotateRight, 1), (0x80, CF | OF));
        assert_eq!(one(Shift::RotateCarryLeft, 0x40), (0x80, OF));
        assert_eq!(one(Shift::RotateCarryRight, 0x80), (0x40, OF));
        // Rotations keep the other flags, a shift by 0 keeps all.
        assert_eq!(shift(Shift::RotateLeft, 1, 1, 1, all), Some((2, all & !(CF | OF))));
        assert_eq!(shift(Shift::Left, 0, 1, 1, all), Some((0, ZF | PF)));
        assert_eq!(shift(Shift::Left, 1, 32, 4, all), None);
    }
}
