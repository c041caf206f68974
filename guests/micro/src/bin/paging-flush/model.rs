//! Random changes of several roots, compared with what their entries say.

use core::sync::atomic::{AtomicU64, Ordering::SeqCst};
use guests_micro::access::{self, AccessFault, Kind, MemoryAccess};
use guests_micro::paging::{ALL, FrameAllocator, LARGE, PAGE, RootTable, address};
use guests_micro::random::Random;
use guests_micro::{check, cpu, println};
use hw_x86::paging::{entry, fault};

const STEPS: u32 = 60_000;
const ROOTS: usize = 4;
/// Tables of level 1 of each root, and pages by each.
const TABLES: usize = 3;
const PAGES: usize = 12;
const TARGETS: u64 = 16;
const BASE: u64 = address([40, 1, 1, 0]);

/// Roots and the entries that they must have.
struct Model {
    roots: [RootTable; ROOTS],
    entries: [[&'static [AtomicU64; 512]; TABLES]; ROOTS],
    /// Which of its tables each root uses at each place.
    order: [[usize; TABLES]; ROOTS],
    uppers: [[&'static AtomicU64; TABLES]; ROOTS],
    /// Contents of the first target; each further one has 1 more.
    first: u64,
    active: usize,
}

impl Model {
    fn new(frames: &mut FrameAllocator, first: u64) -> Self {
        let roots = [(); ROOTS].map(|()| RootTable::new(frames));
        let mut map = |root: usize, table: usize| {
            let at = BASE + table as u64 * LARGE;
            roots[root].map(frames, at, 1, 0);
            (frames.page(roots[root].entry(frames, at, 2).load(SeqCst) & entry::ADDRESS), at)
        };
        let both: [[_; TABLES]; ROOTS] =
            core::array::from_fn(|root| core::array::from_fn(|table| map(root, table)));
        let uppers = core::array::from_fn(|root| {
            core::array::from_fn(|table| roots[root].entry(frames, both[root][table].1, 2))
        });
        let entries = both.map(|root| root.map(|(table, _)| table));
        roots[0].load();
        Self { roots, entries, order: [[0, 1, 2]; ROOTS], uppers, first, active: 0 }
    }

    /// An entry that leads to a target with some rights, or nowhere.
    fn random_entry(random: &mut Random, target: u64) -> u64 {
        let frame = target + random.below(TARGETS) * PAGE;
        match random.below(8) {
            0 => 0,
            1 => frame | ALL & !entry::WRITE,
            2 => frame | ALL & !entry::USER,
            3 => frame | ALL | entry::GLOBAL,
            _ => frame | ALL,
        }
    }

    /// Changes an entry of any root; that of the active one is flushed.
    fn change(&mut self, random: &mut Random, target: u64) {
        let root = random.below(ROOTS as u64) as usize;
        let (table, page) = (random.below(TABLES as u64), random.below(PAGES as u64));
        let used = self.order[root][table as usize];
        let value = Self::random_entry(random, target);
        self.entries[root][used][page as usize].store(value, SeqCst);
        if root == self.active {
            cpu::invalidate_page(BASE + table * LARGE + page * PAGE);
        }
    }

    /// Exchanges two tables of any root.
    fn exchange(&mut self, random: &mut Random) {
        let root = random.below(ROOTS as u64) as usize;
        let (one, two) = (random.below(3) as usize, random.below(3) as usize);
        let [first, second] = [one, two].map(|table| self.uppers[root][table].load(SeqCst));
        self.uppers[root][one].store(second, SeqCst);
        self.uppers[root][two].store(first, SeqCst);
        self.order[root].swap(one, two);
        if root == self.active {
            self.roots[root].load();
        }
    }

    /// Accesses a page, and compares.
    fn compare(&self, random: &mut Random, step: u32) {
        let (table, page) = (random.below(TABLES as u64), random.below(PAGES as u64));
        let address = BASE + table * LARGE + page * PAGE;
        let used = self.order[self.active][table as usize];
        let value = self.entries[self.active][used][page as usize].load(SeqCst);
        let user = random.below(2) != 0;
        let kind = if random.below(2) != 0 { Kind::Read } else { Kind::Write };
        let code =
            if user { fault::USER } else { 0 } | if kind == Kind::Write { fault::WRITE } else { 0 };
        let allowed = (!user || value & entry::USER != 0)
            && (kind == Kind::Read || value & entry::WRITE != 0);
        let data = self.first + (value & entry::ADDRESS) / PAGE;
        let expected = match value & entry::PRESENT != 0 {
            false => Err(AccessFault::page(code, address)),
            true if allowed => Ok(data),
            true => Err(AccessFault::page(code | fault::PRESENT, address)),
        };
        let found = MemoryAccess { kind, user, ac: false }.perform(address, data);
        check!(
            found == expected,
            "step {step}, root {}, {kind:?} of {address:#x} with {value:#x}: {found:x?}, not \
             {expected:x?}",
            self.active
        );
    }
}

/// Runs the steps, which are the same each time.
pub fn run(mut frames: FrameAllocator) {
    let mut random = Random(20);
    let target = frames.take();
    for _ in 1..TARGETS {
        frames.take();
    }
    // Contents depend on the physical address.
    const FIRST: u64 = 0x7000_0000_0000;
    for page in 0..TARGETS {
        let at = target + page * PAGE;
        frames.word(at).store(FIRST + at / PAGE, SeqCst);
    }
    let mut model = Model::new(&mut frames, FIRST);
    for step in 0..STEPS {
        match random.below(16) {
            0..4 => model.change(&mut random, target),
            4 => model.exchange(&mut random),
            5 => {
                model.active = random.below(ROOTS as u64) as usize;
                model.roots[model.active].load();
            }
            _ => model.compare(&mut random, step),
        }
    }
    check!(access::read(BASE + 64 * PAGE).is_err(), "a page that no root has");
    println!("{STEPS} steps with {ROOTS} roots");
}
