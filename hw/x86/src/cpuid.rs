//! `CPUID` leaves and feature bits: APM vol. 3 (24594), appendix E, and Intel SDM vol. 2A, `CPUID`.
//! The paravirtual leaves from `0x4000_0000` are those of KVM (Linux
//! `Documentation/virt/kvm/x86/cpuid.rst`) and, for the frequencies, of VMware.

/// Leaves.
pub mod leaf {
    /// Highest basic leaf; vendor.
    pub const VENDOR: u32 = 0;
    /// Family, model, stepping; features.
    pub const FEATURES: u32 = 1;
    /// Deterministic cache parameters (Intel).
    pub const CACHE: u32 = 4;
    /// `MONITOR` and `MWAIT`.
    pub const MONITOR: u32 = 5;
    /// Power management.
    pub const POWER: u32 = 6;
    /// Extended features.
    pub const EXTENDED_FEATURES: u32 = 7;
    /// Extended topology.
    pub const TOPOLOGY: u32 = 0xb;
    /// Extended state (`XSAVE`).
    pub const XSAVE: u32 = 0xd;
    /// TSC frequency.
    pub const TSC: u32 = 0x15;
    /// First hypervisor leaf: highest such leaf, signature.
    pub const HYPERVISOR: u32 = 0x4000_0000;
    /// Paravirtual features (KVM).
    pub const HYPERVISOR_FEATURES: u32 = 0x4000_0001;
    /// TSC and bus frequency in kHz (VMware).
    pub const HYPERVISOR_TIMING: u32 = 0x4000_0010;
    /// Events of the vCPU's vTLB (Parador): subleaf, the number of the counter; `EAX`, `EBX`: its
    /// value, low and high half; `EDX`: [`VTLB_SIGNATURE`](super::VTLB_SIGNATURE) if there is one.
    pub const VTLB_EVENTS: u32 = 0x4000_0100;
    /// Highest extended leaf; vendor.
    pub const EXTENDED: u32 = 0x8000_0000;
    /// AMD features.
    pub const AMD_FEATURES: u32 = 0x8000_0001;
    /// First of three leaves with the processor name.
    pub const NAME: u32 = 0x8000_0002;
    /// Second- and third-level caches and TLBs.
    pub const L2_L3: u32 = 0x8000_0006;
    /// Advanced power management.
    pub const ADVANCED_POWER: u32 = 0x8000_0007;
    /// Address sizes, further features, number of cores.
    pub const SIZES: u32 = 0x8000_0008;
    /// SVM.
    pub const SVM: u32 = 0x8000_000a;
    /// TLBs for 1 GiB pages.
    pub const TLB_1G: u32 = 0x8000_0019;
    /// Performance hints.
    pub const HINTS: u32 = 0x8000_001a;
    /// Cache topology.
    pub const AMD_CACHE: u32 = 0x8000_001d;
    /// Processor topology.
    pub const AMD_TOPOLOGY: u32 = 0x8000_001e;
    /// Further AMD features.
    pub const AMD_FEATURES_2: u32 = 0x8000_0021;
}

/// Leaf 1, `ECX`.
#[allow(missing_docs, reason = "the manual's names")]
pub mod features_c {
    pub const SSE3: u32 = 1 << 0;
    pub const PCLMULQDQ: u32 = 1 << 1;
    pub const MONITOR: u32 = 1 << 3;
    pub const SSSE3: u32 = 1 << 9;
    pub const FMA: u32 = 1 << 12;
    pub const CMPXCHG16B: u32 = 1 << 13;
    pub const PCID: u32 = 1 << 17;
    pub const SSE41: u32 = 1 << 19;
    pub const SSE42: u32 = 1 << 20;
    pub const X2APIC: u32 = 1 << 21;
    pub const MOVBE: u32 = 1 << 22;
    pub const POPCNT: u32 = 1 << 23;
    pub const TSC_DEADLINE: u32 = 1 << 24;
    pub const AES: u32 = 1 << 25;
    pub const XSAVE: u32 = 1 << 26;
    pub const OSXSAVE: u32 = 1 << 27;
    pub const AVX: u32 = 1 << 28;
    pub const F16C: u32 = 1 << 29;
    pub const RDRAND: u32 = 1 << 30;
    pub const HYPERVISOR: u32 = 1 << 31;
}

