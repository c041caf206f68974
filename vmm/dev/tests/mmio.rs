//! Scripts for the MMIO transport of virtio, and for channels without a bus.

use proto::channel::{PeerShare, ShareState, View, register as channel};
use vmm_bus::backend::{ChannelInfo, NetInfo};
use vmm_bus::testing::{Script, ScriptPeer};
use vmm_bus::{Access, Device, WAKE_CHANGE, WAKE_INPUT};
use vmm_dev::channel::MmioChannel;
use vmm_dev::virtio::VirtioDevice;
use vmm_dev::virtio::entropy::Entropy;
use vmm_dev::virtio::input::{PowerButton, spec as input};
use vmm_dev::virtio::mmio::{Mmio, spec::*};
use vmm_dev::virtio::net::NetCard;
use vmm_dev::virtio::queue::spec as ring;
use vmm_dev::virtio::spec::*;

const TABLE: u64 = 0x1000;
const AVAILABLE: u64 = 0x2000;
const USED: u64 = 0x3000;
const ENTRIES: u32 = 8;

/// A device and its environment, with memory that begins at 1 GiB as on the board.
struct Rig<D> {
    env: Script,
    device: Mmio<D>,
    offered: u16,
}

const BASE: u64 = 1 << 30;

impl<D: VirtioDevice> Rig<D> {
    fn found(device: D) -> Self {
        let memory = vmm_mem::testing::memory(&[(BASE, 0x1_0000)]);
        let env = Script { memory: Some(memory), entropy: 100, ..Script::new() };
        Self { env, device: Mmio::new(device), offered: 0 }
    }

    fn read(&mut self, register: u64) -> u32 {
        self.env.inl(&mut self.device, register)
    }

    fn write(&mut self, register: u64, value: u32) {
        self.env.outl(&mut self.device, register, value);
    }

    fn address(&mut self, register: u64, value: u64) {
        self.write(register, value as u32);
        self.write(register + 4, (value >> 32) as u32);
    }

    /// Initialises the device and its queue 0 as a driver (VIRTIO 1.2, section 4.2.3).
    fn set_up(&mut self) {
        self.write(STATUS, 0);
        self.write(STATUS, (ACKNOWLEDGE | DRIVER).into());
        self.write(DEVICE_FEATURES_SELECT, 1);
        assert_eq!(self.read(DEVICE_FEATURES), 1, "version 1");
        self.write(DRIVER_FEATURES_SELECT, 1);
        self.write(DRIVER_FEATURES, 1);
        self.write(STATUS, (ACKNOWLEDGE | DRIVER | FEATURES_OK).into());
        self.write(QUEUE_SELECT, 0);
        assert_eq!(self.read(QUEUE_READY), 0);
        assert!(self.read(QUEUE_MAX) >= ENTRIES);
        self.write(QUEUE_SIZE, ENTRIES);
        self.address(QUEUE_DESC, BASE + TABLE);
        self.address(QUEUE_DRIVER, BASE + AVAILABLE);
        self.address(QUEUE_DEVICE, BASE + USED);
        self.env.memory.expect("memory").fill(BASE + TABLE, 0x3000, 0).expect("in memory");
        self.write(QUEUE_READY, 1);
        assert_eq!(self.read(QUEUE_READY), 1);
        self.write(STATUS, (ACKNOWLEDGE | DRIVER | FEATURES_OK | DRIVER_OK).into());
        self.offered = 0;
    }

    /// Offers a writable buffer in queue 0.
    fn offer(&mut self, address: u64, length: u32) {
        let memory = self.env.memory.expect("memory");
        let head = self.offered % ENTRIES as u16;
        let entry = BASE + TABLE + 16 * u64::from(head);
        memory.write(entry, address).expect("in memory");
        memory.write(entry + ring::LENGTH, length).expect("in memory");
        memory.write(entry + ring::FLAGS, ring::F_WRITE).expect("in memory");
        let slot = BASE + AVAILABLE + ring::RING + 2 * u64::from(head);
        memory.write(slot, head).expect("in memory");
        self.offered += 1;
        memory.write(BASE + AVAILABLE + ring::INDEX, self.offered).expect("in memory");
        self.write(QUEUE_NOTIFY, 0);
    }

