//! Padding in user code: bytes between functions and basic blocks that are never executed.
//!
//! Compilers align functions and jump targets with no-ops. Those that follow an unconditional
//! transfer (`RET`, `JMP`, `UD2`) are unreachable, unless one of them is itself a target: functions
//! may begin with no-ops (`-fpatchable-function-entry`, `-mnop-mcount`), and so may hand-written
//! code. Assemblers align with as few no-ops as possible, the longest first. So only a single long
//! no-op counts as padding, and only if it does not begin where functions do. To find a transfer,
//! the search decodes lengths from a known instruction on; an unknown instruction ends the search.
//! Lengths are those of the APM, vol. 3, chapter 1 and appendix A.

/// Reach of a short jump in bytes.
const REACH: usize = i8::MAX as usize;
/// Alignment of functions in bytes.
const ALIGNMENT: usize = 16;

/// Bytes after opcode and prefixes.
#[derive(Clone, Copy)]
struct Rest {
    /// A ModRM byte follows.
    operand: bool,
    /// Length of the immediate in bytes.
    immediate: usize,
    /// Execution may continue at the next instruction.
    continues: bool,
}

impl Rest {
    const NONE: Self = Self { operand: false, immediate: 0, continues: true };
    const OPERAND: Self = Self { operand: true, ..Self::NONE };

    const fn with(self, immediate: usize) -> Self {
        Self { immediate, ..self }
    }

    const fn ends(self) -> Self {
        Self { continues: false, ..self }
    }
}

/// Returns the length of an instruction of 64-bit code, and whether execution may continue after
/// it. `None`: truncated, or not in the supported subset.
fn measure(bytes: &[u8]) -> Option<(usize, bool)> {
    let mut at = 0;
    let mut word = false;
    while let 0x26 | 0x2e | 0x36 | 0x3e | 0x64 | 0x65 | 0x66 | 0xf2 | 0xf3 = *bytes.get(at)? {
        word |= bytes[at] == 0x66;
        at += 1;
    }
    let rex = bytes.get(at).filter(|&byte| byte & 0xf0 == 0x40);
    at += usize::from(rex.is_some());
    let wide = rex.is_some_and(|rex| rex & 8 != 0);
    let opcode = *bytes.get(at)?;
    at += 1;
    let rest = if opcode == 0x0f {
        at += 1;
        after_two(*bytes.get(at - 1)?, word)?
    } else {
        let group = bytes.get(at).map(|byte| byte >> 3 & 7);
        after_one(opcode, group, word, wide)?
    };
    if rest.operand {
        at += operand(bytes.get(at..)?)?;
    }
    at += rest.immediate;
    (at <= bytes.len()).then_some((at, rest.continues))
}

/// Returns what follows an opcode of one byte. `group`: `reg` of the byte after it.
fn after_one(opcode: u8, group: Option<u8>, word: bool, wide: bool) -> Option<Rest> {
    const NONE: Rest = Rest::NONE;
    const OPERAND: Rest = Rest::OPERAND;
    let long = if word && !wide { 2 } else { 4 };
    Some(match opcode {
        0x00..=0x3f => match opcode & 7 {
            0..=3 => OPERAND,
            4 => NONE.with(1),
            5 => NONE.with(long),
            _ => return None,
        },
        0x50..=0x5f | 0x90..=0x99 | 0xc9 => NONE,
        0x63 | 0x84..=0x8b | 0x8d | 0xd0..=0xd3 | 0xfe => OPERAND,
        0x69 | 0x81 | 0xc7 => OPERAND.with(long),
        0x6a | 0x70..=0x7f | 0xa8 | 0xb0..=0xb7 => NONE.with(1),
        0x6b | 0x80 | 0x83 | 0xc0 | 0xc1 | 0xc6 => OPERAND.with(1),
        0x68 | 0xa9 => NONE.with(long),
        0xb8..=0xbf if !wide => NONE.with(long),
        0xc3 => NONE.ends(),
        0xe8 if !word => NONE.with(4),
        0xe9 if !word => NONE.with(4).ends(),
        0xeb => NONE.with(1).ends(),
        0xf6 | 0xf7 => match (group?, opcode) {
            (0 | 1, 0xf6) => OPERAND.with(1),
            (0 | 1, _) => OPERAND.with(long),
            _ => OPERAND,
        },
        0xff => Rest { continues: group? != 4, ..OPERAND },
        _ => return None,
    })
}

/// Returns what follows the second byte of an opcode of two. Some instructions have another length
/// with an operand-size prefix (`word`).
#[rustfmt::skip]
fn after_two(opcode: u8, word: bool) -> Option<Rest> {
    Some(match opcode {
        0x05 | 0xa2 | 0xc8..=0xcf => Rest::NONE,
        0x0b => Rest::NONE.ends(),
        0x80..=0x8f if !word => Rest::NONE.with(4),
        0x10..=0x17 | 0x1e | 0x1f | 0x28 | 0x29 | 0x40..=0x4f | 0x54 | 0x57 | 0x6e | 0x6f | 0x7e
        | 0x7f | 0x90..=0x9f | 0xa3 | 0xab | 0xaf | 0xb0 | 0xb1 | 0xb3 | 0xb6 | 0xb7 | 0xbb..=0xbf
        | 0xc0 | 0xc1 | 0xd6 | 0xef => Rest::OPERAND,
        0xba => Rest::OPERAND.with(1),
        _ => return None,
    })
}

