//! Decoder of sensitive instructions, and of those that share a patch site with them (APM vol. 3,
//! chapters 1 and 4, 64-bit mode).
//!
//! All other instructions are errors, so that a rewriter refuses their site.

/// Prefixes of an instruction.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
struct Prefixes {
    rex: u8,
    operand: bool,
    repeat: u8,
    segment: Option<u8>,
    length: usize,
}

/// Address of a memory operand.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Address {
    /// Base register.
    pub base: Option<u8>,
    /// Index register and log2 of its scale.
    pub index: Option<(u8, u8)>,
    /// Displacement.
    pub displacement: i32,
    /// RIP-relative: the displacement is relative to the end of the instruction.
    pub relative: bool,
    /// Segment override: `FS` (4) or `GS` (5).
    pub segment: Option<u8>,
}

/// Operand.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Operand {
    /// General register.
    Register(u8),
    /// Memory.
    Memory(Address),
}

/// Operation with its operands. Registers are numbered by their encoding.
#[allow(missing_docs, reason = "mnemonics of the manual")]
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Op {
    Cli,
    Sti,
    Hlt,
    Pushf,
    Popf,
    Push(Operand),
    PushImmediate(i32),
    Pop(Operand),
    /// Port number; `None`: in `DX`.
    In(Option<u8>),
    Out(Option<u8>),
    Ins,
    Outs,
    ReadControl {
        control: u8,
        register: u8,
    },
    WriteControl {
        control: u8,
        register: u8,
    },
    ReadDebug {
        debug: u8,
        register: u8,
    },
    WriteDebug {
        debug: u8,
        register: u8,
    },
    Rdmsr,
    Wrmsr,
    Lgdt(Address),
    Lidt(Address),
    Sgdt(Address),
    Sidt(Address),
    Lldt(Operand),
    Sldt(Operand),
    Ltr(Operand),
    Str(Operand),
    Smsw(Operand),
    Lmsw(Operand),
    Clts,
    Invlpg(Address),
    Invpcid {
        kind: u8,
        descriptor: Address,
    },
    /// `WBINVD`, `WBNOINVD`, `INVD`.
    CacheFlush,
    Iret,
    /// `true`: return to 64-bit code.
    Sysret(bool),
    Sysexit,
    Swapgs,
    ReadSegment {
        segment: u8,
        to: Operand,
    },
    WriteSegment {
        segment: u8,
        from: Operand,
    },
    PushSegment(u8),
    PopSegment(u8),
    /// Bytes to pop after the return address.
    FarReturn(u16),
    FarJump(Address),
    FarCall(Address),
    Cpuid,
    Rdpmc,
    Xsetbv,
    Stac,
    Clac,
    Monitor,
    Mwait,
    Lar {
        register: u8,
        from: Operand,
    },
    Lsl {
        register: u8,
        from: Operand,
    },
    Verr(Operand),
    Verw(Operand),
    Int(u8),
    /// `XRSTOR`; `marked`: encoded as `UD1` by the back end.
    Xrstor {
        area: Address,
        marked: bool,
    },
    /// `VMCALL`, `VMMCALL`.
    Hypercall,
    /// Undefined on all emulated CPUs.
    Undefined,
}

/// A decoded instruction.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Instruction {
    /// Operation.
    pub op: Op,
    /// Length in bytes.
    pub length: usize,
    /// Operand size in bytes: 1, 2, 4 or 8.
    pub size: u8,
    /// The instruction has a `REP` prefix.
    pub repeat: bool,
}

/// Failure to decode an instruction.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum DecodeError {
    /// Truncated.
    Truncated,
    /// Not supported.
    Unknown,
}

struct Reader<'a> {
    bytes: &'a [u8],
    at: usize,
}

impl Reader<'_> {
    fn byte(&mut self) -> Result<u8, DecodeError> {
        let byte = *self.bytes.get(self.at).ok_or(DecodeError::Truncated)?;
        self.at += 1;
        Ok(byte)
    }

    fn word(&mut self) -> Result<u16, DecodeError> {
        Ok(u16::from_le_bytes([self.byte()?, self.byte()?]))
    }

    fn long(&mut self) -> Result<i32, DecodeError> {
        Ok(i32::from_le_bytes([self.byte()?, self.byte()?, self.byte()?, self.byte()?]))
    }
}

