//! Host ends of a VM's serial line and virtio console.
//!
//! A reader of standard output or of a file (a pipe, say) that does not keep up stops the VM's
//! output, but not `parador`. Any other reader that does not keep up loses output: the VM never
//! waits for the users of its console.

mod tail;

use crate::config::console::Target;
use hosted_command::failure::{self, Failure, IoContext};
use hosted_command::messages::{Level, say};
use hosted_command::streams::Output;
use rustix::fs::Mode;
use rustix::io::{Errno, read};
use rustix::pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt};
use rustix::stdio::{stderr, stdin, stdout};
use rustix::termios::{OptionalActions, tcgetattr, tcsetattr};
use std::fs::OpenOptions;
use std::io::{self, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::thread;
use std::time::Duration;
use tail::TailFile;

/// Time between two attempts to accept a client after a failure. The VM's events wait meanwhile.
const ACCEPT_INTERVAL: Duration = Duration::from_millis(10);

/// Open host end of a console line.
pub enum HostConsole {
    /// Standard input and output.
    Stdio(Output),
    /// No connection.
    Null,
    /// A file, for output only.
    File(Output),
    /// A file with the end of the output.
    Tail(TailFile),
    /// A pseudoterminal. Its other end stays open, which prevents a hang-up.
    Pty {
        /// End of `parador`.
        master: OwnedFd,
        /// End of the user.
        _other: OwnedFd,
    },
    /// A listening Unix socket.
    Unix(Socket),
}

/// A listening socket and its client. Dropping it removes the socket.
pub struct Socket {
    path: PathBuf,
    listener: UnixListener,
    client: Option<UnixStream>,
}

impl Drop for Socket {
    fn drop(&mut self) {
        // The socket may have been removed already.
        let _ = std::fs::remove_file(&self.path);
    }
}

/// Result of a read.
pub enum Input {
    /// Number of bytes read.
    Bytes(usize),
    /// No input available.
    Nothing,
    /// End of the input.
    End,
}

impl HostConsole {
    /// Opens the host end; `name` is for messages.
    ///
    /// # Errors
    /// A file or socket cannot be created: code 66, 71 or 77.
    pub fn open(target: &Target, name: &str) -> Result<Self, Failure> {
        Ok(match target {
            Target::Stdio => Self::stdio()?,
            Target::Null => Self::Null,
            Target::File(path) => Self::File(match own_stream(path) {
                Some(stream) => Output::new(stream).os_error("duplicate a descriptor")?,
                None => {
                    let mut options = OpenOptions::new();
                    let opened = options.write(true).create(true).truncate(true).open(path);
                    let opened = opened.file_error("write", path)?;
                    Output::new(opened.as_fd()).os_error("duplicate a descriptor")?
                }
            }),
            Target::Tail(path) => Self::Tail(TailFile::create(path).file_error("write", path)?),
            Target::Pty => {
                let (master, other, path) = pty().os_error("create a pseudoterminal")?;
                say(Level::Info, &format!("{name} is {path}"));
                Self::Pty { master, _other: other }
            }
            Target::Unix(path) => {
                let listener = listen(path, &format!("{name}'s socket"))?;
                Self::Unix(Socket { path: path.clone(), listener, client: None })
            }
        })
    }

    /// Returns standard input and output.
    ///
    /// # Errors
    /// Standard output is closed: 71.
    pub fn stdio() -> Result<Self, Failure> {
        Output::new(stdout()).map(Self::Stdio).os_error("duplicate standard output")
    }

    /// Returns whether this is standard input and output.
    pub fn is_stdio(&self) -> bool {
        matches!(self, Self::Stdio(_))
    }

    /// Returns the descriptor to poll for room, if output waits for it: no more should be written
    /// until [`flush`](Self::flush) has written that.
    pub fn waits(&self) -> Option<BorrowedFd<'_>> {
        match self {
            Self::Stdio(output) | Self::File(output) => output.waits(),
            _ => None,
        }
    }

    /// Writes output that waited for room.
    ///
    /// # Errors
    /// Those of [`write`](Self::write).
    pub fn flush(&mut self) -> io::Result<()> {
        match self {
            Self::Stdio(output) | Self::File(output) => output.flush(),
            _ => Ok(()),
        }
    }

    /// Returns whether there is a reader of the output: for a socket, a client.
    pub fn is_connected(&self) -> bool {
        match self {
            Self::Unix(socket) => socket.client.is_some(),
            _ => true,
        }
    }

    /// Returns the descriptor to poll for input or connections.
    pub fn input(&self) -> Option<BorrowedFd<'_>> {
        match self {
            Self::Stdio(_) => Some(stdin()),
            Self::Null | Self::File(_) | Self::Tail(_) => None,
            Self::Pty { master, .. } => Some(master.as_fd()),
            Self::Unix(socket) => Some(match &socket.client {
                Some(client) => client.as_fd(),
                None => socket.listener.as_fd(),
            }),
        }
    }

    /// Reads available input.
    pub fn read(&mut self, buffer: &mut [u8]) -> Input {
        let result = match self {
            Self::Stdio(_) => read(stdin(), buffer),
            Self::Null | Self::File(_) | Self::Tail(_) => Ok(0),
            Self::Pty { master, .. } => read(&*master, buffer),
            Self::Unix(socket) => {
                let Some(client) = &socket.client else {
                    let accepted = socket.listener.accept().and_then(|(client, _)| {
                        client.set_nonblocking(true)?;
                        Ok(client)
                    });
                    if accepted.as_ref().is_err_and(|it| it.kind() != io::ErrorKind::WouldBlock) {
                        // Most likely file descriptors are exhausted. The client still waits, and
                        // the event loop would spin.
                        thread::sleep(ACCEPT_INTERVAL);
                    }
                    socket.client = accepted.ok();
                    return Input::Nothing;
                };
                match read(client, buffer) {
                    Ok(0) | Err(Errno::CONNRESET) => {
                        socket.client = None;
                        return Input::Nothing;
                    }
                    result => result,
                }
            }
        };
        match result {
            Ok(0) => Input::End,
            Ok(count) => Input::Bytes(count),
            Err(Errno::AGAIN | Errno::INTR) => Input::Nothing,
            // A terminal's hang-up counts as the end of the file.
            Err(_) => Input::End,
        }
    }

    /// Writes guest output. Standard output and files keep what they have no room for.
    ///
    /// # Errors
    /// Only standard output and files return errors.
    pub fn write(&mut self, bytes: &[u8]) -> io::Result<()> {
        match self {
            Self::Stdio(output) | Self::File(output) => output.write(bytes),
            Self::Null => Ok(()),
            Self::Tail(tail) => tail.append(bytes),
            Self::Pty { master, .. } => {
                // Output is lost without a reader.
                let _ = rustix::io::write(&*master, bytes);
                Ok(())
            }
            Self::Unix(socket) => {
                if let Some(client) = &mut socket.client {
                    match client.write(bytes) {
                        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => {
                            socket.client = None;
                        }
                        // Output is lost if the client does not keep up.
                        _ => {}
                    }
                }
                Ok(())
            }
        }
    }
}

