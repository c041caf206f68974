//! A copy of the agent that becomes a command or a process of a container: its session, terminal,
//! container, user and folder are set before its program starts.
//!
//! A process of its own does it, since safe code cannot run between fork and exec of another.
//!
//! Standard input is a socket to the agent, which sends the later standard input and a [`Job`]. The
//! process of a container then reports that it is ready, waits for a byte, and starts its program,
//! which closes the socket; each failure is a [`Report`]. A command of the guest reports failures
//! to its own standard error.

use crate::container::{self, Member};
use crate::{privileges, users};
use proto::agent::container::{Container, ContainerProcess};
use proto::agent::{CommandUser, GuestCommand, io as wire};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::fs::{Access, Uid, access, fchown};
use rustix::io::{Errno, retry_on_intr};
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, recvmsg, sendmsg,
};
use rustix::process::{DumpableBehavior, ioctl_tiocsctty, set_dumpable_behavior, setsid};
use rustix::stdio::{dup2_stdin, stdin};
use serde::{Deserialize, Serialize};
use std::ffi::OsStr;
use std::io::{self, IoSlice, IoSliceMut, Read, Write};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};

/// Exit codes as those of env(1): the program cannot be started, or does not exist.
const CANNOT_START: u8 = 126;
const NOT_FOUND: u8 = 127;
/// Exit code if the command's process cannot be set up.
const FAILED: u8 = 125;
/// The byte that starts a prepared process, and that a descriptor accompanies.
const GO: [u8; 1] = [1];

