//! Accesses to the PCI bus: configuration space and windows of functions.

use vmm_bus::Access;
use vmm_dev::pci;
use vmm_dev::pci::ConfigTarget;

use super::{Machine, PcBoard};
use crate::functions::Functions;
use crate::interrupts::{ChipEnv, FUNCTIONS};
use crate::{Host, layout};

impl<H: Host, const CPUS: usize, P: Functions> PcBoard<'_, '_, H, CPUS, P> {
    /// Slot of the function with a window at `address`, and the offset in the window.
    pub(super) fn function_at(&mut self, address: u64) -> Option<(usize, u64)> {
        let functions = &mut self.machine.pci.functions;
        (0..functions.slots()).find_map(|slot| {
            let (base, length) = functions.get(slot)?.0.window()?;
            let offset = address.wrapping_sub(base);
            (offset < length).then_some((slot, offset))
        })
    }

    /// Reads from configuration space.
    pub(super) fn config_read(&mut self, target: Option<ConfigTarget>, size: u8) -> u64 {
        let open_bus = Access::new(0, size).open_bus();
        let Some(target) = target else { return open_bus };
        match usize::from(target.device).checked_sub(1) {
            Some(slot) => {
                let read =
                    self.with_function(slot, |function, env| target.read(Some(function), env));
                read.unwrap_or(open_bus)
            }
            None => {
                let Machine { pci, router, .. } = &mut *self.machine;
                let mut env = ChipEnv { router, host: &mut *self.host, chip: FUNCTIONS };
                target.read(Some(&mut pci.bridge), &mut env)
            }
        }
    }

    /// Writes to configuration space.
    pub(super) fn config_write(&mut self, target: Option<ConfigTarget>, value: u64) {
        let Some(target) = target else { return };
        match usize::from(target.device).checked_sub(1) {
            Some(slot) => {
                self.with_function(slot, |function, env| target.write(value, Some(function), env));
            }
            None => {
                let Machine { pci, router, .. } = &mut *self.machine;
                let mut env = ChipEnv { router, host: &mut *self.host, chip: FUNCTIONS };
                target.write(value, Some(&mut pci.bridge), &mut env);
            }
        }
    }

    /// Decodes an access to the PCI configuration ports, if it is one.
    #[inline]
    pub(super) fn config_port(&self, port: u16, size: u8) -> Option<ConfigPort> {
        let offset = port.wrapping_sub(layout::PCI_ADDRESS);
        if offset >= 8 || self.machine.pci.functions.slots() == 0 {
            return None;
        }
        match offset {
            0 if size == 4 => Some(ConfigPort::Address),
            4.. if offset + u16::from(size) <= 8 => {
                let target = self.machine.pci.address.target(u64::from(offset) - 4, size);
                Some(ConfigPort::Data(target))
            }
            _ => None,
        }
    }

    /// True if the address belongs to the PCI of the board, if it has PCI.
    pub(super) fn in_pci(&self, address: u64) -> bool {
        let end = u64::from(layout::ECAM) + pci::spec::ECAM_LEN;
        (layout::PCI_WINDOW.into()..end).contains(&address)
            && self.machine.pci.functions.slots() != 0
    }

    /// Reads an address of PCI; `None` for other addresses or without PCI.
    pub(super) fn pci_read(&mut self, address: u64, size: u8) -> Option<u64> {
        self.in_pci(address).then(|| {
            let mut value = 0;
            for part in parts(address, size) {
                let access = Access::new(part.address, part.size);
                let config = part.address.wrapping_sub(layout::ECAM.into());
                let read = if config < pci::spec::ECAM_LEN {
                    self.config_read(pci::ecam(config, part.size), part.size)
                } else if let Some((slot, offset)) = self.function_at(part.address) {
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
        })
    }

    /// Writes an address of PCI; `false` for other addresses or without PCI.
    pub(super) fn pci_write(&mut self, address: u64, size: u8, value: u64) -> bool {
        if !self.in_pci(address) {
            return false;
        }
        for part in parts(address, size) {
            let value = value >> part.shift & Access::new(0, part.size).open_bus();
            let config = part.address.wrapping_sub(layout::ECAM.into());
            if config < pci::spec::ECAM_LEN {
                self.config_write(pci::ecam(config, part.size), value);
            } else if let Some((slot, offset)) = self.function_at(part.address) {
                let access = Access::new(offset, part.size);
                self.with_function(slot, |function, env| function.write(access, value, env));
            } else {
                self.no_window(part.address);
            }
        }
        true
    }

    /// Reports an address of PCI without a device.
    #[cold]
    pub(super) fn no_window(&mut self, address: u64) {
        let functions = &mut self.machine.pci.functions;
        let absent = (0..functions.slots()).any(|slot| {
            functions.get(slot).is_some_and(|(function, _)| function.is_memory(address))
        });
        if !absent {
            self.unknown_memory(address);
        }
    }
}

/// Meaning of an access to the PCI configuration ports.
pub(super) enum ConfigPort {
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
