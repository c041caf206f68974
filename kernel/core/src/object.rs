//! Kernel object types: data only. The modules named after operations implement their behaviour.

use core::cell::Cell;

use abi::ItemKind;
use abi::vcpu::DOORBELLS;

use crate::arch::{Arch, IrqSource};
use crate::pool::{Cached, Factory, Frame, Handle, Object};
use crate::sched::SchedContext;
use crate::tree::{Keyed, Links, Tree};

/// Capability slots in a [`SlotPage`], which fills a frame together with the slab header.
pub const SLOTS_PER_PAGE: usize = 120;
/// Maximum number of slot pages of a task.
pub const SLOT_PAGES: usize = 69;
/// Maximum number of capability slots of a task.
pub const MAX_SLOTS: u64 = 8192;

type Link<T> = Cell<Option<Handle<T>>>;

/// A reference to an object of any kind.
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
    /// Guest-physical address space.
    Vm(Handle<Vm<A>>),
    /// Virtual CPU.
    Vcpu(Handle<Vcpu<A>>),
    /// Platform control.
    Platform,
}

impl<A: Arch> Clone for ObjectRef<A> {
    fn clone(&self) -> Self {
        *self
    }
}
impl<A: Arch> Copy for ObjectRef<A> {}

/// A capability: an object and the rights to it.
pub struct Capability<A: Arch> {
    /// The object.
    pub object: ObjectRef<A>,
    /// Rights, as [`abi::rights`] defines them for the object's kind.
    pub rights: u8,
    /// The capability's node in the mapping database.
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

/// The address space that a [`MapNode`] belongs to.
pub enum SpaceRef<A: Arch> {
    /// A task's memory, capabilities and ports.
    Task(Handle<Task<A>>),
    /// A VM's guest-physical memory and ports.
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
    pub factory: Option<Handle<Factory>>,
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
    /// Incremented by every unmapping; a vCPU that ran with an older value needs a TLB flush.
    pub generation: Cell<u64>,
    /// Being destroyed: accepts no new mappings.
    pub dying: Cell<bool>,
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

/// Guest-physical address space.
pub struct Vm<A: Arch> {
    /// Number of capabilities to this VM.
    pub caps: Cell<u32>,
    /// Guest-physical memory and I/O ports.
    pub space: Space<A>,
    /// Doorbells, by index.
    pub doorbells: [Cell<Option<Doorbell<A>>>; DOORBELLS],
    /// Next VM in the list of dying VMs.
    pub dying_next: Link<Vm<A>>,
}

/// Binding of a VM's doorbell to a notification.
pub struct Doorbell<A: Arch> {
    /// Signalled notification; it may have been destroyed.
    pub notification: Handle<Notification<A>>,
    /// Event bits that are signalled.
    pub bits: u64,
}

impl<A: Arch> Clone for Doorbell<A> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<A: Arch> Copy for Doorbell<A> {}

/// Content of a call.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum CallContent {
    /// The message in the caller's registers and message page.
    Message,
    /// The caller's fault, in [`Thread::fault`].
    Fault,
}

/// Execution state of a thread, with the data that belongs to it.
pub enum ThreadState<A: Arch> {
    /// Running in user mode, or runnable as soon as its scheduling context is dispatched.
    Ready,
    /// In `VcpuRun`, running the guest or runnable.
    InGuest {
        /// The vCPU.
        vcpu: Handle<Vcpu<A>>,
    },
    /// Never started, stopped, or stopped by a fault.
    Stopped,
    /// Server waiting for a caller.
    Receiving,
    /// Called a gate: in the server's queue, not received yet.
    Sending {
        /// Thread that serves the gate.
        server: Handle<Thread<A>>,
        /// Badge of the gate.
        badge: u64,
        /// Content of the call.
        content: CallContent,
    },
    /// Called a gate: the server has received the call.
    AwaitingReply {
        /// Thread that serves the gate.
        server: Handle<Thread<A>>,
        /// Content of the call.
        content: CallContent,
    },
    /// Waiting for a notification.
    Blocked {
        /// The notification.
        on: Handle<Notification<A>>,
        /// Timeout in ticks; [`abi::FOREVER`] if none.
        deadline: u64,
    },
    /// In `VcpuRun`, waiting for the vCPU's notification: the guest has executed HLT.
    Halted {
        /// The vCPU.
        vcpu: Handle<Vcpu<A>>,
        /// Timeout in ticks; [`abi::FOREVER`] if none.
        deadline: u64,
    },
}

impl<A: Arch> Clone for ThreadState<A> {
    fn clone(&self) -> Self {
        *self
    }
}
impl<A: Arch> Copy for ThreadState<A> {}

impl<A: Arch> ThreadState<A> {
    /// Returns whether the thread runs when its scheduling context is dispatched.
    #[inline(always)]
    pub fn is_runnable(self) -> bool {
        matches!(self, Self::Ready | Self::InGuest { .. })
    }

