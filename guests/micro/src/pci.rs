//! PCI functions of bus 0: configuration space through the ports, registers in windows.

use crate::boot::MAPPED;
use crate::port;
use crate::ram::Word;
use hw_tables::pci::{self, DEVICES, MemoryBar, capability, command, msi_x, register};

/// Address of the configuration word to access, and that word (PCI Local Bus 3.0, section
/// 3.2.2.3.2).
const ADDRESS: u16 = 0xcf8;
const DATA: u16 = 0xcfc;
const ENABLE: u32 = 1 << 31;

/// Offset of a base address register.
pub const fn base_address(bar: u8) -> u16 {
    register::BASE_ADDRESS + 4 * bar as u16
}

/// Function 0 of a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Function(u8);

impl Function {
    /// Returns all functions of bus 0.
    pub fn all() -> impl Iterator<Item = Self> {
        (0..DEVICES).map(Self).filter(|function| function.id().0 != u16::MAX)
    }

    fn select(self, offset: u16) {
        port::write32(ADDRESS, ENABLE | u32::from(self.0) << 11 | u32::from(offset & 0xfc));
    }

    /// Reads the word of configuration space that an offset is in.
    pub fn read(self, offset: u16) -> u32 {
        self.select(offset);
        port::read32(DATA)
    }

    /// Writes a word of configuration space.
    pub fn write(self, offset: u16, value: u32) {
        self.select(offset);
        port::write32(DATA, value);
    }

    /// Vendor and device.
    pub fn id(self) -> (u16, u16) {
        let word = self.read(register::VENDOR);
        (word as u16, (word >> 16) as u16)
    }

    /// Lets it answer at its addresses and access memory.
    pub fn enable(self) {
        let word = self.read(register::COMMAND) & 0xffff;
        let wanted = command::MEMORY | command::BUS_MASTER;
        self.write(register::COMMAND, word | u32::from(wanted));
    }

    /// Offsets and ids of its capabilities.
    pub fn capabilities(self) -> impl Iterator<Item = (u16, u8)> {
        pci::capabilities(move |offset| self.read(offset))
    }

    /// Registers of a base address register, `length` bytes from `offset` on, if they can be
    /// reached.
    pub fn window(self, bar: u8, offset: u64, length: u64) -> Option<BarWindow> {
        let at = base_address(bar);
        let bar = MemoryBar::parse(self.read(at), self.read(at + 4))?;
        let start = bar.base.checked_add(offset)?;
        let reachable = bar.base != 0 && start.checked_add(length)? <= MAPPED;
        reachable.then_some(BarWindow { start, length })
    }

    /// Offset of the MSI-X capability.
    fn msi_x(self) -> Option<u16> {
        self.capabilities().find(|&(_, id)| id == capability::MSI_X).map(|(at, _)| at)
    }

    /// Table of MSI-X.
    pub fn vectors(self) -> Option<BarWindow> {
        let at = self.msi_x()?;
        let entries = u64::from((self.read(at) >> 16) as u16 & msi_x::SIZE) + 1;
        let table = self.read(at + msi_x::TABLE);
        self.window((table & 7) as u8, (table & !7).into(), entries * msi_x::ENTRY)
    }

    /// Turns MSI-X on.
    pub fn send_messages(self) {
        if let Some(at) = self.msi_x() {
            self.write(at, u32::from(msi_x::ENABLE) << 16);
        }
    }
}

/// Registers of a function, mapped at their addresses. A driver must give the device only addresses
/// of unused memory: this is all that makes accesses safe.
#[derive(Clone, Copy, Debug)]
pub struct BarWindow {
    start: u64,
    length: u64,
}

impl BarWindow {
    fn place<T: Word>(&self, offset: u64) -> *mut T {
        let length = size_of::<T>() as u64;
        let inside = offset.checked_add(length).is_some_and(|end| end <= self.length);
        assert!(inside && offset.is_multiple_of(length), "{offset:#x} is not in {self:x?}");
        (self.start + offset) as *mut T
    }

    /// Its first address.
    pub fn start(&self) -> u64 {
        self.start
    }

    /// Its length in bytes.
    pub fn length(&self) -> u64 {
        self.length
    }

    /// Reads a register.
    pub fn read<T: Word>(&self, offset: u64) -> T {
        // SAFETY: registers of a device, no memory of the program; aligned.
        unsafe { self.place::<T>(offset).read_volatile() }
    }

    /// Writes a register.
    pub fn write<T: Word>(&self, offset: u64, value: T) {
        // SAFETY: as in `read`; the caller is responsible for addresses that it gives to the
        // device.
        unsafe { self.place::<T>(offset).write_volatile(value) }
    }
}
