//! Commands and containers of the host: their processes, and their streams or terminals.

use crate::children::Children;
use crate::container::{self, Member};
use crate::enter::{Entering, Job};
use crate::{ENTER, cgroup, stream, users};
use proto::agent::container::{Container, ContainerProcess};
use proto::agent::{Answer, CommandUser, End, GuestCommand, Stream, TerminalSize};
use rustix::process::{Pid, Signal, kill_process_group};
use rustix::pty::{OpenptFlags, grantpt, ioctl_tiocgptpeer, openpt, unlockpt};
use rustix::termios::{Winsize, tcsetwinsize};
use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, PipeReader, PipeWriter};
use std::os::fd::{BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::process::Command;
use std::sync::mpsc::Receiver;
use std::thread::JoinHandle;

/// Number of SIGKILL.
pub const KILL: u8 = 9;
/// This program, after the change of the root, too.
const OWN: &str = "/proc/self/exe";

/// Flags of pseudoterminals.
const TERMINAL: OpenptFlags =
    OpenptFlags::RDWR.union(OpenptFlags::NOCTTY).union(OpenptFlags::CLOEXEC);

/// A process that was started, or prepared.
pub struct Running {
    pid: Pid,
    terminal: Option<OwnedFd>,
    /// Signals are for the process alone, not for its group.
    is_alone: bool,
}

/// The end of a command, to be waited for.
pub struct Ending {
    end: Receiver<End>,
    copies: Vec<JoinHandle<()>>,
    /// Hangs up when the command has ended.
    running: PipeWriter,
    /// Container that ends with it.
    container: Option<String>,
}

/// A process of a container that waits to be started.
pub struct Prepared {
    entering: Entering,
    ending: Ending,
}

/// Streams that the host has connected.
pub type Streams = BTreeMap<Stream, File>;

/// Starts a command with its streams.
pub fn start(
    children: &Children,
    command: &GuestCommand<'_>,
    streams: Streams,
) -> io::Result<(Running, Ending)> {
    check_program(command)?;
    let user = users::resolve(&command.user)?;
    let groups = user.groups.iter().copied().collect();
    let ids = CommandUser::Ids { user: user.user, group: user.group, groups };
    let environment = with_home(command, user.home.as_deref())?;
    let environment = proto::agent::Strings::new(&environment);
    let environment =
        environment.ok_or_else(|| io::Error::other("the environment is malformed"))?;
    let command = GuestCommand { environment, user: ids, ..command.clone() };
    let spawn = |process: &mut Command| children.spawn(process);
    let (entering, running, ending) =
        spawn_copy(spawn, &Job::Command(command.clone()), &command, streams)?;
    // Its failures are the command's exit codes.
    drop(entering);
    Ok((running, ending))
}

/// Makes a container and prepares its first process. One without a PID namespace of its own has
/// that of the sandbox, whose first process is `sandbox`, or without one the guest's.
pub fn create(
    children: &Children,
    host: BorrowedFd<'_>,
    container: Container<'_>,
    sandbox: Option<Pid>,
    streams: Streams,
) -> io::Result<(Running, Prepared)> {
    let command = container.process.command.clone();
    let (name, is_own) = (container.name.to_owned(), container.namespaces.pid);
    check_name(&name)?;
    let sandbox =
        sandbox.map(|first| Member { name: container.sandbox, first: container::number(first) });
    let spawn = |process: &mut Command| match (is_own, sandbox) {
        (true, _) => children.spawn_in(container::new_pid_namespace, process),
        (false, Some(sandbox)) => children.spawn_in(move || sandbox.enter_pid_namespace(), process),
        (false, None) => children.spawn(process),
    };
    let job = Job::Container(container);
    let (running, mut prepared) = prepare(children, host, spawn, &job, &command, streams)
        .map_err(|error| abandon(&name, error))?;
    prepared.ending.container = Some(name);
    Ok((running, prepared))
}

/// Prepares another process of a container, whose first one is `first`.
pub fn enter(
    children: &Children,
    host: BorrowedFd<'_>,
    (name, first): (&str, Pid),
    process: ContainerProcess<'_>,
    streams: Streams,
) -> io::Result<(Running, Prepared)> {
    let command = process.command.clone();
    let member = Member { name, first: container::number(first) };
    let namespace = Member { name, first: member.first };
    let spawn =
        |copy: &mut Command| children.spawn_in(move || namespace.enter_pid_namespace(), copy);
    prepare(children, host, spawn, &Job::Member(member, process), &command, streams)
}

/// Returns the reason why a container could not be prepared, of which nothing remains.
fn abandon(name: &str, error: io::Error) -> io::Error {
    let error = cgroup::abandon(name, error);
    container::remove_scratch(name);
    error
}

/// Prepares a process, which ends if the connection of the `host` does.
fn prepare(
    children: &Children,
    host: BorrowedFd<'_>,
    spawn: impl FnOnce(&mut Command) -> io::Result<(Pid, Receiver<End>)>,
    job: &Job<'_>,
    command: &GuestCommand<'_>,
    streams: Streams,
) -> io::Result<(Running, Prepared)> {
    check_program(command)?;
    let (entering, mut running, ending) = spawn_copy(spawn, job, command, streams)?;
    running.is_alone = true;
    if let Err(error) = entering.wait(host) {
        running.signal(children, KILL);
        return Err(error);
    }
    Ok((running, Prepared { entering, ending }))
}

impl Prepared {
    /// Starts the program. The connection of the `host` may end before.
    pub fn run(self, host: BorrowedFd<'_>) -> io::Result<Ending> {
        self.entering.run(host)?;
        Ok(self.ending)
    }
}

fn check_program(command: &GuestCommand<'_>) -> io::Result<()> {
    match command.arguments.iter().next().is_none_or(|program| program.is_empty()) {
        true => Err(io::Error::other("start a program without a name")),
        false => Ok(()),
    }
}

/// Checks that a container's name is that of a folder.
fn check_name(name: &str) -> io::Result<()> {
    match name.is_empty() || name.contains('/') || matches!(name, "." | "..") {
        true => Err(io::Error::other(format!("invalid name of a container: {name}"))),
        false => Ok(()),
    }
}

/// Returns the environment of a command, with the home directory of its user before all others:
/// the environment may have another one.
fn with_home(command: &GuestCommand<'_>, home: Option<&str>) -> io::Result<Vec<u8>> {
    let mut all = Vec::new();
    let home = home.map(|home| format!("HOME={home}").into_bytes());
    for variable in home.as_deref().into_iter().chain(command.environment.iter()) {
        match variable.iter().position(|&byte| byte == b'=') {
            None | Some(0) => {
                return Err(io::Error::other("a variable of the environment has no name"));
            }
            Some(_) => all.extend(variable.iter().chain(&[0])),
        }
    }
    Ok(all)
}

/// Starts a copy of the agent that becomes the process of a job.
fn spawn_copy(
    spawn: impl FnOnce(&mut Command) -> io::Result<(Pid, Receiver<End>)>,
    job: &Job<'_>,
    command: &GuestCommand<'_>,
    streams: Streams,
) -> io::Result<(Entering, Running, Ending)> {
    let (control, own) = UnixStream::pair()?;
    let mut process = Command::new(OWN);
    process.arg(ENTER).env_clear().stdin(OwnedFd::from(own));
    let (ended, is_running) = io::pipe()?;
    let (input, copies, terminal) = match command.terminal {
        Some(window) => {
            let terminal = open_terminal(job)?;
            tcsetwinsize(&terminal, size(window))?;
            connect_terminal(&mut process, streams, terminal, ended)?
        }
        None => {
            let (input, copies) = connect_streams(&mut process, streams, &ended)?;
            (input, copies, None)
        }
    };
    let (pid, end) = spawn(&mut process)?;
    // Its end of the socket is closed with `process`, and those of its pipes.
    drop(process);
    let entering = Entering::begin(control, &input, job)?;
    let running = Running { pid, terminal, is_alone: false };
    let ending = Ending { end, copies, running: is_running, container: None };
    Ok((entering, running, ending))
}

type Copies = Vec<JoinHandle<()>>;

/// Connects three pipes; a stream without a connection is `/dev/null`. Returns the standard input
/// of the process.
fn connect_streams(
    process: &mut Command,
    mut streams: Streams,
    ended: &PipeReader,
) -> io::Result<(OwnedFd, Copies)> {
    let mut copies = Vec::new();
    let mut input = None;
    for stream in [Stream::Input, Stream::Output, Stream::Error] {
        let connection = streams.remove(&stream);
        let end = match connection {
            None => OwnedFd::from(File::options().read(true).write(true).open("/dev/null")?),
            Some(connection) => {
                let (reader, writer) = io::pipe()?;
                if stream == Stream::Input {
                    stream::input(connection, writer.into())?;
                    OwnedFd::from(reader)
                } else {
                    copies.push(stream::output(reader.into(), connection, ended.try_clone()?)?);
                    writer.into()
                }
            }
        };
        match stream {
            Stream::Input => input = Some(end),
            Stream::Output => drop(process.stdout(end)),
            _ => drop(process.stderr(end)),
        }
    }
    let input = input.ok_or_else(|| io::Error::other("there is no standard input"))?;
    Ok((input, copies))
}

/// Opens a pseudoterminal for the process of a job: one of its container, where it has a name, if
/// the container has terminals, else one of the guest.
fn open_terminal(job: &Job<'_>) -> io::Result<OwnedFd> {
    let own = match job {
        Job::Member(member, _) => member.open_terminal(TERMINAL),
        Job::Command(_) | Job::Container(_) => None,
    };
    let terminal = own.map_or_else(|| openpt(TERMINAL), Ok)?;
    grantpt(&terminal)?;
    unlockpt(&terminal)?;
    Ok(terminal)
}

fn connect_terminal(
    process: &mut Command,
    mut streams: Streams,
    terminal: OwnedFd,
    ended: PipeReader,
) -> io::Result<(OwnedFd, Copies, Option<OwnedFd>)> {
    let connection = streams.remove(&Stream::Terminal);
    let connection = connection.ok_or_else(|| io::Error::other("the terminal is not connected"))?;
    let program = ioctl_tiocgptpeer(&terminal, TERMINAL)?;
    process.stdout(program.try_clone()?).stderr(program.try_clone()?);
    stream::input(connection.try_clone()?, terminal.try_clone()?)?;
    let copy = stream::output(terminal.try_clone()?, connection, ended)?;
    Ok((program, vec![copy], Some(terminal)))
}

fn size(window: TerminalSize) -> Winsize {
    let TerminalSize { rows: ws_row, columns: ws_col } = window;
    Winsize { ws_row, ws_col, ws_xpixel: 0, ws_ypixel: 0 }
}

impl Running {
    /// Returns the process.
    pub fn pid(&self) -> Pid {
        self.pid
    }

    /// Sends a signal to the command's process group, or to the container's process. One that has
    /// ended gets none.
    pub fn signal(&self, children: &Children, number: u8) {
        if self.is_alone {
            // Real-time signals, too, which have no names.
            let pid = self.pid.as_raw_pid().unsigned_abs();
            children.while_known(self.pid, || host_linux::sys::kill(pid, number.into()));
            return;
        }
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
    /// Waits for the end of the command and until its output was copied; returns the report.
    pub fn wait(self) -> Answer<'static> {
        // The sender lives until the end.
        let end = self.end.recv().unwrap_or(End::Exited(u8::MAX));
        drop(self.running);
        if let Some(name) = &self.container {
            cgroup::kill(name);
        }
        for copy in self.copies {
            // A panic of the thread has been reported.
            let _ = copy.join();
        }
        let lacked_memory = self.container.as_deref().is_some_and(cgroup::lacked_memory);
        if let Some(name) = self.container {
            cgroup::remove(&name);
        }
        Answer::Ended { end, lacked_memory }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proto::agent::Strings;

    #[test]
    fn the_environment_overrides_the_home_directory() {
        let command = |environment| GuestCommand {
            arguments: Strings::new(b"true\0").expect("strings"),
            environment: Strings::new(environment).expect("strings"),
            folder: b"/",
            user: CommandUser::Named(""),
            terminal: None,
        };
        let with = |environment, home| with_home(&command(environment), home).ok();
        assert_eq!(with(b"A=b\0", Some("/root")).as_deref(), Some(&b"HOME=/root\0A=b\0"[..]));
        assert_eq!(with(b"A=b\0", None).as_deref(), Some(&b"A=b\0"[..]));
        assert_eq!(with(b"=b\0", None), None);
        assert_eq!(with(b"b\0", None), None);
    }

    #[test]
    fn names_of_containers_are_those_of_folders() {
        assert!(check_name("a.b").is_ok());
        assert!(["", ".", "..", "a/b"].iter().all(|name| check_name(name).is_err()));
    }
}
