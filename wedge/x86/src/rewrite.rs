//! Stubs, and what is written over a site.

use core::mem::offset_of;
use wedge_core::Frame;
use wedge_core::decode::{DecodeError, Instruction, Op, decode};

use crate::{CELL, Cell};

/// Length of a jump with a 32-bit displacement.
pub const SHORT_JUMP: usize = 5;
/// Most bytes of instructions at a site.
pub const MAX_SITE: usize = 16;
/// Bytes of code in a stub.
const CODE: usize = 24;

/// A rewritten site: code that enters the wedge, and what the wedge has to know of the site.
#[derive(Clone, Copy, Debug)]
#[repr(C, align(64))]
pub struct Stub {
    code: [u8; CODE],
    /// Address of the site.
    pub site: u64,
    /// The bytes that were there.
    pub original: [u8; MAX_SITE],
    /// How many of them are instructions.
    pub length: u8,
    /// Bytes that belong to the site: the guest goes on behind them.
    pub padded: u8,
    /// What kind of site it is, as the table says.
    pub kind: u8,
    /// The stub is in use.
    pub live: u8,
    count: u32,
}

const _: () = assert!(size_of::<Stub>() == 64);

/// What to write over a site.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Rewrite {
    /// The bytes.
    pub jump: [u8; SHORT_JUMP],
}

impl Stub {
    /// No site.
    pub const EMPTY: Self = Self {
        code: [0xcc; CODE],
        site: 0,
        original: [0; MAX_SITE],
        length: 0,
        padded: 0,
        kind: 0,
        live: 0,
        count: 0,
    };

    /// The stub at address `at` for the instructions `original` at address `site`, of which `padded` bytes may be overwritten; and the jump
    /// to it. `entry` is where stubs go. `None`: it is out of reach, or there is no room.
    pub fn new(
        at: u64,
        entry: u64,
        site: u64,
        original: &[u8],
        padded: u8,
        kind: u8,
    ) -> Option<(Self, Rewrite)> {
        if original.len() > MAX_SITE || usize::from(padded) < SHORT_JUMP.max(original.len()) {
            return None;
        }
        let rsp = CELL + (offset_of!(Cell, cpu) + offset_of!(Frame, gpr)) as u64 + 4 * 8;
        let top = CELL + (offset_of!(Cell, scratch) + size_of::<[u64; 8]>()) as u64;
        let mut stub =
            Self { site, length: original.len() as u8, padded, kind, live: 1, ..Self::EMPTY };
        stub.original[..original.len()].copy_from_slice(original);
        let mut code = Code { bytes: &mut stub.code, at: 0 };
        // mov [rsp of the frame], rsp
        code.put(&[0x48, 0x89, 0x24, 0x25]).put(&low(rsp)?);
        // mov esp, top of the scratch stack
        code.put(&[0xbc]).put(&low(top)?);
        // push address of this stub
        code.put(&[0x68]).put(&low(at)?);
        let here = at + code.at as u64;
        code.put(&jump(here, entry)?);
        Some((stub, Rewrite { jump: jump(site, at)? }))
    }

    /// Where the guest goes on when the site is done.
    pub fn resume(&self) -> u64 {
        self.site.wrapping_add(self.padded.into())
    }

    /// The instructions that were there.
    pub fn instructions(&self) -> &[u8] {
        &self.original[..usize::from(self.length).min(MAX_SITE)]
    }
}

struct Code<'a> {
    bytes: &'a mut [u8; CODE],
    at: usize,
}

impl Code<'_> {
    fn put(&mut self, bytes: &[u8]) -> &mut Self {
        self.bytes[self.at..self.at + bytes.len()].copy_from_slice(bytes);
        self.at += bytes.len();
        self
    }
}

/// An address below 2 GiB as an immediate or displacement.
fn low(address: u64) -> Option<[u8; 4]> {
    i32::try_from(address).ok().map(i32::to_le_bytes)
}

fn jump(from: u64, to: u64) -> Option<[u8; SHORT_JUMP]> {
    let distance = to.wrapping_sub(from).wrapping_sub(SHORT_JUMP as u64) as i64;
    let [a, b, c, d] = i32::try_from(distance).ok()?.to_le_bytes();
    Some([0xe9, a, b, c, d])
}

/// Decodes all instructions of a site, at most four.
///
/// # Errors
/// One is none that a site may have.
pub fn decode_all(bytes: &[u8]) -> Result<([Instruction; 4], usize), DecodeError> {
    let mut all = [Instruction { op: Op::Undefined, length: 0, size: 0, repeat: false }; 4];
    let mut at = 0;
    for (number, place) in all.iter_mut().enumerate() {
        if at == bytes.len() {
            return Ok((all, number));
        }
        *place = decode(&bytes[at..])?;
        at += place.length;
    }
    if at == bytes.len() { Ok((all, 4)) } else { Err(DecodeError::Unknown) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stub_is_reached_and_goes_on() {
        let (stub, rewrite) =
            Stub::new(0x7200_0040, 0x7000_0000, 0x4100_0000, &[0xfa], 8, 0).unwrap();
        let reach = |from: u64, bytes: &[u8]| {
            let distance = i32::from_le_bytes(bytes[1..5].try_into().unwrap());
            assert_eq!(bytes[0], 0xe9);
            from.wrapping_add(5).wrapping_add(i64::from(distance) as u64)
        };
        assert_eq!(reach(0x4100_0000, &rewrite.jump), 0x7200_0040);
        assert_eq!(reach(0x7200_0040 + 18, &stub.code[18..]), 0x7000_0000);
        assert_eq!((stub.resume(), stub.instructions()), (0x4100_0008, &[0xfa][..]));
    }

    #[test]
    fn what_cannot_be_rewritten() {
        let new = |at, site, padded| Stub::new(at, 0x7000_0000, site, &[0x0f, 0xa2], padded, 0);
        assert!(new(0x7200_0000, 0x4000_0000, 4).is_none(), "no room for a jump");
        assert!(new(0x7200_0000, 0x4000_0000_0000, 8).is_none(), "out of reach");
        assert!(new(0x1_7200_0000, 0x4000_0000, 8).is_none());
    }

    #[test]
    fn fused_instructions() {
        let (all, count) = decode_all(&[0xfb, 0xf4]).unwrap();
        assert_eq!((count, all[0].op, all[1].op), (2, Op::Sti, Op::Hlt));
        assert!(decode_all(&[0xfb, 0x90]).is_err());
        assert!(decode_all(&[0xfa; 5]).is_err());
    }
}
