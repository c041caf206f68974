//! `CPUID` results of the guest.
//!
//! A table is computed once from the host's results and the VM's configuration; an exit is then one
//! lookup. Policy: the guest sees the host CPU (vendor, family, caches, instructions), so that it
//! runs the same code paths as on bare metal, except
//! - features that need switching or emulation which is missing: nested SVM, `MONITOR`, performance
//!   counters, speculation control MSRs, supervisor extended state, 5-level paging, control-flow
//!   enforcement. Feature words where new bits appear are allow-lists for this reason;
//! - features that the VM adds: x2APIC, TSC-deadline timer, an always-running APIC timer;
//! - topology: one package, one core per vCPU, one thread per core;
//! - extended state: the components that the host switches for guests (`xcr0_mask`);
//! - leaf `0x4000_0000`: the KVM paravirtual interface, which Linux supports, and the frequencies;
//! - leaf `0x4000_0100`: events of the vTLB, for benchmarks in the guest.
//!
//! Leaves out of range return 0, as on AMD processors (APM vol. 3, section E.2).

use hw_x86::cpuid::{
    INVARIANT_TSC, POWER_ARAT, VTLB_SIGNATURE, amd_2a, amd_c, extended_1a, extended_b, extended_c,
    extended_d, features_c, features_d, kvm_a, leaf, sizes_b, xsave_a,
};
use hw_x86::paging::{cr4, xcr0};

/// `eax, ebx, ecx, edx`.
pub type Values = [u32; 4];

/// Configuration of the table beside the host's results.
#[derive(Clone, Copy, Debug)]
pub struct CpuidConfig {
    /// Number of virtual CPUs.
    pub vcpus: u8,
    /// `XCR0` bits that the host switches for guests.
    pub xcr0_mask: u64,
    /// TSC frequency in kHz.
    pub tsc_khz: u32,
    /// Frequency of the local APIC timer in kHz.
    pub apic_khz: u32,
    /// Offer the KVM paravirtual clock.
    pub kvmclock: bool,
    /// Offer the KVM steal-time record.
    pub steal_time: bool,
    /// Offer TLB flushes of other CPUs that are requested in that record.
    pub pv_flush: bool,
    /// Offer IPIs to several CPUs by one KVM hypercall. Not for hosts where the guest's hypercalls
    /// may reach another hypervisor.
    pub pv_ipi: bool,
    /// The host translates guest-physical addresses in hardware. Without it, the guest has no
    /// process-context identifiers, protection keys and TLB flushes by steal-time records: a
    /// back end that translates in software has only the translations of one space per `CR3`.
    pub nested_paging: bool,
}

/// vCPU state that a result depends on beside the table.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Patch {
    /// Nothing.
    None,
    /// Leaf 1: APIC id, `OSXSAVE`, `APIC`.
    Features,
    /// Leaf `0x8000_0001`: `APIC` again.
    AmdFeatures,
    /// Leaf 7: `OSPKE`.
    ExtendedFeatures,
    /// Leaf `0xB`, this subleaf.
    Topology(u32),
    /// Leaf `0xD`, subleaf 0: size of the enabled state.
    XsaveSize,
    /// Leaf `0xD`, subleaf 1: size of the enabled state, compacted.
    XsaveCompactSize,
    /// Leaf `0x8000_001E`: APIC id.
    AmdTopology,
    /// Leaf `0x4000_0100`: counter of the vTLB.
    VtlbEvents(u32),
}

/// vCPU state for [`CpuidTable::patch`].
#[derive(Clone, Copy, Debug)]
pub struct CpuView {
    /// APIC id.
    pub apic_id: u32,
    /// `CR4`.
    pub cr4: u64,
    /// `XCR0`.
    pub xcr0: u64,
    /// The local APIC is enabled (`APIC_BASE`).
    pub apic: bool,
    /// The counter of [`Patch::VtlbEvents`].
    pub vtlb_events: Option<u64>,
}

