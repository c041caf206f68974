//! A KVM VM: guest memory, CPUID, and the intercepted accesses.
//!
//! All interrupt controllers, timers and clocks are the device models of `vmm/dev`, as on every
//! other host; KVM keeps the vCPU state, runs vCPUs, and decodes instructions that access a device.
//! It answers `CPUID` from the VM's table and handles the MSRs that are vCPU state; all other MSR
//! accesses exit.

use std::arch::x86_64::__cpuid;

use hw_x86::cpuid::{features_c, leaf};
use hw_x86::msr::{EFER, FS_BASE, PAT, SYSENTER_CS, TSC_AUX};
use kvm_bindings::{
    CpuId, KVM_CAP_X86_USER_SPACE_MSR, KVM_CPUID_FLAG_SIGNIFCANT_INDEX, KVM_MAX_CPUID_ENTRIES,
    KVM_MSR_EXIT_REASON_VALID_MASK, kvm_cpuid_entry2, kvm_enable_cap, kvm_userspace_memory_region,
};
use kvm_ioctls::{
    Cap, Kvm, MsrFilterDefaultAction, MsrFilterRange, MsrFilterRangeFlags, SyncReg, VcpuFd, VmFd,
};
use vmm_mem::{GuestMemory, Transfer};
use vmm_x86::cpuid::{CpuView, CpuidTable, Values};

use crate::{Error, calls};

/// Required capabilities.
const NEEDED: [(Cap, &str); 5] = [
    (Cap::UserMemory, "user memory regions"),
    (Cap::ImmediateExit, "immediate exits"),
    (Cap::SyncRegs, "registers in shared memory"),
    (Cap::X86UserSpaceMsr, "MSR exits to user space"),
    (Cap::X86MsrFilter, "MSR filters"),
];
/// Three pages that KVM uses on CPUs without real mode in guests: below 4 GiB, outside of guest
/// memory and devices.
const REAL_MODE_PAGES: usize = 0xfffb_d000;

/// A KVM VM without vCPUs.
pub struct KvmVm {
    vm: VmFd,
    /// CPUID features that KVM supports.
    supported: CpuId,
}

impl KvmVm {
    /// Creates an empty VM.
    pub fn new() -> Result<Self, Error> {
        let kvm = Kvm::new().map_err(Error::host("open /dev/kvm"))?;
        if let Some((_, what)) = NEEDED.iter().find(|(cap, _)| !kvm.check_extension(*cap)) {
            return Err(Error::Lacking(what));
        }
        let vm = kvm.create_vm().map_err(Error::host("create a VM"))?;
        let supported = kvm
            .get_supported_cpuid(KVM_MAX_CPUID_ENTRIES)
            .map_err(Error::host("query the supported CPUID"))?;
        vm.set_tss_address(REAL_MODE_PAGES).map_err(Error::host("set up real mode"))?;
        let mut cap = kvm_enable_cap { cap: KVM_CAP_X86_USER_SPACE_MSR, ..Default::default() };
        cap.args[0] = KVM_MSR_EXIT_REASON_VALID_MASK.into();
        vm.enable_cap(&cap).map_err(Error::host("enable MSR exits"))?;
        // Ranges of MSRs; those in between that do not exist are refused by KVM and exit.
        let own = [(SYSENTER_CS, 3, 0b111), (PAT, 1, 1), (EFER, 5, 0b1_1111), (FS_BASE, 4, 0b1111)];
        const { assert!(TSC_AUX == FS_BASE + 3) };
        let bitmaps = own.map(|(_, _, bits)| [bits]);
        let flags = MsrFilterRangeFlags::READ | MsrFilterRangeFlags::WRITE;
        let ranges: Vec<_> = own
            .iter()
            .zip(&bitmaps)
            .map(|(&(base, msr_count, _), bitmap)| MsrFilterRange {
                flags,
                base,
                msr_count,
                bitmap,
            })
            .collect();
        vm.set_msr_filter(MsrFilterDefaultAction::DENY, &ranges)
            .map_err(Error::host("install the MSR filter"))?;
        Ok(Self { vm, supported })
    }

    /// Returns the CPUID leaf that KVM supports, for the VM's table.
    pub fn cpuid(&self, number: u32, subleaf: u32) -> Values {
        let entry = self.supported.as_slice().iter().find(|entry| {
            let indexed = entry.flags & KVM_CPUID_FLAG_SIGNIFCANT_INDEX != 0;
            entry.function == number && (!indexed || entry.index == subleaf)
        });
        entry.map_or([0; 4], |entry| [entry.eax, entry.ebx, entry.ecx, entry.edx])
    }

