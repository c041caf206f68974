use core::cell::{Cell, RefCell};
use std::collections::{BTreeMap, BTreeSet};
use std::vec::Vec;

use super::*;
use crate::testing::{Invented, Random, machine};

type Leaf = (u64, Access);

/// A page, with its expected translations before and after the operation.
type Watched = (u64, Option<Leaf>, Option<Leaf>);

/// Tables that check each store: every watched page must be in its old or its new state.
struct Recorder {
    tables: RefCell<BTreeMap<u64, [u64; 512]>>,
    freed: RefCell<BTreeSet<u64>>,
    next: Cell<u64>,
    /// Tables that can still be allocated.
    quota: Cell<u64>,
    /// Watched pages, each with its state before and after.
    watched: RefCell<Vec<Watched>>,
}

const ROOT: u64 = 0x1000;

impl Recorder {
    fn new() -> Self {
        Self {
            tables: RefCell::new(BTreeMap::from([(ROOT, [0; 512])])),
            freed: RefCell::default(),
            next: Cell::new(ROOT + 0x1000),
            quota: Cell::new(u64::MAX),
            watched: RefCell::default(),
        }
    }

    fn look(&self, page: u64) -> Option<Leaf> {
        let (physical, entry, _) =
            translate::<Invented>(|at, index| self.read(at, index), ROOT, page)?;
        Some((physical, Invented::access(entry)))
    }
}

impl Tables for Recorder {
    fn read(&self, table: u64, index: usize) -> u64 {
        self.tables.borrow()[&table][index]
    }
    fn write(&self, table: u64, index: usize, entry: u64) {
        self.tables.borrow_mut().get_mut(&table).expect("a table that exists")[index] = entry;
        for (page, before, after) in self.watched.borrow().iter() {
            let now = self.look(*page);
            assert!(now == *before || now == *after, "page {page:#x} is neither old nor new");
        }
    }
    fn alloc(&self) -> Result<u64, Status> {
        let left = self.quota.get().checked_sub(1).ok_or(Status::NoQuota)?;
        self.quota.set(left);
        let table = self.next.replace(self.next.get() + 0x1000);
        self.tables.borrow_mut().insert(table, [0; 512]);
        Ok(table)
    }
    fn free(&self, table: u64) {
        // A page-table walker may use it until the flush, so it remains readable in `freed` only.
        self.tables.borrow_mut().remove(&table).expect("freed once");
        assert!(self.freed.borrow_mut().insert(table));
        self.quota.set(self.quota.get().saturating_add(1));
    }
}

/// Reference model: mappings by first page.
#[derive(Default)]
struct Flat(BTreeMap<u64, (u8, u64, Access)>);

impl Flat {
    fn look(&self, page: u64) -> Option<Leaf> {
        let (base, (order, physical, access)) = self.0.range(..=page).next_back()?;
        let within = page - base;
        (within < 1 << order).then(|| (physical + within * abi::PAGE_SIZE, *access))
    }
    fn overlaps(&self, page: u64, order: u8) -> bool {
        let last = self.0.range(..page + (1 << order)).next_back();
        last.is_some_and(|(base, (order, ..))| base + (1 << order) > page)
    }
}

/// Returns the edges of all mappings and some pages inside.
fn pages_to_watch(flat: &Flat, random: &mut Random, page: u64, order: u8) -> BTreeSet<u64> {
    let edges = |base: u64, size: u64| [base.saturating_sub(1), base, base + size - 1, base + size];
    let mut pages = BTreeSet::from(edges(page, 1 << order));
    pages.extend((0..6).map(|_| page + random.below(1 << order)));
    for _ in 0..6 {
        if let Some((base, (order, ..))) = flat.0.iter().nth(random.below(64) as usize) {
            pages.extend(edges(*base, 1 << order));
        }
    }
    pages
}