/// `ModRM` byte with SIB byte and displacement.
struct ModRm {
    reg: u8,
    rm: Operand,
    /// `reg` without its REX extension: opcode of a group.
    group: u8,
    byte: u8,
}

impl ModRm {
    fn memory(&self) -> Result<Address, DecodeError> {
        match self.rm {
            Operand::Memory(address) => Ok(address),
            Operand::Register(_) => Err(DecodeError::Unknown),
        }
    }
}

fn mod_rm(reader: &mut Reader<'_>, prefixes: &Prefixes) -> Result<ModRm, DecodeError> {
    let byte = reader.byte()?;
    let (mode, group, low) = (byte >> 6, byte >> 3 & 7, byte & 7);
    let [r, x, b] = [4, 2, 1].map(|bit| if prefixes.rex & bit != 0 { 8 } else { 0 });
    let done = |rm| ModRm { reg: group | r, rm, group, byte };
    if mode == 3 {
        return Ok(done(Operand::Register(low | b)));
    }
    let mut address = Address {
        base: Some(low | b),
        index: None,
        displacement: 0,
        relative: false,
        segment: prefixes.segment,
    };
    let mut wide = mode == 2;
    if low == 4 {
        let sib = reader.byte()?;
        let index = sib >> 3 & 7 | x;
        // 4 without REX extension: no index.
        address.index = (index != 4).then_some((index, sib >> 6));
        address.base = Some(sib & 7 | b);
        if sib & 7 == 5 && mode == 0 {
            address.base = None;
            wide = true;
        }
    } else if low == 5 && mode == 0 {
        address.base = None;
        address.relative = true;
        wide = true;
    }
    if wide {
        address.displacement = reader.long()?;
    } else if mode == 1 {
        address.displacement = i32::from(reader.byte()? as i8);
    }
    Ok(done(Operand::Memory(address)))
}

fn prefixes(reader: &mut Reader<'_>) -> Result<Prefixes, DecodeError> {
    let mut found = Prefixes::default();
    loop {
        let byte = reader.byte()?;
        match byte {
            0x66 => found.operand = true,
            0xf2 | 0xf3 => found.repeat = byte,
            // The four oldest segment overrides have no effect in 64-bit mode.
            0x26 | 0x2e | 0x36 | 0x3e => {}
            0x64 => found.segment = Some(4),
            0x65 => found.segment = Some(5),
            0x40..=0x4f => {
                found.rex = byte;
                return Ok(found);
            }
            _ => {
                reader.at -= 1;
                return Ok(found);
            }
        }
        found.length += 1;
        if found.length > 14 {
            return Err(DecodeError::Unknown);
        }
    }
}

/// Decodes the first instruction in `bytes`.
///
/// # Errors
/// See [`DecodeError`].
pub fn decode(bytes: &[u8]) -> Result<Instruction, DecodeError> {
    let mut reader = Reader { bytes: &bytes[..bytes.len().min(15)], at: 0 };
    let prefixes = prefixes(&mut reader)?;
    let size = match (prefixes.rex & 8 != 0, prefixes.operand) {
        (true, _) => 8,
        (false, true) => 2,
        (false, false) => 4,
    };
    let mut decoder = Decoder { reader, prefixes, size };
    let op = decoder.one_byte()?;
    let Decoder { reader, prefixes, size } = decoder;
    Ok(Instruction { op, length: reader.at, size, repeat: prefixes.repeat != 0 })
}

/// An instruction whose prefixes are decoded.
struct Decoder<'a> {
    reader: Reader<'a>,
    prefixes: Prefixes,
    /// Operand size in bytes: that of the prefixes, unless the opcode has another.
    size: u8,
}

