use std::collections::{BTreeMap, BTreeSet};
use std::vec::Vec;

use super::*;
use crate::pool::{self, Factory};
use crate::testing::{self, Fake, Random, check, kernel, machine, on_cpu, translate};
use abi::{Item, vm_mode};

#[cfg(test)]
mod destruction;
#[cfg(test)]
mod unmap_at;

type K = Kernel<Fake>;

/// Creates a task that counts as having a capability, so that it lives until `drop_task`.
fn task(kernel: &K, factory: Option<Handle<Factory>>) -> Handle<Task<Fake>> {
    let task = kernel.new_task(factory, 512).unwrap();
    kernel.memory.at(task).caps.set(1);
    task
}

fn drop_task(kernel: &K, task: Handle<Task<Fake>>) {
    kernel.memory.at(task).caps.set(0);
    kernel.destroy(ObjectRef::Task(task));
}

fn finish(kernel: &mut K) {
    kernel.finish(0);
    kernel.scheduled(0);
}

fn give_memory(kernel: &K, to: Handle<Task<Fake>>, base: u64, order: u8) {
    let extent = Extent { kind: ItemKind::Memory, base, physical: base, order };
    kernel.add_mapping(SpaceRef::Task(to), extent, rights::ALL, false, None).unwrap();
}

fn memory_item(order: u8, rights: u8) -> Item {
    Item::memory(order, rights)
}

#[test]
fn the_last_page_of_the_lower_half_stays_empty() {
    let kernel = kernel(256);
    let owner = task(&kernel, None);
    give_memory(&kernel, owner, 0x1000, 4);
    let last = (abi::USER_END >> abi::PAGE_SHIFT) - 1;
    let own = SpaceRef::Task(owner);
    let one = memory_item(0, rights::ALL);
    assert_eq!(kernel.delegate(owner, one, 0x1000, own, last), Err(Status::BadArgument));
    assert_eq!(kernel.delegate(owner, one, 0x1000, own, last - 1), Ok(()));
    let two = memory_item(1, rights::ALL);
    assert_eq!(kernel.delegate(owner, two, 0x1000, own, last - 1), Err(Status::BadArgument));
    let frame = kernel.memory.alloc_raw(None, 1).unwrap();
    let at = |page: u64| kernel.map_fixed(owner, page << abi::PAGE_SHIFT, frame, true).err();
    assert_eq!(at(last), Some(Status::BadArgument));
    assert_eq!(at(last + 1), Some(Status::BadArgument));
    assert_eq!(at(last - 1), Some(Status::Busy));
    assert_eq!(at(last - 2), None);
}

#[test]
fn ranges_that_overflow_are_refused() {
    let kernel = kernel(256);
    let owner = task(&kernel, None);
    let own = SpaceRef::Task(owner);
    for kind in [ItemKind::Memory, ItemKind::Capability, ItemKind::Port] {
        for order in [0, 6, Item::MAX_ORDER] {
            let item = Item { kind, grant: false, order, rights: rights::ALL };
            let last = !((1u64 << order) - 1);
            assert!(kernel.delegate(owner, item, last, own, 0).is_err());
            assert!(kernel.delegate(owner, item, 0, own, last).is_err());
            let _ = kernel.unmap(owner, (item, last), true, &mut 0, &mut 5);
        }
    }
}

#[test]
fn capabilities_move_all_or_none() {
    let kernel = kernel(256);
    let owner = task(&kernel, None);
    for selector in 0..4 {
        kernel.insert_capability(owner, selector, ObjectRef::Platform, rights::ALL, None).unwrap();
    }
    kernel.insert_capability(owner, 9, ObjectRef::Platform, rights::ALL, None).unwrap();
    let item = Item { kind: ItemKind::Capability, grant: true, order: 1, rights: rights::ALL };
    let own = SpaceRef::Task(owner);
    assert_eq!(kernel.delegate(owner, item, 0, own, 8), Err(Status::Busy));
    assert!(kernel.capability(kernel.memory.at(owner), 0).is_ok(), "nothing has moved");
    assert_eq!(kernel.delegate(owner, item, 0, own, 0), Err(Status::Busy));
    assert_eq!(kernel.delegate(owner, item, 0, own, 6), Ok(()));
    check(&kernel);
}

