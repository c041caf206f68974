//! A machine of plain values for the tests of this crate: two CPUs, a clock that is set by hand, page tables
//! of an invented format, and a record of what the kernel asked of the hardware. Also the
//! invariants of the kernel, checked over every object that exists.

use core::cell::{Cell, RefCell};
use core::sync::atomic::AtomicU64;
use std::vec::Vec;

use abi::Status;

use crate::Kernel;
use crate::arch::{Arch, Context, IrqSource};
use crate::object::*;
use crate::pool::{self, Factory, Frame, Handle, Memory};
use crate::table::{self, Access, Format, Tables};

/// What the tests set and read; every test has its own, since each runs in its own thread.
#[derive(Default)]
pub struct Machine {
    pub cpu: Cell<usize>,
    pub now: Cell<u64>,
    pub kicks: RefCell<Vec<usize>>,
    pub shootdowns: RefCell<Vec<u64>>,
    pub logged: Cell<u32>,
    /// Largest leaf of both page-table formats.
    pub max_leaf: Cell<u32>,
}

std::thread_local! {
    static MACHINE: Machine = Machine { max_leaf: Cell::new(2), ..Machine::default() };
}

/// Uses this test's machine.
pub fn machine<R>(use_it: impl FnOnce(&Machine) -> R) -> R {
    MACHINE.with(use_it)
}

/// Goes on as another CPU.
pub fn on_cpu(cpu: usize) {
    machine(|machine| machine.cpu.set(cpu));
}

/// Sets the clock.
pub fn set_time(now: u64) {
    machine(|machine| machine.now.set(now));
}

/// Registers; arguments and results share them, as on real processors.
#[derive(Default)]
pub struct Registers {
    pub operation: Cell<u64>,
    pub words: [Cell<u64>; 6],
    pub status: Cell<Option<Status>>,
    pub restarts: Cell<u32>,
    pub ip: Cell<u64>,
}

impl Context for Registers {
    fn operation(&self) -> u64 {
        self.operation.get()
    }
    fn argument(&self, index: usize) -> u64 {
        self.words[index].get()
    }
    fn set_status(&self, status: Status) {
        self.status.set(Some(status));
    }
    fn set_result(&self, index: usize, value: u64) {
        self.words[index].set(value);
    }
    fn restart(&self) {
        self.restarts.set(self.restarts.get() + 1);
    }
    fn start(&self, ip: u64, _: u64, argument: u64) {
        self.ip.set(ip);
        self.words[0].set(argument);
    }
    fn ip(&self) -> u64 {
        self.ip.get()
    }
}

const PRESENT: u64 = 1;
const WRITE: u64 = 2;
const EXECUTE: u64 = 4;
const DEVICE: u64 = 8;
const LEAF: u64 = 16;

/// Page tables of four levels.
pub struct Invented;

impl Invented {
    /// What a leaf allows.
    pub fn access(entry: u64) -> Access {
        Access {
            write: entry & WRITE != 0,
            execute: entry & EXECUTE != 0,
            device: entry & DEVICE != 0,
        }
    }
}

impl Format for Invented {
    const ROOT_LEVEL: u32 = 3;
    fn max_leaf_level() -> u32 {
        machine(|machine| machine.max_leaf.get())
    }
    fn leaf(physical: u64, access: Access, level: u32) -> u64 {
        let flag = |set: bool, bit: u64| if set { bit } else { 0 };
        physical
            | PRESENT
            | flag(access.write, WRITE)
            | flag(access.execute, EXECUTE)
            | flag(access.device, DEVICE)
            | flag(level > 0, LEAF)
    }
    fn table(physical: u64) -> u64 {
        physical | PRESENT
    }
    fn is_present(entry: u64) -> bool {
        entry & PRESENT != 0
    }
    fn is_leaf(entry: u64, level: u32) -> bool {
        level == 0 || entry & LEAF != 0
    }
    fn address(entry: u64) -> u64 {
        entry & !0xfff
    }
}

/// The architecture of the tests.
pub struct Fake;