    /// Maps guest memory into the VM.
    ///
    /// # Errors
    /// KVM refuses a region.
    pub fn map(&self, memory: &GuestMemory) -> Result<(), Error> {
        let mut slot = 0;
        for (base, length) in memory.ranges() {
            let mut done = 0;
            let mut result = Ok(());
            let mut map = |host: *mut u8, part: usize| {
                let region = kvm_userspace_memory_region {
                    slot,
                    flags: 0,
                    guest_phys_addr: base + done,
                    memory_size: part as u64,
                    userspace_addr: host.expose_provenance() as u64,
                };
                // SAFETY: this is guest memory: mapped as long as `memory` is used, which the
                // caller does until the process ends, and designed for modification by the guest at
                // any time.
                let mapped = unsafe { self.vm.set_user_memory_region(region) };
                result = std::mem::replace(&mut result, Ok(())).and(mapped);
                slot += 1;
                done += part as u64;
            };
            // The span is a range of the memory, so it is fully present.
            let _ = memory.for_each_part(Transfer::FromGuest, base, length, &mut map);
            result.map_err(Error::host("map guest memory into the VM"))?;
        }
        Ok(())
    }

    /// Creates vCPU `index`.
    pub fn vcpu(&self, index: usize) -> Result<VcpuFd, Error> {
        let mut vcpu = self.vm.create_vcpu(index as u64).map_err(Error::host("create a vCPU"))?;
        if !calls::has_tsc_offset(&vcpu) {
            return Err(Error::Lacking("TSC offsets"));
        }
        vcpu.set_sync_valid_reg(SyncReg::Register);
        Ok(vcpu)
    }

    /// Returns the guest TSC frequency in kHz.
    pub fn tsc_khz(&self, vcpu: &VcpuFd) -> Result<u64, Error> {
        vcpu.get_tsc_khz().map(u64::from).map_err(Error::host("read the TSC frequency"))
    }

    /// Returns the extended state that guests may use (`XCR0`).
    pub fn xcr0(&self) -> u64 {
        let [low, _, _, high] = self.cpuid(leaf::XSAVE, 0);
        u64::from(high) << 32 | u64::from(low)
    }
}

/// Sets the CPUID table of vCPU `index`. KVM fills in the bits that depend on `CR4` and `XCR0`.
pub fn set_cpuid(vcpu: &VcpuFd, index: usize, table: &CpuidTable) -> Result<(), Error> {
    let view = CpuView { apic_id: index as u32, cr4: 0, xcr0: 1, apic: true, vtlb_events: None };
    let entry = |number: u32, subleaf: u32, flags: u32| {
        let (values, patch) = table.lookup(number, subleaf);
        let [eax, ebx, ecx, edx] = table.patch(values, patch, view);
        kvm_cpuid_entry2 {
            function: number,
            index: subleaf,
            flags,
            eax,
            ebx,
            ecx,
            edx,
            ..Default::default()
        }
    };
    let mut entries = Vec::new();
    for first in [0, leaf::EXTENDED] {
        for number in first..=entry(first, 0, 0).eax.max(first) {
            let subleaves = match number {
                leaf::CACHE | leaf::AMD_CACHE => 6,
                leaf::EXTENDED_FEATURES => 2,
                leaf::TOPOLOGY => 3,
                leaf::XSAVE => 20,
                _ => {
                    entries.push(entry(number, 0, 0));
                    continue;
                }
            };
            let indexed = KVM_CPUID_FLAG_SIGNIFCANT_INDEX;
            entries.extend((0..subleaves).map(|subleaf| entry(number, subleaf, indexed)));
        }
    }
    // On Intel CPUs, KVM would handle TSC deadlines for its own local APICs and lose them.
    let is_intel = entry(leaf::VENDOR, 0, 0).ebx == u32::from_le_bytes(*b"Genu");
    if let Some(features) = entries.iter_mut().find(|entry| entry.function == leaf::FEATURES)
        && is_intel
    {
        features.ecx &= !features_c::TSC_DEADLINE;
    }
    let paravirtual = [leaf::HYPERVISOR, leaf::HYPERVISOR_FEATURES, leaf::HYPERVISOR_TIMING];
    entries.extend(paravirtual.map(|number| entry(number, 0, 0)));
    let failed = Error::host("set the CPUID table");
    let table = CpuId::from_entries(&entries)
        .map_err(|_| failed(std::io::Error::from(std::io::ErrorKind::InvalidInput)))?;
    vcpu.set_cpuid2(&table).map_err(Error::host("set the CPUID table"))
}

/// Returns whether the CPU is QEMU's, which enters guests without the interrupt shadow of their
/// exit (docs/CAVEATS.md).
pub fn forgets_shadows() -> bool {
    let has_leaf = __cpuid(leaf::FEATURES).ecx & features_c::HYPERVISOR != 0;
    let found = __cpuid(leaf::HYPERVISOR);
    let signature = [found.ebx, found.ecx, found.edx].map(u32::to_le_bytes);
    has_leaf && signature.as_flattened() == b"TCGTCGTCGTCG"
}
