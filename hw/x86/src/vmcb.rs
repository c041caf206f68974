//! Virtual machine control block of AMD SVM: APM vol. 2 (24593), chapter 15 and appendix B
//! (layout), appendix C (exit codes).
//!
//! The fields are cells, because the processor writes them while a guest runs.

use core::cell::Cell;
use core::mem::{offset_of, size_of};

/// A segment register in the state save area (APM vol. 2, table B-2).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct VmcbSegment {
    /// Selector.
    pub selector: u16,
    /// Attributes: descriptor bits 47:40 in 7:0, bits 55:52 in 11:8.
    pub attrib: u16,
    /// Limit in bytes.
    pub limit: u32,
    /// Base address.
    pub base: u64,
}

/// A segment register in the state save area, as two words (APM vol. 2, table B-2).
#[repr(C)]
pub struct SavedSegment {
    /// Selector in bits 15:0, attributes in bits 31:16, limit in bits 63:32.
    pub access: Cell<u64>,
    /// Base address.
    pub base: Cell<u64>,
}

/// Control area (APM vol. 2, table B-1).
#[allow(missing_docs, reason = "the fields carry the manual's names")]
#[repr(C)]
pub struct ControlArea {
    /// Offset 000h: intercepts of CR reads (15:0) and writes (31:16).
    pub intercept_cr: Cell<u32>,
    /// Offset 004h: intercepts of DR reads and writes.
    pub intercept_dr: Cell<u32>,
    /// Offset 008h: intercepted exceptions, one bit per vector.
    pub intercept_exceptions: Cell<u32>,
    /// Offset 00Ch: [`intercept3`].
    pub intercept3: Cell<u32>,
    /// Offset 010h: [`intercept4`].
    pub intercept4: Cell<u32>,
    pub intercept5: Cell<u32>,
    reserved_018: [u8; 0x24],
    /// Offset 03Ch.
    pub pause_filter_threshold: Cell<u16>,
    pub pause_filter_count: Cell<u16>,
    /// Offset 040h: physical address of the I/O permission map (12 KiB).
    pub iopm_base_pa: Cell<u64>,
    /// Offset 048h: physical address of the MSR permission map (8 KiB).
    pub msrpm_base_pa: Cell<u64>,
    pub tsc_offset: Cell<u64>,
    /// Offset 058h: address space identifier; 0 is reserved for the host.
    pub guest_asid: Cell<u32>,
    /// Offset 05Ch: [`tlb_control`].
    pub tlb_control: Cell<u32>,
    /// Offset 060h: virtual interrupt control, [`v_intr`].
    pub v_intr: Cell<u64>,
    /// Offset 068h: bit 0 interrupt shadow, bit 1 guest interrupt mask.
    pub interrupt_shadow: Cell<u64>,
    pub exit_code: Cell<u64>,
    pub exit_info1: Cell<u64>,
    pub exit_info2: Cell<u64>,
    /// Offset 088h: event whose delivery the exit interrupted, [`event`].
    pub exit_int_info: Cell<u64>,
    /// Offset 090h: bit 0 NP_ENABLE.
    pub nested_control: Cell<u64>,
    pub avic_apic_bar: Cell<u64>,
    pub ghcb_pa: Cell<u64>,
    /// Offset 0A8h: event to inject, [`event`].
    pub event_inj: Cell<u64>,
    /// Offset 0B0h: physical address of the nested page table root.
    pub n_cr3: Cell<u64>,
    /// Offset 0B8h: bit 0 LBR virtualization.
    pub lbr_control: Cell<u64>,
    /// Offset 0C0h: clean bits; a set bit marks an unchanged group that the processor may have
    /// cached.
    pub clean: Cell<u64>,
    /// Offset 0C8h: address of the next instruction, if the processor saves it.
    pub n_rip: Cell<u64>,
    /// Offset 0D0h: number of valid bytes in `instruction_bytes`.
    pub fetched_bytes: Cell<u8>,
    pub instruction_bytes: Cell<[u8; 15]>,
    reserved_0e0: [u8; 0x400 - 0xe0],
}

