//! Memory-mapped transport, version 2.
//!
//! State: the device, its state ([`Common`]), causes of the interrupt. Line 0 is the level
//! interrupt, active while a cause is not acknowledged.
//! Features: all registers.
//! Missing: shared memory regions, reset of single queues.
//! Documentation: VIRTIO 1.2, section 4.2 "Virtio Over MMIO".

use super::{Causes, Common, VirtioDevice, set_half};
use vmm_bus::{Access, Device, Env};

/// Registers: offsets of 32-bit words.
pub mod spec {
    /// RO: [`MAGIC_VALUE`].
    pub const MAGIC: u64 = 0x000;
    /// RO: [`VERSION_VALUE`].
    pub const VERSION: u64 = 0x004;
    /// RO: kind of device.
    pub const DEVICE_ID: u64 = 0x008;
    /// RO: [`VENDOR_VALUE`].
    pub const VENDOR_ID: u64 = 0x00c;
    /// RO: word of the device's features.
    pub const DEVICE_FEATURES: u64 = 0x010;
    /// WO: selects the word of the device's features.
    pub const DEVICE_FEATURES_SEL: u64 = 0x014;
    /// WO: word of the driver's features.
    pub const DRIVER_FEATURES: u64 = 0x020;
    /// WO: selects the word of the driver's features.
    pub const DRIVER_FEATURES_SEL: u64 = 0x024;
    /// WO: selects a queue.
    pub const QUEUE_SEL: u64 = 0x030;
    /// RO: maximum entries of the queue; 0: no such queue.
    pub const QUEUE_NUM_MAX: u64 = 0x034;
    /// WO: entries of the queue.
    pub const QUEUE_NUM: u64 = 0x038;
    /// RW: the queue is enabled.
    pub const QUEUE_READY: u64 = 0x044;
    /// WO: index of a queue with new chains.
    pub const QUEUE_NOTIFY: u64 = 0x050;
    /// RO: causes of the interrupt.
    pub const INTERRUPT_STATUS: u64 = 0x060;
    /// WO: causes that have been handled.
    pub const INTERRUPT_ACK: u64 = 0x064;
    /// RW: device status.
    pub const STATUS: u64 = 0x070;
    /// WO: descriptor table, low half.
    pub const QUEUE_DESC: u64 = 0x080;
    /// WO: available ring, low half.
    pub const QUEUE_DRIVER: u64 = 0x090;
    /// WO: used ring, low half.
    pub const QUEUE_DEVICE: u64 = 0x0a0;
    /// Offset of an address's high half from its low one.
    pub const HIGH: u64 = 4;
    /// RO: length of a shared memory region, low half; its base follows. All ones: no region.
    pub const SHM_LEN: u64 = 0x0b0;
    /// End of the shared memory registers.
    pub const SHM_END: u64 = 0x0c0;
    /// RO: generation of the configuration.
    pub const CONFIG_GENERATION: u64 = 0x0fc;
    /// RW: configuration.
    pub const CONFIG: u64 = 0x100;
    /// Bytes of the register page.
    pub const LEN: u64 = 0x200;

    /// "virt".
    pub const MAGIC_VALUE: u32 = 0x7472_6976;
    /// Version of the transport.
    pub const VERSION_VALUE: u32 = 2;
    /// Vendor of the device: unspecified.
    pub const VENDOR_VALUE: u32 = 0;
}
use spec::*;

/// Line of the interrupt.
const LINE: u8 = 0;

/// A device with memory-mapped transport. Registers are 32 bits wide; the configuration supports
/// all widths.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Mmio<D> {
    device: D,
    common: Common,
    causes: u8,
}

impl<D: VirtioDevice> Mmio<D> {
    /// Creates the device in its power-on state.
    pub fn new(device: D) -> Self {
        Self { device, common: Common::default(), causes: 0 }
    }

    fn interrupt(&mut self, causes: Causes, env: &mut dyn Env) {
        self.causes |= causes.bits();
        env.set_line(LINE, self.causes != 0);
    }
}

impl<D: VirtioDevice> Device for Mmio<D> {
    fn read(&mut self, access: Access, env: &mut dyn Env) -> u64 {
        if access.offset >= CONFIG {
            return self.common.config(&self.device, access.offset - CONFIG, access.size);
        }
        if access.size != 4 {
            return 0;
        }
        let Self { device, common, causes } = self;
        let value = match access.offset {
            MAGIC => MAGIC_VALUE,
            VERSION => VERSION_VALUE,
            DEVICE_ID => device.kind() as u32,
            VENDOR_ID => VENDOR_VALUE,
            DEVICE_FEATURES => common.offered(device),
            QUEUE_NUM_MAX => common.queue(device).map_or(0, |queue| queue.max_size().into()),
            QUEUE_READY => common.queue(device).is_some_and(|queue| queue.ready()).into(),
            INTERRUPT_STATUS => (*causes).into(),
            STATUS => common.status().into(),
            SHM_LEN..SHM_END => u32::MAX,
            CONFIG_GENERATION => common.generation().into(),
            offset => {
                env.missing("virtio: read of an unknown register", offset);
                0
            }
        };
        value.into()
    }

    fn write(&mut self, access: Access, value: u64, env: &mut dyn Env) {
        let Self { device, common, .. } = self;
        if let Some(offset) = access.offset.checked_sub(CONFIG) {
            return device.write_config(offset, access.size, value, env);
        }
        if access.size != 4 {
            return;
        }
        let value = value as u32;
        let mut causes = Causes::default();
        match access.offset {
            DEVICE_FEATURES_SEL => common.device_feature_select = value,
            DRIVER_FEATURES => common.accept(value),
            DRIVER_FEATURES_SEL => common.driver_feature_select = value,
            QUEUE_SEL => common.queue_select = u16::try_from(value).unwrap_or(u16::MAX),
            QUEUE_NUM => {
                if let Some(queue) = common.queue(device) {
                    queue.set_size(u16::try_from(value).unwrap_or(0));
                }
            }
            QUEUE_READY if value == 1 => causes = common.enable_queue(device, env),
            // A disabled queue is set up again.
            QUEUE_READY => {
                if let Some(queue) = common.queue(device) {
                    queue.reset();
                }
            }
            QUEUE_NOTIFY => causes = common.notify(value as usize, device, env),
            INTERRUPT_ACK => self.causes &= !(value as u8),
            STATUS => {
                causes = common.set_status(value as u8, device, env);
                if value == 0 {
                    self.causes = 0;
                }
            }
            offset => {
                let low = offset & !HIGH;
                let high = offset & HIGH != 0;
                match low {
                    QUEUE_DESC => {
                        common.change_rings(device, |rings| {
                            set_half(&mut rings.descriptors, high, value)
                        });
                    }
                    QUEUE_DRIVER => {
                        common.change_rings(device, |rings| {
                            set_half(&mut rings.available, high, value)
                        });
                    }
                    QUEUE_DEVICE => {
                        common.change_rings(device, |rings| set_half(&mut rings.used, high, value));
                    }
                    _ => env.missing("virtio: write of an unknown register", offset),
                }
            }
        }
        self.interrupt(causes, env);
    }

    fn wake(&mut self, timer: u8, env: &mut dyn Env) {
        let causes = self.common.wake(timer, &mut self.device, env);
        self.interrupt(causes, env);
    }

    fn reset(&mut self, env: &mut dyn Env) {
        self.common.reset(&mut self.device, env);
        self.causes = 0;
        env.set_line(LINE, false);
    }
}
