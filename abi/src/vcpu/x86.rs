//! State page of a vCPU on x86-64.
//!
//! General-purpose registers exist only here: the world switch loads and saves them in place.
//! Hypercalls are `VMMCALL` (or `VMCALL`), with the number and the result in `rax` and the argument
//! in `rbx`. The guest's kernel is at CPL 0.

use super::{RunControl, SharedU8, SharedU64};

/// State groups.
pub mod group {
    /// `rip`, `rsp`, `rflags`, `interrupt_shadow`.
    pub const IP: u64 = 1 << 0;
    /// `cr0`, `cr2`, `cr3`, `cr4`, `efer`, `cpl`.
    pub const CONTROL: u64 = 1 << 1;
    /// All segment and descriptor-table registers except `cs`.
    pub const SEGMENTS: u64 = 1 << 2;
    /// `star` … `pat`.
    pub const MSRS: u64 = 1 << 3;
    /// `dr6`, `dr7`.
    pub const DEBUG: u64 = 1 << 4;
    /// `tsc_offset`.
    pub const TSC: u64 = 1 << 5;
    /// `xcr0`.
    pub const XCR0: u64 = 1 << 6;
    /// `inject`, `window`. Always valid on exit, always applied on entry.
    pub const INJECT: u64 = 1 << 7;
    /// `cs`.
    pub const CODE: u64 = 1 << 8;
    /// `cr8`. Always valid on exit.
    pub const PRIORITY: u64 = 1 << 9;
    /// `xmm`. Only on request.
    pub const VECTORS: u64 = 1 << 10;
    /// Every group of registers.
    pub const ALL: u64 = 0x7ff;
    /// [`super::VcpuState::invalidate`]: the kernel drops its translation. Never valid on exit.
    pub const INVALIDATE: u64 = 1 << 11;
}

/// Indices into [`VcpuState::gpr`], in instruction-encoding order.
pub mod gpr {
    #![allow(missing_docs)]
    pub const RAX: usize = 0;
    pub const RCX: usize = 1;
    pub const RDX: usize = 2;
    pub const RBX: usize = 3;
    /// `gpr[RSP]` is not used by the world switch; the stack pointer is [`super::VcpuState::rsp`].
    pub const RSP: usize = 4;
    pub const RBP: usize = 5;
    pub const RSI: usize = 6;
    pub const RDI: usize = 7;
}

/// Exit reasons of x86-64, besides [`super::exit`].
pub mod exit {
    use super::super::exit::FIRST_OF_ARCH;

    /// The requested interrupt window is open.
    pub const WINDOW: u64 = FIRST_OF_ARCH;
    /// Triple fault.
    pub const SHUTDOWN: u64 = FIRST_OF_ARCH + 1;
    /// `CPUID`.
    pub const CPUID: u64 = FIRST_OF_ARCH + 2;
    /// `IN`, `OUT`, `INS` or `OUTS`, described by [`super::port`].
    pub const PORT: u64 = FIRST_OF_ARCH + 3;
    /// `RDMSR` (information 0) or `WRMSR` (1).
    pub const MSR: u64 = FIRST_OF_ARCH + 4;
    /// Access to a control register, described by [`super::control_register`].
    pub const CONTROL_REGISTER: u64 = FIRST_OF_ARCH + 5;
    /// Intercepted exception: vector in bits 7:0 of the information, error code in bits 63:32 (0 if
    /// it has none). A page fault (only with a vTLB, and only if it interrupted the delivery of
    /// another event): its `CR2` in [`super::super::RunControl::fault_address`].
    pub const EXCEPTION: u64 = FIRST_OF_ARCH + 6;
    /// `XSETBV`.
    pub const XSETBV: u64 = FIRST_OF_ARCH + 7;
    /// `INVD`, `WBINVD`, `WBNOINVD`.
    pub const CACHE_FLUSH: u64 = FIRST_OF_ARCH + 8;
    /// `PAUSE`, executed often enough to exit.
    pub const PAUSE: u64 = FIRST_OF_ARCH + 9;
    /// An instruction that guests do not have: `MONITOR`, `MWAIT`, `RDPRU`, `RSM`, and those of the
    /// virtualization extension.
    pub const UNDEFINED: u64 = FIRST_OF_ARCH + 10;
    /// An instruction that guests have but must not execute: `RDPMC`.
    pub const PROTECTED: u64 = FIRST_OF_ARCH + 11;
    /// `IRET`, before its execution ([`super::window::IRET`]).
    pub const IRET: u64 = FIRST_OF_ARCH + 12;
    /// A hardware task switch.
    pub const TASK_SWITCH: u64 = FIRST_OF_ARCH + 13;
    /// The processor refuses the guest's state. The information is the processor's code.
    pub const INVALID_STATE: u64 = FIRST_OF_ARCH + 14;
    /// `INVLPG`, in a form that the kernel does not decode. Only with a vTLB.
    pub const INVALIDATE: u64 = FIRST_OF_ARCH + 15;
}

