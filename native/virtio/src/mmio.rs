//! Modern transport over MMIO (virtio 1.2, section 4.2).

use hw_tables::virtio_mmio::*;
use native_rt::device::DeviceRegisters;

use crate::queue::Queue;
use crate::transport::SetupError;

/// Registers of a virtio device over MMIO.
pub(crate) struct Mmio {
    registers: DeviceRegisters,
    device: DeviceRegisters,
}

impl Mmio {
    /// Checks that a modern device is there.
    pub(crate) fn new(registers: DeviceRegisters) -> Result<Self, SetupError> {
        let device = registers.part(CONFIG, LENGTH - CONFIG).ok_or(SetupError::NoDevice)?;
        let mmio = Self { registers, device };
        if mmio.read(MAGIC) != MAGIC_VALUE {
            return Err(SetupError::NoDevice);
        }
        match mmio.read(VERSION) {
            VERSION_VALUE => Ok(mmio),
            version => Err(SetupError::Legacy(version)),
        }
    }

    fn read(&self, register: u64) -> u32 {
        self.registers.read32(register)
    }

    fn write(&self, register: u64, value: u32) {
        self.registers.write32(register, value);
    }

    pub(crate) fn status(&self) -> u8 {
        self.read(STATUS) as u8
    }

    pub(crate) fn set_status(&self, status: u8) {
        self.write(STATUS, status.into());
    }

    pub(crate) fn offered(&self, half: u32) -> u32 {
        self.write(DEVICE_FEATURES_SELECT, half);
        self.read(DEVICE_FEATURES)
    }

    pub(crate) fn accept(&self, half: u32, features: u32) {
        self.write(DRIVER_FEATURES_SELECT, half);
        self.write(DRIVER_FEATURES, features);
    }

    /// Returns the maximum number of descriptors of a queue; 0 if it does not exist.
    pub(crate) fn queue_size(&self, number: u16) -> u16 {
        self.write(QUEUE_SELECT, number.into());
        self.read(QUEUE_MAX).min(u16::MAX.into()) as u16
    }

    /// Enables a queue. Fails if it is in use, which it cannot be after a reset.
    pub(crate) fn set_queue(&self, number: u16, queue: &Queue) -> Result<(), SetupError> {
        self.write(QUEUE_SELECT, number.into());
        if self.read(QUEUE_READY) != 0 {
            return Err(SetupError::Queue(number));
        }
        self.write(QUEUE_SIZE, queue.size().into());
        let rings = [QUEUE_DESC, QUEUE_DRIVER, QUEUE_DEVICE];
        for (register, address) in rings.into_iter().zip(queue.addresses()) {
            self.write(register, address as u32);
            self.write(register + 4, (address >> 32) as u32);
        }
        self.write(QUEUE_READY, 1);
        Ok(())
    }

    #[inline]
    pub(crate) fn notify(&self, number: u16) {
        self.write(QUEUE_NOTIFY, number.into());
    }

    pub(crate) fn acknowledge_interrupt(&self) {
        let causes = self.read(INTERRUPT_STATUS);
        if causes != 0 {
            self.write(INTERRUPT_ACK, causes);
        }
    }

    pub(crate) fn device(&self) -> DeviceRegisters {
        self.device
    }

    pub(crate) fn generation(&self) -> u32 {
        self.read(GENERATION)
    }
}