const BASIC: usize = 0xe;
const EXTENDED: usize = 0x22;
const CACHES: usize = 6;
/// Number of extended-state components defined so far.
const COMPONENTS: usize = 20;
/// Legacy area and header of an `XSAVE` area (APM vol. 2, section 11.5.2).
const XSAVE_LEGACY: u32 = 576;
/// AVX-512 features in `ebx` and `ecx` of leaf 7.
const AVX512_B: u32 = extended_b::AVX512F
    | extended_b::AVX512DQ
    | extended_b::AVX512_IFMA
    | extended_b::AVX512CD
    | extended_b::AVX512BW
    | extended_b::AVX512VL;
const AVX512_C: u32 = extended_c::AVX512_VBMI
    | extended_c::AVX512_VBMI2
    | extended_c::AVX512_VNNI
    | extended_c::AVX512_BITALG
    | extended_c::AVX512_VPOPCNTDQ;

/// Table of the guest's results.
#[derive(Clone, Debug)]
pub struct CpuidTable {
    basic: [Values; BASIC],
    extended: [Values; EXTENDED],
    extended_features_1: Values,
    caches: [Values; CACHES],
    amd_caches: [Values; CACHES],
    xsave: [Values; COMPONENTS],
    signature: Values,
    paravirtual: Values,
    timing: Values,
    xcr0_allowed: u64,
    vcpus: u32,
}

impl CpuidTable {
    /// Computes the table from the host's results: `host(leaf, subleaf)`.
    pub fn new(config: &CpuidConfig, host: impl Fn(u32, u32) -> Values) -> Self {
        let mut table = Self {
            basic: [[0; 4]; BASIC],
            extended: [[0; 4]; EXTENDED],
            extended_features_1: [0; 4],
            caches: [[0; 4]; CACHES],
            amd_caches: [[0; 4]; CACHES],
            xsave: [[0; 4]; COMPONENTS],
            signature: [0; 4],
            paravirtual: [0; 4],
            timing: [0; 4],
            xcr0_allowed: 0,
            vcpus: u32::from(config.vcpus.max(1)),
        };
        table.fill_xsave(config, &host);
        table.fill_basic(&host);
        table.fill_extended(&host);
        table.fill_hypervisor(config);
        if !config.nested_paging {
            table.hide_translation_features();
        }
        table
    }

    /// The `XCR0` bits that the guest may set; 0 without `XSAVE`.
    pub const fn xcr0_allowed(&self) -> u64 {
        self.xcr0_allowed
    }

    /// The host's bits that need extended state, cleared where the state is missing.
    fn needs_state(&self, allowed: u32, avx: u32, avx512: u32) -> u32 {
        let mut mask = allowed;
        if self.xcr0_allowed & xcr0::AVX == 0 {
            mask &= !(avx | avx512);
        }
        if self.xcr0_allowed & xcr0::AVX512 != xcr0::AVX512 {
            mask &= !avx512;
        }
        mask
    }

    fn fill_xsave(&mut self, config: &CpuidConfig, host: &impl Fn(u32, u32) -> Values) {
        let available = host(leaf::VENDOR, 0)[0] >= leaf::XSAVE
            && host(leaf::FEATURES, 0)[2] & features_c::XSAVE != 0;
        if !available {
            return;
        }
        let [low, _, _, high] = host(leaf::XSAVE, 0);
        let allowed = (u64::from(high) << 32 | u64::from(low)) & config.xcr0_mask;
        self.xcr0_allowed = allowed & ((1 << COMPONENTS) - 1);
        if self.xcr0_allowed == 0 {
            return;
        }
        for component in 2..COMPONENTS {
            if self.xcr0_allowed & 1 << component != 0 {
                self.xsave[component] = host(leaf::XSAVE, component as u32);
            }
        }
        self.xsave[0] = [self.xcr0_allowed as u32, 0, self.xsave_size(self.xcr0_allowed), 0];
        self.xsave[1] = host(leaf::XSAVE, 1);
        self.xsave[1][0] &= xsave_a::XSAVEOPT | xsave_a::XSAVEC | xsave_a::XGETBV1;
        self.xsave[1][2] = 0;
        self.xsave[1][3] = 0;
    }

