//! ELF little-endian executables (System V ABI, "Object Files" and "Program Loading"): 64-bit, and
//! with [`Elf::parse_any`] also 32-bit.
//!
//! Parsing validates everything that a loader relies on, so the iterators cannot fail: every
//! loadable segment is inside the file, is not larger in the file than in memory, and ends below
//! 2^64.

use crate::bytes;
use core::ops::Range;

const HEADER_LENGTH: usize = 64;
const PROGRAM_HEADER_LENGTH: usize = 56;

const HEADER_LENGTH_32: usize = 52;
const PROGRAM_HEADER_LENGTH_32: usize = 32;

const CLASS_32: u8 = 1;
const CLASS_64: u8 = 2;
const DATA_LITTLE_ENDIAN: u8 = 1;
const TYPE_EXECUTABLE: u16 = 2;
const TYPE_SHARED: u16 = 3;
const MACHINE_X86: u16 = 3;
const MACHINE_X86_64: u16 = 62;
const MACHINE_AARCH64: u16 = 183;
const SEGMENT_LOAD: u32 = 1;
const SEGMENT_INTERPRETER: u32 = 3;
const SEGMENT_NOTE: u32 = 4;

/// Bit of [`Segment::flags`]: executable.
pub const FLAG_EXECUTE: u32 = 1;
/// Bit of [`Segment::flags`]: writable.
pub const FLAG_WRITE: u32 = 2;
/// Bit of [`Segment::flags`]: readable.
pub const FLAG_READ: u32 = 4;

/// Error of ELF parsing.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ElfError {
    /// The file ends within its header, its program headers or a segment.
    Truncated,
    /// No ELF magic.
    NotElf,
    /// Not little-endian, or not 64-bit where that is required.
    BadClass,
    /// Neither an executable nor a position-independent executable.
    NotExecutable,
    /// Unsupported processor architecture.
    BadMachine,
    /// Unexpected size of program headers.
    BadProgramHeaders,
    /// A segment is larger in the file than in memory, or wraps around the address space.
    BadSegment,
}

/// Processor architecture of an executable.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Machine {
    /// 32-bit x86, in 32-bit files only.
    X86,
    /// x86-64.
    X86_64,
    /// AArch64.
    Aarch64,
}

/// A loadable segment (`PT_LOAD`).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Segment {
    /// Virtual address of the first byte.
    pub vaddr: u64,
    /// Physical address of the first byte.
    pub paddr: u64,
    /// Offset of the contents in the file, in bytes.
    pub offset: u64,
    /// Length in the file, in bytes; the rest of the segment is zero.
    pub filesz: u64,
    /// Length in memory, in bytes.
    pub memsz: u64,
    /// Permissions: [`FLAG_READ`], [`FLAG_WRITE`], [`FLAG_EXECUTE`].
    pub flags: u32,
}

impl Segment {
    /// Physical addresses that the segment occupies.
    pub fn physical(&self) -> Range<u64> {
        self.paddr..self.paddr + self.memsz
    }

    /// Virtual addresses that the segment occupies.
    pub fn virtual_range(&self) -> Range<u64> {
        self.vaddr..self.vaddr + self.memsz
    }

    /// Returns whether the segment is writable.
    pub fn writable(&self) -> bool {
        self.flags & FLAG_WRITE != 0
    }

    /// Returns whether the segment is executable.
    pub fn executable(&self) -> bool {
        self.flags & FLAG_EXECUTE != 0
    }
}

/// A note: vendor-defined data.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Note<'a> {
    /// Owner, which defines the meaning of `kind`; without the terminating zero.
    pub name: &'a [u8],
    /// Type of the note.
    pub kind: u32,
    /// Contents.
    pub desc: &'a [u8],
}

/// A validated executable.
#[derive(Clone, Copy, Debug)]
pub struct Elf<'a> {
    bytes: &'a [u8],
    /// 64-bit file.
    wide: bool,
    /// Program headers; the length is a multiple of the entry length.
    headers: &'a [u8],
    machine: Machine,
    entry: u64,
}

impl<'a> Elf<'a> {
    /// Parses and validates a 64-bit executable.
    pub fn parse(file: &'a [u8]) -> Result<Self, ElfError> {
        match file.get(4) {
            Some(&CLASS_32) if file.starts_with(b"\x7fELF") => Err(ElfError::BadClass),
            _ => Self::parse_any(file),
        }
    }

