//! Constant intercepts, the causes of VM exits (APM vol. 2 §15.7 to §15.14). `svm` has the
//! permission maps of ports and MSRs, `virq` the intercepts that change: virtual interrupts, writes
//! of CR8, and IRET.

use hw_x86::vmcb::{ControlArea, intercept_exceptions, intercept3, intercept4};

/// Sets the intercepts of a vCPU in its reset state.
pub fn set(control: &ControlArea) {
    // The guest's CR8 is the VMCB's `V_TPR`, since interrupts are masked virtually; the host's task
    // priority is not affected.
    control.intercept_cr.set(0);
    control.intercept_dr.set(0);
    control
        .intercept_exceptions
        .set(intercept_exceptions::DB | intercept_exceptions::AC | intercept_exceptions::MC);
    control.intercept3.set(
        intercept3::INTR
            | intercept3::NMI
            | intercept3::SMI
            | intercept3::INIT
            | intercept3::RDPMC
            | intercept3::CPUID
            | intercept3::INVD
            | intercept3::HLT
            | intercept3::INVLPGA
            | intercept3::IOIO_PROT
            | intercept3::MSR_PROT
            | intercept3::TASK_SWITCH
            | intercept3::FERR_FREEZE
            | intercept3::SHUTDOWN,
    );
    control.intercept4.set(
        intercept4::VMRUN
            | intercept4::VMMCALL
            | intercept4::VMLOAD
            | intercept4::VMSAVE
            | intercept4::STGI
            | intercept4::CLGI
            | intercept4::SKINIT
            | intercept4::WBINVD
            | intercept4::MONITOR
            | intercept4::MWAIT
            | intercept4::XSETBV
            | intercept4::RDPRU,
    );
    control.intercept5.set(0);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::shadow::{self, ControlRegisters, Registers};
    use hw_x86::paging::{cr0, cr4};
    use hw_x86::vmcb::Vmcb;

    /// Bits of one intercept word, each with its reason.
    type Table = &'static [(u32, &'static str)];

    const EXCEPTIONS: Table = &[
        (1, "#DB: its delivery may raise it again endlessly (CVE-2015-8104)"),
        (17, "#AC: its delivery may raise it again endlessly (CVE-2015-5307)"),
        (18, "#MC: hardware errors are the host's"),
    ];
    const WORD_3: Table = &[
        (0, "INTR: interrupts are the host's"),
        (1, "NMI: NMIs are the host's"),
        (2, "SMI: runs with host state, not the guest's"),
        (3, "INIT: must not reset the CPU"),
        (15, "RDPMC: counters reveal activity of other guests"),
        (18, "CPUID: the VMM defines the guest's features"),
        (22, "INVD: would discard modified cache lines of others"),
        (24, "HLT: the CPU runs other threads"),
        (26, "INVLPGA: would flush other ASIDs"),
        (27, "IOIO_PROT: ports denied by the map"),
        (28, "MSR_PROT: MSRs denied by the map"),
        (29, "TASK_SWITCH: nested paging needs it (APM vol. 2, section 15.14.1)"),
        (30, "FERR_FREEZE: the legacy FPU error line is the host's"),
        (31, "SHUTDOWN: a triple fault must not reset the machine"),
    ];
    const WORD_4: Table = &[
        (0, "VMRUN: required; guests have no SVM"),
        (1, "VMMCALL: hypercalls"),
        (2, "VMLOAD: uses physical addresses of the host"),
        (3, "VMSAVE: uses physical addresses of the host"),
        (4, "STGI: the global interrupt flag is the host's"),
        (5, "CLGI: the global interrupt flag is the host's"),
        (6, "SKINIT: would restart the machine"),
        (9, "WBINVD: slow, and affects other guests"),
        (10, "MONITOR: not offered to guests"),
        (11, "MWAIT: would idle the CPU"),
        (13, "XSETBV: the VMM limits what the guest may enable"),
        (14, "RDPRU: counters reveal activity of other guests"),
    ];

    /// Further ones of a guest with a vTLB.
    const VTLB_CR: Table = &[
        (3, "reads of CR3: the processor has the root of the shadow tables"),
        (19, "writes of CR3: another space, or a flush"),
        (20, "writes of CR4: PAE stays set, and translations depend on other bits"),
    ];
    const VTLB_EXCEPTIONS: Table = &[(14, "#PF: fills the shadow tables, or is the guest's")];
    const VTLB_WORD_3: Table = &[
        (5, "CR0_SEL_WRITE: translations depend on PG and WP"),
        (25, "INVLPG: removes a shadow translation"),
    ];
    /// Those while the processor's CR0 and CR4 differ from the guest's.
    const VTLB_DIFFERS: Table = &[
        (0, "reads of CR0: the processor has PG and WP"),
        (4, "reads of CR4: the processor has PAE"),
        (16, "writes of CR0: the selective intercept compares with the processor's bits"),
    ];

    /// Compares the intercept words with tables: those of every guest, and others.
    fn compare(control: &ControlArea, cr: &[Table], exceptions: Table, word_3: Table) {
        let words: [(&str, u32, &[Table]); 6] = [
            ("CR", control.intercept_cr.get(), cr),
            ("DR", control.intercept_dr.get(), &[]),
            ("exceptions", control.intercept_exceptions.get(), &[EXCEPTIONS, exceptions]),
            ("word 3", control.intercept3.get(), &[WORD_3, word_3]),
            ("word 4", control.intercept4.get(), &[WORD_4]),
            ("word 5", control.intercept5.get(), &[]),
        ];
        for (name, word, tables) in words {
            let bits = tables.iter().copied().flatten();
            let listed = bits.fold(0, |bits, (bit, _)| bits | 1 << bit);
            assert_eq!(word, listed, "{name}: {word:#x}, listed {listed:#x}");
        }
    }

    #[test]
    fn every_intercept_has_a_reason() {
        // SAFETY: all fields are integers.
        let control: ControlArea = unsafe { core::mem::zeroed() };
        // Previous values must be overwritten.
        control.intercept_cr.set(u32::MAX);
        control.intercept_dr.set(u32::MAX);
        control.intercept5.set(u32::MAX);
        set(&control);
        compare(&control, &[], &[], &[]);
    }

    #[test]
    fn every_intercept_of_a_vtlb_has_a_reason() {
        // SAFETY: all fields are integers.
        let vmcb: Vmcb = unsafe { core::mem::zeroed() };
        set(&vmcb.control);
        shadow::set_intercepts(&vmcb.control);
        compare(&vmcb.control, &[VTLB_CR], VTLB_EXCEPTIONS, VTLB_WORD_3);
        let registers = ControlRegisters::default();
        let off = Registers { cr0: cr0::PE, ..Registers::default() };
        registers.set(&vmcb, off);
        compare(&vmcb.control, &[VTLB_CR, VTLB_DIFFERS], VTLB_EXCEPTIONS, VTLB_WORD_3);
        let cr0 = cr0::PE | cr0::PG | cr0::WP;
        registers.set(&vmcb, Registers { cr0, cr4: cr4::PAE, ..off });
        compare(&vmcb.control, &[VTLB_CR], VTLB_EXCEPTIONS, VTLB_WORD_3);
    }

    #[test]
    fn without_paging_no_page_is_one_of_users() {
        // SAFETY: all fields are integers.
        let vmcb: Vmcb = unsafe { core::mem::zeroed() };
        let cr4 = cr4::PAE | cr4::SMEP | cr4::SMAP;
        let off = Registers { cr0: cr0::PE | cr0::WP, cr4, ..Registers::default() };
        ControlRegisters::default().set(&vmcb, off);
        assert_eq!(vmcb.save.cr4.get(), cr4::PAE);
        ControlRegisters::default().set(&vmcb, Registers { cr0: off.cr0 | cr0::PG, ..off });
        assert_eq!(vmcb.save.cr4.get(), cr4);
    }
}
