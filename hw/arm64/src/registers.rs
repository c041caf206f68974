//! System registers: Arm ARM, D24.2. With HCR_EL2.E2H the names of EL1 refer at EL2 to the
//! registers of EL2, which then have the same layout (D8.1.5).

/// CurrentEL: the exception level, in bits 3 and 2.
pub const fn exception_level(current: u64) -> u64 {
    current >> 2 & 3
}

/// Affinity fields of MPIDR_EL1, as PSCI and device trees have them.
pub const AFFINITY: u64 = 0xff_00ff_ffff;

/// Bits of HCR_EL2.
pub mod hcr {
    /// Stage 2 translates for EL1 and EL0.
    const VM: u64 = 1 << 0;
    /// Invalidation of data caches by set and way also cleans them.
    const SWIO: u64 = 1 << 1;
    /// Interrupts and errors go to EL2 (FMO, IMO, AMO).
    const INTERRUPTS: u64 = 1 << 3 | 1 << 4 | 1 << 5;
    /// Maintenance of TLBs and instruction caches concerns all CPUs of the inner shareable domain,
    /// barriers, too (FB, BSU).
    const BROADCAST: u64 = 1 << 9 | 1 << 10;
    /// WFI traps.
    const TWI: u64 = 1 << 13;
    /// Reads of identification registers trap (TID3).
    const TID3: u64 = 1 << 18;
    /// SMC traps.
    const TSC: u64 = 1 << 19;
    /// Registers that the implementation defines trap (TIDCP, TACR), and maintenance of caches by
    /// set and way (TSW).
    const IMPLEMENTATION: u64 = 1 << 20 | 1 << 21 | 1 << 22;
    /// Registers of limited ordering regions and of error records trap (TLOR, TERR).
    const ERRORS: u64 = 1 << 35 | 1 << 36;
    /// EL0 belongs to the host: exceptions go to EL2.
    pub const TGE: u64 = 1 << 27;
    /// EL1 is AArch64; else AArch32.
    pub const RW: u64 = 1 << 31;
    /// The host kernel runs at EL2 (FEAT_VHE).
    pub const E2H: u64 = 1 << 34;
    /// Stage 1 of EL1 and EL0 is off, and what it does not translate is write-back memory.
    const DC: u64 = 1 << 12;
    /// Value while tasks run.
    pub const HOST: u64 = E2H | RW | TGE;
    /// The same without VHE: stage 2 alone translates for EL0.
    pub const HOST_WITHOUT_VHE: u64 = RW | TGE | VM | DC;
    /// Value while 64-bit guests run. Pointer authentication and memory tags trap.
    const GUEST: u64 =
        E2H | RW | VM | SWIO | INTERRUPTS | BROADCAST | TWI | TID3 | TSC | IMPLEMENTATION | ERRORS;
    /// Value while guests run of 64 or of 32 bits, with or without VHE.
    pub const fn guest(is_32_bit: bool, has_vhe: bool) -> u64 {
        GUEST & !if is_32_bit { RW } else { 0 } & !if has_vhe { 0 } else { E2H }
    }
}