    /// Parses and validates a 64-bit or 32-bit executable.
    pub fn parse_any(file: &'a [u8]) -> Result<Self, ElfError> {
        if !file.starts_with(b"\x7fELF") {
            return Err(if b"\x7fELF".starts_with(file) {
                ElfError::Truncated
            } else {
                ElfError::NotElf
            });
        }
        let class = *file.get(4).ok_or(ElfError::Truncated)?;
        let wide = class != CLASS_32;
        let length = if wide { HEADER_LENGTH } else { HEADER_LENGTH_32 };
        let header = file.get(..length).ok_or(ElfError::Truncated)?;
        if !matches!(class, CLASS_32 | CLASS_64) || header[5] != DATA_LITTLE_ENDIAN {
            return Err(ElfError::BadClass);
        }
        let half = |at| bytes::u16(header, at).ok_or(ElfError::Truncated);
        let word = |at| address(header, at, wide).ok_or(ElfError::Truncated);
        if !matches!(half(16)?, TYPE_EXECUTABLE | TYPE_SHARED) {
            return Err(ElfError::NotExecutable);
        }
        let machine = match half(18)? {
            MACHINE_X86 if !wide => Machine::X86,
            MACHINE_X86_64 => Machine::X86_64,
            MACHINE_AARCH64 => Machine::Aarch64,
            _ => return Err(ElfError::BadMachine),
        };
        let entry = word(24)?;
        let (place, size_at, size) = match wide {
            true => (word(32)?, 54, PROGRAM_HEADER_LENGTH),
            false => (word(28)?, 42, PROGRAM_HEADER_LENGTH_32),
        };
        let count = usize::from(half(size_at + 2)?);
        if count != 0 && usize::from(half(size_at)?) != size {
            return Err(ElfError::BadProgramHeaders);
        }
        let headers = usize::try_from(place)
            .ok()
            .and_then(|at| bytes::slice(file, at, count * size))
            .ok_or(ElfError::Truncated)?;
        let elf = Self { bytes: file, wide, headers, machine, entry };
        for segment in elf.segments() {
            if segment.filesz > segment.memsz
                || segment.paddr.checked_add(segment.memsz).is_none()
                || segment.vaddr.checked_add(segment.memsz).is_none()
            {
                return Err(ElfError::BadSegment);
            }
            elf.contents(segment.offset, segment.filesz).ok_or(ElfError::Truncated)?;
        }
        Ok(elf)
    }

    /// Processor architecture.
    pub fn machine(&self) -> Machine {
        self.machine
    }

    /// Virtual address of the entry point.
    pub fn entry(&self) -> u64 {
        self.entry
    }

    /// Returns whether the executable requests an interpreter (`PT_INTERP`), i.e. is dynamically
    /// linked.
    pub fn has_interpreter(&self) -> bool {
        self.of_type(SEGMENT_INTERPRETER).next().is_some()
    }

    /// Loadable segments, in file order.
    pub fn segments(&self) -> impl Iterator<Item = Segment> + use<'a> {
        self.of_type(SEGMENT_LOAD)
    }

    /// Contents of a segment in the file.
    pub fn data(&self, segment: &Segment) -> &'a [u8] {
        self.contents(segment.offset, segment.filesz).unwrap_or(&[])
    }

    /// Notes of all note segments, up to the first malformed note of each.
    pub fn notes(&self) -> impl Iterator<Item = Note<'a>> + use<'a> {
        let elf = *self;
        self.of_type(SEGMENT_NOTE).flat_map(move |segment| Notes {
            bytes: elf.contents(segment.offset, segment.filesz).unwrap_or(&[]),
        })
    }

    fn of_type(&self, kind: u32) -> impl Iterator<Item = Segment> + use<'a> {
        let wide = self.wide;
        let size = if wide { PROGRAM_HEADER_LENGTH } else { PROGRAM_HEADER_LENGTH_32 };
        self.headers.chunks_exact(size).filter_map(move |header| {
            if bytes::u32(header, 0)? != kind {
                return None;
            }
            // Offset of the flags; offset and size of the other fields, which are consecutive.
            let (flags, first, each) = if wide { (4, 8, 8) } else { (24, 4, 4) };
            let word = |index: usize| address(header, first + each * index, wide);
            Some(Segment {
                flags: bytes::u32(header, flags)?,
                offset: word(0)?,
                vaddr: word(1)?,
                paddr: word(2)?,
                filesz: word(3)?,
                memsz: word(4)?,
            })
        })
    }

    fn contents(&self, offset: u64, length: u64) -> Option<&'a [u8]> {
        bytes::slice(self.bytes, usize::try_from(offset).ok()?, usize::try_from(length).ok()?)
    }
}

