//! Removes unfinished files when a signal ends `parador` during a build.

use crate::failure::{Failure, IoContext};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::iterator::{Handle, Signals};
use std::fs;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::process::Child;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::Duration;

/// Termination signals.
pub const ENDING: [i32; 3] = [SIGINT, SIGTERM, SIGHUP];

/// Attempts to remove a folder, and the interval between them: children of a killed process exit
/// shortly after it and may write until then.
const REMOVALS: u32 = 50;
const POLL_INTERVAL: Duration = Duration::from_millis(20);

/// Returns those of `signals` that this process does not ignore: nohup(1) and shells start programs
/// that ignore the signals which shall not end them, and handlers would undo that.
pub fn heeded(signals: &[i32]) -> Vec<i32> {
    // Without procfs all are heeded.
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let ignored = ignored(&status);
    signals.iter().copied().filter(|signal| ignored >> (signal - 1) & 1 == 0).collect()
}

/// Returns the mask of ignored signals of a process (proc(5), `status`); signal 1 is bit 0.
fn ignored(status: &str) -> u64 {
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    mask.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok()).unwrap_or_default()
}

/// Cleanup at a signal.
#[derive(Default)]
struct Doomed {
    /// The cleanup has begun, and the process ends.
    has_begun: bool,
    folders: Vec<PathBuf>,
    /// Descriptors instead of process IDs, which are reused.
    processes: Vec<OwnedFd>,
}

/// While this lives, a termination signal kills the registered processes, removes the registered
/// folders and ends `parador` with 128 + signal.
pub struct Interruptible {
    doomed: Arc<Mutex<Doomed>>,
    handle: Handle,
    thread: Option<JoinHandle<()>>,
}

impl Interruptible {
    /// Installs the handlers.
    pub fn new() -> Result<Self, Failure> {
        let mut signals = Signals::new(heeded(&ENDING)).os_error("install signal handlers")?;
        let doomed = Arc::<Mutex<Doomed>>::default();
        let handle = signals.handle();
        let shared = Arc::clone(&doomed);
        // An error where a host allows no more.
        let thread = thread::Builder::new().spawn(move || {
            let first = signals.forever().next();
            // Another program that the terminal's signal killed may have caused a failure here
            // before this signal arrived; the signal takes precedence.
            if let Some(signal) = first.or_else(|| signals.pending().next()) {
                shared.lock().unwrap_or_else(PoisonError::into_inner).remove();
                std::process::exit(128 + signal);
            }
        });
        let thread = thread.os_error("create a thread")?;
        Ok(Self { doomed, handle, thread: Some(thread) })
    }

    fn doomed(&self) -> MutexGuard<'_, Doomed> {
        self.doomed.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Registers a folder of unfinished files, or a file.
    pub fn remove_on_signal(&self, folder: &Path) {
        self.doomed().folders.push(folder.to_owned());
    }

    /// Runs `act` while no cleanup runs: a signal during it takes effect afterwards. If a cleanup
    /// has begun before, waits for the end of the process. `act` must not register anything.
    pub fn uninterrupted<T>(&self, act: impl FnOnce() -> T) -> T {
        let doomed = self.doomed();
        if doomed.has_begun {
            loop {
                thread::park();
            }
        }
        act()
    }

    /// Registers a process that writes to such a folder.
    pub fn kill_on_signal(&self, child: &Child) -> Result<(), Failure> {
        let process = pidfd_open(Pid::from_child(child), PidfdFlags::empty())
            .os_error("open a process descriptor")?;
        self.doomed().processes.push(process);
        Ok(())
    }
}

impl Doomed {
    /// Errors are ignored: the program ends in any case.
    fn remove(&mut self) {
        self.has_begun = true;
        for process in &self.processes {
            // Fails if the process has exited.
            if pidfd_send_signal(process, Signal::KILL).is_ok() {
                let _ = poll(&mut [PollFd::new(process, PollFlags::IN)], None);
            }
        }
        for folder in &self.folders {
            let removed =
                || fs::remove_dir_all(folder).or_else(|_| fs::remove_file(folder)).is_ok();
            let gone = || removed() || !folder.exists();
            let _ = (0..REMOVALS).any(|_| {
                gone() || {
                    thread::sleep(POLL_INTERVAL);
                    false
                }
            });
        }
    }
}

impl Drop for Interruptible {
    fn drop(&mut self) {
        self.handle.close();
        if let Some(thread) = self.thread.take() {
            // Joining fails only after a panic of the thread, which has been reported.
            let _ = thread.join();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cleanup_waits_for_the_last_step() {
        let folder = tempfile::tempdir().unwrap();
        let work = folder.path().join("work");
        fs::create_dir(&work).unwrap();
        let interruptible = Interruptible::new().unwrap();
        interruptible.remove_on_signal(&work);
        thread::scope(|scope| {
            let cleanup = interruptible.uninterrupted(|| {
                let cleanup = scope.spawn(|| interruptible.doomed().remove());
                thread::sleep(5 * POLL_INTERVAL);
                assert!(work.is_dir() && !cleanup.is_finished());
                fs::rename(&work, folder.path().join("result")).unwrap();
                cleanup
            });
            cleanup.join().unwrap();
        });
        assert!(folder.path().join("result").is_dir());
        assert!(interruptible.doomed().has_begun);
    }

    #[test]
    fn ignored_signals_are_found() {
        // SIGHUP and SIGQUIT; this process ignores SIGPIPE, as all of Rust's.
        assert_eq!(ignored("Name:\tx\nSigIgn:\t0000000000000005\n"), 5);
        assert_eq!(ignored("SigIgn:\tx"), 0);
        assert_eq!(heeded(&[SIGTERM, rustix::process::Signal::PIPE.as_raw()]), [SIGTERM]);
    }
}