#[test]
fn mutually_referencing_tasks_are_destroyed() {
    let mut kernel = kernel(1024);
    let before = kernel.memory.free_frames();
    // A chain: each task holds the only capability to the next two.
    let tasks: Vec<_> = (0..40).map(|_| kernel.new_task(None, 16).unwrap()).collect();
    kernel.memory.at(tasks[0]).caps.set(1);
    for (index, next) in tasks.iter().enumerate().skip(1) {
        let holder = tasks[(index - 1) / 2];
        let slot = (index - 1) as u64 % 2;
        kernel.insert_capability(holder, slot, ObjectRef::Task(*next), rights::ALL, None).unwrap();
    }
    drop_task(&kernel, tasks[0]);
    for round in 0.. {
        let done = kernel.reap(&mut (work::WORK + round % 3));
        finish(&mut kernel);
        check(&kernel);
        if done {
            break;
        }
    }
    assert!(
        tasks.iter().all(|task| kernel.memory.get(*task).is_none()),
        "a task was not destroyed"
    );
    assert_eq!(kernel.memory.free_frames(), before);
}

#[test]
fn delegation_depth_is_limited() {
    let kernel = kernel(1024);
    let owner = task(&kernel, None);
    give_memory(&kernel, owner, 0, 0);
    let own = SpaceRef::Task(owner);
    let item = memory_item(0, rights::ALL);
    let failed = (0..400).find(|page| kernel.delegate(owner, item, *page, own, page + 1).is_err());
    let failed = failed.expect("an end of the chain");
    assert_eq!(kernel.delegate(owner, item, failed, own, failed + 1), Err(Status::Overflow));
    let mut steps = 0;
    let whole = memory_item(0, 0);
    let mut done = 0;
    // Budget for one look-up and one leaf per call.
    while !kernel
        .unmap(owner, (whole, 0), false, &mut done, &mut (work::LOOKUP + work::LEAF))
        .unwrap()
    {
        steps += 1;
    }
    assert_eq!(steps, failed - 1);
    assert!(translate(&kernel, own, 0).is_some() && translate(&kernel, own, 1).is_none());
    check(&kernel);
}

#[test]
fn fixed_mappings_cannot_be_delegated_or_unmapped() {
    let kernel = kernel(256);
    let owner = task(&kernel, None);
    let own = SpaceRef::Task(owner);
    let frame = kernel.memory.alloc_raw(None, 1).unwrap();
    let node = kernel.map_fixed(owner, 0x5000, frame, true).unwrap();
    let item = memory_item(0, rights::ALL);
    assert_eq!(kernel.delegate(owner, item, 5, own, 6), Err(Status::BadRights));
    assert_eq!(kernel.unmap(owner, (item, 5), true, &mut 0, &mut 9), Err(Status::BadRights));
    assert_eq!(kernel.unmap(owner, (item, 5), false, &mut 0, &mut 9), Ok(true));
    assert!(kernel.memory.get(node).is_some());
    kernel.remove_fixed(node);
    assert!(translate(&kernel, own, 5).is_none());
}

/// One mapping of the model.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Mapped {
    order: u8,
    physical: u64,
    rights: u8,
    parent: Option<usize>,
}

/// Reference model: a set of mappings by id; `places` finds them by space, kind and base.
#[derive(Default)]
struct Model {
    mapped: BTreeMap<usize, Mapped>,
    places: BTreeMap<(usize, u8, u64), usize>,
    next: usize,
}

impl Model {
    fn add(&mut self, space: usize, kind: ItemKind, base: u64, mapped: Mapped) {
        self.mapped.insert(self.next, mapped);
        self.places.insert((space, kind as u8, base), self.next);
        self.next += 1;
    }
    fn covering(&self, space: usize, kind: ItemKind, at: u64) -> Option<(u64, usize)> {
        let (place, id) = self.places.range(..=(space, kind as u8, at)).next_back()?;
        let covers = place.0 == space && place.1 == kind as u8;
        (covers && at - place.2 < units(self.mapped[id].order)).then_some((place.2, *id))
    }
    fn overlaps(&self, space: usize, kind: ItemKind, base: u64, order: u8) -> bool {
        (base..base + units(order)).any(|at| self.covering(space, kind, at).is_some())
    }
    fn has_children(&self, id: usize) -> bool {
        self.mapped.values().any(|mapped| mapped.parent == Some(id))
    }
    fn remove(&mut self, id: usize) {
        let children: Vec<_> = self
            .mapped
            .iter()
            .filter(|(_, mapped)| mapped.parent == Some(id))
            .map(|(id, _)| *id)
            .collect();
        for child in children {
            self.remove(child);
        }
        self.mapped.remove(&id);
        self.places.retain(|_, other| *other != id);
    }

