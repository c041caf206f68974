//! Device behind either transport: initialisation and negotiation, which are the same for both
//! (virtio 1.2, section 3.1).

use core::fmt;

use native_rt::device::{DeviceRegisters, configuration, registers};
use proto::start::Start;

use crate::mmio::Mmio;
use crate::pci::Pci;
use crate::queue::Queue;

/// Feature bit: the device conforms to virtio 1.
pub const VERSION_1: u64 = 1 << 32;
/// Feature bit: the device accesses memory as the platform permits, through an IOMMU if there is
/// one.
const ACCESS_PLATFORM: u64 = 1 << 33;

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

/// Error of a device setup.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SetupError {
    /// The task has no virtio device.
    NoDevice,
    /// The device lacks a structure of the modern transport over PCI, of this `cfg_type`.
    Structure(u8),
    /// The transport over MMIO has this version instead of 2: a legacy device.
    Legacy(u32),
    /// The device does not complete its reset.
    Reset,
    /// The device rejects the features that it offers.
    Features,
    /// A queue is missing, or cannot interrupt.
    Queue(u16),
}

impl fmt::Display for SetupError {
    fn fmt(&self, to: &mut fmt::Formatter) -> fmt::Result {
        match self {
            Self::Legacy(version) => write!(
                to,
                "virtio over MMIO of version {version} instead of 2 \
                 (QEMU: -global virtio-mmio.force-legacy=false)"
            ),
            error => write!(to, "{error:?}"),
        }
    }
}

/// A virtio device of the task.
pub struct Transport {
    registers: Registers,
    /// All looks at the queues since the last interrupt have found completions.
    interrupted: bool,
}

/// Registers of the device, by its transport.
enum Registers {
    Pci(Pci),
    Mmio(Mmio),
}

impl Registers {
    /// Finds the registers of the task's device: a PCI function if it has a configuration space.
    fn find(start: &Start) -> Result<Self, SetupError> {
        if let Some(configuration) = configuration(start, 0) {
            return Pci::new(configuration, |number| registers(start, number)).map(Self::Pci);
        }
        Mmio::new(registers(start, 0).ok_or(SetupError::NoDevice)?).map(Self::Mmio)
    }

    fn status(&self) -> u8 {
        match self {
            Self::Pci(pci) => pci.status(),
            Self::Mmio(mmio) => mmio.status(),
        }
    }

    fn set_status(&self, status: u8) {
        match self {
            Self::Pci(pci) => pci.set_status(status),
            Self::Mmio(mmio) => mmio.set_status(status),
        }
    }

    /// Returns 32 of the offered features: the lower ones for `half` 0, the upper ones for 1.
    fn offered(&self, half: u32) -> u32 {
        match self {
            Self::Pci(pci) => pci.offered(half),
            Self::Mmio(mmio) => mmio.offered(half),
        }
    }

    /// Accepts 32 of the features.
    fn accept(&self, half: u32, features: u32) {
        match self {
            Self::Pci(pci) => pci.accept(half, features),
            Self::Mmio(mmio) => mmio.accept(half, features),
        }
    }
}

impl Transport {
    /// Finds the task's device, resets it and negotiates those of the `wanted` features that it
    /// offers, and [`VERSION_1`]. Returns the negotiated features too.
    pub fn new(start: &Start, wanted: u64) -> Result<(Self, u64), SetupError> {
        Self::negotiate(Registers::find(start)?, wanted)
    }

    fn negotiate(registers: Registers, wanted: u64) -> Result<(Self, u64), SetupError> {
        let transport = Self { registers, interrupted: false };
        let registers = &transport.registers;
        registers.set_status(0);
        if !(0..RESET_READS).any(|_| registers.status() == 0) {
            return Err(SetupError::Reset);
        }
        transport.add_status(status::ACKNOWLEDGE);
        transport.add_status(status::DRIVER);
        let offered = u64::from(registers.offered(0)) | u64::from(registers.offered(1)) << 32;
        let features = offered & (wanted | VERSION_1 | ACCESS_PLATFORM);
        registers.accept(0, features as u32);
        registers.accept(1, (features >> 32) as u32);
        transport.add_status(status::FEATURES_OK);
        let taken = registers.status() & status::FEATURES_OK != 0;
        if !taken || features & VERSION_1 == 0 {
            return Err(SetupError::Features);
        }
        Ok((transport, features))
    }

    fn add_status(&self, bits: u8) {
        self.registers.set_status(self.registers.status() | bits);
    }

    /// Returns the maximum number of descriptors of queue `number`; 0 if it does not exist.
    pub fn queue_size(&self, number: u16) -> u16 {
        match &self.registers {
            Registers::Pci(pci) => pci.queue_size(number),
            Registers::Mmio(mmio) => mmio.queue_size(number),
        }
    }

    /// Enables a queue, with an interrupt on completions.
    pub fn set_queue(&self, number: u16, queue: &Queue) -> Result<(), SetupError> {
        if self.queue_size(number) < queue.size() {
            return Err(SetupError::Queue(number));
        }
        match &self.registers {
            Registers::Pci(pci) => pci.set_queue(number, queue),
            Registers::Mmio(mmio) => mmio.set_queue(number, queue),
        }
    }

    /// Sets `DRIVER_OK`: the device starts.
    pub fn start(&self) {
        self.add_status(status::DRIVER_OK);
    }

    /// Returns the doorbell of queue `number`, for [`notify`](Self::notify).
    pub fn doorbell(&self, number: u16) -> u64 {
        match &self.registers {
            Registers::Pci(pci) => pci.doorbell(number),
            Registers::Mmio(_) => 0,
        }
    }

    /// Notifies the device of new buffers in queue `number`.
    #[inline]
    pub fn notify(&self, doorbell: u64, number: u16) {
        match &self.registers {
            Registers::Pci(pci) => pci.notify(doorbell, number),
            Registers::Mmio(mmio) => mmio.notify(number),
        }
    }

    /// Makes the device withdraw its interrupt, which then comes again for the next completion.
    /// Completions before this call need not interrupt again, so queues are to be read after it.
    pub fn acknowledge_interrupt(&mut self) {
        self.interrupted = true;
        match &self.registers {
            Registers::Pci(pci) => pci.acknowledge_interrupt(),
            Registers::Mmio(mmio) => mmio.acknowledge_interrupt(),
        }
    }

    /// Returns whether the device has failed and needs a reset (section 2.1.2).
    pub fn needs_reset(&self) -> bool {
        self.registers.status() & status::NEEDS_RESET != 0
    }

    /// Returns whether the device [needs a reset](Self::needs_reset), after a look at its queues
    /// that has found no completion. It reads the status once after each interrupt, which may be
    /// that of a failure: emulators trap the access.
    pub fn has_failed(&mut self) -> bool {
        core::mem::take(&mut self.interrupted) && self.needs_reset()
    }

    /// Returns the device-specific registers. Values that span several registers are read by
    /// [`consistent`](Self::consistent).
    pub fn device(&self) -> DeviceRegisters {
        match &self.registers {
            Registers::Pci(pci) => pci.device(),
            Registers::Mmio(mmio) => mmio.device(),
        }
    }

    /// Reads device-specific registers that change together, repeating until their generation is
    /// stable.
    pub fn consistent<T>(&self, read: impl Fn(DeviceRegisters) -> T) -> T {
        loop {
            let before = self.generation();
            let value = read(self.device());
            if self.generation() == before {
                return value;
            }
        }
    }

    fn generation(&self) -> u32 {
        match &self.registers {
            Registers::Pci(pci) => pci.generation(),
            Registers::Mmio(mmio) => mmio.generation(),
        }
    }
}
