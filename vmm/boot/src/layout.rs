//! Memory layout of the VM: RAM, the memory map for the guest, and the loader's data below 1 MiB.

use crate::BootError;
use hw_tables::pvh::memory;
use vmm_mem::GuestMemory;

pub const PAGE: u64 = 4096;
pub const ONE_MIB: u64 = 1 << 20;
pub const FOUR_GIB: u64 = 1 << 32;

// Below 1 MiB. All except the tables is ordinary RAM once the guest has read it.

/// Global descriptor table.
pub const GDT: u64 = 0x1000;
/// PVH start information, its modules and memory map: one page.
pub const START_INFO: u64 = 0x6000;
/// Linux `boot_params`: one page.
pub const BOOT_PARAMS: u64 = 0x7000;
/// Page tables: one level 4, one level 3, four level 2.
pub const PAGE_TABLES: u64 = 0x9000;
/// Top of the initial stack of a kernel.
pub const STACK_TOP: u64 = 0x2_0000;
/// Command line.
pub const COMMAND_LINE: u64 = 0x2_0000;
/// Space for the command line, closing zero included.
pub const COMMAND_LINE_ROOM: u64 = 0x1_0000;
/// End of conventional memory: start of the extended BIOS data area on a PC.
const CONVENTIONAL_END: u64 = 0x9_fc00;
/// ACPI tables, the RSDP first: in the area that guests search.
pub const ACPI: u64 = 0xe_0000;
/// Space for ACPI tables.
pub const ACPI_ROOM: u64 = 0x1_0000;

/// Addresses of a board's devices. The board defines them; tables for the guest are generated from
/// them.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct PcLayout {
    /// Guest-physical address that limits RAM below 4 GiB; the addresses from there to 4 GiB belong
    /// to devices, and further RAM starts at 4 GiB. Page-aligned, between 16 MiB and 4 GiB.
    pub hole_start: u64,
    /// Registers of the local APICs.
    pub local_apic: u32,
    /// Registers of the I/O APIC; its first input is global interrupt 0.
    pub io_apic: u32,
    /// APIC id of the I/O APIC.
    pub io_apic_id: u8,
    /// I/O APIC input of the PIT (ISA interrupt 0).
    pub pit_gsi: u8,
    /// Global number of the ACPI interrupt; level, active high.
    pub sci: u8,
    /// Port of the PM1a event block, 4 bytes.
    pub pm1a_event: u16,
    /// Port of the PM1a control block, 2 bytes.
    pub pm1a_control: u16,
    /// Port of the ACPI PM timer, 32 bits.
    pub pm_timer: u16,
    /// Port of the general-purpose event block 0, 4 bytes.
    pub gpe0: u16,
    /// `SLP_TYP` value for power-off.
    pub sleep_type_off: u8,
    /// Reset port.
    pub reset_port: u16,
    /// Value that resets the VM when written to the reset port.
    pub reset_value: u8,
    /// First of the 8 ports of the serial line.
    pub serial: u16,
    /// Interrupt of the serial line.
    pub serial_irq: u8,
    /// Index port of the real-time clock; the data port follows.
    pub rtc: u16,
    /// Interrupt of the real-time clock.
    pub rtc_irq: u8,
    /// CMOS register that holds the century.
    pub rtc_century: u8,
    /// Port of the pvpanic device.
    pub pvpanic: Option<u16>,
    /// PCI, if the board has it.
    pub pci: Option<PciLayout>,
}

/// Addresses of PCI: one bus without bridges, whose functions use message interrupts only.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct PciLayout {
    /// Memory-mapped configuration space of bus 0, 1 MiB, aligned to its size.
    pub ecam: u32,
    /// First guest-physical address of the memory windows of functions.
    pub window: u32,
    /// Length of the memory for windows in bytes.
    pub window_length: u32,
    /// First of the eight ports of configuration mechanism 1.
    pub config_port: u16,
}

/// Type of a range of guest-physical addresses.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum MemoryKind {
    /// RAM.
    Ram,
    /// Reserved.
    Reserved,
    /// ACPI tables; RAM once they are no longer needed.
    Acpi,
}

