//! Stubs, and the code that replaces a patch site.
//!
//! Every stub ends with code that enters the wedge. Before it, frequent and simple instructions are
//! handled in place, and the guest continues without the wedge. [`Stub::unwind`] returns the
//! guest's state when a signal interrupts a stub.

use core::mem::offset_of;

use vmm_x86::Segment;
use wedge_core::cpu::rflags;
use wedge_core::decode::{DecodeError, Instruction, Op, Operand, decode};
use wedge_core::{RegisterFrame, VirtualCpu};

use crate::{CELL, Cell, Entries};

/// Length of a jump with a 32-bit displacement.
pub const JUMP: usize = 5;
/// Largest total length of the instructions at a site, in bytes.
pub const MAX_SITE: usize = 16;
/// Length of the code that replaces `CLI` without a jump.
const CLEAR_FLAG: usize = 8;
/// NOPs by length (APM vol. 3, `NOP`): the guest kernel's decoders (kprobes) then find instructions
/// after a jump, although nothing executes them.
const NOPS: [&[u8]; 9] = [
    &[0x90],
    &[0x66, 0x90],
    &[0x0f, 0x1f, 0x00],
    &[0x0f, 0x1f, 0x40, 0x00],
    &[0x0f, 0x1f, 0x44, 0x00, 0x00],
    &[0x66, 0x0f, 0x1f, 0x44, 0x00, 0x00],
    &[0x0f, 0x1f, 0x80, 0x00, 0x00, 0x00, 0x00],
    &[0x0f, 0x1f, 0x84, 0x00, 0x00, 0x00, 0x00, 0x00],
    &[0x66, 0x0f, 0x1f, 0x84, 0x00, 0x00, 0x00, 0x00, 0x00],
];
/// Length of the code in a stub, in bytes.
const CODE: usize = 88;

/// Handling of a site.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u8)]
pub enum Way {
    /// Unused stub.
    Unused,
    /// Enters the wedge.
    Wedge,
    /// `CLI`: replaced in place, without entering the stub.
    Cli,
    /// `STI`, if no event is pending.
    Sti,
    /// `PUSHF; POP`.
    SaveFlags,
    /// `SWAPGS`.
    SwapGs,
    /// `SYSRET` to 64-bit code, if no event is pending.
    Sysret,
    /// `MOV` from a segment register to a general one.
    ReadSegment,
}

/// Rewritten site: its code, and its description for the wedge.
#[derive(Clone, Copy, Debug)]
#[repr(C, align(64))]
pub struct Stub {
    code: [u8; CODE],
    /// Address of the site.
    pub site: u64,
    /// Original instructions.
    original: [u8; MAX_SITE],
    /// Address of the site's table; 0: none.
    pub table: u64,
    /// Length of the original instructions in bytes.
    pub length: u8,
    /// Length of the site in bytes; the guest resumes after it.
    pub padded: u8,
    /// Kind of the site, from the site table.
    pub kind: u8,
    /// Handling.
    pub way: Way,
    /// Offset of the code that enters the wedge.
    general: u8,
}

const _: () = assert!(size_of::<Stub>() == 128);

/// Replacement code of a site.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Patch {
    bytes: [u8; MAX_SITE],
    length: usize,
}

impl Patch {
    /// Creates a jump, with NOPs up to `length`, which is at most [`MAX_SITE`].
    fn jump(from: u64, to: u64, length: usize) -> Option<Self> {
        let mut bytes = [0; MAX_SITE];
        bytes[..JUMP].copy_from_slice(&jump(from, to)?);
        let mut rest = bytes.get_mut(JUMP..length)?;
        while !rest.is_empty() {
            let nop = NOPS[rest.len().min(NOPS.len()) - 1];
            let (part, after) = rest.split_at_mut(nop.len());
            part.copy_from_slice(nop);
            rest = after;
        }
        Some(Self { bytes, length })
    }

    /// Returns the code.
    pub fn bytes(&self) -> &[u8] {
        &self.bytes[..self.length]
    }
}

/// Site to be rewritten.
#[derive(Clone, Copy, Debug)]
pub struct SiteTarget<'a> {
    /// Its address.
    pub site: u64,
    /// Original instructions.
    pub original: &'a [u8],
    /// Address of its table; 0: none.
    pub table: u64,
    /// Length of the site in bytes, padding included.
    pub padded: u8,
    /// Kind, from the site table.
    pub kind: u8,
    /// The arithmetic flags are dead after the site.
    pub flags_dead: bool,
    /// The site may be handled in place.
    pub fast: bool,
}

