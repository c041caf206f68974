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
    /// EL0 belongs to the host: exceptions go to EL2.
    pub const TGE: u64 = 1 << 27;
    /// EL1 is AArch64.
    pub const RW: u64 = 1 << 31;
    /// The host kernel runs at EL2 (FEAT_VHE).
    pub const E2H: u64 = 1 << 34;
    /// Value while tasks run.
    pub const HOST: u64 = E2H | RW | TGE;
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
}

/// TCR of EL1, or of EL2 with E2H.
pub mod tcr {
    /// Both halves have 48 bits (T0SZ and T1SZ: 64 - 48).
    const SIZES: u64 = 16 | 16 << 16;
    /// Walks by way of the caches: write-back, inner shareable.
    const CACHED: u64 = 1 << 8 | 1 << 10 | 3 << 12 | 1 << 24 | 1 << 26 | 3 << 28;
    /// Granules of 4 KiB in both halves (TG0 0, TG1 2).
    const GRANULES: u64 = 2 << 30;
    /// ASIDs of 16 bits.
    const LONG_ASIDS: u64 = 1 << 36;
    /// Value without the size of physical addresses (IPS, bits 34 to 32).
    pub const KERNEL: u64 = SIZES | CACHED | GRANULES | LONG_ASIDS;
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
}

/// CNTHCTL_EL2 with E2H: EL0 may read both counters, and has no timers.
pub const CNTHCTL_HOST: u64 = 0b11;
/// Bit of CNTx_CTL: the timer is enabled; not masked.
pub const TIMER_ENABLED: u64 = 1;