/// State save area (APM vol. 2, table B-2).
#[allow(missing_docs, reason = "the fields carry the manual's names")]
#[repr(C)]
pub struct SaveArea {
    /// `es, cs, ss, ds, fs, gs`.
    pub segments: [SavedSegment; 6],
    pub gdtr: SavedSegment,
    pub ldtr: SavedSegment,
    pub idtr: SavedSegment,
    pub tr: SavedSegment,
    reserved_0a0: [u8; 0xcb - 0xa0],
    pub cpl: Cell<u8>,
    reserved_0cc: u32,
    pub efer: Cell<u64>,
    reserved_0d8: [u8; 0x148 - 0xd8],
    pub cr4: Cell<u64>,
    pub cr3: Cell<u64>,
    pub cr0: Cell<u64>,
    pub dr7: Cell<u64>,
    pub dr6: Cell<u64>,
    pub rflags: Cell<u64>,
    pub rip: Cell<u64>,
    reserved_180: [u8; 0x1d8 - 0x180],
    pub rsp: Cell<u64>,
    reserved_1e0: [u8; 0x1f8 - 0x1e0],
    pub rax: Cell<u64>,
    pub star: Cell<u64>,
    pub lstar: Cell<u64>,
    pub cstar: Cell<u64>,
    pub sfmask: Cell<u64>,
    pub kernel_gs_base: Cell<u64>,
    pub sysenter_cs: Cell<u64>,
    pub sysenter_esp: Cell<u64>,
    pub sysenter_eip: Cell<u64>,
    pub cr2: Cell<u64>,
    reserved_248: [u8; 0x268 - 0x248],
    pub pat: Cell<u64>,
    pub dbgctl: Cell<u64>,
    reserved_278: [u8; 0xc00 - 0x278],
}

/// Virtual machine control block: one page, naturally aligned.
#[repr(C, align(4096))]
pub struct Vmcb {
    /// Control area: configuration and exit information.
    pub control: ControlArea,
    /// State save area: guest registers.
    pub save: SaveArea,
}

const _: () = {
    assert!(size_of::<SavedSegment>() == size_of::<VmcbSegment>());
    assert!(size_of::<ControlArea>() == 0x400);
    assert!(size_of::<SaveArea>() == 0xc00);
    assert!(size_of::<Vmcb>() == 0x1000);
    assert!(offset_of!(ControlArea, pause_filter_threshold) == 0x3c);
    assert!(offset_of!(ControlArea, iopm_base_pa) == 0x40);
    assert!(offset_of!(ControlArea, guest_asid) == 0x58);
    assert!(offset_of!(ControlArea, v_intr) == 0x60);
    assert!(offset_of!(ControlArea, exit_code) == 0x70);
    assert!(offset_of!(ControlArea, exit_int_info) == 0x88);
    assert!(offset_of!(ControlArea, nested_control) == 0x90);
    assert!(offset_of!(ControlArea, event_inj) == 0xa8);
    assert!(offset_of!(ControlArea, n_cr3) == 0xb0);
    assert!(offset_of!(ControlArea, clean) == 0xc0);
    assert!(offset_of!(ControlArea, n_rip) == 0xc8);
    assert!(offset_of!(ControlArea, fetched_bytes) == 0xd0);
    assert!(offset_of!(SaveArea, cpl) == 0xcb);
    assert!(offset_of!(SaveArea, efer) == 0xd0);
    assert!(offset_of!(SaveArea, cr4) == 0x148);
    assert!(offset_of!(SaveArea, rflags) == 0x170);
    assert!(offset_of!(SaveArea, rip) == 0x178);
    assert!(offset_of!(SaveArea, rsp) == 0x1d8);
    assert!(offset_of!(SaveArea, rax) == 0x1f8);
    assert!(offset_of!(SaveArea, cr2) == 0x240);
    assert!(offset_of!(SaveArea, pat) == 0x268);
};

/// Bits of [`ControlArea::intercept_cr`] (offset 000h).
pub mod intercept_cr {
    /// Reads of CR0.
    pub const READ_CR0: u32 = 1 << 0;
    /// Reads of CR3.
    pub const READ_CR3: u32 = 1 << 3;
    /// Reads of CR4.
    pub const READ_CR4: u32 = 1 << 4;
    /// Writes of CR0, also by `LMSW` and `CLTS`.
    pub const WRITE_CR0: u32 = 1 << 16;
    /// Writes of CR3.
    pub const WRITE_CR3: u32 = 1 << (16 + 3);
    /// Writes of CR4.
    pub const WRITE_CR4: u32 = 1 << (16 + 4);
    /// Writes of CR8.
    pub const WRITE_CR8: u32 = 1 << (16 + 8);
}

