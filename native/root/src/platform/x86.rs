//! PCs: serial ports, the end of an emulated machine, names of faults (AMD APM vol. 2, section
//! 8.2).

use core::fmt;

use hw_tables::acpi::{Mcfg, Rsdp, Table, Tables, find_rsdp};
use hw_tables::elf::Machine;
use native_rt::start::Boot;
use native_rt::{Irq, Ports};
use proto::control::code;
use proto::start::Seed;
use proto::system::{Board, SerialPort};
pub use vmm_x86::exit::EXIT_NAMES;

use super::Fault;
pub use super::cmos::wall_clock;
use crate::child::{Child, Resources, StartError};
use crate::mmio::Place;
use crate::pci::{HostBridge, Line};

/// Port of QEMU's `isa-debug-exit`.
const EXIT_PORT: u16 = 0xf4;
/// Added to an exit code written there, to distinguish it from QEMU's own exit codes.
const EXIT_BASE: u8 = 0x10;

/// Processor that programs must be for.
pub const PROCESSOR: Machine = Machine::X86_64;
/// Firmware area with the root pointer if the boot loader did not pass it (ACPI 6.5, section
/// 5.2.5.1).
const BIOS: (u64, usize) = (0xe_0000, 0x2_0000);

/// Returns the ACPI table with a signature, if the firmware has one.
pub fn table(boot: &Boot, signature: &[u8; 4]) -> Option<Table<'static>> {
    let memory = |address, length| boot.firmware(address, length);
    let tables = Tables::from_address(boot.info.rsdp, memory).ok().or_else(|| {
        // The loader's copy of the pointer may be in inaccessible memory.
        let bytes = boot.firmware(BIOS.0, BIOS.1)?;
        let rsdp = Rsdp::parse(bytes.get(find_rsdp(bytes)?..)?).ok()?;
        Tables::new(rsdp, memory).ok()
    })?;
    tables.find(signature)
}

/// Returns the host bridge for PCI of segment 0. The firmware has assigned all addresses.
pub fn pci_host(boot: &Boot) -> Option<HostBridge> {
    let range = Mcfg::parse(table(boot, Mcfg::SIGNATURE)?).ok()?;
    let range = range.ranges().find(|range| range.segment == 0)?;
    Some(HostBridge { base: range.base, buses: (range.first_bus, range.last_bus), window: None })
}

/// Returns nothing: the tables with the lines of PCI functions are in ACPI's machine language.
pub fn pci_line(_: &Boot, _: u8, _: u8) -> Option<Line> {
    None
}

/// Returns nothing: serial ports of PCs are I/O ports.
pub fn serial_place(_: &Boot, _: SerialPort) -> Option<Place> {
    None
}

/// Makes a panic of root end an emulated machine.
pub fn prepare() {
    native_rt::start::on_root_panic(EXIT_PORT, EXIT_BASE + code::INTERNAL as u8);
}

/// Returns nothing: firmware of PCs passes no secret, and VMMs use the processor's source.
pub fn seed(_: &Boot) -> Option<Seed> {
    None
}

/// Gives a child a serial port: eight I/O ports, and the interrupt.
pub fn add_serial(
    child: &mut Child,
    resources: &mut Resources,
    port: SerialPort,
) -> Result<(Irq, u16), StartError> {
    let (port, interrupt) = match port {
        SerialPort::Com1 => (0x3f8, 4),
        SerialPort::Com2 => (0x2f8, 3),
        SerialPort::None => return Err(StartError::Device),
    };
    Ok((child.add_ports(resources, port, interrupt)?, port))
}

/// Writes the outcome to QEMU's exit port, on its board. Other machines stay on: power-off requires
/// an interpreter of ACPI's machine language.
pub fn leave(board: Board, outcome: u64) {
    if board == Board::QemuQ35
        && let Some(port) = Ports::new(EXIT_PORT, 1)
    {
        port.write(0, EXIT_BASE.wrapping_add(outcome.min(code::RESET) as u8));
    }
}

const PAGE_FAULT: u64 = 14;

/// Writes the text of a fault.
pub fn describe(fault: &Fault, to: &mut fmt::Formatter) -> fmt::Result {
    let name = match fault.vector {
        0 => "division error",
        1 => "debug exception",
        3 => "breakpoint",
        4 => "overflow",
        5 => "bound range exceeded",
        6 => "undefined instruction",
        7 => "device not available",
        10 => "invalid TSS",
        11 => "segment not present",
        12 => "stack fault",
        13 => "general protection fault",
        PAGE_FAULT => "page fault",
        16 | 19 => "floating-point exception",
        17 => "alignment check",
        18 => "machine check",
        21 => "control protection fault",
        _ => "exception",
    };
    if fault.vector == PAGE_FAULT {
        let access = match fault.error {
            error if error & 1 << 4 != 0 => "executing",
            error if error & 1 << 1 != 0 => "writing",
            _ => "reading",
        };
        let why = if fault.error & 1 != 0 { "protected" } else { "unmapped" };
        write!(to, "{name} {access} {why} {:#x}", fault.address)?;
    } else {
        write!(to, "{name} (vector {}, error {:#x})", fault.vector, fault.error)?;
    }
    write!(to, " at ip {:#x}", fault.ip)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names() {
        let fault = Fault { vector: 14, error: 0x7, address: 0x1000, ip: 0x20_0000 };
        assert_eq!(fault.to_string(), "page fault writing protected 0x1000 at ip 0x200000");
        let fault = Fault { vector: 6, error: 0, ..fault };
        assert_eq!(fault.to_string(), "undefined instruction (vector 6, error 0x0) at ip 0x200000");
    }
}
