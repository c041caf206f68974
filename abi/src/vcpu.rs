//! State page of a vCPU on x86-64, shared between the kernel and the VMM.
//!
//! General-purpose registers exist only here: the world switch loads and saves them in place. Other
//! state is copied in *groups*: on exit the kernel fills the groups that the exit needs and sets
//! [`VcpuState::valid`]; before the next `vcpu_run` the VMM sets [`VcpuState::dirty`] for the
//! groups that it has changed. Field and attribute formats are those of the VMCB (AMD APM vol. 2,
//! appendix B).

use core::sync::atomic::Ordering::Relaxed;
use core::sync::atomic::{AtomicU8, AtomicU64};

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
    /// Every group.
    pub const ALL: u64 = 0x7ff;
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

/// Exit codes of the kernel, in addition to the processor's (`EXITCODE`, AMD APM vol. 2, appendix
/// C).
pub mod exit {
    /// The vCPU's notification has events, which are in [`super::VcpuState::events`]. Without
    /// events: a host interrupt hit the guest in an interrupt shadow, which the processor may lose
    /// on the next entry.
    pub const RECALL: u64 = 0x1_0000_0000;
    /// [`super::VcpuState::deadline`] has passed.
    pub const DEADLINE: u64 = 0x1_0000_0001;
    /// The requested interrupt window is open.
    pub const WINDOW: u64 = 0x1_0000_0002;
    /// The guest executed `HLT`, and the kernel waited ([`super::VcpuState::halt`]) until the
    /// vCPU's notification had events, which are in [`super::VcpuState::events`], or without events
    /// until [`super::VcpuState::deadline`].
    pub const HALTED: u64 = 0x1_0000_0003;
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

/// `rax` of a `VMMCALL` handled by the kernel: returns [`crate::ABI_VERSION`] in `rax`.
pub const HYPERCALL_VERSION: u64 = 0x5041_5241_0000;
/// `rax` of a `VMMCALL` that rings the doorbell with the index in `rbx`. Handled by the kernel,
/// with a result of [`doorbell`] in `rax`, if CPL is 0; else the VMM gets the exit.
pub const HYPERCALL_DOORBELL: u64 = 0x5041_5241_0001;
/// Number of doorbells of a VM.
pub const DOORBELLS: usize = 4;

/// Results of [`HYPERCALL_DOORBELL`].
pub mod doorbell {
    /// The doorbell's notification was signalled.
    pub const RUNG: u64 = 0;
    /// No such doorbell, or it is not bound to an existing notification.
    pub const UNBOUND: u64 = 1;
}

/// A word of type `u8` in memory that kernel and VMM share.
#[derive(Debug, Default)]
#[repr(transparent)]
pub struct SharedU8(AtomicU8);

impl SharedU8 {
    /// Reads the word once.
    #[inline(always)]
    pub fn get(&self) -> u8 {
        self.0.load(Relaxed)
    }

    /// Writes the word once.
    #[inline(always)]
    pub fn set(&self, value: u8) {
        self.0.store(value, Relaxed);
    }
}

/// A word of type `u64` in memory that kernel and VMM share.
#[derive(Debug, Default)]
#[repr(transparent)]
pub struct SharedU64(AtomicU64);

impl SharedU64 {
    /// Reads the word once.
    #[inline(always)]
    pub fn get(&self) -> u64 {
        self.0.load(Relaxed)
    }

    /// Writes the word once.
    #[inline(always)]
    pub fn set(&self, value: u64) {
        self.0.store(value, Relaxed);
    }

