//! Pseudoterminals: the engine gets one end over its socket, and the carrier has the peer as its
//! own terminal.

use hosted_command::failure::{Failure, IoContext};
use oci_spec::runtime::Box;
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
use rustix::process::ioctl_tiocsctty;
use rustix::pty::{OpenptFlags, grantpt, ioctl_tiocgptpeer, openpt, ptsname, unlockpt};
use rustix::stdio::{dup2_stderr, dup2_stdin, dup2_stdout};
use rustix::termios::{Winsize, tcsetwinsize};
use std::io::{self, IoSlice};
use std::mem::MaybeUninit;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::path::Path;

/// Makes a pseudoterminal the terminal of this process, which leads a session, and sends the other
/// end to the engine's socket. `size` is its first size; the engine may change it.
///
/// # Errors
/// There is no such socket, or no pseudoterminal.
pub fn give(socket: &Path, size: Option<&Box>) -> Result<(), Failure> {
    let engine = UnixStream::connect(socket).file_error("connect to", socket)?;
    adopt(&engine, size.map(window)).os_error("make a terminal")
}

/// Converts a size in characters; larger ones than a terminal has are the largest.
fn window(size: &Box) -> Winsize {
    let [ws_row, ws_col] =
        [size.height(), size.width()].map(|it| u16::try_from(it).unwrap_or(u16::MAX));
    Winsize { ws_row, ws_col, ws_xpixel: 0, ws_ypixel: 0 }
}

fn adopt(engine: &UnixStream, size: Option<Winsize>) -> io::Result<()> {
    let flags = OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC;
    let terminal = openpt(flags)?;
    grantpt(&terminal)?;
    unlockpt(&terminal)?;
    if let Some(size) = size {
        tcsetwinsize(&terminal, size)?;
    }
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_fit_a_terminal() {
        let size = |height: u64, width: u64| {
            let size = serde_json::json!({ "height": height, "width": width });
            let window = window(&serde_json::from_value(size).unwrap());
            (window.ws_row, window.ws_col)
        };
        assert_eq!(size(33, 99), (33, 99));
        assert_eq!(size(0, 1 << 40), (0, u16::MAX));
    }
}
