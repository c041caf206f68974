//! Seccomp filters of all processes of hosted VMs (seccomp(2)), built with `seccompiler`: of the
//! processes of pre-virtualized VMs, which the wedge installs ([`words`]), of VMs with KVM
//! ([`confine_kvm`]), of device processes ([`confine_device`]), and of processes that forward
//! frames ([`confine_switch`], [`confine_relay`]). Any call that a filter does not permit kills its
//! process, and the VM with it.
//!
//! [`profile`] compiles the profiles of containers, which guests install.
#![forbid(unsafe_code)]

mod bpf;
mod device;
mod kvm;
mod profile;
mod rules;
mod stream;
#[cfg(test)]
mod tests;
mod wedge;

use std::fmt;

use seccompiler::BackendError;

pub use device::{DeviceAccess, confine_device};
pub use kvm::confine_kvm;
pub use profile::{ProfileRule, profile};
pub use seccompiler::{
    SeccompCmpArgLen as Width, SeccompCmpOp as Compare, SeccompCondition as Condition,
};
pub use stream::{confine_relay, confine_switch};
pub use wedge::words;

/// Reason that a filter cannot be built or installed.
#[derive(Debug)]
pub struct Error(String);

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "cannot build the seccomp filters: {}", self.0)
    }
}

impl std::error::Error for Error {}

impl From<BackendError> for Error {
    fn from(error: BackendError) -> Self {
        Self(error.to_string())
    }
}

impl From<seccompiler::Error> for Error {
    fn from(error: seccompiler::Error) -> Self {
        Self(error.to_string())
    }
}