/// Leaf 1, `EDX`.
#[allow(missing_docs, reason = "the manual's names")]
pub mod features_d {
    pub const FPU: u32 = 1 << 0;
    pub const VME: u32 = 1 << 1;
    pub const DE: u32 = 1 << 2;
    pub const PSE: u32 = 1 << 3;
    pub const TSC: u32 = 1 << 4;
    pub const MSR: u32 = 1 << 5;
    pub const PAE: u32 = 1 << 6;
    pub const MCE: u32 = 1 << 7;
    pub const APIC: u32 = 1 << 9;
    pub const PGE: u32 = 1 << 13;
    pub const PAT: u32 = 1 << 16;
    pub const DS: u32 = 1 << 21;
    pub const ACPI: u32 = 1 << 22;
    pub const FXSR: u32 = 1 << 24;
    pub const SSE: u32 = 1 << 25;
    pub const HTT: u32 = 1 << 28;
    pub const TM: u32 = 1 << 29;
    pub const PBE: u32 = 1 << 31;
}

/// Leaf 6, `EAX`: the local APIC timer runs in all power states (ARAT).
pub const POWER_ARAT: u32 = 1 << 2;

/// Leaf 7, subleaf 0, `EBX`.
#[allow(missing_docs, reason = "the manual's names")]
pub mod extended_b {
    pub const FSGSBASE: u32 = 1 << 0;
    pub const TSC_ADJUST: u32 = 1 << 1;
    pub const BMI1: u32 = 1 << 3;
    pub const AVX2: u32 = 1 << 5;
    pub const FDP_EXCPTN_ONLY: u32 = 1 << 6;
    pub const SMEP: u32 = 1 << 7;
    pub const BMI2: u32 = 1 << 8;
    pub const ERMS: u32 = 1 << 9;
    pub const INVPCID: u32 = 1 << 10;
    pub const ZERO_FCS_FDS: u32 = 1 << 13;
    pub const AVX512F: u32 = 1 << 16;
    pub const AVX512DQ: u32 = 1 << 17;
    pub const RDSEED: u32 = 1 << 18;
    pub const ADX: u32 = 1 << 19;
    pub const SMAP: u32 = 1 << 20;
    pub const AVX512_IFMA: u32 = 1 << 21;
    pub const CLFLUSHOPT: u32 = 1 << 23;
    pub const CLWB: u32 = 1 << 24;
    pub const AVX512CD: u32 = 1 << 28;
    pub const SHA: u32 = 1 << 29;
    pub const AVX512BW: u32 = 1 << 30;
    pub const AVX512VL: u32 = 1 << 31;
}

/// Leaf 7, subleaf 0, `ECX`.
#[allow(missing_docs, reason = "the manual's names")]
pub mod extended_c {
    pub const PREFETCHWT1: u32 = 1 << 0;
    pub const AVX512_VBMI: u32 = 1 << 1;
    pub const UMIP: u32 = 1 << 2;
    pub const PKU: u32 = 1 << 3;
    pub const OSPKE: u32 = 1 << 4;
    pub const AVX512_VBMI2: u32 = 1 << 6;
    pub const GFNI: u32 = 1 << 8;
    pub const VAES: u32 = 1 << 9;
    pub const VPCLMULQDQ: u32 = 1 << 10;
    pub const AVX512_VNNI: u32 = 1 << 11;
    pub const AVX512_BITALG: u32 = 1 << 12;
    pub const AVX512_VPOPCNTDQ: u32 = 1 << 14;
    pub const RDPID: u32 = 1 << 22;
    pub const CLDEMOTE: u32 = 1 << 25;
    pub const MOVDIRI: u32 = 1 << 27;
    pub const MOVDIR64B: u32 = 1 << 28;
}

/// Leaf 7, subleaf 0, `EDX`.
#[allow(missing_docs, reason = "the manual's names")]
pub mod extended_d {
    pub const FSRM: u32 = 1 << 4;
    pub const AVX512_VP2INTERSECT: u32 = 1 << 8;
    pub const SERIALIZE: u32 = 1 << 14;
    pub const AVX512_FP16: u32 = 1 << 23;
}

