//! ACPI tables of the VM (ACPI 6.5): RSDP, XSDT, FADT, FACS, MADT, DSDT, and MCFG (PCI Firmware
//! 3.2) if the board has PCI.
//!
//! The VM is always in ACPI mode (no SMI command port), has ISA devices but neither a VGA nor an
//! 8042 keyboard controller for a guest to probe, and no HPET. PCI, if present, is one bus without
//! interrupt pins.

use crate::BootError;
use crate::layout::{ACPI, ACPI_ROOM, PcLayout, PciLayout};
use acpi_tables::aml::{
    AddressSpace, AddressSpaceCacheable, Device, EISAName, IO, Memory32Fixed, Name, Package, Path,
    ResourceTemplate, Scope,
};
use acpi_tables::fadt::{FADTBuilder, Flags};
use acpi_tables::gas::{self, AccessSize, GAS};
use acpi_tables::madt::{EnabledStatus, IoApic, ProcessorLocalApic};
use acpi_tables::mcfg::MCFG;
use acpi_tables::rsdp::Rsdp;
use acpi_tables::sdt::Sdt;
use acpi_tables::xsdt::XSDT;
use acpi_tables::{Aml, facs::FACS};
use alloc::vec;
use alloc::vec::Vec;
use hw_tables::acpi::{InterruptFlags, boot_flag};
use vmm_mem::GuestMemory;

const OEM: [u8; 6] = *b"PARADR";
const OEM_TABLE: [u8; 8] = *b"PARADOR ";
const OEM_REVISION: u32 = 1;
/// Alignment of tables; the FACS requires it.
const ALIGNMENT: u64 = 64;
/// Latency beyond which C2 and C3 count as absent (section 5.2.9, `P_LVL2_LAT`, `P_LVL3_LAT`).
const NO_C2: u16 = 0xfff;
const NO_C3: u16 = 0xfff;
/// `_STA`: present, enabled, shown, working.
const STATUS: u8 = 0xf;
/// APIC ids have 8 bits and 0xff is the broadcast; the I/O APIC has an id too.
const MOST_VCPUS: u8 = 0xfe;

/// Writes the tables and returns the address of the RSDP.
pub fn write(memory: &GuestMemory, layout: &PcLayout, vcpus: u8) -> Result<u64, BootError> {
    if vcpus == 0 || vcpus > MOST_VCPUS {
        return Err(BootError::BadVcpus);
    }
    // The RSDP comes first, because guests search for it, but refers to later tables.
    let mut at = ACPI + ALIGNMENT;
    let mut place = |table: &dyn Aml| -> Result<u64, BootError> {
        let mut bytes = Vec::new();
        table.to_aml_bytes(&mut bytes);
        let address = at;
        let end = address + bytes.len() as u64;
        if end > ACPI + ACPI_ROOM {
            return Err(BootError::TablesTooLarge);
        }
        memory.write_slice(address, &bytes)?;
        at = end.next_multiple_of(ALIGNMENT);
        Ok(address)
    };
    let facs = place(&FACS::new())?;
    let dsdt = place(&dsdt(layout))?;
    let fadt = place(&fadt(layout, facs, dsdt).finalize())?;
    let madt = place(&madt(layout, vcpus))?;
    let mut root = XSDT::new(OEM, OEM_TABLE, OEM_REVISION);
    root.add_entry(fadt);
    root.add_entry(madt);
    if let Some(pci) = &layout.pci {
        let mut mcfg = MCFG::new(OEM, OEM_TABLE, OEM_REVISION);
        mcfg.add_ecam(pci.ecam.into(), 0, 0, 0);
        root.add_entry(place(&mcfg)?);
    }
    let root = place(&root)?;
    let mut pointer = Vec::new();
    Rsdp::new(OEM, root).to_aml_bytes(&mut pointer);
    memory.write_slice(ACPI, &pointer)?;
    Ok(ACPI)
}