impl Arch for Fake {
    type Context = Registers;
    type Host = Invented;
    type Nested = Invented;
    type Vcpu = Frame;
    const GUEST_PORT_FRAMES: u32 = 3;
    const PORT_FRAMES: u32 = 2;

    fn this_cpu() -> usize {
        machine(|machine| machine.cpu.get())
    }
    fn cpus() -> usize {
        2
    }
    fn now() -> u64 {
        machine(|machine| machine.now.get())
    }
    fn ticks(nanoseconds: u64) -> u64 {
        nanoseconds
    }
    fn kick(cpu: usize) {
        machine(|machine| machine.kicks.borrow_mut().push(cpu));
    }
    fn shootdown(cpus: u64) {
        assert_eq!(cpus & 1 << Self::this_cpu(), 0, "a CPU does not interrupt itself");
        machine(|machine| machine.shootdowns.borrow_mut().push(cpus));
    }
    fn flush_local() {}
    fn init_root(_: &[AtomicU64; 512]) {}
    fn user_entries() -> core::ops::Range<usize> {
        0..256
    }
    fn has_nested() -> bool {
        true
    }
    fn vcpu_new(
        memory: &Memory,
        factory: Option<Handle<Factory>>,
        _: Frame,
    ) -> Result<Frame, Status> {
        memory.alloc_raw(factory, 1)
    }
    fn vcpu_free(memory: &Memory, vcpu: &Frame) {
        memory.free_raw(*vcpu, 1);
    }
    fn vcpu_state(_: &Memory, _: &Vcpu<Self>, _: u64) {}
    fn irq_valid(source: IrqSource) -> bool {
        !matches!(source, IrqSource::Line { gsi: 24.., .. })
    }
    fn irq_set(_: &Irq<Self>, _: bool) {}
    fn irq_message(irq: &Irq<Self>) -> (u64, u64) {
        (0xfee0_0000, irq.vector as u64)
    }
    fn log(_: core::fmt::Arguments<'_>) {
        machine(|machine| machine.logged.set(machine.logged.get() + 1));
    }
    fn log_text(_: &[u8]) {}
    fn reset() -> ! {
        panic!("reset");
    }
}

/// A generator of repeatable numbers (Knuth's MMIX constants).
pub struct Random(pub u64);

impl Random {
    /// A number below `limit`.
    pub fn below(&mut self, limit: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (((self.0 >> 16) as u128 * limit as u128) >> 48) as u64
    }
    /// True once in `times`.
    pub fn once_in(&mut self, times: u64) -> bool {
        self.below(times) == 0
    }
    /// One of the values.
    pub fn pick<T: Copy>(&mut self, values: &[T]) -> T {
        values[self.below(values.len() as u64) as usize]
    }
}

/// A kernel with `frames` frames of memory.
pub fn kernel(frames: usize) -> Kernel<Fake> {
    {
        let mut kernel = Kernel::new();
        kernel.memory = pool::testing::memory(frames);
        kernel
    }
}

/// Reads page tables in kernel memory.
struct View<'a>(&'a Memory);

impl Tables for View<'_> {
    fn read(&self, table: u64, index: usize) -> u64 {
        self.0.words(self.0.frame_at(table))[index].load(core::sync::atomic::Ordering::Relaxed)
    }
    fn write(&self, _: u64, _: usize, _: u64) {
        panic!("a view");
    }
    fn alloc(&self) -> Result<u64, Status> {
        Err(Status::NoQuota)
    }
    fn free(&self, _: u64) {
        panic!("a view");
    }
}

/// What the page tables of a space say about a page: physical page number and access.
pub fn translate(kernel: &Kernel<Fake>, space: SpaceRef<Fake>, page: u64) -> Option<(u64, Access)> {
    let root = kernel.memory.physical(kernel.space(space)?.root);
    let (physical, entry) = table::translate::<Invented>(&View(&kernel.memory), root, page)?;
    Some((physical >> abi::PAGE_SHIFT, Invented::access(entry)))
}

