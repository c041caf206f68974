//! State page of a vCPU on AArch64.
//!
//! General-purpose registers, program counter and processor state exist only here: the kernel loads
//! them on every entry and saves them on every exit. The other registers of EL1 are the group
//! [`group::SYSTEM`]. Hypercalls are `HVC` by EL1, with the number and the result in `x0` and the
//! argument in `x1`; the guest's kernel is at EL1. On an exit, [`VcpuState::pc`] is the address of
//! the instruction that has caused it, except for hypercalls and [`super::exit::HALT`], where it is
//! that of the next one.
//!
//! 32-bit vCPUs: a vCPU whose [`VcpuState::is_32_bit`] is not 0 is one of AArch32, where the
//! processor has that at EL1 ([`crate::boot::FEATURE_AARCH32`]). Its registers are where the
//! processor shows them to AArch64 (Arm ARM, D1.20): the general-purpose registers of all modes in
//! `x`, those of CP15 in [`VcpuState::system`] under the names of the registers of EL1 that they
//! share. The kernel has no hypercalls of its own for them. Exits whose cause is the guest are
//! [`exit::AARCH32`], except [`super::exit::HALT`].

use super::{RunControl, SharedU64};

/// State groups.
pub mod group {
    /// [`super::VcpuState::system`], `affinity`, `counter_offset` and `is_32_bit`. Only on request.
    pub const SYSTEM: u64 = 1 << 0;
    /// Interrupts that the CPU's interface has, active ones included, pending SGIs and the timer's.
    /// There are no fields for them: changed together with [`SYSTEM`], they are as after a reset.
    pub const INTERRUPTS: u64 = 1 << 1;
    /// Every group.
    pub const ALL: u64 = SYSTEM | INTERRUPTS;
}

/// Exit reasons of AArch64, besides [`super::exit`]. Unless stated otherwise
/// [`RunControl::exit_info`] is the syndrome (ESR_EL2).
pub mod exit {
    use super::super::exit::FIRST_OF_ARCH;

    /// Access to a system register that guests do not have, or that the VMM must emulate.
    pub const SYSTEM_REGISTER: u64 = FIRST_OF_ARCH;
    /// `SMC`.
    pub const SECURE_CALL: u64 = FIRST_OF_ARCH + 1;
    /// The guest has ended an interrupt with [`super::virq::REPORT_END`], whose number is
    /// [`super::RunControl::exit_info`].
    pub const VIRQ_ENDED: u64 = FIRST_OF_ARCH + 2;
    /// [`super::VcpuState::pstate`] is no state of EL0 or EL1, or not one of the vCPU's kind, 64 or
    /// 32 bits; the guest has not been entered.
    pub const INVALID_STATE: u64 = FIRST_OF_ARCH + 3;
    /// An instruction of a 32-bit vCPU, whose condition holds: an abort, whose guest-physical
    /// address is [`super::RunControl::fault_address`], an access to a coprocessor, `HVC`, `SMC` or
    /// another exception.
    pub const AARCH32: u64 = FIRST_OF_ARCH + 4;
}

/// Indices into [`VcpuState::system`]: registers of EL1, by their names in the manual.
pub mod system {
    #![allow(missing_docs)]
    pub const SCTLR_EL1: usize = 0;
    pub const CPACR_EL1: usize = 1;
    pub const TTBR0_EL1: usize = 2;
    pub const TTBR1_EL1: usize = 3;
    pub const TCR_EL1: usize = 4;
    pub const MAIR_EL1: usize = 5;
    pub const AMAIR_EL1: usize = 6;
    pub const VBAR_EL1: usize = 7;
    pub const ESR_EL1: usize = 8;
    pub const FAR_EL1: usize = 9;
    pub const AFSR0_EL1: usize = 10;
    pub const AFSR1_EL1: usize = 11;
    pub const ELR_EL1: usize = 12;
    pub const SPSR_EL1: usize = 13;
    pub const SP_EL1: usize = 14;
    pub const TPIDR_EL1: usize = 15;
    pub const TPIDRRO_EL0: usize = 16;
    pub const CONTEXTIDR_EL1: usize = 17;
    pub const PAR_EL1: usize = 18;
    pub const CSSELR_EL1: usize = 19;
    pub const CNTKCTL_EL1: usize = 20;
    pub const CNTV_CTL_EL0: usize = 21;
    pub const CNTV_CVAL_EL0: usize = 22;
    /// The first of the registers that only 32-bit vCPUs have.
    pub const FIRST_OF_32_BIT: usize = 23;
    pub const SPSR_ABT: usize = 23;
    pub const SPSR_UND: usize = 24;
    pub const SPSR_IRQ: usize = 25;
    pub const SPSR_FIQ: usize = 26;
    pub const DACR32_EL2: usize = 27;
    pub const IFSR32_EL2: usize = 28;
    pub const FPEXC32_EL2: usize = 29;
    /// Number of registers.
    pub const COUNT: usize = 30;
}

