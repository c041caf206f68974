//! Model-specific registers: APM vol. 2 (24593), appendix A; Intel SDM vol. 4, chapter 2, for those
//! that AMD adopted.

/// Time stamp counter.
pub const TSC: u32 = 0x10;
/// Base and mode of the local APIC: [`apic_base`]. APM vol. 2 §16.3.1.
pub const APIC_BASE: u32 = 0x1b;
/// Memory-type range registers: number and features. APM vol. 2 §7.7.
pub const MTRR_CAP: u32 = 0xfe;
/// Machine check: number of banks (7:0). APM vol. 2 §9.3.1.
pub const MCG_CAP: u32 = 0x179;
/// Machine check: processor state at the exception. APM vol. 2 §9.3.1.
pub const MCG_STATUS: u32 = 0x17a;
/// Machine check: status of bank 0, [`mc_status`]; bank `n` is at `MC0_STATUS + 4 * n`. APM vol. 2
/// §9.3.2.
pub const MC0_STATUS: u32 = 0x401;
/// Machine check: address of bank 0.
pub const MC0_ADDR: u32 = 0x402;
/// Page attribute table. APM vol. 2 §7.8.
pub const PAT: u32 = 0x277;
/// Default memory type. APM vol. 2 §7.7.
pub const MTRR_DEF_TYPE: u32 = 0x2ff;
/// Deadline of the local APIC timer in TSC ticks, 0 disarms. SDM vol. 3 §11.5.4.1.
pub const TSC_DEADLINE: u32 = 0x6e0;
/// First x2APIC register; register `r` (its xAPIC offset) is at `X2APIC + r / 16`. APM vol. 2
/// §16.11.
pub const X2APIC: u32 = 0x800;
/// Extended features: [`efer`]. APM vol. 2 §3.1.7.
pub const EFER: u32 = 0xc000_0080;
/// Selectors of SYSCALL (47:32) and SYSRET (63:48). APM vol. 2 §6.1.1.
pub const STAR: u32 = 0xc000_0081;
/// Target of SYSCALL from 64-bit mode.
pub const LSTAR: u32 = 0xc000_0082;
/// Target of SYSCALL from compatibility mode.
pub const CSTAR: u32 = 0xc000_0083;
/// RFLAGS bits that SYSCALL clears.
pub const SFMASK: u32 = 0xc000_0084;
/// Base of FS.
pub const FS_BASE: u32 = 0xc000_0100;
/// Base of GS.
pub const GS_BASE: u32 = 0xc000_0101;
/// Base that SWAPGS exchanges with GS.
pub const KERNEL_GS_BASE: u32 = 0xc000_0102;
/// Auxiliary value of RDTSCP.
pub const TSC_AUX: u32 = 0xc000_0103;
/// SYSENTER code selector. APM vol. 2 §6.1.2.
pub const SYSENTER_CS: u32 = 0x174;
/// SYSENTER stack pointer.
pub const SYSENTER_ESP: u32 = 0x175;
/// SYSENTER target.
pub const SYSENTER_EIP: u32 = 0x176;
/// Debug control. APM vol. 2 §13.1.1.
pub const DEBUG_CTL: u32 = 0x1d9;
/// SVM control: [`vm_cr`]. APM vol. 2 §15.30.1.
pub const VM_CR: u32 = 0xc001_0114;
/// Physical address of the host save area. APM vol. 2 §15.30.4.
pub const VM_HSAVE_PA: u32 = 0xc001_0117;

/// Bits of [`MC0_STATUS`].
pub mod mc_status {
    /// The bank contains an error.
    pub const VAL: u64 = 1 << 63;
    /// The hardware has not corrected the error.
    pub const UC: u64 = 1 << 61;
    /// Errors of this kind raise machine checks, by the bank's control register.
    pub const EN: u64 = 1 << 60;
    /// The bank's address register is valid.
    pub const ADDRV: u64 = 1 << 58;

    /// Returns true for the status of an error that raised a machine check: uncorrected, and
    /// enabled for reporting.
    pub const fn raised_machine_check(status: u64) -> bool {
        status & (VAL | UC | EN) == VAL | UC | EN
    }
}

/// Bits of [`APIC_BASE`].
pub mod apic_base {
    /// Bootstrap processor.
    pub const BSP: u64 = 1 << 8;
    /// x2APIC mode; only together with [`ENABLE`].
    pub const X2APIC: u64 = 1 << 10;
    /// Local APIC enabled.
    pub const ENABLE: u64 = 1 << 11;
    /// Physical base of the registers (xAPIC).
    pub const ADDRESS: u64 = 0x000f_ffff_ffff_f000;
}

