//! The kernel's objects. Data only; what happens to them is in the modules named after the verbs.

use core::cell::Cell;

use abi::ItemKind;
use abi::vcpu::DOORBELLS;

use crate::arch::{Arch, IrqSource};
use crate::pool::{Factory, Frame, Handle, Object};
use crate::sched::SchedContext;
use crate::tree::{Keyed, Links, Tree};

/// Capability slots in a [`SlotPage`]; with the slab header it fills a frame.
pub const SLOTS_PER_PAGE: usize = 120;
/// Pages of slots that a task can have.
pub const SLOT_PAGES: usize = 69;
/// Most capability slots of a task.
pub const MAX_SLOTS: u64 = 8192;

type Link<T> = Cell<Option<Handle<T>>>;

/// A reference to an object of any kind.
pub enum ObjectRef<A: Arch> {
    /// Address and capability space.
    Task(Handle<Task<A>>),
    /// Execution.
    Thread(Handle<Thread<A>>),
    /// Call endpoint.
    Gate(Handle<Gate<A>>),
    /// Event word.
    Notification(Handle<Notification<A>>),
    /// Hardware interrupt.
    Irq(Handle<Irq<A>>),
    /// Memory quota.
    Factory(Handle<Factory>),
    /// CPU time.
    SchedContext(Handle<SchedContext<A>>),
    /// Guest-physical space.
    Vm(Handle<Vm<A>>),
    /// Virtual CPU.
    Vcpu(Handle<Vcpu<A>>),
    /// The machine.
    Platform,
}

impl<A: Arch> Clone for ObjectRef<A> {
    fn clone(&self) -> Self {
        *self
    }
}
impl<A: Arch> Copy for ObjectRef<A> {}

/// A capability: an object and what may be done with it.
pub struct Capability<A: Arch> {
    /// The object.
    pub object: ObjectRef<A>,
    /// [`abi::rights`] of the object's kind.
    pub rights: u8,
    /// Where it came from and went to.
    pub node: Handle<MapNode<A>>,
}

impl<A: Arch> Clone for Capability<A> {
    fn clone(&self) -> Self {
        *self
    }
}
impl<A: Arch> Copy for Capability<A> {}

/// One page of capability slots.
pub struct SlotPage<A: Arch> {
    /// The slots.
    pub slots: [Cell<Option<Capability<A>>>; SLOTS_PER_PAGE],
}

/// The space that a [`MapNode`] lies in.
pub enum SpaceRef<A: Arch> {
    /// A task's memory, capabilities and ports.
    Task(Handle<Task<A>>),
    /// A guest's memory and ports.
    Vm(Handle<Vm<A>>),
}

impl<A: Arch> Clone for SpaceRef<A> {
    fn clone(&self) -> Self {
        *self
    }
}
impl<A: Arch> Copy for SpaceRef<A> {}

impl<A: Arch> PartialEq for SpaceRef<A> {
    fn eq(&self, other: &Self) -> bool {
        match (self, other) {
            (Self::Task(a), Self::Task(b)) => a == b,
            (Self::Vm(a), Self::Vm(b)) => a == b,
            _ => false,
        }
    }
}

/// A mapping: an entry of the mapping database. 2^order units at `base` of a space, delegated
/// from `parent`, and delegated on to its children.
pub struct MapNode<A: Arch> {
    /// Where it is mapped.
    pub space: SpaceRef<A>,
    /// First unit in that space.
    pub base: u64,
    /// Memory: physical page number. Ports: port. Capabilities: unused.
    pub physical: u64,
    /// What is mapped.
    pub kind: ItemKind,
    /// `log2` of the number of units.
    pub order: u8,
    /// Rights.
    pub rights: u8,
    /// Device memory.
    pub device: bool,
    /// Placed by the kernel (message page, state page): can be neither delegated nor unmapped.
    pub fixed: Cell<bool>,
    /// Distance from the first owner.
    pub depth: u8,
    /// Whence it was delegated.
    pub parent: Link<MapNode<A>>,
    /// What was delegated from it.
    pub children: Tree<MapNode<A>, ByPhysical>,
    /// Links in the parent's tree of children.
    pub siblings: Links<MapNode<A>>,
    /// Links in the space's tree.
    pub links: Links<MapNode<A>>,
}

