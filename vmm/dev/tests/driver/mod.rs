//! A driver of virtio devices over PCI, for scripts.

use vmm_bus::testing::Script;
use vmm_bus::{Access, Device};
use vmm_dev::pci::{Function, spec as pci};
use vmm_dev::virtio::VirtioDevice;
use vmm_dev::virtio::pci::{Pci, spec::*};
use vmm_dev::virtio::queue::spec as ring;
use vmm_dev::virtio::spec::*;
use vmm_mem::GuestMemory;

/// Bytes of guest memory. Queue `q` has its rings at `0x1_0000 * (q + 1)`; buffers are below.
pub const MEMORY: u64 = 0x10_0000;
/// Rings of the queues from [`FIRST_HIGH`] on: first address and bytes, beyond other memory.
#[allow(dead_code, reason = "most devices have few queues")]
pub const HIGH_RINGS: (u64, u64) = (0x20_0000, 0xd_0000);
/// First queue with rings there.
const FIRST_HIGH: u64 = 5;
/// Maximum descriptors of a chain.
const CHAIN: u16 = 4;
/// Vector of configuration changes; queue `q` has the vector `q + 1` above.
pub const CONFIG_INTERRUPT: u8 = 0x40;

/// A part of a chain: address, length, and true for device-writable.
pub type Buffer = (u64, u32, bool);

/// Progress of the driver in a queue.
#[derive(Clone, Copy, Default)]
struct Progress {
    size: u16,
    available: u16,
    used: u16,
}

/// A function, its environment and its driver.
pub struct Rig<D> {
    pub env: Script,
    pub function: Pci<D>,
    queues: Vec<Progress>,
}

impl<D: VirtioDevice> Rig<D> {
    /// A device before its set-up.
    pub fn found(device: D, prepare: impl FnOnce(&mut Script)) -> Self {
        let mut env = Script::new();
        prepare(&mut env);
        env.memory.get_or_insert_with(|| vmm_mem::testing::memory(&[(0, MEMORY)]));
        let mut function = Pci::new(device, 0xc000_0000);
        let command = pci::MEMORY | pci::MASTER;
        function.config_write(pci::COMMAND, command.into(), 0xffff, &mut env);
        Self { env, function, queues: Vec::new() }
    }

    /// An initialised device with all of these features that it offers, and MSI-X.
    pub fn ready(device: D, features: u64, prepare: impl FnOnce(&mut Script)) -> Self {
        let mut rig = Self::found(device, prepare);
        rig.set_up(features);
        rig
    }

    /// Initialises the device as a driver (VIRTIO 1.2, section 3.1.1).
    pub fn set_up(&mut self, features: u64) {
        self.write(STATUS, 1, 0);
        self.write(STATUS, 1, u64::from(ACKNOWLEDGE | DRIVER));
        for word in 0..2 {
            self.write(DEVICE_FEATURE_SELECT, 4, word);
            let offered = self.read(DEVICE_FEATURE, 4);
            self.write(DRIVER_FEATURE_SELECT, 4, word);
            self.write(DRIVER_FEATURE, 4, offered & (features | F_VERSION_1) >> (32 * word));
        }
        self.write(STATUS, 1, u64::from(ACKNOWLEDGE | DRIVER | FEATURES_OK));
        assert_ne!(self.read(STATUS, 1) as u8 & FEATURES_OK, 0);
        let enable = vmm_dev::pci::msix::spec::ENABLE;
        self.function.config_write(MSIX_CAP, enable, enable, &mut self.env);
        self.vector(CONFIG_VECTOR, 0);
        self.queues.clear();
        for queue in 0..self.read(NUM_QUEUES, 2) {
            self.write(QUEUE_SELECT, 2, queue);
            let size = self.read(QUEUE_SIZE, 2) as u16;
            let base = Self::rings(queue as usize);
            for (register, address) in
                [(QUEUE_DESC, base), (QUEUE_DRIVER, base + 0x4000), (QUEUE_DEVICE, base + 0x8000)]
            {
                self.write(register, 4, address);
                self.write(register + 4, 4, 0);
            }
            self.vector(QUEUE_VECTOR, queue as u16 + 1);
            self.write(QUEUE_ENABLE, 2, 1);
            self.memory().fill(base, 0x1_0000, 0).unwrap();
            self.queues.push(Progress { size, ..Progress::default() });
        }
        self.write(STATUS, 1, u64::from(ACKNOWLEDGE | DRIVER | FEATURES_OK | DRIVER_OK));
    }

    fn vector(&mut self, register: u64, vector: u16) {
        let entry = TABLE + 16 * u64::from(vector);
        self.write(entry, 4, 0xfee0_0000);
        self.write(entry + 8, 4, u64::from(CONFIG_INTERRUPT) + u64::from(vector));
        self.write(entry + 12, 4, 0);
        self.write(register, 2, vector.into());
        assert_eq!(self.read(register, 2), u64::from(vector));
    }

    fn rings(queue: usize) -> u64 {
        match queue as u64 {
            low @ ..FIRST_HIGH => 0x1_0000 * (low + 1),
            high => HIGH_RINGS.0 + 0x1_0000 * (high - FIRST_HIGH),
        }
    }