/// Fields of the information of [`exit::PORT`].
pub mod port {
    /// The access is an input; else an output.
    pub const IN: u64 = 1 << 0;
    /// `INS` or `OUTS`.
    pub const STRING: u64 = 1 << 2;
    /// With a `REP` prefix.
    pub const REP: u64 = 1 << 3;
    /// Lowest bit of the size in bytes (three bits): 1, 2 or 4.
    pub const SIZE_SHIFT: u32 = 4;
    /// Mask of the size, after the shift.
    pub const SIZE_MASK: u64 = 7;
    /// Lowest bit of the port number (16 bits).
    pub const PORT_SHIFT: u32 = 16;
}

/// Fields of the information of [`exit::CONTROL_REGISTER`].
pub mod control_register {
    /// Register number.
    pub const REGISTER: u64 = 15;
    /// The register is written; else read. Writes of CR0 are also `LMSW` and `CLTS`.
    pub const WRITE: u64 = 1 << 4;
}

/// Format of [`VcpuState::vtlb`]: optimisations of a vTLB, each above the ones before.
pub mod vtlb {
    /// Global translations survive a load of CR3.
    pub const GLOBAL: u64 = 1 << 0;
    /// A flush compares translations with the guest's tables and drops only those that differ.
    pub const SYNC: u64 = 1 << 1;
    /// A flush compares only tables that the guest has written.
    pub const TRACE: u64 = 1 << 2;
    /// With [`TRACE`]: write faults show written tables, instead of the processor's dirty bits.
    pub const TRACE_WRITES: u64 = 1 << 3;
    /// An address-space identifier stays with each space.
    pub const ASID: u64 = 1 << 4;
    /// Single translations are invalidated in the TLB.
    pub const INVALIDATE_PAGE: u64 = 1 << 5;
    /// Lowest bit of the number of spaces that are kept (8 bits; 0 counts as 1).
    pub const SPACES_SHIFT: u32 = 8;
}

/// Indices into [`VcpuState::vtlb_counters`].
pub mod vtlb_counter {
    /// Translations filled.
    pub const FILLS: usize = 0;
    /// Page faults that the guest's tables cause.
    pub const FAULTS: usize = 1;
    /// Loads of CR3.
    pub const LOADS: usize = 2;
    /// `INVLPG`.
    pub const INVALIDATIONS: usize = 3;
    /// Tables evicted.
    pub const EVICTIONS: usize = 4;
    /// Tables compared with the guest's.
    pub const SYNCS: usize = 5;
    /// Address-space identifiers assigned.
    pub const ASIDS: usize = 6;
    /// Flushes of everything.
    pub const FLUSHES: usize = 7;
    /// Number of counters.
    pub const COUNT: usize = 8;
}