    fn fill_basic(&mut self, host: &impl Fn(u32, u32) -> Values) {
        let [max, b, c, d] = host(leaf::VENDOR, 0);
        let max = max.min(BASIC as u32 - 1);
        for number in 1..=max {
            self.basic[number as usize] = self.basic_leaf(number, host(number, 0));
        }
        self.basic[0] = [max, b, c, d];
        if max >= leaf::CACHE {
            for (level, cache) in self.caches.iter_mut().enumerate() {
                *cache = Self::cache(host(leaf::CACHE, level as u32), self.vcpus);
                if cache[0] & 31 != 0 {
                    cache[0] |= (self.vcpus - 1) << 26;
                }
            }
        }
        if max >= leaf::EXTENDED_FEATURES && host(leaf::EXTENDED_FEATURES, 0)[0] >= 1 {
            let allowed = self.needs_state(
                extended_1a::AVX_VNNI
                    | extended_1a::AVX512_BF16
                    | extended_1a::FZRM
                    | extended_1a::FSRS
                    | extended_1a::FSRC
                    | extended_1a::AVX_IFMA,
                extended_1a::AVX_VNNI | extended_1a::AVX_IFMA,
                extended_1a::AVX512_BF16,
            );
            self.extended_features_1[0] = host(leaf::EXTENDED_FEATURES, 1)[0] & allowed;
        }
    }

    fn basic_leaf(&self, number: u32, host: Values) -> Values {
        let [a, b, c, d] = host;
        match number {
            leaf::FEATURES => {
                // Allow-list: the other bits are reserved or need missing features (debug store,
                // thermal monitoring, VMX, direct cache access).
                let allowed = features_c::SSE3
                    | features_c::PCLMULQDQ
                    | features_c::SSSE3
                    | features_c::FMA
                    | features_c::CMPXCHG16B
                    | features_c::PCID
                    | features_c::SSE41
                    | features_c::SSE42
                    | features_c::MOVBE
                    | features_c::POPCNT
                    | features_c::AES
                    | features_c::AVX
                    | features_c::F16C
                    | features_c::RDRAND;
                let allowed = self.needs_state(
                    allowed,
                    features_c::AVX | features_c::F16C | features_c::FMA,
                    0,
                );
                let xsave = if self.xcr0_allowed != 0 { c & features_c::XSAVE } else { 0 };
                let added = features_c::X2APIC | features_c::TSC_DEADLINE | features_c::HYPERVISOR;
                let hidden = features_d::DS
                    | features_d::ACPI
                    | features_d::HTT
                    | features_d::TM
                    | features_d::PBE;
                let threads = if self.vcpus > 1 { features_d::HTT } else { 0 };
                [
                    a,
                    b & 0xffff | self.vcpus << 16,
                    c & allowed | xsave | added,
                    d & !hidden | features_d::APIC | threads,
                ]
            }
            leaf::CACHE | leaf::TOPOLOGY | leaf::XSAVE => [0; 4], // by subleaf, elsewhere
            leaf::POWER => [POWER_ARAT, 0, 0, 0],
            leaf::EXTENDED_FEATURES => self.extended_features(host),
            2 | 3 => [a, b, c, d],
            _ => [0; 4],
        }
    }

