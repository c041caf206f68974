//! Scripts for the console with several ports.

mod driver;

use driver::{HIGH_RINGS, Rig, breaks};
use proptest::prelude::*;
use proto::ports::{FrameKind, Header, IS_CONSOLE, MAX_NAME, MAX_PORTS, WINDOW};
use vmm_bus::testing::Script;
use vmm_dev::virtio::console::spec::{RECEIVE, TRANSMIT};
use vmm_dev::virtio::pci::spec as pci;
use vmm_dev::virtio::ports::{Ports, spec::*};
use vmm_dev::virtio::spec::F_EVENT_IDX;

/// Buffers of control messages: each has this many bytes.
const CONTROL_BUFFER: u32 = 128;
/// Address of the first of them.
const CONTROL_BUFFERS: u64 = 0x1000;
/// Buffer for the driver's own messages.
const MESSAGE: u64 = 0x800;

fn frame(kind: FrameKind, port: u8, data: &[u8]) -> Vec<u8> {
    let header = Header { kind, port, length: data.len() as u16 };
    [&header.to_bytes(), data].concat()
}

fn definition(port: u8, flags: u8, name: &[u8]) -> Vec<u8> {
    frame(FrameKind::Define, port, &[&[flags], name].concat())
}

fn with_memory(env: &mut Script) {
    env.memory = Some(vmm_mem::testing::memory(&[(0, 0x6_0000), HIGH_RINGS]));
}

/// A device whose host end has sent these frames, and whose driver has offered buffers for control
/// messages.
fn ready(frames: &[Vec<u8>]) -> Rig<Ports> {
    let mut rig = Rig::ready(Ports::new(), !F_EVENT_IDX, |env| {
        with_memory(env);
        env.stream.input.extend(frames.concat());
    });
    offer_control(&mut rig);
    rig
}

fn offer_control(rig: &mut Rig<Ports>) {
    for index in 0..16 {
        let address = CONTROL_BUFFERS + u64::from(index * CONTROL_BUFFER);
        rig.offer(CONTROL_RECEIVE, &[(address, CONTROL_BUFFER, true)]);
    }
    rig.notify(CONTROL_RECEIVE);
}

/// Sends a control message of the driver.
fn tell(rig: &mut Rig<Ports>, port: u32, event: u16, value: u16) {
    let message = [&port.to_le_bytes()[..], &event.to_le_bytes(), &value.to_le_bytes()].concat();
    rig.put(MESSAGE, &message);
    rig.send(CONTROL_TRANSMIT, &[(MESSAGE, CONTROL as u32, false)]);
    assert_eq!(rig.used(CONTROL_TRANSMIT).len(), 1);
}

/// Control messages since the last call: port, event, value and name.
fn told(rig: &mut Rig<Ports>) -> Vec<(u32, u16, u16, Vec<u8>)> {
    let used = rig.used(CONTROL_RECEIVE);
    let messages = used.into_iter().map(|(head, length)| {
        let address = CONTROL_BUFFERS + u64::from(head) / 4 % 16 * u64::from(CONTROL_BUFFER);
        let bytes = rig.get(address, length as usize);
        let half = |at: usize| u16::from_le_bytes([bytes[at], bytes[at + 1]]);
        (half(0).into(), half(4), half(6), bytes[CONTROL..].to_vec())
    });
    messages.collect()
}

/// Frames for the host end since the last call.
fn sent(rig: &mut Rig<Ports>) -> Vec<(FrameKind, u8, Vec<u8>)> {
    let bytes = std::mem::take(&mut rig.env.stream.output);
    let (mut rest, mut frames) = (&bytes[..], Vec::new());
    while let Some((header, more)) = rest.split_first_chunk() {
        let header = Header::from_bytes(*header).unwrap();
        let (data, more) = more.split_at(header.length.into());
        frames.push((header.kind, header.port, data.to_vec()));
        rest = more;
    }
    frames
}