/// Leaf 7, subleaf 1, `EAX`.
#[allow(missing_docs, reason = "the manual's names")]
pub mod extended_1a {
    pub const AVX_VNNI: u32 = 1 << 4;
    pub const AVX512_BF16: u32 = 1 << 5;
    pub const FZRM: u32 = 1 << 10;
    pub const FSRS: u32 = 1 << 11;
    pub const FSRC: u32 = 1 << 12;
    pub const AVX_IFMA: u32 = 1 << 23;
}

/// Leaf `0xD`, subleaf 1, `EAX`.
#[allow(missing_docs, reason = "the manual's names")]
pub mod xsave_a {
    pub const XSAVEOPT: u32 = 1 << 0;
    pub const XSAVEC: u32 = 1 << 1;
    pub const XGETBV1: u32 = 1 << 2;
}

/// Leaf `0x8000_0001`, `ECX`.
#[allow(missing_docs, reason = "the manual's names")]
pub mod amd_c {
    pub const LAHF_LM: u32 = 1 << 0;
    pub const CMP_LEGACY: u32 = 1 << 1;
    pub const SVM: u32 = 1 << 2;
    pub const ALT_MOV_CR8: u32 = 1 << 4;
    pub const ABM: u32 = 1 << 5;
    pub const SSE4A: u32 = 1 << 6;
    pub const MISALIGN_SSE: u32 = 1 << 7;
    pub const PREFETCHW: u32 = 1 << 8;
    pub const XOP: u32 = 1 << 11;
    pub const FMA4: u32 = 1 << 16;
    pub const TBM: u32 = 1 << 21;
    pub const TOPOLOGY_EXTENSIONS: u32 = 1 << 22;
}

/// Leaf `0x8000_0001`, `EDX`.
#[allow(missing_docs, reason = "the manual's names")]
pub mod amd_d {
    pub const SYSCALL: u32 = 1 << 11;
    pub const NX: u32 = 1 << 20;
    pub const FFXSR: u32 = 1 << 25;
    pub const RDTSCP: u32 = 1 << 27;
}

/// Leaf `0x8000_0007`, `EDX`: the TSC rate is constant in all power states.
pub const INVARIANT_TSC: u32 = 1 << 8;

/// Leaf `0x8000_0008`, `EBX`.
#[allow(missing_docs, reason = "the manual's names")]
pub mod sizes_b {
    pub const CLZERO: u32 = 1 << 0;
    pub const XSAVEERPTR: u32 = 1 << 2;
    pub const WBNOINVD: u32 = 1 << 9;
}

/// Leaf `0x8000_0021`, `EAX`.
#[allow(missing_docs, reason = "the manual's names")]
pub mod amd_2a {
    pub const NO_NESTED_DATA_BP: u32 = 1 << 0;
    pub const LFENCE_SERIALIZING: u32 = 1 << 2;
    pub const NULL_SELECTOR_CLEARS_BASE: u32 = 1 << 6;
    pub const NO_SMM_CTL_MSR: u32 = 1 << 9;
}

/// Leaf `0x4000_0100`, `EDX`, where the counter exists.
pub const VTLB_SIGNATURE: u32 = u32::from_le_bytes(*b"vTLB");

/// Leaf `0x4000_0001`, `EAX`: paravirtual features (KVM).
pub mod kvm_a {
    /// No delay is needed between port accesses.
    pub const NOP_IO_DELAY: u32 = 1 << 1;
    /// Paravirtual clock, MSRs `0x4b56_4d00` and `0x4b56_4d01`.
    pub const CLOCKSOURCE2: u32 = 1 << 3;
    /// Steal time, MSR `0x4b56_4d03`.
    pub const STEAL_TIME: u32 = 1 << 5;
    /// Paravirtual EOI, MSR `0x4b56_4d04`.
    pub const PV_EOI: u32 = 1 << 6;
    /// The TLB of a preempted vCPU is flushed before it runs again. Needs [`STEAL_TIME`].
    pub const PV_TLB_FLUSH: u32 = 1 << 9;
    /// IPIs to several vCPUs by hypercall.
    pub const PV_SEND_IPI: u32 = 1 << 11;
    /// The stable flag of the paravirtual clock is reliable.
    pub const CLOCKSOURCE_STABLE: u32 = 1 << 24;
}
