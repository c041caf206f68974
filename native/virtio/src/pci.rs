//! Modern transport over PCI (virtio 1.2, section 4.1).

use hw_tables::pci::{capabilities, capability};
use native_rt::device::DeviceRegisters;

use crate::queue::Queue;

/// Feature bit: the device conforms to virtio 1.
pub const VERSION_1: u64 = 1 << 32;
/// Feature bit: the device accesses memory as the platform permits, through an IOMMU if there is
/// one.
const ACCESS_PLATFORM: u64 = 1 << 33;

/// Structure types, `cfg_type` (section 4.1.4).
const COMMON: u8 = 1;
const NOTIFY: u8 = 2;
const ISR: u8 = 3;
const DEVICE: u8 = 4;

/// Registers of the common configuration structure (section 4.1.4.3).
mod common {
    pub const DEVICE_FEATURE_SELECT: u64 = 0;
    pub const DEVICE_FEATURE: u64 = 4;
    pub const DRIVER_FEATURE_SELECT: u64 = 8;
    pub const DRIVER_FEATURE: u64 = 12;
    pub const CONFIG_VECTOR: u64 = 16;
    pub const STATUS: u64 = 20;
    pub const GENERATION: u64 = 21;
    pub const QUEUE_SELECT: u64 = 22;
    pub const QUEUE_SIZE: u64 = 24;
    pub const QUEUE_VECTOR: u64 = 26;
    pub const QUEUE_ENABLE: u64 = 28;
    pub const QUEUE_NOTIFY: u64 = 30;
    pub const QUEUE_ADDRESS: u64 = 32;
    pub const LENGTH: u64 = 56;
}

/// Device status (section 2.1).
mod status {
    pub const ACKNOWLEDGE: u8 = 1;
    pub const DRIVER: u8 = 2;
    pub const DRIVER_OK: u8 = 4;
    pub const FEATURES_OK: u8 = 8;
    pub const NEEDS_RESET: u8 = 64;
}

/// Maximum number of status reads until a reset completes.
const RESET_READS: u32 = 1_000_000;
/// Interrupt vector of all queues: the only one that root enables.
const VECTOR: u16 = 0;

/// Error of a device setup.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SetupError {
    /// The device lacks a structure of the modern transport, of this `cfg_type`.
    Structure(u8),
    /// The device does not complete its reset.
    Reset,
    /// The device rejects the features that it offers.
    Features,
    /// A queue is missing, or cannot interrupt.
    Queue(u16),
}

/// A virtio device over PCI.
pub struct Transport {
    common: DeviceRegisters,
    notify: DeviceRegisters,
    notify_step: u64,
    device: DeviceRegisters,
}

impl Transport {
    /// Finds the device's structures, resets it and negotiates those of the `wanted` features that
    /// it offers, and [`VERSION_1`]. Returns the negotiated features too. `bar` maps the registers
    /// of a base address register.
    pub fn new(
        configuration: DeviceRegisters,
        bar: impl Fn(u64) -> Option<DeviceRegisters>,
        wanted: u64,
    ) -> Result<(Self, u64), SetupError> {
        let read = |offset: u16| configuration.read32(offset.into());
        let find = |kind: u8, shortest: u64| {
            capabilities(read)
                .filter(|&(_, id)| id == capability::VENDOR)
                .find_map(|(at, _)| {
                    if configuration.read8(u64::from(at) + 3) != kind {
                        return None;
                    }
                    let number = configuration.read8(u64::from(at) + 4);
                    let (offset, length) = (read(at + 8), read(at + 12));
                    let registers = bar(number.into())?.part(offset.into(), length.into())?;
                    (registers.length() >= shortest).then_some((registers, at))
                })
                .ok_or(SetupError::Structure(kind))
        };
        let (common, _) = find(COMMON, common::LENGTH)?;
        let (notify, at) = find(NOTIFY, 2)?;
        let (device, _) = find(DEVICE, 4)?;
        find(ISR, 1)?;
        let transport = Self { common, notify, notify_step: read(at + 16).into(), device };
        transport.reset()?;
        transport.add_status(status::ACKNOWLEDGE);
        transport.add_status(status::DRIVER);
        let features = transport.offered() & (wanted | VERSION_1 | ACCESS_PLATFORM);
        for (select, half) in [(0, features as u32), (1, (features >> 32) as u32)] {
            common.write32(common::DRIVER_FEATURE_SELECT, select);
            common.write32(common::DRIVER_FEATURE, half);
        }
        transport.add_status(status::FEATURES_OK);
        let taken = common.read8(common::STATUS) & status::FEATURES_OK != 0;
        if !taken || features & VERSION_1 == 0 {
            return Err(SetupError::Features);
        }
        Ok((transport, features))
    }

