//! Stubs, and what is written over a site.
//!
//! Every stub ends with code that enters the wedge. What is frequent and simple is done before, in place, and then the guest goes on
//! without the wedge; [`Stub::unwind`] tells what a signal that comes there has to make of the guest's registers.

use core::mem::offset_of;

use vmm_cpu::vcpu::Segment;
use wedge_core::cpu::rflags;
use wedge_core::decode::{DecodeError, Instruction, Op, Operand, decode};
use wedge_core::{Frame, VirtualCpu};

use crate::{CELL, Cell, Entries};

/// Length of a jump with a 32-bit displacement.
pub const JUMP: usize = 5;
/// Most bytes of instructions at a site.
pub const MAX_SITE: usize = 16;
/// Most bytes that are written over a site.
pub const MAX_PATCH: usize = 8;
/// Bytes of code in a stub.
const CODE: usize = 92;

/// How a site is done.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u8)]
pub enum Way {
    /// The stub is not in use.
    Unused,
    /// By the wedge.
    Wedge,
    /// `CLI`: over the site, without a stub's help.
    Cli,
    /// `STI`: unless something waits.
    Sti,
    /// `PUSHF; POP`.
    SaveFlags,
    /// `SWAPGS`.
    SwapGs,
    /// `SYSRET` to 64-bit code: unless something waits.
    Sysret,
    /// `MOV` from a segment register to a general one.
    ReadSegment,
}

/// A rewritten site: code, and what the wedge has to know of the site.
#[derive(Clone, Copy, Debug)]
#[repr(C, align(64))]
pub struct Stub {
    code: [u8; CODE],
    /// Address of the site.
    pub site: u64,
    /// The bytes that were there, the pad included.
    original: [u8; MAX_SITE],
    /// How many of them are instructions.
    pub length: u8,
    /// Bytes that belong to the site: the guest goes on behind them.
    pub padded: u8,
    /// What kind of site it is, as the table says.
    pub kind: u8,
    /// How it is done.
    pub way: Way,
    /// Where in the code the way to the wedge begins.
    general: u8,
}

const _: () = assert!(size_of::<Stub>() == 128);

/// What to write over a site.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Patch {
    bytes: [u8; MAX_PATCH],
    length: usize,
}

impl Patch {
    /// The bytes.
    pub fn bytes(&self) -> &[u8] {
        &self.bytes[..self.length]
    }
}

/// A site to be rewritten.
#[derive(Clone, Copy, Debug)]
pub struct Target<'a> {
    /// Its address.
    pub site: u64,
    /// The instructions there.
    pub original: &'a [u8],
    /// The instructions and what may be overwritten behind them, as far as [`MAX_SITE`] bytes.
    pub whole: &'a [u8],
    /// Bytes that may be overwritten.
    pub padded: u8,
    /// Its kind, as the table says.
    pub kind: u8,
    /// The arithmetic flags are not used behind it.
    pub flags_dead: bool,
    /// Whether it may be done without the wedge.
    pub fast: bool,
}

/// What becomes of the guest when a signal comes while a stub does something in place.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Unwound {
    /// It is nearly done, and the guest looks for what waits before it turns interrupts on.
    Goes,
    /// The guest is at the site, with this much to add to its stack pointer.
    At(u64, u64),
    /// The guest is behind the site, with interrupts on.
    Behind(u64),
    /// The guest is where `SYSRET` goes.
    Returned,
}

const CPU: u64 = CELL + offset_of!(Cell, cpu) as u64;
const RSP: u64 = CPU + offset_of!(Frame, gpr) as u64 + 4 * 8;
const HELD_FLAGS: u64 = CPU + offset_of!(VirtualCpu, held_flags) as u64;
const ATTENTION: u64 = CPU + offset_of!(VirtualCpu, attention) as u64;
const SEGMENTS: u64 = CPU + offset_of!(VirtualCpu, segments) as u64;
const KERNEL_GS: u64 = CPU + offset_of!(VirtualCpu, kernel_gs_base) as u64;
const EVENTS: u64 = CELL + offset_of!(Cell, events) as u64;
const SAVED: u64 = CELL + offset_of!(Cell, saved) as u64;
const SCRATCH_TOP: u64 = CELL + (offset_of!(Cell, scratch) + size_of::<[u64; 16]>()) as u64;
/// The byte of the flags that `IF` is in, and `IF` there.
const FLAG_BYTE: u64 = HELD_FLAGS + 1;
const FLAG_ON: u8 = (rflags::IF >> 8) as u8;

