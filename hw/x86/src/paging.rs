//! Control registers and long-mode page tables: APM vol. 2 (24593), §3.1 and §5.3; protection bits
//! of CR4 also SDM vol. 3 §2.5.

/// Number of entries of a table.
pub const ENTRIES: usize = 512;
/// `log2` of the bytes that an entry maps at a level: 1 is the page table, 4 the top level (PML4).
pub const fn level_shift(level: u32) -> u32 {
    12 + 9 * (level - 1)
}

/// Bits of an entry (APM vol. 2, figures 5-20 to 5-25).
pub mod entry {
    /// Present.
    pub const PRESENT: u64 = 1 << 0;
    /// Writable, if set at every level.
    pub const WRITE: u64 = 1 << 1;
    /// Accessible from CPL 3, if set at every level.
    pub const USER: u64 = 1 << 2;
    /// Page-level write-through: bit 0 of the PAT index.
    pub const PWT: u64 = 1 << 3;
    /// Page-level cache disable: bit 1 of the PAT index.
    pub const PCD: u64 = 1 << 4;
    /// Accessed.
    pub const ACCESSED: u64 = 1 << 5;
    /// Dirty (leaf).
    pub const DIRTY: u64 = 1 << 6;
    /// At levels 2 and 3: the entry is a leaf.
    pub const LARGE: u64 = 1 << 7;
    /// Leaf that is not flushed by a CR3 load (CR4.PGE).
    pub const GLOBAL: u64 = 1 << 8;
    /// Physical address.
    pub const ADDRESS: u64 = 0x000f_ffff_ffff_f000;
    /// No execute (EFER.NXE).
    pub const NX: u64 = 1 << 63;
    /// Strong uncacheable with the reset value of the PAT (index 3).
    pub const UNCACHED: u64 = PCD | PWT;
}

/// Bits of CR0.
pub mod cr0 {
    /// Protected mode.
    pub const PE: u64 = 1 << 0;
    /// Monitor coprocessor: WAIT faults if TS is set.
    pub const MP: u64 = 1 << 1;
    /// x87 instructions fault.
    pub const EM: u64 = 1 << 2;
    /// Task switched: the next FPU instruction faults (#NM).
    pub const TS: u64 = 1 << 3;
    /// Extension type; always set.
    pub const ET: u64 = 1 << 4;
    /// Native x87 error reporting.
    pub const NE: u64 = 1 << 5;
    /// Read-only pages are write-protected at CPL 0, too.
    pub const WP: u64 = 1 << 16;
    /// RFLAGS.AC enables alignment checks at CPL 3.
    pub const AM: u64 = 1 << 18;
    /// Not write-through.
    pub const NW: u64 = 1 << 29;
    /// Cache disable.
    pub const CD: u64 = 1 << 30;
    /// Paging.
    pub const PG: u64 = 1 << 31;
}

/// Bits of CR4.
pub mod cr4 {
    /// Virtual interrupt flag in virtual-8086 mode.
    pub const VME: u64 = 1 << 0;
    /// Virtual interrupt flag in protected mode.
    pub const PVI: u64 = 1 << 1;
    /// RDTSC only at CPL 0.
    pub const TSD: u64 = 1 << 2;
    /// DR4 and DR5 do not exist; I/O breakpoints enabled.
    pub const DE: u64 = 1 << 3;
    /// 4 MiB pages in 32-bit paging.
    pub const PSE: u64 = 1 << 4;
    /// Physical-address extension; needed for long mode.
    pub const PAE: u64 = 1 << 5;
    /// Machine-check exceptions enabled.
    pub const MCE: u64 = 1 << 6;
    /// Global pages.
    pub const PGE: u64 = 1 << 7;
    /// RDPMC at any CPL.
    pub const PCE: u64 = 1 << 8;
    /// FXSAVE, FXRSTOR and SSE enabled.
    pub const OSFXSR: u64 = 1 << 9;
    /// SSE exceptions raise #XF.
    pub const OSXMMEXCPT: u64 = 1 << 10;
    /// SGDT, SIDT, SLDT, SMSW and STR only at CPL 0.
    pub const UMIP: u64 = 1 << 11;
    /// Five-level paging.
    pub const LA57: u64 = 1 << 12;
    /// RDFSBASE, RDGSBASE, WRFSBASE, WRGSBASE enabled.
    pub const FSGSBASE: u64 = 1 << 16;
    /// Process-context identifiers.
    pub const PCIDE: u64 = 1 << 17;
    /// XSAVE and XSETBV enabled.
    pub const OSXSAVE: u64 = 1 << 18;
    /// Supervisor code cannot execute user pages.
    pub const SMEP: u64 = 1 << 20;
    /// Supervisor code cannot access user pages unless RFLAGS.AC is set.
    pub const SMAP: u64 = 1 << 21;
    /// Protection keys of user pages.
    pub const PKE: u64 = 1 << 22;
}

