//! Scripts for sockets between guest and host.

mod driver;

use driver::{Rig, breaks};
use vmm_bus::testing::ScriptVsock;
use vmm_dev::virtio::pci::spec::CONFIG;
use vmm_dev::virtio::vsock::Vsock;
use vmm_dev::virtio::vsock::spec::*;

const CID: u64 = 0x1234_5678;
const HEAD: u32 = HEADER as u32;
const PACKET: u64 = 0x2000;
const BUFFERS: u64 = 0x4000;

fn rig() -> Rig<Vsock> {
    Rig::ready(Vsock::new(CID), u64::MAX, |env| {
        env.link = Some(ScriptVsock { room: 2, ..ScriptVsock::default() });
    })
}

fn link(rig: &mut Rig<Vsock>) -> &mut ScriptVsock {
    rig.env.link.as_mut().unwrap()
}

fn header(length: u32) -> Header {
    Header { from: CID, to: HOST, length, kind: STREAM, op: op::RW, ..Header::default() }
}

/// Writes a packet to guest memory whose header states this data length.
fn put(rig: &Rig<Vsock>, length: u32) {
    rig.put(PACKET, &header(length).to_bytes());
    rig.put(PACKET + u64::from(HEAD), b"some data");
}

#[test]
fn the_guest_knows_its_number() {
    let mut rig = rig();
    assert_eq!(rig.read(CONFIG + GUEST_CID as u64, 4), CID);
    assert_eq!(rig.read(CONFIG + GUEST_CID as u64 + 4, 4), 0);
}

#[test]
fn packets_of_the_guest() {
    let mut rig = rig();
    put(&rig, 9);
    // As Linux sends it, in one piece, longer than the packet, split anywhere.
    let first = [(PACKET, HEAD, false), (PACKET + u64::from(HEAD), 9, false)];
    let second = [(PACKET, 20, false), (PACKET + 20, HEAD + 9 - 20, false)];
    let both = [rig.send(TRANSMIT, &first), rig.send(TRANSMIT, &second)];
    assert_eq!(rig.used(TRANSMIT), both.map(|head| (head, 0)));
    let wanted = [&header(9).to_bytes()[..], b"some data"].concat();
    assert_eq!(link(&mut rig).sent, [wanted.clone(), wanted.clone()]);
    // No room: the packet waits and is sent next.
    let third = rig.send(TRANSMIT, &[(PACKET, HEAD + 50, false)]);
    assert_eq!(rig.used(TRANSMIT), []);
    link(&mut rig).room = 1;
    rig.wake();
    assert_eq!((rig.used(TRANSMIT), link(&mut rig).sent.len()), (vec![(third, 0)], 3));
    assert_eq!(link(&mut rig).sent[2], wanted);
}

#[test]
fn invalid_packets_are_dropped() {
    let mut rig = rig();
    for (said, there) in [(9, HEAD + 8), (u32::MAX, HEAD + 9), (1, HEAD)] {
        put(&rig, said);
        let head = rig.send(TRANSMIT, &[(PACKET, there, false)]);
        assert_eq!(rig.used(TRANSMIT), [(head, 0)], "{said}");
    }
    // More than the maximum credit.
    put(&rig, MOST_DATA + 1);
    let parts = [(PACKET, HEAD, false), (0x1000, MOST_DATA / 2, false), (0, MOST_DATA, false)];
    rig.send(TRANSMIT, &parts);
    assert_eq!(rig.used(TRANSMIT).len(), 1);
    assert_eq!(link(&mut rig).sent, Vec::<Vec<u8>>::new());
    breaks(&mut rig, TRANSMIT, &[(PACKET, HEAD - 1, false)]);
    breaks(&mut rig, TRANSMIT, &[(PACKET, HEAD, true)]);
    rig.env.link = None;
    rig.send(TRANSMIT, &[(PACKET, HEAD, false)]);
    assert_eq!(rig.used(TRANSMIT).len(), 1, "no back end is connected");
}

#[test]
fn data_is_cut_for_short_buffers() {
    let mut rig = rig();
    let data: Vec<u8> = (0..100).collect();
    let came = Header { from: HOST, to: CID, forwarded: 7, ..header(100) };
    link(&mut rig).waiting.push_back((came, data.clone()));
    link(&mut rig).waiting.push_back((Header { op: op::RST, length: 0, ..came }, Vec::new()));
    rig.wake();
    assert_eq!(rig.used(RECEIVE), [], "there are no buffers");
    for index in 0..3 {
        // In two parts, as Linux provides it, with room for 40 bytes.
        let at = BUFFERS + 0x100 * index;
        rig.send(RECEIVE, &[(at, HEAD, true), (at + 0x80, 40, true)]);
    }
    let used = rig.used(RECEIVE);
    let lengths: Vec<_> = used.iter().map(|used| used.1 - HEAD).collect();
    assert_eq!(lengths, [40, 40, 20]);
    let mut all = Vec::new();
    for (index, length) in lengths.into_iter().enumerate() {
        let at = BUFFERS + 0x100 * index as u64;
        let bytes: [u8; HEADER] = rig.get(at, HEADER).try_into().unwrap();
        assert_eq!(Header::from_bytes(&bytes), Header { length, ..came });
        all.extend(rig.get(at + 0x80, length as usize));
    }
    assert_eq!(all, data);
    // The last packet has no data and needs no room for any.
    rig.send(RECEIVE, &[(BUFFERS, HEAD, true)]);
    assert_eq!(rig.used(RECEIVE).len(), 1);
    assert!(link(&mut rig).waiting.is_empty());
}

#[test]
fn buffers_that_are_none() {
    let mut rig = rig();
    link(&mut rig).waiting.push_back((header(4), b"data".to_vec()));
    breaks(&mut rig, RECEIVE, &[(BUFFERS, HEAD - 1, true)]);
    breaks(&mut rig, RECEIVE, &[(BUFFERS, HEAD, true)]);
    breaks(&mut rig, RECEIVE, &[(BUFFERS, HEAD + 4, false)]);
    // The packet is still queued, complete.
    rig.send(RECEIVE, &[(BUFFERS, HEAD + 4, true)]);
    assert_eq!(
        (rig.used(RECEIVE), rig.get(BUFFERS + u64::from(HEAD), 4)),
        (vec![(0, HEAD + 4)], b"data".to_vec())
    );
}

#[test]
fn a_reset_is_reported() {
    let mut rig = rig();
    let before = link(&mut rig).resets;
    link(&mut rig).waiting.push_back((header(8), b"12345678".to_vec()));
    rig.send(RECEIVE, &[(BUFFERS, HEAD + 5, true)]);
    rig.set_up(u64::MAX);
    assert_eq!(link(&mut rig).resets, before + 1);
    // The interrupted packet starts again.
    rig.send(RECEIVE, &[(BUFFERS, HEAD + 8, true)]);
    assert_eq!(rig.get(BUFFERS + u64::from(HEAD), 8), b"12345678");
    // Buffers for events stay in the queue.
    rig.send(EVENT, &[(BUFFERS, 8, true)]);
    assert_eq!(rig.used(EVENT), []);
}