    fn extended_features(&self, [a, b, c, d]: Values) -> Values {
        let allowed_b = self.needs_state(
            extended_b::FSGSBASE
                | extended_b::BMI1
                | extended_b::AVX2
                | extended_b::FDP_EXCPTN_ONLY
                | extended_b::SMEP
                | extended_b::BMI2
                | extended_b::ERMS
                | extended_b::INVPCID
                | extended_b::ZERO_FCS_FDS
                | extended_b::RDSEED
                | extended_b::ADX
                | extended_b::SMAP
                | extended_b::CLFLUSHOPT
                | extended_b::CLWB
                | extended_b::SHA
                | AVX512_B,
            extended_b::AVX2,
            AVX512_B,
        );
        let mut allowed_c = self.needs_state(
            extended_c::PREFETCHWT1
                | extended_c::UMIP
                | extended_c::PKU
                | extended_c::GFNI
                | extended_c::VAES
                | extended_c::VPCLMULQDQ
                | extended_c::RDPID
                | extended_c::CLDEMOTE
                | extended_c::MOVDIRI
                | extended_c::MOVDIR64B
                | AVX512_C,
            extended_c::VAES | extended_c::VPCLMULQDQ,
            AVX512_C,
        );
        if self.xcr0_allowed & xcr0::PKRU == 0 {
            allowed_c &= !extended_c::PKU;
        }
        let avx512_d = extended_d::AVX512_VP2INTERSECT | extended_d::AVX512_FP16;
        let allowed_d =
            self.needs_state(extended_d::FSRM | extended_d::SERIALIZE | avx512_d, 0, avx512_d);
        [a.min(1), b & allowed_b, c & allowed_c, d & allowed_d]
    }

    fn fill_extended(&mut self, host: &impl Fn(u32, u32) -> Values) {
        let [max, b, c, d] = host(leaf::EXTENDED, 0);
        if max < leaf::EXTENDED {
            return;
        }
        let max = max.min(leaf::EXTENDED + EXTENDED as u32 - 1);
        self.extended[0] = [max, b, c, d];
        for number in leaf::EXTENDED + 1..=max {
            self.extended[(number - leaf::EXTENDED) as usize] =
                self.extended_leaf(number, host(number, 0));
        }
        if max >= leaf::AMD_CACHE {
            for (level, cache) in self.amd_caches.iter_mut().enumerate() {
                *cache = Self::cache(host(leaf::AMD_CACHE, level as u32), self.vcpus);
            }
        }
    }

    fn extended_leaf(&self, number: u32, host: Values) -> Values {
        let [a, b, c, d] = host;
        match number {
            leaf::AMD_FEATURES => {
                let allowed = self.needs_state(
                    amd_c::LAHF_LM
                        | amd_c::ALT_MOV_CR8
                        | amd_c::ABM
                        | amd_c::SSE4A
                        | amd_c::MISALIGN_SSE
                        | amd_c::PREFETCHW
                        | amd_c::XOP
                        | amd_c::FMA4
                        | amd_c::TBM
                        | amd_c::TOPOLOGY_EXTENSIONS,
                    amd_c::XOP | amd_c::FMA4,
                    0,
                );
                let legacy = if self.vcpus > 1 { c & amd_c::CMP_LEGACY } else { 0 };
                [a, b, c & allowed | legacy, d]
            }
            0x8000_0002..=leaf::L2_L3 | leaf::TLB_1G | leaf::HINTS => host,
            leaf::ADVANCED_POWER => [0, 0, 0, d & INVARIANT_TSC],
            leaf::SIZES => [
                a,
                b & (sizes_b::CLZERO | sizes_b::XSAVEERPTR | sizes_b::WBNOINVD),
                (self.vcpus - 1) | self.id_bits() << 12,
                0,
            ],
            leaf::AMD_FEATURES_2 => {
                let allowed = amd_2a::NO_NESTED_DATA_BP
                    | amd_2a::LFENCE_SERIALIZING
                    | amd_2a::NULL_SELECTOR_CLEARS_BASE
                    | amd_2a::NO_SMM_CTL_MSR;
                [a & allowed, 0, 0, 0]
            }
            _ => [0; 4],
        }
    }

