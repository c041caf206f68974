//! Reads guest kernels far enough to refuse those that cannot work: cut short, for another
//! machine, or too large for their memory.
//!
//! Formats: the Linux/x86 boot protocol (`Documentation/arch/x86/boot.rst` in Linux) and
//! ELF with the PVH entry note (`xen/include/public/arch-x86/hvm/start_info.h` in Xen).

use object::elf::{self, FileHeader64};
use object::read::elf::{FileHeader, ProgramHeader};
use object::{Endianness, LittleEndian};

/// Offsets in the bzImage's first sectors (boot protocol, section "The real-mode kernel header").
mod setup {
    pub const SETUP_SECTS: usize = 0x1f1;
    pub const SYSSIZE: usize = 0x1f4;
    pub const BOOT_FLAG: usize = 0x1fe;
    pub const HEADER: usize = 0x202;
    pub const VERSION: usize = 0x206;
    pub const XLOADFLAGS: usize = 0x236;
    pub const PREF_ADDRESS: usize = 0x258;
    pub const INIT_SIZE: usize = 0x260;
    /// End of what is read here.
    pub const END: usize = 0x264;

    pub const BOOT_FLAG_VALUE: u16 = 0xaa55;
    pub const HEADER_VALUE: &[u8] = b"HdrS";
    /// First version with `init_size` and `xloadflags` (2.12).
    pub const MIN_VERSION: u16 = 0x020c;
    /// `XLF_KERNEL_64`: has the 64-bit entry point.
    pub const XLF_KERNEL_64: u16 = 1;
    pub const SECTOR: u64 = 512;
    pub const PARAGRAPH: u64 = 16;
}

/// `XEN_ELFNOTE_PHYS32_ENTRY`.
const PVH_NOTE_TYPE: elf::NoteType = elf::NoteType(18);
const PVH_NOTE_NAME: &[u8] = b"Xen";

/// Least memory of any guest that runs Linux, in bytes.
pub const LINUX_MINIMUM: u64 = 16 << 20;

/// A guest kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Kernel {
    /// Its format.
    pub format: Format,
    /// Guest-physical end of what it needs before it can manage its memory, in bytes.
    pub memory_end: u64,
}

/// Format of a guest kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Format {
    /// Linux/x86 boot protocol with a 64-bit entry.
    BzImage,
    /// ELF with a PVH entry.
    PvhElf,
}

impl Kernel {
    /// Least guest memory in bytes, with an initial RAM disk of the given length: the
    /// image as unpacked, and the RAM disk twice, packed and unpacked.
    pub fn least_memory(&self, initrd: u64) -> u64 {
        let least = self.memory_end.saturating_add(initrd.saturating_mul(2));
        match self.format {
            Format::BzImage => least.max(LINUX_MINIMUM),
            Format::PvhElf => least,
        }
    }
}

/// Inspects a kernel. The error completes "the kernel …".
pub fn inspect(bytes: &[u8]) -> Result<Kernel, String> {
    if bytes.starts_with(&elf::ELFMAG) { inspect_elf(bytes) } else { inspect_bzimage(bytes) }
}

fn inspect_bzimage(bytes: &[u8]) -> Result<Kernel, String> {
    let is_bzimage = u16_at(bytes, setup::BOOT_FLAG) == Some(setup::BOOT_FLAG_VALUE)
        && bytes.get(setup::HEADER..).is_some_and(|rest| rest.starts_with(setup::HEADER_VALUE));
    if !is_bzimage {
        return Err("is neither a bzImage nor an ELF file".into());
    }
    let cut_short = |expected: u64| {
        format!("is cut short: it has {} bytes, its header says {expected}", bytes.len())
    };
    let Some(header) = bytes.get(..setup::END) else {
        return Err(cut_short(setup::END as u64));
    };
    let version = u16_at(header, setup::VERSION).unwrap_or(0);
    if version < setup::MIN_VERSION {
        return Err(format!(
            "speaks boot protocol {}.{}; 2.12 or newer is needed (Linux 3.8)",
            version >> 8,
            version & 0xff
        ));
    }
    if u16_at(header, setup::XLOADFLAGS).unwrap_or(0) & setup::XLF_KERNEL_64 == 0 {
        return Err("has no 64-bit entry point; a kernel for x86-64 is needed".into());
    }
    // 0 means 4 for historical reasons.
    let sectors = match header[setup::SETUP_SECTS] {
        0 => 4,
        count => u64::from(count),
    };
    let paragraphs = u64::from(u32_at(header, setup::SYSSIZE).unwrap_or(0));
    let expected = (sectors + 1) * setup::SECTOR + paragraphs * setup::PARAGRAPH;
    if (bytes.len() as u64) < expected {
        return Err(cut_short(expected));
    }
    let preferred = u64::from(u32_at(header, setup::PREF_ADDRESS).unwrap_or(0))
        | u64::from(u32_at(header, setup::PREF_ADDRESS + 4).unwrap_or(0)) << 32;
    let init_size = u64::from(u32_at(header, setup::INIT_SIZE).unwrap_or(0));
    Ok(Kernel { format: Format::BzImage, memory_end: preferred.saturating_add(init_size) })
}

