//! The driver's side of virtio over PCI (VIRTIO 1.2, sections 2.7, 3.1 and 4.1), polled: just
//! enough to see that a device works, and open enough to do everything wrong.

use crate::pci::{BarWindow, Function};
use crate::ram::Ram;
use crate::smp;
use hw_tables::pci::capability;

/// Vendor of all devices.
const VENDOR: u16 = 0x1af4;
/// VirtioDevice of kind 0; the others follow.
const DEVICE: u16 = 0x1040;

/// Kinds of devices (section 5).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u16)]
pub enum Kind {
    /// Network card.
    Net = 1,
    /// Block device.
    Block = 2,
    /// Entropy source.
    Entropy = 4,
}

/// Registers of the common structure (section 4.1.4.3).
#[allow(missing_docs, reason = "the standard's names")]
pub mod common {
    pub const DEVICE_FEATURE_SELECT: u64 = 0x00;
    pub const DEVICE_FEATURE: u64 = 0x04;
    pub const DRIVER_FEATURE_SELECT: u64 = 0x08;
    pub const DRIVER_FEATURE: u64 = 0x0c;
    pub const NUM_QUEUES: u64 = 0x12;
    pub const STATUS: u64 = 0x14;
    pub const QUEUE_SELECT: u64 = 0x16;
    pub const QUEUE_SIZE: u64 = 0x18;
    pub const QUEUE_ENABLE: u64 = 0x1c;
    /// Descriptor table; the available and the used ring follow, 64 bits each.
    pub const QUEUE_ADDRESSES: u64 = 0x20;
    pub const LENGTH: u64 = 0x38;
}

/// Bits of the device status (section 2.1).
#[allow(missing_docs, reason = "the standard's names")]
pub mod status {
    pub const ACKNOWLEDGE: u8 = 1;
    pub const DRIVER: u8 = 2;
    pub const DRIVER_OK: u8 = 4;
    pub const FEATURES_OK: u8 = 8;
    pub const NEEDS_RESET: u8 = 0x40;
}

/// Feature: the device follows version 1.
pub const VERSION_1: u64 = 1 << 32;
/// Flags of descriptors (section 2.7.5).
pub const NEXT: u16 = 1;
/// The device writes.
pub const WRITE: u16 = 2;

/// Bytes that the rings of a queue take: descriptors, available ring and used ring, a page each.
pub const RING_BYTES: u64 = 3 << 12;
/// Entries of a queue.
pub const SIZE: u16 = 16;
/// Time limit of a request, in TSC ticks.
const PATIENCE: u64 = 60_000_000_000;

/// A device that was found.
#[derive(Clone, Copy, Debug)]
pub struct VirtioDevice {
    /// Its function.
    pub function: Function,
    /// Common structure.
    pub common: BarWindow,
    /// Notifications.
    pub notify: BarWindow,
    /// Configuration of this kind of device.
    pub config: BarWindow,
    /// MSI-X table.
    pub vectors: BarWindow,
    /// Distance of notification registers.
    notify_step: u64,
}

impl VirtioDevice {
    /// The first device of a kind, enabled.
    pub fn find(kind: Kind) -> Option<Self> {
        let function =
            Function::all().find(|function| function.id() == (VENDOR, DEVICE + kind as u16))?;
        function.enable();
        // Section 4.1.4: id, next, length, kind; base address register; offset; length.
        let structure = |wanted: u8| {
            let matches = |&(at, id): &(u16, u8)| {
                id == capability::VENDOR && function.read(at) >> 24 == u32::from(wanted)
            };
            let (at, _) = function.capabilities().find(matches)?;
            let (offset, length) = (function.read(at + 8), function.read(at + 12));
            let window =
                function.window(function.read(at + 4) as u8, offset.into(), length.into())?;
            Some((window, function.read(at + 16)))
        };
        let (notify, notify_step) = structure(2)?;
        Some(Self {
            function,
            common: structure(1)?.0,
            notify,
            config: structure(4)?.0,
            vectors: function.vectors()?,
            notify_step: notify_step.into(),
        })
    }

    /// VirtioDevice status.
    pub fn status(&self) -> u8 {
        self.common.read(common::STATUS)
    }

    /// Number of queues.
    pub fn queues(&self) -> u16 {
        self.common.read(common::NUM_QUEUES)
    }

