//! Scripts for the transports, the console and the entropy source.

mod driver;

use driver::{Rig, breaks};
use proptest::prelude::*;
use vmm_bus::backend::{BlockInfo, NetInfo, Offload};
use vmm_bus::testing::{Script, ScriptDisk, ScriptPort};
use vmm_bus::{Device, Msi, WAKE_INPUT};
use vmm_dev::pci::msix::spec as msix;
use vmm_dev::pci::{Bridge, ConfigAddress, ConfigTarget, Function, ecam, spec as config};
use vmm_dev::virtio::blk::Blk;
use vmm_dev::virtio::console::{Console, spec::*};
use vmm_dev::virtio::entropy::{Entropy, MOST};
use vmm_dev::virtio::net::NetCard;
use vmm_dev::virtio::pci::{Pci, spec as pci};
use vmm_dev::virtio::spec::*;
use vmm_dev::virtio::{CONFIG_LEN, VirtioDevice};

fn entropy(bytes: usize) -> Rig<Entropy> {
    Rig::ready(Entropy::new(), !F_EVENT_IDX, |env| env.entropy = bytes)
}

#[test]
fn entropy_fills_offered_buffers() {
    let mut rig = entropy(100);
    rig.offer(0, &[(0x100, 4, true), (0x200, 4, true)]);
    rig.send(0, &[(0x300, 4096, true)]);
    assert_eq!(rig.used(0), [(0, 8), (4, MOST as u32)]);
    assert_eq!(rig.interrupts(), [0x41]);
    assert_eq!(rig.get(0x100, 5), [100, 99, 98, 97, 0]);
    assert_eq!(rig.get(0x200, 4), [96, 95, 94, 93]);
    assert_eq!(rig.get(0x300 + MOST as u64 - 1, 2), [29, 0]);
    // No random bytes: the chain waits.
    rig.send(0, &[(0x100, 64, true)]);
    assert_eq!(rig.used(0), []);
    rig.env.entropy = 64;
    rig.wake();
    assert_eq!(rig.used(0), [(8, 64)]);
    breaks(&mut rig, 0, &[(0x100, 64, false)]);
}

#[test]
fn console_both_ways() {
    let mut rig = Rig::ready(Console::new(), !F_EVENT_IDX, |_| {});
    rig.put(0x100, b"hello ");
    rig.put(0x200, b"world");
    rig.send(TRANSMIT, &[(0x100, 6, false), (0x200, 5, false)]);
    assert_eq!(
        (rig.env.stream.output.clone(), rig.used(TRANSMIT)),
        (b"hello world".to_vec(), vec![(0, 0)])
    );
    rig.env.stream.input.extend(b"typed");
    rig.wake();
    assert_eq!(rig.used(RECEIVE), [], "no buffer");
    rig.send(RECEIVE, &[(0x300, 3, true)]);
    rig.send(RECEIVE, &[(0x310, 3, true)]);
    assert_eq!(rig.used(RECEIVE), [(0, 3), (4, 2)]);
    assert_eq!((rig.get(0x300, 3), rig.get(0x310, 3)), (b"typ".to_vec(), b"ed\0".to_vec()));
    rig.write(pci::CONFIG + EMERG_WRITE, 4, b'!'.into());
    assert_eq!(rig.env.stream.output.last(), Some(&b'!'));
    breaks(&mut rig, RECEIVE, &[(0x300, 3, false)]);
}

#[test]
fn console_waits_for_room() {
    let mut rig = Rig::ready(Console::new(), u64::MAX, |_| {});
    let text: Vec<u8> = (0..200).collect();
    rig.put(0x100, &text);
    rig.env.stream.room = Some(70);
    rig.send(TRANSMIT, &[(0x100, 200, false)]);
    assert_eq!((rig.env.stream.output.len(), rig.used(TRANSMIT)), (70, vec![]));
    rig.env.stream.room = None;
    rig.wake();
    assert_eq!((rig.env.stream.output.clone(), rig.used(TRANSMIT)), (text, vec![(0, 0)]));
}