/// Format of [`VcpuState::inject`]: an interrupt or exception.
pub mod event {
    /// Vector.
    pub const VECTOR: u64 = 0xff;
    /// Mask of the kind.
    pub const KIND: u64 = 7 << 8;
    /// Kind: maskable interrupt.
    pub const INTERRUPT: u64 = 0 << 8;
    /// Kind: non-maskable interrupt.
    pub const NMI: u64 = 2 << 8;
    /// Kind: exception.
    pub const EXCEPTION: u64 = 3 << 8;
    /// Kind: software interrupt.
    pub const SOFTWARE: u64 = 4 << 8;
    /// An error code is in bits 63:32.
    pub const HAS_CODE: u64 = 1 << 11;
    /// There is an event.
    pub const VALID: u64 = 1 << 31;
    /// Lowest bit of the error code.
    pub const CODE_SHIFT: u32 = 32;
}

/// Access rights of a segment ([`Segment::access_rights`]), in the order of a segment descriptor. A
/// segment without `PRESENT` is unusable.
pub mod access_rights {
    /// Type: descriptor bits 43:40.
    pub const TYPE: u16 = 0xf;
    /// Code or data segment; else a system segment.
    pub const CODE_OR_DATA: u16 = 1 << 4;
    /// Descriptor privilege level: two bits.
    pub const DPL: u16 = 3 << 5;
    /// Present.
    pub const PRESENT: u16 = 1 << 7;
    /// Available to software.
    pub const AVAILABLE: u16 = 1 << 8;
    /// 64-bit code segment.
    pub const LONG: u16 = 1 << 9;
    /// Default operand size of 32 bits.
    pub const DEFAULT_BIG: u16 = 1 << 10;
    /// The descriptor's limit counts pages.
    pub const GRANULARITY: u16 = 1 << 11;
    /// Every defined bit.
    pub const ALL: u16 = 0xfff;
}

/// Values of [`VcpuState::window`].
pub mod window {
    /// Exit with [`super::exit::WINDOW`] as soon as the guest can take an interrupt.
    pub const EXIT: u64 = 1 << 8;
    /// Deliver an interrupt without an exit, ignoring the task priority. Bits 7:0: vector.
    pub const DELIVER_VIRQ: u64 = 1 << 9;
    /// Exit when the guest writes CR8, until this bit is cleared; alone or combined with one of the
    /// others, which imply it.
    pub const PRIORITY: u64 = 1 << 10;
    /// Exit at the guest's next `IRET`, before its execution, until this bit is cleared; alone or
    /// combined with the others.
    pub const IRET: u64 = 1 << 11;
    /// Bits that the kernel does not clear.
    pub const PERSISTENT: u64 = PRIORITY | IRET;
}

/// A segment register ([`Segment`]) in memory that kernel and VMM share.
#[derive(Debug, Default)]
#[repr(C)]
pub struct SharedSegment {
    /// Selector in bits 15:0, access rights in bits 31:16, limit in bits 63:32.
    pub access: SharedU64,
    /// Base address.
    pub base: SharedU64,
}

impl SharedSegment {
    /// Reads each word once.
    #[inline(always)]
    pub fn get(&self) -> Segment {
        let access = self.access.get();
        Segment {
            selector: access as u16,
            access_rights: (access >> 16) as u16,
            limit: (access >> 32) as u32,
            base: self.base.get(),
        }
    }

    /// Writes each word once.
    #[inline(always)]
    pub fn set(&self, value: Segment) {
        let Segment { selector, access_rights, limit, base } = value;
        self.access.set(selector as u64 | (access_rights as u64) << 16 | (limit as u64) << 32);
        self.base.set(base);
    }
}

/// A segment register.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct Segment {
    /// Selector.
    pub selector: u16,
    /// Access rights ([`access_rights`]).
    pub access_rights: u16,
    /// Limit in bytes, granularity applied.
    pub limit: u32,
    /// Base address.
    pub base: u64,
}

/// The state page. Kernel and VMM may write it at the same time, so every field is accessed as a
/// whole, and by shared references only.
#[derive(Debug, Default)]
#[repr(C, align(4096))]
pub struct VcpuState {
    /// General-purpose registers in encoding order ([`gpr`]); slot 4 is unused.
    pub gpr: [SharedU64; 16],

    /// Exit, deadline, halt mode and counters.
    pub run: RunControl,
    /// Address of the next instruction; 0 if the processor does not report it. Out.
    pub next_rip: SharedU64,
    /// Number of valid bytes in `bytes`; 0 if the processor does not report them. Out.
    pub bytes_len: SharedU64,
    /// Bytes of the instruction that caused a memory fault. Out.
    pub bytes: [SharedU8; 16],