const RAX: u8 = 0;
const RCX: u8 = 1;

impl Stub {
    /// The stub at address `at` for a site, and what to write over the site. `None`: it is out of reach, or there is no room.
    pub fn new(at: u64, entries: &Entries, target: &Target<'_>) -> Option<(Self, Patch)> {
        let Target { site, original, padded, kind, .. } = *target;
        if original.len() > MAX_SITE || usize::from(padded) < JUMP.max(original.len()) {
            return None;
        }
        let mut stub = Self {
            code: [0xcc; CODE],
            site,
            original: [0; MAX_SITE],
            length: original.len() as u8,
            padded,
            kind,
            way: way(target),
            general: 0,
        };
        let whole = target.whole.get(..usize::from(padded).min(MAX_SITE))?;
        stub.original[..whole.len()].copy_from_slice(whole);
        let resume = stub.resume();
        let mut code = Code { bytes: &mut stub.code, base: at, used: 0 };
        match stub.way {
            Way::Sti => {
                code.set_byte(FLAG_BYTE, FLAG_ON)?;
                code.unless_zero(ATTENTION, JUMP)?;
                code.jump(resume)?;
            }
            Way::SaveFlags => {
                let register = saved_to(original)?;
                let (low, extended) = (register & 7, register >> 3);
                code.put(&[0x9c])?;
                if extended != 0 {
                    code.put(&[0x41])?;
                }
                code.put(&[0x58 | low])?;
                // The host's IF is on, and TF may be a handler's: and reg, ~(IF | TF); or reg, [flag].
                let mask = (!(rflags::IF | rflags::TF) as u32).to_le_bytes();
                code.put(&[0x48 | extended, 0x81, 0xe0 | low])?.put(&mask)?;
                code.put(&[0x48 | extended << 2, 0x0b])?.absolute(register, HELD_FLAGS)?;
                code.jump(resume)?;
            }
            Way::SwapGs => {
                code.store(RAX, SAVED)?.store(RCX, SAVED + 8)?;
                // rdgsbase rax
                code.put(&[0xf3, 0x48, 0x0f, 0xae, 0xc8])?;
                code.load(RCX, KERNEL_GS)?.store(RAX, KERNEL_GS)?;
                // wrgsbase rcx
                code.put(&[0xf3, 0x48, 0x0f, 0xae, 0xd9])?;
                code.load(RAX, SAVED)?.load(RCX, SAVED + 8)?;
                code.jump(resume)?;
            }
            Way::Sysret => {
                // test r11d, IF; jz general; test r11d, TF; jnz general
                const TEST: usize = 7 + 2;
                let looks = 2 * (8 + 2) + JUMP;
                for (flag, branch, over) in
                    [(rflags::IF, 0x74, TEST + looks), (rflags::TF, 0x75, looks)]
                {
                    let flag = (flag as u32).to_le_bytes();
                    code.put(&[0x41, 0xf7, 0xc3])?.put(&flag)?.put(&[branch, over as u8])?;
                }
                code.unless_zero(ATTENTION, 8 + 2 + JUMP)?;
                code.unless_zero(EVENTS, JUMP)?;
                code.jump(entries.sysret)?;
            }
            Way::ReadSegment => {
                let (segment, register, size) = segment_to(original)?;
                let selector = SEGMENTS
                    + (usize::from(segment) * size_of::<Segment>() + offset_of!(Segment, selector))
                        as u64;
                if size == 2 {
                    code.put(&[0x66])?;
                }
                if register >> 3 != 0 {
                    code.put(&[0x44])?;
                }
                // mov register, [selector], which leaves the register's upper part, or movzx, which clears it.
                code.put(if size == 2 { &[0x8b] } else { &[0x0f, 0xb7] })?;
                code.absolute(register, selector)?;
                code.jump(resume)?;
            }
            Way::Unused | Way::Wedge | Way::Cli => {}
        }
        let general = code.used;
        code.store(4, RSP)?;
        // mov esp, top of the scratch stack; push address of this stub
        code.put(&[0xbc])?.put(&low(SCRATCH_TOP)?)?.put(&[0x68])?.put(&low(at)?)?;
        code.jump(entries.site)?;
        stub.general = general as u8;
        let patch = if stub.way == Way::Cli {
            let mut bytes = [0xc6, 0x04, 0x25, 0, 0, 0, 0, 0];
            bytes[3..7].copy_from_slice(&low(FLAG_BYTE)?);
            Patch { bytes, length: 8 }
        } else {
            let mut bytes = [0; MAX_PATCH];
            bytes[..JUMP].copy_from_slice(&jump(site, at)?);
            Patch { bytes, length: JUMP }
        };
        Some((stub, patch))
    }