    /// Says that a queue has something.
    pub fn notify(&self, queue: u16) {
        let offset = u64::from(queue) * self.notify_step;
        if offset + 2 <= self.notify.length() {
            self.notify.write(offset, queue);
        }
    }

    /// The features that it offers.
    pub fn offered(&self) -> u64 {
        (0..2).fold(0, |all, word: u32| {
            self.common.write(common::DEVICE_FEATURE_SELECT, word);
            all | u64::from(self.common.read::<u32>(common::DEVICE_FEATURE)) << (32 * word)
        })
    }

    /// Chooses features.
    pub fn choose(&self, features: u64) {
        for word in 0..2u32 {
            self.common.write(common::DRIVER_FEATURE_SELECT, word);
            self.common.write(common::DRIVER_FEATURE, (features >> (32 * word)) as u32);
        }
    }

    /// Sets the addresses of the selected queue's parts.
    pub fn place_queue(&self, parts: [u64; 3]) {
        for (part, address) in parts.into_iter().enumerate() {
            let at = common::QUEUE_ADDRESSES + 8 * part as u64;
            self.common.write(at, address as u32);
            self.common.write(at + 4, (address >> 32) as u32);
        }
    }

    /// Resets the device and makes it ready, with those of the features that it offers, its queues
    /// in `ram` ([`RING_BYTES`] each). `None`: it does not become ready.
    pub fn set_up(&self, features: u64, ram: Ram) -> Option<Queues> {
        self.common.write(common::STATUS, 0u8);
        if !smp::wait(PATIENCE, || self.status() == 0) {
            return None;
        }
        let known = status::ACKNOWLEDGE | status::DRIVER;
        self.common.write(common::STATUS, known);
        self.choose(self.offered() & (features | VERSION_1));
        self.common.write(common::STATUS, known | status::FEATURES_OK);
        for queue in 0..self.queues() {
            self.common.write(common::QUEUE_SELECT, queue);
            self.common.write(common::QUEUE_SIZE, SIZE);
            let rings = ram.part(u64::from(queue) * RING_BYTES, RING_BYTES);
            for address in (rings.start()..rings.end()).step_by(8) {
                rings.write(address, 0u64);
            }
            let start = rings.start();
            self.place_queue([start, start + 0x1000, start + 0x2000]);
            self.common.write(common::QUEUE_ENABLE, 1u16);
        }
        let ready = known | status::FEATURES_OK | status::DRIVER_OK;
        self.common.write(common::STATUS, ready);
        (self.status() == ready).then_some(Queues { device: *self, ram, offered: [0; 3] })
    }
}

/// A part of a chain: address, length, whether the device writes.
pub type Buffer = (u64, u32, bool);

/// The queues of a device that is ready, each used for one chain at a time.
#[derive(Clone, Copy, Debug)]
pub struct Queues {
    device: VirtioDevice,
    ram: Ram,
    /// Chains offered, by queue.
    offered: [u16; 3],
}

impl Queues {
    /// Lets the device do what a chain of at most [`SIZE`] buffers says, and waits. Gives the
    /// number of bytes that it says to have written; `None`: it does not answer.
    pub fn request(&mut self, queue: u16, buffers: &[Buffer]) -> Option<u32> {
        let rings = self.ram.part(u64::from(queue) * RING_BYTES, RING_BYTES);
        let (descriptors, available) = (rings.start(), rings.start() + 0x1000);
        let used = rings.start() + 0x2000;
        for (index, &(address, length, write)) in (0u16..).zip(buffers) {
            let at = descriptors + 16 * u64::from(index);
            let last = usize::from(index) + 1 == buffers.len();
            rings.write(at, address);
            rings.write(at + 8, length);
            rings.write(at + 12, if write { WRITE } else { 0 } | if last { 0 } else { NEXT });
            rings.write(at + 14, index + 1);
        }
        let count = self.offered.get_mut(usize::from(queue))?;
        let slot = u64::from(*count % SIZE);
        rings.write(available + 4 + 2 * slot, 0u16);
        *count = count.wrapping_add(1);
        let count = *count;
        rings.write(available + 2, count);
        self.device.notify(queue);
        smp::wait(PATIENCE, || rings.read::<u16>(used + 2) == count)
            .then(|| rings.read(used + 4 + 8 * slot + 4))
    }
}
