//! Simulated machine for the tests of this crate: two CPUs, a manual clock, an invented page-table
//! format, and a record of the kernel's requests to the hardware. Also the checks of the kernel's
//! invariants over all existing objects.

use core::cell::{Cell, RefCell};
use core::sync::atomic::AtomicU64;
use std::vec::Vec;

use abi::Status;
use abi::args::IrqSource;

use crate::Kernel;
use crate::arch::{Arch, ArchVcpu, Context};
use crate::mdb::work::WORK;
use crate::mdb::{Delegation, Extent};
use crate::object::*;
use crate::pool::{self, Factory, Frame, Handle, Memory};
use crate::sched::{SchedContext, SchedState};
use crate::table::{self, Access, Format, Tables};
use crate::tree::Keyed;

/// State of the simulated machine. Each test has its own, since each runs in its own thread.
#[derive(Default)]
pub struct Machine {
    pub cpu: Cell<usize>,
    pub now: Cell<u64>,
    pub kicks: RefCell<Vec<usize>>,
    pub shootdowns: RefCell<Vec<u64>>,
    pub logged: Cell<u32>,
    pub preemptions: Cell<u32>,
    /// Maximum leaf level of both page-table formats.
    pub max_leaf: Cell<u32>,
    /// The processor requires break-before-make.
    pub break_before_make: Cell<bool>,
    /// Device memory of every VM.
    pub guest_device: Cell<Option<Extent>>,
}

std::thread_local! {
    static MACHINE: Machine = Machine { max_leaf: Cell::new(2), ..Machine::default() };
}

/// Uses this test's machine.
pub fn machine<R>(use_it: impl FnOnce(&Machine) -> R) -> R {
    MACHINE.with(use_it)
}

/// Switches the test to another CPU.
pub fn on_cpu(cpu: usize) {
    machine(|machine| machine.cpu.set(cpu));
}

/// Sets the clock.
pub fn set_time(now: u64) {
    machine(|machine| machine.now.set(now));
}

/// User registers; arguments and results share them, as on real processors.
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
const USER: u64 = 32;
const GLOBAL: u64 = 64;

/// Page tables of four levels.
pub struct Invented;

impl Invented {
    /// Access rights in a leaf.
    pub fn access(entry: u64) -> Access {
        Access {
            write: entry & WRITE != 0,
            execute: entry & EXECUTE != 0,
            device: entry & DEVICE != 0,
            user: entry & USER != 0,
            global: entry & GLOBAL != 0,
        }
    }
}

