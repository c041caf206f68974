//! Guest-virtual spaces, and the unmapping of one alias.

use super::*;

/// First page number that a VMM delegates from.
const OWN: u64 = 0x400;

/// A kernel, a VMM with 2^10 pages from [`OWN`] on, and a guest-virtual space of this quota.
fn world(quota: u32) -> (K, Handle<Task<Fake>>, SpaceRef<Fake>) {
    let kernel = kernel(1024);
    let vmm = task(&kernel, None);
    give_memory(&kernel, vmm, OWN, 10);
    let factory = kernel.memory.new_factory(None, quota, 0, 0).unwrap();
    let vm = kernel.new_vm(Some(factory), vm_mode::GUEST_VIRTUAL).unwrap();
    kernel.memory.at(vm).caps.set(1);
    (kernel, vmm, SpaceRef::Vm(vm))
}

/// Executes a complete `UnmapAt`.
fn unmap_at(
    kernel: &mut K,
    from: Handle<Task<Fake>>,
    at: SpaceRef<Fake>,
    range: (Item, u64, bool),
) -> Result<(), Status> {
    let mut done = 0;
    while !kernel.unmap_at(from, at, range, &mut done, &mut work::WORK.clone())? {
        finish(kernel);
        check(kernel);
    }
    finish(kernel);
    check(kernel);
    Ok(())
}

fn one_page(at: u64) -> (Item, u64, bool) {
    (memory_item(0, 0), at, false)
}

#[test]
fn user_and_global_are_rights_in_guest_virtual_spaces_only() {
    let (kernel, vmm, space) = world(64);
    let nested = SpaceRef::Vm(kernel.new_vm(None, vm_mode::NESTED).unwrap());
    for bits in 0..8 {
        let (page, given) = (u64::from(bits), bits << 2);
        kernel.delegate(vmm, memory_item(0, given), OWN, space, page).unwrap();
        kernel.delegate(vmm, memory_item(0, given), OWN, nested, page).unwrap();
        let access = |space| translate(&kernel, space, page).unwrap().1;
        let has = |right| given & right != 0;
        assert_eq!(access(space).execute, has(rights::EXECUTE));
        assert_eq!(access(space).user, has(rights::USER));
        assert_eq!(access(space).global, has(rights::GLOBAL));
        assert!(!access(space).write && !access(space).device);
        assert!(access(nested).user && !access(nested).global, "nested tables need the user bit");
    }
}

#[test]
fn rights_are_limited_to_those_of_the_giver() {
    let (kernel, vmm, space) = world(64);
    let other = task(&kernel, None);
    let few = rights::READ | rights::WRITE;
    kernel.delegate(vmm, memory_item(0, few), OWN, SpaceRef::Task(other), 7).unwrap();
    kernel.delegate(other, memory_item(0, rights::ALL), 7, space, 1).unwrap();
    let access = translate(&kernel, space, 1).unwrap().1;
    assert!(access.write && !access.execute && !access.user && !access.global);
    check(&kernel);
}

#[test]
fn aliases_survive() {
    let (mut kernel, vmm, space) = world(64);
    let item = memory_item(0, rights::ALL);
    for at in [1, 2, 0xf_ffff_ffff] {
        kernel.delegate(vmm, item, OWN, space, at).unwrap();
    }
    let own = SpaceRef::Task(vmm);
    kernel.delegate(vmm, item, OWN, own, 9).unwrap();
    assert_eq!(unmap_at(&mut kernel, vmm, space, one_page(2)), Ok(()));
    let is_mapped = |kernel: &K, space, at| translate(kernel, space, at).is_some();
    let seen = |kernel: &K| [1, 2, 0xf_ffff_ffff].map(|at| is_mapped(kernel, space, at));
    assert_eq!(seen(&kernel), [true, false, true]);
    assert!(is_mapped(&kernel, own, 9) && is_mapped(&kernel, own, OWN));
    // What is absent counts as unmapped; a whole range goes at once.
    assert_eq!(unmap_at(&mut kernel, vmm, space, one_page(2)), Ok(()));
    let last = (memory_item(Item::MAX_ORDER, 0), 0x3ff << Item::MAX_ORDER, true);
    assert_eq!(unmap_at(&mut kernel, vmm, space, last), Ok(()));
    assert_eq!(seen(&kernel), [true, false, false]);
}

#[test]
fn a_mapping_that_overlaps_goes_completely_with_what_was_made_of_it() {
    let (mut kernel, vmm, space) = world(64);
    let own = SpaceRef::Task(vmm);
    kernel.delegate(vmm, memory_item(4, rights::ALL), OWN, own, 0x10).unwrap();
    kernel.delegate(vmm, memory_item(0, rights::ALL), 0x12, space, 5).unwrap();
    assert_eq!(unmap_at(&mut kernel, vmm, own, one_page(0x1f)), Ok(()));
    for (space, page) in [(own, 0x10), (own, 0x1f), (space, 5)] {
        assert!(translate(&kernel, space, page).is_none(), "{page:#x}");
    }
    assert!(translate(&kernel, own, OWN).is_some());
}

