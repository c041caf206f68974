//! PCI functions: enumeration, and preparation for the server that drives one.
//!
//! Only root writes configuration space: addresses, bus mastering and interrupt messages are
//! settings by which a device could access foreign memory. A server gets the function's registers
//! and reads its configuration. Pages with the MSI-X table are not mapped; root fills the table so
//! that all interrupts of the function use the first entry.
//!
//! A function may access memory only between [`Function::enable`] and [`Function::disable`], while
//! its server lives.

use heapless::Vec;
use hw_tables::acpi::{Mcfg, Rsdp, Table, Tables, find_rsdp};
use hw_tables::pci::{
    BARS, DEVICES, FUNCTIONS, MemoryBar, SPACE, capabilities, capability, command, msi, msi_x,
    register,
};
use native_rt::device::DeviceRegisters;
use native_rt::start::Boot;
use proto::system::{PciClass, VirtioClass};

use crate::platform::HAS_ACPI;

/// Firmware area with the root pointer if the boot loader did not pass it (ACPI 6.5, section
/// 5.2.5.1).
const BIOS: (u64, usize) = (0xe_0000, 0x2_0000);
/// Maximum number of buses that are searched.
const MAX_BUSES: usize = 32;

/// Address of a PCI function.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Address {
    bus: u8,
    device: u8,
    function: u8,
}

impl Address {
    /// Returns the requester id: bus, device (5 bits), function (3 bits).
    pub fn number(self) -> u16 {
        u16::from(self.bus) << 8 | u16::from(self.device) << 3 | u16::from(self.function)
    }

    /// Returns the address of a requester id.
    pub fn from_number(number: u16) -> Self {
        let (bus, rest) = ((number >> 8) as u8, number as u8);
        Self { bus, device: rest >> 3, function: rest & 7 }
    }
}

impl core::fmt::Display for Address {
    fn fmt(&self, to: &mut core::fmt::Formatter) -> core::fmt::Result {
        write!(to, "{:02x}:{:02x}.{}", self.bus, self.device, self.function)
    }
}

/// Memory range of a function's registers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Bar {
    /// Index of the base address register.
    pub number: u8,
    /// Physical address.
    pub base: u64,
    /// Length in bytes, a power of two.
    pub length: u64,
}

/// Configuration space, as far as root can access it.
#[derive(Clone, Copy)]
pub struct Pci<'a> {
    boot: &'a Boot,
    base: u64,
    first_bus: u8,
    last_bus: u8,
}

/// A PCI function.
#[derive(Clone, Copy)]
pub struct Function<'a> {
    boot: &'a Boot,
    /// Its address.
    pub address: Address,
    /// Physical address of its configuration space.
    pub configuration: u64,
    registers: DeviceRegisters,
}

/// Returns the ACPI table with a signature, if the firmware has one.
pub fn table(boot: &Boot, signature: &[u8; 4]) -> Option<Table<'static>> {
    if !HAS_ACPI {
        return None;
    }
    let memory = |address, length| boot.firmware(address, length);
    let tables = Tables::from_address(boot.info.rsdp, memory).ok().or_else(|| {
        // The loader's copy of the pointer may be in inaccessible memory.
        let bytes = boot.firmware(BIOS.0, BIOS.1)?;
        let rsdp = Rsdp::parse(bytes.get(find_rsdp(bytes)?..)?).ok()?;
        Tables::new(rsdp, memory).ok()
    })?;
    tables.find(signature)
}

impl<'a> Pci<'a> {
    /// Finds the configuration space of segment 0; `None` if the firmware describes none.
    pub fn find(boot: &'a Boot) -> Option<Self> {
        let range = Mcfg::parse(table(boot, Mcfg::SIGNATURE)?).ok()?;
        let range = range.ranges().find(|range| range.segment == 0)?;
        let (first_bus, last_bus) = (range.first_bus, range.last_bus);
        Some(Self { boot, base: range.base, first_bus, last_bus })
    }

