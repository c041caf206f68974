//! Kernel object types: data only. The modules named after operations implement their behaviour.

use core::cell::Cell;

use abi::ItemKind;
use abi::args::IrqSource;
use abi::vcpu::{DOORBELLS, SGI_TARGETS};

use crate::arch::Arch;
use crate::pool::{Account, Factory, Frame, Handle, Object};
use crate::sched::SchedContext;
use crate::tree::{Keyed, Links, Tree};

pub use thread::*;

mod thread;

/// Capability slots in a [`SlotPage`], which fills a frame together with the slab header.
pub const SLOTS_PER_PAGE: usize = 120;
/// Maximum number of slot pages of a task.
pub const SLOT_PAGES: usize = 69;
/// Maximum number of capability slots of a task.
pub const MAX_SLOTS: u64 = 8192;

type Link<T> = Cell<Option<Handle<T>>>;

/// A reference to an object of any kind.
#[derive(Clone, Copy)]
pub enum ObjectRef<A: Arch> {
    /// Address and capability space.
    Task(Handle<Task<A>>),
    /// Thread of execution.
    Thread(Handle<Thread<A>>),
    /// IPC endpoint.
    Gate(Handle<Gate<A>>),
    /// Notification (64 event bits).
    Notification(Handle<Notification<A>>),
    /// Hardware interrupt.
    Irq(Handle<Irq<A>>),
    /// Kernel memory quota.
    Factory(Handle<Factory>),
    /// Scheduling context (CPU time).
    SchedContext(Handle<SchedContext<A>>),
    /// Address space of a guest.
    Vm(Handle<Vm<A>>),
    /// Virtual CPU.
    Vcpu(Handle<Vcpu<A>>),
    /// Platform control.
    Platform,
}

/// A capability: an object and the rights to it.
#[derive(Clone, Copy)]
pub struct Capability<A: Arch> {
    /// The object.
    pub object: ObjectRef<A>,
    /// Rights, as [`abi::rights`] defines them for the object's kind.
    pub rights: u8,
    /// The capability's node in the mapping database.
    pub node: Handle<MapNode<A>>,
}

/// One page of capability slots.
pub struct SlotPage<A: Arch> {
    /// The slots.
    pub slots: [Cell<Option<Capability<A>>>; SLOTS_PER_PAGE],
}

/// The address space that a [`MapNode`] belongs to.
#[derive(Clone, Copy, PartialEq)]
pub enum SpaceRef<A: Arch> {
    /// A task's memory, capabilities and ports.
    Task(Handle<Task<A>>),
    /// A VM's memory and ports.
    Vm(Handle<Vm<A>>),
}

/// Node of the mapping database: 2^order units at `base` of an address space, delegated from
/// `parent` and further delegated to `children`.
pub struct MapNode<A: Arch> {
    /// Address space of the mapping.
    pub space: SpaceRef<A>,
    /// First unit in that address space.
    pub base: u64,
    /// Memory: physical page number. Ports: port number. Capabilities: unused.
    pub physical: u64,
    /// Kind of the mapped resource.
    pub kind: ItemKind,
    /// `log2` of the number of units.
    pub order: u8,
    /// Rights of the mapping.
    pub rights: u8,
    /// Device memory.
    pub device: bool,
    /// Placed by the kernel (message page, state page): user tasks can neither delegate nor unmap
    /// it.
    pub fixed: Cell<bool>,
    /// Number of ancestors.
    pub depth: u8,
    /// Node that this one was delegated from.
    pub parent: Link<MapNode<A>>,
    /// Nodes delegated from this one.
    pub children: Tree<MapNode<A>, ByPhysical>,
    /// Links in the parent's tree of children.
    pub siblings: Links<MapNode<A>>,
    /// Links in the address space's tree.
    pub links: Links<MapNode<A>>,
}

/// Order of the children of a [`MapNode`]: by mapped resource. Every mapping is a block aligned to
/// its size, so two blocks are either disjoint or nested.
pub struct ByPhysical;

impl<A: Arch> Keyed for MapNode<A> {
    type Key = u64;
    fn key(&self, _: Handle<Self>) -> u64 {
        self.base
    }
    fn links(&self) -> &Links<Self> {
        &self.links
    }
}

impl<A: Arch> Keyed<ByPhysical> for MapNode<A> {
    type Key = (u64, u8, u64);
    fn key(&self, handle: Handle<Self>) -> (u64, u8, u64) {
        (self.physical, self.order, handle.id())
    }
    #[expect(clippy::misnamed_getters, reason = "these are the links in this order")]
    fn links(&self) -> &Links<Self> {
        &self.siblings
    }
}

/// Memory and I/O ports of a task or VM.
pub struct Space<A: Arch> {
    /// Factory charged for page tables and nodes.
    pub factory: Account,
    /// Memory mappings, ordered by page number.
    pub memory: Tree<MapNode<A>>,
    /// Port mappings, ordered by port number.
    pub ports: Tree<MapNode<A>>,
    /// Root page table.
    pub root: Frame,
    /// I/O permission map, allocated with the first port.
    pub port_map: Cell<Option<Frame>>,
    /// Incremented when the port map changes.
    pub port_generation: Cell<u64>,
    /// VM: mask of the CPUs that run one of its vCPUs and may hold its translations. For a task,
    /// these are the CPUs that have its address space loaded ([`crate::sched::Cpu::space`]).
    pub active: Cell<u64>,
    /// Incremented by every unmapping, change of the ports, and by destruction
    /// ([`Space::change`]): before a vCPU that ran with an older value is entered, its TLB entries
    /// are flushed, and the rest of this state is looked at again.
    pub generation: Cell<u64>,
    /// Being destroyed: accepts no new mappings.
    pub dying: Cell<bool>,
}