/// SCTLR of EL1, or of EL2 with E2H.
pub mod sctlr {
    /// Bits that are 1 where their features do not exist (LSMAOE, nTLSMD, EIS, EOS; ITD, SED).
    pub const RESERVED: u64 = 1 << 29 | 1 << 28 | 1 << 22 | 1 << 20 | 1 << 11 | 1 << 8 | 1 << 7;
    /// Translation.
    pub const M: u64 = 1 << 0;
    /// Data caches.
    pub const C: u64 = 1 << 2;
    /// Stack pointers are aligned to 16 bytes, at this exception level.
    pub const SA: u64 = 1 << 3;
    /// Stack pointers are aligned to 16 bytes, at EL0.
    pub const SA0: u64 = 1 << 4;
    /// Instruction caches.
    pub const I: u64 = 1 << 12;
    /// EL0 may execute `DC ZVA`.
    pub const DZE: u64 = 1 << 14;
    /// EL0 may read CTR_EL0.
    pub const UCT: u64 = 1 << 15;
    /// EL0 may execute WFE.
    pub const N_TWE: u64 = 1 << 18;
    /// Exceptions do not set PSTATE.PAN.
    pub const SPAN: u64 = 1 << 23;
    /// EL0 may maintain caches by address, for code that it writes.
    pub const UCI: u64 = 1 << 26;
    /// Value with translation on. Accesses by the kernel to pages of tasks fault (PAN) where the
    /// processor has that feature.
    pub const KERNEL: u64 = RESERVED | M | C | SA | SA0 | I | DZE | UCT | N_TWE | UCI;
    /// Value with translation off.
    pub const OFF: u64 = RESERVED | SPAN;
    /// SCTLR_EL2 without VHE, with translation on: bits 29, 28, 23, 22, 18, 16, 11, 5 and 4 are 1.
    pub const KERNEL_WITHOUT_VHE: u64 = 0x30c5_0830 | M | C | SA | I;
    /// SCTLR_EL1 while tasks run without VHE: they may do the same as with it.
    pub const TASKS: u64 = OFF | C | SA0 | I | DZE | UCT | N_TWE | UCI;
}

/// TCR of EL1, or of EL2 with E2H.
pub mod tcr {
    /// Addresses of 48 bits, by way of TTBR0 (T0SZ: 64 - 48), with granules of 4 KiB (TG0 0).
    const SIZE: u64 = 16;
    /// Walks by way of the caches: write-back, inner shareable.
    const CACHED: u64 = 1 << 8 | 1 << 10 | 3 << 12;
    /// No walks by way of TTBR1 (EPD1). Its size and granule (T1SZ, TG1) are valid.
    const NO_UPPER_HALF: u64 = 1 << 23 | 16 << 16 | 2 << 30;
    /// ASIDs of 16 bits.
    const LONG_ASIDS: u64 = 1 << 36;
    /// Value without the size of physical addresses (IPS, from bit 32 on).
    pub const KERNEL: u64 = SIZE | CACHED | NO_UPPER_HALF | LONG_ASIDS;
    /// TCR_EL2 without VHE, without the size of physical addresses (PS, from bit 16 on): bits 31
    /// and 23 are 1.
    pub const KERNEL_WITHOUT_VHE: u64 = SIZE | CACHED | 1 << 31 | 1 << 23;
}

/// MAIR: memory types by index.
pub mod mair {
    /// Index of write-back memory.
    pub const NORMAL: u64 = 0;
    /// Index of device memory without gathering and reordering.
    pub const DEVICE: u64 = 1;
    /// Value: type 0 is 0xff, type 1 is nGnRE.
    pub const KERNEL: u64 = 0xff | 0x04 << 8;
}

/// SPSR: state before an exception.
pub mod spsr {
    /// EL0 with interrupts.
    pub const USER: u64 = 0;
    /// EL1 with its own stack pointer, exceptions masked.
    pub const EL1_MASKED: u64 = 0x3c5;
    /// Mask of the exception level, the stack pointer and the kind of registers.
    pub const MODE: u64 = 0x1f;
    /// Mode: EL0.
    pub const EL0: u64 = 0b0_0000;
    /// Mode: EL1 with the stack pointer of EL0.
    pub const EL1_WITH_SP_EL0: u64 = 0b0_0100;
    /// Mode: EL1 with its own stack pointer.
    pub const EL1: u64 = 0b0_0101;
    /// Mode: EL0 in AArch32.
    pub const EL0_32: u64 = 0b1_0000;
    /// Modes that a 64-bit guest may have on every processor: a bit each.
    pub const GUEST_MODES: u32 = 1 << EL0 | 1 << EL1_WITH_SP_EL0 | 1 << EL1;
    /// The kernel may not access pages of EL0 (PAN).
    pub const PAN: u64 = 1 << 22;
    /// Bits that a guest may have: all except the one for software steps.
    pub const GUEST: u64 = 0xffff_ffff & !(1 << 21);
}