/// Bits of [`ControlArea::intercept_exceptions`] (offset 008h).
#[allow(missing_docs, reason = "the manual's names")]
pub mod intercept_exceptions {
    pub const DB: u32 = 1 << 1;
    pub const PF: u32 = 1 << 14;
    pub const AC: u32 = 1 << 17;
    pub const MC: u32 = 1 << 18;
}

/// Bits of [`ControlArea::intercept3`] (offset 00Ch).
#[allow(missing_docs, reason = "the manual's names")]
pub mod intercept3 {
    pub const INTR: u32 = 1 << 0;
    pub const NMI: u32 = 1 << 1;
    pub const SMI: u32 = 1 << 2;
    pub const INIT: u32 = 1 << 3;
    pub const VINTR: u32 = 1 << 4;
    /// Writes of CR0 that change other bits than TS and MP.
    pub const CR0_SEL_WRITE: u32 = 1 << 5;
    pub const RDPMC: u32 = 1 << 15;
    pub const CPUID: u32 = 1 << 18;
    pub const IRET: u32 = 1 << 20;
    pub const INVD: u32 = 1 << 22;
    pub const HLT: u32 = 1 << 24;
    pub const INVLPG: u32 = 1 << 25;
    pub const INVLPGA: u32 = 1 << 26;
    pub const IOIO_PROT: u32 = 1 << 27;
    pub const MSR_PROT: u32 = 1 << 28;
    pub const TASK_SWITCH: u32 = 1 << 29;
    pub const FERR_FREEZE: u32 = 1 << 30;
    pub const SHUTDOWN: u32 = 1 << 31;
}

/// Bits of [`ControlArea::intercept4`] (offset 010h).
#[allow(missing_docs, reason = "the manual's names")]
pub mod intercept4 {
    pub const VMRUN: u32 = 1 << 0;
    pub const VMMCALL: u32 = 1 << 1;
    pub const VMLOAD: u32 = 1 << 2;
    pub const VMSAVE: u32 = 1 << 3;
    pub const STGI: u32 = 1 << 4;
    pub const CLGI: u32 = 1 << 5;
    pub const SKINIT: u32 = 1 << 6;
    pub const WBINVD: u32 = 1 << 9;
    pub const MONITOR: u32 = 1 << 10;
    pub const MWAIT: u32 = 1 << 11;
    pub const MWAIT_ARMED: u32 = 1 << 12;
    pub const XSETBV: u32 = 1 << 13;
    pub const RDPRU: u32 = 1 << 14;
}

/// Values of [`ControlArea::tlb_control`] (APM vol. 2, section 15.16.2).
pub mod tlb_control {
    /// No flush.
    pub const NOTHING: u32 = 0;
    /// Flush the whole TLB.
    pub const FLUSH_ALL: u32 = 1;
    /// Flush this guest's entries (CPUID Fn8000_000A_EDX\[FlushByAsid\]).
    pub const FLUSH_ASID: u32 = 3;
}

/// Fields of [`ControlArea::v_intr`] (APM vol. 2, section 15.21).
pub mod v_intr {
    /// V_TPR: the guest's task priority, its CR8.
    pub const TPR: u64 = 0xf;
    /// V_IRQ: a virtual interrupt is pending.
    pub const IRQ: u64 = 1 << 8;
    /// V_INTR_PRIO, lowest bit.
    pub const PRIO_SHIFT: u32 = 16;
    /// V_IGN_TPR.
    pub const IGNORE_TPR: u64 = 1 << 20;
    /// V_INTR_MASKING: the guest's `RFLAGS.IF` masks virtual interrupts only.
    pub const INTR_MASKING: u64 = 1 << 24;
    /// V_INTR_VECTOR, lowest bit.
    pub const VECTOR_SHIFT: u32 = 32;
}

/// Format of `EVENTINJ` and `EXITINTINFO` (APM vol. 2, section 15.20).
pub mod event {
    /// Vector.
    pub const VECTOR: u64 = 0xff;
    /// Type, bits 10:8: external interrupt.
    pub const TYPE_INTR: u64 = 0 << 8;
    /// Type: non-maskable interrupt.
    pub const TYPE_NMI: u64 = 2 << 8;
    /// Type: exception.
    pub const TYPE_EXCEPTION: u64 = 3 << 8;
    /// Type: software interrupt.
    pub const TYPE_SOFT: u64 = 4 << 8;
    /// All type bits.
    pub const TYPE_MASK: u64 = 7 << 8;
    /// An error code is in bits 63:32.
    pub const ERROR_VALID: u64 = 1 << 11;
    /// The field holds an event.
    pub const VALID: u64 = 1 << 31;
}

