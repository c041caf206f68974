//! Device registers in memory, and memory that this task shares with devices and other tasks.

use core::sync::atomic::AtomicU64;

use abi::PAGE_SIZE;
use hw_arm64::pl011;
use hw_tables::virtio_mmio;
use proto::channel::{MAX_VM_CHANNELS, SHARE_BYTES, SHARES};
use proto::start::{PassThroughKind, Range, RangeKind, Start};

use crate::memory::Window;

/// Maximum number of reads until a device has stopped.
const STOP_READS: u32 = 100_000;

/// Registers of a device in memory. Each access is one load or store of exactly the given size.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeviceRegisters {
    base: u64,
    length: u64,
}

macro_rules! accesses {
    ($($read:ident $write:ident $type:ident;)+) => {
        $(
            /// Reads the register at an offset; returns all ones beyond the range and if the offset
            /// is not a multiple of the size.
            #[inline]
            pub fn $read(self, offset: u64) -> $type {
                let Some(address) = self.address(offset, size_of::<$type>() as u64) else { return $type::MAX };
                // SAFETY: root mapped device memory here, which holds no Rust object; the address
                // is aligned.
                unsafe { core::ptr::with_exposed_provenance::<$type>(address).read_volatile() }
            }

            /// Writes the register at an offset. Ignores a write beyond the range or at an offset
            /// that is not a multiple of the size.
            #[inline]
            pub fn $write(self, offset: u64, value: $type) {
                let Some(address) = self.address(offset, size_of::<$type>() as u64) else { return };
                // SAFETY: as above.
                unsafe { core::ptr::with_exposed_provenance_mut::<$type>(address).write_volatile(value) }
            }
        )+
    };
}

impl DeviceRegisters {
    /// Registers at `base..base + length`, where `base` is a multiple of 8.
    ///
    /// # Safety
    /// Device memory is mapped there, writable if anything is written, and stays so.
    pub(crate) const unsafe fn new(base: u64, length: u64) -> Self {
        Self { base, length }
    }

    /// Length in bytes.
    pub const fn length(self) -> u64 {
        self.length
    }

    /// Returns the `length` bytes of registers from `offset`, a multiple of 8; `None` if the range
    /// is shorter.
    pub fn part(self, offset: u64, length: u64) -> Option<Self> {
        let end = offset.checked_add(length)?;
        let fits = end <= self.length && offset.is_multiple_of(8);
        fits.then_some(Self { base: self.base + offset, length })
    }

    /// Makes a device of this kind neither interrupt nor access memory. Returns `false` if it
    /// reports that it still does, and for a PCI function, which only root can stop.
    pub fn stop(self, kind: PassThroughKind) -> bool {
        let register = match kind {
            PassThroughKind::Pci => return false,
            PassThroughKind::Virtio => virtio_mmio::STATUS,
            PassThroughKind::Pl011 => pl011::INTERRUPT_MASK as u64,
        };
        self.write32(register, 0);
        becomes_zero(|| self.read32(register))
    }

    fn address(self, offset: u64, size: u64) -> Option<usize> {
        let fits = offset.checked_add(size)? <= self.length && offset.is_multiple_of(size);
        fits.then_some((self.base + offset) as usize)
    }

    accesses! {
        read8 write8 u8;
        read16 write16 u16;
        read32 write32 u32;
        read64 write64 u64;
    }
}

/// Returns whether a register reads as 0 within [`STOP_READS`] reads: a virtio device may take time
/// for its reset, and shows its completion there (virtio 1.2, section 2.4.1).
fn becomes_zero(mut read: impl FnMut() -> u32) -> bool {
    (0..STOP_READS).any(|_| read() == 0)
}

/// A contiguous range of memory that another task or a device accesses concurrently.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shared {
    window: Window,
    physical: u64,
}

impl Shared {
    /// Returns the memory as a window to copy to and from.
    pub const fn window(self) -> Window {
        self.window
    }

    /// Returns the address of the first byte as the device sees it.
    pub const fn physical(self) -> u64 {
        self.physical
    }

    /// Returns the memory as words.
    pub fn words(self) -> &'static [AtomicU64] {
        let first = core::ptr::with_exposed_provenance(self.window.base() as usize);
        // SAFETY: the memory is mapped writable as long as the program runs, page-aligned, and
        // holds no Rust object except these words; other tasks and devices access it outside of
        // this program.
        unsafe { core::slice::from_raw_parts(first, (self.window.length() / 8) as usize) }
    }

    fn of(range: &Range) -> Self {
        // SAFETY: root keeps the range clear of the program's image, stack and pages.
        let window = unsafe { Window::new(range.base, range.length) };
        Self { window, physical: range.physical }
    }
}

fn ranges<'a>(start: &'a Start, kind: RangeKind) -> impl Iterator<Item = &'a Range> {
    start.ranges.iter().filter(move |range| range.kind == kind)
}

