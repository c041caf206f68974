//! Devices of the VIRTIO standard, written without regard to the transport.
//!
//! A device ([`VirtioDevice`]) handles requests in its queues; the transport ([`pci`], [`mmio`])
//! lets a driver find it, set it up and receive its interrupts. [`Common`] is the device state that
//! is no matter of the transport.
//!
//! State: device status, negotiated features, selected queue, generation of the configuration.
//! Features: version 1, indirect descriptors, event index. After a violation of the queue protocol
//! by the driver, the device sets `DEVICE_NEEDS_RESET` and does nothing until the driver resets it.
//! Missing: legacy and transitional interfaces, reset of single queues, packed rings, notification
//! data.
//! Documentation: VIRTIO 1.2, sections 2.1 to 2.5 and 3.1.

pub mod balloon;
pub mod blk;
pub mod console;
pub mod entropy;
pub mod input;
pub mod mmio;
pub mod net;
pub mod p9;
pub mod pci;
pub mod ports;
pub mod queue;
pub mod vsock;

use queue::{Queue, RingError, Rings};
use vmm_bus::Env;

/// Numbers of the standard.
pub mod spec {
    /// Device status: reset.
    pub const RESET: u8 = 0;
    /// Device status: the guest has found the device.
    pub const ACKNOWLEDGE: u8 = 1;
    /// Device status: the guest has a driver.
    pub const DRIVER: u8 = 2;
    /// Device status: the driver is ready.
    pub const DRIVER_OK: u8 = 4;
    /// Device status: feature negotiation is complete.
    pub const FEATURES_OK: u8 = 8;
    /// Device status: the device cannot continue.
    pub const NEEDS_RESET: u8 = 0x40;
    /// Device status: the driver has failed.
    pub const FAILED: u8 = 0x80;

    /// Feature: indirect descriptors.
    pub const F_INDIRECT_DESC: u64 = 1 << 28;
    /// Feature: event index.
    pub const F_EVENT_IDX: u64 = 1 << 29;
    /// Feature: compliance with version 1.
    pub const F_VERSION_1: u64 = 1 << 32;

    /// Cause of an interrupt: a queue has used entries.
    pub const CAUSE_QUEUE: u8 = 1;
    /// Cause of an interrupt: the configuration has changed.
    pub const CAUSE_CONFIG: u8 = 2;
}
use spec::*;

/// Maximum number of queues of a device.
pub const MAX_QUEUES: usize = 18;
/// Bytes of the device-specific configuration; bytes that a device does not define read as 0.
pub const CONFIG_LEN: usize = 64;
/// Requests that a device handles in one call; its timer continues the work.
const BATCH: u16 = 256;
/// The device's timer: more requests are available.
const MORE: u8 = 0;

/// Device type (section 5).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u16)]
pub enum Kind {
    /// Network device.
    Net = 1,
    /// Block device.
    Block = 2,
    /// Console.
    Console = 3,
    /// Entropy source.
    Entropy = 4,
    /// Memory balloon.
    Balloon = 5,
    /// Shared directory (9P).
    P9 = 9,
    /// Input device.
    Input = 18,
    /// Sockets between guest and host.
    Vsock = 19,
}

/// A device of a transport: its queues and their processing. Before the driver is ready, the
/// transport calls only [`reset`](Self::reset) and the descriptions.
pub trait VirtioDevice {
    /// Device type.
    fn kind(&self) -> Kind;
    /// Device-specific features offered.
    fn features(&self) -> u64;
    /// Queues, at most [`MAX_QUEUES`].
    fn queues(&mut self) -> &mut [Queue];
    /// Device-specific configuration.
    fn config(&self, to: &mut [u8; CONFIG_LEN]);
    /// Handles a driver's write to the configuration.
    fn write_config(&mut self, _offset: u64, _size: u8, _value: u64, env: &mut dyn Env) {
        env.missing("virtio: read-only configuration written", 0);
    }
    /// Starts the device with these features: the driver is ready.
    fn start(&mut self, features: u64, env: &mut dyn Env);
    /// Processes chains that the driver has made available in this queue.
    ///
    /// # Errors
    /// If the driver has violated the queue protocol: the device stops until it is reset.
    fn notify(&mut self, queue: usize, env: &mut dyn Env) -> Result<(), RingError>;
    /// Handles the device's timer or an event of its back end (see [`vmm_bus::Device::wake`]).
    /// Returns true if the configuration has changed.
    ///
    /// # Errors
    /// See [`notify`](Self::notify).
    fn wake(&mut self, timer: u8, env: &mut dyn Env) -> Result<bool, RingError>;
    /// Resets the device state; the caller resets the queues.
    fn reset(&mut self, env: &mut dyn Env);
}

