//! Ordered trees of kernel objects: the kernel's only search structure.
//!
//! A treap whose priorities are derived from object ids, which user tasks cannot choose, so its
//! depth is logarithmic for any choice of keys. It allocates nothing: the links are in the objects.
//! Used for the mappings of an address space (by base), the children of a mapping (by mapped
//! resource) and timeouts (by deadline). An object can be in several trees, one per `Order` that it
//! has links for.

use core::cell::Cell;
use core::marker::PhantomData;

use crate::pool::{Handle, Memory, Object};

/// Links of an object in one tree.
pub struct Links<T> {
    left: Cell<Option<Handle<T>>>,
    right: Cell<Option<Handle<T>>>,
}

/// Links of an object that is in no tree.
impl<T> Default for Links<T> {
    fn default() -> Self {
        Self { left: Cell::new(None), right: Cell::new(None) }
    }
}

/// An object that can be in a tree. Its key must be unique, and must not change while it is.
pub trait Keyed<Order = ()>: Object {
    /// Type of the keys that order the tree.
    type Key: Ord + Copy;
    /// The object's key.
    fn key(&self, handle: Handle<Self>) -> Self::Key;
    /// The object's links.
    fn links(&self) -> &Links<Self>;
}

/// An ordered set of objects.
pub struct Tree<T, Order = ()> {
    root: Cell<Option<Handle<T>>>,
    order: PhantomData<Order>,
}

type Link<T> = Option<Handle<T>>;

/// Treap priority: consecutive object ids get unrelated priorities.
fn priority<T>(handle: Handle<T>) -> u64 {
    handle
        .id()
        .wrapping_mul(0x9e37_79b9_7f4a_7c15)
        .rotate_left(23)
        .wrapping_mul(0xbf58_476d_1ce4_e5b9)
}

impl<T: Keyed<Order>, Order> Tree<T, Order> {
    /// The empty set.
    pub(crate) const fn new() -> Self {
        Self { root: Cell::new(None), order: PhantomData }
    }

    /// Returns an arbitrary element, if any.
    pub fn any(&self) -> Link<T> {
        self.root.get()
    }

    /// Inserts an element.
    pub fn insert(&self, memory: &Memory, handle: Handle<T>) {
        let new = memory.at(handle);
        let (key, rank) = (new.key(handle), priority(handle));
        let mut place = &self.root;
        while let Some(next) = place.get()
            && priority(next) > rank
        {
            let above = memory.at(next);
            let links = above.links();
            place = if key < above.key(next) { &links.left } else { &links.right };
        }
        // Split the subtree at this position by the new key into the new element's children.
        let mut rest = place.replace(Some(handle));
        let (mut less, mut more) = (&new.links().left, &new.links().right);
        while let Some(next) = rest {
            let below = memory.at(next);
            if below.key(next) < key {
                less.set(Some(next));
                less = &below.links().right;
                rest = less.get();
            } else {
                more.set(Some(next));
                more = &below.links().left;
                rest = more.get();
            }
        }
        less.set(None);
        more.set(None);
    }

    /// Removes an element of this tree.
    pub fn remove(&self, memory: &Memory, handle: Handle<T>) {
        let old = memory.at(handle);
        let key = old.key(handle);
        let mut place = &self.root;
        while let Some(next) = place.get()
            && next != handle
        {
            let above = memory.at(next);
            let links = above.links();
            place = if key < above.key(next) { &links.left } else { &links.right };
        }
        if place.get().is_none() {
            return;
        }
        // Merge the element's children into its position.
        let (mut left, mut right) = (old.links().left.take(), old.links().right.take());
        loop {
            match (left, right) {
                (Some(a), Some(b)) if priority(a) > priority(b) => {
                    place.set(Some(a));
                    place = &memory.at(a).links().right;
                    left = place.get();
                }
                (Some(_), Some(b)) => {
                    place.set(Some(b));
                    place = &memory.at(b).links().left;
                    right = place.get();
                }
                (one, other) => {
                    place.set(one.or(other));
                    return;
                }
            }
        }
    }