    /// Expected effect of `Kernel::delegate`, or its error.
    fn delegate(
        &mut self,
        from: usize,
        item: Item,
        source: u64,
        to: usize,
        destination: u64,
    ) -> Result<(), Status> {
        let size = units(item.order);
        let capability = item.kind == ItemKind::Capability;
        if (source | destination) & (size - 1) != 0 || capability && to == VM {
            return Err(Status::BadArgument);
        }
        if !capability && self.overlaps(to, item.kind, destination, item.order) {
            return Err(Status::Busy);
        }
        let absent = if capability { Status::BadCapability } else { Status::BadArgument };
        let mut at = source;
        let mut parts = Vec::new();
        while at < source + size {
            let (base, id) = self.covering(from, item.kind, at).ok_or(absent)?;
            let part = self.mapped[&id];
            if capability && part.rights & rights::DELEGATE == 0 {
                return Err(Status::BadRights);
            }
            let is_whole = part.order == item.order || capability;
            if item.grant && (!is_whole || self.has_children(id)) {
                return Err(Status::Busy);
            }
            if capability && self.covering(to, item.kind, destination + (at - source)).is_some() {
                return Err(Status::Busy);
            }
            parts.push((at, base, id));
            at = (base + units(part.order)).min(source + size);
        }
        for (at, base, id) in parts {
            let part = self.mapped[&id];
            let implied = if capability { 0 } else { rights::READ };
            let mapped = Mapped {
                order: part.order.min(item.order),
                physical: if capability { 0 } else { part.physical + (at - base) },
                rights: part.rights & (item.rights | implied),
                parent: if item.grant { part.parent } else { Some(id) },
            };
            self.add(to, item.kind, destination + (at - source), mapped);
            if item.grant {
                self.remove(id);
            }
        }
        Ok(())
    }

    /// Expected effect of `Kernel::unmap`.
    fn unmap(&mut self, from: usize, item: Item, base: u64, own: bool) -> Result<(), Status> {
        let size = units(item.order);
        if base & (size - 1) != 0 {
            return Err(Status::BadArgument);
        }
        let mut end = base + size;
        while end > base {
            let below = (from, item.kind as u8, end);
            let Some((place, id)) = self.places.range(..below).next_back().map(|(p, i)| (*p, *i))
            else {
                break;
            };
            let Some(mapped) = self.mapped.get(&id).copied() else { break };
            if (place.0, place.1) != (from, item.kind as u8)
                || place.2 + units(mapped.order) <= base
            {
                break;
            }
            let (low, high) = (place.2.max(base), (place.2 + units(mapped.order)).min(end));
            end = low;
            if own && (low, high) != (place.2, place.2 + units(mapped.order)) {
                return Err(Status::BadArgument);
            }
            if own {
                self.remove(id);
                continue;
            }
            let start = mapped.physical + (low - place.2);
            let range = start..start + (high - low);
            let hit: Vec<_> = self
                .mapped
                .iter()
                .filter(|(_, child)| {
                    child.parent == Some(id)
                        && child.physical < range.end
                        && range.start < child.physical + units(child.order)
                })
                .map(|(id, _)| *id)
                .collect();
            for child in hit {
                self.remove(child);
            }
        }
        Ok(())
    }

    /// Expected effect of `Kernel::unmap_at`.
    fn unmap_at(&mut self, from: usize, at: usize, item: Item, base: u64) -> Result<(), Status> {
        if base & (units(item.order) - 1) != 0 || item.kind == ItemKind::Capability {
            return Err(Status::BadArgument);
        }
        let spaces: BTreeMap<_, _> = self.places.iter().map(|(place, id)| (*id, place.0)).collect();
        let mut unit = base;
        while unit < base + units(item.order) {
            let found = self.covering(at, item.kind, unit);
            unit = found.map_or(unit + 1, |(first, id)| first + units(self.mapped[&id].order));
            if let Some((_, id)) = found
                && self.mapped[&id].parent.map(|parent| spaces[&parent]) == Some(from)
            {
                self.remove(id);
            }
        }
        Ok(())
    }
}

