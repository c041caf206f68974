//! AArch32 as software at EL2 sees it: processor state, conditions of instructions, and the
//! registers of its modes (Arm ARM, D1.20, G1 and F1.4).

use crate::esr::{self, class};

/// Processor state (CPSR), in the format of SPSR_EL2.
pub mod psr {
    /// Mask of the mode, which includes [`IS_32_BIT`].
    pub const MODE: u64 = 0x1f;
    /// Bit of every mode of AArch32.
    pub const IS_32_BIT: u64 = 0x10;
    /// Mode: user.
    pub const USER: u64 = 0x10;
    /// Mode: fast interrupts.
    pub const FIQ: u64 = 0x11;
    /// Mode: interrupts.
    pub const IRQ: u64 = 0x12;
    /// Mode: supervisor.
    pub const SUPERVISOR: u64 = 0x13;
    /// Mode: aborts.
    pub const ABORT: u64 = 0x17;
    /// Mode: undefined instructions.
    pub const UNDEFINED: u64 = 0x1b;
    /// Mode: system, with the registers of user mode.
    pub const SYSTEM: u64 = 0x1f;
    /// Modes that a guest may have: a bit each. Not monitor (0x16) and Hyp (0x1a).
    pub const GUEST_MODES: u32 = 1 << USER
        | 1 << FIQ
        | 1 << IRQ
        | 1 << SUPERVISOR
        | 1 << ABORT
        | 1 << UNDEFINED
        | 1 << SYSTEM;
    /// Instructions are T32.
    pub const T: u64 = 1 << 5;
    /// Fast interrupts are masked.
    pub const F: u64 = 1 << 6;
    /// Interrupts are masked.
    pub const I: u64 = 1 << 7;
    /// Asynchronous aborts are masked.
    pub const A: u64 = 1 << 8;
    /// Data is big-endian.
    pub const E: u64 = 1 << 9;
    /// Every instruction is undefined (IL).
    pub const ILLEGAL: u64 = 1 << 20;
    /// The kernel may not access pages of user mode.
    pub const PAN: u64 = 1 << 22;
    /// State of IT blocks: bits 7 to 2 and 1 to 0 of ITSTATE.
    pub const IT: u64 = 0x3f << 10 | 3 << 25;
    /// Supervisor mode with everything masked.
    pub const RESET: u64 = SUPERVISOR | A | I | F;
}

/// FPEXC: floating point is enabled.
pub const FPEXC_ENABLED: u64 = 1 << 30;

/// Bits of SCTLR that concern exceptions.
pub mod sctlr {
    /// The vectors are at [`HIGH_VECTORS`].
    pub const V: u64 = 1 << 13;
    /// Exceptions leave [`super::psr::PAN`] as it is.
    pub const SPAN: u64 = 1 << 23;
    /// Exceptions set [`super::psr::E`].
    pub const EE: u64 = 1 << 25;
    /// Exceptions are taken to T32.
    pub const TE: u64 = 1 << 30;
    /// Address of the vectors with [`V`].
    pub const HIGH_VECTORS: u64 = 0xffff_0000;
    /// Value with translation off: bits of absent features are 1, CP15BEN, nTWI, nTWE, SPAN.
    pub const OFF: u64 = 0x30c5_0878;
}

/// Bit of the syndrome: the condition is in bits 23 to 20 (CV).
const HAS_CONDITION: u64 = 1 << 24;
/// Bit of the syndrome of SMC: its condition may have failed (CCKNOWNPASS).
const MAY_HAVE_FAILED: u64 = 1 << 19;
/// Condition: always.
const ALWAYS: u64 = 14;
/// Mask of a syndrome's class and condition after a shift by 20 bits. Its lowest five bits are the
/// value of the condition of an instruction without one.
pub const UNCONDITIONAL: u64 = 0x3f << 6 | HAS_CONDITION >> 20 | ALWAYS;

/// ITSTATE of a processor state.
const fn it_state(psr: u64) -> u64 {
    psr >> 8 & 0xfc | psr >> 25 & 3
}

/// Processor state with this ITSTATE.
const fn with_it_state(psr: u64, it: u64) -> u64 {
    psr & !psr::IT | (it & 0xfc) << 8 | (it & 3) << 25
}