    fn fill_hypervisor(&mut self, config: &CpuidConfig) {
        let name = |at: usize| {
            let bytes = b"KVMKVMKVM\0\0\0";
            u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
        };
        self.signature = [leaf::HYPERVISOR_TIMING, name(0), name(4), name(8)];
        let clock =
            if config.kvmclock { kvm_a::CLOCKSOURCE2 | kvm_a::CLOCKSOURCE_STABLE } else { 0 };
        let steal = if config.steal_time { kvm_a::STEAL_TIME } else { 0 };
        let flush = if config.steal_time && config.pv_flush { kvm_a::PV_TLB_FLUSH } else { 0 };
        let ipi = if config.pv_ipi { kvm_a::PV_SEND_IPI } else { 0 };
        let always = kvm_a::NOP_IO_DELAY | kvm_a::PV_EOI;
        self.paravirtual = [always | clock | steal | flush | ipi, 0, 0, 0];
        self.timing = [config.tsc_khz, config.apic_khz, 0, 0];
    }

    /// Hides features of address translation that need nested paging.
    fn hide_translation_features(&mut self) {
        const FEATURES: usize = leaf::FEATURES as usize;
        const EXTENDED_FEATURES: usize = leaf::EXTENDED_FEATURES as usize;
        self.basic[FEATURES][2] &= !features_c::PCID;
        self.basic[EXTENDED_FEATURES][1] &= !extended_b::INVPCID;
        self.basic[EXTENDED_FEATURES][2] &= !extended_c::PKU;
        self.paravirtual[0] &= !kvm_a::PV_TLB_FLUSH;
    }

    /// A cache as the guest sees it: private to its CPU, or (third level) shared by all.
    fn cache(mut host: Values, vcpus: u32) -> Values {
        if host[0] & 31 == 0 {
            return [0; 4];
        }
        let level = host[0] >> 5 & 7;
        let sharers = if level >= 3 { vcpus } else { 1 };
        host[0] = host[0] & 0x3fff | (sharers - 1) << 14;
        host
    }

    /// Bits of an APIC id.
    fn id_bits(&self) -> u32 {
        self.vcpus.next_power_of_two().trailing_zeros()
    }

    /// Size of the standard-format area for these components.
    fn xsave_size(&self, components: u64) -> u32 {
        let end = |component: &usize| {
            let [size, offset, ..] = self.xsave[*component];
            size.saturating_add(offset)
        };
        (2..COMPONENTS)
            .filter(|component| components & 1 << component != 0)
            .map(|component| end(&component))
            .fold(XSAVE_LEGACY, u32::max)
    }

    /// Size of the compacted area for these components.
    fn xsave_compact_size(&self, components: u64) -> u32 {
        const ALIGNED: u32 = 1 << 1;
        (2..COMPONENTS).filter(|component| components & 1 << component != 0).fold(
            XSAVE_LEGACY,
            |end, component| {
                let [size, _, flags, _] = self.xsave[component];
                let start = if flags & ALIGNED != 0 { end.next_multiple_of(64) } else { end };
                start.saturating_add(size)
            },
        )
    }

    /// Looks up a leaf and subleaf; the patch names the fields that depend on the vCPU.
    #[inline]
    pub fn lookup(&self, number: u32, subleaf: u32) -> (&Values, Patch) {
        if let Some(values) = self.basic.get(number as usize) {
            return match number {
                leaf::FEATURES => (values, Patch::Features),
                leaf::CACHE => (at(&self.caches, subleaf), Patch::None),
                leaf::EXTENDED_FEATURES if subleaf == 1 => (&self.extended_features_1, Patch::None),
                leaf::EXTENDED_FEATURES if subleaf != 0 => (&NOTHING, Patch::None),
                leaf::EXTENDED_FEATURES => (values, Patch::ExtendedFeatures),
                leaf::TOPOLOGY => (values, Patch::Topology(subleaf)),
                leaf::XSAVE => {
                    let patch = match subleaf {
                        0 => Patch::XsaveSize,
                        1 => Patch::XsaveCompactSize,
                        _ => Patch::None,
                    };
                    (at(&self.xsave, subleaf), patch)
                }
                _ => (values, Patch::None),
            };
        }
        if let Some(values) = self.extended.get(number.wrapping_sub(leaf::EXTENDED) as usize) {
            return match number {
                leaf::AMD_FEATURES => (values, Patch::AmdFeatures),
                leaf::AMD_CACHE => (at(&self.amd_caches, subleaf), Patch::None),
                leaf::AMD_TOPOLOGY if self.extended[0][0] >= number => (values, Patch::AmdTopology),
                _ => (values, Patch::None),
            };
        }
        let values = match number {
            leaf::HYPERVISOR => &self.signature,
            leaf::HYPERVISOR_FEATURES => &self.paravirtual,
            leaf::HYPERVISOR_TIMING => &self.timing,
            leaf::VTLB_EVENTS => return (&NOTHING, Patch::VtlbEvents(subleaf)),
            _ => &NOTHING,
        };
        (values, Patch::None)
    }

