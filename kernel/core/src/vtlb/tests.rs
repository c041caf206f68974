//! Model: a guest that changes its page tables at random, and a processor with a TLB tagged by
//! address-space identifier, which walks the shadow tables and sets their dirty bits. Each access
//! must end at a translation that the guest's tables have had since the last flush of its address.

use core::cell::RefCell;
use std::boxed::Box;
use std::collections::BTreeMap;
use std::vec::Vec;

use super::*;
use crate::table::Access;
use crate::testing::Random;

const PRESENT: u64 = 1;
const WRITE: u64 = 2;
const USER: u64 = 4;
const ACCESSED: u64 = 1 << 5;
const DIRTY: u64 = 1 << 6;
const LARGE: u64 = 1 << 7;
const GLOBAL: u64 = 1 << 8;
const ADDRESS: u64 = 0xf_ffff_ffff_f000;

/// The format of x86-64.
#[derive(Debug)]
struct X86Like;

impl Format for X86Like {
    const ROOT_LEVEL: u32 = 3;
    fn max_leaf_level() -> u32 {
        1
    }
    fn may_replace_table() -> bool {
        true
    }
    fn leaf(physical: u64, _: Access, _: u32) -> u64 {
        physical | PRESENT
    }
    fn table(physical: u64) -> u64 {
        physical | PRESENT | WRITE | USER | ACCESSED
    }
    fn is_present(entry: u64) -> bool {
        entry & PRESENT != 0
    }
    fn is_leaf(entry: u64, level: u32) -> bool {
        level == 0 || entry & LARGE != 0
    }
    fn address(entry: u64) -> u64 {
        entry & ADDRESS
    }
}

impl ShadowFormat for X86Like {
    const MARKS: u64 = ACCESSED | DIRTY;
    const MEANING: u64 = PRESENT | WRITE | USER | Self::MARKS | LARGE | GLOBAL | ADDRESS;
    const WRITE: u64 = WRITE;
    const DIRTY: u64 = DIRTY;
    fn pointer(physical: u64) -> u64 {
        physical | PRESENT
    }
}

/// Guest pages: all of its memory, which begins with its page tables.
const GUEST_PAGES: u64 = 1024;
/// First host page of guest memory: aligned as a large page needs it.
const GUEST_AT: u64 = 512;
/// First frame of the pool.
const POOL_AT: u64 = GUEST_AT + GUEST_PAGES;
/// Guest pages that hold page tables.
const TABLES: u64 = 24;
/// Roots among them: the first pages.
const ROOTS: u64 = 5;
/// The guest's map of its memory: a large page in the upper half.
const DIRECT: u64 = 0xffff_8000_0000_0000;
/// Guest tables of that map, beyond the random ones.
const DIRECT_TABLES: [u64; 2] = [TABLES, TABLES + 1];

/// Physical memory.
struct Machine(Vec<[AtomicU64; ENTRIES]>);

impl FrameAccess for Machine {
    fn guest_page(&self, guest: u64) -> u64 {
        host(guest & !0xfff)
    }
    fn words(&self, physical: u64) -> &[AtomicU64; ENTRIES] {
        &self.0[(physical >> 12) as usize]
    }
}

fn host(guest: u64) -> u64 {
    guest + (GUEST_AT << 12)
}

/// Translation and rights: host page, writable, global.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Right {
    page: u64,
    writes: bool,
    is_global: bool,
}

/// An entry of the processor's TLB.
#[derive(Clone, Copy, Debug)]
struct Cached {
    leaf: u64,
    physical: u64,
}

/// A defect that the model must notice.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Defect {
    None,
    NoPageFlush,
    NoPageFlushElsewhere,
    NoSpaceFlush,
    NoFlushOfAll,
    NoDropOfTags,
    SyncSkipsRights,
    SyncFindsAllClean,
    InvalidateOnlyWhereSplit,
}

std::thread_local! {
    static DEFECT: core::cell::Cell<Defect> = const { core::cell::Cell::new(Defect::None) };
}

/// Returns whether the code under test is to skip something.
fn has(defect: Defect) -> bool {
    DEFECT.get() == defect
}

