//! `--metrics`: statistics as lines of JSON, at the end of the VM and at each SIGUSR1.

use crate::config::is_stdout;
use crate::event_loop::drain;
use crate::statistics::Statistics;
use hosted_command::failure::{Failure, IoContext};
use signal_hook::consts::SIGUSR1;
use signal_hook::low_level::pipe;
use std::fs::{File, OpenOptions};
use std::io::Write;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;

/// File of the statistics, and requests for them.
pub struct Metrics {
    file: File,
    /// Readable after SIGUSR1.
    request: UnixStream,
}

impl Metrics {
    /// Opens the file, `-` for standard output, and installs the signal handler.
    pub fn open(path: &Path) -> Result<Self, Failure> {
        let path = if is_stdout(path) { Path::new("/proc/self/fd/1") } else { path };
        let opened = OpenOptions::new().append(true).create(true).open(path);
        let file = opened.file_error("write", path)?;
        let registered = UnixStream::pair().and_then(|(ours, theirs)| {
            ours.set_nonblocking(true)?;
            pipe::register(SIGUSR1, theirs)?;
            Ok(ours)
        });
        let request = registered.os_error("install signal handlers")?;
        Ok(Self { file, request })
    }

    /// Returns the descriptor that is readable after a request.
    pub fn request(&self) -> BorrowedFd<'_> {
        self.request.as_fd()
    }

    /// Removes a request from its pipe.
    pub fn take_request(&self) {
        drain(self.request());
    }

    /// Appends a line. Failing statistics do not end the VM.
    pub fn write(&self, statistics: &Statistics) {
        let line = serde_json::to_string(statistics).unwrap_or_default();
        let _ = writeln!(&self.file, "{line}");
    }
}
