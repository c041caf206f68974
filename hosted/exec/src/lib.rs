//! `parador exec`: runs one command in a VM of its own.
//!
//! The VM is another `parador` (`parador run`), whose RAM disk is the agent (`guests/agent`). This
//! process is the command's *carrier*: it owns standard input, output, error and the exit code, and
//! moves bytes between them and the agent over vsock ([`proto::agent`]). The VM ends with it.
//!
//! | module | contents |
//! |---|---|
//! | `guest` | the guest as the options state it: root, directories, command |
//! | `vm` | the VM: its configuration, its process, the end of both |
//! | `connection` | connections to the agent |
//! | `carrier` | streams, signals and the end of the command |
#![forbid(unsafe_code)]

mod carrier;
mod connection;
mod guest;
mod vm;

use clap::{Args, ValueEnum};
use guest::Plan;
use hosted_command::failure::{self, Failure};
use hosted_command::messages::{self, Format};
use hosted_command::programs::Named;
use hosted_command::value::Size;
use hosted_monitor::config::vm::{BackendChoice, Time};
use proto::system::MAX_VCPUS;
use std::ffi::OsString;
use std::path::PathBuf;
use std::time::Instant;

/// Exit code of all errors that are not the command's, as with env(1) and podman.
pub const FAILED: u8 = 125;

/// Command line of `parador exec`.
#[derive(Debug, Args)]
pub struct Options {
    /// Root directory: a folder, `/` for this host's, an archive of a container image (OCI layout
    /// or docker save), or a disk image (ext4 in a raw or qcow2 file). It is read only; the
    /// command's changes are discarded.
    #[arg(value_name = "ROOT")]
    root: PathBuf,
    /// Command and its arguments [default: those of a container image].
    #[arg(last = true, value_name = "COMMAND")]
    command: Vec<OsString>,
    /// Share this folder at its own path, with changes; up to two, with --ro.
    #[arg(long, value_name = "DIR")]
    rw: Vec<PathBuf>,
    /// Share this folder at its own path, read-only.
    #[arg(long, value_name = "DIR")]
    ro: Vec<PathBuf>,
    /// Set a variable of the command's environment, or pass this host's.
    #[arg(short, long, value_name = "NAME[=VALUE]")]
    env: Vec<OsString>,
    /// Working directory [default: that of a container image, else the current folder if it is
    /// shared, else /].
    #[arg(short, long, value_name = "DIR")]
    workdir: Option<PathBuf>,
    /// Network: user-mode networking by passt, or none.
    #[arg(long, value_enum, value_name = "NET", default_value_t)]
    net: Net,
    /// Memory size, which also holds changed files.
    #[arg(short, long, value_name = "SIZE", value_parser = Size::parse, default_value = "2G")]
    memory: Size,
    /// Virtual CPUs, up to 8 [default: those of this host, up to 8].
    #[arg(short, long, value_name = "COUNT", value_parser = clap::value_parser!(u8).range(1..=MAX_VCPUS as i64))]
    cpus: Option<u8>,
    /// End the command after this time, e.g. 60s, with exit code 124.
    #[arg(long, value_name = "TIME", value_parser = Time::parse)]
    timeout: Option<Time>,
    /// Kernel [default: the installed kernel, else the cached one of `parador kernel build`].
    #[arg(short, long, value_name = "FILE")]
    kernel: Option<PathBuf>,
    /// Back end [default: auto].
    #[arg(long, value_enum)]
    backend: Option<BackendChoice>,
    /// Message format: lines of text, or one JSON object per line.
    #[arg(long, value_enum, value_name = "FORMAT", default_value_t)]
    log_format: Format,
    #[command(flatten)]
    programs: Named,
}

/// Network of the guest.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
enum Net {
    /// No network but the loopback interface.
    #[default]
    None,
    /// User-mode networking by passt.
    User,
}

/// Runs the command and returns its exit code, or one of Parador's own.
pub fn run(options: &Options) -> u8 {
    messages::set(options.log_format);
    match carry_out(options) {
        Ok(code) => code,
        Err(failure) => {
            failure.print();
            // `timeout` has the same code with env(1)'s relatives.
            if failure.code() == failure::TIMEOUT { failure::TIMEOUT } else { FAILED }
        }
    }
}

fn carry_out(options: &Options) -> Result<u8, Failure> {
    let deadline = options.timeout.and_then(|time| Instant::now().checked_add(time.0));
    let plan = Plan::new(options)?;
    let mut vm = vm::CommandVm::start(options, &plan)?;
    let carried = carrier::carry(&mut vm, &plan, deadline);
    vm.end();
    carried
}