/// Bits of XCR0 (APM vol. 2 §11.5.2).
pub mod xcr0 {
    /// x87; always set.
    pub const X87: u64 = 1 << 0;
    /// SSE.
    pub const SSE: u64 = 1 << 1;
    /// AVX.
    pub const AVX: u64 = 1 << 2;
    /// AVX-512: opmask, upper halves of ZMM0-15, ZMM16-31; all or none.
    pub const AVX512: u64 = 7 << 5;
    /// Protection-key rights of user pages.
    pub const PKRU: u64 = 1 << 9;
}

/// Page-fault error code (APM vol. 2 §8.4.2).
pub mod fault {
    /// The page was present: a protection violation.
    pub const PRESENT: u64 = 1 << 0;
    /// The access was a write.
    pub const WRITE: u64 = 1 << 1;
    /// The CPL was 3.
    pub const USER: u64 = 1 << 2;
    /// A reserved bit was set in an entry.
    pub const RESERVED: u64 = 1 << 3;
    /// The access was an instruction fetch.
    pub const FETCH: u64 = 1 << 4;
}

/// A task-state segment in long mode (APM vol. 2, figure 12-8).
#[derive(Clone, Copy, Debug)]
#[repr(C, packed(4))]
pub struct TaskState {
    reserved_0: u32,
    /// Stack pointers for entries to CPL 0, 1, 2.
    pub rsp: [u64; 3],
    reserved_1: u64,
    /// Interrupt stack table; `ist[0]` is index 1.
    pub ist: [u64; 7],
    reserved_2: u64,
    reserved_3: u16,
    /// Offset of the I/O permission bitmap; an offset beyond the segment limit denies all ports.
    pub io_map_base: u16,
}

impl TaskState {
    /// A task state with all stacks 0 and no I/O permission bitmap.
    pub const fn new() -> Self {
        Self {
            reserved_0: 0,
            rsp: [0; 3],
            reserved_1: 0,
            ist: [0; 7],
            reserved_2: 0,
            reserved_3: 0,
            io_map_base: u16::MAX,
        }
    }
}

impl Default for TaskState {
    fn default() -> Self {
        Self::new()
    }
}

/// Gate descriptor of the interrupt descriptor table in long mode (APM vol. 2 §4.8.4).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct GateDescriptor {
    low: u64,
    high: u64,
}

impl GateDescriptor {
    /// A present interrupt gate, which clears IF, with target in segment `selector`, interrupt
    /// stack `ist` (0: none), and descriptor privilege level `dpl` for software interrupts.
    pub const fn interrupt(target: u64, selector: u16, ist: u8, dpl: u8) -> Self {
        const PRESENT_INTERRUPT: u64 = 0x8e << 40;
        Self {
            low: target & 0xffff
                | (selector as u64) << 16
                | (ist as u64 & 7) << 32
                | PRESENT_INTERRUPT
                | (dpl as u64 & 3) << 45
                | (target >> 16 & 0xffff) << 48,
            high: target >> 32,
        }
    }
}

/// Segment descriptors (APM vol. 2 §4.8).
pub mod descriptor {
    /// 64-bit code, CPL 0.
    pub const KERNEL_CODE: u64 = 0x00af_9b00_0000_ffff;
    /// Data, CPL 0.
    pub const KERNEL_DATA: u64 = 0x00cf_9300_0000_ffff;
    /// Data, CPL 3.
    pub const USER_DATA: u64 = 0x00cf_f300_0000_ffff;
    /// 64-bit code, CPL 3.
    pub const USER_CODE: u64 = 0x00af_fb00_0000_ffff;
    /// The two words of an available 64-bit task-state-segment descriptor of `limit + 1` bytes.
    pub const fn task_state(base: u64, limit: u32) -> [u64; 2] {
        [
            limit as u64 & 0xffff
                | (base & 0xff_ffff) << 16
                | 0x89 << 40
                | (limit as u64 >> 16 & 0xf) << 48
                | (base >> 24 & 0xff) << 56,
            base >> 32,
        ]
    }
}

const _: () = assert!(size_of::<TaskState>() == 104);
const _: () = assert!(core::mem::offset_of!(TaskState, rsp) == 4);
const _: () = assert!(core::mem::offset_of!(TaskState, ist) == 36);
const _: () = assert!(core::mem::offset_of!(TaskState, io_map_base) == 102);
const _: () = assert!(size_of::<GateDescriptor>() == 16);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gate_spreads_the_target() {
        let gate = GateDescriptor::interrupt(0x1122_3344_5566_7788, 0x08, 2, 3);
        assert_eq!(gate.low, 0x5566_ee02_0008_7788);
        assert_eq!(gate.high, 0x1122_3344);
    }

    #[test]
    fn task_state_descriptor_spreads_the_base() {
        let [low, high] = descriptor::task_state(0x1122_3344_5566_7788, 0x2_2068);
        assert_eq!(low, 0x5502_8966_7788_2068);
        assert_eq!(high, 0x1122_3344);
    }

    #[test]
    fn levels() {
        assert_eq!([1, 2, 3, 4].map(level_shift), [12, 21, 30, 39]);
    }
}