/// State of the guest when a signal has interrupted a stub.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Unwound {
    /// The stub continues; the guest checks for pending events before it enables interrupts.
    Continue,
    /// The guest restarts the site. The second value is added to its stack pointer.
    Restart(u64, u64),
    /// The guest resumes after the site, with interrupts enabled.
    Resume(u64),
    /// The guest has executed `SYSRET`.
    Sysret,
}

const CPU: u64 = CELL + offset_of!(Cell, cpu) as u64;
const RSP: u64 = CPU + offset_of!(RegisterFrame, gpr) as u64 + 4 * 8;
const HELD_FLAGS: u64 = CPU + offset_of!(VirtualCpu, held_flags) as u64;
const ATTENTION: u64 = CELL + offset_of!(Cell, attention) as u64;
const SEGMENTS: u64 = CPU + offset_of!(VirtualCpu, segments) as u64;
const KERNEL_GS: u64 = CPU + offset_of!(VirtualCpu, kernel_gs_base) as u64;
const EVENTS: u64 = CELL + offset_of!(Cell, events) as u64;
const SAVED: u64 = CELL + offset_of!(Cell, saved) as u64;
const SCRATCH_TOP: u64 = CELL + (offset_of!(Cell, scratch) + size_of::<[u64; 16]>()) as u64;
/// Byte of the flags that contains `IF`, and `IF` in it.
const FLAG_BYTE: u64 = HELD_FLAGS + 1;
const FLAG_ON: u8 = (rflags::IF >> 8) as u8;

/// `CS` and `SS`, by their encoding: the CPU has the host's.
const HOST_SEGMENTS: [u8; 2] = [1, 2];
const RAX: u8 = 0;
const RCX: u8 = 1;

impl Stub {
    /// Creates the stub at address `at` for a site, and the replacement code. `None`: out of reach,
    /// or too short.
    pub fn new(at: u64, entries: &Entries, target: &SiteTarget<'_>) -> Option<(Self, Patch)> {
        let SiteTarget { site, original, padded, kind, .. } = *target;
        if original.len() > MAX_SITE || usize::from(padded) < JUMP.max(original.len()) {
            return None;
        }
        let mut stub = Self {
            code: [0xcc; CODE],
            site,
            original: [0; MAX_SITE],
            table: target.table,
            length: original.len() as u8,
            padded,
            kind,
            way: way(target),
            general: 0,
        };
        stub.original[..original.len()].copy_from_slice(original);
        let (way, resume) = (stub.way, stub.resume());
        let mut code = Code { bytes: &mut stub.code, base: at, used: 0 };
        code.handle_in_place(way, original, resume, entries)?;
        let general = code.used;
        code.store(4, RSP)?;
        // mov esp, top of the scratch stack; push address of this stub
        code.put(&[0xbc])?.put(&low(SCRATCH_TOP)?)?.put(&[0x68])?.put(&low(at)?)?;
        code.jump(entries.site)?;
        stub.general = general as u8;
        let patch = if stub.way == Way::Cli {
            let mut bytes = [0; MAX_SITE];
            bytes[..3].copy_from_slice(&[0xc6, 0x04, 0x25]);
            bytes[3..7].copy_from_slice(&low(FLAG_BYTE)?);
            Patch { bytes, length: CLEAR_FLAG }
        } else {
            Patch::jump(site, at, usize::from(padded).min(MAX_SITE))?
        };
        Some((stub, patch))
    }

    /// Returns the address at which the guest resumes after the site.
    pub fn resume(&self) -> u64 {
        self.site.wrapping_add(self.padded.into())
    }

    /// Returns the original instructions.
    pub fn instructions(&self) -> &[u8] {
        &self.original[..usize::from(self.length).min(MAX_SITE)]
    }

    /// Returns the guest's state for a signal at `offset` in this stub.
    pub fn unwind(&self, offset: u64) -> Unwound {
        if offset >= self.general.into() {
            return Unwound::Continue;
        }
        match self.way {
            Way::Sti => Unwound::Resume(self.resume()),
            // Between PUSHF and POP the flags are on the stack.
            Way::SaveFlags => Unwound::Restart(self.site, if offset == 1 { 8 } else { 0 }),
            Way::Sysret => Unwound::Sysret,
            // Until its last jump it only reads the selector.
            Way::ReadSegment => Unwound::Restart(self.site, 0),
            _ => Unwound::Continue,
        }
    }
}