    fn used(&self) -> u16 {
        self.env.memory.expect("memory").read(BASE + USED + ring::INDEX).expect("in memory")
    }

    fn line(&self) -> bool {
        self.env.lines.get(&0).copied().unwrap_or(false)
    }
}

#[test]
fn a_driver_finds_sets_up_and_uses_a_device() {
    let mut rig = Rig::found(Entropy::new());
    let identity = [MAGIC, VERSION, DEVICE_ID, VENDOR_ID].map(|register| rig.read(register));
    assert_eq!(identity, [0x7472_6976, 2, 4, 0x4452_4150]);
    assert_eq!([rig.read(SHARED_LENGTH), rig.read(SHARED_LENGTH + 4)], [u32::MAX; 2]);
    rig.set_up();
    rig.write(QUEUE_SELECT, 0x1_0000);
    assert_eq!(rig.read(QUEUE_MAX), 0, "no such queue, and not queue 0");
    assert!(!rig.line());
    rig.offer(BASE + 0x100, 4);
    assert_eq!((rig.used(), rig.line(), rig.read(INTERRUPT_STATUS)), (1, true, 1));
    // More work before the acknowledgement: the same interrupt.
    rig.offer(BASE + 0x200, 4);
    assert_eq!((rig.used(), rig.env.edges.len()), (2, 1));
    rig.write(INTERRUPT_ACK, 1);
    assert_eq!((rig.line(), rig.read(INTERRUPT_STATUS)), (false, 0));
    rig.offer(BASE + 0x300, 4);
    assert!(rig.line());
    rig.write(STATUS, 0);
    let state = [STATUS, QUEUE_READY, INTERRUPT_STATUS].map(|register| rig.read(register));
    assert_eq!((state, rig.line()), ([0; 3], false));
    rig.set_up();
    rig.offer(BASE + 0x100, 4);
    assert_eq!(rig.used(), 1);
}

/// The line falls at an acknowledgement and rises for what is left, so a driver may use edges.
#[test]
fn causes_that_are_left_are_a_new_edge() {
    let mut rig = Rig::found(Entropy::new());
    rig.set_up();
    rig.offer(BASE + 0x100, 4);
    // A broken chain: the device needs a reset, which is a change of the configuration.
    rig.offer(0, 4);
    assert_eq!(rig.read(INTERRUPT_STATUS), 3);
    assert_ne!(rig.read(STATUS) as u8 & NEEDS_RESET, 0);
    rig.env.edges.clear();
    rig.write(INTERRUPT_ACK, 1);
    assert_eq!(rig.env.edges, [(0, false), (0, true)]);
    assert_eq!(rig.read(INTERRUPT_STATUS), 2);
    rig.write(INTERRUPT_ACK, 2);
    assert!(!rig.line());
}

/// A queue that is disabled does nothing, and keeps its size and rings, for which chains may still
/// be outstanding.
#[test]
fn a_disabled_queue_waits_for_a_reset() {
    let mut rig = Rig::found(Entropy::new());
    rig.set_up();
    rig.env.entropy = 0;
    rig.offer(BASE + 0x100, 4);
    rig.write(QUEUE_SELECT, 0);
    rig.write(QUEUE_READY, 0);
    assert_eq!(rig.read(QUEUE_READY), 0);
    rig.write(QUEUE_SIZE, 0);
    rig.address(QUEUE_DEVICE, 0);
    rig.write(QUEUE_READY, 1);
    assert_eq!(rig.read(QUEUE_READY), 0);
    rig.env.entropy = 100;
    rig.device.wake(WAKE_INPUT, &mut rig.env);
    assert_eq!((rig.used(), rig.line()), (0, false));
    rig.set_up();
    rig.offer(BASE + 0x100, 4);
    assert_eq!(rig.used(), 1);
}