/// Requests another call, because more work is available.
fn more(env: &mut dyn Env) {
    let now = env.now();
    env.arm(MORE, now);
}

/// Reasons to interrupt the driver.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[must_use]
pub struct Causes {
    /// Bit mask of queues with used entries.
    pub queues: u32,
    /// The configuration has changed, or the device needs a reset.
    pub config: bool,
}

impl Causes {
    /// Interrupt status in the format of both transports.
    pub fn bits(self) -> u8 {
        let queues = if self.queues != 0 { CAUSE_QUEUE } else { 0 };
        queues | if self.config { CAUSE_CONFIG } else { 0 }
    }
}

/// Device state common to all transports.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Common {
    status: u8,
    /// Selected word of the device's features.
    pub device_feature_select: u32,
    /// Selected word of the driver's features.
    pub driver_feature_select: u32,
    driver_features: u64,
    /// Selected queue.
    pub queue_select: u16,
    generation: u8,
}

impl Common {
    /// Device status.
    pub fn status(&self) -> u8 {
        self.status
    }

    /// Generation of the configuration, changed with it.
    pub fn generation(&self) -> u8 {
        self.generation
    }

    /// Selected word of the offered features.
    pub fn offered(&self, device: &dyn VirtioDevice) -> u32 {
        word(offered(device), self.device_feature_select)
    }

    /// Selected word of the features accepted by the driver.
    pub fn accepted(&self) -> u32 {
        word(self.driver_features, self.driver_feature_select)
    }

    /// Sets the selected word of the accepted features.
    pub fn accept(&mut self, value: u32) {
        if self.status & FEATURES_OK == 0 && self.driver_feature_select < 2 {
            let shift = 32 * self.driver_feature_select;
            self.driver_features &= !(u64::from(u32::MAX) << shift);
            self.driver_features |= u64::from(value) << shift;
        }
    }

    /// Handles a write of the device status (section 3.1.1). Bits can only be set; 0 resets the
    /// device.
    pub fn set_status(
        &mut self,
        value: u8,
        device: &mut dyn VirtioDevice,
        env: &mut dyn Env,
    ) -> Causes {
        if value == RESET {
            self.reset(device, env);
            return Causes::default();
        }
        let new = value & !self.status;
        self.status |= new & (ACKNOWLEDGE | DRIVER | FAILED);
        let features = self.driver_features;
        if new & FEATURES_OK != 0 && features & !offered(device) == 0 && features & F_VERSION_1 != 0
        {
            self.status |= FEATURES_OK;
        }
        if new & DRIVER_OK == 0 || self.status & FEATURES_OK == 0 {
            return Causes::default();
        }
        self.status |= DRIVER_OK;
        device.start(features, env);
        // A driver may fill its queues before DRIVER_OK.
        let count = device.queues().len();
        let result = (0..count).try_for_each(|queue| device.notify(queue, env));
        self.finish_call(result.map(|()| false), device, env)
    }

    /// Restores the power-on state.
    pub fn reset(&mut self, device: &mut dyn VirtioDevice, env: &mut dyn Env) {
        // The generation is kept: a driver might compare it with an earlier one.
        *self = Self { generation: self.generation, ..Self::default() };
        for queue in device.queues() {
            queue.reset();
        }
        env.arm(MORE, vmm_bus::NEVER);
        device.reset(env);
    }

