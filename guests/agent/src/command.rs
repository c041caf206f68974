//! A command of the host: its process, and its streams or terminal.

use crate::children::Children;
use crate::enter::Entry;
use crate::{ENTER, stream, users};
use proto::agent::{End, GuestCommand, Stream, TerminalSize};
use rustix::process::{Pid, Signal, kill_process_group};
use rustix::pty::{OpenptFlags, grantpt, ioctl_tiocgptpeer, openpt, unlockpt};
use rustix::termios::{Winsize, tcsetwinsize};
use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::fs::File;
use std::io::{self, PipeReader, PipeWriter};
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt;
use std::process::{Command, Stdio};
use std::sync::mpsc::Receiver;
use std::thread::JoinHandle;

/// This program, after the change of the root, too.
const OWN: &str = "/proc/self/exe";

/// A command that was started.
pub struct Running {
    pid: Pid,
    terminal: Option<OwnedFd>,
}

/// The end of a command, to be waited for.
pub struct Ending {
    end: Receiver<End>,
    copies: Vec<JoinHandle<()>>,
    /// Hangs up when the command has ended.
    running: PipeWriter,
}

/// Starts a command with the streams that the host has connected.
pub fn start(
    children: &Children,
    command: &GuestCommand<'_>,
    streams: BTreeMap<Stream, File>,
) -> io::Result<(Running, Ending)> {
    let mut arguments = command.arguments.iter().map(OsStr::from_bytes).peekable();
    if arguments.peek().is_none_or(|program| program.is_empty()) {
        return Err(io::Error::other("no command"));
    }
    let user = users::resolve(&command.user)?;
    let entry = Entry {
        user: user.user,
        group: user.group,
        groups: &user.groups,
        folder: OsStr::from_bytes(command.folder),
        has_terminal: command.terminal.is_some(),
    };
    let mut process = Command::new(OWN);
    process.arg(ENTER).args(entry.arguments()).args(arguments).env_clear();
    if let Some(home) = &user.home {
        // The environment may have another one.
        process.env("HOME", home);
    }
    for variable in command.environment.iter() {
        let mut parts = variable.splitn(2, |&byte| byte == b'=').map(OsStr::from_bytes);
        match (parts.next(), parts.next()) {
            (Some(name), Some(value)) if !name.is_empty() => process.env(name, value),
            _ => return Err(io::Error::other("a variable of the environment has no name")),
        };
    }
    let (ended, running) = io::pipe()?;
    let (copies, terminal) = match command.terminal {
        Some(window) => connect_terminal(&mut process, streams, window, ended)?,
        None => (connect_streams(&mut process, streams, &ended)?, None),
    };
    let (pid, end) = children.spawn(&mut process)?;
    // The command's ends of its pipes are closed with `process`.
    Ok((Running { pid, terminal }, Ending { end, copies, running }))
}

type Copies = Vec<JoinHandle<()>>;

/// Connects three pipes; a stream without a connection is `/dev/null`.
fn connect_streams(
    process: &mut Command,
    mut streams: BTreeMap<Stream, File>,
    ended: &PipeReader,
) -> io::Result<Copies> {
    let mut copies = Vec::new();
    for stream in [Stream::Input, Stream::Output, Stream::Error] {
        let connection = streams.remove(&stream);
        let end = match connection {
            None => Stdio::null(),
            Some(connection) => {
                let (reader, writer) = io::pipe()?;
                if stream == Stream::Input {
                    stream::input(connection, writer.into())?;
                    reader.into()
                } else {
                    copies.push(stream::output(reader.into(), connection, ended.try_clone()?)?);
                    writer.into()
                }
            }
        };
        match stream {
            Stream::Input => process.stdin(end),
            Stream::Output => process.stdout(end),
            _ => process.stderr(end),
        };
    }
    Ok(copies)
}

fn connect_terminal(
    process: &mut Command,
    mut streams: BTreeMap<Stream, File>,
    window: TerminalSize,
    ended: PipeReader,
) -> io::Result<(Copies, Option<OwnedFd>)> {
    let connection = streams.remove(&Stream::Terminal);
    let connection = connection.ok_or_else(|| io::Error::other("the terminal is not connected"))?;
    let flags = OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC;
    let terminal = openpt(flags)?;
    grantpt(&terminal)?;
    unlockpt(&terminal)?;
    tcsetwinsize(&terminal, size(window))?;
    let program = ioctl_tiocgptpeer(&terminal, flags)?;
    process.stdin(program.try_clone()?).stdout(program.try_clone()?).stderr(program);
    stream::input(connection.try_clone()?, terminal.try_clone()?)?;
    let copy = stream::output(terminal.try_clone()?, connection, ended)?;
    Ok((vec![copy], Some(terminal)))
}

fn size(window: TerminalSize) -> Winsize {
    let TerminalSize { rows: ws_row, columns: ws_col } = window;
    Winsize { ws_row, ws_col, ws_xpixel: 0, ws_ypixel: 0 }
}

impl Running {
    /// Sends a signal to the command's process group. One that has ended gets none.
    pub fn signal(&self, number: u8) {
        if let Some(signal) = Signal::from_named_raw(number.into()) {
            let _ = kill_process_group(self.pid, signal);
        }
    }

    /// Sets the size of the terminal, if it has one.
    pub fn resize(&self, window: TerminalSize) {
        if let Some(terminal) = &self.terminal {
            let _ = tcsetwinsize(terminal, size(window));
        }
    }
}

impl Ending {
    /// Waits for the end of the command and until its output was copied.
    pub fn wait(self) -> End {
        // The sender lives until the end.
        let end = self.end.recv().unwrap_or(End::Exited(u8::MAX));
        drop(self.running);
        for copy in self.copies {
            // A panic of the thread has been reported.
            let _ = copy.join();
        }
        end
    }
}