/// A long chain takes several calls.
#[test]
fn console_work_is_bounded() {
    let mut rig = Rig::ready(Console::new(), u64::MAX, |_| {});
    rig.send(TRANSMIT, &[(0, 0x10_0000, false)]);
    let first = rig.env.stream.output.len();
    assert!(first > 0 && first < 0x10_0000);
    rig.env.advance(&mut rig.function, 0);
    assert!(rig.env.stream.output.len() > first);
}

#[test]
fn life_of_a_device() {
    let mut rig = Rig::found(Entropy::new(), |env| env.entropy = 100);
    assert_eq!(rig.status(), RESET);
    rig.write(pci::STATUS, 1, (ACKNOWLEDGE | DRIVER | FEATURES_OK).into());
    assert_eq!(rig.status(), ACKNOWLEDGE | DRIVER, "without version 1");
    rig.write(pci::STATUS, 1, DRIVER_OK.into());
    assert_eq!(rig.status(), ACKNOWLEDGE | DRIVER, "not before the features");
    rig.write(pci::DRIVER_FEATURE_SELECT, 4, 1);
    rig.write(pci::DRIVER_FEATURE, 4, u32::MAX.into());
    rig.write(pci::STATUS, 1, FEATURES_OK.into());
    assert_eq!(rig.status() & FEATURES_OK, 0, "features that are not offered");
    rig.write(pci::DRIVER_FEATURE, 4, 1);
    rig.write(pci::STATUS, 1, FEATURES_OK.into());
    assert_ne!(rig.status() & FEATURES_OK, 0);
    rig.write(pci::DRIVER_FEATURE, 4, 0);
    assert_eq!(rig.read(pci::DRIVER_FEATURE, 4), 1, "settled");
    for select in [2, 3, u32::MAX] {
        rig.write(pci::DEVICE_FEATURE_SELECT, 4, select.into());
        assert_eq!(rig.read(pci::DEVICE_FEATURE, 4), 0);
    }
    // An invalid queue.
    rig.write(pci::QUEUE_SIZE, 2, 3);
    rig.write(pci::QUEUE_ENABLE, 2, 1);
    assert_eq!(rig.read(pci::QUEUE_ENABLE, 2), 0);
    assert_ne!(rig.status() & NEEDS_RESET, 0);
    rig.write(pci::STATUS, 1, 0);
    assert_eq!((rig.status(), rig.read(pci::QUEUE_SIZE, 2)), (0, 16));
    rig.set_up(0);
    rig.send(0, &[(0x100, 4, true)]);
    rig.used(0);
    rig.write(pci::STATUS, 1, FAILED.into());
    rig.send(0, &[(0x100, 4, true)]);
    assert_eq!(rig.used(0), [], "the driver has given up");
    rig.write(pci::QUEUE_SELECT, 2, 7);
    assert_eq!((rig.read(pci::QUEUE_SIZE, 2), rig.read(pci::QUEUE_VECTOR, 2)), (0, 0xffff));
}