/// Order of the children of a [`MapNode`]: by what they map. Every mapping is a block, aligned to its size, so two of
/// them are apart or one contains the other.
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

/// Memory and ports of a task or guest.
pub struct Space<A: Arch> {
    /// Who pays for tables and nodes.
    pub factory: Option<Handle<Factory>>,
    /// Mapped memory by page number.
    pub memory: Tree<MapNode<A>>,
    /// Mapped ports.
    pub ports: Tree<MapNode<A>>,
    /// Root page table.
    pub root: Frame,
    /// I/O permission map, made with the first port.
    pub port_map: Cell<Option<Frame>>,
    /// Incremented when the port map changes.
    pub port_generation: Cell<u64>,
    /// Guest: CPUs that run a vCPU of it, which may hold translations of it. A task's are those whose
    /// loaded space ([`crate::sched::Cpu::space`]) it is.
    pub active: Cell<u64>,
    /// Incremented by every unmapping; a vCPU that has seen an older one needs new translations.
    pub generation: Cell<u64>,
    /// No new mappings: it is being taken apart.
    pub dying: Cell<bool>,
}

/// Address space, capability space and ports.
pub struct Task<A: Arch> {
    /// Capabilities to it.
    pub caps: Cell<u32>,
    /// Memory and ports.
    pub space: Space<A>,
    /// Usable selectors are below this.
    pub slots: u64,
    /// Pages of slots, made with their first capability.
    pub pages: [Link<SlotPage<A>>; SLOT_PAGES],
    /// Its threads.
    pub threads: Link<Thread<A>>,
    /// Next in the list of tasks being taken apart.
    pub dying_next: Link<Task<A>>,
}

/// Guest-physical space.
pub struct Vm<A: Arch> {
    /// Capabilities to it.
    pub caps: Cell<u32>,
    /// Memory and ports.
    pub space: Space<A>,
    /// What its doorbells signal.
    pub doorbells: [Cell<Option<Doorbell<A>>>; DOORBELLS],
    /// Next in the list of guests being taken apart.
    pub dying_next: Link<Vm<A>>,
}

/// What a doorbell of a guest signals.
pub struct Doorbell<A: Arch> {
    /// It may have ended.
    pub notification: Handle<Notification<A>>,
    /// Events.
    pub bits: u64,
}

impl<A: Arch> Clone for Doorbell<A> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<A: Arch> Copy for Doorbell<A> {}

/// What a thread is doing.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ThreadState {
    /// Not started, stopped, or ended by a fault.
    Stopped,
    /// Running, or ready to run as soon as its scheduling context is chosen.
    Ready,
    /// Called a gate; waits in the server's queue or for its reply.
    Calling,
    /// Serves gates; waits for a caller.
    Receiving,
    /// Waits for a notification.
    Blocked,
}

