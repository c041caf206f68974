//! Reset of a PCI function between two guests that drive it.
//!
//! While a function is disabled and the IOMMU denies it everything, it can do no harm. The reset
//! makes it forget its queues, so that it does not continue with them for the next guest: by the
//! function itself (FLR; PCI Express Base 3.0, section 6.6.2), or else, for a virtio device, by its
//! status register (virtio 1.2, section 2.4). QEMU's virtio devices have no FLR on the root bus.

use hw_tables::pci::{BARS, capabilities, capability, command, express, register, virtio};
use native_rt::device::DeviceRegisters;
use native_rt::time;

use super::Function;

/// Configuration space and time, as far as a reset by the function needs them.
trait ResettableFunction {
    /// Reads the register at a multiple of 4.
    fn read(&self, offset: u16) -> u32;
    /// Writes the register at a multiple of 4.
    fn write(&mut self, offset: u16, value: u32);
    /// Writes the register at a multiple of 2.
    fn write_half(&mut self, offset: u16, value: u16);
    /// Waits until a condition is met, at most this long, in ns; returns whether it was.
    fn wait(&mut self, nanos: u64, until: impl FnMut(&Self) -> bool) -> bool;
}

/// Offset of the selection of 32 offered features, and of these, in the common configuration of a
/// virtio device (virtio 1.2, section 4.1.4.3).
const FEATURE_SELECT: u64 = 0;
const FEATURES: u64 = 4;
/// Of features 32 to 63, `VIRTIO_F_ACCESS_PLATFORM`: the device accesses memory through the IOMMU
/// (section 6). A device without it uses physical addresses.
const ACCESS_PLATFORM: u32 = 1 << 1;

/// Registers that the reset clears, and that a disabled function needs again: base addresses.
const KEPT: core::ops::Range<u16> =
    register::BASE_ADDRESS..register::BASE_ADDRESS + 4 * BARS as u16;

/// Resets a function that accesses no memory. `None`: it cannot be reset by itself. `Some(false)`:
/// it stays absent.
fn reset_by_function(function: &mut impl ResettableFunction) -> Option<bool> {
    let (at, _) =
        capabilities(|offset| function.read(offset)).find(|&(_, id)| id == capability::EXPRESS)?;
    if function.read(at + express::DEVICE_CAPABILITIES) & express::CAN_RESET == 0 {
        return None;
    }
    // Control and status are one word; a status bit changes by writing 1 only.
    let control = at + express::DEVICE_CONTROL;
    const PENDING: u32 = (express::PENDING as u32) << 16;
    // Requests that are still pending then get their answers after the reset, and are ignored.
    function.wait(express::RESET_TIME, |function| function.read(control) & PENDING == 0);
    let kept: [u32; BARS as usize] =
        core::array::from_fn(|index| function.read(KEPT.start + 4 * index as u16));
    let value = function.read(control) as u16;
    function.write_half(control, value | express::RESET);
    function.wait(express::RESET_TIME, |_| false);
    // A function that needs longer reads as absent.
    let is_there = |function: &_| ResettableFunction::read(function, 0) as u16 != u16::MAX;
    let is_back = function.wait(10 * express::RESET_TIME, is_there);
    for (offset, value) in KEPT.step_by(4).zip(kept) {
        function.write(offset, value);
    }
    Some(is_back)
}

/// Returns whether a virtio device accesses memory through the IOMMU only. `write` and `read`
/// access its common configuration.
fn is_translated(write: impl FnOnce(u64, u32), read: impl FnOnce(u64) -> u32) -> bool {
    write(FEATURE_SELECT, 1);
    // All ones: the device is absent.
    let features = read(FEATURES);
    features != u32::MAX && features & ACCESS_PLATFORM != 0
}

/// A function, and the frequency of the counter in kHz.
struct Timed<'f, 'a>(&'f Function<'a>, u64);

impl ResettableFunction for Timed<'_, '_> {
    fn read(&self, offset: u16) -> u32 {
        self.0.read(offset)
    }

    fn write(&mut self, offset: u16, value: u32) {
        self.0.registers.write32(offset.into(), value);
    }

    fn write_half(&mut self, offset: u16, value: u16) {
        self.0.registers.write16(offset.into(), value);
    }

    fn wait(&mut self, nanos: u64, mut until: impl FnMut(&Self) -> bool) -> bool {
        let end = time::tsc().saturating_add(time::ticks(self.1, nanos));
        loop {
            if until(self) {
                return true;
            }
            if time::tsc() >= end {
                return false;
            }
            native_rt::yield_now();
        }
    }
}

