//! Translation tables with granules of 4 KiB: Arm ARM, D8.3. Levels are counted as in the rest of
//! this project: 0 has pages, 3 is the root (the manual counts from the root).

/// Bits of entries of both stages.
pub mod entry {
    /// Valid.
    pub const VALID: u64 = 1 << 0;
    /// At level 0: a page; above: a table. A block has 0 here.
    pub const TABLE: u64 = 1 << 1;
    /// Accessed; otherwise the access faults.
    pub const ACCESSED: u64 = 1 << 10;
    /// Inner shareable.
    pub const INNER_SHAREABLE: u64 = 3 << 8;
    /// Physical address.
    pub const ADDRESS: u64 = 0x0000_ffff_ffff_f000;
}

/// Bits of leaves of stage 1.
pub mod stage1 {
    /// Place of the index of the memory type.
    pub const TYPE_SHIFT: u32 = 2;
    /// EL0 may access it.
    pub const USER: u64 = 1 << 6;
    /// Not writable.
    pub const READ_ONLY: u64 = 1 << 7;
    /// Belongs to an ASID.
    pub const NOT_GLOBAL: u64 = 1 << 11;
    /// The kernel may not execute it.
    pub const KERNEL_NX: u64 = 1 << 53;
    /// EL0 may not execute it. Where there is one privilege level alone: it may not.
    pub const USER_NX: u64 = 1 << 54;
}

/// Bits of leaves of stage 2 (D8.3.1.2).
pub mod stage2 {
    /// Write-back memory.
    pub const NORMAL: u64 = 0b1111 << 2;
    /// Device memory, nGnRE.
    pub const DEVICE: u64 = 0b0001 << 2;
    /// Readable.
    pub const READ: u64 = 1 << 6;
    /// Writable.
    pub const WRITE: u64 = 1 << 7;
    /// Not executable.
    pub const NX: u64 = 1 << 54;
}
