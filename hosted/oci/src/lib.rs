//! `parador oci`: an OCI runtime, whose containers run in VMs.
//!
//! Engines start it with the command line of runc. `create` starts a *carrier*, a process whose
//! number the engine gets: it starts the VM (`parador run`), prepares the container by the agent
//! (`guests/agent`), and waits for `start`. It owns the engine's streams or terminal, passes
//! signals on, and exits as the container's process does. The VM ends with its carrier.
//!
//! A container of a pod runs in the VM of the pod's first container, the sandbox.
//!
//! | module | contents |
//! |---|---|
//! | `line` | command line |
//! | `report` | messages for engines: `--log`, standard error |
//! | `store` | containers on the disk: states, locks, folders |
//! | `annotations` | annotations for VMs |
//! | `bundle` | configurations: reading, refusals, size of the VM |
//! | `mounts` | file systems of a container: kinds, options |
//! | `share` | the shared directory of a VM, into which the host mounts |
//! | `seccomp` | seccomp profiles as filters for the guest |
//! | `devices` | devices that a container may use, as a program for the guest |
//! | `scratch` | disks for changes of containers |
//! | `message` | configurations as messages to the agent |
//! | `cgroup` | cgroups of the host, version 1 and 2 |
//! | `systemd` | cgroups that systemd makes |
//! | `hooks` | hooks of configurations, on the host |
//! | `network` | the pod's network namespace: addresses, a tap device |
//! | `terminal` | pseudoterminals for engines |
//! | `view` | namespaces of a carrier that engines enter |
//! | `shortage` | lack of memory in the guest, as the engine learns of it |
//! | `carrier` | the carrier of a container, and that of another process in it |
//! | `resources` | limits, `update`, `events` |
//! | `balloon` | memory that the guest returns to the host after `update` |
//! | `create`, `lifecycle` | the other commands |
//!
//! The specification is `docs/spec/oci.md`.
#![forbid(unsafe_code)]
// It panics where standard error cannot be written: messages::to_stderr.
#![deny(clippy::print_stderr)]

mod annotations;
mod balloon;
mod bundle;
mod carrier;
mod cgroup;
mod create;
mod devices;
mod forward;
mod hooks;
mod lifecycle;
mod line;
mod message;
mod mounts;
mod network;
mod report;
mod resolver;
mod resources;
mod scratch;
mod seccomp;
mod share;
mod shortage;
mod store;
mod systemd;
mod tasks;
mod terminal;
mod view;

use clap::Parser;
use hosted_command::failure::{self, Failure};
use hosted_monitor::descriptors;
use line::RuntimeLine;
use std::ffi::{OsStr, OsString};
use std::path::Path;

/// File name by which `parador` is called as a runtime.
const PROGRAM: &str = "parador-oci";
/// Exit code of failures, as that of runc.
const FAILED: u8 = 1;

/// Returns whether the program's name, `argv[0]`, requests `parador oci`.
pub fn is_called_as_runtime(program: Option<&OsStr>) -> bool {
    program.and_then(|program| Path::new(program).file_name()).is_some_and(|name| name == PROGRAM)
}

/// Creates a failure of a container or its configuration.
fn refuse(text: impl Into<String>) -> Failure {
    Failure::new(failure::BAD_CONFIG, text)
}

/// Carries out the arguments after the program's name and returns the exit code. Failures are
/// printed, and written to the engine's log.
pub fn run(arguments: impl IntoIterator<Item = OsString>) -> u8 {
    let arguments = [OsString::from(PROGRAM)].into_iter().chain(arguments);
    let line = match RuntimeLine::try_parse_from(arguments) {
        Ok(line) => line,
        Err(error) => {
            let is_failure = error.use_stderr();
            // There is no fallback if the message cannot be printed.
            let _ = error.print();
            return if is_failure { FAILED } else { 0 };
        }
    };
    // Carriers outlive this process.
    descriptors::withhold_inherited();
    let done = lifecycle::carry_out(&line);
    done.unwrap_or_else(|failure| {
        report::failure(&line.global, &failure);
        FAILED
    })
}