/// A device with the open port 1, of this name.
fn opened() -> Rig<Ports> {
    let mut rig = ready(&[definition(1, 0, b"org.test"), frame(FrameKind::Open, 1, &[])]);
    tell(&mut rig, 0, DEVICE_READY, 1);
    assert_eq!(told(&mut rig), [(1, PORT_ADD, 1, vec![])]);
    tell(&mut rig, 1, PORT_READY, 1);
    let named = (1, PORT_NAME, 1, b"org.test".to_vec());
    assert_eq!(told(&mut rig), [named, (1, PORT_OPEN, 1, vec![])]);
    tell(&mut rig, 1, PORT_OPEN, 1);
    assert_eq!(sent(&mut rig), [(FrameKind::Open, 1, vec![])]);
    rig
}

#[test]
fn ports_are_announced() {
    let mut rig = ready(&[
        definition(0, IS_CONSOLE, b""),
        definition(3, 0, &[b'n'; MAX_NAME + 9]),
        frame(FrameKind::Open, 0, &[]),
    ]);
    assert_eq!(rig.read(pci::CONFIG + MAX_NR_PORTS as u64, 4), MAX_PORTS as u64);
    assert_eq!(told(&mut rig), [], "before the driver is ready");
    tell(&mut rig, 0, DEVICE_READY, 1);
    assert_eq!(told(&mut rig), [(0, PORT_ADD, 1, vec![]), (3, PORT_ADD, 1, vec![])]);
    tell(&mut rig, 3, PORT_READY, 1);
    assert_eq!(told(&mut rig), [(3, PORT_NAME, 1, vec![b'n'; MAX_NAME])]);
    tell(&mut rig, 0, PORT_READY, 1);
    assert_eq!(told(&mut rig), [(0, CONSOLE_PORT, 1, vec![]), (0, PORT_OPEN, 1, vec![])]);
    // A port that is defined later.
    rig.env.stream.input.extend(definition(5, 0, b"late"));
    rig.wake();
    assert_eq!(told(&mut rig), [(5, PORT_ADD, 1, vec![])]);
    for port in [4, 8, u32::MAX] {
        tell(&mut rig, port, PORT_OPEN, 1);
    }
    assert_eq!((told(&mut rig), sent(&mut rig)), (vec![], vec![]), "no such port");
}

#[test]
fn output_is_framed() {
    let mut rig = opened();
    let text: Vec<u8> = (0..600).map(|number| number as u8).collect();
    rig.put(0x4000, &text);
    rig.env.stream.room = Some(100);
    rig.send(5, &[(0x4000, 600, false)]);
    assert_eq!(rig.used(5), [], "no room");
    rig.env.stream.room = None;
    rig.wake();
    assert_eq!(rig.used(5), [(0, 0)]);
    let frames = sent(&mut rig);
    assert!(frames.iter().all(|frame| (frame.0, frame.1) == (FrameKind::Data, 1)));
    assert_eq!(frames.into_iter().flat_map(|frame| frame.2).collect::<Vec<_>>(), text);
    // Output of a port that does not exist.
    rig.send(7, &[(0x4000, 600, false)]);
    assert_eq!((rig.used(7), sent(&mut rig)), (vec![(0, 0)], vec![]));
}

#[test]
fn input_waits_for_buffers() {
    let mut rig = opened();
    rig.env.stream.input.extend(frame(FrameKind::Data, 1, b"typed"));
    rig.env.stream.input.extend(frame(FrameKind::Close, 1, b""));
    rig.wake();
    assert_eq!((told(&mut rig), sent(&mut rig)), (vec![], vec![]), "the end follows the input");
    rig.send(4, &[(0x4000, 3, true)]);
    assert_eq!((rig.used(4), rig.get(0x4000, 3)), (vec![(0, 3)], b"typ".to_vec()));
    assert_eq!(sent(&mut rig), [(FrameKind::Credit, 1, vec![3, 0])]);
    rig.send(4, &[(0x4000, 99, true)]);
    assert_eq!((rig.used(4), rig.get(0x4000, 2)), (vec![(4, 2)], b"ed".to_vec()));
    assert_eq!(told(&mut rig), [(1, PORT_OPEN, 0, vec![])]);
    assert_eq!(sent(&mut rig), [(FrameKind::Credit, 1, vec![2, 0])]);
    rig.env.stream.input.extend(frame(FrameKind::Data, 1, b"more"));
    rig.wake();
    breaks(&mut rig, 4, &[(0x4000, 3, false)]);
}

