//! Multiboot2 specification, version 2.0: header in a kernel image, and boot information.
//!
//! A boot loader finds the header in the first 32 KiB of the image. It enters the kernel in 32-bit
//! protected mode with [`LOADER_MAGIC`] in `eax` and the physical address of the boot information
//! ([`BootInfo`]) in `ebx`.

use crate::bytes;

/// First word of the header.
pub const HEADER_MAGIC: u32 = 0xe852_50d6;
/// `architecture` in the header: 32-bit protected mode of i386.
pub const ARCHITECTURE_I386: u32 = 0;
/// Value in `eax` at kernel entry.
pub const LOADER_MAGIC: u32 = 0x36d7_6289;

/// Checksum of the header, with which its first four words sum up to 0.
pub const fn header_checksum(header_length: u32) -> u32 {
    0u32.wrapping_sub(HEADER_MAGIC).wrapping_sub(ARCHITECTURE_I386).wrapping_sub(header_length)
}

/// Types of tags in the header (section 3.1.3 and following).
pub mod header_tag {
    /// Ends the list.
    pub const END: u16 = 0;
    /// Load addresses, for images that are not ELF.
    pub const ADDRESS: u16 = 2;
}

/// Types of tags in the boot information (section 3.6).
pub mod tag {
    /// Ends the list.
    pub const END: u32 = 0;
    /// Command line.
    pub const COMMAND_LINE: u32 = 1;
    /// Boot module.
    pub const MODULE: u32 = 3;
    /// Memory map.
    pub const MEMORY_MAP: u32 = 6;
    /// Copy of the ACPI 1.0 RSDP.
    pub const ACPI_OLD: u32 = 14;
    /// Copy of the ACPI 2.0 RSDP.
    pub const ACPI_NEW: u32 = 15;
}

/// A boot module.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Module<'a> {
    /// Physical address of the first byte.
    pub start: u32,
    /// Physical address after the last byte.
    pub end: u32,
    /// Its command line.
    pub command_line: &'a [u8],
}

/// A range of the memory map.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct MemoryRange {
    /// First byte.
    pub address: u64,
    /// Length in bytes.
    pub size: u64,
    /// Type, as in [`crate::pvh::memory`].
    pub kind: u32,
}

/// Boot information.
#[derive(Clone, Copy, Debug)]
pub struct BootInfo<'a> {
    tags: &'a [u8],
}

impl<'a> BootInfo<'a> {
    /// Length of the fixed part, in bytes.
    pub const HEADER_LENGTH: usize = 8;

    /// Total length, from the fixed part; `None` if the fixed part is too short or inconsistent.
    pub fn length(header: &[u8]) -> Option<usize> {
        let length = bytes::u32(header, 0)? as usize;
        (length >= Self::HEADER_LENGTH).then_some(length)
    }

    /// Parses the boot information at the start of `bytes`; `None` if it is longer than `bytes`.
    pub fn parse(bytes: &'a [u8]) -> Option<Self> {
        let length = Self::length(bytes)?;
        Some(Self { tags: bytes.get(Self::HEADER_LENGTH..length)? })
    }

    /// Tags as (type, contents without the tag header), up to the end tag or the first malformed
    /// one.
    pub fn tags(&self) -> impl Iterator<Item = (u32, &'a [u8])> + use<'a> {
        Tags { bytes: self.tags }
    }

    fn find(&self, kind: u32) -> Option<&'a [u8]> {
        self.tags().find(|&(found, _)| found == kind).map(|(_, contents)| contents)
    }

    /// Kernel command line, without the terminating zero.
    pub fn command_line(&self) -> Option<&'a [u8]> {
        self.find(tag::COMMAND_LINE).map(bytes::until_zero)
    }

    /// Boot modules, in order.
    pub fn modules(&self) -> impl Iterator<Item = Module<'a>> + use<'a> {
        self.tags().filter(|&(kind, _)| kind == tag::MODULE).filter_map(|(_, raw)| {
            Some(Module {
                start: bytes::u32(raw, 0)?,
                end: bytes::u32(raw, 4)?,
                command_line: bytes::until_zero(raw.get(8..)?),
            })
        })
    }

    /// Memory map; empty if there is none.
    pub fn memory_map(&self) -> impl Iterator<Item = MemoryRange> + use<'a> {
        const ENTRY_LENGTH: usize = 24;
        let raw = self.find(tag::MEMORY_MAP).unwrap_or(&[]);
        // The tag specifies the length of an entry, which later versions may increase.
        let length = bytes::u32(raw, 0).map_or(ENTRY_LENGTH, |length| length as usize);
        raw.get(8..).unwrap_or(&[]).chunks_exact(length.max(ENTRY_LENGTH)).filter_map(|entry| {
            Some(MemoryRange {
                address: bytes::u64(entry, 0)?,
                size: bytes::u64(entry, 8)?,
                kind: bytes::u32(entry, 16)?,
            })
        })
    }

    /// Copy of the ACPI RSDP; the newer one if there are two.
    pub fn rsdp(&self) -> Option<&'a [u8]> {
        self.find(tag::ACPI_NEW).or_else(|| self.find(tag::ACPI_OLD))
    }
}