    /// The last element whose key is at most `key`.
    pub fn at_most(&self, memory: &Memory, key: T::Key) -> Link<T> {
        self.nearest(memory, false, |other| other <= key)
    }

    /// The first element whose key is at least `key`.
    pub fn at_least(&self, memory: &Memory, key: T::Key) -> Link<T> {
        self.nearest(memory, true, |other| other >= key)
    }

    /// The first element.
    pub fn first(&self, memory: &Memory) -> Link<T> {
        self.nearest(memory, true, |_| true)
    }

    /// The first or last element whose key fits, where the keys that fit are at the other end.
    #[inline(always)]
    fn nearest(&self, memory: &Memory, first: bool, fits: impl Fn(T::Key) -> bool) -> Link<T> {
        let (mut best, mut next) = (None, self.root.get());
        while let Some(handle) = next {
            let object = memory.at(handle);
            let is_fit = fits(object.key(handle));
            best = if is_fit { next } else { best };
            let links = object.links();
            next = if is_fit == first { links.left.get() } else { links.right.get() };
        }
        best
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pool::testing;
    use std::collections::BTreeMap;

    impl<T: Keyed<Order>, Order> Tree<T, Order> {
        /// Depth of the tree.
        pub fn depth(&self, memory: &Memory) -> u32 {
            fn below<T: Keyed<Order>, Order>(memory: &Memory, link: Link<T>) -> u32 {
                link.map_or(0, |handle| {
                    let links = memory.at(handle).links();
                    let depth = |link: &Cell<Link<T>>| below::<T, Order>(memory, link.get());
                    1 + depth(&links.left).max(depth(&links.right))
                })
            }
            below::<T, Order>(memory, self.root.get())
        }

        /// Visits all elements; returns their number.
        pub fn count(&self, memory: &Memory, visit: &dyn Fn(Handle<T>)) -> usize {
            let mut waiting: std::vec::Vec<_> = self.root.get().into_iter().collect();
            let mut count = 0;
            while let Some(handle) = waiting.pop() {
                visit(handle);
                count += 1;
                let links = memory.at(handle).links();
                waiting.extend(links.left.get().into_iter().chain(links.right.get()));
            }
            count
        }
    }

    struct Item {
        key: u64,
        links: Links<Item>,
    }
    impl Object for Item {
        const CLASS: u8 = 13;
    }
    impl Keyed for Item {
        type Key = u64;
        fn key(&self, _: Handle<Self>) -> u64 {
            self.key
        }
        fn links(&self) -> &Links<Self> {
            &self.links
        }
    }

    #[test]
    fn behaves_as_an_ordered_map() {
        let mut memory = testing::memory(256);
        let tree = Tree::<Item>::new();
        let mut model = BTreeMap::new();
        let mut seed = 9u64;
        for _ in 0..20_000 {
            seed = seed.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            let key = seed >> 54;
            if seed >> 20 & 1 == 0 {
                model.entry(key).or_insert_with(|| {
                    let handle = memory.alloc(None, Item { key, links: Links::default() }).unwrap();
                    tree.insert(&memory, handle);
                    handle
                });
            } else if let Some(handle) = model.remove(&key) {
                tree.remove(&memory, handle);
                memory.free(handle);
                memory.reclaim();
            }
            let expected = model.range(..=key).next_back().map(|(_, handle)| *handle);
            assert_eq!(tree.at_most(&memory, key), expected);
            let expected = model.range(key..).next().map(|(_, handle)| *handle);
            assert_eq!(tree.at_least(&memory, key), expected);
            assert_eq!(tree.first(&memory), model.values().next().copied());
        }
    }

    #[test]
    fn ascending_keys_stay_shallow() {
        let memory = testing::memory(256);
        let tree = Tree::<Item>::new();
        for key in 0..4096 {
            let handle = memory.alloc(None, Item { key, links: Links::default() }).unwrap();
            tree.insert(&memory, handle);
        }
        assert!(tree.depth(&memory) < 48);
    }
}