/// Reads an address or length: 8 bytes, or 4 bytes in 32-bit files.
fn address(bytes: &[u8], at: usize, wide: bool) -> Option<u64> {
    if wide { bytes::u64(bytes, at) } else { bytes::u32(bytes, at).map(u64::from) }
}

/// Notes of one segment. Name and contents are each padded to four bytes, as tools write all kinds
/// of notes that concern loaders, even in 64-bit files.
struct Notes<'a> {
    bytes: &'a [u8],
}

impl<'a> Iterator for Notes<'a> {
    type Item = Note<'a>;

    fn next(&mut self) -> Option<Note<'a>> {
        const HEADER: usize = 12;
        let name_length = bytes::u32(self.bytes, 0)? as usize;
        let desc_length = bytes::u32(self.bytes, 4)? as usize;
        let kind = bytes::u32(self.bytes, 8)?;
        let name = bytes::slice(self.bytes, HEADER, name_length)?;
        let desc_at = HEADER.checked_add(name_length.checked_next_multiple_of(4)?)?;
        let desc = bytes::slice(self.bytes, desc_at, desc_length)?;
        let next = desc_at.checked_add(desc_length.checked_next_multiple_of(4)?)?;
        self.bytes = self.bytes.get(next..).unwrap_or(&[]);
        Some(Note { name: bytes::until_zero(name), kind, desc })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file(segments: &[(u32, u64, u64, u64, u64)], contents: &[u8]) -> Vec<u8> {
        let mut file = vec![0; HEADER_LENGTH];
        file[..6].copy_from_slice(b"\x7fELF\x02\x01");
        file[16..18].copy_from_slice(&TYPE_EXECUTABLE.to_le_bytes());
        file[18..20].copy_from_slice(&MACHINE_X86_64.to_le_bytes());
        file[24..32].copy_from_slice(&0x10_0020u64.to_le_bytes());
        file[32..40].copy_from_slice(&(HEADER_LENGTH as u64).to_le_bytes());
        file[54..56].copy_from_slice(&(PROGRAM_HEADER_LENGTH as u16).to_le_bytes());
        file[56..58].copy_from_slice(&(segments.len() as u16).to_le_bytes());
        let data = HEADER_LENGTH + segments.len() * PROGRAM_HEADER_LENGTH;
        for &(kind, offset, address, filesz, memsz) in segments {
            file.extend(kind.to_le_bytes());
            file.extend((FLAG_READ | FLAG_EXECUTE).to_le_bytes());
            for word in [data as u64 + offset, address, address, filesz, memsz, 4096] {
                file.extend(word.to_le_bytes());
            }
        }
        file.extend(contents);
        file
    }

    #[test]
    fn segments_and_notes() {
        let mut note = Vec::new();
        for word in [4u32, 4, 18] {
            note.extend(word.to_le_bytes());
        }
        note.extend(b"Xen\0");
        note.extend(0x10_0000u32.to_le_bytes());
        let mut contents = b"code".to_vec();
        contents.extend(&note);
        let file =
            file(&[(SEGMENT_LOAD, 0, 0x10_0000, 4, 64), (SEGMENT_NOTE, 4, 0, 20, 20)], &contents);
        let elf = Elf::parse(&file).unwrap();
        assert_eq!((elf.machine(), elf.entry()), (Machine::X86_64, 0x10_0020));
        assert!(!elf.has_interpreter());
        let segments: Vec<_> = elf.segments().collect();
        assert_eq!(segments.len(), 1);
        assert_eq!(segments[0].physical(), 0x10_0000..0x10_0040);
        assert_eq!(segments[0].virtual_range(), 0x10_0000..0x10_0040);
        assert!(segments[0].executable() && !segments[0].writable());
        assert_eq!(elf.data(&segments[0]), b"code");
        let notes: Vec<_> = elf.notes().collect();
        assert_eq!(notes, [Note { name: b"Xen", kind: 18, desc: &[0, 0, 0x10, 0] }]);
    }

