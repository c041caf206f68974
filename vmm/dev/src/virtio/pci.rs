//! PCI transport, modern interface.
//!
//! State: header and MSI-X vectors of the function, the device and its state ([`Common`]), the
//! assignment of vectors.
//! Features: one window with common, notification, interrupt status and device configuration and
//! the MSI-X table; access to the window through configuration space. Interrupts are MSI-X messages
//! only.
//! Missing: legacy interface, interrupt pin, shared memory, notification data, reset of single
//! queues.
//! Documentation: VIRTIO 1.2, section 4.1 "Virtio Over PCI Bus".

use super::queue::Rings;
use super::{Causes, Common, Kind, MAX_QUEUES, VirtioDevice, set_half};
use crate::pci::msix::{self, Msix};
use crate::pci::{Function, Header, spec as pci};
use vmm_bus::{Access, Device, Env};

/// Identities, layout of the window and of the capabilities.
pub mod spec {
    /// Vendor.
    pub const VENDOR: u32 = 0x1af4;
    /// Device number of kind 0 (section 4.1.2).
    pub const DEVICE: u32 = 0x1040;
    /// Subsystem number of kind 0: any from 0x40 on.
    pub const SUBSYSTEM: u32 = 0x1100;
    /// Minimum revision of a device without legacy interface.
    pub const REVISION: u8 = 1;
    /// Bytes of the window.
    pub const WINDOW: u32 = 0x8000;

    /// In the window: common configuration.
    pub const COMMON: u64 = 0x0000;
    /// Bytes of the common configuration.
    pub const COMMON_LEN: u32 = 60;
    /// In the window: interrupt status.
    pub const ISR: u64 = 0x1000;
    /// Bytes of the interrupt status.
    pub const ISR_LEN: u32 = 1;
    /// In the window: configuration of the device.
    pub const CONFIG: u64 = 0x2000;
    /// In the window: notifications, [`NOTIFY_STEP`] bytes for each queue.
    pub const NOTIFY: u64 = 0x3000;
    /// Bytes between the notification registers of two queues.
    pub const NOTIFY_STEP: u32 = 4;
    /// In the window: MSI-X table.
    pub const TABLE: u64 = 0x4000;
    /// In the window: MSI-X pending bits.
    pub const PENDING: u64 = 0x4800;

    /// Id of vendor-defined capabilities.
    pub const CAPABILITY: u32 = 0x09;
    /// In configuration space: MSI-X capability.
    pub const MSIX_CAP: u16 = 0x40;
    /// In configuration space: capability of the common configuration.
    pub const COMMON_CAP: u16 = 0x4c;
    /// In configuration space: capability of the notifications, with [`NOTIFY_STEP`].
    pub const NOTIFY_CAP: u16 = 0x5c;
    /// In configuration space: capability of the interrupt status.
    pub const ISR_CAP: u16 = 0x70;
    /// In configuration space: capability of the device's configuration.
    pub const CONFIG_CAP: u16 = 0x80;
    /// In configuration space: capability for access to the window.
    pub const ACCESS_CAP: u16 = 0x90;
    /// Window offset of the access capability.
    pub const ACCESS_OFFSET: u16 = ACCESS_CAP + 8;
    /// Length of the access capability.
    pub const ACCESS_LENGTH: u16 = ACCESS_CAP + 12;
    /// Data of the access capability.
    pub const ACCESS_DATA: u16 = ACCESS_CAP + 16;

    /// Structure type: common configuration.
    pub const KIND_COMMON: u32 = 1;
    /// Structure type: notification.
    pub const KIND_NOTIFY: u32 = 2;
    /// Structure type: interrupt status.
    pub const KIND_ISR: u32 = 3;
    /// Structure type: device configuration.
    pub const KIND_CONFIG: u32 = 4;
    /// Structure type: PCI configuration access.
    pub const KIND_ACCESS: u32 = 5;