    /// Called server.
    #[inline(always)]
    pub fn server(self) -> Option<Handle<Thread<A>>> {
        match self {
            Self::Sending { server, .. } | Self::AwaitingReply { server, .. } => Some(server),
            _ => None,
        }
    }

    /// vCPU that the thread runs in `VcpuRun`.
    #[inline(always)]
    pub fn vcpu(self) -> Option<Handle<Vcpu<A>>> {
        match self {
            Self::InGuest { vcpu } | Self::Halted { vcpu, .. } => Some(vcpu),
            _ => None,
        }
    }

    /// Timeout in ticks; [`abi::FOREVER`] if none.
    #[inline(always)]
    pub fn deadline(self) -> u64 {
        match self {
            Self::Blocked { deadline, .. } | Self::Halted { deadline, .. } => deadline,
            _ => abi::FOREVER,
        }
    }
}

/// Progress of the end of a thread that others wait for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Stopping {
    /// The thread is not in the list of stopped threads.
    No,
    /// In that list: its callers have not been aborted yet.
    AbortsCallers,
    /// The same, and its last capability was removed: freed once its callers have been aborted.
    Destroyed,
}

/// Links of a thread in a list.
pub struct ListLinks<A: Arch> {
    /// Next thread.
    pub next: Link<Thread<A>>,
    /// Previous thread.
    pub prev: Link<Thread<A>>,
}

impl<A: Arch> ListLinks<A> {
    /// Links of a thread that is in no list.
    pub const fn new() -> Self {
        Self { next: Cell::new(None), prev: Cell::new(None) }
    }
}

impl<A: Arch> Default for ListLinks<A> {
    fn default() -> Self {
        Self::new()
    }
}

/// Callers of a server.
pub struct Callers<A: Arch> {
    /// Caller that waits for the reply.
    pub served: Link<Thread<A>>,
    /// First queued caller.
    pub head: Link<Thread<A>>,
    /// Last queued caller.
    pub tail: Link<Thread<A>>,
}

impl<A: Arch> Callers<A> {
    /// No callers.
    pub const fn new() -> Self {
        Self { served: Cell::new(None), head: Cell::new(None), tail: Cell::new(None) }
    }

    /// The caller being served, else the first queued one.
    pub fn first(&self) -> Option<Handle<Thread<A>>> {
        self.served.get().or(self.head.get())
    }
}

impl<A: Arch> Default for Callers<A> {
    fn default() -> Self {
        Self::new()
    }
}