    /// Where the guest goes on when the site is done.
    pub fn resume(&self) -> u64 {
        self.site.wrapping_add(self.padded.into())
    }

    /// The instructions that were there.
    pub fn instructions(&self) -> &[u8] {
        &self.original[..usize::from(self.length).min(MAX_SITE)]
    }

    /// What was where the patch is.
    pub fn overwritten(&self) -> &[u8] {
        &self.original[..if self.way == Way::Cli { MAX_PATCH } else { JUMP }]
    }

    /// What to make of a signal at `offset` in this stub.
    pub fn unwind(&self, offset: u64) -> Unwound {
        if offset >= self.general.into() {
            return Unwound::Goes;
        }
        match self.way {
            Way::Sti => Unwound::Behind(self.resume()),
            // After PUSHF and before POP the flags are on the stack.
            Way::SaveFlags => Unwound::At(self.site, if offset == 1 { 8 } else { 0 }),
            Way::Sysret => Unwound::Returned,
            _ => Unwound::Goes,
        }
    }
}

/// How a site can be done.
fn way(target: &Target<'_>) -> Way {
    let Ok((all, count)) = decode_all(target.original) else { return Way::Wedge };
    if !target.fast {
        return Way::Wedge;
    }
    match (&all[..count], target.flags_dead) {
        ([Instruction { op: Op::Cli, .. }], _) if usize::from(target.padded) >= MAX_PATCH => {
            Way::Cli
        }
        ([Instruction { op: Op::Sti, .. }], true) => Way::Sti,
        ([Instruction { op: Op::Swapgs, .. }], _) => Way::SwapGs,
        ([Instruction { op: Op::Sysret(true), .. }], _) => Way::Sysret,
        (_, true) if saved_to(target.original).is_some() => Way::SaveFlags,
        _ if segment_to(target.original).is_some() => Way::ReadSegment,
        _ => Way::Wedge,
    }
}

/// The register that `PUSHF; POP` puts the flags into.
fn saved_to(original: &[u8]) -> Option<u8> {
    let (all, count) = decode_all(original).ok()?;
    match all[..count] {
        [
            Instruction { op: Op::Pushf, size: 8, .. },
            Instruction { op: Op::Pop(Operand::Register(register)), size: 8, .. },
        ] if register != 4 => Some(register),
        _ => None,
    }
}

/// The segment register that a site reads, the register that it goes to, and the size of the operand in bytes.
fn segment_to(original: &[u8]) -> Option<(u8, u8, u8)> {
    let (all, count) = decode_all(original).ok()?;
    match all[..count] {
        [
            Instruction {
                op: Op::ReadSegment { segment, to: Operand::Register(register) },
                size,
                ..
            },
        ] if register != 4 => Some((segment, register, size)),
        _ => None,
    }
}

struct Code<'a> {
    bytes: &'a mut [u8; CODE],
    base: u64,
    used: usize,
}