    /// The same file in 32-bit format.
    fn narrow(segments: &[(u32, u32, u32, u32, u32)], contents: &[u8]) -> Vec<u8> {
        let mut file = vec![0; HEADER_LENGTH_32];
        file[..6].copy_from_slice(b"\x7fELF\x01\x01");
        file[16..18].copy_from_slice(&TYPE_EXECUTABLE.to_le_bytes());
        file[18..20].copy_from_slice(&MACHINE_X86.to_le_bytes());
        file[24..28].copy_from_slice(&0x10_0020u32.to_le_bytes());
        file[28..32].copy_from_slice(&(HEADER_LENGTH_32 as u32).to_le_bytes());
        file[42..44].copy_from_slice(&(PROGRAM_HEADER_LENGTH_32 as u16).to_le_bytes());
        file[44..46].copy_from_slice(&(segments.len() as u16).to_le_bytes());
        let data = (HEADER_LENGTH_32 + segments.len() * PROGRAM_HEADER_LENGTH_32) as u32;
        for &(kind, offset, address, filesz, memsz) in segments {
            for word in [kind, data + offset, address + 1, address, filesz, memsz, FLAG_READ, 4096]
            {
                file.extend(word.to_le_bytes());
            }
        }
        file.extend(contents);
        file
    }

    #[test]
    fn files_of_32_bits() {
        let note = b"\x04\0\0\0\x04\0\0\0\x12\0\0\0Xen\0\0\0\x10\0";
        let contents = [&b"code"[..], note].concat();
        let good =
            narrow(&[(SEGMENT_LOAD, 0, 0x10_0000, 4, 64), (SEGMENT_NOTE, 4, 0, 20, 20)], &contents);
        let elf = Elf::parse_any(&good).unwrap();
        assert_eq!((elf.machine(), elf.entry()), (Machine::X86, 0x10_0020));
        let segments: Vec<_> = elf.segments().collect();
        assert_eq!((segments.len(), segments[0].physical()), (1, 0x10_0000..0x10_0040));
        assert_eq!((segments[0].vaddr, segments[0].flags), (0x10_0001, FLAG_READ));
        assert_eq!(elf.data(&segments[0]), b"code");
        assert_eq!(elf.notes().next().unwrap().desc, [0, 0, 0x10, 0]);
        // Accepted by `parse_any` only.
        assert_eq!(Elf::parse(&good).err(), Some(ElfError::BadClass));
        for length in 0..good.len() - note.len() {
            assert_eq!(
                Elf::parse_any(&good[..length]).err(),
                Some(ElfError::Truncated),
                "{length}"
            );
        }
        let mut other = good.clone();
        other[18] = 40;
        assert_eq!(Elf::parse_any(&other).err(), Some(ElfError::BadMachine));
        let mut other = good;
        other[42] = 56;
        assert_eq!(Elf::parse_any(&other).err(), Some(ElfError::BadProgramHeaders));
    }

    #[test]
    fn dynamic_programs() {
        let file = file(&[(SEGMENT_INTERPRETER, 0, 0, 4, 4)], b"ld.\0");
        assert!(Elf::parse(&file).unwrap().has_interpreter());
    }

    #[test]
    fn what_is_refused() {
        let good = file(&[(SEGMENT_LOAD, 0, 0x10_0000, 4, 64)], b"code");
        for length in 0..good.len() {
            assert_eq!(Elf::parse(&good[..length]).err(), Some(ElfError::Truncated), "{length}");
        }
        let with = |at: usize, byte: u8| {
            let mut bad = good.clone();
            bad[at] = byte;
            Elf::parse(&bad).err()
        };
        assert_eq!(with(0, 0), Some(ElfError::NotElf));
        assert_eq!(with(4, 1), Some(ElfError::BadClass));
        assert_eq!(with(16, 1), Some(ElfError::NotExecutable));
        assert_eq!(with(18, 3), Some(ElfError::BadMachine));
        assert_eq!(with(54, 32), Some(ElfError::BadProgramHeaders));
        assert_eq!(with(HEADER_LENGTH + 40, 3), Some(ElfError::BadSegment));
        assert_eq!(with(HEADER_LENGTH + 31, 0xff), None);
        let wraps = file(&[(SEGMENT_LOAD, 0, u64::MAX - 8, 4, 64)], b"code");
        assert_eq!(Elf::parse(&wraps).err(), Some(ElfError::BadSegment));
    }
}
