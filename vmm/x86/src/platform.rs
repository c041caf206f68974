//! The interface of the platform (machine model) around an x86 vCPU.

use vmm_vcpu::{MemoryFault, Platform};

use crate::apic::InterruptMessage;
use crate::control::DecodedControl;
use crate::cpuid::CpuidTable;
use crate::exit::IoExit;
use crate::pv::ApicIds;
use crate::vcpu::{Event, X86Vcpu};

/// A maskable interrupt to deliver once the CPU accepts one.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum PendingInterrupt {
    /// No interrupt.
    None,
    /// An interrupt of the local APIC. It may be delivered without an exit
    /// ([`crate::InterruptWindow::DeliverVirq`]); the run loop reports delivery with
    /// [`PcPlatform::accept_virq`].
    Virq {
        /// Vector of the interrupt.
        vector: u8,
        /// No other interrupt is requested or in service, and the EOI has no further effect: the
        /// guest may complete it without an exit.
        eoi_elidable: bool,
    },
    /// An interrupt of the 8259, which provides the vector on acknowledgement.
    Pic,
    /// An interrupt of the local APIC below the task priority.
    Masked,
}

/// An interrupt that the CPU acknowledged.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Acknowledged {
    /// Its vector.
    pub vector: u8,
    /// The EOI has no further effect and no other interrupt is requested.
    pub eoi_elidable: bool,
    /// Another interrupt is pending.
    pub more: bool,
}

/// Interrupts pending for a vCPU.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Interrupts {
    /// An NMI. Reported once: the run loop keeps it.
    pub nmi: bool,
    /// A maskable interrupt.
    pub maskable: PendingInterrupt,
    /// INIT: reset the CPU and wait for a start-up IPI. Reported once.
    pub init: bool,
    /// Start-up IPI with page `n` for a CPU that waits for it. Reported once.
    pub startup: Option<u8>,
    /// Task priority as read from `CR8`.
    pub cr8: u8,
    /// Bits 3:0 of the task priority are not 0. A write of `CR8` clears them, even one of the same
    /// value.
    pub tpr_low: bool,
}

/// A guest operation that the VM does not support: counted, and logged once each.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Unknown {
    /// Read of an MSR.
    MsrRead(u32),
    /// Write of an unknown MSR, or of an invalid value to a known one.
    MsrWrite(u32, u64),
    /// An instruction that cannot be emulated, with its first bytes and address.
    Instruction {
        /// Instruction pointer.
        rip: u64,
        /// First bytes, little-endian; missing bytes are 0.
        bytes: u64,
    },
    /// An unknown exit reason.
    Exit(u64),
    /// An unknown hypercall.
    Hypercall(u64),
    /// Any other event that ends or disturbs the guest.
    Other(&'static str, u64),
}

/// Result of emulating an instruction.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Emulated {
    /// Completed: continue at this address.
    Next(u64),
    /// A repeated string instruction that is not finished: continue at the same address.
    Again,
    /// The instruction raises this exception.
    Raise(Event),
    /// The emulator does not support it (already reported).
    Unknown,
}

/// The platform around an x86 vCPU. `cpu` is the CPU's index.
pub trait PcPlatform: Platform<Interrupts = Interrupts> {
    /// `CPUID` results.
    fn cpuid(&self) -> &CpuidTable;

    /// Reads a port (`IN`).
    fn port_in(&mut self, port: u16, size: u8) -> u32;
    /// Writes a port (`OUT`).
    fn port_out(&mut self, port: u16, size: u8, value: u32);
    /// Reads an MSR of the local APIC (base, TSC deadline, x2APIC registers); `None`: `#GP(0)`.
    fn apic_read(&mut self, cpu: usize, msr: u32) -> Option<u64>;
    /// Writes an MSR of the local APIC; `None` raises `#GP(0)`.
    fn apic_write(&mut self, cpu: usize, msr: u32, value: u64) -> Option<()>;
    /// Task priority as read from `CR8`, for a back end whose guest exits on reads.
    fn cr8(&mut self, cpu: usize) -> u8;
    /// Sets the task priority after a guest write to `CR8`.
    fn set_cr8(&mut self, cpu: usize, value: u8);
    /// Reports that the guest has set its time-stamp counter to `tsc`.
    fn tsc_written(&mut self, cpu: usize, tsc: u64);
    /// Emulates the instruction that accessed an address without memory.
    fn emulate_memory<V: X86Vcpu>(
        &mut self,
        cpu: usize,
        vcpu: &mut V,
        fault: MemoryFault,
    ) -> Emulated;
    /// Emulates `INS` or `OUTS`.
    fn emulate_io<V: X86Vcpu>(&mut self, cpu: usize, vcpu: &mut V, io: IoExit) -> Emulated;

    /// Decodes the instruction that accesses a control register or invalidates a page, and checks
    /// its privilege.
    ///
    /// # Errors
    /// The result of an instruction that needs no further action: `SMSW`, one that faults, or
    /// another instruction.
    fn decode_control<V: X86Vcpu>(
        &mut self,
        cpu: usize,
        vcpu: &mut V,
    ) -> Result<DecodedControl, Emulated>;

    /// Handles a hypercall of the guest kernel, number in `rax`. Returns the result for `rax`;
    /// `None` if the hypercall does not exist.
    fn hypercall<V: X86Vcpu>(&mut self, vcpu: &mut V) -> Option<u64>;

    /// Delivers a message to the CPUs with these APIC ids, ignoring its destination. Returns the
    /// number of CPUs.
    fn multicast(&mut self, to: ApicIds, message: InterruptMessage) -> u32;

    /// Acknowledges the pending interrupt.
    fn acknowledge(&mut self, cpu: usize) -> Option<Acknowledged>;
    /// Reports that the CPU has taken a virtual interrupt of its local APIC without an exit.
    fn accept_virq(&mut self, cpu: usize, vector: u8);
    /// Reports that the CPU has completed the interrupt in service without an access to its local
    /// APIC.
    fn end_of_interrupt(&mut self, cpu: usize);
    /// Counts an unsupported operation and logs it once.
    fn unknown(&mut self, what: Unknown);
}