/// Execution in a task.
pub struct Thread<A: Arch> {
    /// User registers.
    pub context: A::Context,
    /// Capabilities to it.
    pub caps: Cell<u32>,
    /// Its task.
    pub task: Handle<Task<A>>,
    /// Its CPU.
    pub cpu: usize,
    /// Message page.
    pub message: Frame,
    /// Mapping of the message page in the task.
    pub message_node: Handle<MapNode<A>>,
    /// What it is doing.
    pub state: Cell<ThreadState>,
    /// The scheduling context bound to it.
    pub own_sched: Link<SchedContext<A>>,
    /// The scheduling context that it runs on: its own, or a caller's.
    pub sched: Link<SchedContext<A>>,
    /// Server: who lent `sched`, one of those that wait for it; `None` if it is the server's own.
    pub donor: Link<Thread<A>>,
    /// Stopped: on the list of those whose callers are still to be told.
    pub stopping: Cell<bool>,
    /// Next in that list.
    pub stopping_next: Link<Thread<A>>,
    /// Its last capability is gone; it is freed when its callers have been told.
    pub destroyed: Cell<bool>,
    /// Server: who waits for the reply.
    pub caller: Link<Thread<A>>,
    /// Server: first of the callers that wait to be served.
    pub queue_head: Link<Thread<A>>,
    /// Server: last of them.
    pub queue_tail: Link<Thread<A>>,
    /// Caller: the server.
    pub server: Link<Thread<A>>,
    /// Caller: still in the server's queue.
    pub queued: Cell<bool>,
    /// Caller: badge of the gate that it called.
    pub badge: Cell<u64>,
    /// Caller: next in the queue.
    pub queue_next: Link<Thread<A>>,
    /// Caller: previous in the queue.
    pub queue_prev: Link<Thread<A>>,
    /// The message is this fault, not the registers.
    pub fault: Cell<Option<[u64; 4]>>,
    /// Sleeping: on what.
    pub waiting_on: Link<Notification<A>>,
    /// Called on a fault.
    pub fault_gate: Link<Gate<A>>,
    /// Also wakes it while it waits for callers.
    pub bound: Link<Notification<A>>,
    /// In `VcpuRun` on this vCPU.
    pub vcpu: Link<Vcpu<A>>,
    /// What its last `VcpuRun` found.
    pub vcpu_lookup: Cell<Option<VcpuLookup<A>>>,
    /// Sleeping: until when.
    pub deadline: Cell<u64>,
    /// Links in the CPU's tree of timeouts.
    pub timeout: Links<Thread<A>>,
    /// Next thread of the task.
    pub task_next: Link<Thread<A>>,
    /// Previous thread of the task.
    pub task_prev: Link<Thread<A>>,
}

/// What a `VcpuRun` found by its selector. A capability that ends takes an object with it, its mapping: as long as none has
/// ended, the capability is there.
pub struct VcpuLookup<A: Arch> {
    /// The selector.
    pub selector: u64,
    /// What it led to, with the right to run it.
    pub vcpu: Handle<Vcpu<A>>,
    /// [`crate::pool::Memory::destroyed_count`] at that time.
    pub destroyed_count: u64,
}

impl<A: Arch> Clone for VcpuLookup<A> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<A: Arch> Copy for VcpuLookup<A> {}

impl<A: Arch> Keyed for Thread<A> {
    type Key = (u64, u64);
    fn key(&self, handle: Handle<Self>) -> (u64, u64) {
        (self.deadline.get(), handle.id())
    }
    fn links(&self) -> &Links<Self> {
        &self.timeout
    }
}

/// Call endpoint.
pub struct Gate<A: Arch> {
    /// Capabilities to it.
    pub caps: Cell<u32>,
    /// Who serves it.
    pub thread: Handle<Thread<A>>,
    /// What the server sees instead of the caller's name.
    pub badge: u64,
}

/// Event word.
pub struct Notification<A: Arch> {
    /// Capabilities to it.
    pub caps: Cell<u32>,
    /// Pending events.
    pub bits: Cell<u64>,
    /// Thread that sleeps on it.
    pub waiter: Link<Thread<A>>,
    /// Thread bound to it.
    pub thread: Link<Thread<A>>,
    /// vCPU bound to it.
    pub vcpu: Link<Vcpu<A>>,
}

/// Hardware interrupt.
pub struct Irq<A: Arch> {
    /// Capabilities to it.
    pub caps: Cell<u32>,
    /// Its source.
    pub source: IrqSource,
    /// CPU that takes it.
    pub cpu: usize,
    /// Vector there.
    pub vector: u8,
    /// What it signals.
    pub notification: Link<Notification<A>>,
    /// Which event.
    pub bit: Cell<u8>,
}

/// Virtual CPU.
pub struct Vcpu<A: Arch> {
    /// Capabilities to it.
    pub caps: Cell<u32>,
    /// Its guest.
    pub vm: Handle<Vm<A>>,
    /// Makes `VcpuRun` return.
    pub notification: Handle<Notification<A>>,
    /// Who pays for it.
    pub factory: Option<Handle<Factory>>,
    /// State page.
    pub state: Frame,
    /// Mapping of the state page in the VMM, and the VMM.
    pub state_node: Handle<MapNode<A>>,
    /// CPU that it runs on; set by its first run.
    pub cpu: Cell<Option<usize>>,
    /// Thread that is in `VcpuRun` on it.
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