/// Returns the length of a ModRM byte with SIB byte and displacement.
fn operand(bytes: &[u8]) -> Option<usize> {
    let &mod_rm = bytes.first()?;
    let (mode, memory) = (mod_rm >> 6, mod_rm & 7);
    if mode == 3 {
        return Some(1);
    }
    let (mut length, mut base) = (1, memory);
    if memory == 4 {
        base = bytes.get(1)? & 7;
        length = 2;
    }
    Some(match mode {
        0 if base == 5 => length + 4,
        0 => length,
        1 => length + 1,
        _ => length + 4,
    })
}

/// Returns the length of a no-op that compilers use as padding.
fn fill(bytes: &[u8]) -> Option<usize> {
    let start = bytes.iter().position(|&byte| !matches!(byte, 0x66 | 0x2e))?;
    let (length, _) = measure(bytes)?;
    matches!(bytes[start..], [0x90, ..] | [0x0f, 0x1f, ..]).then_some(length)
}

/// Finds `length` bytes of padding in reach of a short jump from the instruction at `from`, and
/// back; returns the offset of the first ones after it. The code begins at a multiple of
/// [`ALIGNMENT`].
pub fn find(code: &[u8], from: usize, length: usize) -> Option<usize> {
    let end = code.len().min(from + REACH + length);
    let code = &code[..end];
    let mut at = from;
    loop {
        let (size, continues) = measure(&code[at..])?;
        at += size;
        if continues {
            continue;
        }
        if at > from + REACH {
            return None;
        }
        if !at.is_multiple_of(ALIGNMENT) && fill(&code[at..]).is_some_and(|size| size >= length) {
            return Some(at);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use iced_x86::{Decoder, DecoderOptions, FlowControl};
    use proptest::prelude::*;

    /// `cmp rax, -4096; ja; ret`, padded to the beginning of a function.
    const BEHIND_READ: [u8; 19] = [
        0x48, 0x3d, 0, 0xf0, 0xff, 0xff, 0x77, 0x5b, 0xc3, 0x66, 0x2e, 0x0f, 0x1f, 0x84, 0, 0, 0,
        0, 0,
    ];

    #[test]
    fn finds_what_is_behind_a_return() {
        assert_eq!(find(&BEHIND_READ, 0, 7), Some(9));
        assert_eq!(find(&BEHIND_READ, 0, 11), None);
        assert_eq!(find(&BEHIND_READ[..15], 0, 7), None, "cut off");
        let mut unknown = BEHIND_READ;
        unknown[6] = 0x62;
        assert_eq!(find(&unknown, 0, 7), None);
    }

    #[test]
    fn what_is_executed_is_no_room() {
        // `mov ebx, eax` ends like a return, and the padding aligns the head of a loop.
        let aligned = [0x89, 0xc3, 0x66, 0x2e, 0x0f, 0x1f, 0x84, 0, 0, 0, 0, 0, 0xeb, 0xfe];
        assert_eq!(find(&aligned, 0, 7), None);
    }

    #[test]
    fn beginnings_of_functions_are_no_room() {
        // Two bytes that align, and five at the entry of a function.
        let entry = [0xc3, 0x66, 0x90, 0x90, 0x90, 0x90, 0x90, 0x90, 0x8d, 0x04, 0x7f];
        assert_eq!(find(&entry, 0, 7), None);
        // A single no-op at an aligned entry, after a return and after shorter padding.
        for before in [&[0x50; 15][..], &[0x50; 11]] {
            let mut code = before.to_vec();
            code.push(0xc3);
            code.extend_from_slice(if before.len() == 11 { &[0x0f, 0x1f, 0x40, 0] } else { &[] });
            code.extend([0x66, 0x2e, 0x0f, 0x1f, 0x84, 0, 0, 0, 0, 0, 0xc3]);
            assert_eq!(find(&code, 0, 7), None, "{code:x?}");
        }
        // Padding before it.
        let mut code = vec![0x50; 5];
        code.extend([0xc3, 0x66, 0x2e, 0x0f, 0x1f, 0x84, 0, 0, 0, 0, 0, 0x90, 0x90, 0xc3]);
        assert_eq!(find(&code, 0, 7), Some(6));
    }

    #[test]
    fn no_farther_than_a_short_jump() {
        for (before, found) in [(126, Some(127)), (128, None)] {
            let mut code = vec![0x50; before];
            code.push(0xc3);
            code.extend([0x0f, 0x1f, 0x80, 0, 0, 0, 0]);
            assert_eq!(find(&code, 0, 7), found, "{before}");
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(200_000))]

        #[test]
        fn lengths_are_those_of_a_decoder(bytes in any::<[u8; 16]>(), prefix in 0..4_usize, two in any::<bool>()) {
            let mut bytes = bytes;
            // Makes these prefixes frequent.
            match prefix {
                1 => bytes[0] = 0x48,
                2 => bytes[0] = 0x66,
                _ => {}
            }
            if two {
                bytes[usize::from(matches!(prefix, 1 | 2))] = 0x0f;
            }
            if let Some((length, continues)) = measure(&bytes) {
                let found = Decoder::new(64, &bytes, DecoderOptions::NONE).decode();
                if !found.is_invalid() {
                    prop_assert_eq!(length, found.len(), "{:x?}", bytes);
                    let ends = matches!(
                        found.flow_control(),
                        FlowControl::Return | FlowControl::UnconditionalBranch | FlowControl::IndirectBranch
                    );
                    prop_assert!(continues || ends || bytes.contains(&0x0b), "{:x?}", bytes);
                }
            }
        }
    }
}