impl MemoryKind {
    /// Type number of E820 and PVH memory maps.
    pub fn code(self) -> u32 {
        match self {
            Self::Ram => memory::RAM,
            Self::Reserved => memory::RESERVED,
            Self::Acpi => memory::ACPI,
        }
    }
}

/// A range of the guest's memory map.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct MemoryRange {
    /// First guest-physical address.
    pub start: u64,
    /// First address after it.
    pub end: u64,
    /// Type of the range.
    pub kind: MemoryKind,
}

/// Guest-physical ranges (base, length) of `size` bytes of RAM, a multiple of the page size: from 0
/// up to the hole, and the rest from 4 GiB on.
pub fn ram_ranges(size: u64, hole_start: u64) -> impl Iterator<Item = (u64, u64)> {
    let low = size.min(hole_start);
    [(0, low), (FOUR_GIB, size - low)].into_iter().filter(|&(_, length)| length != 0)
}

/// The memory map, ascending, without overlaps.
pub fn memory_map(memory: &GuestMemory) -> impl Iterator<Item = MemoryRange> + '_ {
    let range = |start, end, kind| MemoryRange { start, end, kind };
    let below_1_mib = [
        range(0, CONVENTIONAL_END, MemoryKind::Ram),
        range(CONVENTIONAL_END, 0xa_0000, MemoryKind::Reserved),
        range(ACPI, ACPI + ACPI_ROOM, MemoryKind::Acpi),
        range(ACPI + ACPI_ROOM, ONE_MIB, MemoryKind::Reserved),
    ];
    let above = memory.ranges().filter_map(move |(base, length)| {
        let start = base.max(ONE_MIB);
        let end = base + length;
        (start < end).then_some(range(start, end, MemoryKind::Ram))
    });
    below_1_mib.into_iter().chain(above)
}

/// End of the RAM that begins at 0, limited by the hole; at least 1 MiB.
pub fn low_ram(memory: &GuestMemory, layout: &PcLayout) -> Result<u64, BootError> {
    let low = memory.ranges().next().filter(|range| range.0 == 0).map_or(0, |range| range.1);
    let low = low.min(layout.hole_start);
    if low < ONE_MIB {
        return Err(BootError::TooLittleMemory { needed: ONE_MIB, available: low });
    }
    Ok(low)
}

/// Writes the command line, with a closing zero, to its address. `limit` is the kernel's maximum
/// length in bytes.
pub fn write_command_line(memory: &GuestMemory, text: &[u8], limit: u64) -> Result<u64, BootError> {
    let limit = limit.min(COMMAND_LINE_ROOM - 1);
    let length = text.len() as u64;
    if length > limit {
        return Err(BootError::CommandLineTooLong { limit, length });
    }
    memory.write_slice(COMMAND_LINE, text)?;
    memory.write(COMMAND_LINE + length, 0u8)?;
    Ok(COMMAND_LINE)
}

#[cfg(test)]
mod tests {
    use super::*;
    use vmm_mem::testing::memory;

    #[test]
    fn ram_goes_around_the_hole() {
        let ranges = |size| ram_ranges(size, 0xc000_0000).collect::<std::vec::Vec<_>>();
        assert_eq!(ranges(256 << 20), [(0, 256 << 20)]);
        assert_eq!(ranges(3 << 30), [(0, 3 << 30)]);
        assert_eq!(ranges((3 << 30) + PAGE), [(0, 3 << 30), (FOUR_GIB, PAGE)]);
    }

    #[test]
    fn map_is_ascending_and_covers_ram() {
        let ram = memory(&[(0, 2 << 20), (FOUR_GIB, 1 << 20)]);
        let map: std::vec::Vec<_> = memory_map(&ram).collect();
        for pair in map.windows(2) {
            assert!(pair[0].start < pair[0].end && pair[0].end <= pair[1].start);
        }
        let last = &map[map.len() - 2..];
        assert_eq!((last[0].start, last[0].end), (ONE_MIB, 2 << 20));
        assert_eq!((last[1].start, last[1].end), (FOUR_GIB, FOUR_GIB + ONE_MIB));
        assert!(last.iter().all(|range| range.kind == MemoryKind::Ram));
    }
}