/// Flags for the code under test.
pub(super) fn skips_drop_of_tags() -> bool {
    has(Defect::NoDropOfTags)
}
pub(super) fn skips_rights() -> bool {
    has(Defect::SyncSkipsRights)
}
pub(super) fn finds_all_clean() -> bool {
    has(Defect::SyncFindsAllClean)
}
pub(super) fn skips_small_pages() -> bool {
    has(Defect::InvalidateOnlyWhereSplit)
}

/// Value of zeroed memory.
fn zeroed() -> Vtlb<X86Like> {
    Vtlb {
        tables: core::array::from_fn(|_| Table::default()),
        spaces: Default::default(),
        hints: Default::default(),
        shared: Default::default(),
        count: Default::default(),
        spare: Default::default(),
        limit: Default::default(),
        free: Default::default(),
        removed: Default::default(),
        current: Default::default(),
        top: Default::default(),
        clock: Default::default(),
        fills: Default::default(),
        flush: Default::default(),
        options: Default::default(),
        has_local: Default::default(),
        changes: Default::default(),
        shared_changes: Default::default(),
        paths: Default::default(),
        trace: Default::default(),
        counters: Default::default(),
        format: Default::default(),
    }
}

struct World {
    machine: Machine,
    vtlb: Box<Vtlb<X86Like>>,
    tlb: RefCell<BTreeMap<(u32, u64), Cached>>,
    next_tag: Cell<u32>,
    epoch: Cell<u64>,
    keeps_tags: bool,
    invalidates: bool,
    root: Cell<u64>,
    random: RefCell<Random>,
    /// For each watched address, the translations since the last flush.
    allowed: RefCell<BTreeMap<u64, Vec<Option<Right>>>>,
    next_frame: Cell<u64>,
}

/// Addresses that the test uses: neighbours, and others in other tables; lower and upper half.
fn addresses() -> Vec<u64> {
    let mut all = Vec::new();
    for top in [0, 1, 256 + 5] {
        for (middle, low, small) in
            [(0, 0, 0), (0, 0, 1), (0, 0, 7), (0, 1, 0), (0, 1, 300), (1, 0, 0), (1, 3, 9)]
        {
            let address: u64 = top << 39 | middle << 30 | low << 21 | small << 12;
            all.push(((address << 16) as i64 >> 16) as u64);
        }
    }
    all
}

impl World {
    fn new(seed: u64) -> Self {
        let mut random = Random(seed);
        let pages = POOL_AT + FRAMES_PER_TABLE * MAX_TABLES as u64;
        let page = || core::array::from_fn(|_| AtomicU64::new(0));
        let vtlb = Box::new(zeroed());
        let machine = Machine((0..pages).map(|_| page()).collect());
        let most = random.pick(&[1, 8, 56]);
        vtlb.start(&machine, 8 + random.below(most) as u16);
        let rung = random.below(6);
        let spaces = if rung >= 2 { 1 + random.below(6) as u8 } else { 1 };
        let protect = random.once_in(3);
        let (global, sync, trace) = (rung >= 1, rung >= 3, rung >= 4);
        vtlb.set_options(&machine, Options { spaces, global, sync, trace, protect });
        let world = Self {
            machine,
            vtlb,
            tlb: RefCell::default(),
            next_tag: Cell::new(1),
            epoch: Cell::new(1),
            keeps_tags: rung >= 5,
            invalidates: rung >= 5 && random.once_in(2),
            root: Cell::new(0),
            random: RefCell::new(random),
            allowed: RefCell::default(),
            next_frame: Cell::new(POOL_AT),
        };
        world.map_memory();
        world.load(0);
        world
    }

    /// The guest's map of its memory, in every root.
    fn map_memory(&self) {
        let [upper, middle] = DIRECT_TABLES;
        for root in 0..ROOTS {
            self.poke(root << 12, 256, upper << 12 | PRESENT | WRITE);
        }
        self.poke(upper << 12, 0, middle << 12 | PRESENT | WRITE);
        for part in 0..GUEST_PAGES >> 9 {
            let leaf = part << 21 | PRESENT | WRITE | LARGE | GLOBAL;
            self.poke(middle << 12, part as usize, leaf);
        }
    }

    fn below(&self, limit: u64) -> u64 {
        self.random.borrow_mut().below(limit)
    }