#[test]
fn configuration_space() {
    let mut env = Script::new();
    let mut function = Pci::new(Blk::new(BlockInfo::default()), 0xc000_8000);
    let mut read = |register| function.config_read(register, &mut env);
    assert_eq!(read(config::ID), 0x1042_1af4);
    assert_eq!(read(config::CLASS), 0x0180_0001);
    assert_eq!(read(config::SUBSYSTEM), 0x1102_1af4);
    assert_ne!(read(config::COMMAND) & config::HAS_CAPABILITIES, 0);
    assert_eq!(read(config::BAR), 0xc000_8000);
    let mut kinds = Vec::new();
    let mut at = read(config::CAPABILITIES) as u16;
    while at != 0 {
        let first = read(at);
        kinds.push((first as u8, (first >> 24) as u8));
        if first as u8 == 9 {
            let (offset, length) = (read(at + 8), read(at + 12));
            assert!(offset + length <= pci::WINDOW, "{first:x}");
        } else {
            assert_eq!((first >> 16 & 0x7ff, read(at + 4), read(at + 8)), (1, 0x4000, 0x4800));
        }
        at = (first >> 8 & 0xff) as u16;
    }
    assert_eq!(kinds, [(0x11, 0), (9, 1), (9, 2), (9, 3), (9, 4), (9, 5)]);
    // Size and place of the window.
    assert_eq!(function.window(), None);
    let mut write = |register, value, mask| function.config_write(register, value, mask, &mut env);
    write(config::BAR, u32::MAX, u32::MAX);
    write(config::COMMAND, u32::MAX, 0xff);
    assert_eq!(function.config_read(config::BAR, &mut env), !(pci::WINDOW - 1));
    assert_eq!(function.config_read(config::COMMAND, &mut env) & 0xffff, 6);
    function.config_write(config::BAR, 0xd123_4567, 0xffff_0000, &mut env);
    assert_eq!(function.window(), Some((0xd123_8000, 0x8000)));
    function.reset(&mut env);
    assert_eq!(function.window(), None);
    assert_eq!(function.config_read(config::BAR, &mut env), 0xc000_8000);
}

#[test]
fn addresses_of_configuration_space() {
    let mut address = ConfigAddress::default();
    assert_eq!(address.target(0, 4), None, "disabled");
    address.set(0x8000_1811);
    assert_eq!(address.get(), 0x8000_1810);
    assert_eq!(
        address.target(2, 2),
        Some(ConfigTarget { device: 3, function: 0, offset: 0x12, size: 2 })
    );
    assert_eq!(address.target(2, 4), None, "two registers");
    address.set(0x8001_1810);
    assert_eq!(address.target(0, 4), None, "another bus");
    address.set(0x8000_1910);
    let second = address.target(0, 4).map(|target| (target.device, target.function));
    assert_eq!(second, Some((3, 1)));
    assert_eq!(
        ecam(0x1_8ffc, 4),
        Some(ConfigTarget { device: 3, function: 0, offset: 0xffc, size: 4 })
    );
    let second = ecam(0x1_9000, 4).map(|target| (target.device, target.function, target.offset));
    assert_eq!(second, Some((3, 1, 0)));
    assert_eq!(ecam(0x10_0000, 4), None);
    assert_eq!(ecam(u64::MAX, 1), None);

    let (mut env, mut bridge) = (Script::new(), Bridge::new());
    let at = |offset, size| ConfigTarget { device: 0, function: 0, offset, size };
    assert_eq!(at(0, 4).read(Some(&mut bridge), &mut env), 0x0008_1b36);
    assert_eq!(at(2, 2).read(Some(&mut bridge), &mut env), 8);
    assert_eq!(at(0xb, 1).read(Some(&mut bridge), &mut env), 6);
    assert_eq!(at(0x100, 4).read(Some(&mut bridge), &mut env), 0);
    assert_eq!(at(0, 2).read(None, &mut env), 0xffff);
    at(0x3c, 1).write(0xaabb, Some(&mut bridge), &mut env);
    assert_eq!(at(0x3c, 4).read(Some(&mut bridge), &mut env), 0xbb);
    let bits = [(0xc, 4), (0xe, 1), (0xe, 2), (0xd, 1), (0, 4)];
    let bits = bits.map(|(offset, size)| at(offset, size).multifunction());
    assert_eq!(bits, [0x80_0000, 0x80, 0x80, 0, 0]);
    at(0x3d, 1).write(0xaa, Some(&mut bridge), &mut env);
    assert_eq!(at(0x3c, 4).read(Some(&mut bridge), &mut env), 0xbb);
}

