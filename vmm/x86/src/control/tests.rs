use super::*;
use crate::cpuid::{CpuidConfig, CpuidTable};
use Refusal::{Protection, TwoLevelPaging};

/// Registers before, value written, expected result.
type Case<T> = (ControlRegisters, u64, Result<T, Refusal>);

const LONG: ControlRegisters = ControlRegisters {
    cr0: cr0::PE | cr0::ET | cr0::PG | cr0::WP,
    cr3: 0x1000,
    cr4: cr4::PAE,
    efer: efer::LME | efer::LMA,
    long_code: true,
};
/// 32-bit code of a kernel that turns long mode on next.
const BEFORE_LONG: ControlRegisters =
    ControlRegisters { cr0: cr0::PE | cr0::ET, efer: efer::LME, long_code: false, ..LONG };
const PAE: ControlRegisters = ControlRegisters { cr0: LONG.cr0, efer: 0, long_code: false, ..LONG };
const REAL: ControlRegisters =
    ControlRegisters { cr0: cr0::ET, cr3: 0, cr4: 0, efer: 0, long_code: false };

#[test]
fn writes_of_cr0() {
    let protected = ControlRegisters { cr0: cr0::PE | cr0::ET, ..REAL };
    let compatible = ControlRegisters { long_code: false, ..LONG };
    let with_pcid = ControlRegisters { cr4: cr4::PAE | cr4::PCIDE, ..compatible };
    let cases: &[Case<(u64, u64)>] = &[
        // Registers before, value; CR0 and EFER after.
        (REAL, cr0::PE, Ok((cr0::PE | cr0::ET, 0))),
        (REAL, cr0::PG, Err(Protection)),
        (REAL, cr0::NW, Err(Protection)),
        (REAL, cr0::NW | cr0::CD, Ok((cr0::NW | cr0::CD | cr0::ET, 0))),
        (REAL, cr0::CD, Ok((cr0::CD | cr0::ET, 0))),
        (REAL, 1 << 32, Err(Protection)),
        (REAL, 1 << 63, Err(Protection)),
        // Bits that do not exist are ignored.
        (REAL, 0x1ffa_ffc0, Ok((cr0::ET, 0))),
        (protected, cr0::PE | cr0::PG, Err(TwoLevelPaging)),
        (protected, 0, Ok((cr0::ET, 0))),
        (BEFORE_LONG, cr0::PE | cr0::PG, Ok((cr0::PE | cr0::PG | cr0::ET, LONG.efer))),
        (ControlRegisters { cr4: 0, ..BEFORE_LONG }, cr0::PE | cr0::PG, Err(Protection)),
        (ControlRegisters { long_code: true, ..BEFORE_LONG }, cr0::PE | cr0::PG, Err(Protection)),
        (
            ControlRegisters { efer: 0, ..BEFORE_LONG },
            cr0::PE | cr0::PG,
            Ok((cr0::PE | cr0::PG | cr0::ET, 0)),
        ),
        (LONG, LONG.cr0 | cr0::TS, Ok((LONG.cr0 | cr0::TS, LONG.efer))),
        (LONG, LONG.cr0 & !cr0::WP, Ok((LONG.cr0 & !cr0::WP, LONG.efer))),
        (LONG, cr0::PE, Err(Protection)),
        (LONG, cr0::PG, Err(Protection)),
        (compatible, cr0::PE, Ok((cr0::PE | cr0::ET, efer::LME))),
        (with_pcid, cr0::PE, Err(Protection)),
        (PAE, cr0::PE, Ok((cr0::PE | cr0::ET, 0))),
    ];
    for &(before, value, expected) in cases {
        let after = before.write_cr0(value).map(|after| (after.cr0, after.efer));
        assert_eq!(after, expected, "{before:x?} {value:#x}");
    }
}