/// VTCR_EL2: stage 2.
pub mod vtcr {
    /// Guest-physical addresses of 39 bits: walks begin with a table of 1 GiB entries (T0SZ, SL0).
    const SIZE: u64 = (64 - 39) | 1 << 6;
    /// Walks by way of the caches: write-back, inner shareable.
    const CACHED: u64 = 1 << 8 | 1 << 10 | 3 << 12;
    /// Value without the size of physical addresses.
    pub const KERNEL: u64 = SIZE | CACHED | 1 << 31;
    /// Lowest bit of the size of physical addresses, as in ID_AA64MMFR0_EL1.
    pub const SIZE_SHIFT: u32 = 16;
    /// Largest size of physical addresses: 48 bits.
    pub const MAX_SIZE: u64 = 5;
    /// VTTBR_EL2: lowest bit of the VMID.
    pub const VMID_SHIFT: u32 = 48;
}

/// PAR_EL1: result of a translation by an instruction.
pub mod par {
    /// The translation has failed.
    pub const FAILED: u64 = 1 << 0;
    /// Physical address of the page.
    pub const PAGE: u64 = 0x000f_ffff_ffff_f000;
}

/// MPIDR_EL1: this bit is 1.
pub const MPIDR_ONE: u64 = 1 << 31;
/// MDCR_EL2: number of performance counters for EL1.
pub const MDCR_COUNTERS: u64 = 0x1f;
/// MDCR_EL2: guests' accesses to performance monitors (TPMCR, TPM), debug registers (TDA, TDOSA,
/// TDRA), profiling (TPMS) and trace filters (TTRF) trap.
pub const MDCR_GUEST: u64 = 1 << 5 | 1 << 6 | 1 << 9 | 1 << 10 | 1 << 11 | 1 << 14 | 1 << 19;
/// Field EL0 of ID_AA64PFR0_EL1 where EL0 also has AArch32; EL1 has the next field.
pub const EL0_HAS_AARCH32: u64 = 2;
/// Returns whether EL1 also has AArch32, by ID_AA64PFR0_EL1.
pub const fn el1_has_aarch32(features: u64) -> bool {
    features >> 4 & 0xf == EL0_HAS_AARCH32
}

/// Returns whether there are fine-grained traps (HFGRTR_EL2 and others), by ID_AA64MMFR0_EL1.
pub const fn has_fine_traps(features: u64) -> bool {
    features >> 56 & 0xf != 0
}
/// Returns whether there is HCRX_EL2, by ID_AA64MMFR1_EL1.
pub const fn has_extended_configuration(features: u64) -> bool {
    features >> 40 & 0xf != 0
}

/// HPFAR_EL2: guest-physical address of the page of a fault.
pub const fn hpfar_page(value: u64) -> u64 {
    (value & 0x0fff_ffff_fff0) << 8
}

/// CNTHCTL_EL2 while tasks run. With VHE: EL0 may read both counters, and has no timers. Without
/// it: neither the physical counter nor its timer trap, so that [`CNTKCTL_TASKS`] decides.
pub const CNTHCTL_HOST: u64 = 0b11;
/// CNTKCTL_EL1 while tasks run without VHE: EL0 may read the physical counter, and has no timers.
pub const CNTKCTL_TASKS: u64 = 0b01;
/// Bit of CNTx_CTL: the timer is enabled; not masked.
pub const TIMER_ENABLED: u64 = 1;
/// Bit of CNTx_CTL: the timer does not interrupt.
pub const TIMER_MASKED: u64 = 2;

/// CPTR_EL2 with E2H: registers of tracing and of activity monitors trap (TTA, TAM), as those of
/// floating point.
pub const CPTR_WITH_VHE: u64 = 1 << 28 | 1 << 30;
/// CPTR_EL2 with E2H: floating point does not trap (FPEN).
pub const FLOATING_POINT: u64 = 3 << 20;
/// CPTR_EL2 without VHE: SVE traps, or the bit is 1 without it. Other bits are 1.
pub const CPTR_WITHOUT_VHE: u64 = 0x33ff;
/// CPTR_EL2 without VHE: floating point traps (TFP).
pub const NO_FLOATING_POINT: u64 = 1 << 10;
