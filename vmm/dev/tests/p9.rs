//! Scripts for shared directories.

mod driver;

use driver::{Rig, breaks};
use vmm_bus::testing::ScriptServer;
use vmm_dev::virtio::p9::P9;
use vmm_dev::virtio::p9::spec::*;
use vmm_dev::virtio::pci::spec::CONFIG;

const MESSAGE: u64 = 0x2000;
const ANSWER: u64 = 0x3000;

fn rig() -> Rig<P9> {
    let mut tag = [0; MOST_TAG];
    tag[..4].copy_from_slice(b"host");
    Rig::ready(P9::new(tag), u64::MAX, |env| {
        env.server = Some(ScriptServer { room: 8, ..ScriptServer::default() })
    })
}

fn server(rig: &mut Rig<P9>) -> &mut ScriptServer {
    rig.env.server.as_mut().unwrap()
}

#[test]
fn the_tag_is_in_the_configuration() {
    let mut rig = rig();
    assert_eq!(rig.read(CONFIG, 2), 4);
    assert_eq!(rig.read(CONFIG + TAG as u64, 4), u64::from(u32::from_le_bytes(*b"host")));
    let mut long = Rig::ready(P9::new([b'x'; MOST_TAG]), u64::MAX, |_| {});
    assert_eq!(long.read(CONFIG, 2), MOST_TAG as u64);
}

#[test]
fn replies_in_any_order() {
    let mut rig = rig();
    rig.put(MESSAGE, b"first second");
    let first = rig.send(0, &[(MESSAGE, 2, false), (MESSAGE + 2, 3, false), (ANSWER, 16, true)]);
    let second =
        rig.send(0, &[(MESSAGE + 6, 6, false), (ANSWER + 16, 4, true), (ANSWER + 64, 8, true)]);
    let taken = [(0, b"first".to_vec(), 16), (1, b"second".to_vec(), 12)];
    assert_eq!(server(&mut rig).messages, taken);
    server(&mut rig).answer(1, b"two parts");
    rig.wake();
    assert_eq!(rig.used(0), [(second, 9)]);
    assert_eq!(
        (rig.get(ANSWER + 16, 4), rig.get(ANSWER + 64, 5)),
        (b"two ".to_vec(), b"parts".to_vec())
    );
    // A reply longer than its buffers is truncated.
    server(&mut rig).answer(0, &[b'x'; 20]);
    rig.wake();
    assert_eq!((rig.used(0), rig.get(ANSWER + 16, 4)), (vec![(first, 16)], b"two ".to_vec()));
    assert_eq!(server(&mut rig).messages, []);
}

#[test]
fn a_server_without_room() {
    let mut rig = rig();
    server(&mut rig).room = 1;
    let parts = [(MESSAGE, 4, false), (ANSWER, 4, true)];
    let (first, second) = (rig.send(0, &parts), rig.send(0, &parts));
    assert_eq!(server(&mut rig).messages.len(), 1);
    server(&mut rig).answer(0, b"1");
    rig.wake();
    server(&mut rig).answer(0, b"2");
    rig.wake();
    assert_eq!(rig.used(0), [(first, 1), (second, 1)]);
}

#[test]
fn rules_and_resets() {
    let mut rig = rig();
    breaks(&mut rig, 0, &[(MESSAGE, 4, false)]);
    breaks(&mut rig, 0, &[(ANSWER, 4, true)]);
    rig.send(0, &[(MESSAGE, 4, false), (ANSWER, 4, true)]);
    rig.set_up(u64::MAX);
    assert_eq!(server(&mut rig).messages, [], "a reset forgets");
    // A reply without a message.
    server(&mut rig).ended.push_back((40, Vec::new()));
    rig.wake();
    assert_eq!(rig.used(0), []);
    rig.env.server = None;
    rig.send(0, &[(MESSAGE, 4, false), (ANSWER, 4, true)]);
    assert_eq!(rig.used(0), [(0, 0)], "no server is connected");
}