/// Returns whether the instruction that has trapped with this syndrome has a condition that holds.
/// A processor may trap before it checks the condition.
pub const fn condition_holds(syndrome: u64, psr: u64) -> bool {
    let is_conditional = match esr::class(syndrome) {
        class::WAIT | class::CP15..=class::FLOATING_POINT_ID_32 | class::CP14_WIDE => true,
        class::SECURE_CALL_32 => syndrome & MAY_HAVE_FAILED != 0,
        _ => false,
    };
    if !is_conditional {
        return true;
    }
    let condition = match (syndrome & HAS_CONDITION != 0, it_state(psr)) {
        (true, _) => syndrome >> 20 & 15,
        (false, 0) => ALWAYS,
        (false, it) => it >> 4,
    };
    let [n, z, c, v] =
        [psr >> 31 & 1 != 0, psr >> 30 & 1 != 0, psr >> 29 & 1 != 0, psr >> 28 & 1 != 0];
    let holds = match condition >> 1 {
        0 => z,
        1 => c,
        2 => n,
        3 => v,
        4 => c && !z,
        5 => n == v,
        6 => n == v && !z,
        _ => return true,
    };
    holds != (condition & 1 != 0)
}

/// Program counter and processor state after the instruction at `pc` that has trapped with this
/// syndrome.
pub const fn after(syndrome: u64, pc: u64, psr: u64) -> (u64, u64) {
    let pc = pc.wrapping_add(esr::instruction_length(syndrome)) & 0xffff_ffff;
    let it = it_state(psr);
    let next = match it & 7 {
        _ if psr & psr::T == 0 => it,
        0 => 0,
        _ => it & 0xe0 | it << 1 & 0x1f,
    };
    (pc, with_it_state(psr, next))
}

/// Number of the register of AArch64 that has general-purpose register `number` of the mode.
/// Numbers that a syndrome has are those of AArch64 already, except those of an emulator.
pub const fn general(psr: u64, number: usize) -> usize {
    match (psr & psr::MODE, number) {
        (psr::FIQ, 8..=12) => number + 16,
        (psr::FIQ, 13 | 14) => number + 16,
        (psr::IRQ, 13 | 14) => 30 - number,
        (psr::SUPERVISOR, 13 | 14) => 32 - number,
        (psr::ABORT, 13 | 14) => 34 - number,
        (psr::UNDEFINED, 13 | 14) => 36 - number,
        _ => number,
    }
}

/// Access to a register of a coprocessor by one general-purpose register (MRC, MCR, VMRS), by its
/// syndrome.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct CoprocessorAccess {
    /// The register ([`coprocessor_register`]).
    pub register: u32,
    /// General-purpose register of AArch64.
    pub general: usize,
    /// The guest reads.
    pub is_read: bool,
}

/// Number of a register of a coprocessor from the fields of its encoding: opc1, CRn, CRm, opc2.
pub const fn coprocessor_register(opc1: u32, crn: u32, crm: u32, opc2: u32) -> u32 {
    esr::system_register(0, opc1, crn, crm, opc2)
}

/// Decodes the syndrome of an access by one general-purpose register.
pub const fn coprocessor_access(syndrome: u64, psr: u64) -> CoprocessorAccess {
    let iss = syndrome as u32;
    let [opc1, crn, crm, opc2] = [iss >> 14 & 7, iss >> 10 & 15, iss >> 1 & 15, iss >> 17 & 7];
    CoprocessorAccess {
        register: coprocessor_register(opc1, crn, crm, opc2),
        general: general(psr, (iss >> 5 & 31) as usize),
        is_read: iss & 1 != 0,
    }
}

/// Access to a register of a coprocessor by two general-purpose registers (MRRC, MCRR).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct WideAccess {
    /// opc1 and CRm.
    pub register: (u32, u32),
    /// General-purpose registers of AArch64: of the lower half, and of the upper one.
    pub general: [usize; 2],
    /// The guest reads.
    pub is_read: bool,
}

/// ICC_SGI1R, as [`WideAccess::register`].
pub const SGI1R: (u32, u32) = (0, 12);
/// ICC_ASGI1R.
pub const ASGI1R: (u32, u32) = (1, 12);
/// ICC_SGI0R.
pub const SGI0R: (u32, u32) = (2, 12);
/// CNTPCT, the physical counter (Arm ARM, G8.7).
pub const CNTPCT: (u32, u32) = (0, 14);
/// CNTPCTSS, the same counter, which is not read speculatively.
pub const CNTPCTSS: (u32, u32) = (8, 14);

