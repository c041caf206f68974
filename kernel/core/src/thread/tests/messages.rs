//! Messages with items that fail midway.

use super::*;
use crate::testing::mapped_pages;
use abi::ItemKind;

/// Window of the server's capabilities, and of its pages.
const SLOTS: [u64; 2] = [40, 2];
const PAGES: [u64; 2] = [0x200, 8];

/// A receiving server in a task of its own, whose task has pages from 0x100 on.
struct Scene {
    world: World,
    there: Handle<Task<Fake>>,
    server: T,
    gate: u64,
}

fn scene() -> Scene {
    let mut world = start();
    let there = world.new_task();
    for (base, order) in [(0x100, 1), (0x102, 0), (0x103, 0)] {
        let extent = Extent { kind: ItemKind::Memory, base, physical: base, order };
        let own = SpaceRef::Task(world.task);
        world.kernel.add_mapping(own, extent, rights::ALL, false, None).unwrap();
    }
    let server = world.thread_in(there, 0);
    let (time, _) = world.sched(10, 1_000_000, 0);
    world.kernel.bind_sched(server, time).unwrap();
    world.start(server);
    world.call(server, Op::GateReplyWait, &[WAIT]);
    write_page(&world, server, WINDOWS_AT, [PAGES, SLOTS, [0, 0]].as_flattened());
    let gate = world.gate(server, 0);
    Scene { world, there, server, gate }
}

impl Scene {
    /// Calls the server with items, and returns the status; `None` while the call is served.
    fn call(&mut self, caller: T, items: &[(Item, u64)]) -> Option<Status> {
        let words: Vec<_> =
            items.iter().flat_map(|(item, source)| [item.pack(), *source]).collect();
        write_page(&self.world, caller, ITEMS_AT, &words);
        let tag = Tag { words: 0, items: items.len() as u8, label: 0 }.pack();
        self.world.call(caller, Op::GateCall, &[self.gate, tag]);
        check(&self.world.kernel);
        if self.world.phase(caller) == Phase::AwaitingReply {
            return None;
        }
        assert_eq!(self.world.phase(self.server), Phase::Receiving);
        outcome(&self.world, caller)
    }

    /// Asserts that the server has received nothing.
    fn is_empty(&self) {
        let Self { world, there, .. } = self;
        let to = world.kernel.memory.at(*there);
        assert!((0..64).all(|slot| world.kernel.capability(to, slot).is_err()));
        let message = 1;
        assert_eq!(mapped_pages(&world.kernel, SpaceRef::Task(*there)), message);
    }
}

#[test]
fn a_message_that_fails_midway_leaves_nothing_behind() {
    let mut scene = scene();
    let (bad, good) = (scene.world.thread(0), scene.world.thread(0));
    let (capability, page) = (Item::capability(rights::ALL), Item::memory(0, rights::ALL));
    let pages = Item::memory(1, rights::ALL);
    // The last one exceeds the window.
    let full = [(capability, 0), (pages, 0x102), (capability, 1), (capability, 0)];
    assert_eq!(scene.call(bad, &full), Some(Status::Overflow));
    scene.is_empty();
    let absent = [(capability, 0), (pages, 0x102), (page, 0x900)];
    assert_eq!(scene.call(bad, &absent), Some(Status::BadArgument));
    scene.is_empty();
    // More mappings than the work of one message pays for.
    let many = Item { order: 3, ..capability };
    write_page(&scene.world, scene.server, WINDOWS_AT + 2, &[64, 64]);
    for slot in 64..72 {
        let (own, root) = (scene.world.task, ObjectRef::Platform);
        scene.world.kernel.insert_capability(own, slot, root, rights::ALL, None).unwrap();
    }
    assert_eq!(scene.call(bad, &[(page, 0x100), (many, 64)]), Some(Status::Overflow));
    scene.is_empty();
    write_page(&scene.world, scene.server, WINDOWS_AT + 2, &SLOTS);
    // Another caller is not disturbed.
    assert_eq!(scene.call(good, &[(capability, 0), (capability, 1), (page, 0x100)]), None);
    let to = scene.world.kernel.memory.at(scene.there);
    assert!([40, 41].iter().all(|&slot| scene.world.kernel.capability(to, slot).is_ok()));
    scene.world.end();
}

#[test]
fn a_grant_is_the_last_item() {
    let mut scene = scene();
    let caller = scene.world.thread(0);
    let plain = Item::capability(rights::ALL);
    let moved = |item: Item| Item { grant: true, ..item };
    let slot = scene.world.insert_cap(ObjectRef::Platform);
    let has = |scene: &Scene, slot| {
        let own = scene.world.kernel.memory.at(scene.world.task);
        scene.world.kernel.capability(own, slot).is_ok()
    };
    let first = [(moved(plain), slot), (plain, 999)];
    assert_eq!(scene.call(caller, &first), Some(Status::BadArgument));
    let several = Item { order: 1, ..moved(plain) };
    assert_eq!(scene.call(caller, &[(several, 0)]), Some(Status::BadArgument));
    // Two mappings, of which the second might fail.
    let pages = moved(Item::memory(1, rights::ALL));
    assert_eq!(scene.call(caller, &[(plain, 0), (pages, 0x102)]), Some(Status::Busy));
    scene.is_empty();
    assert!(has(&scene, slot), "it is the sender's as before");
    assert_eq!(scene.call(caller, &[(pages, 0x100)]), None);
    scene.world.call(scene.server, Op::GateReplyWait, &[REPLY | WAIT]);
    write_page(&scene.world, scene.server, WINDOWS_AT, &[0x210, 8]);
    assert_eq!(scene.call(caller, &[(plain, 0), (moved(plain), slot)]), None);
    assert!(!has(&scene, slot));
    scene.world.end();
}
