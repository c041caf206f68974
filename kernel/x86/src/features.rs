//! Processor features reported by CPUID: APM vol. 3 (24594), appendix E.3 and E.4. Read once, on
//! the first CPU; the other CPUs are assumed to be identical.

use core::arch::x86_64::{__cpuid, __cpuid_count, CpuidResult};
use hw_x86::paging::xcr0;
use spin::Once;

/// Processor features that the kernel depends on.
#[derive(Clone, Copy, Debug, Default)]
pub struct Features {
    /// SVM.
    pub svm: bool,
    /// SVM with nested paging.
    pub npt: bool,
    /// VMEXIT saves the next instruction's address.
    pub nrip_save: bool,
    /// VMEXIT decodes some instructions.
    pub decode_assist: bool,
    /// Number of ASIDs, including the host's ASID 0.
    pub asids: u32,
    /// The local APIC has x2APIC mode.
    pub x2apic: bool,
    /// The local APIC's timer has TSC-deadline mode.
    pub tsc_deadline: bool,
    /// RDTSCP and TSC_AUX.
    pub rdtscp: bool,
    /// 1 GiB pages.
    pub huge_pages: bool,
    /// Supervisor-mode execution prevention.
    pub smep: bool,
    /// Supervisor-mode access prevention.
    pub smap: bool,
    /// User-mode instruction prevention.
    pub umip: bool,
    /// Machine-check exceptions.
    pub mce: bool,
    /// Machine-check architecture: error-reporting registers.
    pub mca: bool,
    /// FXSAVE and FXRSTOR.
    pub fxsr: bool,
    /// XSAVE.
    pub xsave: bool,
    /// FXRSTOR and XRSTOR load the x87 error pointers although no exception is pending.
    pub loads_error_pointers: bool,
    /// `XCR0` bits that the kernel enables and guests may enable; [`xcr0::X87`] and SSE without
    /// XSAVE.
    pub xcr0_mask: u64,
    /// Length in bytes of an XSAVE (else FXSAVE) area for `xcr0_mask`.
    pub xsave_size: usize,
    /// Width of a physical address in bits.
    pub physical_bits: u32,
    /// The kernel runs in a virtual machine.
    pub hypervisor: bool,
    /// The processor is QEMU's emulator TCG, whose errors in SVM the kernel works around
    /// (docs/CAVEATS.md).
    pub is_tcg: bool,
    /// TSC frequency in kHz, if reported by CPUID.
    pub tsc_khz: Option<u64>,
    /// Frequency of the local APIC timer in kHz, if reported by CPUID.
    pub apic_khz: Option<u64>,
}

static FEATURES: Once<Features> = Once::new();

/// Features of this machine.
pub fn features() -> &'static Features {
    FEATURES.call_once(|| Features::read(__cpuid_count))
}

/// `XCR0` components that the kernel supports.
const KNOWN_XCR0: u64 = xcr0::X87 | xcr0::SSE | xcr0::AVX | xcr0::AVX512 | xcr0::PKRU;
/// Length in bytes of the XSAVE legacy area and header.
const XSAVE_MIN: usize = 576;
const FXSAVE_SIZE: usize = 512;