impl<A: Arch> Space<A> {
    /// Increments the generation.
    pub fn change(&self) {
        self.generation.set(self.generation.get() + 1);
    }
}

/// Address space, capability space and I/O ports.
pub struct Task<A: Arch> {
    /// Number of capabilities to this task.
    pub caps: Cell<u32>,
    /// Memory and I/O ports.
    pub space: Space<A>,
    /// Number of capability slots: valid selectors are below.
    pub slots: u64,
    /// Slot pages, each allocated with its first capability.
    pub pages: [Link<SlotPage<A>>; SLOT_PAGES],
    /// First thread of the task.
    pub threads: Link<Thread<A>>,
    /// Next task in the list of dying tasks.
    pub dying_next: Link<Task<A>>,
}

/// Translation of a guest's addresses.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Translation {
    /// Nested paging, by the processor.
    Nested,
    /// vTLB, with at most this number of frames for each vCPU.
    Vtlb(u64),
    /// By the VMM: the space is guest-virtual ([`abi::vm_mode::GUEST_VIRTUAL`]).
    GuestVirtual,
}

/// Address space of a guest: guest-physical unless its translation tells otherwise.
pub struct Vm<A: Arch> {
    /// Number of capabilities to this VM.
    pub caps: Cell<u32>,
    /// The guest's memory and I/O ports.
    pub space: Space<A>,
    /// Translation of the guest's addresses.
    pub translation: Translation,
    /// Doorbells, by index.
    pub doorbells: [Cell<Option<Doorbell<A>>>; DOORBELLS],
    /// Targets of interrupts that the guest sends by software; they may have been destroyed.
    pub sgi_targets: [Link<Vcpu<A>>; SGI_TARGETS],
    /// Next VM in the list of dying VMs.
    pub dying_next: Link<Vm<A>>,
}

/// Binding of a VM's doorbell to a notification.
#[derive(Clone, Copy)]
pub struct Doorbell<A: Arch> {
    /// Signalled notification; it may have been destroyed.
    pub notification: Handle<Notification<A>>,
    /// Event bits that are signalled.
    pub bits: u64,
}

/// IPC endpoint for synchronous calls.
pub struct Gate<A: Arch> {
    /// Number of capabilities to this gate.
    pub caps: Cell<u32>,
    /// Thread that serves the gate.
    pub thread: Handle<Thread<A>>,
    /// Value that identifies the gate to the server.
    pub badge: u64,
}

/// Notification: 64 sticky event bits. By default, it has no events, and nothing waits for it.
#[derive(Default)]
pub struct Notification<A: Arch> {
    /// Number of capabilities to this notification.
    pub caps: Cell<u32>,
    /// Pending event bits.
    pub bits: Cell<u64>,
    /// Thread blocked on it.
    pub waiter: Link<Thread<A>>,
    /// Thread bound to it.
    pub thread: Link<Thread<A>>,
    /// vCPU bound to it.
    pub vcpu: Link<Vcpu<A>>,
}

/// Number of a hardware interrupt object, below [`crate::MAX_IRQS`]. The architecture maps it to
/// what its interrupt controllers deliver: a vector on x86.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct IrqNumber(pub u32);

impl IrqNumber {
    /// Index in the kernel's table of interrupts.
    pub fn index(self) -> usize {
        self.0 as usize
    }
}

/// Hardware interrupt.
pub struct Irq<A: Arch> {
    /// Number of capabilities to this interrupt.
    pub caps: Cell<u32>,
    /// Interrupt source.
    pub source: IrqSource,
    /// Destination CPU.
    pub cpu: usize,
    /// Number by which the architecture reports it.
    pub number: IrqNumber,
    /// Notification that the interrupt signals.
    pub notification: Link<Notification<A>>,
    /// Index of the signalled event bit.
    pub bit: Cell<u8>,
}

/// Virtual CPU.
pub struct Vcpu<A: Arch> {
    /// Number of capabilities to this vCPU.
    pub caps: Cell<u32>,
    /// VM that the vCPU belongs to.
    pub vm: Handle<Vm<A>>,
    /// Notification whose events make `VcpuRun` return.
    pub notification: Handle<Notification<A>>,
    /// Factory charged for the vCPU.
    pub factory: Account,
    /// State page ([`abi::vcpu`]).
    pub state: Frame,
    /// Mapping of the state page in the VMM; also identifies the VMM's task.
    pub state_node: Handle<MapNode<A>>,
    /// CPU that the vCPU is bound to; set by its first run.
    pub cpu: Cell<Option<usize>>,
    /// Its own handle.
    pub handle: Link<Vcpu<A>>,
    /// Thread that runs the vCPU in `VcpuRun`.
    pub runner: Link<Thread<A>>,
    /// Processor structures.
    pub arch: A::Vcpu,
}

macro_rules! classes {
    ($($name:ident = $class:literal),+ $(,)?) => {
        $(impl<A: Arch> Object for $name<A> {
            const CLASS: u8 = $class;
        })+
    };
}

// `Factory` is class 0, `SchedContext` class 10.
classes! {
    SlotPage = 1, MapNode = 2, Task = 3, Thread = 4, Gate = 5,
    Notification = 6, Irq = 7, Vm = 8, Vcpu = 9, SchedContext = 10,
}
