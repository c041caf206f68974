//! Guests on AMD SVM.

pub mod exit;
pub mod intercepts;
#[cfg(target_os = "none")]
pub mod vcpu;
pub mod virq;

#[cfg(target_os = "none")]
pub use vcpu::{
    ExitToVmm, HOST_FRAMES, Local, VcpuFrames, abort_destroyed_vcpu, init_maps, init_this_cpu,
    is_ready, read_groups, run, set_host_pages,
};
