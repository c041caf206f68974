//! Other programs that end when this one does, however it ends.
//!
//! The request for a signal at the parent's death outlives `exec` but has to be made between
//! `fork` and `exec`, where a safe program cannot run code of its own. So this program starts
//! itself again, makes the request and becomes the other program.

use crate::failure::{self, Failure};
use crate::wedge;
use proto::errno::Cause;
use rustix::process::{Pid, Signal, getppid, set_parent_process_death_signal};
use std::env;
use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::os::fd::AsRawFd;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};

/// First argument of a second start.
const MARK: &str = "--become";

/// In the place of a program's path: the wedge's program that this one contains. A path that was found has a slash.
const COPY: &str = "copy";

/// Exit code if a program was found but could not be started. It is even, so QEMU's reports from inside a
/// machine, which are odd, cannot be mistaken for it.
const CANNOT_START: u8 = failure::INTERNAL;

/// What the other program gets when this one ends.
#[derive(Clone, Copy, Debug)]
pub enum AtEnd {
    /// A request to end, for programs that have something to clean up.
    Terminate,
    /// The end.
    Kill,
}

/// A command that runs `program`, which is looked up in `PATH`. Arguments can be added.
pub fn command(program: &OsStr, at_end: AtEnd) -> Result<Command, Failure> {
    let found = find(Path::new(program)).ok_or_else(|| {
        let name = Path::new(program).display();
        Failure::new(failure::UNAVAILABLE, format!("no program {name}"))
    })?;
    let mut command = again(at_end);
    command.arg(found);
    Ok(command)
}

/// A command that runs the wedge's program of which this one contains a copy.
pub fn copied(at_end: AtEnd) -> Command {
    let mut command = again(at_end);
    command.arg(COPY);
    command
}

/// This program, to become another one.
fn again(at_end: AtEnd) -> Command {
    let mut command = Command::new("/proc/self/exe");
    let signal = match at_end {
        AtEnd::Terminate => "terminate",
        AtEnd::Kill => "kill",
    };
    command.arg(MARK).arg(signal).arg(std::process::id().to_string());
    command
}

/// Where a program is: what is no path is looked up in `PATH`.
pub fn find(name: &Path) -> Option<PathBuf> {
    if name.components().count() > 1 {
        return Some(name.to_owned()).filter(|path| path.is_file());
    }
    search_path().map(|folder| folder.join(name)).find(|path| path.is_file())
}

/// Folders of `PATH`. A relative or empty one means the current folder or one below it, in which
/// others may have put programs: it is left out.
pub fn search_path() -> impl Iterator<Item = PathBuf> {
    let path = env::var_os("PATH").unwrap_or_default();
    absolute_folders(&path).into_iter()
}

fn absolute_folders(path: &OsStr) -> Vec<PathBuf> {
    env::split_paths(path).filter(|folder| folder.is_absolute()).collect()
}

/// Becomes another program if this process was started by [`command`]. Returns the exit code if
/// that fails, `None` if this is an ordinary start.
pub fn become_other_program() -> Option<ExitCode> {
    let mut arguments = env::args_os().skip(1);
    if arguments.next()? != MARK {
        return None;
    }
    let reason = match exec(arguments) {
        Some(reason) => reason,
        None => format!("{MARK} is for internal use"),
    };
    eprintln!("parador: error: {reason}");
    Some(ExitCode::from(CANNOT_START))
}

/// Returns why it failed; `None` if the arguments are not those of [`command`].
fn exec(mut arguments: impl Iterator<Item = OsString>) -> Option<String> {
    let signal = match arguments.next()?.to_str()? {
        "terminate" => Signal::TERM,
        "kill" => Signal::KILL,
        _ => return None,
    };
    let parent = arguments.next()?.to_str()?.parse().ok().and_then(Pid::from_raw)?;
    let program = arguments.next()?;
    if let Err(error) = set_parent_process_death_signal(Some(signal)) {
        let cause = Cause::new(Some(error.raw_os_error()), &error);
        let text = "cannot request a signal at the parent's end (prctl PR_SET_PDEATHSIG)";
        return Some(format!("{text}: {cause}"));
    }
    // The parent may have ended before the request.
    if getppid() != Some(parent) {
        return Some("parador has ended".to_owned());
    }
    let (program, error) = if program == COPY {
        let become_copy = |file: File| {
            // The descriptor is closed when the program in it has been loaded.
            let path = format!("/proc/self/fd/{}", file.as_raw_fd());
            Command::new(path).arg0(wedge::NAME).args(arguments).exec()
        };
        (wedge::NAME.into(), wedge::copy().map_or_else(|error| error, become_copy))
    } else {
        let error = Command::new(&program).args(arguments).exec();
        (program, error)
    };
    Some(format!("cannot start {}: {}", program.display(), failure::describe(&error)))
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