/// Bits of [`EFER`].
pub mod efer {
    /// SYSCALL and SYSRET enabled.
    pub const SCE: u64 = 1 << 0;
    /// Long mode enabled.
    pub const LME: u64 = 1 << 8;
    /// Long mode active.
    pub const LMA: u64 = 1 << 10;
    /// No-execute pages enabled.
    pub const NXE: u64 = 1 << 11;
    /// SVM instructions enabled.
    pub const SVME: u64 = 1 << 12;
    /// Fast FXSAVE and FXRSTOR.
    pub const FFXSR: u64 = 1 << 14;
}

/// Bits of [`VM_CR`].
pub mod vm_cr {
    /// EFER.SVME cannot be set while [`SVMDIS`] is.
    pub const LOCK: u64 = 1 << 3;
    /// SVM disabled, usually by the firmware.
    pub const SVMDIS: u64 = 1 << 4;
}

/// MSRs that guest kernels probe, of interest to VMMs only.
#[allow(missing_docs, reason = "the manual's names")]
pub mod probe {
    pub const PLATFORM_ID: u32 = 0x17;
    pub const TSC_ADJUST: u32 = 0x3b;
    /// Microcode revision ("patch level"). APM vol. 2, section 3.2.
    pub const PATCH_LEVEL: u32 = 0x8b;
    pub const MCG_CAP: u32 = 0x179;
    pub const MCG_STATUS: u32 = 0x17a;
    pub const MISC_ENABLE: u32 = 0x1a0;
    /// Base and mask pairs of the variable ranges. APM vol. 2, section 7.7.2.
    pub const MTRR_VARIABLE: u32 = 0x200;
    pub const MTRR_FIX_64K: u32 = 0x250;
    pub const MTRR_FIX_16K_80000: u32 = 0x258;
    pub const MTRR_FIX_16K_A0000: u32 = 0x259;
    pub const MTRR_FIX_4K: u32 = 0x268;
    pub const MTRR_FIX_4K_LAST: u32 = 0x26f;
    pub const EVENT_SELECT_0: u32 = 0xc001_0000;
    pub const COUNTER_3: u32 = 0xc001_0007;
    /// System configuration. APM vol. 2, section 3.2.1.
    pub const SYSCFG: u32 = 0xc001_0010;
    /// Hardware configuration.
    pub const HWCR: u32 = 0xc001_0015;
    pub const IORR_BASE_0: u32 = 0xc001_0016;
    pub const IORR_MASK_1: u32 = 0xc001_0019;
    /// Top of memory below 4 GiB. APM vol. 2, section 7.9.4.
    pub const TOP_MEM: u32 = 0xc001_001a;
    pub const TOP_MEM2: u32 = 0xc001_001d;
    /// Northbridge configuration.
    pub const NB_CFG: u32 = 0xc001_001f;
    pub const PATCH_LOADER: u32 = 0xc001_0020;
    /// Interrupt pending messages (C1E).
    pub const INT_PENDING: u32 = 0xc001_0055;
    pub const PSTATE_LIMIT: u32 = 0xc001_0061;
    pub const PSTATE_STATUS: u32 = 0xc001_0063;
    pub const SMM_ADDR: u32 = 0xc001_0112;
    pub const SMM_MASK: u32 = 0xc001_0113;
    pub const LS_CFG: u32 = 0xc001_1020;
    pub const IC_CFG: u32 = 0xc001_1021;
    pub const DC_CFG: u32 = 0xc001_1022;
    /// Decode configuration: LFENCE serialization. AMD publication 56860.
    pub const DE_CFG: u32 = 0xc001_1029;
    pub const BU_CFG2: u32 = 0xc001_102a;
}

/// MSRs of the KVM paravirtual interface (Linux `Documentation/virt/kvm/x86/msr.rst`).
pub mod kvm {
    /// Address of the wall-clock structure; a write requests an update.
    pub const WALL_CLOCK: u32 = 0x4b56_4d00;
    /// Address of this vCPU's clock structure; bit 0 enables it.
    pub const SYSTEM_TIME: u32 = 0x4b56_4d01;
    /// Address of this vCPU's steal-time record ([`crate::kvm::steal_time`]); bit 0 enables it.
    pub const STEAL_TIME: u32 = 0x4b56_4d03;
    /// Address of the word through which this vCPU signals EOI; bit 0 enables it.
    pub const EOI: u32 = 0x4b56_4d04;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_errors_that_raise_machine_checks_stop_the_machine() {
        // Bits of the status of bank 0, from bit 63 down: VAL, OVER, UC, EN, MISCV, ADDRV, PCC.
        for (status, expected) in [
            (0, false),
            // Corrected, and corrected with an overflow.
            (0x9000_0000_0000_0135, false),
            (0xd000_0000_0000_0135, false),
            // Uncorrected, but reporting is disabled.
            (0xa000_0000_0000_0135, false),
            // VAL is clear: no error.
            (0x3000_0000_0000_0135, false),
            (0xb000_0000_0000_0135, true),
            (0xfe00_0000_0007_0b0f, true),
        ] {
            assert_eq!(mc_status::raised_machine_check(status), expected, "{status:#x}");
        }
    }
}