#[test]
fn masked_vectors_are_pending() {
    let mut rig = entropy(1000);
    let control = pci::TABLE + 16 + 12;
    rig.write(control, 4, 1);
    rig.send(0, &[(0x100, 4, true)]);
    assert_eq!((rig.interrupts(), rig.read(pci::PENDING, 4)), (vec![], 2));
    rig.write(control, 4, 0);
    assert_eq!((rig.interrupts(), rig.read(pci::PENDING, 4)), (vec![0x41], 0));
    let mask = |rig: &mut Rig<Entropy>, value| {
        rig.function.config_write(pci::MSIX_CAP, value, msix::MASK_ALL, &mut rig.env);
    };
    mask(&mut rig, msix::MASK_ALL);
    rig.send(0, &[(0x100, 4, true)]);
    assert_eq!(rig.interrupts(), []);
    mask(&mut rig, 0);
    assert_eq!(rig.interrupts(), [0x41]);
    // Address and data are the driver's.
    rig.write(pci::TABLE + 16, 4, 0xfeef_f004);
    rig.write(pci::TABLE + 20, 4, 1);
    rig.write(pci::TABLE + 24, 4, 0x8751);
    rig.send(0, &[(0x100, 4, true)]);
    let expected = Msi { address: 0x1_feef_f004, data: 0x8751 };
    assert_eq!(std::mem::take(&mut rig.env.msis), [expected]);
    // An absent vector.
    rig.write(pci::QUEUE_VECTOR, 2, 2);
    assert_eq!(rig.read(pci::QUEUE_VECTOR, 2), 0xffff);
    // Without permission to write memory.
    rig.write(pci::TABLE + 20, 4, 0);
    rig.write(pci::QUEUE_VECTOR, 2, 1);
    rig.function.config_write(config::COMMAND, 0, config::MASTER.into(), &mut rig.env);
    rig.send(0, &[(0x100, 4, true)]);
    assert_eq!(rig.interrupts(), []);
}

#[test]
fn without_messages_the_driver_looks() {
    let mut rig = entropy(100);
    rig.function.config_write(pci::MSIX_CAP, 0, msix::ENABLE, &mut rig.env);
    rig.send(0, &[(0x100, 4, true)]);
    assert_eq!(rig.interrupts(), []);
    assert_eq!((rig.read(pci::ISR, 1), rig.read(pci::ISR, 1)), (CAUSE_QUEUE.into(), 0));
}

#[test]
fn the_window_through_configuration_space() {
    let mut rig = Rig::found(Entropy::new(), |_| {});
    let Rig { function, env, .. } = &mut rig;
    let mut select = |function: &mut Pci<Entropy>, offset, length| {
        function.config_write(pci::ACCESS_OFFSET, offset, u32::MAX, env);
        function.config_write(pci::ACCESS_LENGTH, length, u32::MAX, env);
    };
    select(function, pci::STATUS as u32, 1);
    function.config_write(pci::ACCESS_DATA, 3, 0xff, &mut Script::new());
    assert_eq!(function.config_read(pci::ACCESS_DATA, &mut Script::new()), 3);
    for (offset, length) in [(pci::WINDOW, 4), (1, 4), (0, 3), (0, 8), (0, 0), (u32::MAX, 1)] {
        select(function, offset, length);
        assert_eq!(function.config_read(pci::ACCESS_DATA, &mut Script::new()), 0);
    }
}

/// One operation of a hostile driver.
#[derive(Clone, Debug)]
enum Step {
    Read(u64, u8),
    Write(u64, u8, u64),
    Config(u16, u32, u32),
    Memory(u64, Vec<u8>),
    Wake(u8),
    Frame(usize),
    Input(u8),
    Complete,
    Reset,
    Start,
}

