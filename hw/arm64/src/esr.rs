//! Syndrome of an exception, ESR_ELx: Arm ARM, D24.2.40.

/// Lowest bit of the exception class.
pub const CLASS_SHIFT: u32 = 26;
/// Exception class of a syndrome: bits 31 to 26.
pub const fn class(syndrome: u64) -> u64 {
    syndrome >> 26 & 0x3f
}

/// Lowest bit of class and length: the bit below the class is 1 for instructions of 32 bits (IL).
pub const LENGTH_SHIFT: u32 = 25;
/// Length in bytes of the instruction that has caused an exception.
pub const fn instruction_length(syndrome: u64) -> u64 {
    2 + 2 * (syndrome >> LENGTH_SHIFT & 1)
}

/// Exception classes.
pub mod class {
    /// Undefined instruction, or one that this exception level may not execute.
    pub const UNKNOWN: u64 = 0x00;
    /// WFI, WFE and the like, trapped.
    pub const WAIT: u64 = 0x01;
    /// MCR or MRC of AArch32 with coprocessor 15, trapped.
    pub const CP15: u64 = 0x03;
    /// MCRR or MRRC with coprocessor 15.
    pub const CP15_WIDE: u64 = 0x04;
    /// MCR or MRC with coprocessor 14.
    pub const CP14: u64 = 0x05;
    /// Access to floating point or SIMD, trapped.
    pub const FLOATING_POINT: u64 = 0x07;
    /// VMRS of an identification register of floating point by AArch32.
    pub const FLOATING_POINT_ID_32: u64 = 0x08;
    /// MRRC with coprocessor 14.
    pub const CP14_WIDE: u64 = 0x0c;
    /// HVC by AArch32 code.
    pub const HYPERVISOR_CALL_32: u64 = 0x12;
    /// SMC by AArch32 code, trapped.
    pub const SECURE_CALL_32: u64 = 0x13;
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
    /// Error that an earlier access has caused (SError).
    pub const SYSTEM_ERROR: u64 = 0x2f;
}

/// Bit of a data abort: the syndrome describes the instruction (ISV).
pub const DESCRIBED: u64 = 1 << 24;
/// Bit of a data abort: the access is a write.
pub const WRITE: u64 = 1 << 6;
/// Bit of an abort: stage 2 has faulted for a walk of stage 1.
pub const WALK: u64 = 1 << 7;
/// Bit of a data abort: the access is by an instruction for cache maintenance.
pub const CACHE_MAINTENANCE: u64 = 1 << 8;

/// Access to a system register that has trapped, by its syndrome.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct SystemAccess {
    /// The register ([`system_register`]).
    pub register: u32,
    /// General-purpose register; 31: zero.
    pub general: usize,
    /// `MRS`; else `MSR`.
    pub is_read: bool,
}

/// Number of a system register from the fields of its encoding: op0, op1, CRn, CRm, op2.
pub const fn system_register(op0: u32, op1: u32, crn: u32, crm: u32, op2: u32) -> u32 {
    op0 << 14 | op1 << 11 | crn << 7 | crm << 3 | op2
}

/// Decodes the syndrome of an access to a system register.
pub const fn system_access(syndrome: u64) -> SystemAccess {
    let iss = syndrome as u32;
    let fields = [iss >> 20 & 3, iss >> 14 & 7, iss >> 10 & 15, iss >> 1 & 15, iss >> 17 & 7];
    let [op0, op1, crn, crm, op2] = fields;
    SystemAccess {
        register: system_register(op0, op1, crn, crm, op2),
        general: (iss >> 5 & 31) as usize,
        is_read: iss & 1 != 0,
    }
}

/// Bits of the syndrome of an access to a system register that name the general-purpose register.
const GENERAL: u64 = 31 << 5;

/// Returns the general-purpose register that the guest writes to this system register
/// ([`system_register`]), by the syndrome of its access; `None`: it is another access.
pub const fn written_to(register: u32, syndrome: u64) -> Option<usize> {
    let number = register as u64;
    let [op0, op1, crn] = [number >> 14, number >> 11 & 7, number >> 7 & 15];
    let [crm, op2] = [number >> 3 & 15, number & 7];
    let write = class::SYSTEM_REGISTER << CLASS_SHIFT
        | 1 << LENGTH_SHIFT
        | op0 << 20
        | op2 << 17
        | op1 << 14
        | crn << 10
        | crm << 1;
    match syndrome & !GENERAL == write {
        true => Some((syndrome >> 5 & 31) as usize),
        false => None,
    }
}

