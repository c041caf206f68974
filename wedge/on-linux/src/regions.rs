//! All regions of the low addresses that the wedge uses, in one table: the compiler checks that
//! they ascend without overlap.

use proto::hosted::layout;
use vmm_vcpu::MAX_VCPUS;
use wedge_x86::{CROSSING, HANDLER_STACK_TOP};

use crate::isolation::mailbox::Mailbox;
use crate::mmu::syscall_patch::{MAX_CALLS, SLOTS, SLOTS_LENGTH, STUBS, stub_address};
use crate::net::NetSection;
use crate::profile;
use crate::state::fixed::Fixed;
use crate::state::process::ProcessState;
use crate::state::setup::Words;
use crate::state::shared::{
    NETS, OWN_VCPU, PRIVATE_STACK_TOP, SHARED_STRUCT, SIGNAL_STACK, SIGNAL_STACK_LENGTH,
    STACK_LENGTH, STACKS, Shared, VCPU_LENGTH, VCPUS,
};

/// Smallest stack of a process that does not run the vCPU in bytes.
const LEAST_STACK: u64 = 0x8000;
/// Length of the stack of signal handlers that interrupted user mode in bytes.
const HANDLER_STACK: u64 = 0x8000;
const VCPU_COUNT: u64 = MAX_VCPUS as u64;

/// First address and length of each region.
const REGIONS: [(u64, u64); 17] = [
    // The loader's records.
    (layout::SHARED, OWN_VCPU - layout::SHARED),
    (OWN_VCPU, VCPU_LENGTH),
    (SHARED_STRUCT, size_of::<Shared>() as u64),
    (NETS, size_of::<NetSection>() as u64),
    (VCPUS, VCPU_COUNT * VCPU_LENGTH),
    (STACKS, VCPU_COUNT * STACK_LENGTH),
    (layout::STUBS, layout::STUBS_LENGTH),
    (profile::Tables::ADDRESS, size_of::<profile::Tables>() as u64),
    // Vsock rings, queues and what else other processes share.
    (layout::SHARED + layout::VSOCK, layout::SHARED_LENGTH - layout::VSOCK),
    (ProcessState::ADDRESS, size_of::<ProcessState>() as u64),
    (PRIVATE_STACK_TOP - LEAST_STACK, LEAST_STACK),
    (SIGNAL_STACK, SIGNAL_STACK_LENGTH),
    (CROSSING, 0x1000),
    (HANDLER_STACK_TOP - HANDLER_STACK, HANDLER_STACK),
    (SLOTS, SLOTS_LENGTH),
    (STUBS, stub_address(MAX_CALLS) - STUBS),
    (Mailbox::ADDRESS, size_of::<Mailbox>() as u64),
];

const _: () = {
    let mut index = 1;
    while index < REGIONS.len() {
        let (start, length) = REGIONS[index - 1];
        assert!(start + length <= REGIONS[index].0);
        index += 1;
    }
    let (start, length) = REGIONS[REGIONS.len() - 1];
    assert!(start >= layout::WEDGE && start + length <= Words::ADDRESS);
    assert!(Words::ADDRESS + layout::SETUP_LENGTH <= layout::WEDGE_END);
};

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mmu::ram::is_filled_in;

    #[test]
    fn no_region_is_filled_in_for_the_guest() {
        for (start, length) in REGIONS {
            assert!(!is_filled_in(start) && !is_filled_in(start + length - 1), "{start:#x}");
            assert!(start % 8 == 0, "{start:#x}");
        }
    }

    #[test]
    fn each_process_maps_its_private_regions() {
        let private = layout::PRIVATE..layout::PRIVATE + crate::state::shared::PRIVATE_LENGTH;
        for (start, length) in &REGIONS[9..14] {
            assert!(private.contains(start) && start + length <= private.end, "{start:#x}");
        }
    }

    #[test]
    fn vcpus_and_their_stacks_are_disjoint() {
        use crate::state::shared::{stack_top, vcpu_offset};
        for index in 0..MAX_VCPUS {
            assert_eq!(vcpu_offset(index) + layout::SHARED, VCPUS + index as u64 * VCPU_LENGTH);
            assert!(stack_top(index) - STACK_LENGTH >= STACKS && stack_top(index) <= layout::STUBS);
        }
        assert_eq!(VCPU_LENGTH % 0x1000, 0);
    }
}
