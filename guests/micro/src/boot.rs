//! Boot information: PVH start information and ACPI tables.

use core::sync::atomic::{AtomicU64, Ordering::Relaxed};
use hw_tables::acpi::{AcpiError, Fadt, Madt, MadtEntry, Table, Tables, apic_flag};
use hw_tables::pvh::{MemoryRange, StartInfo, memory};

/// End of what start-up maps.
pub const MAPPED: u64 = 16 << 30;

pub(crate) static START_INFO: AtomicU64 = AtomicU64::new(0);

// SAFETY: a label of the linker script.
unsafe extern "C" {
    static guest_end: u8;
}

/// First address after the program.
pub fn program_end() -> u64 {
    (&raw const guest_end).addr() as u64
}

/// Bytes that the loader or the firmware left in memory.
fn left_by_firmware(address: u64, length: usize) -> Option<&'static [u8]> {
    let end = address.checked_add(length as u64)?;
    if address == 0 || end > MAPPED {
        return None;
    }
    // SAFETY: mapped, and programs do not write to what loader and firmware left.
    Some(unsafe { core::slice::from_raw_parts(address as *const u8, length) })
}

fn start_info() -> Option<StartInfo> {
    StartInfo::parse(left_by_firmware(START_INFO.load(Relaxed), StartInfo::LENGTH)?)
}

/// The number that the command line has for a name, as in `name=5`.
pub fn argument(name: &str) -> Option<u64> {
    const LONGEST: usize = 256;
    let line = left_by_firmware(start_info()?.command_line, LONGEST)?;
    let end = line.iter().position(|&byte| byte == 0)?;
    let words = core::str::from_utf8(&line[..end]).ok()?.split(' ');
    let mut values = words.filter_map(|word| word.strip_prefix(name)?.strip_prefix('='));
    values.next()?.parse().ok()
}

/// RAM above 1 MiB that the program does not occupy, as far as it is mapped: (first address, end).
pub fn free_ram() -> impl Iterator<Item = (u64, u64)> {
    let info = start_info().unwrap_or_default();
    let length = info.memory_ranges as usize * MemoryRange::LENGTH;
    let map = left_by_firmware(info.memory_map, length).unwrap_or(&[]);
    MemoryRange::list(map).filter(|range| range.kind == memory::RAM).filter_map(|range| {
        let start = range.address.max(program_end().next_multiple_of(4096));
        let end = range.address.saturating_add(range.size).min(MAPPED);
        (start < end).then_some((start, end))
    })
}

/// Reader of firmware tables.
type Reader = fn(u64, usize) -> Option<&'static [u8]>;

fn tables() -> Result<Tables<'static, Reader>, AcpiError> {
    let rsdp = start_info().ok_or(AcpiError::BadRsdp)?.rsdp;
    Tables::from_address(rsdp, left_by_firmware as Reader)
}

/// Local APIC ids of the processors that are ready for use; none if the firmware does not tell.
pub fn processors() -> impl Iterator<Item = u8> {
    let madt = tables().ok().and_then(|tables| Madt::parse(tables.find(Madt::SIGNATURE)?).ok());
    madt.into_iter().flat_map(|madt| madt.entries()).filter_map(|entry| match entry {
        MadtEntry::LocalApic { id, flags, .. } if flags & apic_flag::ENABLED != 0 => Some(id),
        _ => None,
    })
}

/// Power-off by ACPI: port of PM1a control, and the value to write.
pub fn soft_off() -> Result<Option<(u16, u16)>, AcpiError> {
    const SLP_TYP_SHIFT: u32 = 10;
    const SLP_EN: u16 = 1 << 13;
    let tables = tables()?;
    let fadt = Fadt::parse(tables.find(Fadt::SIGNATURE).ok_or(AcpiError::BadSignature)?)?;
    let dsdt = Table::read(fadt.dsdt(), left_by_firmware)?;
    let port = fadt.pm1a_control().and_then(|register| register.port());
    Ok(port
        .zip(sleep_type(dsdt.bytes()))
        .map(|(port, sleep_type)| (port, u16::from(sleep_type) << SLP_TYP_SHIFT | SLP_EN)))
}

/// Of the PM1a event block: distance of the enable register from the status register in ports.
pub const PM1_ENABLE: u16 = 2;
/// Of both registers: the power button (ACPI 6.5, section 4.8.4.1).
pub const POWER_BUTTON: u16 = 1 << 8;

/// Power button: port of the PM1a status register, and the interrupt.
pub fn power_button() -> Result<Option<(u16, u32)>, AcpiError> {
    let tables = tables()?;
    let fadt = Fadt::parse(tables.find(Fadt::SIGNATURE).ok_or(AcpiError::BadSignature)?)?;
    let port = fadt.pm1a_event().and_then(|register| register.port());
    Ok(port.map(|port| (port, fadt.sci_interrupt().into())))
}

/// First element of the package `_S5_`, found by its encoding (ACPI 6.5, section 20.2): name,
/// package opcode, package length, number of elements, first element.
fn sleep_type(aml: &[u8]) -> Option<u8> {
    const PACKAGE: u8 = 0x12;
    const BYTE_PREFIX: u8 = 0x0a;
    let at = aml.windows(5).position(|bytes| bytes == [b'_', b'S', b'5', b'_', PACKAGE])? + 5;
    // The two highest bits of the length's first byte count the bytes that follow it.
    let elements = at + 1 + usize::from(aml.get(at)? >> 6);
    match *aml.get(elements + 1)? {
        BYTE_PREFIX => aml.get(elements + 2).copied(),
        // `Zero` and `One` are their own encoding.
        small @ 0..=1 => Some(small),
        _ => None,
    }
}
