//! PCI: the host bridge of bus 0, and the common part of its functions.
//!
//! A function implements [`Function`]: its configuration space, and through [`Device`] the
//! registers of its first memory window; further windows are memory that its back end maps. The
//! board assigns device numbers and routes accesses. [`ConfigAddress`] and [`ecam`] decode accesses
//! of configuration space; [`Bridge`] is the host bridge as a function.
//!
//! State: the configuration address; of each function its header.
//! Features: configuration mechanism 1 and memory-mapped configuration of one bus; functions with
//! up to three windows of 32-bit memory; capabilities; MSI-X ([`self::msix`]).
//! Missing: bridges and further buses, I/O windows, expansion ROMs, interrupt pins, power
//! management, the extended configuration space (reads as 0).
//! Documentation: PCI Local Bus 3.0, chapter 6 and section 3.2.2.3.2; PCI Express Base 4.0, section
//! 7.2.2; QEMU `docs/specs/pci-ids.rst` (identity of the bridge).

pub mod msix;
pub mod pass_through;

use vmm_bus::{Access, Device, Env};

/// Registers and identities.
pub mod spec {
    /// Port of the configuration address, from the first of the 8 ports.
    pub const ADDRESS: u64 = 0;
    /// Port of the configuration data: a window of the selected register.
    pub const DATA: u64 = 4;
    /// Configuration address: data ports access configuration space.
    pub const ENABLE: u32 = 1 << 31;
    /// Configuration address: implemented bits.
    pub const ADDRESS_MASK: u32 = ENABLE | 0x00ff_fffc;

    /// Device and vendor.
    pub const ID: u16 = 0x00;
    /// Status and command.
    pub const COMMAND: u16 = 0x04;
    /// Class code and revision.
    pub const CLASS: u16 = 0x08;
    /// Self-test, header type, latency and cache line.
    pub const HEADER_TYPE: u16 = 0x0c;
    /// Header type: the device has functions besides function 0.
    pub const MULTIFUNCTION: u32 = 1 << 23;
    /// First base address.
    pub const BAR: u16 = 0x10;
    /// Third base address.
    pub const BAR_2: u16 = 0x18;
    /// Fifth base address.
    pub const BAR_4: u16 = 0x20;
    /// Base address: reads have no effect, so the memory may be cached.
    pub const PREFETCHABLE: u32 = 1 << 3;
    /// Subsystem and its vendor.
    pub const SUBSYSTEM: u16 = 0x2c;
    /// First capability.
    pub const CAPABILITIES: u16 = 0x34;
    /// Interrupt pin and line.
    pub const INTERRUPT: u16 = 0x3c;
    /// End of the header.
    pub const HEADER_END: u16 = 0x40;
    /// End of the configuration space of conventional PCI.
    pub const END: u16 = 0x100;

    /// Command: the window is enabled.
    pub const MEMORY: u16 = 1 << 1;
    /// Command: the function may write memory and send messages.
    pub const MASTER: u16 = 1 << 2;
    /// Command: no interrupts by pin.
    pub const NO_INTX: u16 = 1 << 10;
    /// Status: there is a list of capabilities.
    pub const HAS_CAPABILITIES: u32 = 1 << 20;

    /// Bus, device, function and register in an address of memory-mapped configuration space.
    pub const ECAM_LEN: u64 = 1 << 20;
    /// Devices of a bus.
    pub const DEVICES: u8 = 32;

    /// "Generic PCIe host bridge" and its vendor.
    pub const BRIDGE_ID: u32 = 0x0008_1b36;
    /// Class: host bridge.
    pub const BRIDGE_CLASS: u32 = 0x06_0000;
}
use spec::*;

/// A function of a PCI device. Its [`Device`] side are the registers of its window, at offsets from
/// the window's start.
pub trait Function: Device {
    /// Reads the 32-bit register at `register`, a multiple of 4 below [`END`].
    fn config_read(&mut self, register: u16, env: &mut dyn Env) -> u32;
    /// Writes the bits `mask` of the register at `register`.
    fn config_write(&mut self, register: u16, value: u32, mask: u32, env: &mut dyn Env);
    /// Window of registers while enabled: first guest-physical address and length.
    fn window(&self) -> Option<(u64, u64)>;
    /// True if an address is in a window of memory. Accesses reach the VMM only while no memory is
    /// mapped there: reads return all ones, writes are dropped.
    fn is_memory(&self, _address: u64) -> bool {
        false
    }
}

