//! Counters of the vCPUs.

use core::sync::atomic::Ordering::Relaxed;

use proto::hosted::{VcpuStatistics, layout};
use vmm_vcpu::MAX_VCPUS;

use crate::state::fixed::Fixed;
use crate::state::process::process;

/// Returns the counters of a vCPU.
pub fn statistics(vcpu: usize) -> &'static VcpuStatistics {
    let all = <[VcpuStatistics; MAX_VCPUS]>::get();
    &all[vcpu % MAX_VCPUS]
}

// SAFETY: the device process has mapped the shared memory, initially zero; all fields are atomic.
unsafe impl Fixed for [VcpuStatistics; MAX_VCPUS] {
    const ADDRESS: u64 = layout::SHARED + layout::STATISTICS;
}

/// Returns the counters of this process's vCPU.
pub fn own_statistics() -> &'static VcpuStatistics {
    statistics(process().vcpu.load(Relaxed) as usize)
}

/// Increments a counter.
pub fn count(counter: usize) {
    own_statistics().counters[counter].fetch_add(1, Relaxed);
}