fn fadt(layout: &PcLayout, facs: u64, dsdt: u64) -> FADTBuilder {
    let register =
        |bits, size, port: u16| GAS::new(gas::AddressSpace::SystemIo, bits, 0, size, port.into());
    let boot = boot_flag::LEGACY_DEVICES | boot_flag::VGA_NOT_PRESENT;
    let mut table = FADTBuilder::new(OEM, OEM_TABLE, OEM_REVISION)
        .firmware_ctrl_64(facs)
        .dsdt_64(dsdt)
        .flag(Flags::Wbinvd)
        .flag(Flags::ProcC1)
        // A fixed power button, but no fixed sleep button and no wake-up by the RTC.
        .flag(Flags::SlpButton)
        .flag(Flags::FixRtc)
        .flag(Flags::TmrValExt)
        .flag(Flags::ResetRegSup);
    // Systems without 64-bit addresses read these fields; others prefer the wide fields (ACPI 6.5,
    // table 5.9). Tables are below 1 MiB.
    table.firmware_ctrl = (facs as u32).into();
    table.dsdt = (dsdt as u32).into();
    table.sci_int = u16::from(layout.sci).into();
    table.pm1a_evt_blk = u32::from(layout.pm1a_event).into();
    table.pm1a_cnt_blk = u32::from(layout.pm1a_control).into();
    table.pm_tmr_blk = u32::from(layout.pm_timer).into();
    table.gpe0_blk = u32::from(layout.gpe0).into();
    table.pm1_evt_len = 4;
    table.pm1_cnt_len = 2;
    table.pm_tmr_len = 4;
    table.gpe0_blk_len = 4;
    table.p_lvl2_lat = NO_C2.into();
    table.p_lvl3_lat = NO_C3.into();
    table.century = layout.rtc_century;
    table.iapc_boot_arch = boot.into();
    table.reset_reg = register(8, AccessSize::ByteAccess, layout.reset_port);
    table.reset_value = layout.reset_value;
    table.x_pm1a_evt_blk = register(32, AccessSize::WordAccess, layout.pm1a_event);
    table.x_pm1a_cnt_blk = register(16, AccessSize::WordAccess, layout.pm1a_control);
    table.x_pm_tmr_blk = register(32, AccessSize::DwordAccess, layout.pm_timer);
    table.x_gpe0_blk = register(32, AccessSize::ByteAccess, layout.gpe0);
    table
}

fn madt(layout: &PcLayout, vcpus: u8) -> Sdt {
    const HEADER_LENGTH: u32 = 36;
    const REVISION: u8 = 5;
    const PCAT_COMPAT: u32 = 1;
    let mut table = Sdt::new(*b"APIC", HEADER_LENGTH, REVISION, OEM, OEM_TABLE, OEM_REVISION);
    table.append_slice(&layout.local_apic.to_le_bytes());
    table.append_slice(&PCAT_COMPAT.to_le_bytes());
    let mut add = |entry: &dyn Aml| {
        let mut bytes = Vec::new();
        entry.to_aml_bytes(&mut bytes);
        table.append_slice(&bytes);
    };
    for id in 0..vcpus {
        add(&ProcessorLocalApic::new(id, id, EnabledStatus::Enabled));
    }
    add(&IoApic::new(layout.io_apic_id, layout.io_apic, 0));
    table.append_slice(&interrupt_override(0, layout.pit_gsi, InterruptFlags::BUS));
    table.append_slice(&interrupt_override(layout.sci, layout.sci, InterruptFlags::LEVEL_HIGH));
    // Type 4: LINT1 of every CPU is NMI.
    table.append_slice(&[4, 6, 0xff, 0, 0, 1]);
    table
}

/// Type 2: ISA interrupt `source` is wired to global interrupt `gsi`.
fn interrupt_override(source: u8, gsi: u8, InterruptFlags(flags): InterruptFlags) -> [u8; 10] {
    let [low, high] = flags.to_le_bytes();
    [2, 10, 0, source, gsi, 0, 0, 0, low, high]
}

