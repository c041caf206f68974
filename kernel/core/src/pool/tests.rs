use super::*;
use std::vec::Vec;

struct Small(Cell<u64>);
impl Object for Small {
    const CLASS: u8 = 14;
}
struct Large(#[allow(dead_code)] [Cell<u64>; 300]);
impl Object for Large {
    const CLASS: u8 = 15;
}

#[test]
fn stale_handles_are_refused() {
    let mut memory = testing::memory(64);
    let handle = memory.alloc(None, Small(Cell::new(7))).unwrap();
    assert_eq!(memory.at(handle).0.get(), 7);
    memory.free(handle);
    assert!(memory.get(handle).is_none());
    memory.reclaim();
    let other = memory.alloc(None, Small(Cell::new(8))).unwrap();
    assert!(memory.get(handle).is_none(), "the slot was reused, the handle was not");
    assert_eq!(memory.at(other).0.get(), 8);
}

#[test]
fn quota_is_exact_and_returned() {
    let mut memory = testing::memory(64);
    let before = memory.free_frames();
    let factory = memory.new_factory(None, 5, 63, 0).unwrap();
    memory.at(factory).caps.set(1);
    let handles: Vec<_> = (0..)
        .map_while(|_| memory.alloc(Some(factory), Large([const { Cell::new(0) }; 300])).ok())
        .collect();
    assert_eq!(handles.len(), 5, "one object a frame");
    assert_eq!(memory.alloc_raw(Some(factory), 1).err(), Some(Status::NoQuota));
    for handle in handles {
        memory.free(handle);
    }
    memory.reclaim();
    assert_eq!(memory.at(factory).available(), 5);
    memory.at(factory).caps.set(0);
    memory.destroy_factory(factory);
    memory.reclaim();
    assert_eq!(memory.free_frames(), before);
    assert_eq!(memory.root().used.get(), 0);
}

#[test]
fn factory_lives_until_its_objects_are_gone() {
    let mut memory = testing::memory(64);
    let parent = memory.new_factory(None, 20, 63, 0).unwrap();
    memory.at(parent).caps.set(1);
    let child = memory.new_factory(Some(parent), 10, 63, 0).unwrap();
    let raw = memory.alloc_raw(Some(child), 3).unwrap();
    memory.destroy_factory(child);
    assert!(memory.get(child).is_some(), "frames are still out");
    memory.free_raw(raw, 3);
    memory.reclaim();
    assert!(memory.get(child).is_none());
    assert_eq!(memory.at(parent).available(), 20);
}

#[test]
fn random_objects_against_a_map() {
    let mut memory = testing::memory(256);
    let factory = memory.new_factory(None, 100, 63, 0).unwrap();
    memory.at(factory).caps.set(1);
    let mut model: Vec<(Handle<Small>, u64)> = Vec::new();
    let mut seed = 1u64;
    for step in 0..20_000 {
        seed = seed.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        if seed >> 60 < 8 {
            if let Ok(handle) = memory.alloc(Some(factory), Small(Cell::new(step))) {
                model.push((handle, step));
            }
        } else if !model.is_empty() {
            let (handle, _) = model.swap_remove((seed >> 32) as usize % model.len());
            memory.free(handle);
        }
        if seed >> 40 & 7 == 0 {
            memory.reclaim();
        }
        if step % 64 == 0 {
            for (handle, value) in &model {
                assert_eq!(memory.at(*handle).0.get(), *value);
            }
        }
    }
    for (handle, _) in model {
        memory.free(handle);
    }
    memory.reclaim();
    assert_eq!(memory.at(factory).available(), 100);
}

#[test]
fn a_frame_without_generations_is_retired_alone() {
    let mut memory = testing::memory(64);
    let before = memory.free_frames();
    let factory = memory.new_factory(None, 5, 63, 0).unwrap();
    memory.at(factory).caps.set(1);
    let make = |memory: &Memory, value| memory.alloc(Some(factory), Small(Cell::new(value)));
    let first = make(&memory, 1).unwrap();
    let frame = |handle: Handle<Small>| handle.index() >> (PAGE_SHIFT - 4);
    let retired = frame(first);
    memory.info(retired).generation.set((1 << GENERATION_BITS) - 3);
    let last: Vec<_> = (2..4).map(|value| make(&memory, value).unwrap()).collect();
    assert!(last.iter().all(|&handle| frame(handle) == retired), "two generations were left");
    let next = make(&memory, 4).unwrap();
    assert_ne!(frame(next), retired, "in another frame, although this one has room");
    memory.free(last[0]);
    memory.reclaim();
    assert_ne!(frame(make(&memory, 5).unwrap()), retired);
    assert_eq!(memory.at(first).0.get(), 1, "its objects live on");
    memory.free(first);
    memory.free(last[1]);
    memory.reclaim();
    assert_eq!(memory.at(factory).available(), 4, "the factory is not charged for it any more");
    for handle in testing::all::<Small>(&memory) {
        assert_ne!(frame(handle), retired);
        memory.free(handle);
    }
    memory.at(factory).caps.set(0);
    memory.destroy_factory(factory);
    memory.reclaim();
    assert_eq!(memory.free_frames(), before - 1, "all other frames are free");
    let rest: Vec<_> = (0..before).map_while(|_| memory.alloc_raw(None, 1).ok()).collect();
    assert!(rest.iter().all(|rest| rest.0 != retired), "it is not allocated again");
}

#[test]
fn many_frames_are_reclaimed_in_several_entries() {
    let mut memory = testing::memory(512);
    let before = memory.free_frames();
    for _ in 0..300 {
        let frame = memory.alloc_raw(None, 1).unwrap();
        memory.free_raw(frame, 1);
    }
    for reclaimed in [128, 256, 300] {
        assert!(memory.has_work());
        memory.reclaim();
        assert_eq!(memory.free_frames(), before - 300 + reclaimed);
    }
    assert!(!memory.has_work());
}
