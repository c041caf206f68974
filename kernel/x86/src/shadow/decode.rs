//! The instructions of a vTLB's exits that the kernel recognises; a processor without nested paging
//! does not decode them (APM vol. 2 §15.33.2). The VMM decodes all others.

/// An instruction and its length in bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Instruction {
    /// Its effect.
    pub kind: Kind,
    /// Number of its register operand, in encoding order.
    pub register: usize,
    /// Length.
    pub length: u64,
}

/// Effect of an instruction.
// Zero is `Other`: see `State`.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[repr(u8)]
pub enum Kind {
    /// Any other: the VMM decodes it.
    #[default]
    Other,
    /// `MOV CR3, r64`.
    LoadRoot,
    /// `MOV r64, CR3`.
    StoreRoot,
    /// `INVLPG [r64]`.
    Invalidate,
}

/// Decodes the first bytes of an instruction in 64-bit mode, little-endian.
pub fn decode(bytes: u64) -> Instruction {
    const OTHER: Instruction = Instruction { kind: Kind::Other, register: 0, length: 0 };

    let rex = bytes as u8;
    let (rex, rest, prefix) = if rex & 0xf0 == 0x40 { (rex, bytes >> 8, 1) } else { (0, bytes, 0) };
    let [0x0f, opcode, operand, ..] = rest.to_le_bytes() else { return OTHER };
    // REX.R would select CR11.
    if rex & 4 != 0 {
        return OTHER;
    }
    let (field, low) = (operand >> 3 & 7, operand & 7);
    let kind = match (opcode, field) {
        (0x22, 3) => Kind::LoadRoot,
        (0x20, 3) => Kind::StoreRoot,
        // Without displacement, SIB byte or RIP.
        (0x01, 7) if operand >> 6 == 0 && low != 4 && low != 5 => Kind::Invalidate,
        _ => return OTHER,
    };
    let register = usize::from(low | (rex & 1) << 3);
    Instruction { kind, register, length: 3 + prefix }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn instructions() {
        let of = |bytes: &[u8]| {
            let mut word = [0xcc; 8];
            word[..bytes.len()].copy_from_slice(bytes);
            let found = decode(u64::from_le_bytes(word));
            (found.kind, found.register, found.length)
        };
        assert_eq!(of(&[0x0f, 0x22, 0xd8]), (Kind::LoadRoot, 0, 3));
        assert_eq!(of(&[0x41, 0x0f, 0x22, 0xdc]), (Kind::LoadRoot, 12, 4));
        assert_eq!(of(&[0x48, 0x0f, 0x20, 0xdf]), (Kind::StoreRoot, 7, 4));
        assert_eq!(of(&[0x0f, 0x01, 0x3f]), (Kind::Invalidate, 7, 3));
        assert_eq!(of(&[0x41, 0x0f, 0x01, 0x38]), (Kind::Invalidate, 8, 4));
        let others: [&[u8]; 8] = [
            &[0x0f, 0x22, 0xc0],
            &[0x0f, 0x22, 0xe0],
            &[0x44, 0x0f, 0x22, 0xd8],
            &[0x0f, 0x01, 0x3c, 0x24],
            &[0x0f, 0x01, 0x3d, 0, 0, 0, 0],
            &[0x0f, 0x01, 0x7f, 8],
            &[0x0f, 0x01, 0xf8],
            &[0x65, 0x0f, 0x01, 0x38],
        ];
        for bytes in others {
            assert_eq!(of(bytes).0, Kind::Other, "{bytes:x?}");
        }
    }
}