/// `IRQNoFlags` (section 6.4.2.1): an edge-triggered, active-high ISA interrupt.
struct IsaInterrupt(u8);

impl Aml for IsaInterrupt {
    fn to_aml_bytes(&self, sink: &mut dyn acpi_tables::AmlSink) {
        const IRQ_2_BYTES: u8 = 0x22;
        sink.byte(IRQ_2_BYTES);
        sink.word(1_u16.checked_shl(self.0.into()).unwrap_or(0));
    }
}

/// Ports of a device, decoded to 16 bits.
fn ports(first: u16, length: u8) -> IO {
    IO::new(first, first, 1, length)
}

fn dsdt(layout: &PcLayout) -> Sdt {
    const HEADER_LENGTH: u32 = 36;
    const REVISION: u8 = 2;
    let mut body = Vec::new();

    // Section 7.4.2.6: sleep types for PM1a and PM1b control, and two reserved elements.
    let off = layout.sleep_type_off;
    let package = Package::new(vec![&off, &off, &0u8, &0u8]);
    Name::new(Path::new("_S5_"), &package).to_aml_bytes(&mut body);

    let serial: [&dyn Aml; 2] = [&ports(layout.serial, 8), &IsaInterrupt(layout.serial_irq)];
    let rtc: [&dyn Aml; 2] = [&ports(layout.rtc, 2), &IsaInterrupt(layout.rtc_irq)];
    let mut devices = device("COM1", &EISAName::new("PNP0501"), &serial);
    devices.extend(device("RTC_", &EISAName::new("PNP0B00"), &rtc));
    if let Some(port) = layout.pvpanic {
        devices.extend(device("PEVT", &"QEMU0001", &[&ports(port, 1)]));
    }
    if let Some(pci) = &layout.pci {
        devices.extend(pci_root(pci));
    }
    body.extend(Scope::raw(Path::new("_SB_"), devices));

    let mut table = Sdt::new(*b"DSDT", HEADER_LENGTH, REVISION, OEM, OEM_TABLE, OEM_REVISION);
    table.append_slice(&body);
    table
}

/// Root of PCI (PCI Firmware 3.2, section 4.1): bus 0, its windows, and the memory of its
/// configuration space, which an operating system uses only if it is reserved. Without `_PRT` there
/// are no interrupt pins.
fn pci_root(pci: &PciLayout) -> Vec<u8> {
    const ECAM_LENGTH: u32 = 1 << 20;
    /// Motherboard resources.
    const RESERVED: &str = "PNP0C02";
    let last = pci.window + (pci.window_length - 1);
    let memory = AddressSpaceCacheable::NotCacheable;
    let resources: [&dyn Aml; 3] = [
        &AddressSpace::new_bus_number(0u16, 0),
        &ports(pci.config_port, 8),
        &AddressSpace::new_memory(memory, true, pci.window, last, None),
    ];
    let ecam: [&dyn Aml; 1] = [&Memory32Fixed::new(true, pci.ecam, ECAM_LENGTH)];
    let mut devices = device("MRES", &EISAName::new(RESERVED), &ecam);
    Device::new(
        Path::new("PCI0"),
        vec![
            &Name::new(Path::new("_HID"), &EISAName::new("PNP0A08")),
            &Name::new(Path::new("_CID"), &EISAName::new("PNP0A03")),
            &Name::new(Path::new("_UID"), &0u8),
            &Name::new(Path::new("_SEG"), &0u8),
            &Name::new(Path::new("_BBN"), &0u8),
            &Name::new(Path::new("_CRS"), &ResourceTemplate::new(resources.to_vec())),
        ],
    )
    .to_aml_bytes(&mut devices);
    devices
}

