//! No input may panic a parser: random bytes, and valid headers followed by random bytes.

use crate::{acpi, bytes, elf, multiboot2, pvh};
use proptest::prelude::*;

fn elf_file(file: &[u8]) {
    if let Ok(elf) = elf::Elf::parse(file) {
        for segment in elf.segments() {
            assert_eq!(elf.data(&segment).len() as u64, segment.filesz);
            assert!(segment.physical().end >= segment.paddr);
            assert!(segment.virtual_range().end >= segment.vaddr);
        }
        elf.notes().for_each(drop);
        pvh::entry(&elf);
    }
}

fn acpi_memory(memory: &[u8]) {
    let reach = |address: u64, length| bytes::slice(memory, address as usize, length);
    acpi::find_rsdp(memory);
    if let Ok(table) = acpi::Table::read(0, reach) {
        if let Ok(madt) = acpi::Madt::parse(table) {
            madt.entries().for_each(drop);
            madt.local_apic_address();
        }
        if let Ok(fadt) = acpi::Fadt::parse(table) {
            let _ = (fadt.dsdt(), fadt.pm1a_event(), fadt.pm_timer(), fadt.reset());
        }
        let _ = acpi::hpet_address(table);
    }
    for (rsdt, xsdt) in [(0, 0), (0, 8), (8, 0)] {
        if let Ok(tables) = acpi::Tables::new(acpi::Rsdp { revision: 2, rsdt, xsdt }, reach) {
            tables.tables().for_each(drop);
        }
    }
}

fn boot_info(raw: &[u8]) {
    if let Some(info) = multiboot2::BootInfo::parse(raw) {
        info.tags().for_each(drop);
        info.modules().for_each(drop);
        info.memory_map().for_each(drop);
        let _ = (info.command_line(), info.rsdp());
    }
    pvh::StartInfo::parse(raw);
}

/// A table with valid header and checksum, so that the parser reaches its body.
fn sealed(signature: &[u8; 4], body: &[u8]) -> Vec<u8> {
    let mut table = signature.to_vec();
    table.extend((36 + body.len() as u32).to_le_bytes());
    table.resize(36, 0);
    table.extend(body);
    let sum = table.iter().fold(0u8, |sum, &byte| sum.wrapping_add(byte));
    table[9] = 0u8.wrapping_sub(sum);
    table
}

proptest! {
    #[test]
    fn anything(raw in proptest::collection::vec(any::<u8>(), 0..512)) {
        elf_file(&raw);
        acpi_memory(&raw);
        boot_info(&raw);
        for signature in [b"APIC", b"FACP", b"HPET", b"XSDT", b"RSDT"] {
            acpi_memory(&sealed(signature, &raw));
        }
    }

    #[test]
    fn elf_headers(
        words in proptest::collection::vec(
            prop_oneof![0..200u64, any::<u64>(), Just(u64::MAX)], 6..60),
        count in 0..4u16,
    ) {
        let mut file = b"\x7fELF\x02\x01\x01\0\0\0\0\0\0\0\0\0\x02\0\x3e\0\x01\0\0\0".to_vec();
        file.extend([0; 8]);
        file.extend(64u64.to_le_bytes());
        file.resize(54, 0);
        file.extend(56u16.to_le_bytes());
        file.extend(count.to_le_bytes());
        file.resize(64, 0);
        for (index, word) in words.iter().enumerate() {
            // The first word of each program header is its type; most are loadable segments or
            // notes.
            let word = if index % 7 == 0 { [1, 4][index / 7 % 2] } else { *word };
            file.extend(word.to_le_bytes());
        }
        elf_file(&file);
    }

    #[test]
    fn boot_information(
        words in proptest::collection::vec(prop_oneof![0..64u32, any::<u32>()], 2..64)
    ) {
        let mut raw: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
        let length = (raw.len() as u32).to_le_bytes();
        raw[..4].copy_from_slice(&length);
        boot_info(&raw);
    }
}
