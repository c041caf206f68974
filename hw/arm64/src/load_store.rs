//! Loads and stores of A64 that a data abort's syndrome does not describe: pairs, and those that
//! change their address register (Arm ARM, C4.1.94, C6.2).

/// A load or store of one or two general-purpose registers.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct LoadStore {
    /// Bytes of each register in memory: 1, 2, 4 or 8.
    pub size: u8,
    /// The registers, in the order of their places in memory; 31: zero.
    pub registers: [Option<usize>; 2],
    /// A load extends the sign.
    pub is_signed: bool,
    /// A load sets all 64 bits by the sign; else the upper half becomes zero.
    pub is_wide: bool,
    /// A store.
    pub is_write: bool,
    /// Register with the address; not 31, which is the stack pointer.
    pub base: usize,
    /// Added to that register for the address.
    pub offset: i64,
    /// Added to it afterwards.
    pub change: i64,
}

/// Field of `bits` bits at `shift`.
const fn field(instruction: u32, shift: u32, bits: u32) -> u32 {
    instruction >> shift & ((1 << bits) - 1)
}

/// The same with a sign.
const fn signed(instruction: u32, shift: u32, bits: u32) -> i64 {
    ((instruction << (32 - shift - bits)) as i32 >> (32 - bits)) as i64
}

/// Decodes an instruction. `None`: it is another one, has the stack pointer as its address or
/// registers of SIMD, or its effect is unpredictable.
pub fn decode(instruction: u32) -> Option<LoadStore> {
    let decoded = if instruction & 0x3e00_0000 == 0x2800_0000 {
        pair(instruction)?
    } else if instruction & 0x3f20_0400 == 0x3800_0400 {
        indexed(instruction)?
    } else {
        return None;
    };
    let LoadStore { registers: [first, second], base, .. } = decoded;
    let is_changed_twice = decoded.change != 0 && (first == Some(base) || second == Some(base));
    let is_loaded_twice = !decoded.is_write && first == second;
    (base != 31 && !is_changed_twice && !is_loaded_twice).then_some(decoded)
}

/// `LDP`, `LDPSW`, `STP`, `LDNP`, `STNP`.
fn pair(instruction: u32) -> Option<LoadStore> {
    let (is_write, kind) = (field(instruction, 22, 1) == 0, field(instruction, 30, 2));
    let size = match kind {
        0 => 4,
        1 if !is_write => 4,
        2 => 8,
        _ => return None,
    };
    let immediate = signed(instruction, 15, 7) * i64::from(size);
    let (offset, change) = match field(instruction, 23, 2) {
        1 => (0, immediate),
        3 => (immediate, immediate),
        _ => (immediate, 0),
    };
    let register = |shift| Some(field(instruction, shift, 5) as usize);
    Some(LoadStore {
        size,
        registers: [register(0), register(10)],
        is_signed: kind == 1,
        is_wide: kind != 0,
        is_write,
        base: field(instruction, 5, 5) as usize,
        offset,
        change,
    })
}

/// `LDR`, `STR` and their like with an immediate index before or after the access.
fn indexed(instruction: u32) -> Option<LoadStore> {
    let (size, operation) = (field(instruction, 30, 2), field(instruction, 22, 2));
    let (is_write, is_signed) = (operation == 0, operation >= 2);
    if is_signed && size + operation > 4 {
        return None;
    }
    let change = signed(instruction, 12, 9);
    let is_before = field(instruction, 11, 1) != 0;
    Some(LoadStore {
        size: 1 << size,
        registers: [Some(field(instruction, 0, 5) as usize), None],
        is_signed,
        is_wide: operation == 2 || size == 3,
        is_write,
        base: field(instruction, 5, 5) as usize,
        offset: if is_before { change } else { 0 },
        change,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The words are those of an assembler.
    #[test]
    fn instructions_are_decoded() {
        let one = |register, base| LoadStore {
            size: 4,
            registers: [Some(register), None],
            is_signed: false,
            is_wide: false,
            is_write: true,
            base,
            offset: 0,
            change: 4,
        };
        for (instruction, expected) in [
            // str w1, [x0], #4
            (0xb800_4401, one(1, 0)),
            // str wzr, [x3, #-8]!
            (0xb81f_8c7f, LoadStore { offset: -8, change: -8, ..one(31, 3) }),
            // ldrsb x7, [x2], #1
            (
                0x3880_1447,
                LoadStore {
                    size: 1,
                    is_signed: true,
                    is_wide: true,
                    is_write: false,
                    change: 1,
                    ..one(7, 2)
                },
            ),
            // ldrsh w7, [x2, #2]!
            (
                0x78c0_2c47,
                LoadStore {
                    size: 2,
                    is_signed: true,
                    is_write: false,
                    offset: 2,
                    change: 2,
                    ..one(7, 2)
                },
            ),
            // ldr x9, [x10], #-256
            (
                0xf850_0549,
                LoadStore { size: 8, is_wide: true, is_write: false, change: -256, ..one(9, 10) },
            ),
            // stp w1, w2, [x0, #-256]
            (
                0x2920_0801,
                LoadStore { registers: [Some(1), Some(2)], offset: -256, change: 0, ..one(1, 0) },
            ),
            // ldp x3, xzr, [x4], #16
            (
                0xa8c1_7c83,
                LoadStore {
                    size: 8,
                    registers: [Some(3), Some(31)],
                    is_wide: true,
                    is_write: false,
                    change: 16,
                    ..one(3, 4)
                },
            ),
            // ldpsw x3, x5, [x4, #8]!
            (
                0x69c1_1483,
                LoadStore {
                    registers: [Some(3), Some(5)],
                    is_signed: true,
                    is_wide: true,
                    is_write: false,
                    offset: 8,
                    change: 8,
                    ..one(3, 4)
                },
            ),
            // ldnp w3, w5, [x4]
            (
                0x2840_1483,
                LoadStore {
                    registers: [Some(3), Some(5)],
                    is_write: false,
                    change: 0,
                    ..one(3, 4)
                },
            ),
        ] {
            assert_eq!(decode(instruction), Some(expected), "{instruction:#x}");
        }
    }

    #[test]
    fn others_are_not() {
        for instruction in [
            0xb900_0001, // str w1, [x0]: described by the syndrome
            0xb840_0801, // ldtr w1, [x0]
            0xb800_47e1, // str w1, [sp], #4
            0xa9bf_7bfd, // stp x29, x30, [sp, #-16]!
            0x3c81_0400, // str q0, [x0], #16
            0xad00_0400, // stp q0, q1, [x0]
            0xb800_4400, // str w0, [x0], #4: unpredictable
            0xa8c1_1083, // ldp x3, x4, [x4], #16: likewise
            0xa8c1_0c83, // ldp x3, x3, [x4], #16: likewise
            0x6881_0801, // stgp x1, x2, [x0], #32
            0x885f_7c01, // ldxr w1, [x0]
            0xb8e0_8001, // swpal w0, w1, [x0]
            0xf8c0_1c01, // no instruction
            0,
        ] {
            assert_eq!(decode(instruction), None, "{instruction:#x}");
        }
    }
}