    /// Event to inject on the next entry ([`event`]). On exit: the event whose delivery the exit
    /// interrupted, or 0. The VMM must inject it again.
    pub inject: SharedU64,
    /// Action when the guest can take an interrupt, one of [`window`]; 0: none. The kernel clears
    /// it when done, except [`window::PERSISTENT`].
    pub window: SharedU64,

    /// Instruction pointer.
    pub rip: SharedU64,
    /// Stack pointer.
    pub rsp: SharedU64,
    /// Flags register.
    pub rflags: SharedU64,
    /// Bit 0: the guest is in an interrupt shadow (`STI`, `MOV SS`).
    pub interrupt_shadow: SharedU64,

    /// Control register 0.
    pub cr0: SharedU64,
    /// Page-fault address.
    pub cr2: SharedU64,
    /// Page-table root.
    pub cr3: SharedU64,
    /// Control register 4.
    pub cr4: SharedU64,
    /// `EFER`, without bits of the virtualization extension, which the kernel adds.
    pub efer: SharedU64,
    /// Current privilege level.
    pub cpl: SharedU64,

    /// `es, cs, ss, ds, fs, gs`, in encoding order.
    pub segments: [SharedSegment; 6],
    /// Global descriptor table.
    pub gdtr: SharedSegment,
    /// Local descriptor table.
    pub ldtr: SharedSegment,
    /// Interrupt descriptor table.
    pub idtr: SharedSegment,
    /// Task register.
    pub tr: SharedSegment,

    /// `STAR`.
    pub star: SharedU64,
    /// `LSTAR`.
    pub lstar: SharedU64,
    /// `CSTAR`.
    pub cstar: SharedU64,
    /// `SFMASK`.
    pub sfmask: SharedU64,
    /// `KernelGSbase`.
    pub kernel_gs_base: SharedU64,
    /// `SYSENTER_CS`.
    pub sysenter_cs: SharedU64,
    /// `SYSENTER_ESP`.
    pub sysenter_esp: SharedU64,
    /// `SYSENTER_EIP`.
    pub sysenter_eip: SharedU64,
    /// Guest `PAT`.
    pub pat: SharedU64,

    /// Debug status.
    pub dr6: SharedU64,
    /// Debug control.
    pub dr7: SharedU64,
    /// Offset added to the TSC that the guest reads.
    pub tsc_offset: SharedU64,
    /// Extended-state components that the guest has enabled; bits that the machine lacks are
    /// refused.
    pub xcr0: SharedU64,

    /// Task priority (CR8), 0 to 15. The guest reads and writes it without an exit.
    pub cr8: SharedU64,
    /// SSE registers, 16 bytes each.
    pub xmm: [[SharedU64; 2]; 16],

    /// Optimisations of the vTLB ([`vtlb`]); read on every `vcpu_run`. In.
    pub vtlb: SharedU64,
    /// Linear address whose translation the kernel drops ([`group::INVALIDATE`]). In.
    pub invalidate: SharedU64,
    /// Counters of the vTLB ([`vtlb_counter`]). Out.
    pub vtlb_counters: [SharedU64; vtlb_counter::COUNT],
}

impl VcpuState {
    /// Encoding index of `cs` in [`VcpuState::segments`].
    pub const CS: usize = 1;
    /// Encoding index of `ss` in [`VcpuState::segments`].
    pub const SS: usize = 2;
}

const _: () = assert!(core::mem::size_of::<VcpuState>() == 4096);
const _: () = assert!(core::mem::offset_of!(VcpuState, gpr) == 0);
const _: () = assert!(
    access_rights::ALL
        == access_rights::TYPE
            | access_rights::CODE_OR_DATA
            | access_rights::DPL
            | access_rights::PRESENT
            | access_rights::AVAILABLE
            | access_rights::LONG
            | access_rights::DEFAULT_BIG
            | access_rights::GRANULARITY
);