/// Task of the copy.
#[expect(clippy::large_enum_variant, reason = "a copy has one")]
#[derive(Serialize, Deserialize)]
pub enum Job<'a> {
    /// Becomes a command of the guest, whose user has numbers.
    #[serde(borrow)]
    Command(GuestCommand<'a>),
    /// Makes a container and becomes its first process.
    Container(Container<'a>),
    /// Becomes a process of a container.
    Member(Member<'a>, ContainerProcess<'a>),
}

/// Answer of a copy for a container.
#[derive(Serialize, Deserialize)]
pub enum Report<'a> {
    /// The process is prepared.
    Ready,
    /// It failed, for this reason.
    Failed(&'a str),
}

/// The agent's side of the socket.
pub struct Entering(UnixStream);

impl Entering {
    /// Sends the standard input and the task of the copy at the other end.
    pub fn begin(control: UnixStream, input: &OwnedFd, job: &Job<'_>) -> io::Result<Self> {
        let descriptors = [input.as_fd()];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut message = SendAncillaryBuffer::new(&mut space);
        if !message.push(SendAncillaryMessage::ScmRights(&descriptors)) {
            return Err(io::Error::other("no space for a descriptor"));
        }
        sendmsg(&control, &[IoSlice::new(&GO)], &mut message, SendFlags::NOSIGNAL)?;
        wire::send(&control, job)?;
        Ok(Self(control))
    }

    /// Waits until the process is prepared, or the connection of the `host` ends.
    pub fn wait(&self, host: impl AsFd) -> io::Result<()> {
        match self.report(host)? {
            true => Ok(()),
            false => Err(io::Error::other("prepare the process: it has ended")),
        }
    }

    /// Starts the program of the process, unless the connection of the `host` ends before.
    pub fn run(self, host: impl AsFd) -> io::Result<()> {
        (&self.0).write_all(&GO)?;
        self.report(host).map(drop)
    }

    /// Receives a report; `false`: the process has closed the socket. The process may wait for
    /// files of its container without end.
    fn report(&self, host: impl AsFd) -> io::Result<bool> {
        let mut waiting = [
            PollFd::new(&self.0, PollFlags::IN),
            PollFd::from_borrowed_fd(host.as_fd(), PollFlags::RDHUP),
        ];
        retry_on_intr(|| poll(&mut waiting, None))?;
        if waiting[0].revents().is_empty() {
            return Err(io::Error::other("wait for the process: the host has gone"));
        }
        let mut room = Vec::new();
        if wire::receive(&self.0, &mut room)?.is_none() {
            return Ok(false);
        }
        match wire::read(&room)? {
            Report::Ready => Ok(true),
            Report::Failed(text) => Err(io::Error::other(text.to_owned())),
        }
    }
}

/// Carries out the task that the agent sends, and starts the program.
pub fn become_process() -> ExitCode {
    let begun = begin();
    let (control, room) = match &begun {
        Ok(begun) => begun,
        Err(error) => return fail(error),
    };
    match wire::read(room) {
        Ok(Job::Command(command)) => become_command(&command),
        Ok(Job::Container(container)) => {
            let process = &container.process;
            let make = || container::create(&container, process.command.terminal.is_some());
            become_member(control, process, make)
        }
        Ok(Job::Member(member, process)) => become_member(control, &process, || member.enter()),
        Err(error) => fail(&error),
    }
}

fn fail(error: &io::Error) -> ExitCode {
    eprintln!("parador-agent: {error}");
    ExitCode::from(FAILED)
}

/// Receives the standard input, and the bytes of the task.
fn begin() -> io::Result<(UnixStream, Vec<u8>)> {
    // Programs of the container, which see this process, may not trace it before it has given up
    // its privileges. The program that it executes may be traced.
    set_dumpable_behavior(DumpableBehavior::NotDumpable)?;
    privileges::restore_file_limit()?;
    let control = UnixStream::from(stdin().try_clone_to_owned()?);
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut messages = RecvAncillaryBuffer::new(&mut space);
    let mut byte = [0];
    recvmsg(&control, &mut [IoSliceMut::new(&mut byte)], &mut messages, RecvFlags::CMSG_CLOEXEC)?;
    let input = messages.drain().find_map(|message| match message {
        RecvAncillaryMessage::ScmRights(mut descriptors) => descriptors.next(),
        _ => None,
    });
    dup2_stdin(input.ok_or_else(|| io::Error::other("there is no standard input"))?)?;
    let mut room = Vec::new();
    wire::receive(&control, &mut room)?.ok_or(io::ErrorKind::UnexpectedEof)?;
    Ok((control, room))
}

/// Becomes a command of the guest.
fn become_command(command: &GuestCommand<'_>) -> ExitCode {
    if let Err(error) = set_up(command) {
        return fail(&error);
    }
    let mut arguments = command.arguments.iter().map(OsStr::from_bytes);
    let program = arguments.next().unwrap_or_default();
    let mut process = Command::new(program);
    let error = add_environment(&mut process, command).args(arguments).exec();
    eprintln!("parador exec: {}: {}", Path::new(program).display(), reason(&error));
    ExitCode::from(match error.kind() {
        io::ErrorKind::NotFound => NOT_FOUND,
        _ => CANNOT_START,
    })
}

fn set_up(command: &GuestCommand<'_>) -> io::Result<()> {
    begin_session(command)?;
    privileges::change_user(&command.user)?;
    enter_folder(command)
}

/// Begins a session; the agent's children have its session otherwise.
fn begin_session(command: &GuestCommand<'_>) -> io::Result<()> {
    setsid()?;
    if command.terminal.is_some() {
        ioctl_tiocsctty(stdin())?;
    }
    Ok(())
}

/// Gives a terminal to the user, who may open it by its name, as other runtimes do.
fn give_terminal(command: &GuestCommand<'_>) -> io::Result<()> {
    let user = users::resolve(&command.user)?.user;
    match command.terminal {
        Some(_) => Ok(fchown(stdin(), Some(Uid::from_raw(user)), None)?),
        None => Ok(()),
    }
}

fn enter_folder(command: &GuestCommand<'_>) -> io::Result<()> {
    let folder = Path::new(OsStr::from_bytes(command.folder));
    std::env::set_current_dir(folder).map_err(|error| {
        let text = format!("cannot enter {}: {}", folder.display(), reason(&error));
        io::Error::new(error.kind(), text)
    })
}

/// Returns the reason of an error as the C library has it.
fn reason(error: &io::Error) -> String {
    let text = error.to_string();
    text.split(" (os error").next().unwrap_or(&text).to_owned()
}

fn add_environment<'a>(process: &'a mut Command, command: &GuestCommand<'_>) -> &'a mut Command {
    process.env_clear();
    for variable in command.environment.iter() {
        let mut parts = variable.splitn(2, |&byte| byte == b'=').map(OsStr::from_bytes);
        if let (Some(name), Some(value)) = (parts.next(), parts.next())
            && !name.is_empty()
        {
            process.env(name, value);
        }
    }
    process
}

/// Becomes a process of a container, which `enter` makes or enters.
fn become_member(
    control: &UnixStream,
    process: &ContainerProcess<'_>,
    enter: impl FnOnce() -> io::Result<()>,
) -> ExitCode {
    let report = |report: &Report<'_>| wire::send(control, report);
    let prepare = || {
        begin_session(&process.command)?;
        privileges::set_oom_score(process)?;
        enter()?;
        give_terminal(&process.command)?;
        let program = find(&process.command)?;
        report(&Report::Ready)?;
        Ok::<_, io::Error>(program)
    };
    let started = prepare().and_then(|program| {
        let mut go = control;
        go.read_exact(&mut [0])?;
        Err::<(), _>(start(process, &program)?)
    });
    if let Err(error) = started {
        // The agent may have gone, with the guest.
        let _ = report(&Report::Failed(&reason(&error)));
    }
    ExitCode::from(FAILED)
}

/// Starts the program of a container's process; returns only with an error.
fn start(process: &ContainerProcess<'_>, program: &Path) -> io::Result<io::Error> {
    let command = &process.command;
    // Neither need be readable for the user.
    let home = match &command.user {
        CommandUser::Ids { user, .. } if !has_home(command) => Some(home(*user)),
        _ => None,
    };
    let entered = enter_folder(command);
    privileges::apply(process)?;
    // The user may have rights to it that root has not, and the other way round.
    entered.or_else(|_| enter_folder(command))?;
    let mut arguments = command.arguments.iter().map(OsStr::from_bytes);
    let mut started = Command::new(program);
    started.arg0(arguments.next().unwrap_or_default());
    add_environment(&mut started, command).args(arguments);
    if let Some(home) = home {
        started.env("HOME", home);
    }
    check_format(program).map_err(|error| {
        io::Error::new(error.kind(), format!("exec {}: {error}", program.display()))
    })?;
    privileges::apply_last(process)?;
    let error = started.exec();
    let text = format!("exec {}: {}", program.display(), reason(&error));
    Ok(io::Error::new(error.kind(), text))
}

/// Refuses a program that the kernel cannot execute: the C library would let a shell interpret it,
/// whatever it is. One that this user cannot read is left to the kernel.
fn check_format(program: &Path) -> io::Result<()> {
    /// First bytes of the formats of Linux (fs/binfmt_elf.c, fs/binfmt_script.c), and machines of
    /// this processor (`linux/elf-em.h`) at their place.
    const ELF: &[u8] = b"\x7fELF";
    const SCRIPT: &[u8] = b"#!";
    const MACHINES: [u16; 2] = [3, 62];
    let mut head = Vec::new();
    let opened = users::open_regular(program);
    let read = opened.and_then(|file| file.take(20).read_to_end(&mut head));
    if read.is_err() || head.starts_with(SCRIPT) {
        return Ok(());
    }
    let machine = head.get(18..20).map(|it| u16::from_le_bytes([it[0], it[1]]));
    let is_own = head.starts_with(ELF) && machine.is_some_and(|it| MACHINES.contains(&it));
    if is_own { Ok(()) } else { Err(Errno::NOEXEC.into()) }
}

/// Returns whether the environment has a home folder; an empty one counts as none.
fn has_home(command: &GuestCommand<'_>) -> bool {
    let homes = command.environment.iter().filter_map(|variable| variable.strip_prefix(b"HOME="));
    homes.last().is_some_and(|home| !home.is_empty())
}

/// Returns the home folder of a user, by the container's own files if they have it.
fn home(user: u32) -> String {
    let found = users::resolve(&CommandUser::Named(&user.to_string()));
    found.ok().and_then(|user| user.home).unwrap_or_else(|| "/".to_owned())
}

/// Finds the program of a container's process. The texts are those by which engines recognise that
/// it does not exist.
fn find(command: &GuestCommand<'_>) -> io::Result<PathBuf> {
    let name = command.arguments.iter().next().unwrap_or_default();
    let shown = String::from_utf8_lossy(name);
    let name = Path::new(OsStr::from_bytes(name));
    let missing = |place: &str| {
        let text =
            format!("start `{shown}`: executable file not found{place}: No such file or directory");
        io::Error::new(io::ErrorKind::NotFound, text)
    };
    let is_program = |path: &Path| path.metadata().is_ok_and(|it| it.is_file());
    if name.as_os_str().as_bytes().contains(&b'/') {
        let path = Path::new(OsStr::from_bytes(command.folder)).join(name);
        return match path.metadata() {
            Ok(it) if it.is_file() && it.mode() & 0o111 != 0 => Ok(path),
            Ok(_) => Err(io::Error::other(format!("exec `{shown}`: Permission denied"))),
            Err(_) => Err(missing("")),
        };
    }
    // The last one counts, as for the program.
    let search = command.environment.iter().filter_map(|it| it.strip_prefix(b"PATH=")).last();
    let folders = search.unwrap_or(b"/bin:/usr/bin").split(|&byte| byte == b':');
    let found = folders.map(|folder| Path::new(OsStr::from_bytes(folder)).join(name));
    let mut found = found.filter(|path| is_program(path));
    let found = found.find(|path| access(path, Access::EXEC_OK).is_ok());
    found.ok_or_else(|| missing(" in $PATH"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proto::agent::Strings;

    fn command<'a>(arguments: &'a [u8], environment: &'a [u8]) -> GuestCommand<'a> {
        GuestCommand {
            arguments: Strings::new(arguments).expect("strings"),
            environment: Strings::new(environment).expect("strings"),
            folder: b"/usr",
            user: CommandUser::Named(""),
            terminal: None,
        }
    }

    #[test]
    fn programs_are_found_before_the_start() {
        let find = |name: &[u8], path: &[u8]| {
            find(&command(name, path)).map_err(|error| error.to_string())
        };
        assert_eq!(find(b"sh\0", b"A=b\0PATH=/no:/bin\0"), Ok("/bin/sh".into()));
        assert_eq!(find(b"bin/env\0", b""), Ok("/usr/bin/env".into()));
        let text = "start `sh`: executable file not found in $PATH: No such file or directory";
        assert_eq!(find(b"sh\0", b"PATH=/bin\0PATH=/no\0"), Err(text.to_owned()));
        let text = "start `/no`: executable file not found: No such file or directory";
        assert_eq!(find(b"/no\0", b""), Err(text.to_owned()));
        assert_eq!(find(b"/etc\0", b""), Err("exec `/etc`: Permission denied".to_owned()));
    }

    #[test]
    fn only_programs_of_the_kernel_are_executed() {
        let folder = tempfile::tempdir().expect("a folder");
        let check = |bytes: &[u8]| {
            let program = folder.path().join("program");
            std::fs::write(&program, bytes).expect("a file");
            check_format(&program).map_err(|error| reason(&error))
        };
        let elf = |machine: u8| [&b"\x7fELF"[..], &[0; 14], &[machine, 0]].concat();
        assert_eq!(
            (check(&elf(62)), check(&elf(3)), check(b"#!/bin/sh\n")),
            (Ok(()), Ok(()), Ok(()))
        );
        for wrong in [&b""[..], b"echo", b"\x7fELF", &elf(183)] {
            assert_eq!(check(wrong), Err("Exec format error".to_owned()), "{wrong:?}");
        }
        assert!(check_format(Path::new("/no/such")).is_ok());
    }

    #[test]
    fn an_agent_that_has_gone_is_an_error() {
        let (control, copy) = UnixStream::pair().expect("sockets");
        let input = OwnedFd::from(std::fs::File::open("/dev/null").expect("a file"));
        let job = Job::Command(command(b"true\0", b""));
        let entering = Entering::begin(control, &input, &job).expect("a socket");
        let (host, guest) = UnixStream::pair().expect("sockets");
        drop(copy);
        assert!(entering.wait(&guest).is_err());
        drop(host);
    }

    #[test]
    fn a_host_that_has_gone_ends_the_wait() {
        let (control, _copy) = UnixStream::pair().expect("sockets");
        let (host, guest) = UnixStream::pair().expect("sockets");
        // A request that comes too early is none.
        (&host).write_all(&GO).expect("room");
        drop(host);
        let error = Entering(control).wait(&guest).expect_err("no report");
        assert_eq!(error.to_string(), "wait for the process: the host has gone");
    }
}