/// Number of pages that the page tables of a space map.
pub fn mapped_pages(kernel: &Kernel<Fake>, space: SpaceRef<Fake>) -> u64 {
    fn below(view: &View<'_>, table: u64, level: u32) -> u64 {
        (0..512)
            .map(|index| view.read(table, index))
            .filter(|entry| Invented::is_present(*entry))
            .map(|entry| match Invented::is_leaf(entry, level) {
                true => 1 << (9 * level),
                false => below(view, Invented::address(entry), level - 1),
            })
            .sum()
    }
    let Some(space) = kernel.space(space) else { return 0 };
    below(&View(&kernel.memory), kernel.memory.physical(space.root), Invented::ROOT_LEVEL)
}

/// All nodes of a space, of memory and ports, or of capabilities.
pub fn nodes(kernel: &Kernel<Fake>) -> Vec<Handle<Node<Fake>>> {
    pool::testing::all(&kernel.memory)
}

/// Checks the mapping database: containment, lists, overlap, page tables, slots.
pub fn check_mappings(kernel: &Kernel<Fake>) {
    let memory = &kernel.memory;
    let mut extents: Vec<(u64, u8, u64, u64)> = Vec::new();
    let mut pages: Vec<(SpaceRef<Fake>, u64)> = Vec::new();
    for handle in nodes(kernel) {
        let node = memory.at(handle);
        let size = 1u64 << node.order;
        let mut children = 0;
        let mut next = node.child.get();
        let mut before = None;
        while let Some(child) = next {
            let below = memory.at(child);
            assert!(below.parent.get() == Some(handle) && below.prev.get() == before);
            assert_eq!(below.kind, node.kind);
            assert_eq!(below.depth, node.depth + 1);
            assert_eq!(below.rights & !node.rights, 0, "rights only shrink");
            assert!(
                below.physical >= node.physical
                    && below.physical + (1 << below.order) <= node.physical + size,
                "a child is contained in its parent"
            );
            before = next;
            next = below.next.get();
            children += 1;
            assert!(children < 1_000_000, "a list without end");
        }
        let space = kernel.space(node.space);
        let name = match node.space {
            SpaceRef::Task(task) => task.id(),
            SpaceRef::Vm(vm) => vm.id(),
        };
        extents.push((name, node.kind as u8, node.base, size));
        match node.kind {
            abi::ItemKind::Capability => {
                let SpaceRef::Task(task) = node.space else { panic!("a guest has no slots") };
                let capability = kernel.capability(memory.at(task), node.base).unwrap();
                assert!(capability.node == handle && capability.rights == node.rights);
            }
            abi::ItemKind::Port => {
                let map = space.unwrap().port_map.get().expect("a map with the first port");
                for port in [node.base, node.base + size - 1] {
                    let word = &memory.words(memory.following(map, (port >> 15) as u32))
                        [(port >> 6 & 511) as usize];
                    assert_eq!(
                        word.load(core::sync::atomic::Ordering::Relaxed) >> (port & 63) & 1,
                        0
                    );
                }
            }
            abi::ItemKind::Memory => {
                match pages.iter_mut().find(|(space, _)| *space == node.space) {
                    Some((_, count)) => *count += size,
                    None => pages.push((node.space, size)),
                }
                for offset in [0, size / 2, size - 1] {
                    let (physical, access) =
                        translate(kernel, node.space, node.base + offset).expect("mapped");
                    assert_eq!(physical, node.physical + offset);
                    assert_eq!(access.write, node.rights & abi::rights::WRITE != 0);
                    assert_eq!(access.execute, node.rights & abi::rights::EXECUTE != 0);
                    assert_eq!(access.device, node.device);
                }
            }
        }
    }
    for (space, count) in pages {
        assert_eq!(mapped_pages(kernel, space), count, "the tables show the nodes and no more");
    }
    extents.sort_unstable();
    for pair in extents.windows(2) {
        let ((space, kind, base, size), next) = (pair[0], pair[1]);
        assert!((space, kind) != (next.0, next.1) || base + size <= next.2, "nodes overlap");
    }
}

/// Checks everything.
pub fn check(kernel: &Kernel<Fake>) {
    check_mappings(kernel);
    pool::testing::audit(&kernel.memory);
}