impl Format for Invented {
    const ROOT_LEVEL: u32 = 3;
    fn max_leaf_level() -> u32 {
        machine(|machine| machine.max_leaf.get())
    }
    fn may_replace_table() -> bool {
        !machine(|machine| machine.break_before_make.get())
    }
    fn leaf(physical: u64, access: Access, level: u32) -> u64 {
        let flag = |set: bool, bit: u64| if set { bit } else { 0 };
        physical
            | PRESENT
            | flag(access.write, WRITE)
            | flag(access.execute, EXECUTE)
            | flag(access.device, DEVICE)
            | flag(access.user, USER)
            | flag(access.global, GLOBAL)
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
#[derive(Clone, Copy, Default, PartialEq)]
pub struct Fake;

impl ArchVcpu for Frame {
    fn new(
        memory: &Memory,
        factory: Option<Handle<Factory>>,
        _: Frame,
        _: Translation,
    ) -> Result<Frame, Status> {
        memory.alloc_raw(factory, 1)
    }
    fn free(&self, memory: &Memory) {
        memory.free_raw(*self, 1);
    }
    fn count_preemption(&self) {
        machine(|machine| machine.preemptions.set(machine.preemptions.get() + 1));
    }
}

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
    fn has_vtlb() -> bool {
        true
    }
    fn guest_device() -> Option<Extent> {
        machine(|machine| machine.guest_device.get())
    }
    fn vcpu_state(_: &Memory, _: &Vcpu<Self>, _: u64) {}
    fn irq_valid(source: IrqSource) -> bool {
        !matches!(source, IrqSource::Line { gsi: 24.., .. })
    }
    fn irq_set(_: &Irq<Self>, _: bool) {}
    fn irq_message(irq: &Irq<Self>) -> (u64, u64) {
        (0xfee0_0000, irq.number.0 as u64)
    }
    fn log(_: core::fmt::Arguments<'_>) {
        machine(|machine| machine.logged.set(machine.logged.get() + 1));
    }
    fn log_text(text: &[u8]) -> usize {
        text.len()
    }
    fn reset() -> ! {
        panic!("reset");
    }
}

/// Deterministic random number generator (Knuth's MMIX constants).
pub struct Random(pub u64);

impl Random {
    /// A number below `limit`.
    pub fn below(&mut self, limit: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (((self.0 >> 16) as u128 * limit as u128) >> 48) as u64
    }
    /// Returns `true` with probability 1 / `times`.
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

impl Kernel<Fake> {
    /// Executes a complete delegation, step by step.
    pub fn delegate(
        &self,
        from: Handle<Task<Fake>>,
        item: abi::Item,
        source: u64,
        to: SpaceRef<Fake>,
        destination: u64,
    ) -> Result<(), Status> {
        let delegation = Delegation { from, item, source, to, destination };
        let mut done = 0;
        while !self.delegate_part(&delegation, &mut done, &mut WORK.clone())? {}
        Ok(())
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

/// Translates a page by the page tables of an address space: physical page number and access
/// rights.
pub fn translate(kernel: &Kernel<Fake>, space: SpaceRef<Fake>, page: u64) -> Option<(u64, Access)> {
    let root = kernel.memory.physical(kernel.space(space)?.root);
    let read = |table, index| View(&kernel.memory).read(table, index);
    let (physical, entry, _) = table::translate::<Invented>(read, root, page)?;
    Some((physical >> abi::PAGE_SHIFT, Invented::access(entry)))
}

/// Number of pages mapped by the page tables of an address space.
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

/// Returns all nodes of the mapping database.
pub fn nodes(kernel: &Kernel<Fake>) -> Vec<Handle<MapNode<Fake>>> {
    pool::testing::all(&kernel.memory)
}

/// Checks the mapping database: containment, lists, overlap, page tables, slots.
pub fn check_mappings(kernel: &Kernel<Fake>) {
    let memory = &kernel.memory;
    let mut extents: Vec<(u64, u8, u64, u64)> = Vec::new();
    let mut pages: Vec<(SpaceRef<Fake>, u64)> = Vec::new();
    let all = nodes(kernel);
    for handle in all.iter().copied() {
        let node = memory.at(handle);
        let size = 1u64 << node.order;
        if let Some(parent) = node.parent.get() {
            let above = memory.at(parent);
            let (physical, order, name) = Keyed::<ByPhysical>::key(node, handle);
            let found = above.children.at_most(memory, (physical, order, name));
            assert!(found == Some(handle), "a child is in its parent's tree");
            assert_eq!(node.kind, above.kind);
            assert_eq!(node.depth, above.depth + 1);
            assert_eq!(node.rights & !above.rights, 0, "rights only shrink");
            assert!(
                node.physical >= above.physical
                    && node.physical + size <= above.physical + (1 << above.order),
                "a child is contained in its parent"
            );
        }
        let is_block = node.physical & (size - 1) == 0;
        assert!(is_block || node.kind == abi::ItemKind::Capability, "a mapping is aligned");
        let depth = node.children.depth(memory);
        assert!(depth < 64, "the tree is balanced");
        let members = node.children.count(memory, &|child| {
            assert!(memory.at(child).parent.get() == Some(handle));
        });
        assert!(members <= all.len());
        let name = match node.space {
            SpaceRef::Task(task) => task.id(),
            SpaceRef::Vm(vm) => vm.id(),
        };
        extents.push((name, node.kind as u8, node.base, size));
        check_item(kernel, handle, node);
        if node.kind == abi::ItemKind::Memory {
            match pages.iter_mut().find(|(space, _)| *space == node.space) {
                Some((_, count)) => *count += size,
                None => pages.push((node.space, size)),
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

/// Checks the slot, the port bits or the page-table entries of a node.
fn check_item(kernel: &Kernel<Fake>, handle: Handle<MapNode<Fake>>, node: &MapNode<Fake>) {
    let memory = &kernel.memory;
    let size = 1u64 << node.order;
    match node.kind {
        abi::ItemKind::Capability => {
            let SpaceRef::Task(task) = node.space else { panic!("a guest has no slots") };
            let capability = kernel.capability(memory.at(task), node.base).unwrap();
            assert!(capability.node == handle && capability.rights == node.rights);
        }
        abi::ItemKind::Port => {
            let map = kernel
                .space(node.space)
                .unwrap()
                .port_map
                .get()
                .expect("a map with the first port");
            for port in [node.base, node.base + size - 1] {
                let word = &memory.words(memory.following(map, (port >> 15) as u32))
                    [(port >> 6 & 511) as usize];
                assert_eq!(word.load(core::sync::atomic::Ordering::Relaxed) >> (port & 63) & 1, 0);
            }
        }
        abi::ItemKind::Memory => {
            for offset in [0, size / 2, size - 1] {
                let (physical, access) =
                    translate(kernel, node.space, node.base + offset).expect("mapped");
                assert_eq!(physical, node.physical + offset);
                assert_eq!(access.write, node.rights & abi::rights::WRITE != 0);
                assert_eq!(access.execute, node.rights & abi::rights::EXECUTE != 0);
                assert_eq!(access.device, node.device);
                let is_guest_virtual = kernel.is_guest_virtual(node.space);
                let has = |right| node.rights & right != 0;
                assert_eq!(access.user, has(abi::rights::USER) || !is_guest_virtual);
                assert_eq!(access.global, has(abi::rights::GLOBAL) && is_guest_virtual);
            }
        }
    }
}

/// Returns the thread that runs on a scheduling context.
fn holder(kernel: &Kernel<Fake>, sched: &SchedContext<Fake>) -> Option<Handle<Thread<Fake>>> {
    match sched.state.get() {
        SchedState::Running => kernel.cpus[sched.cpu.get()].current.get(),
        _ => sched.holder.get(),
    }
}

fn on_donation_path(
    kernel: &Kernel<Fake>,
    from: Handle<Thread<Fake>>,
    to: Handle<Thread<Fake>>,
) -> bool {
    let mut next = Some(from);
    for _ in 0..1000 {
        match next {
            Some(thread) if thread == to => return true,
            Some(thread) => next = kernel.memory.at(thread).donor.get(),
            None => return false,
        }
    }
    panic!("a cycle of donors");
}

/// Checks the callers and the state of a thread.
fn check_ipc(kernel: &Kernel<Fake>, handle: Handle<Thread<Fake>>) {
    let memory = &kernel.memory;
    let thread = memory.at(handle);
    let state = thread.state.get();
    // Server side.
    let (mut next, mut before) = (thread.callers.head.get(), None);
    while let Some(caller) = next {
        let waiting = memory.at(caller);
        assert!(
            matches!(waiting.state.get(), ThreadState::Sending { server, .. } if server == handle)
        );
        assert!(waiting.queue.prev.get() == before);
        before = next;
        next = waiting.queue.next.get();
    }
    assert!(thread.callers.tail.get() == before);
    if let Some(caller) = thread.callers.served.get() {
        let waiting = memory.at(caller).state.get();
        assert!(matches!(waiting, ThreadState::AwaitingReply { server, .. } if server == handle));
    }
    if matches!(state, ThreadState::Stopped | ThreadState::Receiving) {
        assert!(
            thread.callers.first().is_none()
                || matches!(state, ThreadState::Stopped) && thread.stopping.get() != Stopping::No
        );
        assert!(thread.donor.get().is_none());
    }
    // Caller side.
    if let ThreadState::AwaitingReply { server, .. } = state {
        let served = memory.at(server).callers.served.get();
        assert!(served == Some(handle), "the server records its caller");
    }
    match state {
        ThreadState::Blocked { on, .. } => assert!(memory.at(on).waiter.get() == Some(handle)),
        ThreadState::Halted { vcpu, .. } => {
            let on = memory.at(vcpu).notification;
            assert!(memory.at(on).waiter.get() == Some(handle));
        }
        _ => assert_eq!(state.deadline(), abi::FOREVER),
    }
    if let Some(vcpu) = state.vcpu() {
        assert!(memory.at(vcpu).runner.get() == Some(handle));
    }
}

/// Checks that a thread runs on the right scheduling context and that its own one is not lost.
fn check_donation(kernel: &Kernel<Fake>, handle: Handle<Thread<Fake>>) {
    let memory = &kernel.memory;
    let thread = memory.at(handle);
    let state = thread.state.get();
    if let Some(sched) = thread.sched.get() {
        let sched = memory.at(sched);
        assert!(holder(kernel, sched) == Some(handle), "runs on what it holds");
        assert_eq!(sched.state.get() != SchedState::Idle, state.is_runnable());
    } else if state.is_runnable() {
        assert!(thread.own_sched.get().is_none(), "its own context is in use");
        let mut donor = thread.callers.first();
        while let Some(name) = donor {
            let waiting = memory.at(name);
            assert!(
                waiting.cpu != thread.cpu || waiting.sched.get().is_none(),
                "a server without a context although a waiting caller has one"
            );
            donor = match waiting.state.get() {
                ThreadState::Sending { .. } => waiting.queue.next.get(),
                _ => None,
            };
        }
    }
    if let Some(own) = thread.own_sched.get() {
        let sched = memory.at(own);
        assert!(sched.owner.get() == Some(handle));
        let holder = holder(kernel, sched).expect("a bound context has a holder");
        if state.server().is_none() {
            assert!(holder == handle, "only calling threads donate");
        }
        assert!(on_donation_path(kernel, holder, handle), "the scheduling context is lost");
    }
}

/// Checks threads, calls, scheduling contexts and CPUs. For use between kernel entries.
pub fn check_threads(kernel: &Kernel<Fake>) {
    let memory = &kernel.memory;
    for handle in pool::testing::all::<Thread<Fake>>(memory) {
        check_ipc(kernel, handle);
        check_donation(kernel, handle);
    }
    for handle in pool::testing::all::<SchedContext<Fake>>(memory) {
        let sched = memory.at(handle);
        let cpu = &kernel.cpus[sched.cpu.get()];
        assert_eq!(sched.state.get() == SchedState::Running, cpu.sched.get() == Some(handle));
        if let Some(owner) = sched.owner.get() {
            assert!(memory.at(owner).own_sched.get() == Some(handle));
        }
        if sched.owner.get().is_none() {
            assert_eq!(sched.state.get(), SchedState::Idle);
        }
    }
    for (number, cpu) in kernel.cpus.iter().enumerate().take(Fake::cpus()) {
        kernel.check_queues(number);
        if cpu.resched.get() {
            continue;
        }
        assert_eq!(cpu.current.get().is_some(), cpu.sched.get().is_some());
        if let Some(current) = cpu.current.get() {
            let thread = memory.at(current);
            assert!(thread.state.get().is_runnable());
            assert_eq!(thread.cpu, number);
            assert!(thread.sched.get() == cpu.sched.get());
        }
    }
    for handle in pool::testing::all::<Notification<Fake>>(memory) {
        if let Some(waiter) = memory.at(handle).waiter.get() {
            let on = match memory.at(waiter).state.get() {
                ThreadState::Blocked { on, .. } => on,
                ThreadState::Halted { vcpu, .. } => memory.at(vcpu).notification,
                _ => panic!("the waiter waits"),
            };
            assert!(on == handle);
        }
    }
}

/// Checks everything.
pub fn check(kernel: &Kernel<Fake>) {
    check_threads(kernel);
    check_mappings(kernel);
    pool::testing::audit(&kernel.memory);
}

/// Execution state of a thread, without its data.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Phase {
    Stopped,
    Receiving,
    Sending,
    AwaitingReply,
    Blocked,
    Runnable,
}

/// A kernel with one task that owns a factory, and helpers that execute system calls in it.
pub struct World {
    pub kernel: Kernel<Fake>,
    pub factory: Handle<Factory>,
    pub task: Handle<Task<Fake>>,
    next_page: u64,
    next_slot: u64,
}

/// Address of the first message page.
const MESSAGES: u64 = 0x7000_0000;
/// Initial priority of the scheduling contexts of [`World::thread`].
pub const NORMAL: u64 = 10;

impl World {
    pub fn new() -> Self {
        let kernel = kernel(4096);
        let factory = kernel.memory.new_factory(None, 3000, 63, 0).unwrap();
        let task = kernel.new_task(Some(factory), 512).unwrap();
        let mut world = Self { kernel, factory, task, next_page: 0, next_slot: 0 };
        world.insert_cap(ObjectRef::Task(task));
        world.insert_cap(ObjectRef::Factory(factory));
        world
    }

    /// Creates another task.
    pub fn new_task(&mut self) -> Handle<Task<Fake>> {
        let task = self.kernel.new_task(Some(self.factory), 512).unwrap();
        self.insert_cap(ObjectRef::Task(task));
        task
    }

    /// Inserts a capability with all rights into the next slot of the first task.
    pub fn insert_cap(&mut self, object: ObjectRef<Fake>) -> u64 {
        let slot = self.next_slot;
        self.next_slot += 1;
        self.kernel.insert_capability(self.task, slot, object, abi::rights::ALL, None).unwrap();
        slot
    }

    /// Removes the capability at a selector.
    pub fn drop_slot(&mut self, slot: u64) {
        let item = abi::Item::capability(0);
        assert_eq!(self.kernel.unmap(self.task, (item, slot), true, &mut 0, &mut 1000), Ok(true));
        self.finish();
    }

    pub fn thread_in(&mut self, task: Handle<Task<Fake>>, cpu: usize) -> Handle<Thread<Fake>> {
        let page = MESSAGES + (self.next_page << abi::PAGE_SHIFT);
        self.next_page += 1;
        let thread = self.kernel.new_thread(Some(self.factory), task, cpu, page).unwrap();
        self.insert_cap(ObjectRef::Thread(thread));
        thread
    }

    /// Creates a stopped thread without a scheduling context.
    pub fn passive(&mut self, cpu: usize) -> Handle<Thread<Fake>> {
        self.thread_in(self.task, cpu)
    }

    /// Creates a scheduling context; also returns the slot of its capability.
    pub fn sched(
        &mut self,
        priority: u64,
        budget: u64,
        period: u64,
    ) -> (Handle<SchedContext<Fake>>, u64) {
        let sched = self.kernel.new_sched(Some(self.factory), priority, budget, period).unwrap();
        let slot = self.insert_cap(ObjectRef::SchedContext(sched));
        (sched, slot)
    }

    /// Creates and starts a thread with a scheduling context.
    pub fn thread(&mut self, cpu: usize) -> Handle<Thread<Fake>> {
        let thread = self.passive(cpu);
        let (sched, _) = self.sched(NORMAL, 1_000_000, 0);
        self.kernel.bind_sched(thread, sched).unwrap();
        self.start(thread);
        thread
    }

    pub fn start(&mut self, thread: Handle<Thread<Fake>>) {
        self.kernel.start_thread(thread, 0x1000, 0x2000, 0).unwrap();
        self.finish();
    }

    /// Creates a gate; returns its selector in the first task.
    pub fn gate(&mut self, thread: Handle<Thread<Fake>>, badge: u64) -> u64 {
        let gate = Gate { caps: Cell::new(0), thread, badge };
        let gate = self.kernel.memory.alloc(Some(self.factory), gate).unwrap();
        self.insert_cap(ObjectRef::Gate(gate))
    }

    /// Creates a notification; also returns its selector in the first task.
    pub fn notification(&mut self) -> (Handle<Notification<Fake>>, u64) {
        let handle = self.kernel.memory.alloc(Some(self.factory), Notification::default()).unwrap();
        (handle, self.insert_cap(ObjectRef::Notification(handle)))
    }

    pub fn at(&self, thread: Handle<Thread<Fake>>) -> &Thread<Fake> {
        self.kernel.memory.at(thread)
    }

    pub fn phase(&self, thread: Handle<Thread<Fake>>) -> Phase {
        match self.at(thread).state.get() {
            ThreadState::Stopped => Phase::Stopped,
            ThreadState::Receiving => Phase::Receiving,
            ThreadState::Sending { .. } => Phase::Sending,
            ThreadState::AwaitingReply { .. } => Phase::AwaitingReply,
            ThreadState::Blocked { .. } | ThreadState::Halted { .. } => Phase::Blocked,
            ThreadState::InGuest { .. } | ThreadState::Ready => Phase::Runnable,
        }
    }

    /// Status and words of the last system call that returned.
    pub fn result(&self, thread: Handle<Thread<Fake>>) -> (Option<Status>, [u64; 6]) {
        let context = &self.at(thread).context;
        (context.status.get(), core::array::from_fn(|index| context.words[index].get()))
    }

    /// Ends the kernel entry on this CPU, then those that it requested on the other CPU.
    pub fn finish(&mut self) {
        let here = Fake::this_cpu();
        for cpu in [here, 1 - here] {
            on_cpu(cpu);
            self.kernel.finish(cpu);
            self.kernel.scheduled(cpu);
        }
        on_cpu(here);
        check_threads(&self.kernel);
    }

    /// Ends kernel entries, as timer interrupts would, until no deferred work remains. Returns
    /// their number.
    pub fn finish_all(&mut self) -> u32 {
        (1..)
            .find(|_| {
                self.finish();
                !self.kernel.has_work(Fake::this_cpu())
            })
            .expect("an end")
    }

    pub fn current(&self, cpu: usize) -> Option<Handle<Thread<Fake>>> {
        self.kernel.cpus[cpu].current.get()
    }

    /// Makes a ready thread with a scheduling context the current thread of its CPU.
    pub fn choose(&mut self, thread: Handle<Thread<Fake>>) {
        on_cpu(self.at(thread).cpu);
        let sched = self.at(thread).sched.get().expect("a scheduling context");
        self.kernel.change_sched(sched, 40, 1_000_000, 0).unwrap();
        self.finish();
        assert!(self.current(Fake::this_cpu()) == Some(thread), "ready and chosen");
        self.kernel.change_sched(sched, NORMAL, 1_000_000, 0).unwrap();
    }

    /// Handles the system call whose registers the current thread of `cpu` has.
    pub fn system_call(&self, cpu: usize) {
        let current = self.current(cpu).expect("a current thread");
        self.kernel.system_call(cpu, current, self.at(current));
    }

    /// Executes a system call of this CPU's current thread.
    pub fn call_here(&mut self, operation: abi::Op, arguments: &[u64]) {
        let cpu = Fake::this_cpu();
        let thread = self.current(cpu).expect("a current thread");
        let context = &self.at(thread).context;
        context.operation.set(operation as u64);
        context.status.set(None);
        for (index, word) in context.words.iter().enumerate() {
            word.set(arguments.get(index).copied().unwrap_or(0));
        }
        self.system_call(cpu);
        self.finish();
    }

    /// Executes a system call of `thread`.
    pub fn call(&mut self, thread: Handle<Thread<Fake>>, operation: abi::Op, arguments: &[u64]) {
        self.choose(thread);
        self.call_here(operation, arguments);
    }

    /// Removes every capability and checks that no object remains.
    pub fn end(mut self) {
        loop {
            let capability = nodes(&self.kernel).into_iter().find_map(|node| {
                let node = self.kernel.memory.at(node);
                match (node.kind, node.space) {
                    (abi::ItemKind::Capability, SpaceRef::Task(task)) => Some((task, node.base)),
                    _ => None,
                }
            });
            let Some((task, slot)) = capability else { break };
            let item = abi::Item::capability(0);
            let _ = self.kernel.unmap(task, (item, slot), true, &mut 0, &mut 200);
            self.finish();
        }
        while !self.kernel.reap(&mut WORK.clone()) {
            self.finish();
        }
        self.finish();
        check(&self.kernel);
        let memory = &self.kernel.memory;
        assert!(pool::testing::all::<Thread<Fake>>(memory).is_empty());
        assert_eq!(memory.root().available(), memory.free_frames(), "the whole quota was returned");
        let (total, free) = (memory.total_frames(), memory.free_frames());
        let fixed = pool::testing::fixed(memory);
        assert_eq!(total - free, fixed, "all frames were returned");
    }
}
