//! PCI functions: enumeration, and preparation for the server that drives one.
//!
//! Only root writes configuration space: addresses, bus mastering and interrupt messages are
//! settings by which a device could access foreign memory. A server gets the function's registers
//! and reads its configuration. Pages with the MSI-X table are not mapped; root fills the table so
//! that all interrupts of the function use the first entry. Where the firmware describes the lines
//! of functions (INTx), a server's function interrupts by its line instead.
//!
//! A function may access memory only between [`Function::start`] and [`Function::disable`], while
//! its server, or the VM whose guest drives it, lives.

mod reset;

use abi::PAGE_SIZE;
use heapless::Vec;
use hw_tables::pci::{
    BARS, DEVICES, FUNCTIONS, MemoryBar, SPACE, capabilities, capability, command, msi, msi_x,
    msi_x_table, register,
};
use native_rt::device::DeviceRegisters;
use native_rt::start::Boot;
use native_rt::warn;
use proto::system::{PciClass, VirtioClass};

use crate::platform;

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
    /// Physical address; 0: none is assigned.
    pub base: u64,
    /// Length in bytes, a power of two.
    pub length: u64,
}

impl Bar {
    /// Returns whether an address is in one of its pages.
    fn has_in_its_pages(&self, address: u64) -> bool {
        let first = self.base & !(PAGE_SIZE - 1);
        let end = self.base.saturating_add(self.length).checked_next_multiple_of(PAGE_SIZE);
        (first..end.unwrap_or(u64::MAX)).contains(&address)
    }
}

/// The host bridge, as the firmware describes it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HostBridge {
    /// Physical address of the configuration space of bus 0.
    pub base: u64,
    /// First and last bus.
    pub buses: (u8, u8),
    /// Address and length in bytes of the memory for registers that the firmware has not assigned;
    /// `None`: it assigns all.
    pub window: Option<(u64, u64)>,
}

/// Interrupt of a function's line.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Line {
    /// Its number, as the kernel counts it.
    pub interrupt: u32,
    /// It is level-triggered.
    pub is_level: bool,
}

/// Configuration space, as far as root can access it.
#[derive(Clone, Copy)]
pub struct Pci<'a> {
    boot: &'a Boot,
    host: HostBridge,
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

impl<'a> Pci<'a> {
    /// Finds the configuration space of segment 0; `None` if the firmware describes none.
    pub fn find(boot: &'a Boot) -> Option<Self> {
        Some(Self { boot, host: platform::pci_host(boot)? })
    }

    /// Assigns addresses to the registers that have none, where the firmware leaves that to the
    /// system. All functions get whole pages.
    pub fn assign(self) {
        let Some((base, length)) = self.host.window else { return };
        let window = base..base.saturating_add(length);
        let mut next = base;
        self.for_each(|function| {
            let assigned = function.all_bars().into_iter().filter(|bar| window.contains(&bar.base));
            next = assigned.fold(next, |next, bar| next.max(bar.base + bar.length));
        });
        self.for_each(|function| {
            for bar in function.all_bars().iter().filter(|bar| bar.base == 0) {
                let Some(place) = place(next, bar.length, window.end) else {
                    warn!("no addresses for registers of PCI function {}", function.address);
                    continue;
                };
                function.set_bar(bar.number, place);
                next = place + bar.length;
            }
        });
    }