    fn topology(&self, subleaf: u32, apic_id: u32) -> Values {
        const THREAD: u32 = 1;
        const CORE: u32 = 2;
        if self.basic[0][0] < leaf::TOPOLOGY {
            return NOTHING;
        }
        match subleaf {
            0 => [0, 1, THREAD << 8, apic_id],
            1 => [self.id_bits(), self.vcpus, CORE << 8 | 1, apic_id],
            _ => [0, 0, subleaf & 0xff, apic_id],
        }
    }

    /// Fills in the fields that depend on the vCPU.
    pub fn patch(&self, values: &Values, patch: Patch, cpu: CpuView) -> Values {
        let mut values = *values;
        let set = |word: &mut u32, bit: u32, on: bool| {
            if on {
                *word |= bit;
            }
        };
        match patch {
            Patch::None => {}
            Patch::VtlbEvents(_) => {
                if let Some(count) = cpu.vtlb_events {
                    values = [count as u32, (count >> 32) as u32, 0, VTLB_SIGNATURE];
                }
            }
            Patch::Features => {
                values[1] |= cpu.apic_id << 24;
                set(&mut values[2], features_c::OSXSAVE, cpu.cr4 & cr4::OSXSAVE != 0);
                hide_apic(&mut values, cpu);
            }
            // The same bits (APM vol. 3, appendix E.4.2).
            Patch::AmdFeatures => hide_apic(&mut values, cpu),
            Patch::ExtendedFeatures => {
                set(&mut values[2], extended_c::OSPKE, cpu.cr4 & cr4::PKE != 0);
            }
            Patch::Topology(subleaf) => values = self.topology(subleaf, cpu.apic_id),
            Patch::XsaveSize if self.xcr0_allowed != 0 => values[1] = self.xsave_size(cpu.xcr0),
            Patch::XsaveCompactSize if values[0] & xsave_a::XSAVEC != 0 => {
                values[1] = self.xsave_compact_size(cpu.xcr0);
            }
            Patch::XsaveSize | Patch::XsaveCompactSize => values[1] = 0,
            Patch::AmdTopology => values = [cpu.apic_id, cpu.apic_id & 0xff, 0, 0],
        }
        values
    }

    /// Complete result of a leaf.
    pub fn answer(&self, number: u32, subleaf: u32, cpu: CpuView) -> Values {
        let (values, patch) = self.lookup(number, subleaf);
        self.patch(values, patch, cpu)
    }
}

const NOTHING: Values = [0; 4];

/// Entry of a table; 0 beyond its end.
#[inline]
fn at(table: &[Values], index: u32) -> &Values {
    table.get(index as usize).unwrap_or(&NOTHING)
}

