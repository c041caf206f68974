//! MMIO transport, version 2.
//!
//! State: the device and its state ([`Common`]), causes of the interrupt that the driver has not
//! acknowledged.
//! Features: all registers of version 2, configuration of the device.
//! Lines: 0, the interrupt: high while a cause is not acknowledged. A driver may use it as
//! edge-triggered, because it falls at each acknowledgement.
//! Missing: legacy interface, shared memory (there is none), notification data, reset of single
//! queues.
//! Documentation: VIRTIO 1.2, section 4.2 "Virtio Over MMIO".

pub use hw_tables::virtio_mmio as spec;
use spec::*;
use vmm_bus::{Access, Device, Env};

use super::{Causes, Common, VirtioDevice, set_half};

/// Vendor, Parador's: "PARD".
const VENDOR_VALUE: u32 = 0x4452_4150;

/// A device with MMIO transport. Registers support accesses of 4 bytes, the configuration of the
/// device those of 1, 2 and 4 bytes.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Mmio<D> {
    state: State,
    device: D,
}

/// All state except the device: code common to all types.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
struct State {
    common: Common,
    /// Causes that are not acknowledged.
    causes: u8,
}

impl<D: VirtioDevice> Mmio<D> {
    /// Creates the device in its power-on state.
    pub fn new(device: D) -> Self {
        Self { state: State::default(), device }
    }

    /// Calls the device for an event that its back end does not know, and interrupts the driver for
    /// what it has done. The driver may not be ready.
    pub fn with_device(&mut self, env: &mut dyn Env, call: impl FnOnce(&mut D)) {
        call(&mut self.device);
        self.wake(vmm_bus::WAKE_INPUT, env);
    }
}

impl<D: VirtioDevice> Device for Mmio<D> {
    fn read(&mut self, access: Access, _: &mut dyn Env) -> u64 {
        self.state.read(access, &mut self.device)
    }

    fn write(&mut self, access: Access, value: u64, env: &mut dyn Env) {
        self.state.write(access, value, &mut self.device, env);
    }

    fn wake(&mut self, timer: u8, env: &mut dyn Env) {
        let causes = self.state.common.wake(timer, &mut self.device, env);
        self.state.interrupt(causes, env);
    }

    fn reset(&mut self, env: &mut dyn Env) {
        self.state.reset(&mut self.device, env);
    }
}

impl State {
    fn reset(&mut self, device: &mut dyn VirtioDevice, env: &mut dyn Env) {
        self.common.reset(device, env);
        self.causes = 0;
        env.set_line(0, false);
    }

    /// Interrupts the driver.
    fn interrupt(&mut self, causes: Causes, env: &mut dyn Env) {
        let bits = causes.bits();
        if bits != 0 {
            self.causes |= bits;
            env.set_line(0, true);
        }
    }

    fn acknowledge(&mut self, causes: u8, env: &mut dyn Env) {
        self.causes &= !causes;
        env.set_line(0, false);
        if self.causes != 0 {
            env.set_line(0, true);
        }
    }

    fn read(&mut self, access: Access, device: &mut dyn VirtioDevice) -> u64 {
        match (access.offset, access.size) {
            (CONFIG..LENGTH, size) => self.common.config(device, access.offset - CONFIG, size),
            (offset, 4) => self.read_register(offset, device).into(),
            _ => 0,
        }
    }

    fn read_register(&mut self, offset: u64, device: &mut dyn VirtioDevice) -> u32 {
        let common = &self.common;
        match offset {
            MAGIC => MAGIC_VALUE,
            VERSION => VERSION_VALUE,
            DEVICE_ID => device.kind() as u32,
            VENDOR_ID => VENDOR_VALUE,
            DEVICE_FEATURES => common.offered(device),
            QUEUE_MAX => common.queue(device).map_or(0, |queue| queue.max_size().into()),
            QUEUE_READY => common.queue(device).is_some_and(|queue| queue.ready()).into(),
            INTERRUPT_STATUS => self.causes.into(),
            STATUS => common.status().into(),
            SHARED_LENGTH..SHARED_END => u32::MAX,
            GENERATION => common.generation().into(),
            _ => 0,
        }
    }

    fn write(
        &mut self,
        access: Access,
        value: u64,
        device: &mut dyn VirtioDevice,
        env: &mut dyn Env,
    ) {
        match (access.offset, access.size) {
            (CONFIG..LENGTH, size) => device.write_config(access.offset - CONFIG, size, value, env),
            (offset, 4) => {
                let causes = self.write_register(offset, value as u32, device, env);
                self.interrupt(causes, env);
            }
            (offset, _) => env.missing("virtio: access of another size than a register", offset),
        }
    }

    fn write_register(
        &mut self,
        offset: u64,
        value: u32,
        device: &mut dyn VirtioDevice,
        env: &mut dyn Env,
    ) -> Causes {
        let common = &mut self.common;
        match offset {
            DEVICE_FEATURES_SELECT => common.device_feature_select = value,
            DRIVER_FEATURES => common.accept(value),
            DRIVER_FEATURES_SELECT => common.driver_feature_select = value,
            // A queue beyond 16 bits does not exist either.
            QUEUE_SELECT => common.queue_select = u16::try_from(value).unwrap_or(u16::MAX),
            QUEUE_SIZE => {
                if let Some(queue) = common.queue(device) {
                    // No queue has the size 0.
                    queue.set_size(u16::try_from(value).unwrap_or(0));
                }
            }
            QUEUE_READY if value == 0 => {
                if let Some(queue) = common.queue(device) {
                    queue.disable();
                }
            }
            QUEUE_READY => return common.enable_queue(device, env),
            QUEUE_NOTIFY => return common.notify(value as usize, device, env),
            INTERRUPT_ACK => self.acknowledge(value as u8, env),
            STATUS if value as u8 == 0 => self.reset(device, env),
            STATUS => return common.set_status(value as u8, device, env),
            QUEUE_DESC..SHARED_SELECT => self.write_address(offset, value, device, env),
            SHARED_SELECT => {}
            _ => env.missing("virtio: write of an unknown register", offset),
        }
        Causes::default()
    }

    /// Writes half of an address of the selected queue.
    fn write_address(
        &mut self,
        offset: u64,
        value: u32,
        device: &mut dyn VirtioDevice,
        env: &mut dyn Env,
    ) {
        let high = offset & 4 != 0;
        let change = |address: &mut u64| set_half(address, high, value);
        match offset & !7 {
            QUEUE_DESC => self.common.change_rings(device, |rings| change(&mut rings.descriptors)),
            QUEUE_DRIVER => self.common.change_rings(device, |rings| change(&mut rings.available)),
            QUEUE_DEVICE => self.common.change_rings(device, |rings| change(&mut rings.used)),
            _ => env.missing("virtio: write of an unknown register", offset),
        }
    }
}