/// Thread of execution in a task.
pub struct Thread<A: Arch> {
    /// User registers.
    pub context: A::Context,
    /// Number of capabilities to this thread.
    pub caps: Cell<u32>,
    /// Task that the thread runs in.
    pub task: Handle<Task<A>>,
    /// CPU that the thread is bound to.
    pub cpu: usize,
    /// Message page.
    pub message: Frame,
    /// Mapping of the message page in the task.
    pub message_node: Handle<MapNode<A>>,
    /// Execution state.
    pub state: Cell<ThreadState<A>>,
    /// Scheduling context bound to this thread.
    pub own_sched: Link<SchedContext<A>>,
    /// Scheduling context in use: its own, or one donated by a caller.
    pub sched: Link<SchedContext<A>>,
    /// Server: caller that donated `sched`; `None` if `sched` is the server's own.
    pub donor: Link<Thread<A>>,
    /// Server: its callers.
    pub callers: Callers<A>,
    /// Caller: links in the server's queue.
    pub queue: ListLinks<A>,
    /// Caller: the fault that its call reports ([`CallContent::Fault`]).
    pub fault: Cell<[u64; 4]>,
    /// Gate called when the thread faults.
    pub fault_gate: Link<Gate<A>>,
    /// Notification that also wakes the thread while it is receiving.
    pub bound: Link<Notification<A>>,
    /// Cached look-up of the thread's task.
    pub task_lookup: Cell<Cached<Task<A>>>,
    /// Cached selector look-up of the last `GateCall` on the fast path.
    pub gate_lookup: GateLookup<A>,
    /// Server: the caller of the last call received on the fast path.
    pub caller_lookup: Cell<Cached<Thread<A>>>,
    /// Cached selector look-up of the last `VcpuRun`.
    pub vcpu_lookup: VcpuLookup<A>,
    /// Links in the CPU's tree of timeouts.
    pub timeout: Links<Thread<A>>,
    /// Membership in the list of stopped threads with callers.
    pub stopping: Cell<Stopping>,
    /// Next thread in that list.
    pub stopping_next: Link<Thread<A>>,
    /// Links in the task's list of threads.
    pub siblings: ListLinks<A>,
}

/// Cached look-up of a gate's selector, for [`crate::Kernel::fast_ipc`]. Removal of a capability
/// destroys its node, so the entry is valid as long as no object has been destroyed.
pub struct GateLookup<A: Arch> {
    /// Selector of the gate, with the right to call it checked.
    pub selector: Cell<u64>,
    /// Badge of the gate.
    pub badge: Cell<u64>,
    /// Thread that serves the gate, on the caller's CPU.
    pub server: Link<Thread<A>>,
    /// The same.
    pub server_thread: Cell<Cached<Thread<A>>>,
    /// The calling thread.
    pub caller: Cell<Cached<Thread<A>>>,
}

impl<A: Arch> GateLookup<A> {
    /// No look-up.
    pub const fn new() -> Self {
        Self {
            selector: Cell::new(0),
            badge: Cell::new(0),
            server: Cell::new(None),
            server_thread: Cell::new(Cached::NONE),
            caller: Cell::new(Cached::NONE),
        }
    }
}

impl<A: Arch> Default for GateLookup<A> {
    fn default() -> Self {
        Self::new()
    }
}

/// Cached look-up of the selector of a vCPU, valid as long as no object has been destroyed.
pub struct VcpuLookup<A: Arch> {
    /// Selector passed to the last `VcpuRun`, with the right to run the vCPU checked.
    pub selector: Cell<u64>,
    /// vCPU found.
    pub vcpu: Cell<Cached<Vcpu<A>>>,
}

impl<A: Arch> VcpuLookup<A> {
    /// No look-up.
    pub const fn new() -> Self {
        Self { selector: Cell::new(0), vcpu: Cell::new(Cached::NONE) }
    }
}

impl<A: Arch> Default for VcpuLookup<A> {
    fn default() -> Self {
        Self::new()
    }
}

impl<A: Arch> Keyed for Thread<A> {
    type Key = (u64, u64);
    fn key(&self, handle: Handle<Self>) -> (u64, u64) {
        (self.state.get().deadline(), handle.id())
    }
    fn links(&self) -> &Links<Self> {
        &self.timeout
    }
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

/// Notification: 64 sticky event bits.
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

/// Hardware interrupt.
pub struct Irq<A: Arch> {
    /// Number of capabilities to this interrupt.
    pub caps: Cell<u32>,
    /// Interrupt source.
    pub source: IrqSource,
    /// Destination CPU.
    pub cpu: usize,
    /// Vector on the destination CPU.
    pub vector: u8,
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
    pub factory: Option<Handle<Factory>>,
    /// State page ([`abi::vcpu::VcpuState`]).
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
