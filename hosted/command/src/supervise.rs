//! Child programs that end with `parador`, however it ends.
//!
//! The parent-death signal (`PR_SET_PDEATHSIG`) survives `exec`, but must be requested between
//! `fork` and `exec`, where safe Rust cannot run code. So `parador` starts itself again, requests
//! the signal and executes the other program, or continues if that is `parador`, too.

use crate::failure::{self, Failure, IoContext};
use crate::interrupt::Interruptible;
use crate::messages;
use proto::errno::Cause;
use rustix::process::{Pid, Signal, getppid, set_parent_process_death_signal};
use std::collections::VecDeque;
use std::env;
use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::io::{self, BufRead, BufReader};
use std::os::fd::AsRawFd;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Stdio};
use std::sync::OnceLock;

/// First argument of such a start; signal, parent and program follow.
const MARK: &str = "--become";
/// Index of the program among the arguments.
const PROGRAM: usize = 4;

/// `parador` itself.
pub const SELF: &str = "/proc/self/exe";

/// In place of a program's path: the copy of the wedge in `parador`. Resolved paths contain a
/// slash.
const COPY: &str = "copy";

/// Exit code if a program was found but could not be started. It is even, unlike QEMU's exit codes
/// from inside a VM.
const CANNOT_START: u8 = failure::INTERNAL;

/// Signal to the child program when `parador` ends.
#[derive(Clone, Copy, Debug)]
pub enum AtEnd {
    /// SIGTERM, for programs that clean up.
    Terminate,
    /// SIGKILL.
    Kill,
}

/// Creates a command for `program`, which is looked up in `PATH`. Arguments can be added.
pub fn command(program: &OsStr, at_end: AtEnd) -> Result<Command, Failure> {
    let found = find(Path::new(program)).ok_or_else(|| {
        let name = Path::new(program).display();
        Failure::new(failure::UNAVAILABLE, format!("program not found: {name}"))
    })?;
    let mut command = again(at_end);
    command.arg(found);
    Ok(command)
}

/// Creates a command for `parador` itself.
pub fn own(at_end: AtEnd) -> Result<Command, Failure> {
    command(OsStr::new(SELF), at_end)
}

/// Creates a command for the copy of the wedge in `parador`.
pub fn copied(at_end: AtEnd) -> Command {
    let mut command = again(at_end);
    command.arg(COPY);
    command
}

/// Creates a command for `parador`, to execute another program.
fn again(at_end: AtEnd) -> Command {
    let mut command = Command::new(SELF);
    let signal = match at_end {
        AtEnd::Terminate => "terminate",
        AtEnd::Kill => "kill",
    };
    command.arg(MARK).arg(signal).arg(std::process::id().to_string());
    command
}

/// Returns the path of a program; names without a slash are looked up in `PATH`.
pub fn find(name: &Path) -> Option<PathBuf> {
    if name.components().count() > 1 {
        return Some(name.to_owned()).filter(|path| path.is_file());
    }
    search_path().map(|folder| folder.join(name)).find(|path| path.is_file())
}

/// Returns the absolute folders of `PATH`. Relative and empty ones are ignored: other users may
/// have put programs into the current folder.
pub fn search_path() -> impl Iterator<Item = PathBuf> {
    let path = env::var_os("PATH").unwrap_or_default();
    absolute_folders(&path).into_iter()
}

fn absolute_folders(path: &OsStr) -> Vec<PathBuf> {
    env::split_paths(path).filter(|folder| folder.is_absolute()).collect()
}

