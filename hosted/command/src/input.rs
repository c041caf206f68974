//! Files that the user names, read with a limit: a device or a pipe may have no end.

use crate::failure::{self, Failure, IoContext};
use rustix::fs::{FsWord, OFlags, fstatfs};
use std::fs::{File, OpenOptions};
use std::io::{self, Read};
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileTypeExt, OpenOptionsExt};
use std::path::Path;

/// Most bytes of a description or configuration.
const MAX_TEXT: u64 = 16 << 20;
/// File system of pipes without a name (`PIPEFS_MAGIC` in Linux' `uapi/linux/magic.h`).
const PIPES: FsWord = 0x5049_5045;

/// Opens a file to read it, but no named pipe, for whose writer this would wait. Pipes that the
/// caller has open, such as `<(COMMAND)` of a shell and `/dev/stdin`, are read.
///
/// # Errors
/// It is a named pipe: 65. It cannot be read.
pub fn open(path: &Path) -> Result<File, Failure> {
    open_unless_named_pipe(path).file_error("read", path)?.ok_or_else(|| {
        let text = format!("{} is neither a file nor a block device", path.display());
        Failure::new(failure::BAD_CONFIG, text)
    })
}

/// Opens a file as [`open`]; the error does not name it, for callers with messages of their own.
///
/// # Errors
/// It is a named pipe: [`io::ErrorKind::InvalidInput`]; those of open(2).
pub fn try_open(path: &Path) -> io::Result<File> {
    let is_pipe = || io::Error::new(io::ErrorKind::InvalidInput, "it is a named pipe");
    open_unless_named_pipe(path)?.ok_or_else(is_pipe)
}

/// Opens a file; `None`: it is a named pipe.
fn open_unless_named_pipe(path: &Path) -> io::Result<Option<File>> {
    let found = find(path)?;
    if found.metadata()?.file_type().is_fifo() && fstatfs(&found)?.f_type != PIPES {
        return Ok(None);
    }
    open_again(&found, File::options().read(true)).map(Some)
}

/// Opens a file only to examine it, which never waits (open(2), `O_PATH`).
///
/// # Errors
/// It does not exist, or its folder cannot be searched.
pub fn find(path: &Path) -> io::Result<File> {
    let flags = OFlags::PATH.bits().cast_signed();
    File::options().read(true).custom_flags(flags).open(path)
}

/// Opens an open file again, whatever its path leads to meanwhile.
///
/// # Errors
/// Those of open(2).
pub fn open_again(file: &File, options: &OpenOptions) -> io::Result<File> {
    options.open(format!("/proc/self/fd/{}", file.as_raw_fd()))
}

/// Reads a file of at most `limit` bytes.
///
/// # Errors
/// It has more, or is a named pipe: 65. It cannot be read.
pub fn bytes(path: &Path, limit: u64) -> Result<Vec<u8>, Failure> {
    all(open(path)?, path, limit)
}

/// Reads a regular file of at most 16 MiB, as programs write descriptions for others.
///
/// # Errors
/// It is another file, such as a pipe, for whose writer this would wait, or has more: 65. It cannot
/// be read.
pub fn regular(path: &Path) -> Result<Vec<u8>, Failure> {
    let mut options = File::options();
    options.read(true).custom_flags(OFlags::NONBLOCK.bits().cast_signed());
    let opened = options.open(path).file_error("read", path)?;
    if !opened.metadata().file_error("read", path)?.is_file() {
        let text = format!("{} is not a regular file", path.display());
        return Err(Failure::new(failure::BAD_CONFIG, text));
    }
    all(opened, path, MAX_TEXT)
}

/// Reads the standard input, at most 16 MiB.
///
/// # Errors
/// It has more: 65. It cannot be read.
pub fn standard() -> Result<Vec<u8>, Failure> {
    all(std::io::stdin().lock(), Path::new("/dev/stdin"), MAX_TEXT)
}

/// Reads what `from` has, which was opened at `path`.
fn all(from: impl Read, path: &Path, limit: u64) -> Result<Vec<u8>, Failure> {
    let mut read = Vec::new();
    from.take(limit.saturating_add(1)).read_to_end(&mut read).file_error("read", path)?;
    if read.len() as u64 > limit {
        let text = format!("{} has more than {limit} bytes", path.display());
        return Err(Failure::new(failure::BAD_CONFIG, text));
    }
    Ok(read)
}