fn inspect_elf(bytes: &[u8]) -> Result<Kernel, String> {
    let damaged = |error: object::read::Error| format!("is a damaged ELF file: {error}");
    let header = FileHeader64::<Endianness>::parse(bytes)
        .map_err(|_| "is no 64-bit ELF file, or cut short".to_owned())?;
    let endian = header.endian().map_err(damaged)?;
    if endian != Endianness::Little || header.e_machine(endian) != elf::EM_X86_64 {
        return Err("is an ELF file for another processor".into());
    }
    let segments = header.program_headers(endian, bytes).map_err(damaged)?;
    let (mut memory_end, mut entry) = (0, false);
    for segment in segments {
        let (offset, length) = segment.file_range(endian);
        let end = offset.checked_add(length).ok_or("is a damaged ELF file: a segment wraps")?;
        if end > bytes.len() as u64 {
            return Err(format!(
                "is cut short: it has {} bytes, a segment ends at {end}",
                bytes.len()
            ));
        }
        match segment.p_type(endian) {
            elf::PT_LOAD => {
                let base: u64 = segment.p_paddr(endian);
                memory_end = memory_end.max(base.saturating_add(segment.p_memsz(endian)));
            }
            elf::PT_NOTE => {
                let Some(mut notes) = segment.notes(endian, bytes).map_err(damaged)? else {
                    continue;
                };
                while let Some(note) = notes.next().map_err(damaged)? {
                    entry |= note.name() == PVH_NOTE_NAME && note.n_type(endian) == PVH_NOTE_TYPE;
                }
            }
            _ => {}
        }
    }
    match (memory_end, entry) {
        (0, _) => Err("is an ELF file without a segment to load".into()),
        (_, false) => Err("is an ELF file without a PVH entry note".into()),
        (memory_end, true) => Ok(Kernel { format: Format::PvhElf, memory_end }),
    }
}

/// Whether this is a program for x86-64 Linux that needs no other files.
pub fn is_static_program(bytes: &[u8]) -> bool {
    let Ok(header) = FileHeader64::<LittleEndian>::parse(bytes) else { return false };
    let Ok(segments) = header.program_headers(LittleEndian, bytes) else { return false };
    header.e_machine(LittleEndian) == elf::EM_X86_64
        && !segments.iter().any(|segment| segment.p_type(LittleEndian) == elf::PT_INTERP)
}

fn u16_at(bytes: &[u8], at: usize) -> Option<u16> {
    bytes.get(at..at + 2)?.try_into().ok().map(u16::from_le_bytes)
}

