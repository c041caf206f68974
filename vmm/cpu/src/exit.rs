//! Why a virtual CPU stopped: the vocabulary that every back end translates into.

/// A port access (`IN`, `OUT`, `INS`, `OUTS`).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct IoExit {
    /// Port number.
    pub port: u16,
    /// 1, 2 or 4 bytes.
    pub size: u8,
    /// Output (else input).
    pub write: bool,
    /// `INS` or `OUTS`.
    pub string: bool,
    /// With a `REP` prefix.
    pub rep: bool,
    /// Address of the next instruction; 0 if unknown.
    pub next_rip: u64,
}

/// An access to guest-physical memory that is not there, or not for this access.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct MemoryFault {
    /// Guest-physical address.
    pub gpa: u64,
    /// A write (else a read).
    pub write: bool,
    /// An instruction fetch.
    pub fetch: bool,
    /// The processor was walking the guest's page tables.
    pub walk: bool,
}

/// What an [`Access`] is to.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Space {
    /// A port.
    Port,
    /// Guest-physical memory that is not there.
    Memory,
    /// A model-specific register.
    Msr,
}

/// An access of an instruction that the host carries out, but for this. A read is answered ([`Vcpu::complete_access`]); the
/// host goes on behind the instruction by itself.
///
/// [`Vcpu::complete_access`]: crate::Vcpu::complete_access
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Access {
    /// To what.
    pub space: Space,
    /// Port, guest-physical address or register.
    pub address: u64,
    /// 1, 2, 4 or 8 bytes, also 3 to 7 for memory.
    pub size: u8,
    /// What is written; `None`: it is read.
    pub value: Option<u64>,
}

/// Why a virtual CPU stopped.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Exit {
    /// `CPUID`.
    Cpuid,
    /// Port access.
    Io(IoExit),
    /// `RDMSR` or `WRMSR`.
    Msr {
        /// `WRMSR`.
        write: bool,
    },
    /// Something is accessed by an instruction that the host carries out.
    Access(Access),
    /// `HLT`.
    Hlt,
    /// `HLT`, and the host has waited since: until there were events, or the deadline had passed.
    Halted {
        /// Host-defined event bits.
        events: u64,
    },
    /// `VMMCALL` (or the host's equivalent).
    Hypercall,
    /// Access to memory that is not mapped.
    MemoryFault(MemoryFault),
    /// The requested interrupt window is open.
    InterruptWindow,
    /// The host wants the VMM's attention.
    Recall {
        /// Host-defined event bits.
        events: u64,
    },
    /// The deadline has passed.
    Deadline,
    /// Triple fault.
    Shutdown,
    /// `XSETBV`.
    Xsetbv,
    /// `INVD`, `WBINVD`, `WBNOINVD`: nothing to do, caches are coherent.
    CacheFlush,
    /// `PAUSE`, often enough to be reported.
    Pause,
    /// An instruction that this virtual CPU does not have (`MONITOR`, `MWAIT`, SVM, `RDPRU`, ...).
    Undefined,
    /// An instruction that is there but privileged beyond what the guest has (`RDPMC`).
    Protected,
    /// Access to a control register.
    CrAccess {
        /// Register number.
        register: u8,
        /// `MOV` to it (else from it).
        write: bool,
    },
    /// An exception of the guest that the host intercepts and the guest is to get.
    Exception {
        /// The vector.
        vector: u8,
        /// The error code; 0 where the exception has none.
        code: u32,
    },
    /// `IRET`, which has not been executed yet ([`crate::Vcpu::set_iret_exits`]).
    Iret,
    /// A hardware task switch, which no 64-bit system uses.
    TaskSwitch,
    /// A non-maskable interrupt, a machine check or similar that the host reports; nothing to do.
    Spurious,
    /// The guest has brought itself into a state that the host refuses to run, or to go on with.
    InvalidState {
        /// Which host says so, and of what.
        why: &'static str,
        /// The host's code for it.
        code: u64,
    },
    /// The host broke: its own error code.
    HostError(u64),
    /// Anything else: the host's exit code.
    Unknown(u64),
}

/// Names of the exit reasons, indexed by [`Exit::index`].
pub const EXIT_NAMES: [&str; 23] = [
    "cpuid",
    "io",
    "msr",
    "hlt",
    "hypercall",
    "memory",
    "window",
    "recall",
    "deadline",
    "shutdown",
    "xsetbv",
    "cache-flush",
    "pause",
    "undefined",
    "protected",
    "cr-access",
    "task-switch",
    "spurious",
    "invalid-state",
    "host-error",
    "unknown",
    "exception",
    "iret",
];

impl Exit {
    /// Number of the reason, for counting.
    pub const fn index(&self) -> usize {
        match self {
            Self::Cpuid => 0,
            Self::Io(_) | Self::Access(Access { space: Space::Port, .. }) => 1,
            Self::Msr { .. } | Self::Access(Access { space: Space::Msr, .. }) => 2,
            Self::Hlt | Self::Halted { .. } => 3,
            Self::Hypercall => 4,
            Self::MemoryFault(_) | Self::Access(Access { space: Space::Memory, .. }) => 5,
            Self::InterruptWindow => 6,
            Self::Recall { .. } => 7,
            Self::Deadline => 8,
            Self::Shutdown => 9,
            Self::Xsetbv => 10,
            Self::CacheFlush => 11,
            Self::Pause => 12,
            Self::Undefined => 13,
            Self::Protected => 14,
            Self::CrAccess { .. } => 15,
            Self::TaskSwitch => 16,
            Self::Spurious => 17,
            Self::InvalidState { .. } => 18,
            Self::HostError(_) => 19,
            Self::Unknown(_) => 20,
            Self::Exception { .. } => 21,
            Self::Iret => 22,
        }
    }
}