impl Function<'_> {
    /// Resets the function, which is disabled, and stays so; its base addresses are kept. Returns
    /// `false` if it cannot be reset, or stays absent.
    pub fn reset(&self) -> bool {
        let mut timed = Timed(self, self.boot.info.tsc_khz);
        let by_function = reset_by_function(&mut timed);
        let is_reset = by_function.unwrap_or_else(|| self.reset_virtio(&mut timed) == Some(true));
        self.disable() && is_reset
    }

    /// Returns whether the function, which is disabled, accesses memory through the IOMMU only:
    /// `false` also if it is no virtio device of version 1.
    pub fn is_translated(&self) -> bool {
        let Some((registers, at)) = self.virtio_common() else { return false };
        self.change_command(command::MEMORY, 0);
        let write = |offset, value| registers.write32(at + offset, value);
        let is_translated = is_translated(write, |offset| registers.read32(at + offset));
        self.change_command(0, command::MEMORY);
        is_translated
    }

    /// The registers of a virtio device with its common configuration, and their offset. `None`: it
    /// is none of version 1.
    fn virtio_common(&self) -> Option<(DeviceRegisters, u64)> {
        let is_common = |&(at, id): &(u16, u8)| {
            let kind = self.registers.read8(u64::from(at + virtio::KIND));
            id == capability::VENDOR && kind == virtio::COMMON
        };
        let (at, _) = capabilities(|offset| self.read(offset)).find(is_common)?;
        let bars = self.bars();
        let index = self.registers.read8(u64::from(at + virtio::BAR));
        let bar = bars.iter().find(|bar| bar.number == index)?;
        let registers = self.boot.registers(bar.base, bar.length)?;
        Some((registers, self.read(at + virtio::OFFSET).into()))
    }

    /// Resets a virtio device by its status. `None`: it is none of version 1.
    fn reset_virtio(&self, timed: &mut Timed) -> Option<bool> {
        let (registers, at) = self.virtio_common()?;
        let status = at + virtio::STATUS;
        self.change_command(command::MEMORY, 0);
        registers.write8(status, 0);
        Some(timed.wait(express::RESET_TIME, |_| registers.read8(status) == 0))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A function that is absent for `absent` polls after its reset.
    struct Fake {
        words: [u32; 64],
        absent: u32,
        waited: u64,
        resets: u32,
    }

    const AT: u16 = 0x40;

    fn fake(can_reset: bool) -> Fake {
        let mut words = [0; 64];
        words[0] = 0x1041_1af4;
        words[1] = 1 << 20;
        (words[4], words[5]) = (0x1000_000c, 8);
        words[0x34 / 4] = AT.into();
        words[usize::from(AT) / 4] = capability::EXPRESS.into();
        words[usize::from(AT) / 4 + 1] = if can_reset { express::CAN_RESET } else { 0 };
        // Pending, and a setting that stays.
        words[usize::from(AT) / 4 + 2] = u32::from(express::PENDING) << 16 | 0x2010;
        Fake { words, absent: 3, waited: 0, resets: 0 }
    }

    impl ResettableFunction for Fake {
        fn read(&self, offset: u16) -> u32 {
            let is_absent = self.resets != 0 && self.absent != 0;
            if is_absent { u32::MAX } else { self.words[usize::from(offset) / 4] }
        }

        fn write(&mut self, offset: u16, value: u32) {
            assert!(self.resets == 0 || self.waited >= 2 * express::RESET_TIME, "too early");
            self.words[usize::from(offset) / 4] = value;
        }

        fn write_half(&mut self, offset: u16, value: u16) {
            assert_eq!((offset, value), (AT + express::DEVICE_CONTROL, 0x2010 | express::RESET));
            self.words[4..10].fill(0);
            self.resets += 1;
        }

        fn wait(&mut self, nanos: u64, mut until: impl FnMut(&Self) -> bool) -> bool {
            for _ in 0..10 {
                if until(self) {
                    return true;
                }
                self.waited += nanos / 10;
                self.absent = self.absent.saturating_sub(u32::from(nanos > express::RESET_TIME));
            }
            false
        }
    }

    #[test]
    fn a_reset_waits_and_restores_the_base_addresses() {
        let mut function = fake(true);
        assert_eq!(reset_by_function(&mut function), Some(true));
        assert_eq!((function.resets, function.absent), (1, 0));
        assert_eq!(function.words[4..6], [0x1000_000c, 8]);
    }

    #[test]
    fn a_device_that_uses_physical_addresses_is_known() {
        // QEMU offers version 1 in any case; all ones: the device is absent.
        for (features, expected) in [(0b11, true), (0b01, false), (0, false), (u32::MAX, false)] {
            let mut selected = None;
            let write = |offset, value| selected = Some((offset, value));
            let read = |offset| if offset == FEATURES { features } else { 0 };
            assert_eq!(is_translated(write, read), expected, "{features:#x}");
            assert_eq!(selected, Some((FEATURE_SELECT, 1)));
        }
    }

    #[test]
    fn a_function_that_stays_away_or_cannot_be_reset_is_reported() {
        let mut function = Fake { absent: u32::MAX, ..fake(true) };
        assert_eq!(reset_by_function(&mut function), Some(false));
        let mut function = fake(false);
        assert_eq!(reset_by_function(&mut function), None);
        function.words[1] = 0;
        assert_eq!(reset_by_function(&mut function), None, "no capabilities");
        assert_eq!(function.resets, 0);
    }
}
