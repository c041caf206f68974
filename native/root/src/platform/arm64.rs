//! AArch64 machines that a device tree describes: UART, clock, end by a reset, names of faults (Arm
//! ARM, D24.2.40: the exception class).

use core::fmt;

use abi::{PAGE_SIZE, boot, rights};
use hw_arm64::esr::{self, class};
use hw_arm64::{pl011, pl031};
use hw_tables::elf::Machine;
use hw_tables::fdt::{Fdt, Node, pci};
use hw_tables::pci::SPACE;
use native_rt::start::Boot;
use native_rt::{Irq, Platform, time};
use proto::start::{Seed, slot};
use proto::system::{Board, SerialPort};
#[cfg_attr(test, allow(unused_imports, reason = "that of the host's architecture is used"))]
pub use vmm_arm64::EXIT_NAMES;

use super::Fault;
use crate::child::{Child, Resources, StartError};
use crate::mmio::Place;
use crate::pci::{HostBridge, Line};

/// Processor that programs must be for.
pub const PROCESSOR: Machine = Machine::Aarch64;

/// Nothing: a panic of root resets the machine.
pub fn prepare() {}

/// The machine's device tree, which the kernel has checked.
pub fn tree(boot: &Boot) -> Option<Fdt<'static>> {
    Fdt::parse(boot.device_tree()?).ok()
}

/// Reads the wall clock: the counter, and seconds since 1970 at that time. Returns 1970 if the
/// machine has no PL031.
pub fn wall_clock(boot: &Boot) -> (u64, u64) {
    let tree = tree(boot);
    let node = tree.and_then(|tree| tree.find(pl031::COMPATIBLE, |_| true));
    let base = node.and_then(|node| node.ranges().next()).map(|(base, _)| base);
    let registers = base.and_then(|base| boot.registers(base, PAGE_SIZE));
    let seconds = registers.map_or(0, |clock| clock.read32(pl031::DATA as u64).into());
    (time::tsc(), seconds)
}

/// Returns the secret of the firmware for random numbers.
pub fn seed(boot: &Boot) -> Option<Seed> {
    firmware_seed(&tree(boot)?)
}

fn firmware_seed(tree: &Fdt<'_>) -> Option<Seed> {
    tree.node("/chosen")?.property("rng-seed")?.first_chunk().copied()
}

/// The host bridge for PCI in the device tree.
pub fn pci_node<'a>(tree: &Fdt<'a>) -> Option<Node<'a>> {
    tree.find(pci::COMPATIBLE, |_| true)
}

/// Returns the host bridge for PCI.
pub fn pci_host(boot: &Boot) -> Option<HostBridge> {
    host(&tree(boot)?)
}

fn host(tree: &Fdt<'_>) -> Option<HostBridge> {
    let node = pci_node(tree)?;
    let (base, length) = node.ranges().next()?;
    let (first, last) = node.buses()?;
    // The space begins with the first bus.
    let bus = |number: u8| u64::from(number) * (SPACE << 8);
    let is_whole = first <= last && bus(last - first) + bus(1) <= length;
    let base = base.checked_sub(bus(first)).filter(|_| is_whole)?;
    Some(HostBridge { base, buses: (first, last), window: node.register_window() })
}

/// Returns the interrupt of a pin, 1 to 4, of a device on the first bus.
pub fn pci_line(boot: &Boot, device: u8, pin: u8) -> Option<Line> {
    let (interrupt, is_level) = pci_node(&tree(boot)?)?.pin_interrupt(device, pin)?;
    Some(Line { interrupt, is_level })
}

/// The UART of the console.
fn uart(tree: &Fdt<'_>) -> Option<Place> {
    let node = tree.console(pl011::COMPATIBLE)?;
    let (base, _) = node.ranges().next().filter(|(base, _)| base % PAGE_SIZE == 0)?;
    Some(Place { base, interrupt: node.gic_interrupt(0)?, is_level: true })
}

/// Returns the place of a serial port that a child can get.
pub fn serial_place(boot: &Boot, port: SerialPort) -> Option<Place> {
    tree(boot).as_ref().and_then(uart).filter(|_| port == SerialPort::Com1)
}

/// Gives a child the UART of the console: its registers as range 0, and the interrupt.
pub fn add_serial(
    child: &mut Child,
    resources: &mut Resources,
    port: SerialPort,
) -> Result<(Irq, u16), StartError> {
    let place = serial_place(resources.boot, port).ok_or(StartError::Device)?;
    let both = rights::READ | rights::WRITE;
    let irq = child.add_mmio_device(resources, (place, PAGE_SIZE), (0, slot::DEVICE, both))?;
    Ok((irq, 0))
}

/// Resets the machine on QEMU's board, which ends QEMU; the log has the outcome. Other machines
/// would start again, and stay on.
pub fn leave(board: Board, _: u64) {
    if board == Board::QemuVirt {
        // It fails only without the right.
        let _ = Platform::at(boot::slot::PLATFORM).reset();
    }
}

/// Writes the text of a fault.
pub fn describe(fault: &Fault, to: &mut fmt::Formatter) -> fmt::Result {
    let Fault { vector, error, address, ip } = fault;
    let name = match *vector {
        class::UNKNOWN => "undefined instruction",
        class::FLOATING_POINT => "floating-point instruction",
        class::SYSTEM_REGISTER => "system instruction",
        class::INSTRUCTION_ABORT => "page fault executing",
        class::DATA_ABORT if error & esr::WRITE != 0 => "page fault writing",
        class::DATA_ABORT => "page fault reading",
        _ => "exception",
    };
    to.write_str(name)?;
    if matches!(*vector, class::INSTRUCTION_ABORT | class::DATA_ABORT) {
        write!(to, " {address:#x}")?;
    }
    write!(to, " (class {vector:#x}, syndrome {error:#x}) at ip {ip:#x}")
}

#[cfg(test)]
mod tests {
    use super::*;

    static VIRT: &[u8] = include_bytes!("../../../../hw/tables/src/fdt/virt.dtb");

    #[test]
    fn the_uart_of_a_virtual_machine() {
        let tree = Fdt::parse(VIRT).unwrap();
        assert_eq!(uart(&tree), Some(Place { base: 0x900_0000, interrupt: 33, is_level: true }));
    }

    #[test]
    fn the_host_bridge_of_a_virtual_machine() {
        let window = Some((0x1000_0000, 0x2eff_0000));
        let all = HostBridge { base: 0x40_1000_0000, buses: (0, 255), window };
        assert_eq!(host(&Fdt::parse(VIRT).unwrap()), Some(all));
    }

    #[test]
    fn names() {
        struct Text(Fault);
        impl fmt::Display for Text {
            fn fmt(&self, to: &mut fmt::Formatter) -> fmt::Result {
                describe(&self.0, to)
            }
        }
        let syndrome = class::DATA_ABORT << esr::CLASS_SHIFT | esr::WRITE;
        let fault = Fault { vector: 0x24, error: syndrome, address: 0x1000, ip: 0x20_0000 };
        let text = "page fault writing 0x1000 (class 0x24, syndrome 0x90000040) at ip 0x200000";
        assert_eq!(Text(fault).to_string(), text);
        let text = "undefined instruction (class 0x0, syndrome 0x0) at ip 0x200000";
        assert_eq!(Text(Fault { vector: 0, error: 0, ..fault }).to_string(), text);
    }
}