    /// Common configuration, offsets (section 4.1.4.3): selected word of the device's features.
    pub const DEVICE_FEATURE_SELECT: u64 = 0x00;
    /// Selected word of the device's features (RO).
    pub const DEVICE_FEATURE: u64 = 0x04;
    /// Selected word of the driver's features.
    pub const DRIVER_FEATURE_SELECT: u64 = 0x08;
    /// Selected word of the driver's features.
    pub const DRIVER_FEATURE: u64 = 0x0c;
    /// Vector of configuration changes, 16 bits.
    pub const CONFIG_VECTOR: u64 = 0x10;
    /// Number of queues (RO), 16 bits.
    pub const NUM_QUEUES: u64 = 0x12;
    /// Device status, 8 bits.
    pub const STATUS: u64 = 0x14;
    /// Generation of the configuration (RO), 8 bits.
    pub const GENERATION: u64 = 0x15;
    /// Selected queue, 16 bits.
    pub const QUEUE_SELECT: u64 = 0x16;
    /// Size of the selected queue, 16 bits; 0: it does not exist.
    pub const QUEUE_SIZE: u64 = 0x18;
    /// Vector of the selected queue, 16 bits.
    pub const QUEUE_VECTOR: u64 = 0x1a;
    /// Enable flag of the selected queue, 16 bits.
    pub const QUEUE_ENABLE: u64 = 0x1c;
    /// Descriptor table of the selected queue, 64 bits.
    pub const QUEUE_DESC: u64 = 0x20;
    /// Available ring of the selected queue, 64 bits.
    pub const QUEUE_DRIVER: u64 = 0x28;
    /// Used ring of the selected queue, 64 bits.
    pub const QUEUE_DEVICE: u64 = 0x30;
    /// No vector.
    pub const NO_VECTOR: u16 = 0xffff;
}
use spec::*;

/// Class of a kind of device.
const fn class(kind: Kind) -> u32 {
    match kind {
        Kind::Net => 0x02_0000,
        Kind::Block => 0x01_8000,
        Kind::Console | Kind::Vsock => 0x07_8000,
        Kind::Input => 0x09_8000,
        Kind::Entropy | Kind::Balloon | Kind::P9 => 0xff_0000,
    }
}

/// A device with PCI transport. The window supports accesses of 1, 2 and 4 bytes.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Pci<D> {
    state: State,
    device: D,
}

/// All state except the device: code common to all types.
#[derive(Clone, PartialEq, Eq, Debug)]
struct State {
    header: Header,
    msix: Msix,
    common: Common,
    config_vector: u16,
    queue_vectors: [u16; MAX_QUEUES],
    isr: u8,
    /// Offset in the window and length selected by the access capability.
    access: (u32, u32),
}

impl<D: VirtioDevice> Pci<D> {
    /// Creates the function in its power-on state, its window at `base`, a multiple of [`WINDOW`].
    pub fn new(mut device: D, base: u32) -> Self {
        let kind = device.kind();
        let id = (DEVICE + kind as u32) << 16 | VENDOR;
        let mut header = Header::new(id, class(kind), base, WINDOW);
        header.subsystem = (SUBSYSTEM + kind as u32) << 16 | VENDOR;
        header.revision = REVISION;
        header.capabilities = MSIX_CAP as u8;
        let state = State {
            header,
            msix: Msix::new(device.queues().len() + 1),
            common: Common::default(),
            config_vector: NO_VECTOR,
            queue_vectors: [NO_VECTOR; MAX_QUEUES],
            isr: 0,
            access: (0, 0),
        };
        Self { state, device }
    }
}

impl<D: VirtioDevice> Device for Pci<D> {
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
        let Self { state, device } = self;
        state.reset(device, env);
        state.header.reset();
        state.msix.reset();
        state.access = (0, 0);
    }
}

impl<D: VirtioDevice> Function for Pci<D> {
    fn config_read(&mut self, register: u16, _: &mut dyn Env) -> u32 {
        self.state.config_read(register, &mut self.device)
    }

    fn config_write(&mut self, register: u16, value: u32, mask: u32, env: &mut dyn Env) {
        self.state.config_write(register, value, mask, &mut self.device, env);
    }

    fn window(&self) -> Option<(u64, u64)> {
        self.state.header.window()
    }
}

impl State {
    fn reset(&mut self, device: &mut dyn VirtioDevice, env: &mut dyn Env) {
        self.common.reset(device, env);
        self.config_vector = NO_VECTOR;
        self.queue_vectors = [NO_VECTOR; MAX_QUEUES];
        self.isr = 0;
    }

    /// Interrupts the driver.
    fn interrupt(&mut self, causes: Causes, env: &mut dyn Env) {
        if !self.msix.enabled() {
            // No interrupt, but the driver may poll the status.
            self.isr |= causes.bits();
            return;
        }
        if !self.header.master() {
            return;
        }
        if causes.config {
            self.msix.send(self.config_vector, env);
        }
        let mut queues = causes.queues;
        while queues != 0 {
            if let Some(&vector) = self.queue_vectors.get(queues.trailing_zeros() as usize) {
                self.msix.send(vector, env);
            }
            queues &= queues - 1;
        }
    }

