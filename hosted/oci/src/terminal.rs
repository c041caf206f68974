//! Pseudoterminals: the engine gets one end over its socket, and the carrier has the peer as its
//! own terminal.

use hosted_command::failure::{Failure, IoContext};
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
use rustix::process::ioctl_tiocsctty;
use rustix::pty::{OpenptFlags, grantpt, ioctl_tiocgptpeer, openpt, ptsname, unlockpt};
use rustix::stdio::{dup2_stderr, dup2_stdin, dup2_stdout};
use std::io::{self, IoSlice};
use std::mem::MaybeUninit;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::path::Path;

/// Makes a pseudoterminal the terminal of this process, which leads a session, and sends the other
/// end to the engine's socket.
///
/// # Errors
/// There is no such socket, or no pseudoterminal.
pub fn give(socket: &Path) -> Result<(), Failure> {
    let engine = UnixStream::connect(socket).file_error("connect to", socket)?;
    adopt(&engine).os_error("make a terminal")
}

fn adopt(engine: &UnixStream) -> io::Result<()> {
    let flags = OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC;
    let terminal = openpt(flags)?;
    grantpt(&terminal)?;
    unlockpt(&terminal)?;
    let own = ioctl_tiocgptpeer(&terminal, flags)?;
    let name = ptsname(&terminal, Vec::new())?;
    let descriptors = [terminal.as_fd()];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut message = SendAncillaryBuffer::new(&mut space);
    if !message.push(SendAncillaryMessage::ScmRights(&descriptors)) {
        return Err(io::Error::other("no space for a descriptor"));
    }
    sendmsg(engine, &[IoSlice::new(name.as_bytes())], &mut message, SendFlags::NOSIGNAL)?;
    ioctl_tiocsctty(&own)?;
    dup2_stdin(&own)?;
    dup2_stdout(&own)?;
    dup2_stderr(&own)?;
    Ok(())
}
