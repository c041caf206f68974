//! `--metrics`: statistics as lines of JSON, at the end of the VM and at each SIGUSR1.

use crate::config::is_stdout;
use crate::console::own_stream;
use crate::event_loop::drain;
use crate::line_sink::LineSink;
use crate::statistics::Statistics;
use hosted_command::failure::{Failure, IoContext};
use rustix::stdio::stdout;
use signal_hook::consts::SIGUSR1;
use signal_hook::low_level::pipe;
use std::fs::OpenOptions;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;

/// File of the statistics, and requests for them.
pub struct Metrics {
    sink: LineSink,
    /// Readable after SIGUSR1.
    request: UnixStream,
}

impl Metrics {
    /// Opens the file, `-` for standard output, and installs the signal handler.
    pub fn open(path: &Path) -> Result<Self, Failure> {
        let own = if is_stdout(path) { Some(stdout()) } else { own_stream(path) };
        let file = match own {
            Some(own) => own.try_clone_to_owned().os_error("duplicate a descriptor")?.into(),
            None => {
                let opened = OpenOptions::new().append(true).create(true).open(path);
                opened.file_error("write", path)?
            }
        };
        let registered = UnixStream::pair().and_then(|(ours, theirs)| {
            ours.set_nonblocking(true)?;
            pipe::register(SIGUSR1, theirs)?;
            Ok(ours)
        });
        let request = registered.os_error("install signal handlers")?;
        Ok(Self { sink: LineSink::start(file, "--metrics")?, request })
    }

    /// Returns the descriptor that is readable after a request.
    pub fn request(&self) -> BorrowedFd<'_> {
        self.request.as_fd()
    }

    /// Removes a request from its pipe.
    pub fn take_request(&self) {
        drain(self.request());
    }

    /// Appends a line, without waiting for its reader. Failing statistics do not end the VM.
    pub fn write(&self, statistics: &Statistics) {
        let mut line = serde_json::to_vec(statistics).unwrap_or_default();
        line.push(b'\n');
        self.sink.write(line);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Config;
    use crate::control::Control;
    use std::io::{BufRead, BufReader, Read, Seek, pipe};
    use std::os::fd::AsRawFd;
    use std::process::Command;
    use std::sync::mpsc::channel;
    use std::thread;
    use std::time::Duration;

    #[test]
    fn the_reader_delays_nothing() {
        const COUNT: usize = 2000;
        let (from, to) = pipe().unwrap();
        let path = format!("/proc/self/fd/{}", to.as_raw_fd());
        let metrics = Metrics::open(Path::new(&path)).unwrap();
        drop(to);
        let (control, _) = Control::new(Config::default(), 1 << 20, "process", None).unwrap();
        let statistics = control.statistics();
        let (done, written) = channel();
        thread::spawn(move || {
            (0..COUNT).for_each(|_| metrics.write(&statistics));
            done.send(metrics).ok()
        });
        let metrics = written.recv_timeout(Duration::from_secs(60)).expect("statistics wait");
        let reader = thread::spawn(|| BufReader::new(from).lines().collect::<Result<Vec<_>, _>>());
        drop(metrics);
        let lines = reader.join().unwrap().unwrap();
        assert!(lines.len() < COUNT, "{}", lines.len());
        assert!(lines.iter().all(|line| serde_json::from_str::<Statistics>(line).is_ok()));
    }

    /// A second position in the file would let lines overwrite other output.
    #[test]
    fn standard_output_is_shared() {
        const CHILD: &str = "PARADOR_TEST_METRICS";
        if std::env::var_os(CHILD).is_some() {
            let metrics = Metrics::open(Path::new("-")).unwrap();
            let (control, _) = Control::new(Config::default(), 1 << 20, "process", None).unwrap();
            metrics.write(&control.statistics());
            return;
        }
        let mut output = tempfile::tempfile().unwrap();
        let mut child = Command::new(std::env::current_exe().unwrap());
        child.args(["--exact", "metrics::tests::standard_output_is_shared", "--nocapture"]);
        let status = child.env(CHILD, "").stdout(output.try_clone().unwrap()).status().unwrap();
        let mut text = String::new();
        output.rewind().unwrap();
        output.read_to_string(&mut text).unwrap();
        let lines = text.lines().filter(|it| serde_json::from_str::<Statistics>(it).is_ok());
        assert!(status.success() && lines.count() == 1 && text.contains("test result"), "{text}");
    }
}