/// Exit codes (APM vol. 2, appendix C).
#[allow(missing_docs, reason = "the manual's names")]
pub mod exit {
    pub const CR0_READ: u64 = 0x00;
    pub const CR3_READ: u64 = 0x03;
    pub const CR3_WRITE: u64 = 0x13;
    pub const CR15_WRITE: u64 = 0x1f;
    pub const DR0_READ: u64 = 0x20;
    pub const DR15_WRITE: u64 = 0x3f;
    pub const EXCEPTION_BASE: u64 = 0x40;
    pub const EXCEPTION_LAST: u64 = 0x5f;
    /// Intercepted page fault: error code in EXITINFO1, CR2 in EXITINFO2.
    pub const PAGE_FAULT: u64 = EXCEPTION_BASE + 14;
    /// Intercepted machine check.
    pub const MACHINE_CHECK: u64 = EXCEPTION_BASE + 18;
    pub const INTR: u64 = 0x60;
    pub const NMI: u64 = 0x61;
    pub const SMI: u64 = 0x62;
    pub const INIT: u64 = 0x63;
    pub const VINTR: u64 = 0x64;
    pub const CR0_SEL_WRITE: u64 = 0x65;
    pub const RDTSC: u64 = 0x6e;
    pub const RDPMC: u64 = 0x6f;
    pub const PUSHF: u64 = 0x70;
    pub const POPF: u64 = 0x71;
    pub const CPUID: u64 = 0x72;
    pub const RSM: u64 = 0x73;
    pub const IRET: u64 = 0x74;
    pub const INVD: u64 = 0x76;
    pub const PAUSE: u64 = 0x77;
    pub const HLT: u64 = 0x78;
    pub const INVLPG: u64 = 0x79;
    pub const INVLPGA: u64 = 0x7a;
    pub const IOIO: u64 = 0x7b;
    pub const MSR: u64 = 0x7c;
    pub const TASK_SWITCH: u64 = 0x7d;
    pub const FERR_FREEZE: u64 = 0x7e;
    pub const SHUTDOWN: u64 = 0x7f;
    pub const VMRUN: u64 = 0x80;
    pub const VMMCALL: u64 = 0x81;
    pub const VMLOAD: u64 = 0x82;
    pub const VMSAVE: u64 = 0x83;
    pub const STGI: u64 = 0x84;
    pub const CLGI: u64 = 0x85;
    pub const SKINIT: u64 = 0x86;
    pub const RDTSCP: u64 = 0x87;
    pub const WBINVD: u64 = 0x89;
    pub const MONITOR: u64 = 0x8a;
    pub const MWAIT: u64 = 0x8b;
    pub const MWAIT_ARMED: u64 = 0x8c;
    pub const XSETBV: u64 = 0x8d;
    pub const RDPRU: u64 = 0x8e;
    pub const NPF: u64 = 0x400;
    pub const INVALID: u64 = u64::MAX;
    /// `INVALID` under QEMU TCG, which writes the lower half only.
    pub const INVALID_LOW: u64 = u32::MAX as u64;
}

/// `EXITINFO1` of an IOIO exit (APM vol. 2, section 15.10.2).
pub mod ioio {
    /// Input; else output.
    pub const IN: u64 = 1 << 0;
    /// String instruction.
    pub const STRING: u64 = 1 << 2;
    /// `REP` prefix.
    pub const REP: u64 = 1 << 3;
    /// Operand of one byte.
    pub const SIZE_8: u64 = 1 << 4;
    /// Operand of two bytes.
    pub const SIZE_16: u64 = 1 << 5;
    /// Operand of four bytes.
    pub const SIZE_32: u64 = 1 << 6;
    /// Lowest bit of the port number.
    pub const PORT_SHIFT: u32 = 16;
}

/// `EXITINFO1` of a nested page fault (APM vol. 2, section 15.25.6): page-fault error code plus
/// these bits.
pub mod npf {
    /// The page was present.
    pub const PRESENT: u64 = 1 << 0;
    /// The access was a write.
    pub const WRITE: u64 = 1 << 1;
    /// The access was an instruction fetch.
    pub const FETCH: u64 = 1 << 4;
    /// The fault occurred on the final guest-physical address.
    pub const FINAL: u64 = 1 << 32;
    /// The fault occurred during a guest page-table walk.
    pub const WALK: u64 = 1 << 33;
}