    fn peek(&self, table: u64, slot: usize) -> &AtomicU64 {
        &self.machine.words(host(table))[slot]
    }

    fn poke(&self, table: u64, slot: usize, value: u64) {
        self.peek(table, slot).store(value, Relaxed);
    }

    /// The guest's own translation: steps, level of the leaf, rights of all levels.
    fn walk(&self, address: u64) -> Option<(Vec<Step>, u32, u64)> {
        let (mut table, mut steps, mut rights) = (self.root.get(), Vec::new(), WRITE | USER);
        for level in (0..4).rev() {
            let slot = index(address, level);
            let guest = table + 8 * slot as u64;
            let value = self.peek(table, slot).load(Relaxed);
            if value & PRESENT == 0 || (value & ADDRESS) >> 12 >= GUEST_PAGES {
                return None;
            }
            steps.push(Step { at: guest, value });
            rights &= value;
            if level == 0 || level == 1 && value & LARGE != 0 {
                return Some((steps, level, rights));
            }
            table = value & ADDRESS;
        }
        None
    }

    fn right(&self, address: u64) -> Option<Right> {
        let (steps, level, rights) = self.walk(address)?;
        let leaf = steps.last().unwrap().value;
        let size = 1_u64 << (12 + 9 * level);
        let page = (leaf & ADDRESS & !(size - 1) | address & (size - 1)) >> 12;
        Some(Right { page, writes: rights & WRITE != 0, is_global: leaf & GLOBAL != 0 })
    }

    /// The guest's tables have changed: what holds now is allowed, too.
    fn note(&self) {
        for (&address, rights) in self.allowed.borrow_mut().iter_mut() {
            let now = self.right(address);
            if !rights.contains(&now) {
                rights.push(now);
            }
        }
    }

    /// The guest has flushed: what held before is not allowed any more.
    fn forget(&self, which: impl Fn(u64) -> bool, keeps_global: bool) {
        let mut allowed = self.allowed.borrow_mut();
        for address in addresses() {
            if which(address) {
                let old = allowed.remove(&address).unwrap_or_default();
                let globals = |right: &Option<Right>| right.is_some_and(|right| right.is_global);
                let mut kept: Vec<_> = old.into_iter().filter(globals).collect();
                if !keeps_global {
                    kept.clear();
                }
                kept.push(self.right(address));
                allowed.insert(address, kept);
            }
        }
    }

    fn grow(&self) {
        for _ in 0..4.min(self.vtlb.missing_tables()) {
            let at = self.next_frame.get();
            self.next_frame.set(at + 2);
            self.vtlb.add_table(at << 12, (at + 1) << 12);
        }
    }

    fn load(&self, root: u64) {
        self.root.set(root << 12);
        let before = self.vtlb.counters.syncs.get();
        while self.vtlb.load(&self.machine, Some(root << 12)).is_err() {
            self.grow();
        }
        assert!(self.vtlb.counters.syncs.get() - before <= MAX_TABLES as u64);
        if !self.keeps_tags {
            self.vtlb.set_tag(0, 0);
        }
        self.forget(|_| true, true);
        self.apply();
    }

    /// Flushes as the architecture does before an entry.
    fn apply(&self) {
        let mut tlb = self.tlb.borrow_mut();
        let epoch = self.epoch.get();
        match self.vtlb.take_flush() {
            Flush::None => {}
            Flush::Page { everywhere: false, .. } if has(Defect::NoPageFlush) => {}
            Flush::Page { everywhere: true, .. } if has(Defect::NoPageFlushElsewhere) => {}
            Flush::Space if has(Defect::NoSpaceFlush) => {}
            Flush::All if has(Defect::NoFlushOfAll) => {}
            Flush::Page { address, everywhere } if self.invalidates => {
                let tags: Vec<u32> = match everywhere {
                    true => self.vtlb.tags(epoch).collect(),
                    false => Vec::from([self.vtlb.tag().0]),
                };
                let page = address << 16 >> 28;
                tlb.retain(|&(tag, at), _| !(tags.contains(&tag) && at == page));
            }
            Flush::Page { everywhere: false, .. } | Flush::Space => self.vtlb.set_tag(0, 0),
            Flush::Page { .. } | Flush::All => self.vtlb.drop_tags(),
        }
        if self.vtlb.tag().1 != epoch {
            if self.next_tag.get() == 16 {
                self.next_tag.set(1);
                self.epoch.set(epoch + 1);
                tlb.clear();
            }
            self.vtlb.set_tag(self.next_tag.get(), self.epoch.get());
            self.next_tag.set(self.next_tag.get() + 1);
        }
    }