const TASKS: usize = 4;
const VM: usize = 4;

fn compare(kernel: &K, model: &Model, spaces: &[SpaceRef<Fake>]) {
    let mut found = BTreeMap::new();
    for handle in testing::nodes(kernel) {
        let node = kernel.memory.at(handle);
        let space = spaces.iter().position(|space| *space == node.space).unwrap();
        let entry = (node.order, node.physical, node.rights);
        found.insert((space, node.kind as u8, node.base), entry);
    }
    let expected: BTreeMap<_, _> = model
        .places
        .iter()
        .map(|(place, id)| (*place, &model.mapped[id]))
        .map(|(place, mapped)| (place, (mapped.order, mapped.physical, mapped.rights)))
        .collect();
    assert_eq!(found, expected);
}

fn against_the_model(seed: u64) {
    let mut random = Random(seed);
    let mut kernel = kernel(8192);
    let all_free = kernel.memory.free_frames();
    let factory = kernel.memory.new_factory(None, 6000, 63, 0).unwrap();
    kernel.memory.at(factory).caps.set(1);
    let tasks: Vec<_> = (0..TASKS).map(|_| task(&kernel, Some(factory))).collect();
    let mode = if seed.is_multiple_of(2) { vm_mode::NESTED } else { vm_mode::GUEST_VIRTUAL };
    let vm = kernel.new_vm(Some(factory), mode).unwrap();
    kernel.memory.at(vm).caps.set(1);
    let mut spaces: Vec<_> = tasks.iter().map(|task| SpaceRef::Task(*task)).collect();
    spaces.push(SpaceRef::Vm(vm));
    let mut model = Model::default();
    let root = |order, physical, rights| Mapped { order, physical, rights, parent: None };
    give_memory(&kernel, tasks[0], 0, 10);
    model.add(0, ItemKind::Memory, 0, root(10, 0, rights::ALL));
    let ports = Extent { kind: ItemKind::Port, base: 0, physical: 0, order: 8 };
    kernel.add_mapping(spaces[0], ports, rights::ALL, false, None).unwrap();
    model.add(0, ItemKind::Port, 0, root(8, 0, rights::ALL));
    for selector in 0..8 {
        kernel
            .insert_capability(tasks[0], selector, ObjectRef::Platform, rights::ALL, None)
            .unwrap();
        model.add(0, ItemKind::Capability, selector, root(0, 0, rights::ALL));
    }
    let mut seen = BTreeSet::new();
    for step in 0..6000 {
        let kind = random.pick(&[
            ItemKind::Memory,
            ItemKind::Memory,
            ItemKind::Capability,
            ItemKind::Port,
        ]);
        let (limit, orders): (u64, &[u8]) = match kind {
            ItemKind::Memory => (2048, &[0, 1, 3, 5, 9, 10]),
            ItemKind::Capability => (64, &[0, 0, 1, 2]),
            ItemKind::Port => (512, &[0, 2, 6, 8]),
        };
        let order = random.pick(orders);
        let item = Item {
            kind,
            grant: random.once_in(4),
            order,
            rights: random.pick(&[rights::ALL, rights::ALL, 0x83, 0x7f, 0]),
        };
        let mask = if random.once_in(30) { u64::MAX } else { !(units(order) - 1) };
        let base = random.below(limit) & mask;
        let from = random.below(TASKS as u64) as usize;
        if random.once_in(6) {
            let at = random.below(spaces.len() as u64) as usize;
            let expected = model.unmap_at(from, at, item, base);
            let (mut done, range) = (0, (item, base, random.once_in(2)));
            let result = loop {
                let mut budget = work::WORK + random.below(40) as u32;
                let (from, at) = (tasks[from], spaces[at]);
                let result = kernel.unmap_at(from, at, range, &mut done, &mut budget);
                finish(&mut kernel);
                match result {
                    Ok(false) => {}
                    Ok(true) => break Ok(()),
                    Err(status) => break Err(status),
                }
            };
            assert_eq!(result, expected);
            seen.insert(format!("unmap_at {result:?}"));
        } else if random.once_in(4) {
            let own = random.once_in(2);
            let expected = model.unmap(from, item, base, own);
            let mut done = 0;
            let result = loop {
                let mut budget = work::WORK + random.below(40) as u32;
                let range = (item, base);
                let result = kernel.unmap(tasks[from], range, own, &mut done, &mut budget);
                finish(&mut kernel);
                if step % 64 == 0 {
                    testing::check_mappings(&kernel);
                }
                match result {
                    Ok(false) => {}
                    Ok(true) => break Ok(()),
                    Err(status) => break Err(status),
                }
            };
            assert_eq!(result, expected);
            seen.insert(format!("unmap {result:?}"));
        } else {
            let to = random.below(spaces.len() as u64) as usize;
            let destination = random.below(limit) & mask;
            let expected = model.delegate(from, item, base, to, destination);
            let result = kernel.delegate(tasks[from], item, base, spaces[to], destination);
            finish(&mut kernel);
            assert_eq!(result, expected, "{item:?} {from} {base:#x} -> {to} {destination:#x}");
            seen.insert(format!("delegate {result:?}"));
        }
        if step % 16 == 0 {
            compare(&kernel, &model, &spaces);
        }
        if step % 200 == 0 {
            check(&kernel);
        }
    }
    assert!(seen.len() >= 8, "{seen:?}");
    compare(&kernel, &model, &spaces);
    check(&kernel);
    for task in tasks {
        drop_task(&kernel, task);
    }
    kernel.memory.at(vm).caps.set(0);
    kernel.destroy(ObjectRef::Vm(vm));
    while !kernel.reap(&mut (work::WORK + random.below(4) as u32)) {
        finish(&mut kernel);
        check(&kernel);
    }
    finish(&mut kernel);
    assert_eq!(kernel.memory.at(factory).available(), 6000);
    kernel.memory.at(factory).caps.set(0);
    kernel.memory.destroy_factory(factory);
    finish(&mut kernel);
    assert_eq!(kernel.memory.free_frames(), all_free);
    assert!(pool::testing::all::<MapNode<Fake>>(&kernel.memory).is_empty());
}