#[test]
fn configuration_in_bytes_and_registers_in_words() {
    let info = NetInfo { mac: [2, 3, 4, 5, 6, 7], ..NetInfo::default() };
    let mut rig = Rig::found(NetCard::new(info));
    let mut read = |offset, size| rig.device.read(Access::new(offset, size), &mut rig.env);
    assert_eq!(
        (read(CONFIG, 1), read(CONFIG + 2, 2), read(CONFIG + 4, 4) & 0xffff),
        (2, 0x504, 0x706)
    );
    assert_eq!((read(MAGIC, 1), read(MAGIC, 8)), (0, 0));
    for offset in (0..LENGTH).step_by(8) {
        for size in [1, 2, 4, 8] {
            rig.device.write(Access::new(offset, size), u64::MAX, &mut rig.env);
            rig.device.read(Access::new(offset, size), &mut rig.env);
        }
    }
}

#[test]
fn a_press_of_the_power_button_is_four_events() {
    let mut rig = Rig::found(PowerButton::new());
    let press =
        |rig: &mut Rig<PowerButton>| rig.device.with_device(&mut rig.env, PowerButton::press);
    press(&mut rig);
    rig.set_up();
    let mut item = |select: u8, part: u8| {
        let selected = u64::from(select) | u64::from(part) << 8;
        rig.device.write(Access::new(CONFIG, 2), selected, &mut rig.env);
        let mut read = |at, size| rig.device.read(Access::new(CONFIG + at, size), &mut rig.env);
        (read(input::SIZE as u64, 1), read(input::ITEM as u64, 4), read(input::ITEM as u64 + 14, 1))
    };
    assert_eq!(item(input::NAME, 0), (12, u32::from_le_bytes(*b"Powe").into(), 0));
    assert_eq!(item(input::EVENT_BITS, input::KEY as u8), (15, 0, 1 << (input::POWER % 8)));
    assert_eq!(item(input::EVENT_BITS, 2), (0, 0, 0));
    for index in 0..3 {
        rig.offer(BASE + 8 * index, 8);
    }
    assert_eq!(rig.used(), 0, "a press before the driver is lost");
    press(&mut rig);
    assert_eq!((rig.used(), rig.line()), (3, true));
    // The last event waits, and another press meanwhile is lost.
    press(&mut rig);
    for index in 3..6 {
        rig.offer(BASE + 8 * index, 8);
    }
    assert_eq!(rig.used(), 4);
    let memory = rig.env.memory.expect("memory");
    let events = [0, 1, 2, 3].map(|index| memory.read::<u64>(BASE + 8 * index).expect("in memory"));
    assert_eq!(events, [1 << 32 | 116 << 16 | 1, 0, 116 << 16 | 1, 0]);
    press(&mut rig);
    assert_eq!(rig.used(), 6);
    // What is no event's length breaks the queue.
    rig.offer(BASE, 7);
    assert_ne!(rig.read(STATUS) as u8 & NEEDS_RESET, 0);
}

#[test]
fn a_channel_without_a_bus_pulses_its_lines() {
    let info = ChannelInfo {
        number: 1,
        side: 1,
        own_id: 3,
        peer_id: 2,
        size: 1 << 20,
        doorbell: true,
        own_name: [0; channel::NAME_LEN],
        peer_name: [0; channel::NAME_LEN],
    };
    let mut env = Script { channel: Some(ScriptPeer::default()), ..Script::new() };
    let mut device = MmioChannel::new(info);
    assert_eq!(env.inl(&mut device, channel::MAGIC), channel::MAGIC_VALUE);
    assert_eq!(env.inl(&mut device, channel::TABLE), 0, "no MSI-X");
    device.wake(WAKE_INPUT, &mut env);
    assert_eq!(env.edges, [(0, true), (0, false)]);
    env.edges.clear();
    let shares = [PeerShare { state: ShareState::Offered, writable: false, length: 4096 }; 4];
    let peer = env.channel.as_mut().expect("a peer");
    peer.view = View { peer_runs: true, peers: shares, ..View::default() };
    device.wake(WAKE_CHANGE, &mut env);
    assert_eq!(env.edges, [(1, true), (1, false)]);
    let both = channel::EVENT_PEER | channel::EVENT_SHARES;
    assert_eq!(env.inl(&mut device, channel::EVENTS), both);
    env.outl(&mut device, channel::EVENTS, both);
    assert_eq!(env.inl(&mut device, channel::EVENTS), 0);
    device.reset(&mut env);
    assert_eq!(env.inl(&mut device, channel::SIZE), 1 << 20);
}