    /// The processor's walk of the shadow tables.
    fn translate(&self, address: u64, writes: bool) -> Option<Cached> {
        let key = (self.vtlb.tag().0, address << 16 >> 28);
        let known = self.tlb.borrow().get(&key).copied();
        if let Some(known) = known
            && !(writes && known.leaf & DIRTY == 0)
            && !(writes && known.leaf & WRITE == 0)
        {
            return Some(known);
        }
        let mut table = self.vtlb.root()?;
        for level in (0..4).rev() {
            let word = &self.machine.words(table)[index(address, level)];
            let entry = word.load(Relaxed);
            if entry & PRESENT == 0 {
                return None;
            }
            if level > 1 || level == 1 && entry & LARGE == 0 {
                table = entry & ADDRESS;
                continue;
            }
            if writes && entry & WRITE == 0 {
                return None;
            }
            if writes {
                word.fetch_or(DIRTY, Relaxed);
            }
            let within = address & ((1 << (12 + 9 * level)) - 1) & !0xfff;
            let leaf = word.load(Relaxed);
            let found = Cached { leaf, physical: (entry & ADDRESS) + within };
            let mut tlb = self.tlb.borrow_mut();
            tlb.insert(key, found);
            if tlb.len() > 64 {
                let first = *tlb.keys().nth(self.below(64) as usize).unwrap();
                tlb.remove(&first);
            }
            return Some(found);
        }
        None
    }

    /// The kernel's handling of a page fault; `false`: the guest's.
    fn fault(&self, address: u64, writes: bool) -> bool {
        self.tlb.borrow_mut().remove(&(self.vtlb.tag().0, address << 16 >> 28));
        let Some((mut steps, guest_level, rights)) = self.walk(address) else { return false };
        if writes && rights & WRITE == 0 {
            return false;
        }
        let last = steps.len() - 1;
        for (depth, step) in steps.iter_mut().enumerate() {
            step.value |= ACCESSED | if depth == last && writes { DIRTY } else { 0 };
            self.poke(step.at & !0xfff, (step.at >> 3) as usize % 512, step.value);
        }
        self.note();
        let leaf = steps[last].value;
        let page = self.right(address).unwrap().page;
        let level = self.vtlb.leaf_level(page, guest_level);
        let mask = (1 << (9 * level)) - 1;
        let mut entry = host((page & !mask) << 12) | PRESENT | ACCESSED | DIRTY | rights & USER;
        entry |= if level > 0 { LARGE } else { 0 };
        entry |= if rights & WRITE != 0 && leaf & DIRTY != 0 { WRITE } else { 0 };
        let fill = Fill {
            address,
            steps: &steps,
            value: leaf,
            leaf: entry,
            level,
            page,
            is_global: leaf & GLOBAL != 0,
            is_write: writes,
        };
        let known = self.vtlb.known(&self.machine, address).filter(|_| guest_level == 0);
        if let Some(known) = known {
            assert_eq!(known.entry, steps[last]);
            self.vtlb.set_leaf(&self.machine, known.table, &fill);
            self.apply();
            return true;
        }
        while self.vtlb.fill(&self.machine, &fill).is_err() {
            self.grow();
        }
        self.apply();
        true
    }

    /// An access of the guest. Returns the host page.
    fn access(&self, address: u64, writes: bool) -> Option<u64> {
        for _ in 0..4 {
            if let Some(found) = self.translate(address, writes) {
                return Some(found.physical);
            }
            if !self.fault(address, writes) {
                return None;
            }
        }
        panic!("no progress at {address:#x}");
    }

