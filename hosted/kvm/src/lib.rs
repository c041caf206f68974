//! KVM back end: the process that `parador run --backend kvm` starts for a VM.
//!
//! The VM is `vmm_machine::Pc` as on every other host, with all its interrupt controllers and
//! timers; [`vm`] and [`vcpu`] connect it with KVM. The process has a thread per vCPU, one for its
//! control and one for its doorbell, two per line and network, and one or two per raw disk. Before
//! it reads guest data, it installs a seccomp filter (`hosted_filters`), which restricts it
//! to its open descriptors.
#![deny(unsafe_code)]

mod balloon;
#[expect(unsafe_code, reason = "ioctls of KVM")]
mod calls;
mod clock;
mod console;
mod control;
mod debug;
#[expect(unsafe_code, reason = "the host addresses of guest memory")]
mod disk;
mod error;
#[expect(unsafe_code, reason = "flag that a signal handler sets")]
mod kick;
#[expect(unsafe_code, reason = "zeroed rings")]
mod net;
mod pause;
mod probe;
#[expect(unsafe_code, reason = "descriptors that the process is started with")]
mod process;
#[expect(unsafe_code, reason = "areas of shared memory")]
mod shared;
#[expect(unsafe_code, reason = "memory shared by KVM")]
mod vcpu;
#[expect(unsafe_code, reason = "the time-stamp counter")]
mod vcpu_thread;
#[expect(unsafe_code, reason = "guest memory is mapped into the VM")]
mod vm;

pub use error::Error;
pub use probe::probe;
pub use process::{KvmConfig, Sandbox, descriptor, run};