/// A port that the guest does not read delays no other one.
#[test]
fn ports_do_not_wait_for_each_other() {
    let mut rig = opened();
    rig.env.stream.input.extend(definition(2, 0, b"second"));
    rig.wake();
    tell(&mut rig, 2, PORT_OPEN, 1);
    sent(&mut rig);
    let full = vec![7; WINDOW.into()];
    rig.env.stream.input.extend(frame(FrameKind::Data, 1, &full));
    rig.env.stream.input.extend(frame(FrameKind::Data, 2, b"x"));
    rig.send(6, &[(0x4000, 8, true)]);
    rig.wake();
    assert_eq!((rig.used(6), rig.get(0x4000, 1)), (vec![(0, 1)], b"x".to_vec()));
    // The guest closes port 1, which discards its input.
    tell(&mut rig, 1, PORT_OPEN, 0);
    let frames = sent(&mut rig);
    assert!(frames.contains(&(FrameKind::Credit, 1, WINDOW.to_le_bytes().to_vec())), "{frames:?}");
    assert!(frames.contains(&(FrameKind::Close, 1, vec![])), "{frames:?}");
    rig.env.stream.input.extend(frame(FrameKind::Data, 1, b"lost"));
    rig.wake();
    assert_eq!(sent(&mut rig), [(FrameKind::Credit, 1, vec![4, 0])]);
}

#[test]
fn a_driver_without_ports_has_the_first_one() {
    let mut rig = Rig::ready(Ports::new(), !(F_EVENT_IDX | F_MULTIPORT), |env| {
        with_memory(env);
        env.stream.input.extend(definition(0, IS_CONSOLE, b""));
    });
    rig.env.stream.input.extend(frame(FrameKind::Data, 0, b"in"));
    rig.send(RECEIVE, &[(0x4000, 8, true)]);
    rig.put(0x5000, b"out");
    rig.send(TRANSMIT, &[(0x5000, 3, false)]);
    rig.wake();
    assert_eq!((rig.used(RECEIVE).len(), rig.get(0x4000, 2)), (1, b"in".to_vec()));
    let frames = sent(&mut rig);
    assert!(frames.contains(&(FrameKind::Data, 0, b"out".to_vec())), "{frames:?}");
}

#[test]
fn a_reset_keeps_the_ports() {
    let mut rig = opened();
    // The frame in transfer is completed after the reset.
    rig.put(0x4000, b"text");
    rig.env.stream.room = Some(2);
    rig.send(5, &[(0x4000, 4, false)]);
    rig.set_up(!F_EVENT_IDX);
    rig.env.stream.room = None;
    offer_control(&mut rig);
    tell(&mut rig, 0, DEVICE_READY, 1);
    assert_eq!(told(&mut rig), [(1, PORT_ADD, 1, vec![])]);
    let frames = sent(&mut rig);
    assert_eq!(frames, [(FrameKind::Data, 1, b"text".to_vec()), (FrameKind::Close, 1, vec![])]);
}

proptest! {
    /// Any bytes of the host end leave the device working.
    #[test]
    fn any_frames(bytes in proptest::collection::vec(0_u8..9, 0..300)) {
        let mut rig = opened();
        rig.env.stream.input.extend(&bytes);
        rig.env.stream.input.extend(std::iter::repeat_n(0, 2048 + 8));
        rig.wake();
        rig.send(5, &[(0x4000, 4, false)]);
        prop_assert_eq!(rig.used(5).len(), 1);
    }
}