impl Code<'_> {
    fn put(&mut self, bytes: &[u8]) -> Option<&mut Self> {
        self.bytes.get_mut(self.used..self.used + bytes.len())?.copy_from_slice(bytes);
        self.used += bytes.len();
        Some(self)
    }

    /// The operand bytes of `register` and an absolute address.
    fn absolute(&mut self, register: u8, address: u64) -> Option<&mut Self> {
        self.put(&[0x04 | (register & 7) << 3, 0x25])?.put(&low(address)?)
    }

    /// `mov [address], register`.
    fn store(&mut self, register: u8, address: u64) -> Option<&mut Self> {
        self.put(&[0x48 | (register >> 3) << 2, 0x89])?.absolute(register, address)
    }

    /// `mov register, [address]`.
    fn load(&mut self, register: u8, address: u64) -> Option<&mut Self> {
        self.put(&[0x48 | (register >> 3) << 2, 0x8b])?.absolute(register, address)
    }

    /// `mov byte [address], value`.
    fn set_byte(&mut self, address: u64, value: u8) -> Option<&mut Self> {
        self.put(&[0xc6])?.absolute(0, address)?.put(&[value])
    }

    /// Compares the byte at an address with 0, and jumps over what follows if it is another.
    fn unless_zero(&mut self, address: u64, over: usize) -> Option<&mut Self> {
        self.put(&[0x80])?.absolute(7, address)?.put(&[0])?.put(&[0x75, over as u8])
    }

    fn jump(&mut self, to: u64) -> Option<&mut Self> {
        let here = self.base + self.used as u64;
        self.put(&jump(here, to)?)
    }
}

/// An address below 2 GiB as an immediate or displacement.
fn low(address: u64) -> Option<[u8; 4]> {
    i32::try_from(address).ok().map(i32::to_le_bytes)
}

