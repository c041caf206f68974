//! What a virtual CPU needs of the machine around it.

use vmm_bus::{InterruptMessage, Nanos};
use vmm_mem::GuestMemory;

use crate::clock::TscClock;
use crate::cpuid::CpuidTable;
use crate::exit::{IoExit, MemoryFault};
use crate::pv::ApicIds;
use crate::vcpu::{Event, Vcpu};

/// How a machine ended.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Outcome {
    /// The guest switched the machine off.
    PowerOff,
    /// The guest asked for a reset.
    Reset,
    /// A processor gave up (triple fault) or reached a state that cannot go on.
    TripleFault,
    /// The guest reported that it panicked.
    GuestPanic,
    /// The guest chose this exit code, 0 to 63.
    Code(u8),
    /// The host could not run the processor: its error or exit code.
    HostError(u64),
}

impl Outcome {
    /// The exit code of a machine that ends so (`docs/spec/exit-codes.md`).
    pub const fn exit_code(self) -> u8 {
        match self {
            Self::PowerOff => 0,
            Self::Code(chosen) => chosen,
            Self::HostError(_) => 70,
            Self::GuestPanic => 80,
            Self::TripleFault => 81,
            Self::Reset => 83,
        }
    }
}

/// A maskable interrupt that would be taken if the CPU accepts one.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum PendingInterrupt {
    /// None.
    None,
    /// The local APIC's. It may be left to the guest ([`crate::InterruptWindow::DeliverVirq`]), if it is accepted when it has been taken
    /// ([`Board::accept`]).
    Virq {
        /// Its vector.
        vector: u8,
        /// Nothing but it is requested or in service, and its end has no effect but itself.
        eoi_elidable: bool,
    },
    /// The 8259's, which says the vector when the CPU takes it.
    Pic,
    /// The local APIC's, which waits for a lower task priority.
    Masked,
}

/// An interrupt that the CPU takes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Acknowledged {
    /// Its vector.
    pub vector: u8,
    /// Its end has no effect but itself, and nothing else is requested.
    pub eoi_elidable: bool,
    /// Another one waits for the CPU to accept it.
    pub more: bool,
}

/// What waits for a virtual CPU.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Signals {
    /// The machine has ended.
    pub end: Option<Outcome>,
    /// A non-maskable interrupt. Reported once: the CPU keeps it.
    pub nmi: bool,
    /// A maskable interrupt.
    pub interrupt: PendingInterrupt,
    /// INIT: back to the state after reset, waiting for a start-up message. Reported once.
    pub init: bool,
    /// Start-up at page `n` for a CPU that waits for it. Reported once.
    pub startup: Option<u8>,
    /// The next thing that happens by itself.
    pub deadline: Nanos,
    /// The task priority as `CR8` shows it.
    pub cr8: u8,
}

/// Something the guest did that the machine does not know: counted, and logged once each.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Unknown {
    /// Read of an MSR.
    MsrRead(u32),
    /// Write of an MSR, or of a bad value to a known one.
    MsrWrite(u32, u64),
    /// An instruction that cannot be emulated, its first bytes and where it is.
    Instruction {
        /// Instruction pointer.
        rip: u64,
        /// First bytes, little-endian; absent ones are 0.
        bytes: u64,
    },
    /// An exit reason.
    Exit(u64),
    /// A hypercall.
    Hypercall(u64),
    /// Something else that ends or disturbs the guest.
    Other(&'static str, u64),
}

/// An instruction that the machine emulated.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Emulated {
    /// Done: go on at this address.
    Next(u64),
    /// A repeated string instruction that is not finished: go on at itself.
    Again,
    /// It raises this exception.
    Raise(Event),
    /// The emulator does not know it (reported already).
    Unknown,
}

/// The machine around a virtual CPU. `cpu` is the CPU's index.
pub trait Board {
    /// Guest memory.
    fn memory(&self) -> &GuestMemory;
    /// What `CPUID` says.
    fn cpuid(&self) -> &CpuidTable;
    /// Machine time.
    fn clock(&self) -> &TscClock;
    /// The host's time-stamp counter, now.
    fn host_tsc(&self) -> u64;
    /// Wall-clock time at machine time 0, in seconds since 1970.
    fn start_unix(&self) -> u64;

    /// `IN`.
    fn port_in(&mut self, port: u16, size: u8) -> u32;
    /// `OUT`.
    fn port_out(&mut self, port: u16, size: u8, value: u32);
    /// Reads memory where there is none: at most eight bytes of a device.
    fn memory_in(&mut self, cpu: usize, address: u64, size: u8) -> u64;
    /// Writes memory where there is none.
    fn memory_out(&mut self, cpu: usize, address: u64, size: u8, value: u64);
    /// Reads an MSR of the local APIC (base, TSC deadline, x2APIC registers); `None` raises `#GP(0)`.
    fn apic_read(&mut self, cpu: usize, msr: u32) -> Option<u64>;
    /// Writes an MSR of the local APIC; `None` raises `#GP(0)`.
    fn apic_write(&mut self, cpu: usize, msr: u32, value: u64) -> Option<()>;
    /// The task priority as `CR8` shows it, for a back end whose guests exit when they read it.
    fn cr8(&mut self, cpu: usize) -> u8;
    /// Sets the task priority through `CR8`: the guest has written it.
    fn set_cr8(&mut self, cpu: usize, value: u8);
    /// The guest's time-stamp counter is `tsc` now: the guest has set it.
    fn tsc_written(&mut self, cpu: usize, tsc: u64);
    /// Emulates the instruction that accessed memory where there is none.
    fn emulate_memory<V: Vcpu>(&mut self, cpu: usize, vcpu: &mut V, fault: MemoryFault)
    -> Emulated;
    /// Emulates `INS` or `OUTS`.
    fn emulate_io<V: Vcpu>(&mut self, cpu: usize, vcpu: &mut V, io: IoExit) -> Emulated;

    /// A hypercall of the guest's kernel, its number in `rax`: what is to be in `rax`; `None`: it does not exist.
    fn hypercall<V: Vcpu>(&mut self, vcpu: &mut V) -> Option<u64>;

    /// Gives a message to the CPUs with these APIC ids, whatever its destination. Says how many there are.
    fn multicast(&mut self, to: ApicIds, message: InterruptMessage) -> u32;

    /// Whether [`Board::service_timers`] has something to do or to tell since it was last called for this CPU.
    fn needs_service(&self, cpu: usize) -> bool;
    /// Lets everything that is due happen, and says what waits for the CPU.
    fn service_timers(&mut self, cpu: usize) -> Signals;
    /// The CPU takes the interrupt that waits.
    fn acknowledge(&mut self, cpu: usize) -> Option<Acknowledged>;
    /// The CPU has taken an interrupt of its local APIC by itself.
    fn accept_virq(&mut self, cpu: usize, vector: u8);
    /// The CPU has ended the interrupt in service, without a write to its local APIC.
    fn end_of_interrupt(&mut self, cpu: usize);
    /// Counts and (once) logs.
    fn unknown(&mut self, what: Unknown);
}