    fn reset(&self) -> Result<(), SetupError> {
        self.common.write8(common::STATUS, 0);
        let done = (0..RESET_READS).any(|_| self.common.read8(common::STATUS) == 0);
        done.then_some(()).ok_or(SetupError::Reset)
    }

    fn add_status(&self, bits: u8) {
        let old = self.common.read8(common::STATUS);
        self.common.write8(common::STATUS, old | bits);
    }

    fn offered(&self) -> u64 {
        let half = |select| {
            self.common.write32(common::DEVICE_FEATURE_SELECT, select);
            u64::from(self.common.read32(common::DEVICE_FEATURE))
        };
        half(0) | half(1) << 32
    }

    /// Returns the maximum number of descriptors of queue `number`; 0 if it does not exist.
    pub fn queue_size(&self, number: u16) -> u16 {
        self.common.write16(common::QUEUE_SELECT, number);
        self.common.read16(common::QUEUE_SIZE)
    }

    /// Enables a queue, with an interrupt on completions.
    pub fn set_queue(&self, number: u16, queue: &Queue) -> Result<(), SetupError> {
        let common = self.common;
        if self.queue_size(number) < queue.size() {
            return Err(SetupError::Queue(number));
        }
        common.write16(common::CONFIG_VECTOR, VECTOR);
        common.write16(common::QUEUE_SIZE, queue.size());
        common.write16(common::QUEUE_VECTOR, VECTOR);
        if common.read16(common::QUEUE_VECTOR) != VECTOR {
            return Err(SetupError::Queue(number));
        }
        for (index, address) in queue.addresses().into_iter().enumerate() {
            let place = common::QUEUE_ADDRESS + 8 * index as u64;
            common.write32(place, address as u32);
            common.write32(place + 4, (address >> 32) as u32);
        }
        common.write16(common::QUEUE_ENABLE, 1);
        Ok(())
    }

    /// Sets `DRIVER_OK`: the device starts.
    pub fn start(&self) {
        self.add_status(status::DRIVER_OK);
    }

    /// Returns the doorbell of queue `number`, for [`notify`](Self::notify).
    pub fn doorbell(&self, number: u16) -> u64 {
        self.common.write16(common::QUEUE_SELECT, number);
        u64::from(self.common.read16(common::QUEUE_NOTIFY)) * self.notify_step
    }

    /// Notifies the device of new buffers in queue `number`.
    #[inline]
    pub fn notify(&self, doorbell: u64, number: u16) {
        self.notify.write16(doorbell, number);
    }

    /// Returns whether the device has failed and needs a reset.
    pub fn needs_reset(&self) -> bool {
        self.common.read8(common::STATUS) & status::NEEDS_RESET != 0
    }

    /// Returns the device-specific registers. Values that span several registers are read by
    /// [`consistent`](Self::consistent).
    pub fn device(&self) -> DeviceRegisters {
        self.device
    }

    /// Reads device-specific registers that change together, repeating until their generation is
    /// stable.
    pub fn consistent<T>(&self, read: impl Fn(DeviceRegisters) -> T) -> T {
        loop {
            let before = self.common.read8(common::GENERATION);
            let value = read(self.device);
            if self.common.read8(common::GENERATION) == before {
                return value;
            }
        }
    }
}