/// Bytes of configuration space that an access means: `size` bytes within one 32-bit register.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ConfigTarget {
    /// Device number on bus 0.
    pub device: u8,
    /// Function of the device.
    pub function: u8,
    /// First byte.
    pub offset: u16,
    /// Bytes.
    pub size: u8,
}

impl ConfigTarget {
    /// Reads from the function, if it exists.
    pub fn read(self, function: Option<&mut dyn Function>, env: &mut dyn Env) -> u64 {
        let access = Access::new(self.offset.into(), self.size);
        let Some(function) = function else { return access.open_bus() };
        if self.offset >= END {
            return 0;
        }
        let value = function.config_read(self.offset & !3, env);
        u64::from(value) >> self.shift() & access.open_bus()
    }

    /// Writes to the function, if it exists.
    pub fn write(self, value: u64, function: Option<&mut dyn Function>, env: &mut dyn Env) {
        if let Some(function) = function
            && self.offset < END
        {
            let mask = Access::new(0, self.size).open_bus() << self.shift();
            let value = value << self.shift();
            function.config_write(self.offset & !3, value as u32, mask as u32, env);
        }
    }

    fn shift(self) -> u32 {
        8 * u32::from(self.offset & 3)
    }

    /// Decodes a function of a device on bus 0, and an access within a register.
    fn of(address: u64, size: u8) -> Option<Self> {
        let (bus, device, function) = (address >> 20, address >> 15 & 0x1f, address >> 12 & 7);
        let offset = (address & 0xfff) as u16;
        let fits = (offset & 3) + u16::from(size) <= 4;
        let (device, function) = (device as u8, function as u8);
        (bus == 0 && fits).then_some(Self { device, function, offset, size })
    }

    /// Value of the bytes that say that the device has further functions: [`MULTIFUNCTION`] as far
    /// as the access includes it. The board adds it to what function 0 reads as.
    pub fn multifunction(self) -> u64 {
        if self.offset & !3 != HEADER_TYPE {
            return 0;
        }
        u64::from(MULTIFUNCTION) >> self.shift() & Access::new(0, self.size).open_bus()
    }
}

/// Address register of configuration mechanism 1, at the first four of the eight ports.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct ConfigAddress(u32);

impl ConfigAddress {
    /// The address, as it reads.
    pub fn get(self) -> u32 {
        self.0
    }

    /// Sets the address; only accesses of 32 bits are decoded.
    pub fn set(&mut self, value: u32) {
        self.0 = value & ADDRESS_MASK;
    }

    /// Decodes an access of `size` bytes at `offset` (0 to 3) in the data ports.
    pub fn target(self, offset: u64, size: u8) -> Option<ConfigTarget> {
        let register = u64::from(self.0 & 0xfc) | offset & 3;
        let place = u64::from(self.0 & !ENABLE & !0xff) << 4;
        (self.0 & ENABLE != 0).then(|| ConfigTarget::of(place | register, size)).flatten()
    }
}

/// Decodes an access at `offset` in the memory-mapped configuration space.
pub fn ecam(offset: u64, size: u8) -> Option<ConfigTarget> {
    ConfigTarget::of(offset, size)
}

/// A base address of memory, in addition to that of the registers.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Bar {
    /// Bytes, a power of two of at least 16; 0: not implemented.
    length: u32,
    base: u32,
    reset_base: u32,
}

impl Bar {
    /// Creates a base address of `length` bytes of memory, at `base` after power-on.
    pub const fn new(base: u32, length: u32) -> Self {
        Self { length, base, reset_base: base }
    }

    fn read(self) -> u32 {
        if self.length == 0 { 0 } else { self.base | PREFETCHABLE }
    }
}

/// Header of a function (type 0) with windows at most at the first, third and fifth base address.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Header {
    /// Device and vendor.
    pub id: u32,
    /// Class code, 24 bits.
    pub class: u32,
    /// Subsystem and its vendor.
    pub subsystem: u32,
    /// Offset of the first capability; 0: none.
    pub capabilities: u8,
    /// Bytes of the window, a power of two of at least 16; 0: none.
    pub window: u32,
    /// Memory at the third and fifth base address.
    pub memory: [Bar; 2],
    /// Revision.
    pub revision: u8,
    command: u16,
    base: u32,
    reset_base: u32,
    line: u8,
}

