//! Scripts for the memory balloon.

mod driver;

use driver::{CONFIG_INTERRUPT, Rig};
use vmm_bus::testing::ScriptBalloon;
use vmm_dev::virtio::balloon::Balloon;
use vmm_dev::virtio::balloon::spec::*;
use vmm_dev::virtio::pci::spec::CONFIG;
use vmm_dev::virtio::queue::spec::INDEX;

const BUFFERS: u64 = 0x2000;
const REPORTS: usize = 4;

fn rig(features: u64) -> Rig<Balloon> {
    Rig::ready(Balloon::new(), features, |env| env.balloon = Some(ScriptBalloon::default()))
}

fn given(rig: &mut Rig<Balloon>) -> &mut ScriptBalloon {
    rig.env.balloon.as_mut().unwrap()
}

fn numbers(numbers: &[u32]) -> Vec<u8> {
    numbers.iter().flat_map(|number| number.to_le_bytes()).collect()
}

#[test]
fn pages_are_given_up_in_pieces() {
    let mut rig = rig(u64::MAX);
    let list = numbers(&[9, 7, 8, 0xff, 8, 0x100, u32::MAX]);
    rig.put(BUFFERS, &list);
    rig.send(INFLATE, &[(BUFFERS, list.len() as u32, false)]);
    assert_eq!(rig.used(INFLATE), [(0, 0)]);
    // Page 8 is listed twice; 0x100 is beyond memory.
    assert_eq!(given(&mut rig).discarded, [(0x7000, 0x2000), (0x8000, 0x2000)]);
    // Deflation needs no action.
    rig.send(DEFLATE, &[(BUFFERS, 8, false)]);
    assert_eq!(rig.used(DEFLATE).len(), 1);
    assert_eq!(given(&mut rig).discarded.len(), 2);
    // An incomplete number, and no number.
    rig.send(INFLATE, &[(BUFFERS, 3, false)]);
    rig.send(INFLATE, &[(BUFFERS, 0, false)]);
    assert_eq!((rig.used(INFLATE).len(), given(&mut rig).discarded.len()), (2, 2));
}

#[test]
fn free_pages_are_reported() {
    for (features, queues) in [(u64::MAX, [REPORTS, 3]), (F_PAGE_REPORTING, [2, 3])] {
        let mut rig = rig(features);
        for queue in queues {
            let parts = [(0x4000, 0x3000, true), (0x8800, 0x2000, true), (0xc010, 0xfff, true)];
            rig.send(queue, &parts);
            assert_eq!(rig.used(queue), [(0, 0)]);
            // Complete pages only.
            let discarded = std::mem::take(&mut given(&mut rig).discarded);
            assert_eq!(discarded, [(0x4000, 0x3000), (0x9000, 0x1000)]);
            rig.send(queue, &[(u64::MAX - 255, 0, true)]);
            assert_eq!(given(&mut rig).discarded, []);
        }
    }
}

#[test]
fn the_guest_is_asked_for_pages() {
    let mut rig = rig(u64::MAX);
    assert_eq!(rig.read(CONFIG, 4), 0);
    given(&mut rig).wanted = 77;
    rig.wake();
    assert_eq!((rig.read(CONFIG, 4), rig.interrupts()), (77, vec![CONFIG_INTERRUPT]));
    rig.wake();
    assert_eq!(rig.interrupts(), []);
    rig.write(CONFIG + ACTUAL, 4, 33);
    assert_eq!((rig.read(CONFIG + ACTUAL, 4), given(&mut rig).actual), (33, 33));
    rig.write(CONFIG, 4, 1);
    assert_eq!((rig.read(CONFIG, 4), rig.env.missing.len()), (77, 1));
    // A new driver starts with an empty balloon and gets the target again.
    rig.set_up(u64::MAX);
    assert_eq!((given(&mut rig).actual, rig.read(CONFIG, 4)), (0, 77));
}

#[test]
fn statistics_are_reported_on_request() {
    let mut rig = rig(u64::MAX);
    let tell = |rig: &mut Rig<Balloon>, value: u64| {
        let mut bytes = 4_u16.to_le_bytes().to_vec();
        bytes.extend(value.to_le_bytes());
        // No such tag.
        bytes.extend([99; STATISTIC]);
        rig.put(BUFFERS, &bytes);
        rig.send(STATISTICS, &[(BUFFERS, bytes.len() as u32, false)])
    };
    let first = tell(&mut rig, 1 << 40);
    assert_eq!(rig.used(STATISTICS), []);
    rig.wake();
    assert_eq!(rig.used(STATISTICS), []);
    given(&mut rig).asks = true;
    rig.wake();
    assert_eq!(rig.used(STATISTICS), [(first, 0)]);
    // A request while the driver has the chain stays pending.
    given(&mut rig).asks = true;
    rig.wake();
    let second = tell(&mut rig, 5);
    rig.wake();
    assert_eq!(rig.used(STATISTICS), [(second, 0)]);
    // A driver that does not wait gets the older chain back.
    let third = tell(&mut rig, 6);
    tell(&mut rig, 7);
    assert_eq!(rig.used(STATISTICS), [(third, 0)]);
    let all: Vec<_> = [1 << 40, 5, 6, 7].into_iter().map(|value| (4, value)).collect();
    assert_eq!(given(&mut rig).statistics, all);
}

#[test]
fn rules_and_wires() {
    let mut rig = rig(u64::MAX);
    // More chains than queue entries.
    rig.memory().write(0x1_4000 + INDEX, 1000_u16).unwrap();
    rig.notify(INFLATE);
    assert_ne!(rig.status() & vmm_dev::virtio::spec::NEEDS_RESET, 0);
    rig.set_up(u64::MAX);
    rig.env.balloon = None;
    for queue in [INFLATE, DEFLATE, STATISTICS, REPORTS] {
        rig.send(queue, &[(BUFFERS, 8, queue == REPORTS)]);
    }
    assert_eq!(
        rig.used(INFLATE).len() + rig.used(REPORTS).len(),
        2,
        "without a back end chains are returned"
    );
}
