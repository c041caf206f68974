//! Scripts for the network device.

mod driver;

use driver::{CONFIG_INTERRUPT, Rig, breaks};
use vmm_bus::backend::{MAX_FRAME, NetInfo, Offload, OffloadCaps, Segments};
use vmm_bus::testing::ScriptPort;
use vmm_dev::virtio::VirtioDevice;
use vmm_dev::virtio::net::{NetCard, spec::*};
use vmm_dev::virtio::pci::spec::{CONFIG, GENERATION};
use vmm_dev::virtio::spec::F_EVENT_IDX;

const MAC_ADDRESS: [u8; 6] = [2, 0, 0, 0, 0, 9];
const PLAIN: u64 = F_MAC | F_STATUS;
const ALL: u64 = !F_EVENT_IDX;
const BUFFERS: u64 = 0x1000;

fn rig(features: u64) -> Rig<NetCard> {
    Rig::ready(NetCard::new(NetInfo { mac: MAC_ADDRESS, ..NetInfo::default() }), features, |env| {
        env.port = Some(ScriptPort { room: 1000, ..ScriptPort::default() });
    })
}

fn port(rig: &mut Rig<NetCard>) -> &mut ScriptPort {
    rig.env.port.as_mut().unwrap()
}

/// Sends a frame of `length` bytes after this header; returns its offloads if it arrived.
fn transmit(rig: &mut Rig<NetCard>, header: [u8; HEADER], length: u32) -> Option<Offload> {
    rig.put(BUFFERS, &header);
    let head = rig.send(TRANSMIT, &[(BUFFERS, 12, false), (0x2000, length, false)]);
    assert_eq!(rig.used(TRANSMIT), [(head, 0)], "every chain is returned");
    assert_eq!(rig.interrupts(), [0x42]);
    port(rig).sent.pop().map(|(offload, frame)| {
        assert_eq!(frame.len(), length as usize);
        offload
    })
}

#[test]
fn configuration() {
    let mut rig = rig(ALL);
    for (index, byte) in MAC_ADDRESS.into_iter().enumerate() {
        assert_eq!(rig.read(CONFIG + index as u64, 1), byte.into());
    }
    assert_eq!(rig.read(CONFIG + STATUS as u64, 2), 1);
    assert_eq!(port(&mut rig).caps, OffloadCaps { csum: true, tcp4: true, tcp6: true });
    let generation = rig.read(GENERATION, 1);
    port(&mut rig).link_down = true;
    rig.wake();
    assert_eq!(rig.interrupts(), [CONFIG_INTERRUPT]);
    assert_eq!(rig.read(CONFIG + STATUS as u64, 2), 0);
    assert_ne!(rig.read(GENERATION, 1), generation);
    rig.wake();
    assert_eq!(rig.interrupts(), []);
    rig.set_up(PLAIN);
    assert_eq!(port(&mut rig).caps, OffloadCaps::default());
}

#[test]
fn frames_to_the_outside() {
    let mut rig = rig(ALL);
    rig.put(0x2000, b"frame");
    assert_eq!(transmit(&mut rig, [0; 12], 60), Some(Offload::default()));
    let csum = [NEEDS_CSUM, 0, 0, 0, 0, 0, 34, 0, 16, 0, 0, 0];
    let expected =
        Offload { needs_csum: true, csum_start: 34, csum_offset: 16, ..Offload::default() };
    assert_eq!(transmit(&mut rig, csum, 60), Some(expected));
    let tcp = [NEEDS_CSUM, GSO_TCPV6, 74, 0, 0xa0, 5, 54, 0, 16, 0, 0, 0];
    let expected = Offload {
        needs_csum: true,
        segments: Segments::Tcp6,
        header_length: 74,
        segment_size: 1440,
        csum_start: 54,
        csum_offset: 16,
        ..Offload::default()
    };
    assert_eq!(transmit(&mut rig, tcp, 9000), Some(expected));
}