/// Chooses the handling of a site.
fn way(target: &SiteTarget<'_>) -> Way {
    let Ok((all, count)) = decode_all(target.original) else { return Way::Wedge };
    if !target.fast {
        return Way::Wedge;
    }
    match (&all[..count], target.flags_dead) {
        ([Instruction { op: Op::Cli, .. }], _) if usize::from(target.padded) >= CLEAR_FLAG => {
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

/// Returns the destination register of `PUSHF; POP`.
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

/// Returns the segment register that a site reads, its destination register, and the operand size
/// in bytes.
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

/// Returns whether a site is a `MOV` from a data segment register to a general one. It stays as it
/// is where the CPU has the guest's selectors.
pub fn reads_data_segment(original: &[u8]) -> bool {
    segment_to(original).is_some_and(|(segment, ..)| !HOST_SEGMENTS.contains(&segment))
}

struct Code<'a> {
    bytes: &'a mut [u8; CODE],
    base: u64,
    used: usize,
}

impl Code<'_> {
    /// Emits the code that handles a site without the wedge. It falls through if it cannot.
    fn handle_in_place(
        &mut self,
        way: Way,
        original: &[u8],
        resume: u64,
        entries: &Entries,
    ) -> Option<()> {
        let target = match way {
            Way::Unused | Way::Wedge | Way::Cli => return Some(()),
            Way::Sti => {
                self.set_byte(FLAG_BYTE, FLAG_ON)?.unless_zero(ATTENTION, JUMP)?;
                resume
            }
            Way::SaveFlags => self.save_flags(saved_to(original)?).map(|_| resume)?,
            Way::SwapGs => self.swap_gs().map(|_| resume)?,
            Way::Sysret => self.check_sysret().map(|_| entries.sysret)?,
            Way::ReadSegment => self.read_segment(segment_to(original)?).map(|_| resume)?,
        };
        self.jump(target).map(|_| ())
    }

    fn save_flags(&mut self, register: u8) -> Option<()> {
        let (low, extended) = (register & 7, register >> 3);
        self.put(&[0x9c])?;
        if extended != 0 {
            self.put(&[0x41])?;
        }
        self.put(&[0x58 | low])?;
        // The host's IF is on, and TF may belong to a debugger: and reg, ~(IF | TF); or
        // reg, [flag].
        let mask = (!(rflags::IF | rflags::TF) as u32).to_le_bytes();
        self.put(&[0x48 | extended, 0x81, 0xe0 | low])?.put(&mask)?;
        self.put(&[0x48 | extended << 2, 0x0b])?.absolute(register, HELD_FLAGS)?;
        Some(())
    }

    fn swap_gs(&mut self) -> Option<()> {
        self.store(RAX, SAVED)?.store(RCX, SAVED + 8)?;
        // rdgsbase rax
        self.put(&[0xf3, 0x48, 0x0f, 0xae, 0xc8])?;
        self.load(RCX, KERNEL_GS)?.store(RAX, KERNEL_GS)?;
        // wrgsbase rcx
        self.put(&[0xf3, 0x48, 0x0f, 0xae, 0xd9])?;
        self.load(RAX, SAVED)?.load(RCX, SAVED + 8)?;
        Some(())
    }

    /// Checks the flags that `SYSRET` will load, and pending events.
    fn check_sysret(&mut self) -> Option<()> {
        // test r11d, IF; jz general; test r11d, TF; jnz general
        const TEST: usize = 7 + 2;
        let looks = 2 * (8 + 2) + JUMP;
        for (flag, branch, over) in [(rflags::IF, 0x74, TEST + looks), (rflags::TF, 0x75, looks)] {
            let flag = (flag as u32).to_le_bytes();
            self.put(&[0x41, 0xf7, 0xc3])?.put(&flag)?.put(&[branch, over as u8])?;
        }
        self.unless_zero(ATTENTION, 8 + 2 + JUMP)?;
        self.unless_zero(EVENTS, JUMP)?;
        Some(())
    }

    fn read_segment(&mut self, (segment, register, size): (u8, u8, u8)) -> Option<()> {
        let selector = SEGMENTS
            + (usize::from(segment) * size_of::<Segment>() + offset_of!(Segment, selector)) as u64;
        if size == 2 {
            self.put(&[0x66])?;
        }
        if register >> 3 != 0 {
            self.put(&[0x44])?;
        }
        // mov register, [selector], which preserves the register's upper part, or movzx,
        // which clears it.
        self.put(if size == 2 { &[0x8b] } else { &[0x0f, 0xb7] })?;
        self.absolute(register, selector)?;
        Some(())
    }

    fn put(&mut self, bytes: &[u8]) -> Option<&mut Self> {
        self.bytes.get_mut(self.used..self.used + bytes.len())?.copy_from_slice(bytes);
        self.used += bytes.len();
        Some(self)
    }

    /// Emits the operand bytes of `register` and an absolute address.
    fn absolute(&mut self, register: u8, address: u64) -> Option<&mut Self> {
        self.put(&[0x04 | (register & 7) << 3, 0x25])?.put(&low(address)?)
    }

    /// Emits `mov [address], register`.
    fn store(&mut self, register: u8, address: u64) -> Option<&mut Self> {
        self.put(&[0x48 | (register >> 3) << 2, 0x89])?.absolute(register, address)
    }

    /// Emits `mov register, [address]`.
    fn load(&mut self, register: u8, address: u64) -> Option<&mut Self> {
        self.put(&[0x48 | (register >> 3) << 2, 0x8b])?.absolute(register, address)
    }

    /// Emits `mov byte [address], value`.
    fn set_byte(&mut self, address: u64, value: u8) -> Option<&mut Self> {
        self.put(&[0xc6])?.absolute(0, address)?.put(&[value])
    }

    /// Emits a comparison of a byte with 0, and a jump over the next `over` bytes if it is not 0.
    fn unless_zero(&mut self, address: u64, over: usize) -> Option<&mut Self> {
        self.put(&[0x80])?.absolute(7, address)?.put(&[0])?.put(&[0x75, over as u8])
    }

    fn jump(&mut self, to: u64) -> Option<&mut Self> {
        let here = self.base + self.used as u64;
        self.put(&jump(here, to)?)
    }
}

/// Encodes an address below 2 GiB as an immediate or displacement.
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
/// An instruction that a site must not contain.
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

    fn target(original: &[u8], padded: u8, flags_dead: bool) -> SiteTarget<'_> {
        SiteTarget { site: SITE, original, table: 0, padded, kind: 0, flags_dead, fast: true }
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
    fn reads_of_data_segments_are_recognized() {
        // mov eax, ds; mov ax, gs; mov r12d, fs
        for code in [&[0x8c, 0xd8][..], &[0x66, 0x8c, 0xe8], &[0x41, 0x8c, 0xe4]] {
            assert!(reads_data_segment(code), "{code:x?}");
        }
        // mov eax, cs; mov eax, ss; mov ds, eax; mov [rax], ds
        for code in [[0x8c, 0xc8], [0x8c, 0xd0], [0x8e, 0xd8], [0x8c, 0x18]] {
            assert!(!reads_data_segment(&code), "{code:x?}");
        }
    }

    #[test]
    fn a_stub_is_reached_and_resumes() {
        let (stub, patch) = new(&[0x0f, 0xa2], 8, false).unwrap();
        assert_eq!(stub.way, Way::Wedge);
        assert_eq!(reached(SITE, patch.bytes()), AT);
        assert_eq!(reached(AT + 18, &stub.code[18..]), ENTRIES.site);
        assert_eq!((stub.resume(), stub.instructions()), (SITE + 8, &[0x0f, 0xa2][..]));
        assert_eq!(patch.bytes()[5..], [0x0f, 0x1f, 0x00]);
        let (_, patch) = new(&[0xfb, 0xf4], 16, true).unwrap();
        assert_eq!(patch.bytes()[5..], [NOPS[8], NOPS[1]].concat());
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
        let slow = SiteTarget { fast: false, ..target(&[0xfa], 8, true) };
        assert_eq!(Stub::new(AT, &ENTRIES, &slow).unwrap().0.way, Way::Wedge);
    }

    /// Each branch targets the code that enters the wedge.
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
        assert_eq!(unwind(&[0xfb], 8), Unwound::Resume(SITE + 16));
        assert_eq!(unwind(&[0xfb], 60), Unwound::Continue);
        assert_eq!(unwind(&[0x9c, 0x58], 0), Unwound::Restart(SITE, 0));
        assert_eq!(unwind(&[0x9c, 0x58], 1), Unwound::Restart(SITE, 8));
        assert_eq!(unwind(&[0x9c, 0x58], 2), Unwound::Restart(SITE, 0));
        assert_eq!(unwind(&[0x48, 0x0f, 0x07], 9), Unwound::Sysret);
        for offset in [0, 8] {
            assert_eq!(unwind(&[0x8c, 0xd0], offset), Unwound::Restart(SITE, 0), "{offset}");
        }
        assert_eq!(unwind(&[0x8c, 0xd0], 60), Unwound::Continue);
        assert_eq!(unwind(&[0x0f, 0xa2], 0), Unwound::Continue);
    }

    #[test]
    fn what_cannot_be_rewritten() {
        assert!(new(&[0x0f, 0xa2], 4, false).is_none(), "no room for a jump");
        let far = SiteTarget { site: 0x4000_0000_0000, ..target(&[0x0f, 0xa2], 8, false) };
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
