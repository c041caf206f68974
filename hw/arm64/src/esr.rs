//! Syndrome of an exception, ESR_ELx: Arm ARM, D24.2.40.

/// Exception class of a syndrome: bits 31 to 26.
pub const fn class(syndrome: u64) -> u64 {
    syndrome >> 26 & 0x3f
}

/// Exception classes.
pub mod class {
    /// Undefined instruction, or one that this exception level may not execute.
    pub const UNKNOWN: u64 = 0x00;
    /// WFI, WFE and the like, trapped.
    pub const WAIT: u64 = 0x01;
    /// Access to floating point or SIMD, trapped.
    pub const FLOATING_POINT: u64 = 0x07;
    /// SVC by AArch64 code.
    pub const SUPERVISOR_CALL: u64 = 0x15;
    /// Instruction abort of a lower exception level.
    pub const INSTRUCTION_ABORT: u64 = 0x20;
    /// Data abort of a lower exception level.
    pub const DATA_ABORT: u64 = 0x24;
}
