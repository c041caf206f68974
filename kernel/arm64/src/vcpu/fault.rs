//! Faults of a guest's accesses at stage 2.

use abi::vcpu::memory_fault;
use hw_arm64::esr::{self, class};
use hw_arm64::registers::{hpfar_page, par};

use crate::entry::{to_guest, to_host};
use crate::{read_register, write_register};

/// Guest-physical address of the access that has faulted. `None`: the guest's translation of its
/// address has changed.
pub fn address(syndrome: u64) -> Option<u64> {
    let far = read_register!("far_el2");
    let offset = far & (abi::PAGE_SIZE - 1);
    if !esr::is_permission_fault(syndrome) || syndrome & esr::WALK != 0 {
        return Some(hpfar_page(read_register!("hpfar_el2")) | offset);
    }
    // The processor reports no page of faults by permissions (D24.2.61), so the guest's tables are
    // asked.
    let saved = read_register!("par_el1");
    // SAFETY: translates an address as the guest does, whose registers are still loaded.
    unsafe {
        to_guest();
        core::arch::asm!("at s1e1r, {}", "isb", in(reg) far, options(nostack));
    }
    let result = read_register!("par_el1");
    // SAFETY: back to the values before.
    unsafe {
        write_register!("par_el1", saved);
        to_host();
    }
    (result & par::FAILED == 0).then_some(result & par::PAGE | offset)
}

/// Kind of the access that has faulted ([`memory_fault`]).
pub fn kind(syndrome: u64) -> u64 {
    let is_fetch = esr::class(syndrome) == class::INSTRUCTION_ABORT;
    let is_walk = syndrome & esr::WALK != 0;
    // Maintenance of caches counts as a write in the syndrome, but does not write.
    let is_write =
        !is_fetch && syndrome & esr::WRITE != 0 && syndrome & esr::CACHE_MAINTENANCE == 0;
    [
        (is_write, memory_fault::WRITE),
        (is_fetch, memory_fault::FETCH),
        (is_walk, memory_fault::WALK),
    ]
    .into_iter()
    .filter_map(|(holds, bit)| holds.then_some(bit))
    .sum()
}