    fn function(self, address: Address) -> Option<Function<'a>> {
        if !(self.first_bus..=self.last_bus).contains(&address.bus) {
            return None;
        }
        let configuration = self.base.checked_add(u64::from(address.number()) * SPACE)?;
        let registers = self.boot.registers(configuration, SPACE)?;
        let function = Function { boot: self.boot, address, configuration, registers };
        (registers.read16(register::VENDOR.into()) != u16::MAX).then_some(function)
    }

    /// Calls `found` with every function, bus by bus, until it returns a value.
    fn search<T>(self, mut found: impl FnMut(Function<'a>) -> Option<T>) -> Option<T> {
        let mut buses: Vec<u8, MAX_BUSES> = Vec::new();
        // There is room for one.
        let _ = buses.push(self.first_bus);
        let mut next = 0;
        while let Some(&bus) = buses.get(next) {
            next += 1;
            for device in 0..DEVICES {
                let Some(first) = self.function(Address { bus, device, function: 0 }) else {
                    continue;
                };
                let functions = if first.has_more() { FUNCTIONS } else { 1 };
                for function in 0..functions {
                    let Some(function) = self.function(Address { bus, device, function }) else {
                        continue;
                    };
                    if let Some(behind) = function.bridged_bus()
                        && !buses.contains(&behind)
                    {
                        // Buses beyond the limit are not searched.
                        let _ = buses.push(behind);
                    }
                    if let Some(result) = found(function) {
                        return Some(result);
                    }
                }
            }
        }
        None
    }

    /// Returns function `index` of a class.
    pub fn nth(self, class: PciClass, index: u8) -> Option<Function<'a>> {
        let mut left = index;
        self.search(|function| {
            if !function.is(class) {
                return None;
            }
            let this = left == 0;
            left = left.wrapping_sub(1);
            this.then_some(function)
        })
    }
}