    /// Adds to the word. Reads and writes it once each, not as one atomic operation: for counters
    /// with one writer.
    #[inline(always)]
    pub fn add(&self, value: u64) {
        self.set(self.get().wrapping_add(value));
    }
}

/// A segment register in VMCB format ([`Segment`]), in memory that kernel and VMM share.
#[derive(Debug, Default)]
#[repr(C)]
pub struct SharedSegment {
    /// Selector in bits 15:0, attributes in bits 31:16, limit in bits 63:32.
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
            attrib: (access >> 16) as u16,
            limit: (access >> 32) as u32,
            base: self.base.get(),
        }
    }

    /// Writes each word once.
    #[inline(always)]
    pub fn set(&self, value: Segment) {
        let Segment { selector, attrib, limit, base } = value;
        self.access.set(selector as u64 | (attrib as u64) << 16 | (limit as u64) << 32);
        self.base.set(base);
    }
}

/// A segment register in VMCB format.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct Segment {
    /// Selector.
    pub selector: u16,
    /// Attributes: descriptor bits 47:40 in bits 7:0, bits 55:52 in bits 11:8.
    pub attrib: u16,
    /// Limit in bytes, granularity applied.
    pub limit: u32,
    /// Base address.
    pub base: u64,
}

/// The state page. Kernel and VMM may write it at the same time, so every field is accessed as a
/// whole, and by shared references only.
#[repr(C, align(4096))]
pub struct VcpuState {
    /// General-purpose registers in encoding order ([`gpr`]); slot 4 is unused.
    pub gpr: [SharedU64; 16],

    /// `EXITCODE` or one of [`exit`]. Out.
    pub exit_code: SharedU64,
    /// `EXITINFO1`. Out.
    pub exit_info1: SharedU64,
    /// `EXITINFO2`. Out.
    pub exit_info2: SharedU64,
    /// `nRIP`, address of the next instruction; 0 if the processor does not report it. Out.
    pub next_rip: SharedU64,
    /// Number of valid bytes in `bytes`; 0 if the processor does not report them. Out.
    pub bytes_len: SharedU64,
    /// Bytes of the faulting instruction (nested page faults, decode assist). Out.
    pub bytes: [SharedU8; 16],
    /// Events taken from the notification with [`exit::RECALL`] or [`exit::HALTED`]. Out.
    pub events: SharedU64,

    /// Groups that the kernel filled on this exit. Out.
    pub valid: SharedU64,
    /// Groups that the VMM has changed; cleared by the kernel. In.
    pub dirty: SharedU64,
    /// Absolute TSC value at which to exit with [`exit::DEADLINE`] or [`exit::HALTED`];
    /// [`crate::FOREVER`] for none. Read on every `vcpu_run`. In.
    pub deadline: SharedU64,

    /// Event to inject on the next entry, in `EVENTINJ` format. On exit: the event whose delivery
    /// the exit interrupted (`EXITINTINFO`), or 0. The VMM must inject it again.
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
    /// `EFER` without `SVME`, which the kernel adds.
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

    /// Number of world switches into this vCPU. Out.
    pub entries: SharedU64,
    /// Exits handled in the kernel, without the VMM: host interrupts, kernel hypercalls. Out.
    pub handled_in_kernel: SharedU64,
    /// If not 0 and the guest halts with nothing to inject and no window, the kernel waits for an
    /// event or the deadline and exits with [`exit::HALTED`]. Otherwise, or if it cannot wait, the
    /// VMM gets the exit at once. In.
    pub halt: SharedU64,
    /// TSC ticks that the kernel has waited in this way. Out.
    pub halted: SharedU64,
    /// Number of times that the scheduler preempted the vCPU's thread while it was in the guest.
    /// Out.
    pub preemptions: SharedU64,

    /// Task priority (CR8), 0 to 15. The guest reads and writes it without an exit.
    pub cr8: SharedU64,
    /// SSE registers, 16 bytes each.
    pub xmm: [[SharedU64; 2]; 16],
}

impl VcpuState {
    /// Encoding index of `cs` in [`VcpuState::segments`].
    pub const CS: usize = 1;
    /// Encoding index of `ss` in [`VcpuState::segments`].
    pub const SS: usize = 2;
}

const _: () = assert!(core::mem::size_of::<VcpuState>() == 4096);
const _: () = assert!(core::mem::offset_of!(VcpuState, gpr) == 0);