/// Memory of the task's sessions, in the order of their slots.
pub fn sessions(start: &Start) -> impl Iterator<Item = Shared> {
    ranges(start, RangeKind::Session).map(Shared::of)
}

/// Memory of a VMM's channels, in the order of the channels.
pub fn channels(start: &Start) -> impl Iterator<Item = Shared> {
    ranges(start, RangeKind::Channel).map(Shared::of)
}

/// Window for the peer's shares of a VMM's channel, one after the other. The VMM only delegates it:
/// root maps and revokes pages in it.
pub fn shares(channel: usize) -> Option<Window> {
    const LENGTH: u64 = SHARES as u64 * SHARE_BYTES;
    // SAFETY: root keeps the range clear of the program's image, stack and pages.
    (channel < MAX_VM_CHANNELS)
        .then(|| unsafe { Window::new(proto::start::shares(channel, 0), LENGTH) })
}

/// Memory that a server shares with its device (DMA).
pub fn dma(start: &Start) -> Option<Shared> {
    ranges(start, RangeKind::Dma).next().map(Shared::of)
}

fn register_range<'a>(start: &'a Start, number: u64) -> Option<&'a Range> {
    ranges(start, RangeKind::Registers).find(|range| range.physical == number)
}

/// Registers of base address range `number` of the task's device, or of a VMM's device `number`.
pub fn registers(start: &Start, number: u64) -> Option<DeviceRegisters> {
    let range = register_range(start, number)?;
    if !range.base.is_multiple_of(8) {
        return None;
    }
    // SAFETY: root maps the device there, writable, for as long as the task exists.
    Some(unsafe { DeviceRegisters::new(range.base, range.length) })
}

/// Registers of a base address register of a PCI function that a VMM's guest drives itself, to
/// delegate in parts: whole pages.
pub fn function_registers(start: &Start, device: usize, register: u8) -> Option<Window> {
    let range = register_range(start, proto::start::function_registers(device, register))?;
    // SAFETY: root maps the function there, which holds no Rust object.
    Some(unsafe { Window::new(range.base, range.length.next_multiple_of(PAGE_SIZE)) })
}

/// Page with the registers of range `number` of a VMM's devices, to delegate.
pub fn register_page(start: &Start, number: u64) -> Option<Window> {
    let range = register_range(start, number)?;
    // SAFETY: root maps the device there, which holds no Rust object.
    Some(unsafe { Window::new(range.base & !(PAGE_SIZE - 1), PAGE_SIZE) })
}

/// Offset in [`register_page`] and length of these registers, in bytes.
pub fn register_place(start: &Start, number: u64) -> Option<(u64, u64)> {
    let range = register_range(start, number)?;
    Some((range.base % PAGE_SIZE, range.length))
}

/// Read-only configuration space of a server's device, 0, or of a VMM's device `number`: a write
/// faults.
pub fn configuration(start: &Start, number: usize) -> Option<DeviceRegisters> {
    let of_device = |range: &&Range| range.physical == number as u64;
    let range = ranges(start, RangeKind::Configuration).find(of_device)?;
    // SAFETY: root maps it there as long as the task exists. A write faults, which ends the
    // program.
    Some(unsafe { DeviceRegisters::new(range.base, range.length) })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn accesses_stay_inside_and_aligned() {
        let memory = vec![0u64; 4].leak();
        // SAFETY: leaked memory of this length without other users.
        let registers = unsafe { DeviceRegisters::new(memory.as_mut_ptr() as u64, 32) };
        registers.write32(4, 0x1234_5678);
        assert_eq!(registers.read64(0), 0x1234_5678_0000_0000);
        assert_eq!(registers.read16(6), 0x1234);
        assert_eq!(registers.read8(7), 0x12);
        assert_eq!(registers.read32(30), u32::MAX, "beyond");
        assert_eq!(registers.read32(2), u32::MAX, "not aligned");
        assert_eq!(registers.read64(u64::MAX - 7), u64::MAX);
        registers.write64(32, 0);
        registers.write64(4, 0);
        let part = registers.part(8, 8).unwrap();
        assert_eq!(part.read64(8), u64::MAX);
        assert!(registers.part(8, 25).is_none());
        assert!(registers.part(4, 8).is_none());
        assert!(registers.part(u64::MAX, 2).is_none());
    }

    #[test]
    fn a_device_has_time_to_stop() {
        let reads_until_zero = |count: u32| {
            let mut left = count;
            move || {
                left = left.saturating_sub(1);
                left
            }
        };
        for (count, expected) in [(1, true), (2, true), (STOP_READS, true), (STOP_READS + 1, false)]
        {
            assert_eq!(becomes_zero(reads_until_zero(count)), expected, "{count}");
        }
    }
}
