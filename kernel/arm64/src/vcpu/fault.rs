//! Faults of a guest's accesses at stage 2.

use abi::vcpu::memory_fault;
use hw_arm64::esr::{self, class};
use hw_arm64::registers::{hpfar_page, par};
use kernel_core::object::{Vcpu, Vm};

use super::tables;
use crate::entry::{to_guest, to_host, translate_address};
use crate::{Arm64, read_register, write_register};

/// Guest-physical address of the access that has faulted. `None`: the guest's translation of its
/// address has changed, or cannot be read: the guest accesses again.
#[inline(always)]
pub fn address(vcpu: &Vcpu<Arm64>, vm: &Vm<Arm64>, syndrome: u64) -> Option<u64> {
    let far = read_register!("far_el2");
    if esr::is_permission_fault(syndrome) && syndrome & esr::WALK == 0 {
        return translate(vcpu, vm, far);
    }
    Some(hpfar_page(read_register!("hpfar_el2")) | far & (abi::PAGE_SIZE - 1))
}

#[inline(never)]
fn translate(vcpu: &Vcpu<Arm64>, vm: &Vm<Arm64>, far: u64) -> Option<u64> {
    // Another CPU may have freed the tables of stage 2 after the guest was left.
    if !tables::are_current(vcpu, vm) {
        return None;
    }
    let offset = far & (abi::PAGE_SIZE - 1);
    // The processor reports no page of faults by permissions (D24.2.61), so the guest's tables are
    // asked.
    let saved = read_register!("par_el1");
    // SAFETY: translates an address as the guest does, whose registers are still loaded, by tables
    // of stage 2 that exist. PAR_EL1 keeps its value if the instruction takes an exception.
    unsafe {
        write_register!("par_el1", par::FAILED);
        to_guest();
        translate_address(far);
    }
    let result = read_register!("par_el1");
    // SAFETY: back to the values before; an exception has changed FAR_EL2.
    unsafe {
        write_register!("par_el1", saved);
        write_register!("far_el2", far);
        to_host();
    }
    (result & par::FAILED == 0).then_some(result & par::PAGE | offset)
}

/// Kind of the access that has faulted ([`memory_fault`]).
#[inline(always)]
pub fn kind(syndrome: u64) -> u64 {
    const WRITE: u32 = esr::WRITE.trailing_zeros() - memory_fault::WRITE.trailing_zeros();
    const WALK: u32 = esr::WALK.trailing_zeros() - memory_fault::WALK.trailing_zeros();
    let walk = syndrome >> WALK & memory_fault::WALK;
    if esr::class(syndrome) == class::INSTRUCTION_ABORT {
        return memory_fault::FETCH | walk;
    }
    // Maintenance of caches counts as a write in the syndrome, but does not write.
    let is_maintenance = syndrome & esr::CACHE_MAINTENANCE != 0;
    let write = if is_maintenance { 0 } else { syndrome >> WRITE & memory_fault::WRITE };
    write | walk
}