/// Format of the words of [`VcpuState::virqs`] and [`VcpuState::event_virqs`], and of
/// [`VcpuState::timer_virq`].
pub mod virq {
    /// Number of the interrupt (INTID), below 1020: other words are ignored. With a GICv2, bits 10
    /// to 12 are the CPU that has sent an SGI.
    pub const NUMBER: u64 = 0xffff;
    /// Lowest bit of the priority.
    pub const PRIORITY_SHIFT: u32 = 16;
    /// Mask of the priority, after the shift.
    pub const PRIORITY_MASK: u64 = 0xff;
    /// The vCPU exits when the guest has ended the interrupt: for level-triggered interrupts. The
    /// timer's has no such exit. The interrupt is not active before: one that a list register has
    /// as active becomes pending only.
    pub const REPORT_END: u64 = 1 << 30;
    /// The word has an interrupt.
    pub const VALID: u64 = 1 << 31;
    /// Number of words of each of the two arrays.
    pub const COUNT: usize = 4;
    /// Lowest bit of the event's number, in the words of [`super::VcpuState::event_virqs`].
    pub const EVENT_SHIFT: u32 = 32;
    /// Mask of the event's number, after the shift.
    pub const EVENT_MASK: u64 = 0x3f;
}

/// Guest-physical address of the registers of the CPU's interface in every VM, where the machine
/// has a GICv2 ([`crate::boot::FEATURE_GICV2`]).
pub const CPU_INTERFACE: u64 = 0x801_0000;
/// Length of these registers in bytes.
pub const CPU_INTERFACE_LENGTH: u64 = 0x2000;

/// Values of [`VcpuState::pstate`]: format of SPSR_EL2.
pub mod pstate {
    /// EL1 with its own stack pointer, interrupts masked.
    pub const EL1_MASKED: u64 = 0x3c5;
}

/// The state page. Kernel and VMM may write it at the same time, so every field is accessed as a
/// whole, and by shared references only.
#[derive(Debug, Default)]
#[repr(C, align(4096))]
pub struct VcpuState {
    /// General-purpose registers.
    pub x: [SharedU64; 31],
    /// Stack pointer of EL0 (SP_EL0).
    pub sp: SharedU64,
    /// Program counter.
    pub pc: SharedU64,
    /// Processor state, in the format of SPSR_EL2.
    pub pstate: SharedU64,
    /// Thread pointer (TPIDR_EL0).
    pub tpidr: SharedU64,
    /// Syndrome of the last exit (ESR_EL2). Out.
    pub syndrome: SharedU64,

    /// Exit, deadline, halt mode and counters.
    pub run: RunControl,

    /// Interrupts that become pending in the guest's GIC ([`virq`]), in group 1 of a GICv3 and in
    /// group 0 of a GICv2, whose interface to the CPU is at 0x801_0000 ([`CPU_INTERFACE`]). The
    /// kernel clears each as soon as the processor has it. The VMM writes a word that is 0: while
    /// the vCPU runs, it takes effect with [`crate::Op::VcpuNotify`]. In.
    pub virqs: [SharedU64; virq::COUNT],

    /// The interrupt ([`virq`]) of the guest's virtual timer. While the word has none, an interrupt
    /// of the timer stays pending. In.
    pub timer_virq: SharedU64,
    /// Counter value at which the guest's virtual timer interrupts; [`crate::FOREVER`] if it does
    /// not. Valid with [`super::exit::HALT`]. Out.
    pub timer_deadline: SharedU64,

    /// If not 0, the vCPU exits with [`super::exit::DEADLINE`] after each preemption of its thread
    /// ([`RunControl::preemptions`]), before the guest continues: the kernel sets
    /// [`RunControl::deadline`] to 0. In.
    pub exit_after_preemption: SharedU64,

    /// SGIs that the guest has enabled, in group 1: a bit each. Those the kernel may deliver
    /// without the VMM ([`crate::Op::VmSgiTarget`]); a vCPU's to itself always. In.
    pub sgi_enabled: SharedU64,
    /// Priorities of the SGIs: a byte each, that of SGI 0 being the lowest one. In.
    pub sgi_priorities: [SharedU64; 2],

    /// Events of the vCPU's notification that become interrupts ([`virq`]) of the guest: a word has
    /// the number of the event's bit, too. The kernel takes these events from the notification and
    /// makes the interrupts pending, and a wait of the guest ends, without an exit. All others are
    /// exits ([`super::exit::RECALL`]), and so is an event whose word has no interrupt. In.
    pub event_virqs: [SharedU64; virq::COUNT],

    /// Registers of EL1 ([`system`]).
    pub system: [SharedU64; system::COUNT],
    /// Affinity that the guest reads in MPIDR_EL1.
    pub affinity: SharedU64,
    /// Subtracted from the counter that the guest reads in CNTVCT_EL0 (CNTVOFF_EL2).
    pub counter_offset: SharedU64,
    /// Not 0: the vCPU is a 32-bit one. Belongs to [`group::SYSTEM`]. `VcpuRun` fails with
    /// `Unsupported` where the processor has no AArch32 at EL1.
    pub is_32_bit: SharedU64,
    reserved: SharedU64,

    /// Registers of floating point and SIMD, while no CPU has them. The kernel keeps them here.
    pub vectors: [[SharedU64; 2]; 32],
    /// FPCR and FPSR, likewise.
    pub float_control: [SharedU64; 2],
}

const _: () = assert!(core::mem::size_of::<VcpuState>() == 4096);
const _: () = assert!(core::mem::offset_of!(VcpuState, x) == 0);
const _: () = assert!(core::mem::offset_of!(VcpuState, syndrome) == 35 * 8);
