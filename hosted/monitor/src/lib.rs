//! Monitor of VMs on Linux: `parador run`, its control socket (`parador ctl`), lists of all VMs
//! (`parador ps`, `top`, `metrics`), the check of the host (`parador doctor`), and systems in QEMU
//! (`parador system emulate`).
//!
//! A VM is a child process (`vm_process`), either the wedge (`companion`) or a KVM process (`kvm`),
//! with device processes next to it (`device`). The other processes are `parador` again: see
//! [`become_part`].
#![forbid(unsafe_code)]

mod api;
mod backend;
mod client;
mod companion;
mod compat;
pub mod config;
mod console;
mod control;
pub mod ctl;
mod debugger;
pub mod descriptors;
mod device;
mod device_process;
mod disk;
pub mod doctor;
pub mod emulate;
mod event_loop;
mod events;
mod exit;
pub mod fleet;
mod http;
mod kvm;
mod line_sink;
mod metrics;
mod net;
mod orphans;
mod passt;
mod perf;
mod ports;
mod profile;
mod relay;
pub mod run;
pub mod runtime;
mod share;
mod spec;
#[cfg(test)]
mod specification;
mod state;
mod statistics;
mod supervisor;
mod switch;
pub mod terminal;
mod verb;
pub mod vm_files;
mod vm_process;
mod vsock;

use hosted_command::supervise;
use std::process::ExitCode;

/// Becomes the process of a VM as which this program was started again. Returns its exit code;
/// `None` in an ordinary `parador`.
pub fn become_part() -> Option<ExitCode> {
    supervise::become_other_program(companion::WEDGE.name, companion::wedge_in_memory)
        .or_else(device::become_device)
        .or_else(relay::become_relay)
        .or_else(switch::become_switch)
        .or_else(kvm::become_machine)
}
