//! Kernels of the Multiboot specification, version 0.6.96 (GNU): Xen, many small systems, and test
//! kernels. They are entered in 32-bit protected mode without paging.
//!
//! The kernel is an ELF file of 32 or 64 bits, or any file whose header has load addresses. The
//! information structure provides memory size, the memory map, the command line, the loader's name,
//! and the initial RAM disk as the only module. Missing: video modes, which no board has.

use hw_tables::elf::{Elf, Machine};
use vmm_mem::GuestMemory;

use crate::layout::{
    COMMAND_LINE_ROOM, FOUR_GIB, ONE_MIB, PAGE, START_INFO, memory_map, write_command_line,
};
use crate::{BootError, InitialState, MemoryKind};

/// The header (section 3.1): magic, offset, flags.
const MAGIC: u32 = 0x1bad_b002;
const SEARCHED: usize = 8192;
const HEADER: usize = 12;
/// Flags: page-aligned modules, memory size; the addresses in the header are valid.
const PAGES: u32 = 1 << 0;
const MEMORY: u32 = 1 << 1;
const ADDRESSES: u32 = 1 << 16;
/// Flags that a loader must reject if it does not support them.
const REQUIRED: u32 = 0xffff;

/// Value of `eax` at the entry (section 3.2).
const LOADED: u64 = 0x2bad_b002;

/// The information structure (section 3.3): offsets of fields, and flags of valid ones.
mod info {
    pub const FLAGS: u64 = 0;
    pub const MEMORY_LOWER: u64 = 4;
    pub const MEMORY_UPPER: u64 = 8;
    pub const COMMAND_LINE: u64 = 16;
    pub const MODULE_COUNT: u64 = 20;
    pub const MODULES: u64 = 24;
    pub const MAP_LENGTH: u64 = 44;
    pub const MAP: u64 = 48;
    pub const LOADER: u64 = 64;
    pub const LENGTH: u64 = 116;
    pub const HAS_MEMORY: u32 = 1 << 0;
    pub const HAS_COMMAND_LINE: u32 = 1 << 2;
    pub const HAS_MODULES: u32 = 1 << 3;
    pub const HAS_MAP: u32 = 1 << 6;
    pub const HAS_LOADER: u32 = 1 << 9;
}

const LOADER_NAME: &[u8] = b"Parador\0";
/// Offsets in the page of the information structure.
const LOADER_AT: u64 = START_INFO + info::LENGTH;
const MODULE_AT: u64 = START_INFO + 0x80;
const MAP_AT: u64 = START_INFO + 0x90;
/// An entry of the map, preceded by its length, which does not include itself.
const MAP_ENTRY: u64 = 24;

const _: () = assert!(info::LENGTH + LOADER_NAME.len() as u64 <= 0x80);
/// Ranges below 1 MiB and one for each range of RAM fit into the page.
const _: () = assert!(0x90 + (4 + vmm_mem::MAX_RANGES as u64) * MAP_ENTRY <= PAGE);

/// A validated kernel.
#[derive(Clone, Copy, Debug)]
pub struct MultibootKernel<'a> {
    parts: Parts<'a>,
    entry: u32,
    end: u64,
}