struct Tags<'a> {
    bytes: &'a [u8],
}

impl<'a> Iterator for Tags<'a> {
    type Item = (u32, &'a [u8]);

    fn next(&mut self) -> Option<Self::Item> {
        const HEADER: usize = 8;
        let kind = bytes::u32(self.bytes, 0)?;
        let size = bytes::u32(self.bytes, 4)? as usize;
        if kind == tag::END {
            return None;
        }
        let contents = self.bytes.get(HEADER..size)?;
        self.bytes = self.bytes.get(size.checked_next_multiple_of(8)?..).unwrap_or(&[]);
        Some((kind, contents))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn info(tags: &[(u32, Vec<u8>)]) -> Vec<u8> {
        let mut raw = vec![0; 8];
        for (kind, contents) in tags {
            raw.extend(kind.to_le_bytes());
            raw.extend((contents.len() as u32 + 8).to_le_bytes());
            raw.extend(contents);
            raw.resize(raw.len().next_multiple_of(8), 0);
        }
        raw.extend([0, 0, 0, 0, 8, 0, 0, 0]);
        let length = (raw.len() as u32).to_le_bytes();
        raw[..4].copy_from_slice(&length);
        raw
    }

    #[test]
    fn what_grub_passes() {
        let mut module = Vec::new();
        module.extend(0x20_0000u32.to_le_bytes());
        module.extend(0x30_0000u32.to_le_bytes());
        module.extend(b"bundle\0");
        let mut map = Vec::new();
        map.extend(24u32.to_le_bytes());
        map.extend(0u32.to_le_bytes());
        for (address, size) in [(0u64, 0xa_0000u64), (0x10_0000, 0x700_0000)] {
            map.extend(address.to_le_bytes());
            map.extend(size.to_le_bytes());
            map.extend(1u64.to_le_bytes());
        }
        let raw = info(&[
            (tag::COMMAND_LINE, b"log=com2\0".to_vec()),
            (tag::MODULE, module),
            (tag::MEMORY_MAP, map),
            (tag::ACPI_OLD, b"RSD PTR old".to_vec()),
            (tag::ACPI_NEW, b"RSD PTR new".to_vec()),
        ]);
        let info = BootInfo::parse(&raw).unwrap();
        assert_eq!(info.command_line(), Some(&b"log=com2"[..]));
        let modules: Vec<_> = info.modules().collect();
        assert_eq!(modules, [Module { start: 0x20_0000, end: 0x30_0000, command_line: b"bundle" }]);
        let map: Vec<_> = info.memory_map().collect();
        assert_eq!(map.len(), 2);
        assert_eq!(map[1], MemoryRange { address: 0x10_0000, size: 0x700_0000, kind: 1 });
        assert_eq!(info.rsdp(), Some(&b"RSD PTR new"[..]));
    }

    #[test]
    fn short_or_empty() {
        let raw = info(&[]);
        let empty = BootInfo::parse(&raw).unwrap();
        assert_eq!(empty.command_line(), None);
        assert_eq!(empty.modules().count() + empty.memory_map().count(), 0);
        assert!(BootInfo::parse(&raw[..raw.len() - 1]).is_none());
        assert!(BootInfo::parse(&[4, 0, 0, 0, 0, 0, 0, 0]).is_none());
    }

    #[test]
    fn header_adds_up() {
        let sum = HEADER_MAGIC
            .wrapping_add(ARCHITECTURE_I386)
            .wrapping_add(24)
            .wrapping_add(header_checksum(24));
        assert_eq!(sum, 0);
    }
}