#[test]
fn frames_that_may_not_be_sent() {
    let bad: [([u8; HEADER], u32); 10] = [
        // The checksum is outside the frame.
        ([NEEDS_CSUM, 0, 0, 0, 0, 0, 34, 0, 25, 0, 0, 0], 60),
        ([NEEDS_CSUM, 0, 0, 0, 0, 0, 0xff, 0xff, 0xff, 0xff, 0, 0], 60),
        // Empty segments, segments without checksum, of unknown kinds, with ECN.
        ([NEEDS_CSUM, GSO_TCPV4, 0, 0, 0, 0, 34, 0, 16, 0, 0, 0], 60),
        ([0, GSO_TCPV4, 0, 0, 1, 0, 34, 0, 16, 0, 0, 0], 60),
        ([NEEDS_CSUM, 3, 0, 0, 1, 0, 34, 0, 16, 0, 0, 0], 60),
        ([NEEDS_CSUM, 2, 0, 0, 1, 0, 34, 0, 16, 0, 0, 0], 60),
        ([NEEDS_CSUM, 0x7f, 0, 0, 1, 0, 34, 0, 16, 0, 0, 0], 60),
        ([NEEDS_CSUM, GSO_TCPV4 | GSO_ECN, 0, 0, 1, 0, 34, 0, 16, 0, 0, 0], 60),
        // Too short, too long.
        ([0; 12], 0),
        ([0; 12], MAX_FRAME + 1),
    ];
    let mut with_all = rig(ALL);
    for (header, length) in bad {
        assert_eq!(transmit(&mut with_all, header, length), None, "{header:?} {length}");
    }
    // Features that were not negotiated.
    let mut plain = rig(PLAIN);
    assert_eq!(transmit(&mut plain, [NEEDS_CSUM, 0, 0, 0, 0, 0, 34, 0, 16, 0, 0, 0], 60), None);
    let mut csum = rig(PLAIN | F_CSUM | F_HOST_TSO6);
    assert_eq!(
        transmit(&mut csum, [NEEDS_CSUM, GSO_TCPV4, 0, 0, 1, 0, 34, 0, 16, 0, 0, 0], 60),
        None
    );
    rig(ALL).env.port = None;
    let mut alone = rig(ALL);
    alone.env.port = None;
    alone.send(TRANSMIT, &[(BUFFERS, 100, false)]);
    assert_eq!(alone.used(TRANSMIT).len(), 1, "a cut wire takes all");
}

#[test]
fn a_switch_without_room() {
    let mut rig = rig(ALL);
    port(&mut rig).room = 2;
    for _ in 0..4 {
        rig.offer(TRANSMIT, &[(BUFFERS, 72, false)]);
    }
    rig.notify(TRANSMIT);
    assert_eq!((port(&mut rig).sent.len(), rig.used(TRANSMIT).len()), (2, 2));
    port(&mut rig).room = 9;
    rig.wake();
    assert_eq!((port(&mut rig).sent.len(), rig.used(TRANSMIT).len()), (4, 2));
    assert_eq!(rig.interrupts(), [0x42, 0x42], "one for each batch");
}

/// Buffers of this length for frames to the guest, from [`BUFFERS`] on.
fn supply(rig: &mut Rig<NetCard>, count: u64, length: u32) {
    for index in 0..count {
        rig.offer(RECEIVE, &[(BUFFERS + 0x1000 * index, length, true)]);
    }
    rig.notify(RECEIVE);
}

fn frame(length: usize) -> Vec<u8> {
    (0..length).map(|index| (index % 251) as u8).collect()
}

#[test]
fn frames_to_the_guest() {
    let mut rig = rig(PLAIN);
    supply(&mut rig, 2, 1526);
    let port = port(&mut rig);
    port.waiting.push_back((Offload::default(), frame(60)));
    let valid = Offload { data_valid: true, ..Offload::default() };
    port.waiting.push_back((valid, frame(1514)));
    rig.wake();
    assert_eq!(rig.used(RECEIVE), [(0, 72), (4, 1526)]);
    assert_eq!(rig.interrupts(), [0x41]);
    assert_eq!(rig.get(BUFFERS, 12), [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0]);
    assert_eq!(rig.get(BUFFERS + 12, 60), frame(60));
    assert_eq!(rig.get(BUFFERS + 0x1000, 1), [0], "not agreed upon");
    assert_eq!(rig.get(BUFFERS + 0x100c, 1514), frame(1514));
}

#[test]
fn frames_that_the_guest_does_not_take() {
    let mut rig = rig(PLAIN);
    supply(&mut rig, 3, 1526);
    let csum = Offload { needs_csum: true, ..Offload::default() };
    let tcp = Offload { segments: Segments::Tcp4, ..csum };
    for (offload, length) in [(csum, 60), (tcp, 60), (Offload::default(), 1515)] {
        port(&mut rig).waiting.push_back((offload, frame(length)));
    }
    rig.wake();
    assert_eq!(rig.used(RECEIVE), []);
    assert!(port(&mut rig).waiting.is_empty(), "dropped");
    port(&mut rig).waiting.push_back((Offload::default(), frame(60)));
    rig.wake();
    assert_eq!(rig.used(RECEIVE), [(0, 72)], "the buffers are still there");
}