/// Parts of a kernel with load addresses.
#[derive(Clone, Copy, Debug)]
enum Parts<'a> {
    /// The segments of an ELF file.
    Elf(Elf<'a>),
    /// One part, and its size in memory.
    Flat { address: u64, data: &'a [u8], size: u64 },
}

impl<'a> MultibootKernel<'a> {
    /// Parses and validates an image; `None` without a header.
    pub(crate) fn parse(image: &'a [u8]) -> Option<Result<Self, BootError>> {
        let at = header(image)?;
        let word = |index: usize| word(image, at + 4 * index).unwrap_or(0);
        let flags = word(1);
        Some(if flags & REQUIRED & !(PAGES | MEMORY) != 0 {
            Err(BootError::BadMultiboot)
        } else if flags & ADDRESSES != 0 {
            Self::flat(image, at)
        } else {
            Self::elf(image)
        })
    }

    /// A kernel with addresses in its header: header, start, end of data, end of zeros, entry.
    fn flat(image: &'a [u8], at: usize) -> Result<Self, BootError> {
        let word = |index: usize| word(image, at + 4 * index).map(u64::from);
        let fields = [3, 4, 5, 6, 7].map(word);
        let [Some(here), Some(start), Some(data_end), Some(end), Some(entry)] = fields else {
            return Err(BootError::Truncated {
                needed: at as u64 + 32,
                actual: image.len() as u64,
            });
        };
        // File and memory have the header at the same distance; bytes before the start are not
        // loaded.
        let skipped =
            here.checked_sub(start).and_then(|distance| (at as u64).checked_sub(distance));
        let first = skipped.ok_or(BootError::BadMultiboot)?;
        let rest = image.len() as u64 - first;
        let length = if data_end == 0 { rest } else { data_end.wrapping_sub(start) };
        if length > rest {
            let needed = first.saturating_add(length);
            return Err(BootError::Truncated { needed, actual: image.len() as u64 });
        }
        let data = &image[first as usize..(first + length) as usize];
        let size = end.saturating_sub(start).max(length);
        let end = checked(start, size)?;
        Ok(Self { parts: Parts::Flat { address: start, data, size }, entry: entry as u32, end })
    }

    fn elf(image: &'a [u8]) -> Result<Self, BootError> {
        let elf = Elf::parse_any(image)?;
        if !matches!(elf.machine(), Machine::X86 | Machine::X86_64) {
            return Err(BootError::WrongMachine);
        }
        let mut end = ONE_MIB;
        for segment in elf.segments().filter(|segment| segment.memsz != 0) {
            end = end.max(checked(segment.paddr, segment.memsz)?);
        }
        // Physical address of the entry, if it is inside a segment.
        let entry = elf.entry();
        let inside = elf.segments().find(|segment| segment.virtual_range().contains(&entry));
        let entry = inside.map_or(entry, |segment| entry - segment.vaddr + segment.paddr);
        let entry = u32::try_from(entry).map_err(|_| BootError::BadMultiboot)?;
        Ok(Self { parts: Parts::Elf(elf), entry, end })
    }

    pub(crate) fn end(&self) -> u64 {
        self.end.next_multiple_of(PAGE)
    }
}

/// End of a part; fails outside the permitted range.
fn checked(start: u64, length: u64) -> Result<u64, BootError> {
    let end = start.saturating_add(length);
    match start >= ONE_MIB && end <= FOUR_GIB {
        true => Ok(end),
        false => Err(BootError::BadSegment { start, end }),
    }
}

/// Offset of the header: a multiple of four, with checksum 0.
fn header(image: &[u8]) -> Option<usize> {
    let head = &image[..image.len().min(SEARCHED)];
    (0..head.len().saturating_sub(HEADER - 1)).step_by(4).find(|&at| {
        let [Some(magic), Some(flags), Some(sum)] = [0, 4, 8].map(|field| word(head, at + field))
        else {
            return false;
        };
        magic == MAGIC && magic.wrapping_add(flags).wrapping_add(sum) == 0
    })
}

fn word(bytes: &[u8], at: usize) -> Option<u32> {
    bytes.get(at..)?.first_chunk().map(|bytes| u32::from_le_bytes(*bytes))
}

/// Loads a kernel, its command line and the information structure into memory of sufficient size.
/// `initrd` is loaded already: (address, length).
pub fn load(
    memory: &GuestMemory,
    kernel: &MultibootKernel<'_>,
    command_line: &[u8],
    initrd: Option<(u64, u64)>,
) -> Result<InitialState, BootError> {
    let command_line = write_command_line(memory, command_line, COMMAND_LINE_ROOM - 1)?;
    match kernel.parts {
        Parts::Elf(elf) => elf.segments().try_for_each(|segment| {
            put(memory, segment.paddr, elf.data(&segment), segment.memsz)
        })?,
        Parts::Flat { address, data, size } => put(memory, address, data, size)?,
    }
    memory.fill(START_INFO, PAGE, 0)?;
    let mut flags = info::HAS_MEMORY | info::HAS_COMMAND_LINE | info::HAS_MAP | info::HAS_LOADER;
    let set = |field: u64, value: u64| memory.write(START_INFO + field, value as u32);
    if let Some((address, length)) = initrd {
        flags |= info::HAS_MODULES;
        set(info::MODULE_COUNT, 1)?;
        set(info::MODULES, MODULE_AT)?;
        memory.write(MODULE_AT, address as u32)?;
        memory.write(MODULE_AT + 4, (address + length) as u32)?;
    }
    let mut count = 0;
    for range in memory_map(memory) {
        let at = MAP_AT + MAP_ENTRY * count;
        memory.write(at, MAP_ENTRY as u32 - 4)?;
        memory.write(at + 4, range.start)?;
        memory.write(at + 12, range.end - range.start)?;
        memory.write(at + 20, range.kind.code())?;
        count += 1;
    }
    // KiB from 0, and from 1 MiB up to the first hole.
    let ram = |start: u64| {
        let found =
            |range: &crate::MemoryRange| range.start == start && range.kind == MemoryKind::Ram;
        memory_map(memory).find(found).map_or(0, |range| (range.end - range.start) >> 10)
    };
    set(info::MEMORY_LOWER, ram(0))?;
    set(info::MEMORY_UPPER, ram(ONE_MIB))?;
    set(info::COMMAND_LINE, command_line)?;
    set(info::MAP, MAP_AT)?;
    set(info::MAP_LENGTH, MAP_ENTRY * count)?;
    set(info::LOADER, LOADER_AT)?;
    memory.write_slice(LOADER_AT, LOADER_NAME)?;
    set(info::FLAGS, flags.into())?;
    let state = InitialState::protected_mode(memory, kernel.entry, START_INFO)?;
    Ok(InitialState { rax: LOADED, ..state })
}

/// Loads a part, followed by zeros.
fn put(memory: &GuestMemory, address: u64, data: &[u8], size: u64) -> Result<(), BootError> {
    memory.write_slice(address, data)?;
    let length = data.len() as u64;
    Ok(memory.fill(address + length, size - length, 0)?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{LAYOUT, elf_kernel, elf32_headers};
    use crate::{BootConfig, Kernel};
    use std::vec::Vec;
    use vmm_mem::testing::memory;

    const BASE: u32 = 0x10_0000;

    /// A header with these flags and further fields.
    fn multiboot(flags: u32, fields: &[u32]) -> Vec<u8> {
        let sum = 0u32.wrapping_sub(MAGIC).wrapping_sub(flags);
        let words = [MAGIC, flags, sum];
        words.iter().chain(fields).flat_map(|word| word.to_le_bytes()).collect()
    }

    /// A 32-bit ELF file of one segment whose physical and virtual addresses differ.
    fn elf32(contents: &[u8], linked: u32, entry: u32) -> Vec<u8> {
        let length = contents.len() as u32;
        let segment = [1, 84, linked, BASE, length, length + 0x1000, 7, 4096];
        let mut file = elf32_headers(entry, &[segment]);
        assert_eq!(file.len(), 84);
        file.extend(contents);
        file
    }

    fn start(
        image: &[u8],
        initrd: Option<&[u8]>,
    ) -> Result<(InitialState, GuestMemory), BootError> {
        let ram = memory(&[(0, 4 << 20), (FOUR_GIB, 1 << 20)]);
        ram.fill(BASE.into(), 0x4000, 0xff).unwrap();
        let command_line = b"quiet";
        let config = BootConfig { layout: &LAYOUT, vcpus: 1, kernel: image, initrd, command_line };
        crate::load(&ram, &config).map(|state| (state, ram))
    }

    #[test]
    fn all_parts_are_loaded() {
        let contents = [&multiboot(PAGES | MEMORY, &[])[..], b"code"].concat();
        let image = elf32(&contents, 0xc010_0000, 0xc010_000c);
        let (state, ram) = start(&image, Some(&[7; 5])).unwrap();
        assert_eq!((state.rip, state.rax, state.rbx), (0x10_000c, LOADED, START_INFO));
        assert_eq!(ram.read(0x10_000c), Ok(u32::from_le_bytes(*b"code")));
        assert_eq!(ram.read(0x10_0010), Ok(0u32), "zeros after it");
        let field = |at: u64| ram.read::<u32>(START_INFO + at).unwrap();
        assert_eq!(field(info::FLAGS), 0b10_0100_1101);
        assert_eq!((field(info::MEMORY_LOWER), field(info::MEMORY_UPPER)), (639, 3 << 10));
        let text = |at: u32| ram.read::<u32>(at.into()).unwrap().to_le_bytes();
        assert_eq!(&text(field(info::COMMAND_LINE)), b"quie");
        assert_eq!(&text(field(info::LOADER)), b"Para");
        assert_eq!(field(info::MODULE_COUNT), 1);
        let module = u64::from(field(info::MODULES));
        let ends = [0, 4].map(|at| ram.read::<u32>(module + at).unwrap());
        assert_eq!(ends, [(4 << 20) - PAGE as u32, (4 << 20) - PAGE as u32 + 5]);
        assert_eq!(ram.read(u64::from(ends[0]) + 4), Ok(7u8));
        let (map, length) = (u64::from(field(info::MAP)), u64::from(field(info::MAP_LENGTH)));
        let mut at = map;
        let mut ranges = Vec::new();
        while at < map + length {
            let range: [u64; 2] = [4, 12].map(|field| ram.read(at + field).unwrap());
            ranges.push((range[0], range[1], ram.read::<u32>(at + 20).unwrap()));
            at += 4 + u64::from(ram.read::<u32>(at).unwrap());
        }
        assert_eq!(at, map + length);
        assert_eq!(ranges[0], (0, 0x9_fc00, 1));
        assert_eq!(ranges[ranges.len() - 2..], [(ONE_MIB, 3 << 20, 1), (FOUR_GIB, 1 << 20, 1)]);
        // Without a module.
        let (state, ram) = start(&image, None).unwrap();
        assert_eq!(ram.read::<u32>(state.rbx).unwrap() & info::HAS_MODULES, 0);
    }

    #[test]
    fn kernels_that_are_no_elf_files() {
        // Eight skipped bytes, the header, code, zeros.
        let fields = [BASE, BASE, BASE + 36, BASE + 0x100, BASE + 32];
        let header = multiboot(ADDRESSES | PAGES, &fields);
        let image = [&[1; 8], &header[..], b"code", b"rest"].concat();
        let (state, ram) = start(&image, None).unwrap();
        assert_eq!((state.rip, state.rax), (u64::from(BASE) + 32, LOADED));
        assert_eq!(ram.read(BASE.into()), Ok(MAGIC));
        assert_eq!(ram.read(u64::from(BASE) + 32), Ok(u32::from_le_bytes(*b"code")));
        let zero = |at: u64| ram.read::<u8>(u64::from(BASE) + at).unwrap();
        assert_eq!((zero(36), zero(0xff), zero(0x100)), (0, 0, 0xff));
        // The complete rest of the file, if the header has no end.
        let header = multiboot(ADDRESSES, &[BASE, BASE, 0, 0, BASE + 32]);
        let image = [&header[..], b"code", b"rest"].concat();
        let (_, ram) = start(&image, None).unwrap();
        assert_eq!(ram.read(u64::from(BASE) + 36), Ok(u32::from_le_bytes(*b"rest")));
    }

    #[test]
    fn a_pvh_note_comes_first_and_64_bit_files_count() {
        let pvh = elf_kernel(0x10_0000, &multiboot(0, &[]), 0x3000, 0x10_0040);
        assert!(matches!(Kernel::detect(&pvh), Ok(Kernel::Pvh(_))));
        let mut none = pvh;
        let at = none.windows(4).position(|bytes| bytes == b"Xen\0").unwrap();
        none[at] = b'x';
        assert!(matches!(Kernel::detect(&none), Ok(Kernel::Multiboot(_))));
    }

    #[test]
    fn rejects_invalid_images() {
        let error = |image: &[u8]| Kernel::detect(image).err();
        let flat =
            |fields: [u32; 5]| error(&[&multiboot(ADDRESSES, &fields)[..], &[0; 64]].concat());
        let good = [BASE, BASE, BASE + 96, BASE + 96, BASE];
        assert_eq!(flat(good), None);
        // A video mode is optional; an unknown flag is rejected.
        assert_eq!(
            error(&[&multiboot(ADDRESSES | 4, &good)[..], &[0; 64]].concat()),
            Some(BootError::BadMultiboot)
        );
        assert_eq!(flat([BASE - 4, BASE, 0, 0, BASE]), Some(BootError::BadMultiboot));
        assert_eq!(flat([BASE + 4, BASE, 0, 0, BASE]), Some(BootError::BadMultiboot));
        assert!(matches!(
            flat([BASE, BASE, BASE + 97, 0, BASE]),
            Some(BootError::Truncated { .. })
        ));
        assert!(matches!(flat([BASE, BASE, BASE - 1, 0, BASE]), Some(BootError::Truncated { .. })));
        assert!(matches!(
            flat([0x9_0000, 0x9_0000, 0, 0, BASE]),
            Some(BootError::BadSegment { .. })
        ));
        let high = u32::MAX - 15;
        assert!(matches!(flat([high, high, 0, 0, BASE]), Some(BootError::BadSegment { .. })));
        assert!(matches!(error(&multiboot(ADDRESSES, &[])), Some(BootError::Truncated { .. })));
        // Not at a multiple of four, with a wrong checksum, too far into the file, truncated.
        let header = multiboot(ADDRESSES, &good);
        let unknown = Some(BootError::UnknownFormat);
        assert_eq!(error(&[&[0; 2], &header[..], &[0; 64]].concat()), unknown);
        let mut wrong = header.clone();
        wrong[8] ^= 1;
        assert_eq!(error(&[&wrong[..], &[0; 64]].concat()), unknown);
        assert_eq!(error(&[&[0; SEARCHED], &header[..], &[0; 64]].concat()), unknown);
        assert_eq!(error(&header[..11]), unknown);
    }
}