impl Features {
    /// Reads the features through `cpuid(leaf, sub-leaf)`.
    fn read(cpuid: impl Fn(u32, u32) -> CpuidResult) -> Self {
        let bit = |word: u32, bit: u32| word >> bit & 1 != 0;
        let max = cpuid(0, 0).eax;
        let basic = |leaf| if leaf <= max { cpuid(leaf, 0) } else { NOTHING };
        let max_extended = cpuid(0x8000_0000, 0).eax;
        let extended = |leaf| if leaf <= max_extended { cpuid(leaf, 0) } else { NOTHING };
        let (one, seven) = (basic(1), basic(7));
        let first = extended(0x8000_0001);
        let svm_leaf = extended(0x8000_000a);
        let svm = bit(first.ecx, 2);
        let address = extended(0x8000_0008);
        let sizes = address.eax & 0xff;
        let mut found = Self {
            svm,
            npt: svm && bit(svm_leaf.edx, 0),
            nrip_save: svm && bit(svm_leaf.edx, 3),
            decode_assist: svm && bit(svm_leaf.edx, 7),
            asids: if svm { svm_leaf.ebx } else { 0 },
            x2apic: bit(one.ecx, 21),
            tsc_deadline: bit(one.ecx, 24),
            rdtscp: bit(first.edx, 27),
            huge_pages: bit(first.edx, 26),
            smep: bit(seven.ebx, 7),
            smap: bit(seven.ebx, 20),
            umip: bit(seven.ecx, 2),
            mce: bit(one.edx, 7),
            mca: bit(one.edx, 14),
            fxsr: bit(one.edx, 24),
            xsave: bit(one.ecx, 26),
            loads_error_pointers: bit(address.ebx, 2),
            xcr0_mask: xcr0::X87 | xcr0::SSE,
            xsave_size: FXSAVE_SIZE,
            physical_bits: if sizes == 0 { 36 } else { sizes },
            hypervisor: bit(one.ecx, 31),
            ..Self::default()
        };
        if found.xsave && max >= 0xd {
            let leaf = cpuid(0xd, 0);
            let mut mask = (leaf.eax as u64 | (leaf.edx as u64) << 32) & KNOWN_XCR0;
            if mask & xcr0::AVX == 0 || mask & xcr0::AVX512 != xcr0::AVX512 {
                mask &= !xcr0::AVX512;
            }
            found.xcr0_mask = mask;
            found.xsave_size = (2..63)
                .filter(|component| mask >> component & 1 != 0)
                .map(|component| cpuid(0xd, component))
                .map(|part| part.ebx as usize + part.eax as usize)
                .fold(XSAVE_MIN, usize::max);
        }
        found.is_tcg = found.hypervisor && is_signature_of_tcg(&cpuid);
        found.read_frequencies(basic(0x15), cpuid);
        found
    }

    /// Leaf 15h (SDM vol. 2A, CPUID): TSC / crystal = EBX / EAX, with the crystal, which also
    /// drives the local APIC timer, in ECX Hz. Leaf 4000_0010h (a convention among hypervisors):
    /// both in kHz.
    fn read_frequencies(&mut self, crystal: CpuidResult, cpuid: impl Fn(u32, u32) -> CpuidResult) {
        if crystal.eax != 0 && crystal.ebx != 0 && crystal.ecx != 0 {
            let hertz = crystal.ecx as u64 * crystal.ebx as u64 / crystal.eax as u64;
            self.tsc_khz = Some(hertz / 1000);
            self.apic_khz = Some(crystal.ecx as u64 / 1000);
        } else if self.hypervisor && (0x4000_0010..0x4000_0100).contains(&cpuid(0x4000_0000, 0).eax)
        {
            let timing = cpuid(0x4000_0010, 0);
            self.tsc_khz = Some(timing.eax as u64);
            self.apic_khz = Some(timing.ebx as u64);
        }
        self.tsc_khz = self.tsc_khz.filter(|&khz| khz != 0);
        self.apic_khz = self.apic_khz.filter(|&khz| khz != 0);
    }
}

/// Returns whether the hypervisor's signature (leaf 4000_0000h) is that of QEMU's TCG.
fn is_signature_of_tcg(cpuid: &impl Fn(u32, u32) -> CpuidResult) -> bool {
    let found = cpuid(hw_x86::cpuid::leaf::HYPERVISOR, 0);
    let signature = [found.ebx, found.ecx, found.edx].map(u32::to_le_bytes);
    signature.as_flattened() == b"TCGTCGTCGTCG"
}

const NOTHING: CpuidResult = CpuidResult { eax: 0, ebx: 0, ecx: 0, edx: 0 };

/// This CPU's initial APIC id: 32 bits where leaf 0Bh exists, else 8.
pub fn initial_apic_id() -> u32 {
    if features().x2apic && __cpuid(0).eax >= 0xb && __cpuid_count(0xb, 0).ebx != 0 {
        return __cpuid_count(0xb, 0).edx;
    }
    __cpuid(1).ebx >> 24
}

