//! A copy of the agent that becomes a command: its session, terminal, user and folder are set
//! before its program starts.
//!
//! A process of its own does it, since safe code cannot run between fork and exec of another.

use rustix::process::{ioctl_tiocsctty, setsid};
use rustix::stdio::stdin;
use rustix::thread::{Gid, Uid, set_thread_gid, set_thread_groups, set_thread_uid};
use std::ffi::{OsStr, OsString};
use std::io;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, ExitCode};

/// Exit codes as those of env(1): the program cannot be started, or does not exist.
const CANNOT_START: u8 = 126;
const NOT_FOUND: u8 = 127;
/// Exit code if the command's process cannot be set up.
const FAILED: u8 = 125;

/// State of the command's process.
pub struct Entry<'a> {
    /// User, group, supplementary groups.
    pub user: u32,
    pub group: u32,
    pub groups: &'a [u32],
    /// Working directory.
    pub folder: &'a OsStr,
    /// Standard input is its terminal.
    pub has_terminal: bool,
}

impl Entry<'_> {
    /// Returns the arguments of the copy, after its first one; the command's follow.
    pub fn arguments(&self) -> [OsString; 5] {
        let groups: Vec<String> = self.groups.iter().map(u32::to_string).collect();
        let terminal = if self.has_terminal { "terminal" } else { "streams" };
        [
            self.user.to_string().into(),
            self.group.to_string().into(),
            groups.join(",").into(),
            terminal.into(),
            self.folder.to_owned(),
        ]
    }
}

/// Carries out [`Entry::arguments`], and starts the command that follows them.
pub fn become_command(mut arguments: impl Iterator<Item = OsString>) -> ExitCode {
    let mut next = || arguments.next().unwrap_or_default();
    let head = [next(), next(), next(), next()];
    let folder = next();
    let program = next();
    if let Err(error) = set_up(&head, &folder) {
        eprintln!("parador-agent: {error}");
        return ExitCode::from(FAILED);
    }
    let error = Command::new(&program).args(arguments).exec();
    let reason = error.to_string();
    // As the C library has it.
    let reason = reason.split(" (os error").next().unwrap_or(&reason);
    eprintln!("parador exec: {}: {reason}", Path::new(&program).display());
    ExitCode::from(match error.kind() {
        io::ErrorKind::NotFound => NOT_FOUND,
        _ => CANNOT_START,
    })
}

fn set_up([user, group, groups, terminal]: &[OsString; 4], folder: &OsStr) -> io::Result<()> {
    let invalid = || io::Error::other("invalid arguments");
    let number = |text: &str| text.parse::<u32>().map_err(|_| invalid());
    let text = |text: &'_ OsString| text.to_str().map(str::to_owned).ok_or_else(invalid);
    // The agent's children have its session otherwise.
    setsid()?;
    if terminal == "terminal" {
        ioctl_tiocsctty(stdin())?;
    }
    let groups = text(groups)?;
    let groups = groups.split(',').filter(|group| !group.is_empty());
    let groups = groups.map(|group| Ok(Gid::from_raw(number(group)?)));
    set_thread_groups(&groups.collect::<io::Result<Vec<_>>>()?)?;
    set_thread_gid(Gid::from_raw(number(&text(group)?)?))?;
    // Changing the user gives the capabilities up (capabilities(7)).
    set_thread_uid(Uid::from_raw(number(&text(user)?)?))?;
    std::env::set_current_dir(folder).map_err(|error| {
        let folder = Path::new(folder).display();
        io::Error::new(error.kind(), format!("cannot enter {folder}: {error}"))
    })
}