    /// Returns the function at an address.
    pub fn function(self, address: Address) -> Option<Function<'a>> {
        let (first, last) = self.host.buses;
        if !(first..=last).contains(&address.bus) {
            return None;
        }
        let configuration = self.host.base.checked_add(u64::from(address.number()) * SPACE)?;
        let registers = self.boot.registers(configuration, SPACE)?;
        let function = Function { boot: self.boot, address, configuration, registers };
        (registers.read16(register::VENDOR.into()) != u16::MAX).then_some(function)
    }

    /// Calls `found` with every function, bus by bus, until it returns a value.
    fn search<T>(self, mut found: impl FnMut(Function<'a>) -> Option<T>) -> Option<T> {
        let mut buses: Vec<u8, MAX_BUSES> = Vec::new();
        // There is room for one.
        let _ = buses.push(self.host.buses.0);
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

    /// Calls `visit` with every function.
    pub fn for_each(self, mut visit: impl FnMut(Function<'a>)) {
        // Nothing is accepted.
        let _ = self.search(|function| {
            visit(function);
            None::<()>
        });
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

    /// Returns whether the function is of a class.
    pub fn is(&self, class: PciClass) -> bool {
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
        let mut bars = self.all_bars();
        bars.retain(|bar| bar.base != 0 && self.boot.device_pages(bar.base, bar.length).is_some());
        bars
    }

    /// Returns the address of a memory BAR, without sizing, which would stop the function.
    pub fn base(&self, number: u8) -> Option<u64> {
        let at = |number: u8| self.read(register::BASE_ADDRESS + 4 * u16::from(number));
        let high = if number + 1 < BARS { at(number + 1) } else { 0 };
        MemoryBar::parse(at(number), high).map(|bar| bar.base)
    }

    /// Returns the addresses of all memory BARs, likewise.
    fn bases(&self) -> impl Iterator<Item = u64> {
        let count = if self.layout() == 0 { BARS } else { 0 };
        (0..count).filter_map(|number| self.base(number))
    }

    /// Returns whether another function has registers in the pages of a BAR.
    pub fn shares_pages(&self, bar: &Bar) -> bool {
        let mut is_shared = false;
        if let Some(pci) = Pci::find(self.boot) {
            pci.for_each(|other| {
                let is_other = other.configuration != self.configuration;
                is_shared |= is_other && other.bases().any(|base| bar.has_in_its_pages(base));
            });
        }
        is_shared
    }

    /// Assigns an address below 4 GiB to a BAR that has none.
    fn set_bar(&self, number: u8, address: u64) {
        let offset = u64::from(register::BASE_ADDRESS) + 4 * u64::from(number);
        self.registers.write32(offset, address as u32);
    }

    /// Returns all memory BARs.
    fn all_bars(&self) -> Vec<Bar, { BARS as usize }> {
        let mut bars = Vec::new();
        if self.layout() != 0 {
            return bars;
        }
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
            if length.is_power_of_two() {
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
        msi_x_table(|offset| self.read(offset))
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

    /// Enables memory decoding and interrupts by this message. Returns `false` if the function
    /// cannot send messages.
    pub fn enable(&self, bars: &[Bar], address: u64, data: u32) -> bool {
        // The MSI-X table is in its registers.
        self.change_command(command::MEMORY | command::NO_LINE, command::IO | command::BUS_MASTER);
        self.set_message(bars, address, data)
    }

    /// Returns the interrupt of its line (INTx). `None`: it has none, or the firmware describes no
    /// lines; those of functions behind bridges are not searched.
    pub fn line(&self) -> Option<Line> {
        let pin = self.registers.read8(register::INTERRUPT_PIN.into());
        let is_direct = platform::pci_host(self.boot)?.buses.0 == self.address.bus;
        platform::pci_line(self.boot, self.address.device, pin).filter(|_| is_direct && pin != 0)
    }

    /// Enables memory decoding and the interrupt by line.
    pub fn enable_line(&self) {
        for (id, enable) in [(capability::MSI_X, msi_x::ENABLE), (capability::MSI, msi::ENABLE)] {
            let Some(at) = self.capability(id) else { continue };
            let control = u64::from(at) + 2;
            let value = self.registers.read16(control);
            self.registers.write16(control, value & !enable);
        }
        const OFF: u16 = command::IO | command::BUS_MASTER | command::NO_LINE;
        self.change_command(command::MEMORY, OFF);
    }

    /// Enables bus mastering. The function may continue what an earlier server has begun, so the
    /// IOMMU must permit it what that one could access.
    pub fn start(&self) {
        self.change_command(command::BUS_MASTER, 0);
    }

    /// Disables bus mastering, memory decoding and the interrupt by line. Returns `false` if the
    /// function reports that they are still on.
    pub fn disable(&self) -> bool {
        const ON: u16 = command::MEMORY | command::BUS_MASTER;
        self.change_command(command::NO_LINE, ON);
        self.registers.read16(register::COMMAND.into()) & ON == 0
    }
}

/// Returns where registers of a length in bytes (a power of two) have room from `next` on.
fn place(next: u64, length: u64, end: u64) -> Option<u64> {
    let place = next.checked_next_multiple_of(length.max(PAGE_SIZE))?;
    place.checked_add(length).is_some_and(|after| after <= end).then_some(place)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn registers_get_whole_pages() {
        assert_eq!(place(0x1000_0000, 0x4000, 0x2000_0000), Some(0x1000_0000));
        assert_eq!(place(0x1000_0020, 0x20, 0x2000_0000), Some(0x1000_1000));
        assert_eq!(place(0x1000_1000, 0x4000, 0x2000_0000), Some(0x1000_4000));
        assert_eq!(place(0x1fff_e000, 0x4000, 0x2000_0000), None);
        assert_eq!(place(u64::MAX - 1, 0x4000, u64::MAX), None);
    }

    #[test]
    fn small_registers_have_the_rest_of_their_page() {
        let bar = Bar { number: 5, base: 0x1000_0000, length: 0x800 };
        for (address, is_there) in
            [(0xfff_ffff, false), (0x1000_0000, true), (0x1000_0800, true), (0x1000_1000, false)]
        {
            assert_eq!(bar.has_in_its_pages(address), is_there, "{address:#x}");
        }
        let next = Bar { base: 0x1000_0800, ..bar };
        assert!(next.has_in_its_pages(0x1000_0000) && !next.has_in_its_pages(0x1000_1000));
        let last = Bar { base: u64::MAX - 0x7ff, ..bar };
        assert!(last.has_in_its_pages(u64::MAX - 1));
    }
}
