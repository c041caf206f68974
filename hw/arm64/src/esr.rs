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
    /// HVC by AArch64 code.
    pub const HYPERVISOR_CALL: u64 = 0x16;
    /// SMC by AArch64 code, trapped.
    pub const SECURE_CALL: u64 = 0x17;
    /// MSR, MRS or a system instruction, trapped.
    pub const SYSTEM_REGISTER: u64 = 0x18;
    /// Instruction abort of a lower exception level.
    pub const INSTRUCTION_ABORT: u64 = 0x20;
    /// Data abort of a lower exception level.
    pub const DATA_ABORT: u64 = 0x24;
}

/// Bit of a data abort: the access is a write.
pub const WRITE: u64 = 1 << 6;
/// Bit of an abort: stage 2 has faulted for a walk of stage 1.
pub const WALK: u64 = 1 << 7;
/// Bit of a data abort: the access is by an instruction for cache maintenance.
pub const CACHE_MAINTENANCE: u64 = 1 << 8;

/// Returns whether the status of an abort is a permission fault, at any level.
pub const fn is_permission_fault(syndrome: u64) -> bool {
    syndrome & 0x3c == 0x0c
}