fn step() -> impl Strategy<Value = Step> {
    let offset = prop_oneof![
        6 => 0_u64..0x40,
        2 => (0_u64..8).prop_map(|page| page * 0x1000),
        2 => 0x4000_u64..0x4040,
        1 => 0x2000_u64..0x2000 + CONFIG_LEN as u64,
        3 => (0_u64..4).prop_map(|queue| 0x3000 + 4 * queue),
        1 => any::<u64>(),
    ];
    let size = prop::sample::select(vec![1_u8, 2, 4, 8]);
    let value =
        prop_oneof![3 => 0_u64..16, 1 => any::<u64>(), 1 => (0_u64..16).prop_map(|n| n << 12)];
    // Rings, descriptors and the addresses in them.
    let place = prop_oneof![
        4 => (0_u64..3, 0_u64..3, 0_u64..64)
            .prop_map(|(queue, ring, at)| 0x1_0000 * (queue + 1) + 0x4000 * ring + at),
        1 => 0_u64..0x1000,
    ];
    let word = prop_oneof![2 => 0_u16..8, 1 => any::<u16>()];
    let words = prop::collection::vec(word, 1..8)
        .prop_map(|words| words.into_iter().flat_map(u16::to_le_bytes).collect());
    prop_oneof![
        4 => (offset.clone(), size.clone()).prop_map(|(offset, size)| Step::Read(offset, size)),
        12 => (offset, size, value).prop_map(|(offset, size, value)| Step::Write(offset, size, value)),
        2 => (0_u16..0x40, any::<u32>(), any::<u32>())
            .prop_map(|(register, value, mask)| Step::Config(register * 4, value, mask)),
        12 => (place, words).prop_map(|(place, bytes)| Step::Memory(place, bytes)),
        2 => prop::sample::select(vec![0_u8, 1, WAKE_INPUT]).prop_map(Step::Wake),
        2 => (0_usize..70_000).prop_map(Step::Frame),
        1 => any::<u8>().prop_map(Step::Input),
        2 => Just(Step::Complete),
        1 => Just(Step::Reset),
        2 => Just(Step::Start),
    ]
}

fn hammer<D: VirtioDevice>(device: D, steps: &[Step]) {
    let mut rig = Rig::ready(device, u64::MAX, |env| {
        env.disk = Some(ScriptDisk::new(1 << 20, 16));
        env.port = Some(ScriptPort { room: 50, ..ScriptPort::default() });
        env.entropy = 500;
    });
    for step in steps {
        match step {
            Step::Read(offset, size) => {
                rig.read(*offset, *size);
            }
            Step::Write(offset, size, value) => rig.write(*offset, *size, *value),
            Step::Config(register, value, mask) => {
                rig.function.config_write(*register, *value, *mask, &mut rig.env);
                rig.function.config_read(*register, &mut rig.env);
            }
            Step::Memory(place, bytes) => rig.put(*place, bytes),
            Step::Wake(timer) => rig.function.wake(*timer, &mut rig.env),
            Step::Frame(length) => {
                let frame = (Offload::default(), vec![1; *length]);
                rig.env.port.as_mut().unwrap().waiting.push_back(frame);
                rig.wake();
            }
            Step::Input(byte) => rig.env.send(&mut rig.function, &[*byte; 3]),
            Step::Complete => {
                let disk = rig.env.disk.as_mut().unwrap();
                if let Some((id, ..)) = disk.requests.first() {
                    let id = *id;
                    disk.complete(id);
                }
                rig.wake();
            }
            Step::Reset => rig.function.reset(&mut rig.env),
            Step::Start => {
                let command = (config::MEMORY | config::MASTER).into();
                rig.function.config_write(config::COMMAND, command, 0xffff, &mut rig.env);
                rig.set_up(u64::MAX);
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 150, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn nothing_that_a_driver_does_panics(steps in prop::collection::vec(step(), 1..200)) {
        let info = BlockInfo {
            sectors: 2048, discard: true, write_zeroes: true, max_bytes: 1 << 20, ..BlockInfo::default()
        };
        hammer(Blk::new(info), &steps);
        hammer(NetCard::new(NetInfo::default()), &steps);
        hammer(Console::new(), &steps);
        hammer(Entropy::new(), &steps);
    }
}