impl Function<'_> {
    fn read(&self, offset: u16) -> u32 {
        self.registers.read32(offset.into())
    }

    fn has_more(&self) -> bool {
        self.registers.read8(register::HEADER_TYPE.into()) & 0x80 != 0
    }

    fn layout(&self) -> u8 {
        self.registers.read8(register::HEADER_TYPE.into()) & 0x7f
    }

    fn bridged_bus(&self) -> Option<u8> {
        let bus = self.registers.read8(register::SECONDARY_BUS.into());
        (self.layout() == 1 && bus > self.address.bus).then_some(bus)
    }

    fn is(&self, class: PciClass) -> bool {
        /// SATA controller with AHCI (PCI Code and ID Assignment, mass storage).
        const AHCI: u32 = 0x01_06_01;
        const VIRTIO: u16 = 0x1af4;
        let vendor = self.registers.read16(register::VENDOR.into());
        let device = self.registers.read16(register::DEVICE.into());
        // Devices that also support the legacy protocol have ids of their own (virtio 1.2, section
        // 4.1.2.1).
        self.layout() == 0
            && match class {
                PciClass::Virtio(VirtioClass::Net) => {
                    vendor == VIRTIO && matches!(device, 0x1000 | 0x1041)
                }
                PciClass::Virtio(VirtioClass::Block) => {
                    vendor == VIRTIO && matches!(device, 0x1001 | 0x1042)
                }
                PciClass::Ahci(_) => self.read(register::CLASS) >> 8 == AHCI,
            }
    }

    fn change_command(&self, set: u16, clear: u16) {
        let offset = register::COMMAND.into();
        let value = self.registers.read16(offset);
        self.registers.write16(offset, value & !clear | set);
    }

    /// Returns the memory BARs that root can delegate.
    pub fn bars(&self) -> Vec<Bar, { BARS as usize }> {
        let mut bars = Vec::new();
        // During sizing, a register holds an address that may belong to another device.
        let before = self.registers.read16(register::COMMAND.into());
        self.change_command(0, command::IO | command::MEMORY | command::BUS_MASTER);
        let mut number = 0;
        while number < BARS {
            let offset = u64::from(register::BASE_ADDRESS) + 4 * u64::from(number);
            let has_next = number + 1 < BARS;
            let both = |registers: DeviceRegisters| {
                (registers.read32(offset), if has_next { registers.read32(offset + 4) } else { 0 })
            };
            let (low, high) = both(self.registers);
            let Some(bar) = MemoryBar::parse(low, high) else {
                number += 1;
                continue;
            };
            let is_long = bar.is_long && has_next;
            self.registers.write32(offset, u32::MAX);
            if is_long {
                self.registers.write32(offset + 4, u32::MAX);
            }
            let (low_mask, high_mask) = both(self.registers);
            self.registers.write32(offset, low);
            if is_long {
                self.registers.write32(offset + 4, high);
            }
            let length = MemoryBar::parse(low_mask, high_mask).map_or(0, MemoryBar::length);
            let reachable = self.boot.device_pages(bar.base, length).is_some();
            if length.is_power_of_two() && bar.base != 0 && reachable {
                // There are as many places as registers.
                let _ = bars.push(Bar { number, base: bar.base, length });
            }
            number += if is_long { 2 } else { 1 };
        }
        self.registers.write16(register::COMMAND.into(), before);
        bars
    }

    fn capability(&self, id: u8) -> Option<u16> {
        capabilities(|offset| self.read(offset)).find(|&(_, found)| found == id).map(|(at, _)| at)
    }

    /// Returns the location of the MSI-X table: index of the base address register, offset, length.
    pub fn table(&self) -> Option<(u8, u64, u64)> {
        let at = self.capability(capability::MSI_X)?;
        let entries = u64::from(self.registers.read16(u64::from(at) + 2) & msi_x::SIZE) + 1;
        let place = self.read(at + msi_x::TABLE);
        Some(((place & 7) as u8, u64::from(place & !7), entries * msi_x::ENTRY))
    }

    /// Routes all interrupts of the function to one message. Returns `false` if it cannot send
    /// messages.
    fn set_message(&self, bars: &[Bar], address: u64, data: u32) -> bool {
        if let Some((number, offset, length)) = self.table()
            && let Some(at) = self.capability(capability::MSI_X)
        {
            let bar = bars.iter().find(|bar| bar.number == number && offset + length <= bar.length);
            let Some(bar) = bar else { return false };
            let Some(table) = self.boot.registers(bar.base, bar.length) else { return false };
            let Some(table) = table.part(offset, length) else { return false };
            for entry in 0..length / msi_x::ENTRY {
                let masked = u32::from(entry != 0);
                table.write32(entry * msi_x::ENTRY, address as u32);
                table.write32(entry * msi_x::ENTRY + 4, (address >> 32) as u32);
                table.write32(entry * msi_x::ENTRY + 8, data);
                table.write32(entry * msi_x::ENTRY + 12, masked);
            }
            let control = u64::from(at) + 2;
            let value = self.registers.read16(control) & !msi_x::MASK | msi_x::ENABLE;
            self.registers.write16(control, value);
            return true;
        }
        let Some(at) = self.capability(capability::MSI) else { return false };
        let (at, control) = (u64::from(at), u64::from(at) + 2);
        let value = self.registers.read16(control);
        let first = at + u64::from(msi::ADDRESS);
        self.registers.write32(first, address as u32);
        if value & msi::LONG != 0 {
            self.registers.write32(first + 4, (address >> 32) as u32);
            self.registers.write16(first + 8, data as u16);
        } else {
            self.registers.write16(first + 4, data as u16);
        }
        self.registers.write16(control, value & !msi::COUNT | msi::ENABLE);
        true
    }

    /// Enables memory decoding, bus mastering and interrupts by this message. Returns `false` if
    /// the function cannot send messages.
    pub fn enable(&self, bars: &[Bar], address: u64, data: u32) -> bool {
        // The MSI-X table is in its registers.
        self.change_command(command::MEMORY | command::NO_LINE, command::IO | command::BUS_MASTER);
        let can = self.set_message(bars, address, data);
        if can {
            self.change_command(command::BUS_MASTER, 0);
        }
        can
    }

    /// Disables bus mastering and memory decoding. Returns `false` if the function reports that
    /// they are still on.
    pub fn disable(&self) -> bool {
        const ON: u16 = command::MEMORY | command::BUS_MASTER;
        self.change_command(0, ON);
        self.registers.read16(register::COMMAND.into()) & ON == 0
    }
}