    fn check(&self, address: u64, writes: bool) -> Result<(), std::string::String> {
        let found = self.access(address, writes).map(|physical| (physical >> 12) - GUEST_AT);
        let allowed = self.allowed.borrow();
        let rights = &allowed[&address];
        let agrees = |right: &Option<Right>| match (right, found) {
            (Some(right), Some(page)) => right.page == page && (right.writes || !writes),
            (None, None) => true,
            (Some(right), None) => writes && !right.writes,
            _ => false,
        };
        if rights.iter().any(agrees) {
            return Ok(());
        }
        Err(std::format!("{address:#x} {writes}: {found:x?}, allowed: {rights:x?}"))
    }

    /// The guest writes a word of a page table: by its map of memory, which may be traced.
    fn store(&self, table: u64, slot: usize, value: u64) {
        let physical = self.access(DIRECT + table, true).expect("the map of memory");
        self.machine.words(physical)[slot].store(value, Relaxed);
        self.note();
    }

    /// Changes an entry on the way to a watched address.
    fn change(&self) {
        let all = addresses();
        let address = all[self.below(all.len() as u64) as usize];
        let mut table = self.below(ROOTS) << 12;
        let stop = self.below(6) as u32;
        for level in (0..4).rev() {
            let slot = index(address, level);
            let old = self.peek(table, slot).load(Relaxed);
            let is_leaf = level == 0 || old & LARGE != 0;
            if is_leaf || old & PRESENT == 0 || level == stop {
                return self.store(table, slot, self.entry(level, old));
            }
            table = old & ADDRESS;
        }
    }

    /// A new entry, often similar to the old one.
    fn entry(&self, level: u32, old: u64) -> u64 {
        let rights = PRESENT | (self.below(2) * WRITE) | (self.below(2) * USER);
        match self.below(8) {
            0 => 0,
            1 => old & !ACCESSED & !DIRTY,
            2 => old ^ WRITE,
            _ if level == 0 => {
                let page = self.below(if self.below(4) == 0 { TABLES } else { GUEST_PAGES });
                page << 12 | rights | (self.below(2) * GLOBAL)
            }
            _ if level == 1 && self.below(3) == 0 => {
                self.below(GUEST_PAGES >> 9) << 21 | rights | LARGE | (self.below(2) * GLOBAL)
            }
            // A table of the right level: each page is of one.
            _ => {
                let kinds = (TABLES - ROOTS) / 3;
                let first = ROOTS + kinds * (3 - u64::from(level));
                (first + self.below(kinds)) << 12 | rights | WRITE
            }
        }
    }

    fn step(&self) -> Result<(), std::string::String> {
        let all = addresses();
        let address = all[self.below(all.len() as u64) as usize];
        match self.below(24) {
            0..4 => self.change(),
            4 | 5 => {
                self.vtlb.invalidate(&self.machine, address);
                self.apply();
                self.forget(|other| other == address, false);
            }
            6 | 7 => self.load(self.below(ROOTS)),
            8 if self.below(8) == 0 => {
                self.vtlb.drop_all(&self.machine);
                self.load(self.root.get() >> 12);
                self.forget(|_| true, false);
            }
            _ => self.check(address, self.below(2) == 0)?,
        }
        Ok(())
    }
}

fn run(seed: u64, steps: u32) -> Result<(), std::string::String> {
    let world = World::new(seed);
    for step in 0..steps {
        world.step().map_err(|error| {
            let options = world.vtlb.options();
            std::format!("seed {seed}, step {step}, {options:?}: {error}")
        })?;
    }
    Ok(())
}

#[test]
fn translations_are_those_of_the_guest_since_its_last_flush() {
    let worlds = if cfg!(debug_assertions) { 300 } else { 5000 };
    for seed in 0..worlds {
        run(seed, 2000).unwrap();
    }
}

#[test]
fn the_model_notices_each_missing_flush() {
    let defects = [
        Defect::NoPageFlush,
        Defect::NoPageFlushElsewhere,
        Defect::NoSpaceFlush,
        Defect::NoFlushOfAll,
        Defect::NoDropOfTags,
        Defect::SyncSkipsRights,
        Defect::SyncFindsAllClean,
        Defect::InvalidateOnlyWhereSplit,
    ];
    for defect in defects {
        DEFECT.set(defect);
        let is_noticed = (0..600).any(|seed| run(seed, 2000).is_err());
        DEFECT.set(Defect::None);
        assert!(is_noticed, "{defect:?} is not noticed");
    }
}
