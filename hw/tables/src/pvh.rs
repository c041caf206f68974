//! PVH boot protocol (Xen's `arch-x86/hvm/start_info.h`, also "x86/HVM direct boot ABI").
//!
//! A boot loader enters the kernel in 32-bit protected mode without paging, at the address in the
//! ELF note [`NOTE_PHYS32_ENTRY`], with the physical address of a [`StartInfo`] in `ebx`. Parsers
//! serve a kernel booted in this way, writers a VMM that boots one.

use crate::bytes;
use crate::elf::Elf;

/// Owner of the ELF note.
pub const NOTE_NAME: &[u8] = b"Xen";
/// Type of the ELF note that contains the physical entry address.
pub const NOTE_PHYS32_ENTRY: u32 = 18;
/// First word of [`StartInfo`].
pub const MAGIC: u32 = 0x336e_c578;
/// First version with a memory map.
pub const VERSION: u32 = 1;

/// Types of memory ranges (the E820 types of ACPI 6.5, table 15.1).
pub mod memory {
    /// Usable RAM.
    pub const RAM: u32 = 1;
    /// Reserved.
    pub const RESERVED: u32 = 2;
    /// ACPI tables; usable as RAM once they have been read.
    pub const ACPI: u32 = 3;
}

/// Entry address of a PVH kernel, from a note with 4 or 8 bytes of contents.
pub fn entry(elf: &Elf<'_>) -> Option<u32> {
    elf.notes().find(|note| note.name == NOTE_NAME && note.kind == NOTE_PHYS32_ENTRY).and_then(
        |note| match note.desc.len() {
            4 => bytes::u32(note.desc, 0),
            8 => bytes::u64(note.desc, 0).and_then(|entry| u32::try_from(entry).ok()),
            _ => None,
        },
    )
}

/// `struct hvm_start_info`.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct StartInfo {
    /// Version of the layout; versions from 1 have a memory map.
    pub version: u32,
    /// `SIF_*` flags, 0 outside Xen.
    pub flags: u32,
    /// Number of modules.
    pub modules: u32,
    /// Physical address of the first [`Module`].
    pub module_list: u64,
    /// Physical address of the command line, zero-terminated; 0 if none.
    pub command_line: u64,
    /// Physical address of the ACPI RSDP; 0 if none.
    pub rsdp: u64,
    /// Physical address of the first [`MemoryRange`]; 0 if there is no map.
    pub memory_map: u64,
    /// Number of memory ranges.
    pub memory_ranges: u32,
}

impl StartInfo {
    /// Length in memory, in bytes.
    pub const LENGTH: usize = 56;

    /// Parses a start info. `None` without the magic number, or if `bytes` is too short. Version 0
    /// has no memory map.
    pub fn parse(bytes: &[u8]) -> Option<Self> {
        if bytes::u32(bytes, 0)? != MAGIC {
            return None;
        }
        let version = bytes::u32(bytes, 4)?;
        let (memory_map, memory_ranges) = match version {
            0 => (0, 0),
            _ => (bytes::u64(bytes, 40)?, bytes::u32(bytes, 48)?),
        };
        Some(Self {
            version,
            flags: bytes::u32(bytes, 8)?,
            modules: bytes::u32(bytes, 12)?,
            module_list: bytes::u64(bytes, 16)?,
            command_line: bytes::u64(bytes, 24)?,
            rsdp: bytes::u64(bytes, 32)?,
            memory_map,
            memory_ranges,
        })
    }

    /// Serialised form.
    pub fn to_bytes(self) -> [u8; Self::LENGTH] {
        let mut raw = [0; Self::LENGTH];
        raw[0..4].copy_from_slice(&MAGIC.to_le_bytes());
        raw[4..8].copy_from_slice(&self.version.to_le_bytes());
        raw[8..12].copy_from_slice(&self.flags.to_le_bytes());
        raw[12..16].copy_from_slice(&self.modules.to_le_bytes());
        raw[16..24].copy_from_slice(&self.module_list.to_le_bytes());
        raw[24..32].copy_from_slice(&self.command_line.to_le_bytes());
        raw[32..40].copy_from_slice(&self.rsdp.to_le_bytes());
        raw[40..48].copy_from_slice(&self.memory_map.to_le_bytes());
        raw[48..52].copy_from_slice(&self.memory_ranges.to_le_bytes());
        raw
    }
}

