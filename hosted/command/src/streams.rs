//! Reads and writes of standard streams, which another program may have made non-blocking: all
//! processes that share a pipe, socket or terminal share this flag. They wait as for others.

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{FileType, Mode, OFlags, fstat, major, minor, open};
use rustix::io::{Errno, write};
use rustix::net::{SendFlags, send};
use rustix::pipe::PIPE_BUF;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

/// Device number of the multiplexer of pseudoterminals: opening it makes a new one.
const MULTIPLEXER: (u32, u32) = (5, 2);

/// Reads available bytes; 0 is the end.
///
/// # Errors
/// Those of read(2), but for interruptions and the lack of bytes.
pub fn read(from: impl AsFd, room: &mut [u8]) -> io::Result<usize> {
    repeat(&from, PollFlags::IN, || rustix::io::read(&from, &mut *room))
}

/// Writes all bytes.
///
/// # Errors
/// Those of write(2), but for interruptions and the lack of room.
pub fn write_all(to: impl AsFd, mut bytes: &[u8]) -> io::Result<()> {
    while !bytes.is_empty() {
        match repeat(&to, PollFlags::OUT, || rustix::io::write(&to, bytes))? {
            0 => return Err(io::ErrorKind::WriteZero.into()),
            count => bytes = &bytes[count..],
        }
    }
    Ok(())
}

/// Stream to which a write never waits, although others who share it may want that: what finds no
/// room is kept.
#[derive(Debug)]
pub struct Output {
    stream: OwnedFd,
    way: Way,
    unwritten: Vec<u8>,
}

/// Way to write without a wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Way {
    /// The descriptor has an open file of its own, which does not block.
    Own,
    /// Socket.
    Socket,
    /// The open file is that of others: this many bytes at a time, when poll(2) reports room.
    Shared(usize),
}

/// Opens a pipe or terminal again, for writes that do not block; `None`: it is neither, or that is
/// not permitted.
pub fn reopened(stream: BorrowedFd<'_>) -> Option<OwnedFd> {
    let found = fstat(stream).ok()?;
    let is_suitable = match FileType::from_raw_mode(found.st_mode) {
        FileType::Fifo => true,
        FileType::CharacterDevice => (major(found.st_rdev), minor(found.st_rdev)) != MULTIPLEXER,
        _ => false,
    };
    let flags = OFlags::WRONLY | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC;
    let path = || format!("/proc/self/fd/{}", stream.as_raw_fd());
    is_suitable.then(|| open(path(), flags, Mode::empty()).ok()).flatten()
}

impl Way {
    /// Returns the way for a stream that is not opened again.
    fn of(stream: BorrowedFd<'_>) -> io::Result<Self> {
        Ok(match FileType::from_raw_mode(fstat(stream)?.st_mode) {
            FileType::Socket => Self::Socket,
            // A terminal with room may have little of it.
            FileType::CharacterDevice => Self::Shared(1),
            _ => Self::Shared(PIPE_BUF),
        })
    }
}

impl Output {
    /// Duplicates a stream. A pipe or terminal is opened again, if that is permitted.
    ///
    /// # Errors
    /// The stream is closed, or there are too many descriptors.
    pub fn new(stream: BorrowedFd<'_>) -> io::Result<Self> {
        let (stream, way) = match reopened(stream) {
            Some(own) => (own, Way::Own),
            None => (stream.try_clone_to_owned()?, Way::of(stream)?),
        };
        Ok(Self { stream, way, unwritten: Vec::new() })
    }

    /// Writes as many bytes as there is room for, after those that were kept, and keeps the rest.
    ///
    /// # Errors
    /// Those of write(2), but for interruptions and the lack of room.
    pub fn write(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.unwritten.extend_from_slice(bytes);
        self.flush()
    }

    /// Writes as many of the bytes that were kept as there is room for.
    ///
    /// # Errors
    /// Those of write(2), but for interruptions and the lack of room.
    pub fn flush(&mut self) -> io::Result<()> {
        let mut done = 0;
        let result = loop {
            match self.write_some(&self.unwritten[done..]) {
                _ if done == self.unwritten.len() => break Ok(()),
                Ok(0) => break Err(io::ErrorKind::WriteZero.into()),
                Ok(count) => done += count,
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => break Ok(()),
                Err(error) => break Err(error.into()),
            }
        };
        self.unwritten.drain(..done);
        result
    }

    fn write_some(&self, bytes: &[u8]) -> rustix::io::Result<usize> {
        match self.way {
            _ if bytes.is_empty() => Ok(0),
            Way::Own => write(&self.stream, bytes),
            Way::Socket => send(&self.stream, bytes, SendFlags::DONTWAIT | SendFlags::NOSIGNAL),
            Way::Shared(most) => {
                let mut room = [PollFd::new(&self.stream, PollFlags::OUT)];
                match poll(&mut room, Some(&Timespec::default()))? {
                    0 => Err(Errno::AGAIN),
                    _ => write(&self.stream, &bytes[..bytes.len().min(most)]),
                }
            }
        }
    }

    /// Returns the descriptor to poll for room while bytes are kept.
    pub fn waits(&self) -> Option<BorrowedFd<'_>> {
        (!self.unwritten.is_empty()).then(|| self.stream.as_fd())
    }
}