    fn read(&mut self, access: Access, device: &mut dyn VirtioDevice) -> u64 {
        let Access { offset, size } = access;
        match offset {
            COMMON..ISR => {
                let word = self.read_common(offset & !3, device);
                u64::from(word) >> (8 * (offset & 3)) & access.open_bus()
            }
            ISR => core::mem::take(&mut self.isr).into(),
            CONFIG..NOTIFY => self.common.config(device, offset - CONFIG, size),
            TABLE..PENDING => self.msix.read_table(Access::new(offset - TABLE, size)),
            PENDING => self.msix.pending(),
            _ => 0,
        }
    }

    /// Reads a 32-bit word of the common configuration.
    fn read_common(&mut self, offset: u64, device: &mut dyn VirtioDevice) -> u32 {
        let common = &self.common;
        let pair = |low: u16, high: u16| u32::from(low) | u32::from(high) << 16;
        let rings = |device| common.queue(device).map_or(Rings::default(), |queue| queue.rings());
        match offset {
            DEVICE_FEATURE_SELECT => common.device_feature_select,
            DEVICE_FEATURE => common.offered(device),
            DRIVER_FEATURE_SELECT => common.driver_feature_select,
            DRIVER_FEATURE => common.accepted(),
            CONFIG_VECTOR => pair(self.config_vector, device.queues().len() as u16),
            STATUS => {
                let low = u16::from(common.status()) | u16::from(common.generation()) << 8;
                pair(low, common.queue_select)
            }
            QUEUE_SIZE => {
                let vector = self.queue_vectors.get(usize::from(common.queue_select));
                let size = common.queue(device).map_or(0, |queue| queue.size());
                pair(size, vector.copied().unwrap_or(NO_VECTOR))
            }
            QUEUE_ENABLE => {
                let ready = common.queue(device).is_some_and(|queue| queue.ready());
                pair(ready.into(), common.queue_select)
            }
            QUEUE_DESC => rings(device).descriptors as u32,
            0x24 => (rings(device).descriptors >> 32) as u32,
            QUEUE_DRIVER => rings(device).available as u32,
            0x2c => (rings(device).available >> 32) as u32,
            QUEUE_DEVICE => rings(device).used as u32,
            0x34 => (rings(device).used >> 32) as u32,
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
        let Access { offset, size } = access;
        let causes = match offset {
            COMMON..ISR => self.write_common(access, value as u32, device, env),
            CONFIG..NOTIFY => {
                device.write_config(offset - CONFIG, size, value, env);
                Causes::default()
            }
            NOTIFY..TABLE => {
                let queue = (offset - NOTIFY) / u64::from(NOTIFY_STEP);
                self.common.notify(queue as usize, device, env)
            }
            TABLE..PENDING => {
                self.msix.write_table(Access::new(offset - TABLE, size), value, env);
                Causes::default()
            }
            _ => Causes::default(),
        };
        self.interrupt(causes, env);
    }

    /// Writes a register of the common configuration in one access, 64-bit ones by halves.
    fn write_common(
        &mut self,
        access: Access,
        value: u32,
        device: &mut dyn VirtioDevice,
        env: &mut dyn Env,
    ) -> Causes {
        let common = &mut self.common;
        let half = value as u16;
        match (access.offset, access.size) {
            (DEVICE_FEATURE_SELECT, 4) => common.device_feature_select = value,
            (DRIVER_FEATURE_SELECT, 4) => common.driver_feature_select = value,
            (DRIVER_FEATURE, 4) => common.accept(value),
            (CONFIG_VECTOR, 2) => self.config_vector = self.existing(half),
            (STATUS, 1) if value == 0 => self.reset(device, env),
            (STATUS, 1) => return common.set_status(value as u8, device, env),
            (QUEUE_SELECT, 2) => common.queue_select = half,
            (QUEUE_SIZE, 2) => {
                if let Some(queue) = common.queue(device) {
                    queue.set_size(half);
                }
            }
            (QUEUE_VECTOR, 2) => {
                let vector = self.existing(half);
                let queue = usize::from(self.common.queue_select);
                if queue < device.queues().len().min(MAX_QUEUES) {
                    self.queue_vectors[queue] = vector;
                }
            }
            // A driver cannot write 0 (section 4.1.4.3.2).
            (QUEUE_ENABLE, 2) if half == 1 => return common.enable_queue(device, env),
            (offset @ QUEUE_DESC..0x38, 4) => {
                let high = offset & 4 != 0;
                common.change_rings(device, |rings| {
                    let address = match offset & !7 {
                        QUEUE_DESC => &mut rings.descriptors,
                        QUEUE_DRIVER => &mut rings.available,
                        _ => &mut rings.used,
                    };
                    set_half(address, high, value);
                });
            }
            (offset, _) => env.missing("virtio: write of an unknown register", offset),
        }
        Causes::default()
    }

    /// The vector, or [`NO_VECTOR`] if it does not exist (section 4.1.5.1.2).
    fn existing(&self, vector: u16) -> u16 {
        if vector < self.msix.count().into() { vector } else { NO_VECTOR }
    }

    fn config_read(&mut self, register: u16, device: &mut dyn VirtioDevice) -> u32 {
        match register {
            ..pci::HEADER_END => self.header.read(register),
            ACCESS_OFFSET => self.access.0,
            ACCESS_LENGTH => self.access.1,
            ACCESS_DATA => self.accessed(0).map_or(0, |access| self.read(access, device) as u32),
            _ => self.capability(register, device),
        }
    }

    fn config_write(
        &mut self,
        register: u16,
        value: u32,
        mask: u32,
        device: &mut dyn VirtioDevice,
        env: &mut dyn Env,
    ) {
        let merge = |old: u32| old & !mask | value & mask;
        match register {
            ..pci::HEADER_END => self.header.write(register, value, mask),
            MSIX_CAP => {
                let control = merge(self.msix.control());
                self.msix.set_control(control, env);
            }
            ACCESS_OFFSET => self.access.0 = merge(self.access.0),
            ACCESS_LENGTH => self.access.1 = merge(self.access.1),
            ACCESS_DATA => {
                let first = mask.trailing_zeros() / 8;
                if let Some(access) = self.accessed(first) {
                    let value = u64::from(value >> (8 * first)) & access.open_bus();
                    self.write(access, value, device, env);
                }
            }
            _ => {}
        }
    }

    /// Decodes the access capability (section 4.1.4.9), from a byte of its data on.
    fn accessed(&self, first: u32) -> Option<Access> {
        let (offset, length) = self.access;
        let fits = matches!(length, 1 | 2 | 4)
            && offset.is_multiple_of(length)
            && offset < WINDOW
            && first == 0;
        fits.then_some(Access::new(offset.into(), length as u8))
    }

    /// A word of the constant part of the capabilities.
    fn capability(&self, register: u16, device: &mut dyn VirtioDevice) -> u32 {
        let queues = device.queues().len() as u32;
        let start = |next: u16, length: u32, kind: u32| {
            CAPABILITY | u32::from(next) << 8 | length << 16 | kind << 24
        };
        let (cap, words) = match register {
            MSIX_CAP..COMMON_CAP => {
                let first = u32::from(msix::spec::CAPABILITY)
                    | u32::from(COMMON_CAP) << 8
                    | self.msix.control();
                (MSIX_CAP, [first, TABLE as u32, PENDING as u32, 0, 0])
            }
            COMMON_CAP..NOTIFY_CAP => {
                let first = start(NOTIFY_CAP, 16, KIND_COMMON);
                (COMMON_CAP, [first, 0, COMMON as u32, COMMON_LEN, 0])
            }
            NOTIFY_CAP..ISR_CAP => {
                let first = start(ISR_CAP, 20, KIND_NOTIFY);
                (NOTIFY_CAP, [first, 0, NOTIFY as u32, NOTIFY_STEP * queues, NOTIFY_STEP])
            }
            ISR_CAP..CONFIG_CAP => {
                (ISR_CAP, [start(CONFIG_CAP, 16, KIND_ISR), 0, ISR as u32, ISR_LEN, 0])
            }
            CONFIG_CAP..ACCESS_CAP => {
                let length = super::CONFIG_LEN as u32;
                (CONFIG_CAP, [start(ACCESS_CAP, 16, KIND_CONFIG), 0, CONFIG as u32, length, 0])
            }
            ACCESS_CAP..=ACCESS_DATA => (ACCESS_CAP, [start(0, 20, KIND_ACCESS), 0, 0, 0, 0]),
            _ => return 0,
        };
        words.get(usize::from(register - cap) / 4).copied().unwrap_or(0)
    }
}