#[test]
fn every_nested_vm_has_the_device_of_guests() {
    on_cpu(0);
    let mut kernel = kernel(256);
    let owner = task(&kernel, None);
    give_memory(&kernel, owner, 0x10, 0);
    let device = Extent { kind: ItemKind::Memory, base: 0x8010, physical: 0x8040, order: 1 };
    machine(|machine| machine.guest_device.set(Some(device)));
    let vm = kernel.new_vm(None, abi::vm_mode::NESTED).unwrap();
    let at = |kernel: &K, vm, page| {
        let (physical, access) = translate(kernel, SpaceRef::Vm(vm), page)?;
        assert!(access.device && access.write && !access.execute);
        Some(physical)
    };
    let pages = [0x800f, 0x8010, 0x8011, 0x8012].map(|page| at(&kernel, vm, page));
    assert_eq!(pages, [None, Some(0x8040), Some(0x8041), None]);
    // Nothing takes its place, and nothing takes it away.
    let page = memory_item(0, rights::ALL);
    let delegated = kernel.delegate(owner, page, 0x10, SpaceRef::Vm(vm), 0x8011);
    assert_eq!(delegated, Err(Status::Busy));
    // A VM that does not get it, for lack of kernel memory, does not remain.
    let mut refused = 0;
    for frames in 0..8 {
        let before = kernel.memory.free_frames();
        let factory = kernel.memory.new_factory(None, frames, 0, 0).unwrap();
        let created = kernel.new_vm(Some(factory), abi::vm_mode::NESTED);
        refused += u32::from(created.is_err());
        if let Ok(vm) = created {
            kernel.destroy(ObjectRef::Vm(vm));
        }
        while !kernel.reap(&mut { work::WORK }) {}
        kernel.memory.destroy_factory(factory);
        finish(&mut kernel);
        assert_eq!(kernel.memory.free_frames(), before, "{frames}");
    }
    assert!((2..8).contains(&refused), "{refused}");
    let other = kernel.new_vm(None, abi::vm_mode::GUEST_VIRTUAL).unwrap();
    assert_eq!(at(&kernel, other, 0x8010), None);
}

