//! Access of tests to kernel memory, and the check of its quotas.

use super::*;

pub(crate) use super::leaked as memory;

/// Returns every object of a type.
pub fn all<T: Object>(memory: &Memory) -> std::vec::Vec<Handle<T>> {
    let size = 1 << Slot::<T>::SIZE;
    let slabs = (0..memory.count).filter(|frame| memory.class(*frame).get() == Slot::<T>::SIZE);
    slabs
        .flat_map(|frame| {
            (0..FRAME / size)
                .map(move |index| (frame << (PAGE_SHIFT - 4)) + ((index * size) >> 4) as u32)
        })
        .filter_map(|index| {
            let slot = memory.slot::<T>(index);
            let raw = NonZeroU64::new(slot.name.get())?;
            (slot.class.get() == T::CLASS).then_some(Handle(raw, PhantomData))
        })
        .collect()
}

/// Number of bookkeeping frames.
pub fn fixed(memory: &Memory) -> u32 {
    (0..memory.count).filter(|&frame| memory.class(frame).get() == CLASS_FIXED).count() as u32
}

/// Checks the quotas: a factory is charged for the frames that it owns and the quotas of its
/// children.
pub fn audit(memory: &Memory) {
    let frames = 0..memory.count;
    let free = frames.clone().filter(|&frame| memory.class(frame).get() == CLASS_FREE).count();
    assert_eq!(memory.free.get() as usize, free);
    let factories = all::<Factory>(memory);
    let used = |name: Option<Handle<Factory>>| {
        let taken = |&frame: &u32| {
            !matches!(memory.class(frame).get(), CLASS_FREE | CLASS_FIXED)
                && memory.info(frame).owner.get() == name
        };
        let passed_on = factories.iter().map(|other| memory.at(*other));
        frames.clone().filter(taken).count() as u32
            + passed_on.filter(|other| other.parent == name).map(|f| f.quota.get()).sum::<u32>()
    };
    assert_eq!(memory.root.used.get(), used(None));
    for name in &factories {
        assert_eq!(memory.at(*name).used.get(), used(Some(*name)));
    }
}