/// Reads a description or configuration.
///
/// # Errors
/// It is no UTF-8 text, has more than 16 MiB, or is a named pipe: 65. It cannot be read.
pub fn text(path: &Path) -> Result<String, Failure> {
    String::from_utf8(bytes(path, MAX_TEXT)?).map_err(|_| {
        Failure::new(failure::BAD_CONFIG, format!("{} is not UTF-8 text", path.display()))
    })
}

/// Named pipes for tests.
#[cfg(any(test, feature = "testing"))]
pub mod testing {
    use rustix::fs::{CWD, FileType, Mode, mknodat};
    use std::path::Path;
    use std::sync::mpsc;
    use std::thread;
    use std::time::Duration;

    /// Calls `read` with the path of a named pipe that has no writer, and returns its result.
    ///
    /// # Panics
    /// It waits for the pipe, or panics.
    pub fn with_named_pipe<T: Send + 'static>(read: impl FnOnce(&Path) -> T + Send + 'static) -> T {
        let folder = tempfile::tempdir().unwrap();
        let pipe = folder.path().join("pipe");
        mknodat(CWD, &pipe, FileType::Fifo, Mode::RUSR, 0).unwrap();
        let (sender, receiver) = mpsc::channel();
        thread::spawn(move || sender.send(read(&pipe)));
        receiver.recv_timeout(Duration::from_secs(20)).expect("an end")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::fs::{CWD, FileType, Mode, mknodat};
    use std::fs;
    use std::io::Write;

    #[test]
    fn only_regular_files_are_read() {
        let folder = tempfile::tempdir().unwrap();
        let pipe = folder.path().join("pipe");
        mknodat(CWD, &pipe, FileType::Fifo, Mode::RUSR, 0).unwrap();
        for path in [&pipe, Path::new("/dev/zero"), folder.path()] {
            let failure = regular(path).unwrap_err();
            assert!(failure.to_string().contains("is not a regular file"), "{failure}");
        }
        let file = folder.path().join("file");
        fs::write(&file, "text").unwrap();
        assert_eq!(regular(&file).unwrap(), b"text");
    }

    #[test]
    fn named_pipes_are_not_waited_for() {
        let opened = testing::with_named_pipe(|path| {
            (bytes(path, 9).and_then(|_| open(path)), try_open(path))
        });
        assert_eq!(opened.1.unwrap_err().to_string(), "it is a named pipe");
        let failure = opened.0.unwrap_err();
        assert_eq!(failure.code(), failure::BAD_CONFIG);
        assert!(failure.to_string().contains("neither a file nor a block device"), "{failure}");
        let (reader, mut writer) = io::pipe().unwrap();
        writer.write_all(b"text").unwrap();
        drop(writer);
        let path = format!("/dev/fd/{}", reader.as_raw_fd());
        assert_eq!(text(Path::new(&path)).unwrap(), "text", "a pipe of the caller");
    }

    #[test]
    fn files_without_end_are_refused() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("file");
        fs::write(&path, "text").unwrap();
        assert_eq!(text(&path).unwrap(), "text");
        assert_eq!(bytes(&path, 4).unwrap(), b"text");
        let refused = |result: Result<Vec<u8>, Failure>, expected: &str| {
            let failure = result.unwrap_err();
            assert_eq!(failure.code(), failure::BAD_CONFIG);
            assert!(failure.to_string().contains(expected), "{failure}");
        };
        refused(bytes(&path, 3), "has more than 3 bytes");
        refused(text(Path::new("/dev/zero")).map(Into::into), "/dev/zero has more than 16777216");
        fs::write(&path, b"\xff").unwrap();
        refused(text(&path).map(Into::into), "is not UTF-8 text");
        File::create(&path).unwrap().set_len(MAX_TEXT + 1).unwrap();
        refused(regular(&path), "has more than 16777216 bytes");
        fs::remove_file(&path).unwrap();
        assert_eq!(regular(&path).unwrap_err().code(), failure::MISSING_FILE);
        assert_eq!(bytes(&path, 1).unwrap_err().code(), failure::MISSING_FILE);
    }
}