    /// Number of queues that were set up.
    #[allow(dead_code, reason = "scripts know it")]
    pub fn queues(&self) -> usize {
        self.queues.len()
    }

    pub fn memory(&self) -> GuestMemory {
        self.env.memory.unwrap()
    }

    pub fn put(&self, address: u64, bytes: &[u8]) {
        self.memory().write_slice(address, bytes).unwrap();
    }

    #[allow(dead_code, reason = "not every device writes")]
    pub fn get(&self, address: u64, length: usize) -> Vec<u8> {
        let mut bytes = vec![0; length];
        self.memory().read_slice(address, &mut bytes).unwrap();
        bytes
    }

    pub fn read(&mut self, offset: u64, size: u8) -> u64 {
        self.function.read(Access::new(offset, size), &mut self.env)
    }

    pub fn write(&mut self, offset: u64, size: u8, value: u64) {
        self.function.write(Access::new(offset, size), value, &mut self.env);
    }

    pub fn status(&mut self) -> u8 {
        self.read(STATUS, 1) as u8
    }

    /// Makes a chain available; returns its head.
    pub fn offer(&mut self, queue: usize, buffers: &[Buffer]) -> u16 {
        let memory = self.memory();
        let progress = &mut self.queues[queue];
        let head = progress.available % (progress.size / CHAIN) * CHAIN;
        let base = Self::rings(queue);
        assert!(buffers.len() <= CHAIN.into());
        for (index, &(address, length, write)) in buffers.iter().enumerate() {
            let at = base + 16 * (u64::from(head) + index as u64);
            let last = index + 1 == buffers.len();
            let flags = if write { ring::F_WRITE } else { 0 } | if last { 0 } else { ring::F_NEXT };
            memory.write(at, address).unwrap();
            memory.write(at + ring::LENGTH, length).unwrap();
            memory.write(at + ring::FLAGS, flags).unwrap();
            memory.write(at + ring::NEXT, head + index as u16 + 1).unwrap();
        }
        let slot = u64::from(progress.available % progress.size);
        memory.write(base + 0x4000 + ring::RING + 2 * slot, head).unwrap();
        progress.available = progress.available.wrapping_add(1);
        memory.write(base + 0x4000 + ring::INDEX, progress.available).unwrap();
        head
    }

    pub fn notify(&mut self, queue: usize) {
        self.write(NOTIFY + 4 * queue as u64, 2, queue as u64);
    }

    /// [`Rig::offer`], then [`Rig::notify`].
    pub fn send(&mut self, queue: usize, buffers: &[Buffer]) -> u16 {
        let head = self.offer(queue, buffers);
        self.notify(queue);
        head
    }

    /// Notifies the device of input or room.
    pub fn wake(&mut self) {
        self.function.wake(vmm_bus::WAKE_INPUT, &mut self.env);
    }

    /// Deadline of the device's timer.
    #[allow(dead_code, reason = "scripts of devices with a timer know it")]
    pub fn timer(&self) -> Option<vmm_bus::Nanos> {
        self.env.deadlines.get(&0).copied()
    }

    /// Fires the device's timer if it is due.
    #[allow(dead_code, reason = "scripts of devices with a timer know it")]
    pub fn tick(&mut self) {
        if self.timer().is_some_and(|deadline| deadline <= self.env.now) {
            self.env.deadlines.remove(&0);
            self.function.wake(0, &mut self.env);
        }
    }

    /// Chains used since the last call: head and bytes written.
    pub fn used(&mut self, queue: usize) -> Vec<(u16, u32)> {
        let memory = self.memory();
        let base = Self::rings(queue) + 0x8000;
        let progress = &mut self.queues[queue];
        let index: u16 = memory.read(base + ring::INDEX).unwrap();
        let mut list = Vec::new();
        while progress.used != index {
            let at = base + ring::RING + 8 * u64::from(progress.used % progress.size);
            let head: u32 = memory.read(at).unwrap();
            list.push((head as u16, memory.read(at + 4).unwrap()));
            progress.used = progress.used.wrapping_add(1);
        }
        list
    }

    /// Vectors of the interrupts since the last call.
    pub fn interrupts(&mut self) -> Vec<u8> {
        self.env.msis.drain(..).map(|msi| msi.data as u8).collect()
    }
}

/// Breaks queue `queue`: the device requests a reset, signals it, and works again afterwards.
#[track_caller]
#[allow(dead_code, reason = "not every script breaks a queue")]
pub fn breaks<D: VirtioDevice>(rig: &mut Rig<D>, queue: usize, buffers: &[Buffer]) {
    rig.interrupts();
    rig.send(queue, buffers);
    assert_ne!(rig.status() & NEEDS_RESET, 0);
    assert_eq!(rig.interrupts(), [CONFIG_INTERRUPT]);
    assert_eq!(rig.used(queue), []);
    rig.notify(queue);
    rig.wake();
    assert_eq!((rig.used(queue), rig.interrupts()), (vec![], vec![]), "nothing until it is reset");
    rig.set_up(u64::MAX);
    assert_eq!(rig.status(), ACKNOWLEDGE | DRIVER | FEATURES_OK | DRIVER_OK);
}