#[test]
fn status_words() {
    let status = |before: ControlRegisters, word| before.load_status_word(word).map(|it| it.cr0);
    assert_eq!(status(REAL, 0xffff), Ok(cr0::ET | 0xf));
    assert_eq!(status(REAL, 0xfff0), Ok(cr0::ET));
    // PE stays, and so do the bits above.
    assert_eq!(status(LONG, 0), Ok(LONG.cr0));
    assert_eq!(status(LONG, 0xa), Ok(LONG.cr0 | cr0::TS | cr0::MP));
    let switched = ControlRegisters { cr0: LONG.cr0 | cr0::TS, ..LONG };
    assert_eq!(switched.clear_task_switched(), LONG);
}

#[test]
fn writes_of_cr3() {
    const MASK: u64 = (1 << 40) - 1;
    let with_pcid = ControlRegisters { cr4: cr4::PAE | cr4::PCIDE, ..LONG };
    let cases: &[Case<u64>] = &[
        (LONG, 0x12_3456_7018, Ok(0x12_3456_7018)),
        (LONG, MASK, Ok(MASK)),
        (LONG, 1 << 40, Err(Protection)),
        (LONG, 1 << 52, Err(Protection)),
        (LONG, 1 << 63, Err(Protection)),
        (with_pcid, 1 << 63 | 0x1005, Ok(0x1005)),
        (with_pcid, 1 << 62, Err(Protection)),
    ];
    for &(before, value, expected) in cases {
        let after = before.write_cr3(value, MASK).map(|after| after.cr3);
        assert_eq!(after, expected, "{before:x?} {value:#x}");
    }
}

#[test]
fn writes_of_cr4() {
    let allowed = cr4::PAE | cr4::PGE | cr4::PSE | cr4::PCIDE | cr4::OSXSAVE;
    let no_paging = ControlRegisters { cr0: cr0::PE, ..PAE };
    let low_cr3 = ControlRegisters { cr3: 0x1001, ..LONG };
    let cases: &[Case<u64>] = &[
        (LONG, cr4::PAE | cr4::PGE, Ok(cr4::PAE | cr4::PGE)),
        (LONG, cr4::PGE, Err(Protection)),
        (LONG, cr4::PAE | cr4::SMEP, Err(Protection)),
        (LONG, cr4::PAE | cr4::LA57, Err(Protection)),
        (LONG, cr4::PAE | 1 << 13, Err(Protection)),
        (LONG, cr4::PAE | 1 << 63, Err(Protection)),
        (LONG, cr4::PAE | cr4::PCIDE, Ok(cr4::PAE | cr4::PCIDE)),
        (low_cr3, cr4::PAE | cr4::PCIDE, Err(Protection)),
        (PAE, cr4::PAE | cr4::PCIDE, Err(Protection)),
        (PAE, cr4::PSE, Err(TwoLevelPaging)),
        (no_paging, cr4::PSE, Ok(cr4::PSE)),
        (REAL, cr4::PAE, Ok(cr4::PAE)),
    ];
    for &(before, value, expected) in cases {
        let after = before.write_cr4(value, allowed).map(|after| after.cr4);
        assert_eq!(after, expected, "{before:x?} {value:#x}");
    }
}

#[test]
fn cr4_bits_follow_the_features() {
    let config = CpuidConfig {
        vcpus: 1,
        xcr0_mask: 7,
        tsc_khz: 1,
        apic_khz: 1,
        kvmclock: false,
        steal_time: false,
        pv_flush: false,
        pv_ipi: false,
        nested_paging: true,
    };
    let host = |word: u32| {
        CpuidTable::new(&config, |number, _| match number {
            0 => [0xd, 0, 0, 0],
            0xd => [7, 0, 0, 0],
            _ => [word; 4],
        })
    };
    assert_eq!(allowed_cr4(&host(0)), cr4::PCE);
    let most = allowed_cr4(&host(u32::MAX));
    let expected = cr4::VME
        | cr4::PVI
        | cr4::TSD
        | cr4::DE
        | cr4::PSE
        | cr4::PAE
        | cr4::MCE
        | cr4::PGE
        | cr4::PCE
        | cr4::OSFXSR
        | cr4::OSXMMEXCPT
        | cr4::UMIP
        | cr4::FSGSBASE
        | cr4::PCIDE
        | cr4::OSXSAVE
        | cr4::SMEP
        | cr4::SMAP;
    assert_eq!(most, expected);
}
