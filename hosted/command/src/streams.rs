//! Reads and writes of standard streams, which another program may have made non-blocking: all
//! processes that share a pipe, socket or terminal share this flag. They wait as for others.

use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use std::io;
use std::os::fd::AsFd;

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
    use std::io::{Read, Write, pipe};
    use std::thread::{sleep, spawn};
    use std::time::Duration;

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
