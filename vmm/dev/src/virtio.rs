//! Virtual devices of the VIRTIO standard, each written once for all transports.
//!
//! A device ([`VirtioDevice`]) handles requests in its queues; a transport ([`pci`], [`mmio`]) is how a driver finds
//! it, sets it up and is interrupted. [`Common`] is what the transports share: the life of a device.
//!
//! State: device status, negotiated features, selected queue, generation of the configuration.
//! Features: version 1, indirect descriptors, event index. A driver that breaks the rules of a queue finds
//! `DEVICE_NEEDS_RESET` set, and nothing more happens until it resets the device.
//! Missing: legacy and transitional interfaces, reset of single queues, packed rings, notification data.
//! Documentation: VIRTIO 1.2, sections 2.1 to 2.5 and 3.1.

pub mod balloon;
pub mod blk;
pub mod console;
pub mod entropy;
pub mod mmio;
pub mod net;
pub mod p9;
pub mod pci;
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
    /// Device status: the features are settled.
    pub const FEATURES_OK: u8 = 8;
    /// Device status: the device cannot go on.
    pub const NEEDS_RESET: u8 = 0x40;
    /// Device status: the driver has given up.
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

/// Most queues of a device.
pub const MAX_QUEUES: usize = 5;
/// Room for the device-specific configuration; what a device does not have reads as 0.
pub const CONFIG_LEN: usize = 64;
/// Requests that a device handles in one call; it goes on after its timer.
const BATCH: u16 = 256;
/// The device's timer: there is more to do.
const MORE: u8 = 0;

/// What a device is (section 5).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u16)]
pub enum Kind {
    /// Network card.
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
    /// Sockets between guest and host.
    Vsock = 19,
}

/// A device behind a transport. Its queues and what happens in them; the transport calls nothing but
/// [`reset`](Self::reset) and the descriptions before the driver is ready.
pub trait VirtioDevice {
    /// What it is.
    fn kind(&self) -> Kind;
    /// Features of its kind that it offers.
    fn features(&self) -> u64;
    /// Its queues, at most [`MAX_QUEUES`].
    fn queues(&mut self) -> &mut [Queue];
    /// Its configuration.
    fn config(&self, to: &mut [u8; CONFIG_LEN]);
    /// The driver writes the configuration.
    fn write_config(&mut self, _offset: u64, _size: u8, _value: u64, env: &mut dyn Env) {
        env.missing("virtio: read-only configuration written", 0);
    }
    /// The driver is ready and uses these features.
    fn start(&mut self, features: u64, env: &mut dyn Env);
    /// The driver has made chains of this queue available.
    ///
    /// # Errors
    /// It has broken the rules: the device stops until it is reset.
    fn notify(&mut self, queue: usize, env: &mut dyn Env) -> Result<(), RingError>;
    /// The device's timer, or its outside (as [`vmm_bus::Device::wake`]); whether its configuration has changed.
    ///
    /// # Errors
    /// As [`notify`](Self::notify).
    fn wake(&mut self, timer: u8, env: &mut dyn Env) -> Result<bool, RingError>;
    /// Forgets everything; the queues are reset by the caller.
    fn reset(&mut self, env: &mut dyn Env);
}

/// Asks for another call, because much is left to do.
fn more(env: &mut dyn Env) {
    let now = env.now();
    env.arm(MORE, now);
}

/// Why a driver is to be interrupted.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[must_use]
pub struct Causes {
    /// Queues with used entries, a bit each.
    pub queues: u8,
    /// The configuration has changed, or the device needs a reset.
    pub config: bool,
}

impl Causes {
    /// As the interrupt status of both transports has it.
    pub fn bits(self) -> u8 {
        let queues = if self.queues != 0 { CAUSE_QUEUE } else { 0 };
        queues | if self.config { CAUSE_CONFIG } else { 0 }
    }
}