/// A present and functional device with these fixed resources.
fn device(name: &str, hid: &dyn Aml, resources: &[&dyn Aml]) -> Vec<u8> {
    let mut bytes = Vec::new();
    Device::new(
        Path::new(name),
        vec![
            &Name::new(Path::new("_HID"), hid),
            &Name::new(Path::new("_UID"), &1u8),
            &Name::new(Path::new("_STA"), &STATUS),
            &Name::new(Path::new("_CRS"), &ResourceTemplate::new(resources.to_vec())),
        ],
    )
    .to_aml_bytes(&mut bytes);
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::LAYOUT;
    use hw_tables::acpi::{Fadt, Madt, MadtEntry, Table, Tables, fadt_flag};
    use std::io::ErrorKind;
    use std::process::Command;
    use vmm_mem::testing::memory;

    const WITH_PCI: PcLayout = PcLayout {
        pci: Some(PciLayout {
            ecam: 0xe000_0000,
            window: 0xc000_0000,
            window_length: 0x2000_0000,
            config_port: 0xcf8,
        }),
        ..LAYOUT
    };

    fn written(layout: &PcLayout, vcpus: u8) -> Vec<u8> {
        let ram = memory(&[(0, 1 << 20)]);
        assert_eq!(write(&ram, layout, vcpus), Ok(ACPI));
        let mut region = vec![0; ACPI_ROOM as usize];
        ram.read_slice(ACPI, &mut region).unwrap();
        region
    }

    fn reach<'a>(region: &'a [u8]) -> impl Fn(u64, usize) -> Option<&'a [u8]> + Copy {
        |address, length| region.get((address.checked_sub(ACPI)?) as usize..)?.get(..length)
    }

    #[test]
    fn tables_match_the_layout() {
        let region = written(&LAYOUT, 3);
        let tables = Tables::from_address(ACPI, reach(&region)).unwrap();
        assert_eq!(tables.tables().count(), 2, "both have correct checksums");

        let fadt = Fadt::parse(tables.find(b"FACP").unwrap()).unwrap();
        assert_eq!(fadt.sci_interrupt(), 9);
        assert_eq!(fadt.pm1a_event().unwrap().port(), Some(0x600));
        assert_eq!(fadt.pm1a_control().unwrap().port(), Some(0x604));
        assert_eq!(fadt.pm_timer().unwrap().port(), Some(0x608));
        assert_ne!(fadt.flags() & fadt_flag::TMR_VAL_EXT, 0);
        assert_eq!(fadt.flags() & fadt_flag::HW_REDUCED_ACPI, 0);
        let (reset, value) = fadt.reset().unwrap();
        assert_eq!((reset.port(), value), (Some(0xcf9), 6));
        let dsdt = Table::read(fadt.dsdt(), reach(&region)).unwrap();
        assert_eq!(&dsdt.signature(), b"DSDT");

        let madt = Madt::parse(tables.find(b"APIC").unwrap()).unwrap();
        assert_eq!(madt.local_apic_address(), 0xfee0_0000);
        let bus = InterruptFlags::BUS;
        let level = InterruptFlags::LEVEL_HIGH;
        assert_eq!(
            madt.entries().collect::<Vec<_>>(),
            [
                MadtEntry::LocalApic { uid: 0, id: 0, flags: 1 },
                MadtEntry::LocalApic { uid: 1, id: 1, flags: 1 },
                MadtEntry::LocalApic { uid: 2, id: 2, flags: 1 },
                MadtEntry::IoApic { id: 0xff, address: 0xfec0_0000, gsi_base: 0 },
                MadtEntry::InterruptOverride { bus: 0, source: 0, gsi: 2, flags: bus },
                MadtEntry::InterruptOverride { bus: 0, source: 9, gsi: 9, flags: level },
                MadtEntry::LocalApicNmi { uid: 0xff, flags: bus, lint: 1 },
            ]
        );
    }

    /// Systems with 32-bit addresses find the same tables.
    #[test]
    fn narrow_addresses_are_those_of_the_wide_fields() {
        let region = written(&LAYOUT, 1);
        let tables = Tables::from_address(ACPI, reach(&region)).unwrap();
        let fadt = tables.find(b"FACP").unwrap();
        let field = |at: usize| u64::from_le_bytes(fadt.bytes()[at..at + 8].try_into().unwrap());
        // FIRMWARE_CTRL and DSDT; X_FIRMWARE_CTRL; X_DSDT.
        let (facs, dsdt) = (field(36) & 0xffff_ffff, field(36) >> 32);
        assert_eq!((facs, dsdt), (field(132), field(140)));
        assert_eq!(reach(&region)(facs, 4), Some(&b"FACS"[..]));
        assert_eq!(reach(&region)(dsdt, 4), Some(&b"DSDT"[..]));
    }

    #[test]
    fn pci_has_its_own_table() {
        let region = written(&WITH_PCI, 1);
        let tables = Tables::from_address(ACPI, reach(&region)).unwrap();
        let table = tables.find(b"MCFG").unwrap();
        // Reserved (8 bytes), then base, segment, first and last bus, reserved.
        let entry = [0xe000_0000_u64.to_le_bytes(), [0; 8]].concat();
        assert_eq!(table.bytes()[44..], entry);
        assert!(
            Tables::from_address(ACPI, reach(&written(&LAYOUT, 1)))
                .unwrap()
                .find(b"MCFG")
                .is_none()
        );
    }

    #[test]
    fn numbers_of_cpus() {
        let ram = memory(&[(0, 1 << 20)]);
        assert_eq!(write(&ram, &LAYOUT, 0), Err(BootError::BadVcpus));
        assert_eq!(write(&ram, &LAYOUT, 255), Err(BootError::BadVcpus));
        assert_eq!(write(&ram, &LAYOUT, MOST_VCPUS), Ok(ACPI));
    }

    /// The reference compiler disassembles the DSDT, where it is installed.
    #[test]
    fn the_reference_disassembler_understands_the_dsdt() {
        let region = written(&WITH_PCI, 1);
        let tables = Tables::from_address(ACPI, reach(&region)).unwrap();
        let fadt = Fadt::parse(tables.find(b"FACP").unwrap()).unwrap();
        let dsdt = Table::read(fadt.dsdt(), reach(&region)).unwrap();
        let folder = std::env::temp_dir().join(std::format!("vmm-boot-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        let dump = |name: &str, table: &Table<'_>| {
            std::fs::write(folder.join(name), table.bytes()).unwrap();
        };
        dump("dsdt.aml", &dsdt);
        for table in tables.tables() {
            let signature = table.signature();
            dump(&std::format!("{}.aml", str::from_utf8(&signature).unwrap()), &table);
        }
        let iasl =
            |arguments: &[&str]| Command::new("iasl").args(arguments).current_dir(&folder).output();
        match iasl(&["-d", "dsdt.aml", "FACP.aml", "APIC.aml", "MCFG.aml"]) {
            Err(error) if error.kind() == ErrorKind::NotFound => {}
            disassembled => {
                let disassembled = disassembled.unwrap();
                assert!(disassembled.status.success(), "{disassembled:?}");
                let source = std::fs::read_to_string(folder.join("dsdt.dsl")).unwrap();
                let texts = [
                    "_S5",
                    "COM1",
                    "PNP0501",
                    "PNP0B00",
                    "QEMU0001",
                    "IRQNoFlags",
                    "PNP0A08",
                    "WordBusNumber",
                    "DWordMemory",
                    "Memory32Fixed",
                ];
                for text in texts {
                    assert!(source.contains(text), "no {text} in\n{source}");
                }
                for table in ["FACP.dsl", "APIC.dsl", "MCFG.dsl"] {
                    let text = std::fs::read_to_string(folder.join(table)).unwrap();
                    assert!(!text.contains("Invalid") && !text.contains("**** "), "{text}");
                }
                let compiled = iasl(&["-we", "dsdt.dsl"]).unwrap();
                assert!(compiled.status.success(), "{compiled:?}");
            }
        }
        std::fs::remove_dir_all(&folder).unwrap();
    }
}
