//! Accesses to the PCI bus: configuration space and windows of functions.
//!
//! They take the lock of the function only, that of the board for its effects.

use spin::relax::RelaxStrategy;
use vmm_bus::{Access, Env};
use vmm_dev::pci;
use vmm_dev::pci::{ConfigTarget, Function};

use super::cpu_bus::CpuBus;
use crate::functions::{Functions, MAX_FUNCTIONS, Place, second_function, slot_of};
use crate::interrupts::{ChipEnv, FUNCTIONS};
use crate::{Host, layout};

/// Enabled windows of functions by address: first address, length, slot. Where a guest lets windows
/// overlap, accesses may find none of them.
#[derive(Default)]
pub(super) struct Windows {
    sorted: [(u64, u64, usize); MAX_FUNCTIONS],
    count: usize,
}

impl Windows {
    /// Slot of the function with a window at `address`, and the offset in the window.
    fn find(&self, address: u64) -> Option<(usize, u64)> {
        let known = &self.sorted[..self.count];
        let after = known.partition_point(|&(base, ..)| base <= address);
        let &(base, length, slot) = known.get(after.checked_sub(1)?)?;
        (address - base < length).then_some((slot, address - base))
    }

    /// Replaces the window of a slot.
    fn set(&mut self, slot: usize, window: Option<(u64, u64)>) {
        let known = &mut self.sorted[..self.count];
        if let Some(old) = known.iter().position(|&(.., of)| of == slot) {
            known[old..].rotate_left(1);
            self.count -= 1;
        }
        if let (Some((base, length)), Some(end)) = (window, self.sorted.get_mut(self.count)) {
            *end = (base, length, slot);
            self.count += 1;
            let known = &mut self.sorted[..self.count];
            let place = known.iter().position(|&(other, ..)| other >= base).unwrap_or(0);
            known[place..].rotate_right(1);
        }
    }
}

impl<H: Host, R: RelaxStrategy, const CPUS: usize, P: Functions> CpuBus<'_, '_, H, R, CPUS, P> {
    /// Calls the function in a slot, unless the slot is empty.
    pub(super) fn with_function<T>(
        &mut self,
        slot: usize,
        call: impl FnOnce(&mut dyn Function, &mut dyn Env) -> T,
    ) -> Option<T> {
        let (result, needs_service) = self.pc.with_function(slot, self.host, self.cpu, call)?;
        self.needs_service |= needs_service;
        Some(result)
    }

    /// Calls the function with a configuration space, which may be the host bridge.
    fn with_config<T>(
        &mut self,
        target: ConfigTarget,
        call: impl FnOnce(&mut dyn Function, &mut dyn Env) -> T,
    ) -> Option<T> {
        match slot_of(target) {
            Place::Slot(slot) => self.with_function(slot, call),
            Place::Bridge => Some(self.locked(|board| {
                let router = &mut board.machine.router;
                let mut env = ChipEnv { router, host: &mut *board.host, chip: FUNCTIONS };
                call(&mut board.machine.bridge, &mut env)
            })),
            Place::None => None,
        }
    }

    /// Bits of the header type that function 0 of a device with two functions reads as.
    fn multifunction(&mut self, target: ConfigTarget) -> u64 {
        let bits = target.multifunction();
        match slot_of(target) {
            Place::Slot(slot) if bits != 0 => {
                let second = second_function(slot);
                second.and_then(|slot| self.with_function(slot, |_, _| bits)).unwrap_or(0)
            }
            _ => 0,
        }
    }

    /// Reads from configuration space.
    fn config_read(&mut self, target: Option<ConfigTarget>, size: u8) -> u64 {
        let read = target.and_then(|target| {
            let read = self.with_config(target, |function, env| target.read(Some(function), env));
            read.map(|value| value | self.multifunction(target))
        });
        read.unwrap_or(Access::new(0, size).open_bus())
    }

    /// Writes to configuration space.
    fn config_write(&mut self, target: Option<ConfigTarget>, value: u64) {
        let Some(target) = target else { return };
        let windows = &self.pc.windows;
        self.with_config(target, |function, env| {
            target.write(value, Some(function), env);
            // A base address or the enable flag may have changed; the bridge has no window.
            if let Place::Slot(slot) = slot_of(target)
                && target.offset < pci::spec::HEADER_END
            {
                windows.lock().set(slot, function.window());
            }
        });
    }

    /// Decodes an access to the PCI configuration ports, if it is one.
    fn config_port(&mut self, port: u16, size: u8) -> Option<ConfigPort> {
        let offset = port.wrapping_sub(layout::PCI_ADDRESS);
        if offset >= 8 || self.pc.functions.slots() == 0 {
            return None;
        }
        match offset {
            0 if size == 4 => Some(ConfigPort::Address),
            4.. if offset + u16::from(size) <= 8 => {
                let address = self.locked(|board| board.machine.config_address);
                Some(ConfigPort::Data(address.target(u64::from(offset) - 4, size)))
            }
            _ => None,
        }
    }

    /// Reads a PCI configuration port; `None` for other ports or without PCI.
    #[inline]
    pub(super) fn config_in(&mut self, port: u16, size: u8) -> Option<u32> {
        if port & !7 == layout::PCI_ADDRESS { self.read_config_port(port, size) } else { None }
    }