fn jump(from: u64, to: u64) -> Option<[u8; JUMP]> {
    let distance = to.wrapping_sub(from).wrapping_sub(JUMP as u64) as i64;
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

    const ENTRIES: Entries = Entries { site: 0x7000_0000, sysret: 0x7000_0100 };
    const AT: u64 = 0x7200_0080;
    const SITE: u64 = 0x4100_0000;

    fn target(original: &[u8], padded: u8, flags_dead: bool) -> Target<'_> {
        let mut whole = vec![0x90; MAX_SITE];
        whole[..original.len()].copy_from_slice(original);
        Target {
            site: SITE,
            original,
            whole: whole.leak(),
            padded,
            kind: 0,
            flags_dead,
            fast: true,
        }
    }

    fn new(original: &[u8], padded: u8, flags_dead: bool) -> Option<(Stub, Patch)> {
        Stub::new(AT, &ENTRIES, &target(original, padded, flags_dead))
    }

    fn reached(from: u64, bytes: &[u8]) -> u64 {
        assert_eq!(bytes[0], 0xe9);
        let distance = i32::from_le_bytes(bytes[1..5].try_into().unwrap());
        from.wrapping_add(5).wrapping_add(i64::from(distance) as u64)
    }

    #[test]
    fn a_stub_is_reached_and_goes_on() {
        let (stub, patch) = new(&[0x0f, 0xa2], 8, false).unwrap();
        assert_eq!(stub.way, Way::Wedge);
        assert_eq!(reached(SITE, patch.bytes()), AT);
        assert_eq!(reached(AT + 18, &stub.code[18..]), ENTRIES.site);
        assert_eq!((stub.resume(), stub.instructions()), (SITE + 8, &[0x0f, 0xa2][..]));
        assert_eq!(stub.overwritten(), [0x0f, 0xa2, 0x90, 0x90, 0x90]);
        let (stub, patch) = new(&[0xfa], 8, false).unwrap();
        assert_eq!(stub.overwritten().len(), patch.bytes().len());
    }

    #[test]
    fn each_site_its_way() {
        let way = |original, padded, dead| new(original, padded, dead).unwrap().0.way;
        assert_eq!(way(&[0xfa], 8, false), Way::Cli);
        assert_eq!(way(&[0xfa], 7, false), Way::Wedge);
        assert_eq!(way(&[0xfb], 8, true), Way::Sti);
        assert_eq!(way(&[0xfb], 16, false), Way::Wedge);
        assert_eq!(way(&[0xfb, 0xf4], 16, true), Way::Wedge);
        assert_eq!(way(&[0x9c, 0x58], 8, true), Way::SaveFlags);
        assert_eq!(way(&[0x9c, 0x41, 0x5f], 8, true), Way::SaveFlags);
        assert_eq!(way(&[0x9c, 0x5c], 8, true), Way::Wedge, "to the stack pointer");
        assert_eq!(way(&[0x9c, 0x58], 8, false), Way::Wedge);
        assert_eq!(way(&[0x0f, 0x01, 0xf8], 8, false), Way::SwapGs);
        assert_eq!(way(&[0x48, 0x0f, 0x07], 8, false), Way::Sysret);
        assert_eq!(way(&[0x0f, 0x07], 8, false), Way::Wedge, "to 32-bit code");
        assert_eq!(way(&[0x8c, 0xd8], 8, false), Way::ReadSegment);
        assert_eq!(way(&[0x8c, 0xdc], 8, false), Way::Wedge, "to the stack pointer");
        assert_eq!(way(&[0x8c, 0x18], 8, false), Way::Wedge, "to memory");
        let slow = Target { fast: false, ..target(&[0xfa], 8, true) };
        assert_eq!(Stub::new(AT, &ENTRIES, &slow).unwrap().0.way, Way::Wedge);
    }

    /// Each branch of the code leads to the beginning of an instruction that is meant.
    #[test]
    fn branches_lead_to_the_wedge() {
        for original in [&[0xfb][..], &[0x48, 0x0f, 0x07]] {
            let (stub, _) = new(original, 8, true).unwrap();
            let general = usize::from(stub.general);
            let branches: &[usize] = if stub.way == Way::Sti { &[16] } else { &[7, 16, 26, 36] };
            for &at in branches {
                assert!(matches!(stub.code[at], 0x74 | 0x75), "{original:x?} {at}");
                assert_eq!(at + 2 + usize::from(stub.code[at + 1]), general);
            }
            assert_eq!(reached(AT + general as u64 + 18, &stub.code[general + 18..]), ENTRIES.site);
        }
    }

    #[test]
    fn signals_find_the_guest() {
        let unwind = |original, offset| new(original, 16, true).unwrap().0.unwind(offset);
        assert_eq!(unwind(&[0xfb], 8), Unwound::Behind(SITE + 16));
        assert_eq!(unwind(&[0xfb], 60), Unwound::Goes);
        assert_eq!(unwind(&[0x9c, 0x58], 0), Unwound::At(SITE, 0));
        assert_eq!(unwind(&[0x9c, 0x58], 1), Unwound::At(SITE, 8));
        assert_eq!(unwind(&[0x9c, 0x58], 2), Unwound::At(SITE, 0));
        assert_eq!(unwind(&[0x48, 0x0f, 0x07], 9), Unwound::Returned);
        assert_eq!(unwind(&[0x0f, 0xa2], 0), Unwound::Goes);
    }

    #[test]
    fn what_cannot_be_rewritten() {
        assert!(new(&[0x0f, 0xa2], 4, false).is_none(), "no room for a jump");
        let far = Target { site: 0x4000_0000_0000, ..target(&[0x0f, 0xa2], 8, false) };
        assert!(Stub::new(AT, &ENTRIES, &far).is_none(), "out of reach");
        assert!(Stub::new(1 << 32 | AT, &ENTRIES, &target(&[0x0f, 0xa2], 8, false)).is_none());
    }

    #[test]
    fn segments_are_read_from_the_virtual_cpu() {
        let selector = SEGMENTS as u32 + offset_of!(Segment, selector) as u32;
        // mov r9d, es: movzx r9d, word [selector]; mov ax, es: mov ax, [selector]
        for (original, code) in [
            (&[0x41, 0x8c, 0xc1][..], &[0x44, 0x0f, 0xb7, 0x0c, 0x25][..]),
            (&[0x66, 0x8c, 0xc0], &[0x66, 0x8b, 0x04, 0x25]),
        ] {
            let (stub, _) = new(original, 8, false).unwrap();
            let (made, rest) = stub.code.split_at(code.len());
            assert_eq!((made, &rest[..4]), (code, &selector.to_le_bytes()[..]));
            assert_eq!(reached(AT + code.len() as u64 + 4, &rest[4..]), SITE + 8);
        }
    }

    #[test]
    fn fused_instructions() {
        let (all, count) = decode_all(&[0xfb, 0xf4]).unwrap();
        assert_eq!((count, all[0].op, all[1].op), (2, Op::Sti, Op::Hlt));
        assert!(decode_all(&[0xfb, 0x90]).is_err());
        assert!(decode_all(&[0xfa; 5]).is_err());
    }
}