/// Access to memory by one general-purpose register, by the syndrome of its data abort.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct MemoryAccess {
    /// Bytes: 1, 2, 4 or 8.
    pub size: u8,
    /// General-purpose register; 31: zero.
    pub general: usize,
    /// A load extends the sign.
    pub is_signed: bool,
    /// The register has 64 bits; else its upper half becomes zero.
    pub is_wide: bool,
    /// A store.
    pub is_write: bool,
}

/// Returns whether the syndrome of a data abort describes the instruction.
pub const fn is_described(syndrome: u64) -> bool {
    syndrome & DESCRIBED != 0
}

/// General-purpose register of an access to memory, by the syndrome of its data abort.
pub const fn transferred(syndrome: u64) -> usize {
    (syndrome >> 16 & 31) as usize
}

/// The syndrome with another general-purpose register, below 32.
pub const fn with_transferred(syndrome: u64, general: usize) -> u64 {
    syndrome & !(31 << 16) | (general as u64) << 16
}

/// Decodes the syndrome of a data abort; `None`: it does not describe the instruction, which
/// accesses several registers or changes its address register.
pub const fn memory_access(syndrome: u64) -> Option<MemoryAccess> {
    if !is_described(syndrome) {
        return None;
    }
    Some(MemoryAccess {
        size: 1 << (syndrome >> 22 & 3),
        general: transferred(syndrome),
        is_signed: syndrome & 1 << 21 != 0,
        is_wide: syndrome & 1 << 15 != 0,
        is_write: syndrome & WRITE != 0,
    })
}

/// Syndrome of a data abort by this access.
pub const fn describe(access: MemoryAccess) -> u64 {
    let MemoryAccess { size, general, is_signed, is_wide, is_write } = access;
    class::DATA_ABORT << CLASS_SHIFT
        | 1 << LENGTH_SHIFT
        | DESCRIBED
        | (size.trailing_zeros() as u64) << 22
        | (is_signed as u64) << 21
        | (general as u64 & 31) << 16
        | (is_wide as u64) << 15
        | (is_write as u64) << 6
}

/// Returns whether the status of an abort is a permission fault, at any level.
pub const fn is_permission_fault(syndrome: u64) -> bool {
    syndrome & 0x3c == 0x0c
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn accesses_to_system_registers() {
        // msr icc_sgi1r_el1, x20
        let access = system_access(0x6000_0000 | 3 << 20 | 5 << 17 | 12 << 10 | 20 << 5 | 11 << 1);
        let register = system_register(3, 0, 12, 11, 5);
        assert_eq!(access, SystemAccess { register, general: 20, is_read: false });
        assert_ne!(register, system_register(3, 0, 12, 12, 5));
        let syndrome = 0x6200_0000 | 3 << 20 | 5 << 17 | 12 << 10 | 20 << 5 | 11 << 1;
        assert_eq!(system_access(syndrome), access);
        assert_eq!(written_to(register, syndrome), Some(20));
        for other in [syndrome | 1, syndrome + (1 << 10), syndrome + (1 << 17), 0x93 << 24] {
            assert_eq!(written_to(register, other), None);
        }
    }

    #[test]
    fn lengths() {
        // WFI in A64 and in T32.
        assert_eq!([0x0600_0000, 0x0400_0000].map(instruction_length), [4, 2]);
    }

    #[test]
    fn accesses_to_memory() {
        // str w4, [x6]; ldrsb x3, [x6]; ldp
        let store =
            MemoryAccess { size: 4, general: 4, is_signed: false, is_wide: false, is_write: true };
        assert_eq!(memory_access(0x9384_0046), Some(store));
        let load =
            MemoryAccess { size: 1, general: 3, is_signed: true, is_wide: true, is_write: false };
        assert_eq!(memory_access(0x9323_8006), Some(load));
        assert_eq!(memory_access(0x9200_0006), None);
        assert_eq!([store, load].map(describe), [0x9384_0040, 0x9323_8000]);
    }
}