/// Returns standard output or error, if the path names it: opened a second time, a file would have
/// another position, and a socket cannot be opened.
pub fn own_stream(path: &Path) -> Option<BorrowedFd<'static>> {
    match path.to_str()? {
        "/dev/stdout" | "/proc/self/fd/1" | "/dev/fd/1" => Some(stdout()),
        "/dev/stderr" | "/proc/self/fd/2" | "/dev/fd/2" => Some(stderr()),
        _ => None,
    }
}

/// Creates a pseudoterminal in raw mode; returns both ends and the name of the user's.
fn pty() -> Result<(OwnedFd, OwnedFd, String), Errno> {
    let flags = OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC;
    let master = openpt(flags)?;
    grantpt(&master)?;
    unlockpt(&master)?;
    let name = ptsname(&master, Vec::new())?;
    let name = name.to_string_lossy().into_owned();
    let flags = rustix::fs::OFlags::RDWR | rustix::fs::OFlags::NOCTTY;
    let flags = flags | rustix::fs::OFlags::CLOEXEC;
    let other = rustix::fs::open(&*name, flags, Mode::empty())?;
    let mut modes = tcgetattr(&other)?;
    modes.make_raw();
    tcsetattr(&other, OptionalActions::Now, &modes)?;
    rustix::io::ioctl_fionbio(&master, true)?;
    Ok((master, other, name))
}

/// Creates a listening socket with access for the user only. `what` completes "cannot create ...".
pub fn listen(path: &Path, what: &str) -> Result<UnixListener, Failure> {
    remove_stale(path, what)?;
    let made = bind(path).and_then(|listener| listener.set_nonblocking(true).map(|()| listener));
    made.file_error(&format!("create {what}"), path)
}

/// Binds a socket with access for the user only: it has its mode from the beginning, whatever the
/// umask.
pub fn bind(path: &Path) -> io::Result<UnixListener> {
    let former = rustix::process::umask(Mode::from_raw_mode(0o177));
    let bound = UnixListener::bind(path);
    rustix::process::umask(former);
    bound
}

/// Removes a socket that no process serves.
pub fn remove_stale(path: &Path, what: &str) -> Result<(), Failure> {
    use std::os::unix::fs::FileTypeExt;
    let refuse = |text: &str| Failure::new(failure::OS_ERROR, format!("{} {text}", path.display()));
    match std::fs::symlink_metadata(path) {
        Err(_) => Ok(()),
        Ok(found) if !found.file_type().is_socket() => Err(refuse("exists and is not a socket")
            .help(format!("remove it, or use another path for {what}"))),
        Ok(_) => match UnixStream::connect(path) {
            Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => {
                std::fs::remove_file(path).file_error("remove the stale socket", path)
            }
            _ => Err(refuse("is in use by another process")),
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_socket_serves_one_after_another() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("serial");
        let mut console = HostConsole::open(&Target::Unix(path.clone()), "it").unwrap();
        console.write(b"lost").unwrap();
        let mut buffer = [0; 8];
        for word in [b"one", b"two"] {
            let mut client = UnixStream::connect(&path).unwrap();
            assert!(matches!(console.read(&mut buffer), Input::Nothing));
            console.write(word).unwrap();
            io::Read::read_exact(&mut client, &mut buffer[..3]).unwrap();
            assert_eq!(&buffer[..3], word);
            client.write_all(b"in").unwrap();
            assert!(matches!(console.read(&mut buffer), Input::Bytes(2)));
            drop(client);
            assert!(matches!(console.read(&mut buffer), Input::Nothing));
        }
        assert!(HostConsole::open(&Target::Unix(path.clone()), "it").is_err());
        drop(console);
        assert!(!path.exists());
    }

    #[test]
    fn a_pseudoterminal_changes_nothing() {
        let (master, other, _) = pty().unwrap();
        let mut console = HostConsole::Pty { master, _other: other.try_clone().unwrap() };
        console.write(b"a\r\nb\x03").unwrap();
        let mut buffer = [0; 8];
        assert_eq!(read(&other, &mut buffer[..]).unwrap(), 5);
        rustix::io::write(&other, b"x\n").unwrap();
        assert!(matches!(console.read(&mut buffer), Input::Bytes(2)));
        assert!(matches!(console.read(&mut buffer), Input::Nothing));
    }
}
