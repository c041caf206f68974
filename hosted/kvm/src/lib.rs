//! Virtual machines by KVM: what the process does that `parador run --backend kvm` starts for one machine.
//!
//! The machine is `vmm_machine::Pc` as on every other host, with all its interrupt controllers and timers; [`vm`] and [`vcpu`] connect it
//! with KVM. The process has a thread for each virtual processor, one for its control and one for its doorbell, two for each line, disk and network. Before anything of the guest's
//! is looked at, it takes a filter of system calls (`hosted_vmm::filters`), which leaves it the descriptors that it has.
#![deny(unsafe_code)]

mod balloon;
#[expect(unsafe_code, reason = "calls of KVM and tap devices")]
mod calls;
mod console;
mod control;
mod debug;
mod disk;
mod error;
#[expect(unsafe_code, reason = "descriptors that the process is started with")]
mod machine;
mod net;
mod probe;
#[expect(unsafe_code, reason = "the time-stamp counter")]
mod seat;
#[expect(unsafe_code, reason = "the memory that KVM shares, and signals")]
mod vcpu;
#[expect(unsafe_code, reason = "guest memory becomes the guest's")]
mod vm;

pub use error::Error;
pub use machine::{Machine, Sandbox, descriptor, run};
pub use probe::probe;