    /// Selected queue, if it exists.
    pub fn queue<'d>(&self, device: &'d mut dyn VirtioDevice) -> Option<&'d mut Queue> {
        device.queues().get_mut(usize::from(self.queue_select))
    }

    /// Changes the addresses of the selected queue.
    pub fn change_rings(&self, device: &mut dyn VirtioDevice, change: impl FnOnce(&mut Rings)) {
        if let Some(queue) = self.queue(device) {
            let mut rings = queue.rings();
            change(&mut rings);
            queue.set_rings(rings);
        }
    }

    /// Enables the selected queue.
    pub fn enable_queue(&mut self, device: &mut dyn VirtioDevice, env: &mut dyn Env) -> Causes {
        let event_index = self.driver_features & F_EVENT_IDX != 0;
        let result = match self.queue(device) {
            Some(queue) if self.status & FEATURES_OK != 0 => {
                queue.enable(event_index, env.memory())
            }
            _ => Ok(()),
        };
        self.finish_call(result.map(|()| false), device, env)
    }

    /// Handles a notification of `queue`.
    pub fn notify(
        &mut self,
        queue: usize,
        device: &mut dyn VirtioDevice,
        env: &mut dyn Env,
    ) -> Causes {
        if !self.live() || queue >= device.queues().len() {
            return Causes::default();
        }
        let result = device.notify(queue, env);
        self.finish_call(result.map(|()| false), device, env)
    }

    /// Handles the device's timer or an event of its back end.
    pub fn wake(&mut self, timer: u8, device: &mut dyn VirtioDevice, env: &mut dyn Env) -> Causes {
        if !self.live() {
            return Causes::default();
        }
        let result = device.wake(timer, env);
        self.finish_call(result, device, env)
    }

    /// Reads `size` bytes of the device's configuration.
    pub fn config(&self, device: &dyn VirtioDevice, offset: u64, size: u8) -> u64 {
        let mut bytes = [0; CONFIG_LEN];
        device.config(&mut bytes);
        let byte = |index: u64| {
            let at = usize::try_from(offset.checked_add(index)?).ok()?;
            bytes.get(at).copied()
        };
        (0..u64::from(size.min(8)))
            .fold(0, |value, index| value | u64::from(byte(index).unwrap_or(0)) << (8 * index))
    }

    /// True while the driver is ready and has not violated the protocol.
    fn live(&self) -> bool {
        self.status & (DRIVER_OK | NEEDS_RESET | FAILED) == DRIVER_OK
    }

    /// Evaluates the result of a call of the device.
    fn finish_call(
        &mut self,
        result: Result<bool, RingError>,
        device: &mut dyn VirtioDevice,
        env: &mut dyn Env,
    ) -> Causes {
        let mut causes = Causes::default();
        match result {
            Ok(changed) => causes.config = changed,
            Err(error) => {
                env.missing("virtio: the driver violated the queue protocol", error as u64);
                self.status |= NEEDS_RESET;
                causes.config = self.status & DRIVER_OK != 0;
            }
        }
        if causes.config {
            self.generation = self.generation.wrapping_add(1);
        }
        for (number, queue) in device.queues().iter_mut().enumerate() {
            if queue.wants_interrupt(env.memory()) {
                causes.queues |= 1 << number;
            }
        }
        causes
    }
}

fn offered(device: &dyn VirtioDevice) -> u64 {
    device.features() | F_VERSION_1 | F_INDIRECT_DESC | F_EVENT_IDX
}

fn word(features: u64, select: u32) -> u32 {
    features.checked_shr(select.saturating_mul(32)).unwrap_or(0) as u32
}

/// Sets one half of an address to `value`.
fn set_half(address: &mut u64, high: bool, value: u32) {
    let shift = if high { 32 } else { 0 };
    *address = *address & !(u64::from(u32::MAX) << shift) | u64::from(value) << shift;
}