    // Not inlined: other ports are more frequent.
    #[inline(never)]
    fn read_config_port(&mut self, port: u16, size: u8) -> Option<u32> {
        Some(match self.config_port(port, size)? {
            ConfigPort::Address => self.locked(|board| board.machine.config_address.get()),
            ConfigPort::Data(target) => self.config_read(target, size) as u32,
        })
    }

    /// Writes a PCI configuration port; `None` for other ports or without PCI.
    #[inline]
    pub(super) fn config_out(&mut self, port: u16, size: u8, value: u32) -> Option<()> {
        if port & !7 == layout::PCI_ADDRESS {
            self.write_config_port(port, size, value)
        } else {
            None
        }
    }

    #[inline(never)]
    fn write_config_port(&mut self, port: u16, size: u8, value: u32) -> Option<()> {
        match self.config_port(port, size)? {
            ConfigPort::Address => self.locked(|board| board.machine.config_address.set(value)),
            ConfigPort::Data(target) => self.config_write(target, value.into()),
        }
        Some(())
    }

    /// True if the address belongs to the PCI of the board, if it has PCI.
    pub(super) fn in_pci(&self, address: u64) -> bool {
        let end = u64::from(layout::ECAM) + pci::spec::ECAM_LEN;
        (layout::PCI_WINDOW.into()..end).contains(&address) && self.pc.functions.slots() != 0
    }

    /// Reads an address of PCI.
    pub(super) fn pci_read(&mut self, address: u64, size: u8) -> u64 {
        let mut value = 0;
        for part in parts(address, size) {
            let access = Access::new(part.address, part.size);
            let config = part.address.wrapping_sub(layout::ECAM.into());
            let window = self.pc.windows.lock().find(part.address);
            let read = if config < pci::spec::ECAM_LEN {
                self.config_read(pci::ecam(config, part.size), part.size)
            } else if let Some((slot, offset)) = window {
                let access = Access::new(offset, part.size);
                self.with_function(slot, |function, env| function.read(access, env))
                    .unwrap_or(access.open_bus())
            } else {
                self.no_window(part.address);
                access.open_bus()
            };
            value |= (read & access.open_bus()) << part.shift;
        }
        value
    }

    /// Writes an address of PCI.
    pub(super) fn pci_write(&mut self, address: u64, size: u8, value: u64) {
        for part in parts(address, size) {
            let value = value >> part.shift & Access::new(0, part.size).open_bus();
            let config = part.address.wrapping_sub(layout::ECAM.into());
            let window = self.pc.windows.lock().find(part.address);
            if config < pci::spec::ECAM_LEN {
                self.config_write(pci::ecam(config, part.size), value);
            } else if let Some((slot, offset)) = window {
                let access = Access::new(offset, part.size);
                self.with_function(slot, |function, env| function.write(access, value, env));
            } else {
                self.no_window(part.address);
            }
        }
    }

    /// Reports an address of PCI without a device.
    #[cold]
    fn no_window(&mut self, address: u64) {
        let slots = self.pc.functions.slots();
        let is_memory = |slot| {
            self.with_function(slot, |function, _| function.is_memory(address)) == Some(true)
        };
        if !(0..slots).any(is_memory) {
            self.locked(|board| board.unknown_memory(address));
        }
    }
}

/// Meaning of an access to the PCI configuration ports.
enum ConfigPort {
    Address,
    /// A configuration register; `None` if it does not exist.
    Data(Option<ConfigTarget>),
}

/// A naturally aligned part of an access, of at most four bytes.
pub(super) struct Part {
    pub(super) address: u64,
    pub(super) size: u8,
    /// Position of its bits in the value.
    pub(super) shift: u32,
}

/// Parts of an access of at most eight bytes.
pub(super) fn parts(address: u64, size: u8) -> impl Iterator<Item = Part> {
    let size = size.min(8);
    let mut done = 0;
    core::iter::from_fn(move || {
        let left = size - done;
        let at = address.wrapping_add(done.into());
        let fits = |width: &u8| *width <= left && at.is_multiple_of((*width).into());
        let width = [4, 2, 1].into_iter().find(fits)?;
        let shift = 8 * u32::from(done);
        done += width;
        Some(Part { address: at, size: width, shift })
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn windows_are_found_by_address() {
        let mut windows = Windows::default();
        for (slot, base) in [(0, 0x3000), (1, 0x1000), (2, 0x2000)] {
            windows.set(slot, Some((base, 0x1000)));
        }
        let find = |windows: &Windows, address| windows.find(address);
        assert_eq!([0xfff, 0x4000].map(|address| find(&windows, address)), [None; 2]);
        assert_eq!(
            [0x1000, 0x2fff, 0x3008].map(|address| find(&windows, address)),
            [Some((1, 0)), Some((2, 0xfff)), Some((0, 8))]
        );
        // Moved, disabled.
        windows.set(1, Some((0x9000, 0x10)));
        windows.set(2, None);
        assert_eq!([0x1000, 0x2000, 0x9010].map(|address| find(&windows, address)), [None; 3]);
        assert_eq!([0x3000, 0x9000].map(|a| find(&windows, a)), [Some((0, 0)), Some((1, 0))]);
        for slot in 0..MAX_FUNCTIONS {
            windows.set(slot, Some((0x10_0000 - slot as u64, 1)));
        }
        assert_eq!(find(&windows, 0x10_0000), Some((0, 0)));
    }
}