/// Writes all bytes, or as many as there is room for within a time limit.
///
/// # Errors
/// Those of [`Output`]; without room in time [`io::ErrorKind::TimedOut`].
pub fn write_within(to: BorrowedFd<'_>, bytes: &[u8], limit: Duration) -> io::Result<()> {
    let end = Instant::now() + limit;
    let mut output = Output::new(to)?;
    output.write(bytes)?;
    while let Some(stream) = output.waits() {
        let left = end.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(io::ErrorKind::TimedOut.into());
        }
        // The limit is short.
        let left = Timespec::try_from(left).unwrap_or_default();
        // An interrupted wait is repeated.
        let _ = poll(&mut [PollFd::new(&stream, PollFlags::OUT)], Some(&left));
        output.flush()?;
    }
    Ok(())
}

/// Repeats a call until it is done; waits in between where it would block.
fn repeat(
    stream: &impl AsFd,
    event: PollFlags,
    mut call: impl FnMut() -> rustix::io::Result<usize>,
) -> io::Result<usize> {
    loop {
        match call() {
            Err(Errno::AGAIN) => {
                // An interrupted wait is repeated, too.
                let _ = poll(&mut [PollFd::new(stream, event)], None);
            }
            Err(Errno::INTR) => {}
            done => return Ok(done?),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::io::ioctl_fionbio;
    use std::fs::File;
    use std::io::{Read, Write, pipe};
    use std::os::unix::net::UnixStream;
    use std::thread::{sleep, spawn};
    use std::time::Duration;

    /// Writes to a stream without a reader, then reads all of it.
    fn nothing_is_lost(mut output: Output, mut from: impl Read) {
        let all: Vec<u8> = (0..1_000_000_u32).map(|index| index as u8).collect();
        for part in all.chunks(100_000) {
            output.write(part).unwrap();
        }
        assert!(output.waits().is_some(), "it must not wait");
        let mut read = Vec::new();
        let mut room = vec![0; 100_000];
        while read.len() < all.len() {
            let count = from.read(&mut room).unwrap();
            read.extend_from_slice(&room[..count]);
            output.flush().unwrap();
        }
        assert!(output.waits().is_none() && read == all);
        drop(from);
        assert_eq!(output.write(b"x").unwrap_err().kind(), io::ErrorKind::BrokenPipe);
    }

    #[test]
    fn output_does_not_wait_for_readers() {
        let (from, to) = pipe().unwrap();
        let output = Output::new(to.as_fd()).unwrap();
        assert_eq!(output.way, Way::Own);
        drop(to);
        nothing_is_lost(output, from);
        let (from, to) = pipe().unwrap();
        let way = Way::of(to.as_fd()).unwrap();
        assert_eq!(way, Way::Shared(PIPE_BUF));
        nothing_is_lost(Output { stream: to.into(), way, unwritten: Vec::new() }, from);
        let (from, to) = UnixStream::pair().unwrap();
        let output = Output::new(to.as_fd()).unwrap();
        assert_eq!(output.way, Way::Socket);
        drop(to);
        nothing_is_lost(output, from);
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(b"begun ").unwrap();
        let mut output = Output::new(file.as_fd()).unwrap();
        output.write(&[b'x'; 100_000]).unwrap();
        assert!(output.waits().is_none());
        assert_eq!(file.metadata().unwrap().len(), 100_006, "after what others wrote");
    }

    /// A terminal that cannot be opened again, and whose other end is not read.
    #[test]
    fn a_shared_terminal_is_not_waited_for() {
        let master = nix::pty::openpty(None, None).unwrap();
        let (from, to) = (File::from(master.master), master.slave);
        let way = Way::of(to.as_fd()).unwrap();
        assert_eq!(way, Way::Shared(1));
        let mut output = Output { stream: to, way, unwritten: Vec::new() };
        output.write(&[b'x'; 100_000]).unwrap();
        assert!(output.waits().is_some());
        drop(from);
    }

    #[test]
    fn a_time_limit_for_messages() {
        let (mut from, to) = pipe().unwrap();
        write_within(to.as_fd(), b"text", Duration::from_secs(60)).unwrap();
        let limit = Duration::from_millis(50);
        let error = write_within(to.as_fd(), &[0; 1_000_000], limit).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::TimedOut);
        let mut read = [0; 4];
        from.read_exact(&mut read).unwrap();
        assert_eq!(&read, b"text");
    }

    #[test]
    fn streams_that_do_not_block_are_waited_for() {
        const LENGTH: usize = 300_000;
        let (from, to) = pipe().unwrap();
        ioctl_fionbio(&to, true).unwrap();
        ioctl_fionbio(&from, true).unwrap();
        let reader = spawn(move || {
            let mut all = 0;
            let mut room = vec![0; 5000];
            loop {
                match read(&from, &mut room).unwrap() {
                    0 => return all,
                    count => all += count,
                }
                sleep(Duration::from_micros(100));
            }
        });
        sleep(Duration::from_millis(20));
        write_all(&to, &vec![1; LENGTH]).unwrap();
        drop(to);
        assert_eq!(reader.join().unwrap(), LENGTH);
        let (mut from, mut to) = pipe().unwrap();
        to.write_all(b"x").unwrap();
        drop(to);
        from.read_exact(&mut [0]).unwrap();
        assert_eq!(read(&from, &mut [0]).unwrap(), 0);
        assert_eq!(read(from, &mut []).unwrap(), 0);
    }
}
