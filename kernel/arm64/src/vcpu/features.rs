//! Identification registers as guests read them: the processor's fields of features that the
//! kernel lets them use (Arm ARM, D24.2.59 and following). What is not listed is absent.

use hw_arm64::esr::{SystemAccess, system_register};

use crate::read_register;

/// Mask of the four-bit fields with these lowest bits.
const fn fields<const N: usize>(lowest: [u32; N]) -> u64 {
    let (mut mask, mut index) = (0, 0);
    while index < N {
        mask |= 0xf << lowest[index];
        index += 1;
    }
    mask
}

/// EL0, EL1, FP, AdvSIMD, GIC, DIT, CSV2 (1 at most), CSV3. Not EL2, EL3, RAS, SVE, MPAM, AMU, RME.
const PFR0: u64 = fields([0, 4, 16, 20, 24, 48, 56, 60]);
/// CSV2: higher values promise SCXTNUM_EL1, which traps.
const CSV2: u32 = 56;
/// BT, SSBS. Not MTE, SME, NMI, CSV2_frac.
const PFR1: u64 = fields([0, 4]);
/// DebugVer, BRPs, WRPs, CTX_CMPs, DoubleLock. Not PMU, SPE, trace.
const DFR0: u64 = fields([0, 12, 20, 28, 36]);
/// All except TME.
const ISAR0: u64 = !fields([24]);
/// DPB, JSCVT, FCMA, LRCPC, FRINTTS, SB, SPECRES, BF16, DGH, I8MM. Not pointer authentication,
/// LS64, XS.
const ISAR1: u64 = fields([0, 12, 16, 20, 32, 36, 40, 44, 48, 52]);
/// RPRES. Not WFxT, pointer authentication, MOPS.
const ISAR2: u64 = fields([4]);
/// All except BigEnd, BigEndEL0, FGT, ECV.
const MMFR0: u64 = !fields([8, 16, 56, 60]);
/// HAFDBS, PAN, XNX, ETS, nTLBPA. Not VMIDBits, VH, LO, HCX, AFP, TIDCP1, CMOW.
const MMFR1: u64 = fields([0, 20, 28, 36, 48]);
/// UAO, LSM, IESB, VARange, CCIDX, ST, AT, IDS, TTL, BBM, E0PD. Not NV, FWB, EVT, nor CnP: all
/// guests have one VMID, and processors that share a TLB may run different guests.
const MMFR2: u64 = fields([4, 8, 12, 16, 20, 28, 32, 36, 48, 52, 60]);

/// ID_PFR0: not RAS, AMU.
const PFR0_32: u64 = !fields([20, 28]);
/// ID_MMFR4: not CnP.
const MMFR4_32: u64 = !fields([12]);
/// ID_PFR1: not security extensions and virtualization, which are those of EL3 and EL2.
const PFR1_32: u64 = !fields([4, 12, 20, 24]);

/// Limits the field with this lowest bit to 1.
const fn at_most_one(value: u64, lowest: u32) -> u64 {
    let field = value >> lowest & 0xf;
    value & !(0xf << lowest) | if field == 0 { 0 } else { 1 << lowest }
}

/// Value of a register of AArch32, which EL0 may have.
#[cold]
fn read_32(register: u32) -> u64 {
    macro_rules! choose {
        ($($crm:literal: $($op2:literal = $name:literal)+;)+) => {
            $($(if register == system_register(3, 0, 0, $crm, $op2) {
                return read_register!($name);
            })+)+
        };
    }
    choose! {
        1: 4 = "id_mmfr0_el1" 5 = "id_mmfr1_el1"
            6 = "id_mmfr2_el1" 7 = "id_mmfr3_el1";
        2: 0 = "id_isar0_el1" 1 = "id_isar1_el1" 2 = "id_isar2_el1" 3 = "id_isar3_el1"
            4 = "id_isar4_el1" 5 = "id_isar5_el1" 7 = "S3_0_C0_C2_7";
        3: 0 = "mvfr0_el1" 1 = "mvfr1_el1" 2 = "mvfr2_el1";
    }
    0
}

/// Value that a guest reads. `None`: no register of this group.
pub fn read(access: SystemAccess) -> Option<u64> {
    if access.is_read { value(access.register) } else { None }
}

/// Value of a register for guests. `None`: it is not of this group.
pub fn value(register: u32) -> Option<u64> {
    const fn id(crm: u32, op2: u32) -> u32 {
        system_register(3, 0, 0, crm, op2)
    }
    const PFR0_EL1: u32 = id(4, 0);
    const PFR1_EL1: u32 = id(4, 1);
    const DFR0_EL1: u32 = id(5, 0);
    const ISAR0_EL1: u32 = id(6, 0);
    const ISAR1_EL1: u32 = id(6, 1);
    const ISAR2_EL1: u32 = id(6, 2);
    const MMFR0_EL1: u32 = id(7, 0);
    const MMFR1_EL1: u32 = id(7, 1);
    const MMFR2_EL1: u32 = id(7, 2);
    const FIRST_64: u32 = id(4, 0);
    const LAST: u32 = id(7, 7);
    const PFR0_32_EL1: u32 = id(1, 0);
    const MMFR4_32_EL1: u32 = id(2, 6);
    const PFR1_32_EL1: u32 = id(1, 1);
    const DFR0_32: u32 = id(1, 2);
    const LAST_32: u32 = id(3, 7);
    Some(match register {
        PFR0_EL1 => at_most_one(read_register!("id_aa64pfr0_el1") & PFR0, CSV2),
        PFR1_EL1 => read_register!("id_aa64pfr1_el1") & PFR1,
        DFR0_EL1 => read_register!("id_aa64dfr0_el1") & DFR0,
        ISAR0_EL1 => read_register!("id_aa64isar0_el1") & ISAR0,
        ISAR1_EL1 => read_register!("id_aa64isar1_el1") & ISAR1,
        ISAR2_EL1 => read_register!("S3_0_C0_C6_2") & ISAR2,
        MMFR0_EL1 => read_register!("id_aa64mmfr0_el1") & MMFR0,
        MMFR1_EL1 => read_register!("id_aa64mmfr1_el1") & MMFR1,
        MMFR2_EL1 => read_register!("id_aa64mmfr2_el1") & MMFR2,
        DFR0_32 => 0,
        PFR0_32_EL1 => read_register!("id_pfr0_el1") & PFR0_32,
        MMFR4_32_EL1 => read_register!("S3_0_C0_C2_6") & MMFR4_32,
        PFR1_32_EL1 => read_register!("id_pfr1_el1") & PFR1_32,
        register if (PFR0_32_EL1..=LAST_32).contains(&register) => read_32(register),
        // Those without a name, or of absent features.
        register if (FIRST_64..=LAST).contains(&register) => 0,
        _ => return None,
    })
}