/// `struct hvm_modlist_entry`: a file loaded by the boot loader.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Module {
    /// Physical address of the first byte.
    pub address: u64,
    /// Length in bytes.
    pub size: u64,
    /// Physical address of its command line, zero-terminated; 0 if none.
    pub command_line: u64,
}

impl Module {
    /// Length of an entry in memory, in bytes.
    pub const LENGTH: usize = 32;

    /// Entries in `bytes`.
    pub fn list(bytes: &[u8]) -> impl Iterator<Item = Self> + '_ {
        bytes.chunks_exact(Self::LENGTH).filter_map(|raw| {
            Some(Self {
                address: bytes::u64(raw, 0)?,
                size: bytes::u64(raw, 8)?,
                command_line: bytes::u64(raw, 16)?,
            })
        })
    }

    /// Serialised form.
    pub fn to_bytes(self) -> [u8; Self::LENGTH] {
        let mut raw = [0; Self::LENGTH];
        raw[0..8].copy_from_slice(&self.address.to_le_bytes());
        raw[8..16].copy_from_slice(&self.size.to_le_bytes());
        raw[16..24].copy_from_slice(&self.command_line.to_le_bytes());
        raw
    }
}

/// `struct hvm_memmap_table_entry`: a range of physical memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct MemoryRange {
    /// First byte.
    pub address: u64,
    /// Length in bytes.
    pub size: u64,
    /// One of [`memory`].
    pub kind: u32,
}

impl MemoryRange {
    /// Length of an entry in memory, in bytes.
    pub const LENGTH: usize = 24;

    /// Entries in `bytes`.
    pub fn list(bytes: &[u8]) -> impl Iterator<Item = Self> + '_ {
        bytes.chunks_exact(Self::LENGTH).filter_map(|raw| {
            Some(Self {
                address: bytes::u64(raw, 0)?,
                size: bytes::u64(raw, 8)?,
                kind: bytes::u32(raw, 16)?,
            })
        })
    }

    /// Serialised form.
    pub fn to_bytes(self) -> [u8; Self::LENGTH] {
        let mut raw = [0; Self::LENGTH];
        raw[0..8].copy_from_slice(&self.address.to_le_bytes());
        raw[8..16].copy_from_slice(&self.size.to_le_bytes());
        raw[16..20].copy_from_slice(&self.kind.to_le_bytes());
        raw
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn round_trips() {
        let info = StartInfo {
            version: VERSION,
            flags: 0,
            modules: 1,
            module_list: 0x1000,
            command_line: 0x2000,
            rsdp: 0xe_0000,
            memory_map: 0x3000,
            memory_ranges: 2,
        };
        let raw = info.to_bytes();
        assert_eq!(StartInfo::parse(&raw), Some(info));
        assert_eq!(StartInfo::parse(&raw[..51]), None);
        assert_eq!(StartInfo::parse(&[0; 56]), None);

        let module = Module { address: 1 << 33, size: 5, command_line: 0 };
        assert_eq!(Module::list(&module.to_bytes()).collect::<Vec<_>>(), [module]);
        let range = MemoryRange { address: 0, size: 0xa_0000, kind: memory::RAM };
        assert_eq!(MemoryRange::list(&range.to_bytes()).collect::<Vec<_>>(), [range]);
    }

    #[test]
    fn version_0_has_no_map() {
        let info = StartInfo { memory_map: 5, memory_ranges: 5, ..StartInfo::default() };
        let parsed = StartInfo::parse(&info.to_bytes()[..40]).unwrap();
        assert_eq!((parsed.memory_map, parsed.memory_ranges), (0, 0));
    }
}