#[test]
fn cpus_see_the_changes_of_a_vm() {
    on_cpu(0);
    let mut kernel = kernel(256);
    let owner = task(&kernel, None);
    give_memory(&kernel, owner, 0x10, 0);
    let ports = Extent { kind: ItemKind::Port, base: 0, physical: 0, order: 6 };
    kernel.add_mapping(SpaceRef::Task(owner), ports, rights::ALL, false, None).unwrap();
    let vm = kernel.new_vm(None, abi::vm_mode::NESTED).unwrap();
    kernel.memory.at(vm).caps.set(1);
    let generation = |kernel: &K| kernel.memory.at(vm).space.generation.get();
    let delegate = |kernel: &K, item, base| {
        kernel.delegate(owner, item, base, SpaceRef::Vm(vm), base).unwrap();
        generation(kernel)
    };
    let (page, port) = (
        memory_item(0, rights::ALL),
        Item { kind: ItemKind::Port, order: 6, ..memory_item(0, rights::ALL) },
    );
    let first = generation(&kernel);
    assert_eq!(delegate(&kernel, page, 0x10), first, "a new mapping is in no TLB");
    let opened = delegate(&kernel, port, 0);
    assert_ne!(opened, first);
    assert!(!kernel.has_work(0));

    machine(|machine| machine.shootdowns.take());
    let unmap = |kernel: &K, range| kernel.unmap(owner, range, false, &mut 0, &mut { work::WORK });
    for range in [(page, 0x10), (port, 0)] {
        // CPU 1 runs it.
        kernel.memory.at(vm).space.active.set(1 << 1);
        let before = generation(&kernel);
        assert_eq!(unmap(&kernel, range), Ok(true));
        assert_ne!(generation(&kernel), before);
        assert!(kernel.has_work(0), "the flush comes before the kernel is left");
        finish(&mut kernel);
        assert_eq!(machine(|machine| machine.shootdowns.take()), [1 << 1]);
        assert!(!kernel.has_work(0));
        let active = kernel.memory.at(vm).space.active.get();
        assert_eq!(active, 0, "the CPU has left the guest, even if the vCPU is gone");
    }

    let before = generation(&kernel);
    kernel.destroy(ObjectRef::Vm(vm));
    assert_ne!(generation(&kernel), before);
}

#[test]
fn random_delegations_against_a_set_model() {
    for seed in 1..5 {
        against_the_model(seed);
    }
}

#[test]
fn exhausted_quota_leaves_a_consistent_state() {
    let mut random = Random(77);
    for quota in 1..40 {
        let mut kernel = kernel(512);
        let giver = task(&kernel, None);
        give_memory(&kernel, giver, 0, 10);
        kernel.insert_capability(giver, 0, ObjectRef::Platform, rights::ALL, None).unwrap();
        let factory = kernel.memory.new_factory(None, quota, 63, 0).unwrap();
        kernel.memory.at(factory).caps.set(1);
        let Ok(taker) = kernel.new_task(Some(factory), 512) else {
            assert!(quota < 2);
            continue;
        };
        kernel.memory.at(taker).caps.set(1);
        let mut refused = 0;
        for _ in 0..300 {
            let kind = random.pick(&[ItemKind::Memory, ItemKind::Memory, ItemKind::Capability]);
            let order = if kind == ItemKind::Memory { random.pick(&[0, 0, 3]) } else { 0 };
            let item = Item { kind, grant: false, order, rights: rights::ALL };
            let base = if kind == ItemKind::Memory { random.below(1024) } else { 0 };
            let area =
                if kind == ItemKind::Memory { random.below(1 << 33) } else { random.below(512) };
            let mask = !(units(order) - 1);
            let to = SpaceRef::Task(taker);
            let result = kernel.delegate(giver, item, base & mask, to, area & mask);
            refused += u32::from(result == Err(Status::NoQuota));
            finish(&mut kernel);
        }
        assert!(refused > 0 || quota > 30);
        check(&kernel);
        drop_task(&kernel, taker);
        while !kernel.reap(&mut work::WORK.clone()) {
            finish(&mut kernel);
        }
        finish(&mut kernel);
        assert_eq!(kernel.memory.at(factory).available(), quota);
    }
}