/// Decodes the syndrome of an access by two general-purpose registers.
pub const fn wide_access(syndrome: u64, psr: u64) -> WideAccess {
    let iss = syndrome as u32;
    let [first, second] = [(iss >> 5 & 31) as usize, (iss >> 10 & 31) as usize];
    WideAccess {
        register: (iss >> 16 & 15, iss >> 1 & 15),
        general: [general(psr, first), general(psr, second)],
        is_read: iss & 1 != 0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn syndrome(class: u64, iss: u64) -> u64 {
        class << esr::CLASS_SHIFT | 1 << esr::LENGTH_SHIFT | iss
    }

    #[test]
    fn conditions() {
        let with = |condition: u64, flags: u64| {
            let syndrome = syndrome(class::CP15, HAS_CONDITION | condition << 20);
            condition_holds(syndrome, flags << 28 | psr::SUPERVISOR)
        };
        // Flags N, Z, C, V from bit 3 on; the conditions EQ, CS, MI, VS, HI, GE, GT.
        for flags in 0..16 {
            let [v, c, z, n] = [0, 1, 2, 3].map(|bit| flags >> bit & 1 != 0);
            let expected = [z, c, n, v, c && !z, n == v, n == v && !z];
            for (condition, holds) in expected.into_iter().enumerate() {
                let condition = 2 * condition as u64;
                assert_eq!(with(condition, flags), holds, "{condition} {flags:x}");
                assert_eq!(with(condition + 1, flags), !holds, "{condition} {flags:x}");
            }
            assert!(with(14, flags) && with(15, flags));
        }
    }

    #[test]
    fn conditions_of_t32_are_in_the_state() {
        // ITSTATE 0x08: EQ, the last instruction of the block.
        let psr = with_it_state(psr::SUPERVISOR | psr::T, 0x08);
        let wait = syndrome(class::WAIT, 0);
        assert!(!condition_holds(wait, psr) && condition_holds(wait, psr | 1 << 30));
        assert!(condition_holds(wait, psr::SUPERVISOR | psr::T), "no block");
        for class in [class::DATA_ABORT, class::HYPERVISOR_CALL_32, class::UNKNOWN] {
            assert!(condition_holds(syndrome(class, 0), psr), "{class:#x} has none");
        }
        // SMC: only if the processor does not know that it holds.
        let call = |bit| syndrome(class::SECURE_CALL_32, HAS_CONDITION | bit);
        assert!(condition_holds(call(0), psr) && !condition_holds(call(MAY_HAVE_FAILED), psr));
    }

    #[test]
    fn instructions_are_skipped() {
        let narrow = class::WAIT << esr::CLASS_SHIFT;
        // ITSTATE of ITTE EQ: 0x06 after EQ, then 0x0c, then 0x18, then none.
        let states = [0x06, 0x0c, 0x18, 0].map(|it| with_it_state(psr::SUPERVISOR | psr::T, it));
        for pair in states.windows(2) {
            assert_eq!(after(narrow, 0x1000, pair[0]), (0x1002, pair[1]));
        }
        let wide = syndrome(class::CP15, 0);
        assert_eq!(after(wide, 0xffff_fffc, psr::RESET), (0, psr::RESET));
    }

    #[test]
    fn registers_of_modes() {
        let of = |mode, number| general(mode, number);
        for mode in [psr::USER, psr::SYSTEM] {
            assert_eq!([8, 13, 14].map(|number| of(mode, number)), [8, 13, 14]);
        }
        // The link register and the stack pointer.
        for (mode, first) in
            [(psr::IRQ, 16), (psr::SUPERVISOR, 18), (psr::ABORT, 20), (psr::UNDEFINED, 22)]
        {
            assert_eq!(
                [14, 13, 12, first].map(|number| of(mode, number)),
                [first, first + 1, 12, first]
            );
        }
        let fiq = [7, 8, 12, 13, 14, 24].map(|number| of(psr::FIQ, number));
        assert_eq!(fiq, [7, 24, 28, 29, 30, 24]);
    }

    #[test]
    fn accesses_to_coprocessors() {
        // mrc p15, 0, r3, c0, c2, 4; mcrr p15, 0, r2, r14, c12 in supervisor mode.
        let iss = HAS_CONDITION | 14 << 20 | 4 << 17 | 3 << 5 | 2 << 1 | 1;
        let access = coprocessor_access(syndrome(class::CP15, iss), psr::RESET);
        let register = coprocessor_register(0, 0, 2, 4);
        assert_eq!(access, CoprocessorAccess { register, general: 3, is_read: true });
        let iss = HAS_CONDITION | 14 << 20 | 14 << 10 | 2 << 5 | 12 << 1;
        let access = wide_access(syndrome(class::CP15_WIDE, iss), psr::RESET);
        assert_eq!(access, WideAccess { register: SGI1R, general: [2, 18], is_read: false });
    }

    #[test]
    fn modes_above_the_guest_are_no_guest_modes() {
        let allowed: Vec<u64> = (0..32).filter(|mode| psr::GUEST_MODES >> mode & 1 != 0).collect();
        assert_eq!(allowed, [0x10, 0x11, 0x12, 0x13, 0x17, 0x1b, 0x1f]);
    }
}
