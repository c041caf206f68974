//! Bytes between a command's pipes or terminal, and the host's connections.

use rustix::event::{PollFd, PollFlags, poll};
use rustix::fs::{OFlags, fcntl_getfl, fcntl_setfl};
use rustix::io::{Errno, ioctl_fionread, retry_on_intr};
use rustix::net::{Shutdown, shutdown};
use std::fs::File;
use std::io::{self, PipeReader, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::thread::{Builder, JoinHandle};

/// Bytes copied at once.
const ROOM: usize = 64 << 10;

/// Copies from the host to a command until one of them ends.
pub fn input(from: File, to: OwnedFd) -> io::Result<()> {
    let copy = move || {
        // An error is the end of one side; the other sees that its descriptor is closed.
        let _ = copy_all(from, File::from(to));
    };
    Builder::new().spawn(copy).map(drop)
}

/// Copies until one side ends. `io::copy` would use splice(2), which keeps the pipe locked while it
/// waits for the socket: a command could not close its standard input, and not exit.
fn copy_all(from: File, mut to: File) -> io::Result<()> {
    let mut room = vec![0; ROOM];
    loop {
        match retry_on_intr(|| rustix::io::read(&from, &mut room))? {
            0 => return Ok(()),
            count => to.write_all(&room[..count])?,
        }
    }
}

/// Copies from a command to the host until all of its processes have closed the stream, or `ended`
/// hangs up and what was written until then is copied.
pub fn output(from: OwnedFd, to: File, ended: PipeReader) -> io::Result<JoinHandle<()>> {
    let copy = move || {
        let mut to = to;
        // An error is the end of one side: the command gets SIGPIPE for its next write.
        let _ = copy_until_end(&from, &mut to, &ended);
        drop(from);
        let _ = shutdown(&to, Shutdown::Write);
    };
    Builder::new().spawn(copy)
}

fn copy_until_end(from: &OwnedFd, to: &mut File, ended: &PipeReader) -> io::Result<()> {
    let mut room = vec![0; ROOM];
    // Bytes to be copied after the end: processes that are left may write without end.
    let mut rest = None;
    while rest != Some(0) {
        if rest.is_none() {
            let mut descriptors =
                [from.as_fd(), ended.as_fd()].map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN));
            retry_on_intr(|| poll(&mut descriptors, None))?;
            if !descriptors[1].revents().is_empty() {
                // Of a terminal's, some may be counted later; it has fewer than this.
                rest = Some(ioctl_fionread(from)?.max(ROOM as u64));
                fcntl_setfl(from, fcntl_getfl(from)? | OFlags::NONBLOCK)?;
            }
        }
        match retry_on_intr(|| rustix::io::read(from, &mut room)) {
            // A terminal without programs reports an error.
            Ok(0) | Err(Errno::IO) => return Ok(()),
            Err(Errno::AGAIN) => return Ok(()),
            count => {
                let count = count?;
                to.write_all(&room[..count])?;
                rest = rest.map(|rest| rest.saturating_sub(count as u64));
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Read;
    use std::os::unix::net::UnixStream;

    /// An output stream: the command's end, the host's, and what ends it.
    fn stream() -> (File, UnixStream, io::PipeWriter, JoinHandle<()>) {
        let (from, command) = io::pipe().expect("a pipe");
        let (host, to) = UnixStream::pair().expect("sockets");
        let (ended, end) = io::pipe().expect("a pipe");
        let copying = output(from.into(), OwnedFd::from(to).into(), ended).expect("a thread");
        (OwnedFd::from(command).into(), host, end, copying)
    }

    #[test]
    fn output_before_the_end_arrives() {
        let (mut command, mut host, end, copying) = stream();
        command.write_all(b"some").expect("a reader");
        drop(end);
        let mut text = String::new();
        host.read_to_string(&mut text).expect("text");
        assert_eq!(text, "some", "although the command's end is open");
        copying.join().expect("no panic");
    }

    #[test]
    fn a_process_that_is_left_does_not_prolong_the_stream() {
        let (mut command, mut host, end, copying) = stream();
        let writing = std::thread::spawn(move || while command.write_all(&[0; ROOM]).is_ok() {});
        drop(end);
        let copied = io::copy(&mut host, &mut io::sink()).expect("bytes");
        assert!(copied < 1 << 30, "{copied}");
        copying.join().expect("no panic");
        writing.join().expect("no panic");
    }

    #[test]
    fn a_host_that_does_not_read_ends_the_stream() {
        let (mut command, host, _end, copying) = stream();
        drop(host);
        // The first write may be before the copy.
        while command.write_all(b"some").is_ok() {}
        copying.join().expect("no panic");
    }
}
