//! vTLB of the VM in the words of the kernel.

use abi::vcpu::x86::{vtlb, vtlb_counter};
use abi::vm_mode;
use proto::vtlb::{COUNTERS, MAX_POOL, MIN_POOL, Rung, Vtlb};

// The kernel's limits and counters are those of the description.
const _: () = assert!(
    MIN_POOL as u64 == vm_mode::MIN_POOL
        && MAX_POOL as u64 == vm_mode::MAX_POOL
        && COUNTERS == vtlb_counter::COUNT
);

/// Returns the mode of the VM ([`vm_mode`]).
pub fn mode(plan: Option<Vtlb>) -> u64 {
    match plan {
        None => vm_mode::NESTED,
        Some(Vtlb { rung: Rung::User, .. }) => vm_mode::GUEST_VIRTUAL,
        Some(plan) => vm_mode::VTLB | u64::from(plan.pool) << vm_mode::POOL_SHIFT,
    }
}

/// Returns the optimisations of each of `vcpus` vCPUs ([`vtlb`]). The dirty bits that trace writes
/// are those of one vCPU, so with several each flush compares all tables.
pub fn optimisations(plan: Vtlb, vcpus: usize) -> u64 {
    let Vtlb { rung, spaces, trace_writes, .. } = plan;
    let traces = if trace_writes { vtlb::TRACE | vtlb::TRACE_WRITES } else { vtlb::TRACE };
    let steps = [
        (Rung::Global, vtlb::GLOBAL),
        (Rung::Cache, u64::from(spaces) << vtlb::SPACES_SHIFT),
        (Rung::Sync, vtlb::SYNC),
        (Rung::Trace, if vcpus > 1 { 0 } else { traces }),
        (Rung::Asid, vtlb::ASID),
        (Rung::InvalidatePage, vtlb::INVALIDATE_PAGE),
    ];
    steps.iter().filter(|(step, _)| *step <= rung).fold(0, |bits, (_, step)| bits | step)
}

#[cfg(test)]
mod tests {
    use super::*;

    const PLAN: Vtlb = Vtlb { pool: 64, rung: Rung::Kernel, spaces: 8, trace_writes: true };

    #[test]
    fn modes() {
        assert_eq!(mode(None), 0);
        assert_eq!(mode(Some(PLAN)), 1 | 64 << 8);
        assert_eq!(mode(Some(Vtlb { rung: Rung::User, ..PLAN })), 2);
        assert_eq!(mode(Some(Vtlb { pool: MAX_POOL, ..PLAN })), 1 | 256 << 8);
    }

    #[test]
    fn rungs_are_cumulative() {
        let bits = |rung| optimisations(Vtlb { rung, ..PLAN }, 1);
        let cache = 8 << vtlb::SPACES_SHIFT;
        for (rung, expected) in [
            (Rung::User, 0),
            (Rung::Kernel, 0),
            (Rung::Global, 1),
            (Rung::Cache, cache | 1),
            (Rung::Sync, cache | 3),
            (Rung::Trace, cache | 0xf),
            (Rung::Asid, cache | 0x1f),
            (Rung::InvalidatePage, cache | 0x3f),
        ] {
            assert_eq!(bits(rung), expected, "{rung:?}");
        }
        let dirty_bits = Vtlb { rung: Rung::Trace, trace_writes: false, ..PLAN };
        assert_eq!(optimisations(dirty_bits, 1), cache | 7);
        let top = Vtlb { rung: Rung::InvalidatePage, ..PLAN };
        assert_eq!(optimisations(top, 2), cache | 0x33, "no tracing with several vCPUs");
    }
}