fn u32_at(bytes: &[u8], at: usize) -> Option<u32> {
    bytes.get(at..at + 4)?.try_into().ok().map(u32::from_le_bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bzimage(paragraphs: u32) -> Vec<u8> {
        let mut image = vec![0; 2 * 512 + paragraphs as usize * 16];
        image[setup::SETUP_SECTS] = 1;
        image[setup::SYSSIZE..][..4].copy_from_slice(&paragraphs.to_le_bytes());
        image[setup::BOOT_FLAG..][..2].copy_from_slice(&setup::BOOT_FLAG_VALUE.to_le_bytes());
        image[setup::HEADER..][..4].copy_from_slice(setup::HEADER_VALUE);
        image[setup::VERSION..][..2].copy_from_slice(&0x020f_u16.to_le_bytes());
        image[setup::XLOADFLAGS] = 1;
        image[setup::PREF_ADDRESS..][..8].copy_from_slice(&(16_u64 << 20).to_le_bytes());
        image[setup::INIT_SIZE..][..4].copy_from_slice(&(48_u32 << 20).to_le_bytes());
        image
    }

    #[test]
    fn a_bzimage_and_its_memory() {
        let kernel = inspect(&bzimage(64)).unwrap();
        assert_eq!(kernel, Kernel { format: Format::BzImage, memory_end: 64 << 20 });
        assert_eq!(kernel.least_memory(0), 64 << 20);
        assert_eq!(kernel.least_memory(2 << 20), 68 << 20);
    }

    #[test]
    fn every_truncation_of_a_bzimage_is_refused() {
        let image = bzimage(64);
        for length in 0..image.len() {
            assert!(inspect(&image[..length]).is_err(), "{length}");
        }
        assert!(inspect(&image[..1500]).unwrap_err().contains("cut short"));
    }

    #[test]
    fn other_bzimages_are_refused() {
        let mut old = bzimage(1);
        old[setup::VERSION] = 0x04;
        assert!(inspect(&old).unwrap_err().contains("2.4"));
        let mut short = bzimage(1);
        short[setup::XLOADFLAGS] = 0;
        assert!(inspect(&short).unwrap_err().contains("64-bit"));
    }

    /// A PVH ELF: header, two program headers, note, four bytes of code.
    fn pvh_elf() -> Vec<u8> {
        let mut image = Vec::new();
        image.extend_from_slice(b"\x7fELF\x02\x01\x01\0\0\0\0\0\0\0\0\0");
        image.extend_from_slice(&2_u16.to_le_bytes());
        image.extend_from_slice(&62_u16.to_le_bytes());
        image.extend_from_slice(&1_u32.to_le_bytes());
        for word in [0x10_0000_u64, 64, 0] {
            image.extend_from_slice(&word.to_le_bytes());
        }
        image.extend_from_slice(&0_u32.to_le_bytes());
        for half in [64_u16, 56, 2, 0, 0, 0] {
            image.extend_from_slice(&half.to_le_bytes());
        }
        let segment = |kind: elf::ProgramType, offset: u64, paddr: u64, file: u64, memory: u64| {
            let mut raw = Vec::new();
            raw.extend_from_slice(&kind.0.to_le_bytes());
            raw.extend_from_slice(&5_u32.to_le_bytes());
            for word in [offset, paddr, paddr, file, memory, 4] {
                raw.extend_from_slice(&word.to_le_bytes());
            }
            raw
        };
        image.extend(segment(elf::PT_LOAD, 196, 0x10_0000, 4, 0x1000));
        image.extend(segment(elf::PT_NOTE, 176, 0, 20, 20));
        for word in [4_u32, 4, PVH_NOTE_TYPE.0] {
            image.extend_from_slice(&word.to_le_bytes());
        }
        image.extend_from_slice(b"Xen\0");
        image.extend_from_slice(&0x10_0000_u32.to_le_bytes());
        image.extend_from_slice(&[0xf4; 4]);
        image
    }

    #[test]
    fn a_pvh_elf_and_its_memory() {
        let kernel = inspect(&pvh_elf()).unwrap();
        assert_eq!(kernel, Kernel { format: Format::PvhElf, memory_end: 0x10_1000 });
    }

    #[test]
    fn damaged_elf_files_are_refused() {
        let image = pvh_elf();
        for length in 0..image.len() {
            assert!(inspect(&image[..length]).is_err(), "{length}");
        }
        let mut other = image.clone();
        other[18] = 183;
        assert!(inspect(&other).unwrap_err().contains("another processor"));
        let mut nameless = image;
        nameless[188] = b'Y';
        assert!(inspect(&nameless).unwrap_err().contains("PVH"));
    }

    #[test]
    fn static_programs() {
        let elf = pvh_elf();
        assert!(is_static_program(&elf));
        let mut dynamic = elf;
        dynamic[120] = elf::PT_INTERP.0 as u8;
        assert!(!is_static_program(&dynamic));
        assert!(!is_static_program(b"#!/bin/sh\n"));
    }
}
