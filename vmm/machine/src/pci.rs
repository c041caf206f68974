//! A PCI bus of a board: its configuration space, and the windows of functions.
//!
//! Accesses take the lock of the function only, that of the board for its effects.

use spin::mutex::SpinMutex;
use spin::relax::RelaxStrategy;
use vmm_bus::{Access, Env};
use vmm_dev::pci;
use vmm_dev::pci::{ConfigTarget, Function};

use crate::functions::{MAX_FUNCTIONS, Place, second_function, slot_of};

/// Enabled windows of functions by address: first address, length, slot. Where a guest lets windows
/// overlap, accesses may find none of them.
#[derive(Default)]
pub(crate) struct Windows {
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

/// A board with a PCI bus, as seen by one vCPU while it runs.
pub(crate) trait PciBoard<'a> {
    /// Wait for the lock of the windows.
    type Relax: RelaxStrategy + 'a;
    /// First address of the memory-mapped configuration space.
    const ECAM: u64;

    /// Calls the function in a slot, unless the slot is empty.
    fn with_function<T>(
        &mut self,
        slot: usize,
        call: impl FnOnce(&mut dyn Function, &mut dyn Env) -> T,
    ) -> Option<T>;
    /// Calls the host bridge.
    fn with_bridge<T>(&mut self, call: impl FnOnce(&mut dyn Function, &mut dyn Env) -> T) -> T;
    /// Windows of functions. Their lock is taken inside of that of a function.
    fn windows(&self) -> &'a SpinMutex<Windows, Self::Relax>;
    /// Number of slots.
    fn slots(&self) -> usize;
    /// Reports an address without a device.
    fn unknown_address(&mut self, address: u64);

    /// Calls the function with a configuration space, which may be the host bridge.
    fn with_config<T>(
        &mut self,
        target: ConfigTarget,
        call: impl FnOnce(&mut dyn Function, &mut dyn Env) -> T,
    ) -> Option<T> {
        match slot_of(target) {
            Place::Slot(slot) => self.with_function(slot, call),
            Place::Bridge => Some(self.with_bridge(call)),
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
        let windows = self.windows();
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

    /// Reads an address of PCI.
    fn pci_read(&mut self, address: u64, size: u8) -> u64 {
        let mut value = 0;
        for part in parts(address, size) {
            let access = Access::new(part.address, part.size);
            let config = part.address.wrapping_sub(Self::ECAM);
            let window = self.windows().lock().find(part.address);
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
    fn pci_write(&mut self, address: u64, size: u8, value: u64) {
        for part in parts(address, size) {
            let value = value >> part.shift & Access::new(0, part.size).open_bus();
            let config = part.address.wrapping_sub(Self::ECAM);
            let window = self.windows().lock().find(part.address);
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
        let slots = self.slots();
        let is_memory = |slot| {
            self.with_function(slot, |function, _| function.is_memory(address)) == Some(true)
        };
        if !(0..slots).any(is_memory) {
            self.unknown_address(address);
        }
    }
}

/// A naturally aligned part of an access, of at most four bytes.
pub(crate) struct Part {
    pub(crate) address: u64,
    pub(crate) size: u8,
    /// Position of its bits in the value.
    pub(crate) shift: u32,
}

/// Parts of an access of at most eight bytes.
pub(crate) fn parts(address: u64, size: u8) -> impl Iterator<Item = Part> {
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