#[cfg(test)]
mod tests {
    use super::*;

    fn leaf(eax: u32, ebx: u32, ecx: u32, edx: u32) -> CpuidResult {
        CpuidResult { eax, ebx, ecx, edx }
    }

    #[test]
    fn poor_cpu() {
        let found = Features::read(|number, _| match number {
            0 => leaf(1, 0, 0, 0),
            0x8000_0000 => leaf(0x8000_0001, 0, 0, 0),
            1 => leaf(0, 0, 0, 1 << 24),
            0x8000_0001 => NOTHING,
            _ => panic!("leaf {number:#x} does not exist"),
        });
        assert!(!found.svm && !found.npt && !found.xsave && found.fxsr);
        assert!(!found.loads_error_pointers);
        assert_eq!((found.xsave_size, found.physical_bits), (512, 36));
    }

    #[test]
    fn rich_cpu() {
        let found = Features::read(|number, sub| match (number, sub) {
            (0, 0) => leaf(0x15, 0, 0, 0),
            (1, 0) => leaf(0, 0, 1 << 26 | 1 << 21, 1 << 24),
            (0xd, 0) => leaf(0x2e7, 0, 0, 0),
            (0xd, 2) => leaf(256, 576, 0, 0),
            (0xd, 5) => leaf(64, 832, 0, 0),
            (0xd, 6) => leaf(512, 896, 0, 0),
            (0xd, 7) => leaf(1024, 1408, 0, 0),
            (0xd, 9) => leaf(8, 2432, 0, 0),
            (0x15, 0) => leaf(2, 200, 24_000_000, 0),
            (0x8000_0000, 0) => leaf(0x8000_000a, 0, 0, 0),
            (0x8000_0001, 0) => leaf(0, 0, 1 << 2, 1 << 26),
            (0x8000_0008, 0) => leaf(48, 1 << 2, 0, 0),
            (0x8000_000a, 0) => leaf(1, 0x8000, 0, 1 | 1 << 3),
            _ => NOTHING,
        });
        assert!(found.npt && found.nrip_save && !found.decode_assist && found.huge_pages);
        assert!(found.loads_error_pointers);
        assert_eq!(found.asids, 0x8000);
        assert_eq!(found.xcr0_mask, 0x2e7);
        assert_eq!(found.xsave_size, 2440);
        assert_eq!((found.tsc_khz, found.apic_khz), (Some(2_400_000), Some(24_000)));
    }

    #[test]
    fn tcg_has_its_signature() {
        let word = |text: &[u8; 4]| u32::from_le_bytes(*text);
        let is_tcg = |flag: u32, signature: [u32; 3]| {
            Features::read(|number, _| match number {
                0 => leaf(1, 0, 0, 0),
                1 => leaf(0, 0, flag << 31, 0),
                0x4000_0000 => leaf(0x4000_0001, signature[0], signature[1], signature[2]),
                _ => NOTHING,
            })
            .is_tcg
        };
        let tcg = [word(b"TCGT"), word(b"CGTC"), word(b"GTCG")];
        assert!(is_tcg(1, tcg));
        assert!(!is_tcg(0, tcg), "a processor without a hypervisor may have any value there");
        assert!(!is_tcg(1, [word(b"KVMK"), word(b"VMKV"), word(b"M\0\0\0")]));
    }

    #[test]
    fn partial_avx512_is_none() {
        let found = Features::read(|number, sub| match (number, sub) {
            (0, 0) => leaf(0xd, 0, 0, 0),
            (1, 0) => leaf(0, 0, 1 << 26, 0),
            (0xd, 0) => leaf(0x67, 0, 0, 0),
            (0xd, 2) => leaf(256, 576, 0, 0),
            _ => NOTHING,
        });
        assert_eq!((found.xcr0_mask, found.xsave_size), (7, 832));
    }
}