#[test]
fn only_mappings_from_the_caller_itself() {
    let (mut kernel, vmm, space) = world(64);
    let (other, third) = (task(&kernel, None), task(&kernel, None));
    let [other_space, third_space] = [other, third].map(SpaceRef::Task);
    let item = memory_item(0, rights::ALL);
    kernel.delegate(vmm, item, OWN, other_space, 7).unwrap();
    kernel.delegate(other, item, 7, space, 1).unwrap();
    // A granted page remains a delegation of the one who gave it first.
    kernel.delegate(vmm, item, OWN + 1, other_space, 3).unwrap();
    kernel.delegate(other, Item { grant: true, ..item }, 3, space, 2).unwrap();
    let frame = kernel.memory.alloc_raw(None, 1).unwrap();
    let node = kernel.map_fixed(other, 0x5000, frame, true).unwrap();
    let all = (memory_item(20, 0), 0, true);
    let seen = |kernel: &K| [1, 2].map(|page| translate(kernel, space, page).is_some());
    assert_eq!(unmap_at(&mut kernel, third, space, all), Ok(()));
    assert_eq!(seen(&kernel), [true, true]);
    assert_eq!(unmap_at(&mut kernel, vmm, space, all), Ok(()));
    assert_eq!(seen(&kernel), [true, false]);
    assert_eq!(unmap_at(&mut kernel, other, other_space, all), Ok(()));
    for page in [5, 7] {
        assert!(translate(&kernel, other_space, page).is_some(), "not its own gift");
    }
    assert_eq!(unmap_at(&mut kernel, other, third_space, all), Ok(()), "an empty space");
    assert_eq!(unmap_at(&mut kernel, other, space, all), Ok(()));
    assert_eq!(seen(&kernel), [false, false]);
    kernel.remove_fixed(node);
}

#[test]
fn wrong_ranges_are_refused() {
    let (mut kernel, vmm, space) = world(64);
    kernel.delegate(vmm, memory_item(0, rights::ALL), OWN, space, 1).unwrap();
    let bad = Err(Status::BadArgument);
    let capability = Item::capability(0);
    assert_eq!(unmap_at(&mut kernel, vmm, space, (capability, 1, false)), bad);
    // The tables of a page beyond the space would be those of another page.
    let beyond = [(0, 1 << 36), (18, 1 << 36), (26, 1 << 50), (0, u64::MAX)];
    for (order, base) in
        [(1, 1), (9, 0x100), (26, 1 << 25), (1, u64::MAX)].into_iter().chain(beyond)
    {
        assert_eq!(unmap_at(&mut kernel, vmm, space, (memory_item(order, 0), base, true)), bad);
    }
    let (mut done, mut budget) = (2, work::WORK);
    let forged = kernel.unmap_at(vmm, space, one_page(1), &mut done, &mut budget);
    assert_eq!(forged, Err(Status::BadArgument), "more progress than units");
    assert!(translate(&kernel, space, 1).is_some());
}

#[test]
fn freed_tables_return_to_the_quota() {
    let (mut kernel, vmm, space) = world(24);
    let item = memory_item(0, rights::ALL);
    let factory = kernel.space(space).unwrap().factory.unwrap();
    let available = |kernel: &K| kernel.memory.at(factory).available();
    let before = available(&kernel);
    // One page in each of many tables, as a guest that touches a sparse space.
    let places = (0..64_u64).map(|number| number << 18);
    let mapped = places.take_while(|&at| kernel.delegate(vmm, item, OWN, space, at).is_ok());
    assert!(mapped.count() < 64, "the quota is exhausted");
    let all = |free| (memory_item(Item::MAX_ORDER, 0), 0, free);
    assert_eq!(unmap_at(&mut kernel, vmm, space, all(false)), Ok(()));
    assert!(available(&kernel) < 4, "nodes do not suffice for other tables");
    assert_eq!(unmap_at(&mut kernel, vmm, space, all(true)), Ok(()));
    assert!(available(&kernel) + 2 >= before, "all but the upper table, and a page of nodes");
    assert_eq!(kernel.delegate(vmm, item, OWN, space, 5 << 18), Ok(()));
    // Tables in use stay.
    assert_eq!(unmap_at(&mut kernel, vmm, space, (memory_item(18, 0), 0, true)), Ok(()));
    assert!(translate(&kernel, space, 5 << 18).is_some());
}
