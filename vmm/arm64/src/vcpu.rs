//! One vCPU of a host.

pub use vmm_dev::arm64::gic::{Sgis, Virq};
use vmm_vcpu::{MemoryFault, Vcpu};

/// Registers of EL1 that the run loop uses, by their names in the manual.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum System {
    /// SCTLR_EL1.
    Sctlr,
    /// VBAR_EL1.
    Vbar,
    /// ESR_EL1.
    Esr,
    /// ELR_EL1.
    Elr,
    /// SPSR_EL1.
    Spsr,
    /// TCR_EL1: TTBCR in its lower half.
    Tcr,
    /// TTBR0_EL1.
    Ttbr0,
    /// TTBR1_EL1.
    Ttbr1,
    /// IFSR32_EL2.
    Ifsr,
    /// SPSR_abt.
    SpsrAbort,
    /// SPSR_und.
    SpsrUndefined,
}

/// Kind of a vCPU.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Width {
    /// AArch64.
    #[default]
    Bits64,
    /// AArch32: its registers are those of AArch64 that the architecture maps them to.
    Bits32,
}

/// Exit of a vCPU. Unless stated otherwise, the program counter is the address of the instruction
/// that has caused it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Exit {
    /// The deadline has passed.
    Deadline,
    /// The host has run other work in place of the guest ([`Arm64Vcpu::set_preemption_exits`]).
    Preempted,
    /// Host-defined events.
    Recall {
        /// Their bits.
        events: u64,
    },
    /// The guest waits for an interrupt, and none is pending. The program counter is that of the
    /// next instruction.
    Wait {
        /// Value of the host's counter at which the virtual timer interrupts.
        timer: u64,
    },
    /// The host has waited in place of the guest, until these events, or until a deadline.
    Waited {
        /// Their bits.
        events: u64,
    },
    /// `HVC`. The program counter is that of the next instruction.
    Hypercall,
    /// `SMC`.
    SecureCall,
    /// Access to memory that is not mapped.
    MemoryFault {
        /// The access.
        fault: MemoryFault,
        /// Its syndrome.
        syndrome: u64,
    },
    /// Access to a system register that the host does not handle.
    SystemRegister {
        /// Its syndrome.
        syndrome: u64,
    },
    /// The guest has ended an interrupt whose end is to be reported.
    VirqEnded {
        /// Number of the interrupt.
        number: u32,
    },
    /// An instruction of a 32-bit vCPU, whose condition holds. Its aborts are
    /// [`Exit::MemoryFault`]s by [`crate::memory_fault_of_32_bit`].
    AArch32 {
        /// Its syndrome.
        syndrome: u64,
    },
    /// An exception of the guest that the host does not know.
    Unknown {
        /// Its syndrome.
        syndrome: u64,
    },
    /// The host refuses the state in which the guest is to run.
    InvalidState,
    /// The host cannot run the vCPU.
    HostError(u64),
}

/// Names of exit reasons, for messages, by [`Exit::index`].
pub const EXIT_NAMES: [&str; 14] = [
    "deadline",
    "recall",
    "wait",
    "waited",
    "hypercall",
    "secure-call",
    "memory",
    "register",
    "virq-ended",
    "unknown",
    "invalid-state",
    "host-error",
    "preempted",
    "aarch32",
];

impl Exit {
    /// Index of [`Exit::MemoryFault`].
    pub const MEMORY_FAULT: usize = 6;

    /// Index of the reason, for counting.
    pub const fn index(&self) -> usize {
        match self {
            Self::Deadline => 0,
            Self::Recall { .. } => 1,
            Self::Wait { .. } => 2,
            Self::Waited { .. } => 3,
            Self::Hypercall => 4,
            Self::SecureCall => 5,
            Self::MemoryFault { .. } => Self::MEMORY_FAULT,
            Self::SystemRegister { .. } => 7,
            Self::VirqEnded { .. } => 8,
            Self::Unknown { .. } => 9,
            Self::InvalidState => 10,
            Self::HostError(_) => 11,
            Self::Preempted => 12,
            Self::AArch32 { .. } => 13,
        }
    }
}

/// A vCPU of AArch64. Setters take effect at the next [`Vcpu::run`].
pub trait Arm64Vcpu: Vcpu<Exit = Exit> {
    /// Runs the guest until an exit. Returns the access, with its syndrome, if that is one to
    /// memory that is not mapped; `None`: [`Arm64Vcpu::other_exit`] returns the exit. Most exits
    /// are accesses, for which no [`Exit`] has to be made and taken apart.
    fn run_to_access(&mut self) -> Option<(MemoryFault, u64)>;
    /// Returns the exit of the last [`Arm64Vcpu::run_to_access`], or that of a further run.
    fn other_exit(&mut self) -> Exit;
    /// General-purpose register, below 31.
    fn general(&mut self, index: usize) -> u64;
    /// Sets it.
    fn set_general(&mut self, index: usize, value: u64);
    /// Program counter.
    fn pc(&mut self) -> u64;
    /// Sets it.
    fn set_pc(&mut self, value: u64);
    /// Processor state, in the format of SPSR_EL2.
    fn state(&mut self) -> u64;
    /// Sets it.
    fn set_state(&mut self, value: u64);
    /// System register.
    fn system(&mut self, register: System) -> u64;
    /// Sets it.
    fn set_system(&mut self, register: System, value: u64);
    /// Sets all registers to their values after a reset, the affinity to this one, except those of
    /// floating point, which are unknown then and may keep theirs. The vCPU is of this kind from
    /// then on; the next [`Vcpu::run`] fails where the host CPU has none.
    fn reset(&mut self, affinity: u64, width: Width);
    /// Returns whether the CPU's interface has room for another interrupt.
    fn has_room(&mut self) -> bool;
    /// Makes an interrupt pending in the CPU's interface, which has room.
    fn put_virq(&mut self, virq: Virq);
    /// Sets the interrupt of the virtual timer; `None`: it stays pending.
    fn set_timer_virq(&mut self, virq: Option<Virq>);
    /// Makes the vCPU exit whenever the host has run other work in place of the guest, until the VM
    /// starts again.
    fn set_preemption_exits(&mut self);
    /// Fills `to` with random numbers for the guest; returns `false` if the host has none.
    fn random(&mut self, to: &mut [u8]) -> bool;
}