impl Decoder<'_> {
    fn mod_rm(&mut self) -> Result<ModRm, DecodeError> {
        mod_rm(&mut self.reader, &self.prefixes)
    }

    /// Extends a register number by a bit of the REX prefix.
    fn extend(&self, register: u8, bit: u8) -> u8 {
        register & 7 | if self.prefixes.rex & bit != 0 { 8 } else { 0 }
    }

    /// Sets the operand size of stack operations, which is 64 bits by default.
    fn set_stack_size(&mut self) {
        self.size = if self.prefixes.operand { 2 } else { 8 };
    }

    fn one_byte(&mut self) -> Result<Op, DecodeError> {
        let opcode = self.reader.byte()?;
        Ok(match opcode {
            0xfa => Op::Cli,
            0xfb => Op::Sti,
            0xf4 => Op::Hlt,
            0x50..=0x5f | 0x68 | 0x6a | 0x8f | 0x9c | 0x9d => return self.stack(opcode),
            0xff => {
                let rm = self.mod_rm()?;
                match rm.group {
                    6 => {
                        self.set_stack_size();
                        Op::Push(rm.rm)
                    }
                    5 => Op::FarJump(rm.memory()?),
                    3 => Op::FarCall(rm.memory()?),
                    _ => return Err(DecodeError::Unknown),
                }
            }
            0xe4 | 0xe5 | 0xec | 0xed | 0xe6 | 0xe7 | 0xee | 0xef => {
                let port = if opcode & 8 == 0 { Some(self.reader.byte()?) } else { None };
                self.size = if opcode & 1 == 0 { 1 } else { self.size.min(4) };
                if opcode & 2 == 0 { Op::In(port) } else { Op::Out(port) }
            }
            0x6c..=0x6f => {
                self.size = if opcode & 1 == 0 { 1 } else { self.size.min(4) };
                if opcode & 2 == 0 { Op::Ins } else { Op::Outs }
            }
            0x8c | 0x8e => {
                let ModRm { rm, group: segment, .. } = self.mod_rm()?;
                match (opcode, segment) {
                    (0x8c, ..6) => Op::ReadSegment { segment, to: rm },
                    (0x8e, 0 | 2..6) => Op::WriteSegment { segment, from: rm },
                    _ => return Err(DecodeError::Unknown),
                }
            }
            0xca => Op::FarReturn(self.reader.word()?),
            0xcb => Op::FarReturn(0),
            0xcc => Op::Int(3),
            0xcd => Op::Int(self.reader.byte()?),
            // Shorter frames are not used in 64-bit mode.
            0xcf if self.size == 8 => Op::Iret,
            0x0f => return self.two_bytes(),
            _ => return Err(DecodeError::Unknown),
        })
    }

    fn stack(&mut self, opcode: u8) -> Result<Op, DecodeError> {
        self.set_stack_size();
        let register = Operand::Register(self.extend(opcode, 1));
        Ok(match opcode {
            0x9c => Op::Pushf,
            0x9d => Op::Popf,
            0x50..=0x57 => Op::Push(register),
            0x58..=0x5f => Op::Pop(register),
            0x68 if !self.prefixes.operand => Op::PushImmediate(self.reader.long()?),
            0x6a => Op::PushImmediate(i32::from(self.reader.byte()? as i8)),
            0x8f => {
                let rm = self.mod_rm()?;
                if rm.group != 0 {
                    return Err(DecodeError::Unknown);
                }
                Op::Pop(rm.rm)
            }
            _ => return Err(DecodeError::Unknown),
        })
    }

    fn two_bytes(&mut self) -> Result<Op, DecodeError> {
        let opcode = self.reader.byte()?;
        Ok(match opcode {
            0x00 => return self.group_6(),
            0x01 => return self.group_7(),
            0x02 | 0x03 => {
                let ModRm { reg: register, rm: from, .. } = self.mod_rm()?;
                if opcode == 3 { Op::Lsl { register, from } } else { Op::Lar { register, from } }
            }
            0x06 => Op::Clts,
            0x07 => Op::Sysret(self.size == 8),
            0x08 | 0x09 => Op::CacheFlush,
            0x20..=0x23 => return self.special_register(opcode),
            0x30 => Op::Wrmsr,
            0x32 => Op::Rdmsr,
            0x33 => Op::Rdpmc,
            0x35 => Op::Sysexit,
            0x37 => Op::Undefined,
            0xa0 | 0xa1 | 0xa8 | 0xa9 => {
                self.size = 8;
                let segment = if opcode & 8 == 0 { 4 } else { 5 };
                if opcode & 1 == 0 { Op::PushSegment(segment) } else { Op::PopSegment(segment) }
            }
            0xa2 => Op::Cpuid,
            0x38 => {
                if self.reader.byte()? != 0x82 || !self.prefixes.operand {
                    return Err(DecodeError::Unknown);
                }
                let rm = self.mod_rm()?;
                Op::Invpcid { kind: rm.reg, descriptor: rm.memory()? }
            }
            0xae | 0xb9 | 0xc7 => {
                let rm = self.mod_rm()?;
                match (opcode, rm.group, rm.memory()?) {
                    (0xae | 0xb9, 5, area) => Op::Xrstor { area, marked: opcode == 0xb9 },
                    // XSAVES, XRSTORS: not reported by CPUID.
                    (0xc7, 3 | 5, _) => Op::Undefined,
                    _ => return Err(DecodeError::Unknown),
                }
            }
            _ => return Err(DecodeError::Unknown),
        })
    }

    fn group_6(&mut self) -> Result<Op, DecodeError> {
        let rm = self.mod_rm()?;
        Ok(match rm.group {
            0 => Op::Sldt(rm.rm),
            1 => Op::Str(rm.rm),
            2 => Op::Lldt(rm.rm),
            3 => Op::Ltr(rm.rm),
            4 => Op::Verr(rm.rm),
            5 => Op::Verw(rm.rm),
            _ => return Err(DecodeError::Unknown),
        })
    }

    fn group_7(&mut self) -> Result<Op, DecodeError> {
        let rm = self.mod_rm()?;
        Ok(match (rm.byte, rm.group) {
            (0xc1 | 0xd9, _) => Op::Hypercall,
            (0xc8 | 0xfa, _) => Op::Monitor,
            (0xc9 | 0xfb, _) => Op::Mwait,
            (0xca, _) => Op::Clac,
            (0xcb, _) => Op::Stac,
            (0xd1, _) => Op::Xsetbv,
            (0xf8, _) => Op::Swapgs,
            // ENCLS, VMX and SVM.
            (0xcf | 0xc2..=0xc4 | 0xd8 | 0xda..=0xdf, _) => Op::Undefined,
            (0xc0.., 4) | (..=0xbf, 4) => Op::Smsw(rm.rm),
            (0xc0.., 6) | (..=0xbf, 6) => Op::Lmsw(rm.rm),
            (..=0xbf, 0) => Op::Sgdt(rm.memory()?),
            (..=0xbf, 1) => Op::Sidt(rm.memory()?),
            (..=0xbf, 2) => Op::Lgdt(rm.memory()?),
            (..=0xbf, 3) => Op::Lidt(rm.memory()?),
            (..=0xbf, 7) => Op::Invlpg(rm.memory()?),
            _ => return Err(DecodeError::Unknown),
        })
    }

    /// Moves from and to control and debug registers.
    fn special_register(&mut self, opcode: u8) -> Result<Op, DecodeError> {
        // The mode bits are ignored: both operands are registers.
        let byte = self.reader.byte()?;
        let (special, register) = (self.extend(byte >> 3, 4), self.extend(byte, 1));
        self.size = 8;
        Ok(match opcode {
            0x20 => Op::ReadControl { control: special, register },
            0x22 => Op::WriteControl { control: special, register },
            _ if special > 7 => return Err(DecodeError::Unknown),
            0x21 => Op::ReadDebug { debug: special, register },
            _ => Op::WriteDebug { debug: special, register },
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn op(bytes: &[u8]) -> Op {
        let decoded = decode(bytes).unwrap();
        assert_eq!(decoded.length, bytes.len(), "{bytes:x?}");
        for length in 0..bytes.len() {
            assert!(decode(&bytes[..length]).is_err(), "{bytes:x?} cut at {length}");
        }
        decoded.op
    }

    #[test]
    fn what_compilers_and_kernels_emit() {
        let rax = Operand::Register(0);
        assert_eq!(op(&[0xfa]), Op::Cli);
        assert_eq!(op(&[0x48, 0xcf]), Op::Iret);
        assert_eq!(op(&[0x48, 0x0f, 0x07]), Op::Sysret(true));
        assert_eq!(op(&[0x0f, 0x01, 0xf8]), Op::Swapgs);
        assert_eq!(op(&[0x0f, 0x20, 0xd8]), Op::ReadControl { control: 3, register: 0 });
        assert_eq!(op(&[0x41, 0x0f, 0x22, 0xe4]), Op::WriteControl { control: 4, register: 12 });
        assert_eq!(op(&[0x44, 0x0f, 0x20, 0xc0]), Op::ReadControl { control: 8, register: 0 });
        assert_eq!(op(&[0x0f, 0x23, 0xf8]), Op::WriteDebug { debug: 7, register: 0 });
        assert_eq!(op(&[0x8e, 0xd8]), Op::WriteSegment { segment: 3, from: rax });
        assert_eq!(op(&[0x8c, 0xc8]), Op::ReadSegment { segment: 1, to: rax });
        assert_eq!(op(&[0x0f, 0xa1]), Op::PopSegment(4));
        assert_eq!(op(&[0x41, 0x5c]), Op::Pop(Operand::Register(12)));
        assert_eq!(op(&[0x6a, 0x10]), Op::PushImmediate(16));
        assert_eq!(op(&[0xe6, 0x80]), Op::Out(Some(0x80)));
        assert_eq!(op(&[0x66, 0xed]), Op::In(None));
        assert_eq!(op(&[0x0f, 0x01, 0xd9]), Op::Hypercall);
        assert_eq!(op(&[0xf3, 0x0f, 0x09]), Op::CacheFlush);
    }

    #[test]
    fn addresses() {
        let at = |base, index, displacement| Address {
            base,
            index,
            displacement,
            relative: false,
            segment: None,
        };
        // lgdt (%rax), 8(%rsp), (%r12), 4(%rbp,%r9,8), disp32, disp32(%rip), %gs:disp32
        let lgdt = Op::Lgdt;
        assert_eq!(op(&[0x0f, 0x01, 0x10]), lgdt(at(Some(0), None, 0)));
        assert_eq!(op(&[0x0f, 0x01, 0x54, 0x24, 8]), lgdt(at(Some(4), None, 8)));
        assert_eq!(op(&[0x41, 0x0f, 0x01, 0x14, 0x24]), lgdt(at(Some(12), None, 0)));
        let indexed = at(Some(5), Some((9, 3)), 4);
        assert_eq!(op(&[0x42, 0x0f, 0x01, 0x54, 0xcd, 4]), lgdt(indexed));
        assert_eq!(op(&[0x0f, 0x01, 0x14, 0x25, 4, 3, 2, 1]), lgdt(at(None, None, 0x0102_0304)));
        let relative = Address { relative: true, ..at(None, None, -2) };
        assert_eq!(op(&[0x0f, 0x01, 0x15, 0xfe, 0xff, 0xff, 0xff]), lgdt(relative));
        let per_cpu = Address { segment: Some(5), ..at(None, None, 16) };
        assert_eq!(op(&[0x65, 0x0f, 0x01, 0x14, 0x25, 16, 0, 0, 0]), lgdt(per_cpu));
        let invpcid = Op::Invpcid { kind: 1, descriptor: at(Some(0), None, 0) };
        assert_eq!(op(&[0x66, 0x0f, 0x38, 0x82, 0x08]), invpcid);
    }

    #[test]
    fn what_is_no_site() {
        for bytes in [&[0x90][..], &[0x0f, 0x0b], &[0xc3], &[0x8e, 0xc8], &[0xcf], &[0x0f, 0xff]] {
            assert_eq!(decode(bytes), Err(DecodeError::Unknown), "{bytes:x?}");
        }
        assert_eq!(decode(&[0x66; 20]), Err(DecodeError::Unknown));
        assert_eq!(decode(&[]), Err(DecodeError::Truncated));
    }
}
