//! `parador qemu`: a VM from a command line of QEMU, as build and test tools pass it.
//!
//! Options are parsed (`line`, `params`), their objects collected (`chardev`, `devices`), and the
//! VM is described as for `parador run` (`vm`), which runs it in this process. The specification is
//! `docs/spec/qemu.md`.
#![forbid(unsafe_code)]

mod chardev;
mod devices;
mod help;
mod line;
mod params;
mod vm;

use hosted_command::failure::{self, Failure};
use hosted_command::messages::{self, Level, say};
use hosted_command::output::print;
use hosted_command::programs::Named;
use hosted_monitor::config::Config;
use hosted_monitor::config::vm::BackendChoice;
use hosted_monitor::run::{self, Launch};
use line::Line;
use std::ffi::{OsStr, OsString};
use std::path::Path;

/// File name by which `parador` is called as QEMU.
const PROGRAM: &str = "qemu-system-x86_64";

/// Returns whether the program's name, `argv[0]`, requests `parador qemu`.
pub fn is_called_as_qemu(program: Option<&OsStr>) -> bool {
    program.and_then(|program| Path::new(program).file_name()).is_some_and(|name| name == PROGRAM)
}

/// Creates the failure of a wrong command line: code 64.
fn refuse(text: impl Into<String>) -> Failure {
    Failure::new(failure::USAGE, text)
}

/// Runs the VM of the arguments after the program's name, or answers a question about QEMU.
/// Returns the exit code.
///
/// # Errors
/// A wrong command line: code 64. A feature that is not supported: 69. Else see [`run::launch`].
pub fn run(arguments: impl IntoIterator<Item = OsString>) -> Result<u8, Failure> {
    let line = Line::parse(arguments)?;
    if let Some(answer) = help::answer(&line) {
        print(answer)?;
        return Ok(0);
    }
    let (mut config, ignored) = vm::describe(line)?;
    if !ignored.is_empty() {
        say(Level::Info, &format!("ignored: {}", ignored.join(" ")));
    }
    replace_kernel(&mut config)?;
    // Tools expect no messages.
    messages::set_quiet(true);
    let launch = Launch { is_quiet: true, is_dry: false, programs: &Named::default() };
    run::launch(config, launch)
}

/// Replaces a bzImage, which only KVM runs, by Parador's kernel where KVM is not usable.
fn replace_kernel(config: &mut Config) -> Result<(), Failure> {
    let Some(kernel) = &config.vm.kernel else { return Ok(()) };
    if !run::is_bzimage(kernel)? {
        return Ok(());
    }
    let why = match config.vm.backend {
        Some(BackendChoice::Process) => "-accel tcg".to_owned(),
        _ => match run::probe_kvm() {
            Ok(()) => return Ok(()),
            Err(why) => format!("KVM is not usable: {why}"),
        },
    };
    let text = format!("runs Parador's kernel instead of {} ({why})", kernel.display());
    say(Level::Info, &text);
    config.vm.kernel = None;
    Ok(())
}