impl Header {
    /// Creates a function whose window is at `base` after power-on, disabled.
    pub const fn new(id: u32, class: u32, base: u32, window: u32) -> Self {
        Self {
            id,
            class,
            subsystem: 0,
            capabilities: 0,
            window,
            memory: [Bar::new(0, 0); 2],
            revision: 0,
            command: 0,
            base,
            reset_base: base,
            line: 0,
        }
    }

    /// Reads a register of the header.
    pub fn read(&self, register: u16) -> u32 {
        match register {
            ID => self.id,
            COMMAND => {
                let list = if self.capabilities != 0 { HAS_CAPABILITIES } else { 0 };
                u32::from(self.command) | list
            }
            CLASS => self.class << 8 | u32::from(self.revision),
            BAR => self.base,
            BAR_2 => self.memory[0].read(),
            BAR_4 => self.memory[1].read(),
            SUBSYSTEM => self.subsystem,
            CAPABILITIES => self.capabilities.into(),
            INTERRUPT => self.line.into(),
            _ => 0,
        }
    }

    /// Writes bits of a register of the header.
    pub fn write(&mut self, register: u16, value: u32, mask: u32) {
        let merge = |old: u32| old & !mask | value & mask;
        match register {
            COMMAND => {
                let writable = MEMORY | MASTER | NO_INTX;
                self.command = merge(self.command.into()) as u16 & writable;
            }
            // The bits below the size read as 0, which lets the guest probe the size.
            BAR if self.window != 0 => self.base = merge(self.base) & !(self.window - 1),
            BAR_2 | BAR_4 => {
                let bar = &mut self.memory[usize::from(register == BAR_4)];
                bar.base = merge(bar.base) & bar.length.wrapping_neg();
            }
            // Storage for the guest.
            INTERRUPT => self.line = merge(self.line.into()) as u8,
            _ => {}
        }
    }

    /// The window, while enabled.
    pub fn window(&self) -> Option<(u64, u64)> {
        let answers = self.window != 0 && self.command & MEMORY != 0;
        answers.then_some((self.base.into(), self.window.into()))
    }

    /// Address and length of memory `index`, while enabled.
    pub fn memory(&self, index: usize) -> Option<(u32, u32)> {
        let bar = self.memory.get(index)?;
        (bar.length != 0 && self.command & MEMORY != 0).then_some((bar.base, bar.length))
    }

    /// True if an address is in enabled memory.
    pub fn is_memory(&self, address: u64) -> bool {
        (0..self.memory.len())
            .filter_map(|index| self.memory(index))
            .any(|(base, length)| address.wrapping_sub(base.into()) < length.into())
    }

    /// True if the function may write memory and send messages.
    pub fn master(&self) -> bool {
        self.command & MASTER != 0
    }

    /// Restores the power-on state.
    pub fn reset(&mut self) {
        self.command = 0;
        self.base = self.reset_base;
        for bar in &mut self.memory {
            bar.base = bar.reset_base;
        }
        self.line = 0;
    }
}

/// The host bridge: device 0, without registers of its own.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Bridge {
    header: Header,
}

impl Default for Bridge {
    fn default() -> Self {
        Self::new()
    }
}

impl Bridge {
    /// Creates the bridge in its power-on state.
    pub const fn new() -> Self {
        Self { header: Header::new(BRIDGE_ID, BRIDGE_CLASS, 0, 0) }
    }
}

impl Device for Bridge {
    fn read(&mut self, access: Access, _: &mut dyn Env) -> u64 {
        access.open_bus()
    }

    fn write(&mut self, _: Access, _: u64, _: &mut dyn Env) {}

    fn wake(&mut self, _: u8, _: &mut dyn Env) {}

    fn reset(&mut self, _: &mut dyn Env) {
        self.header.reset();
    }
}

impl Function for Bridge {
    fn config_read(&mut self, register: u16, _: &mut dyn Env) -> u32 {
        self.header.read(register)
    }

    fn config_write(&mut self, register: u16, value: u32, mask: u32, _: &mut dyn Env) {
        self.header.write(register, value, mask);
    }

    fn window(&self) -> Option<(u64, u64)> {
        None
    }
}