/// Runs a command to its end; a termination signal kills it, given an [`Interruptible`]. Passes
/// each output line to `line`, which returns whether it may explain a failure. If the program
/// fails, returns the last `shown` of these lines.
pub fn follow(
    command: &mut Command,
    name: &str,
    interruptible: Option<&Interruptible>,
    shown: usize,
    mut line: impl FnMut(&str) -> bool,
) -> Result<Result<(), Vec<String>>, Failure> {
    let (reader, writer) = io::pipe().os_error("create a pipe")?;
    let errors = writer.try_clone().os_error("create a pipe")?;
    let spawned = command.stdin(Stdio::null()).stdout(writer).stderr(errors).spawn();
    // Otherwise this process would keep the pipe open.
    command.stdout(Stdio::null()).stderr(Stdio::null());
    let mut child = spawned.start_error(name)?;
    interruptible.map_or(Ok(()), |interruptible| interruptible.kill_on_signal(&child))?;
    let mut last = VecDeque::new();
    for text in BufReader::new(reader).split(b'\n').map_while(Result::ok) {
        let text = String::from_utf8_lossy(&text).trim_end().to_owned();
        if line(&text) && !text.is_empty() {
            if last.len() == shown {
                last.pop_front();
            }
            last.push_back(text);
        }
    }
    let status = child.wait().os_error("wait for a program")?;
    Ok(if status.success() { Ok(()) } else { Err(last.into()) })
}

/// Index of the name of this program among the process' arguments.
static NAME: OnceLock<usize> = OnceLock::new();

/// Returns name and arguments of this program, as [`env::args_os`] does, without those of
/// [`command`].
pub fn arguments() -> impl Iterator<Item = OsString> {
    env::args_os().skip(NAME.get().copied().unwrap_or(0))
}

/// Requests the parent-death signal and executes another program if this process was started by
/// [`command`]. Returns the exit code if that fails; `None` in `parador`.
///
/// `name` and `copy` are the name and the file of the wedge in `parador`.
pub fn become_other_program(name: &str, copy: fn() -> io::Result<File>) -> Option<ExitCode> {
    let mut arguments = env::args_os().skip(1);
    if arguments.next()? != MARK {
        return None;
    }
    let reason = match request_signal(&mut arguments) {
        Some(Ok(program)) if program == SELF => {
            // Fails only if this has been called before.
            let _ = NAME.set(PROGRAM);
            return None;
        }
        Some(Ok(program)) => exec(program, arguments, name, copy),
        Some(Err(reason)) => reason,
        None => format!("{MARK} is for internal use"),
    };
    messages::to_stderr(format_args!("parador: error: {reason}\n"));
    Some(ExitCode::from(CANNOT_START))
}

/// Requests the signal and returns the program, or the reason of the failure; `None` if the
/// arguments are not those of [`command`].
fn request_signal(
    arguments: &mut impl Iterator<Item = OsString>,
) -> Option<Result<OsString, String>> {
    let signal = match arguments.next()?.to_str()? {
        "terminate" => Signal::TERM,
        "kill" => Signal::KILL,
        _ => return None,
    };
    let parent = arguments.next()?.to_str()?.parse().ok().and_then(Pid::from_raw)?;
    let program = arguments.next()?;
    if let Err(error) = set_parent_process_death_signal(Some(signal)) {
        let cause = Cause::new(Some(error.raw_os_error()), &error);
        let text = "cannot request the parent-death signal (prctl PR_SET_PDEATHSIG)";
        return Some(Err(format!("{text}: {cause}")));
    }
    // The parent may have exited before the request.
    if getppid() != Some(parent) {
        return Some(Err("parador has exited".to_owned()));
    }
    Some(Ok(program))
}

/// Executes a program; returns the reason of the failure.
fn exec(
    program: OsString,
    arguments: impl Iterator<Item = OsString>,
    name: &str,
    copy: fn() -> io::Result<File>,
) -> String {
    let (program, error) = if program == COPY {
        let become_copy = |file: File| {
            // The descriptor is closed once the program has been loaded.
            let path = format!("/proc/self/fd/{}", file.as_raw_fd());
            Command::new(path).arg0(name).args(arguments).exec()
        };
        (name.into(), copy().map_or_else(|error| error, become_copy))
    } else {
        let error = Command::new(&program).args(arguments).exec();
        (program, error)
    };
    format!("cannot start {}: {}", program.display(), failure::describe(&error))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_current_folder_has_no_programs() {
        let folders = |path: &str| absolute_folders(OsStr::new(path));
        assert_eq!(folders(":.:bin:/usr/bin::/bin:"), ["/usr/bin", "/bin"].map(PathBuf::from));
        assert_eq!(folders(""), [""; 0].map(PathBuf::from));
    }
}
