//! Threads: execution states and the data of the thread object.

use core::cell::Cell;

use super::{Gate, Link, MapNode, Notification, Task, Vcpu};
use crate::arch::Arch;
use crate::pool::{Cached, Frame, Handle};
use crate::sched::SchedContext;
use crate::tree::{Keyed, Links};

/// Content of a call.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum CallContent {
    /// The message in the caller's registers and message page.
    Message,
    /// The caller's fault, in [`Thread::fault`].
    Fault,
}

/// Execution state of a thread, with the data that belongs to it.
#[derive(Clone, Copy)]
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

/// Links of a thread in a list; by default, it is in none.
#[derive(Default)]
pub struct ListLinks<A: Arch> {
    /// Next thread.
    pub next: Link<Thread<A>>,
    /// Previous thread.
    pub prev: Link<Thread<A>>,
}

/// Callers of a server.
#[derive(Default)]
pub struct Callers<A: Arch> {
    /// Caller that waits for the reply.
    pub served: Link<Thread<A>>,
    /// First queued caller.
    pub head: Link<Thread<A>>,
    /// Last queued caller.
    pub tail: Link<Thread<A>>,
}

impl<A: Arch> Callers<A> {
    /// The caller being served, else the first queued one.
    pub fn first(&self) -> Option<Handle<Thread<A>>> {
        self.served.get().or(self.head.get())
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
#[derive(Default)]
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

/// Cached look-up of the selector of a vCPU, valid as long as no object has been destroyed.
#[derive(Default)]
pub struct VcpuLookup<A: Arch> {
    /// Selector passed to the last `VcpuRun`, with the right to run the vCPU checked.
    pub selector: Cell<u64>,
    /// vCPU found.
    pub vcpu: Cell<Cached<Vcpu<A>>>,
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
