//! Modern transport over PCI (virtio 1.2, section 4.1).

use hw_tables::pci::{capabilities, capability, command, register};
use native_rt::device::DeviceRegisters;

use crate::queue::Queue;
use crate::transport::SetupError;

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

/// Interrupt vector of all queues: the only one that root enables.
const VECTOR: u16 = 0;
/// Value of a vector register without one.
const NO_VECTOR: u16 = 0xffff;

/// Registers of a virtio device over PCI.
pub(crate) struct Pci {
    common: DeviceRegisters,
    notify: DeviceRegisters,
    notify_step: u64,
    device: DeviceRegisters,
    /// Causes of the interrupt by line, which reading clears; `None`: the device sends messages.
    causes: Option<DeviceRegisters>,
}

impl Pci {
    /// Finds the device's structures. `bar` maps the registers of a base address register.
    pub(crate) fn new(
        configuration: DeviceRegisters,
        bar: impl Fn(u64) -> Option<DeviceRegisters>,
    ) -> Result<Self, SetupError> {
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
        let (causes, _) = find(ISR, 1)?;
        // Root disables the line where it enables messages.
        let command = configuration.read16(register::COMMAND.into());
        let causes = (command & command::NO_LINE == 0).then_some(causes);
        Ok(Self { common, notify, notify_step: read(at + 16).into(), device, causes })
    }

    pub(crate) fn status(&self) -> u8 {
        self.common.read8(common::STATUS)
    }

    pub(crate) fn set_status(&self, status: u8) {
        self.common.write8(common::STATUS, status);
    }

    pub(crate) fn offered(&self, half: u32) -> u32 {
        self.common.write32(common::DEVICE_FEATURE_SELECT, half);
        self.common.read32(common::DEVICE_FEATURE)
    }

    pub(crate) fn accept(&self, half: u32, features: u32) {
        self.common.write32(common::DRIVER_FEATURE_SELECT, half);
        self.common.write32(common::DRIVER_FEATURE, features);
    }

    /// Returns the maximum number of descriptors of a queue; 0 if it does not exist.
    pub(crate) fn queue_size(&self, number: u16) -> u16 {
        self.common.write16(common::QUEUE_SELECT, number);
        self.common.read16(common::QUEUE_SIZE)
    }

    /// Enables a queue. Fails if it cannot interrupt.
    pub(crate) fn set_queue(&self, number: u16, queue: &Queue) -> Result<(), SetupError> {
        let common = self.common;
        common.write16(common::QUEUE_SELECT, number);
        let vector = if self.causes.is_some() { NO_VECTOR } else { VECTOR };
        common.write16(common::CONFIG_VECTOR, vector);
        common.write16(common::QUEUE_SIZE, queue.size());
        common.write16(common::QUEUE_VECTOR, vector);
        if common.read16(common::QUEUE_VECTOR) != vector {
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

    pub(crate) fn doorbell(&self, number: u16) -> u64 {
        self.common.write16(common::QUEUE_SELECT, number);
        u64::from(self.common.read16(common::QUEUE_NOTIFY)) * self.notify_step
    }

    #[inline]
    pub(crate) fn notify(&self, doorbell: u64, number: u16) {
        self.notify.write16(doorbell, number);
    }

    /// Makes the device withdraw its interrupt by line. A message needs none.
    pub(crate) fn acknowledge_interrupt(&self) {
        if let Some(causes) = self.causes {
            causes.read8(0);
        }
    }

    pub(crate) fn device(&self) -> DeviceRegisters {
        self.device
    }

    pub(crate) fn generation(&self) -> u32 {
        self.common.read8(common::GENERATION).into()
    }
}