#[test]
fn merged_buffers() {
    let mut rig = rig(ALL);
    supply(&mut rig, 2, 0x400);
    let offload = Offload {
        needs_csum: true,
        segments: Segments::Tcp4,
        segment_size: 1448,
        header_length: 66,
        csum_start: 34,
        csum_offset: 16,
        ..Offload::default()
    };
    let long = frame(0xa00);
    port(&mut rig).waiting.push_back((offload, long.clone()));
    rig.wake();
    assert_eq!(rig.used(RECEIVE), [], "not enough for all of it");
    assert_eq!(port(&mut rig).waiting.len(), 1);
    for index in 2..4 {
        rig.offer(RECEIVE, &[(BUFFERS + 0x1000 * index, 0x400, true)]);
    }
    rig.notify(RECEIVE);
    assert_eq!(rig.used(RECEIVE), [(0, 0x400), (4, 0x400), (8, 0x20c)]);
    assert_eq!(rig.interrupts(), [0x41]);
    let header = [NEEDS_CSUM, GSO_TCPV4, 66, 0, 0xa8, 5, 34, 0, 16, 0, 3, 0];
    assert_eq!(rig.get(BUFFERS, 12), header);
    let mut received = rig.get(BUFFERS + 12, 0x3f4);
    received.extend(rig.get(BUFFERS + 0x1000, 0x400));
    received.extend(rig.get(BUFFERS + 0x2000, 0x20c));
    assert_eq!(received, long);
}

/// A frame for which even a full queue has no room is dropped, although buffers may follow.
#[test]
fn a_long_frame_does_not_stop_the_next_one() {
    let mut rig = rig(ALL);
    supply(&mut rig, 3, 200);
    for length in [256 * 200 - 11, 60] {
        port(&mut rig).waiting.push_back((Offload::default(), frame(length)));
    }
    rig.wake();
    assert_eq!(rig.used(RECEIVE), [(0, 72)]);
    port(&mut rig).waiting.push_back((Offload::default(), frame(256 * 200 - 12)));
    rig.wake();
    assert_eq!(port(&mut rig).waiting.len(), 1, "a full queue holds it");
}

#[test]
fn frames_longer_than_the_mtu_are_dropped() {
    let info = NetInfo { mac: MAC_ADDRESS, mtu: 1500, ..NetInfo::default() };
    for (features, used) in [(ALL, 4), (ALL & !F_MTU, 6)] {
        let mut rig = Rig::ready(NetCard::new(info), features, |env| {
            env.port = Some(ScriptPort { room: 1000, ..ScriptPort::default() });
        });
        supply(&mut rig, 8, 1526);
        let plain = Offload::default();
        let segments = Offload { needs_csum: true, segments: Segments::Tcp6, ..plain };
        // Each takes two buffers.
        for (offload, length) in [(plain, 1522), (plain, 1523), (segments, 3000)] {
            port(&mut rig).waiting.push_back((offload, frame(length)));
        }
        rig.wake();
        assert!(port(&mut rig).waiting.is_empty());
        assert_eq!(rig.used(RECEIVE).len(), used);
    }
}

#[test]
fn a_link_that_is_always_up_has_no_status() {
    for has_fixed_link in [false, true] {
        let card = NetCard::new(NetInfo { has_fixed_link, ..NetInfo::default() });
        assert_eq!(card.features() & F_STATUS != 0, !has_fixed_link);
    }
}

/// With event index the driver notifies for buffers after all present ones, not for the next one.
#[test]
fn the_driver_notifies_of_more_buffers() {
    let mut rig = rig(u64::MAX);
    supply(&mut rig, 2, 0x100);
    port(&mut rig).waiting.push_back((Offload::default(), frame(0x300)));
    rig.wake();
    let event = rig.memory().read::<u16>(0x1_8000 + 4 + 8 * 256).unwrap();
    assert_eq!(event, 2);
}

#[test]
fn broken_rules() {
    let mut rig = rig(ALL);
    breaks(&mut rig, TRANSMIT, &[(BUFFERS, 11, false)]);
    breaks(&mut rig, TRANSMIT, &[(BUFFERS, 12, true), (BUFFERS, 60, false)]);
    port(&mut rig).waiting.push_back((Offload::default(), frame(60)));
    breaks(&mut rig, RECEIVE, &[(BUFFERS, 11, true)]);
    assert_eq!(port(&mut rig).waiting.len(), 1);
}