fn run(max_leaf: u32, seed: u64, orders: &[u8]) {
    machine(|machine| machine.max_leaf.set(max_leaf));
    let mut random = Random(seed);
    let tables = Recorder::new();
    let mut flat = Flat::default();
    for _ in 0..1500 {
        let unmapping = random.once_in(3) && !flat.0.is_empty();
        let (page, order) = if unmapping {
            let nth = random.below(flat.0.len() as u64) as usize;
            flat.0.iter().nth(nth).map(|(page, (order, ..))| (*page, *order)).unwrap()
        } else {
            let order = random.pick(orders);
            // Near the ends of tables of every level, and in both halves of the root.
            let area = random.pick(&[0, (1 << 18) - 1024, 1 << 27, (1 << 35) + (1 << 20)]);
            ((area + random.below(1 << 19)) & !((1 << order) - 1), order)
        };
        let physical = (random.below(1 << 20) << order) << abi::PAGE_SHIFT;
        let mut flag = || random.once_in(2);
        let access =
            Access { write: flag(), execute: flag(), device: flag(), user: flag(), global: flag() };
        if !unmapping && flat.overlaps(page, order) {
            continue;
        }
        let watched = pages_to_watch(&flat, &mut random, page, order);
        let before: Vec<_> = watched.iter().map(|page| flat.look(*page)).collect();
        let short = random.once_in(4);
        tables.quota.set(if short { random.below(4) } else { u64::MAX });
        if unmapping {
            flat.0.remove(&page);
        } else {
            flat.0.insert(page, (order, physical, access));
        }
        *tables.watched.borrow_mut() = watched
            .iter()
            .zip(&before)
            .map(|(page, before)| (*page, *before, flat.look(*page)))
            .collect();
        if unmapping {
            assert!(unmap::<Invented>(&tables, ROOT, page, order).is_needed());
        } else {
            let mut may_continue = || !random.once_in(3);
            while {
                let before = tables.freed.borrow().len();
                let (done, flush) =
                    make_room::<Invented>(&tables, ROOT, page, order, &mut may_continue);
                assert!(flush.is_needed() || tables.freed.borrow().len() == before);
                !done
            } {}
            let freed = tables.freed.borrow().len();
            match map::<Invented>(&tables, ROOT, page, physical, order, access) {
                Ok(()) => {}
                Err(status) => {
                    assert_eq!(status, Status::NoQuota);
                    assert!(short);
                    assert_eq!(tables.freed.borrow().len(), freed, "nothing to flush for");
                    flat.0.remove(&page);
                }
            }
        }
        tables.watched.borrow_mut().clear();
        for page in watched {
            assert_eq!(tables.look(page), flat.look(page));
        }
    }
    for (page, (order, ..)) in core::mem::take(&mut flat.0) {
        assert!(unmap::<Invented>(&tables, ROOT, page, order).is_needed());
    }
    // Clear the lower half, then everything, a few tables at a time.
    let upper = |entry: &&u64| **entry != 0;
    let kept = tables.tables.borrow()[&ROOT][256..].iter().filter(upper).count();
    let mut may_continue = || !random.once_in(3);
    while !clear::<Invented>(&tables, ROOT, 0..256, &mut may_continue) {}
    assert_eq!(tables.tables.borrow()[&ROOT][256..].iter().filter(upper).count(), kept);
    while !clear::<Invented>(&tables, ROOT, 0..512, &mut may_continue) {}
    assert_eq!(tables.tables.borrow().len(), 1, "only the root is left");
    assert_eq!(tables.tables.borrow()[&ROOT], [0; 512]);
}

#[test]
fn random_mappings_against_a_flat_map() {
    for seed in 0..6 {
        run(2, seed, &[0, 0, 1, 3, 8, 9, 9, 10, 12, 18, 19]);
    }
}

#[test]
fn random_mappings_where_leaves_are_small() {
    for seed in 10..14 {
        run(1, seed, &[0, 2, 9, 11, 18, 19, 20]);
    }
    run(0, 20, &[0, 5, 9, 10]);
}

#[test]
fn a_failed_mapping_across_tables_leaves_no_entry() {
    machine(|machine| machine.max_leaf.set(1));
    let tables = Recorder::new();
    // Two tables of leaves are needed; the quota covers one.
    tables.quota.set(2);
    let access = Access { write: true, ..Invented::access(0) };
    let result = map::<Invented>(&tables, ROOT, 0, 0x4000_0000, 19, access);
    assert_eq!(result.err(), Some(Status::NoQuota));
    assert_eq!(tables.look(0), None, "no entry was ever present");
    while !clear::<Invented>(&tables, ROOT, 0..512, &mut || true) {}
    assert_eq!(tables.tables.borrow().len(), 1);
}

#[test]
fn a_leaf_replaces_a_table_after_a_flush_where_the_processor_requires_it() {
    const ORDER: u8 = LEVEL_BITS as u8;
    let access = Access { write: true, ..Invented::access(0) };
    for required in [false, true] {
        machine(|machine| machine.break_before_make.set(required));
        let tables = Recorder::new();
        map::<Invented>(&tables, ROOT, 0, 0x1000_0000, 0, access).unwrap();
        let flush = unmap::<Invented>(&tables, ROOT, 0, 0);
        assert_eq!(flush.root(), Some(ROOT));
        // The empty table is removed; a leaf of 512 pages takes its place.
        let room = make_room::<Invented>(&tables, ROOT, 0, ORDER, &mut || true);
        assert_eq!(room, (!required, Flush::of(ROOT)));
        // After the flush there is room.
        let room = make_room::<Invented>(&tables, ROOT, 0, ORDER, &mut || true);
        assert_eq!(room, (true, Flush::NONE));
        map::<Invented>(&tables, ROOT, 0, 0x1000_0000, ORDER, access).unwrap();
        assert_eq!(tables.look(511).map(|(physical, _)| physical), Some(0x101f_f000));
    }
    machine(|machine| machine.break_before_make.set(false));
}
