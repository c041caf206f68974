//! Exit reasons of an x86 vCPU, common to all back ends.

use vmm_vcpu::MemoryFault;

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

/// Address space of an [`Access`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Space {
    /// A port.
    Port,
    /// Guest-physical memory that is not mapped.
    Memory,
    /// A model-specific register.
    Msr,
}

/// An access by an instruction that the host emulates. A read is completed with
/// [`X86Vcpu::complete_access`]; the host advances past the instruction by itself.
///
/// [`X86Vcpu::complete_access`]: crate::X86Vcpu::complete_access
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Access {
    /// Address space.
    pub space: Space,
    /// Port, guest-physical address or register.
    pub address: u64,
    /// 1, 2, 4 or 8 bytes, also 3 to 7 for memory.
    pub size: u8,
    /// Value of a write; `None` for a read.
    pub value: Option<u64>,
}

impl Access {
    /// Index of the exit reason ([`Exit::index`]): that of an access that is not emulated.
    const fn index(&self) -> usize {
        match self.space {
            Space::Port => 1,
            Space::Msr => 2,
            Space::Memory => 5,
        }
    }
}

/// Exit reason of a vCPU.
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
    /// An access by an instruction that the host emulates.
    Access(Access),
    /// `HLT`.
    Hlt,
    /// `HLT`, after which the host has waited for events or the deadline.
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
    /// The host interrupted the guest.
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
    /// `PAUSE`, executed often enough to exit.
    Pause,
    /// An instruction that this vCPU does not have (`MONITOR`, `MWAIT`, SVM, `RDPRU`, ...).
    Undefined,
    /// An instruction that exists but is not permitted to the guest (`RDPMC`).
    Protected,
    /// Access to a control register: `MOV`, `SMSW`, `LMSW` or `CLTS`.
    CrAccess {
        /// Register number.
        register: u8,
        /// The register is written (else read).
        write: bool,
    },
    /// `INVLPG`.
    InvalidatePage,
    /// An intercepted page fault of the guest, to be reflected.
    PageFault {
        /// Linear address that faulted.
        address: u64,
        /// The error code.
        code: u32,
    },
    /// Another intercepted exception of the guest, to be reflected.
    Exception {
        /// The vector.
        vector: u8,
        /// The error code; 0 where the exception has none.
        code: u32,
    },
    /// `IRET`, not yet executed ([`crate::X86Vcpu::set_iret_exits`]).
    Iret,
    /// A hardware task switch, which no 64-bit system uses.
    TaskSwitch,
    /// An NMI, a machine check or similar that the host handled; no action needed.
    Spurious,
    /// The host refuses to run the guest's state.
    InvalidState {
        /// Description from the host.
        why: &'static str,
        /// Code from the host.
        code: u64,
    },
    /// Failure of the host: its error code.
    HostError(u64),
    /// Any other exit: the host's exit code.
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
    /// Index of the reason, for counting.
    #[inline(always)]
    pub const fn index(&self) -> usize {
        // The other reasons are constants, which the compiler keeps in a table.
        if let Self::Access(access) = self {
            return access.index();
        }
        match self {
            Self::Cpuid => 0,
            Self::Io(_) => 1,
            Self::Msr { .. } => 2,
            Self::Hlt | Self::Halted { .. } => 3,
            Self::Hypercall => 4,
            Self::MemoryFault(_) | Self::Access(_) => 5,
            Self::InterruptWindow => 6,
            Self::Recall { .. } => 7,
            Self::Deadline => 8,
            Self::Shutdown => 9,
            Self::Xsetbv => 10,
            Self::CacheFlush => 11,
            Self::Pause => 12,
            Self::Undefined => 13,
            Self::Protected => 14,
            Self::CrAccess { .. } | Self::InvalidatePage => 15,
            Self::TaskSwitch => 16,
            Self::Spurious => 17,
            Self::InvalidState { .. } => 18,
            Self::HostError(_) => 19,
            Self::Unknown(_) => 20,
            Self::Exception { .. } | Self::PageFault { .. } => 21,
            Self::Iret => 22,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exits_have_their_names() {
        let access = |space| Exit::Access(Access { space, address: 0, size: 1, value: None });
        for (exit, name) in [
            (Exit::Cpuid, "cpuid"),
            (access(Space::Port), "io"),
            (access(Space::Msr), "msr"),
            (access(Space::Memory), "memory"),
            (Exit::Halted { events: 1 }, "hlt"),
            (Exit::Recall { events: 1 }, "recall"),
            (Exit::InvalidatePage, "cr-access"),
            (Exit::PageFault { address: 0, code: 0 }, "exception"),
            (Exit::Unknown(0), "unknown"),
            (Exit::Iret, "iret"),
        ] {
            assert_eq!(EXIT_NAMES[exit.index()], name);
        }
    }
}