/// The life of a device, as every transport shows it.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Common {
    status: u8,
    /// Selected word of the device's and of the driver's features.
    pub device_feature_select: u32,
    /// See [`Self::device_feature_select`].
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

    /// Changes with the configuration.
    pub fn generation(&self) -> u8 {
        self.generation
    }

    /// The selected word of the features that the device offers.
    pub fn offered(&self, device: &dyn VirtioDevice) -> u32 {
        word(offered(device), self.device_feature_select)
    }

    /// The selected word of the features that the driver has accepted.
    pub fn accepted(&self) -> u32 {
        word(self.driver_features, self.driver_feature_select)
    }

    /// The driver accepts features: the selected word.
    pub fn accept(&mut self, value: u32) {
        if self.status & FEATURES_OK == 0 && self.driver_feature_select < 2 {
            let shift = 32 * self.driver_feature_select;
            self.driver_features &= !(u64::from(u32::MAX) << shift);
            self.driver_features |= u64::from(value) << shift;
        }
    }

    /// The driver writes the device status (section 3.1.1). Bits can only be set, all at once reset.
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
        // A driver may have filled its queues before.
        let count = device.queues().len();
        let result = (0..count).try_for_each(|queue| device.notify(queue, env));
        self.settle(result.map(|()| false), device, env)
    }

    /// Back to the state after power-on.
    pub fn reset(&mut self, device: &mut dyn VirtioDevice, env: &mut dyn Env) {
        // The generation need not go back, and a driver might compare it with one that it has seen.
        *self = Self { generation: self.generation, ..Self::default() };
        for queue in device.queues() {
            queue.reset();
        }
        env.arm(MORE, vmm_bus::NEVER);
        device.reset(env);
    }

    /// The selected queue, if there is one.
    pub fn queue<'d>(&self, device: &'d mut dyn VirtioDevice) -> Option<&'d mut Queue> {
        device.queues().get_mut(usize::from(self.queue_select))
    }

    /// Changes the addresses of the selected queue.
    pub fn place(&self, device: &mut dyn VirtioDevice, change: impl FnOnce(&mut Rings)) {
        if let Some(queue) = self.queue(device) {
            let mut rings = queue.rings();
            change(&mut rings);
            queue.set_rings(rings);
        }
    }

    /// The driver enables the selected queue.
    pub fn enable_queue(&mut self, device: &mut dyn VirtioDevice, env: &mut dyn Env) -> Causes {
        let event_index = self.driver_features & F_EVENT_IDX != 0;
        let result = match self.queue(device) {
            Some(queue) if self.status & FEATURES_OK != 0 => {
                queue.enable(event_index, env.memory())
            }
            _ => Ok(()),
        };
        self.settle(result.map(|()| false), device, env)
    }

    /// The driver has made chains of `queue` available.
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
        self.settle(result.map(|()| false), device, env)
    }

    /// The device's timer or its outside.
    pub fn wake(&mut self, timer: u8, device: &mut dyn VirtioDevice, env: &mut dyn Env) -> Causes {
        if !self.live() {
            return Causes::default();
        }
        let result = device.wake(timer, env);
        self.settle(result, device, env)
    }

    /// `size` bytes of the device's configuration.
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

    /// The driver is ready and has broken no rule.
    fn live(&self) -> bool {
        self.status & (DRIVER_OK | NEEDS_RESET | FAILED) == DRIVER_OK
    }

    /// What a call of the device comes to.
    fn settle(
        &mut self,
        result: Result<bool, RingError>,
        device: &mut dyn VirtioDevice,
        env: &mut dyn Env,
    ) -> Causes {
        let mut causes = Causes::default();
        match result {
            Ok(changed) => causes.config = changed,
            Err(error) => {
                env.missing("virtio: the driver broke a queue", error as u64);
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

/// Puts `value` in one half of an address.
fn set_half(address: &mut u64, high: bool, value: u32) {
    let shift = if high { 32 } else { 0 };
    *address = *address & !(u64::from(u32::MAX) << shift) | u64::from(value) << shift;
}