/// Clears the `APIC` bit while the local APIC is disabled (APM vol. 2, section 16.3.1).
fn hide_apic(values: &mut Values, cpu: CpuView) {
    if !cpu.apic {
        values[3] &= !features_d::APIC;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const CPU: CpuView = CpuView { apic_id: 0, cr4: 0, xcr0: 1, apic: true, vtlb_events: None };

    /// Results of QEMU 7.2's `-cpu EPYC,+svm,+npt` under TCG, as far as the policy uses them.
    fn epyc(number: u32, subleaf: u32) -> Values {
        match (number, subleaf) {
            (0, _) => [0xd, 0x6874_7541, 0x444d_4163, 0x6974_6e65],
            (1, _) => [0x0080_0f12, 0x0001_0800, 0xfef8_320b, 0x178b_fbff],
            (5, _) => [0, 0, 3, 0],
            (6, _) => [4, 0, 0, 0],
            (7, 0) => [0, 0x219c_07a9, 0, 0],
            (0xb, 0) => [0, 1, 0x100, 0],
            (0xd, 0) => [7, 0x340, 0x340, 0],
            (0xd, 1) => [5, 0, 0, 0],
            (0xd, 2) => [0x100, 0x240, 0, 0],
            (0x8000_0000, _) => [0x8000_001e, 0x6874_7541, 0x444d_4163, 0x6974_6e65],
            (0x8000_0001, _) => [0x0080_0f12, 0, 0x0000_0175, 0x2fd3_fbff],
            (0x8000_0008, _) => [0x3028, 0x4, 0, 0],
            (0x8000_000a, _) => [1, 16, 0, 1],
            (0x8000_001d, 0) => [0x121, 0x01c0_003f, 0x3f, 1],
            (0x8000_001d, 3) => [0x4163, 0x03c0_003f, 0x1fff, 6],
            _ => [0; 4],
        }
    }

    fn config(vcpus: u8) -> CpuidConfig {
        CpuidConfig {
            vcpus,
            xcr0_mask: 7,
            tsc_khz: 2_000_000,
            apic_khz: 1_000_000,
            kvmclock: true,
            steal_time: true,
            pv_flush: true,
            pv_ipi: true,
            nested_paging: true,
        }
    }

    #[test]
    fn snapshot_of_an_emulated_epyc() {
        let table = CpuidTable::new(&config(1), epyc);
        let cases: &[(u32, u32, Values)] = &[
            (0, 0, [0xd, 0x6874_7541, 0x444d_4163, 0x6974_6e65]),
            // MONITOR cleared; x2APIC, TSC deadline, hypervisor set; OSXSAVE clear.
            (1, 0, [0x0080_0f12, 0x0001_0800, 0xf7f8_3203, 0x078b_fbff]),
            (5, 0, [0; 4]),
            (6, 0, [4, 0, 0, 0]),
            (7, 0, [0, 0x219c_07a9, 0, 0]),
            (7, 1, [0; 4]),
            (0xb, 0, [0, 1, 0x100, 0]),
            (0xb, 1, [0, 1, 0x201, 0]),
            (0xb, 2, [0, 0, 2, 0]),
            (0xd, 0, [7, 576, 0x340, 0]),
            (0xd, 1, [5, 0, 0, 0]),
            (0xd, 2, [0x100, 0x240, 0, 0]),
            (0xd, 9, [0; 4]),
            (0xe, 0, [0; 4]),
            (0x4000_0000, 0, [0x4000_0010, 0x4b4d_564b, 0x564b_4d56, 0x4d]),
            (0x4000_0001, 0, [0x0100_0a6a, 0, 0, 0]),
            (0x4000_0010, 0, [2_000_000, 1_000_000, 0, 0]),
            (0x8000_0000, 0, [0x8000_001e, 0x6874_7541, 0x444d_4163, 0x6974_6e65]),
            (0x8000_0001, 0, [0x0080_0f12, 0, 0x0000_0171, 0x2fd3_fbff]),
            (0x8000_0008, 0, [0x3028, 0x4, 0, 0]),
            (0x8000_000a, 0, [0; 4]),
            (0x8000_001d, 3, [0x163, 0x03c0_003f, 0x1fff, 6]),
            (0x8000_001e, 0, [0; 4]),
            (0x8000_0022, 0, [0; 4]),
            (0xffff_ffff, 0, [0; 4]),
        ];
        for &(number, subleaf, expected) in cases {
            let answer = table.answer(number, subleaf, CPU);
            assert_eq!(answer, expected, "leaf {number:#x}.{subleaf}: {answer:#x?}");
        }
    }

    #[test]
    fn follows_the_cpu() {
        let table = CpuidTable::new(&config(4), epyc);
        let cpu = CpuView { apic_id: 3, cr4: cr4::OSXSAVE, xcr0: 7, ..CPU };
        let [_, b, c, d] = table.answer(1, 0, cpu);
        assert_eq!(b >> 16, 3 << 8 | 4);
        assert!(c & features_c::OSXSAVE != 0 && d & features_d::HTT != 0);
        assert_eq!(table.answer(0xd, 0, cpu)[1], 0x340);
        assert_eq!(table.answer(0xb, 1, cpu), [2, 4, 0x201, 3]);
        assert_eq!(table.answer(0x8000_001e, 0, cpu), [3, 3, 0, 0]);
        assert_eq!(table.answer(0x8000_0008, 0, cpu)[2], 0x2003);
        assert_eq!(table.answer(0x8000_001d, 3, cpu)[0] >> 14, 3);
        assert_eq!(table.answer(0x4000_0100, 2, cpu), [0; 4]);
        let cpu = CpuView { vtlb_events: Some(0x7_0000_0009), ..cpu };
        assert_eq!(table.answer(0x4000_0100, 2, cpu), [9, 7, 0, VTLB_SIGNATURE]);
    }

    #[test]
    fn without_extended_state_there_is_no_avx() {
        let table = CpuidTable::new(&CpuidConfig { xcr0_mask: 3, ..config(1) }, epyc);
        let gone = features_c::AVX | features_c::F16C | features_c::FMA;
        assert_eq!(table.answer(1, 0, CPU)[2] & gone, 0);
        assert_eq!(table.answer(7, 0, CPU)[1] & extended_b::AVX2, 0);
        assert_eq!(table.answer(0xd, 0, CPU), [3, 576, 576, 0]);
        let table = CpuidTable::new(&CpuidConfig { xcr0_mask: 0, ..config(1) }, epyc);
        assert_eq!(table.answer(1, 0, CPU)[2] & features_c::XSAVE, 0);
        assert_eq!(table.answer(0xd, 0, CPU), [0; 4]);
    }

    #[test]
    fn software_translation_hides_features() {
        let host = |number, _| if number == 0 { [0xd, 0, 0, 0] } else { [u32::MAX; 4] };
        let word = |nested_paging, number: u32, index: usize| {
            let config = CpuidConfig { nested_paging, xcr0_mask: u64::MAX, ..config(2) };
            CpuidTable::new(&config, host).lookup(number, 0).0[index]
        };
        for (number, index, hidden) in [
            (1, 2, features_c::PCID),
            (7, 1, extended_b::INVPCID),
            (7, 2, extended_c::PKU),
            (leaf::HYPERVISOR_FEATURES, 0, kvm_a::PV_TLB_FLUSH),
        ] {
            assert_eq!(word(true, number, index) ^ word(false, number, index), hidden);
        }
    }

    #[test]
    fn any_host_any_leaf() {
        // A host that reports no feature, and one that reports every feature.
        for word in [0, u32::MAX] {
            let table = CpuidTable::new(&config(8), |_, _| [word; 4]);
            for number in (0..0x40).chain(0x3fff_fff0..0x4000_0020).chain(0x8000_0000..0x8000_0040)
            {
                for subleaf in [0, 1, 2, 3, 19, 20, 63, u32::MAX] {
                    table.answer(number, subleaf, CpuView { apic_id: 7, cr4: !0, xcr0: !0, ..CPU });
                }
            }
        }
    }
}
