//! Removes unfinished files when a signal ends the program while it builds.

use crate::failure::Failure;
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

/// Signals that end the program.
pub const ENDING: [i32; 3] = [SIGINT, SIGTERM, SIGHUP];

/// Times that the removal of a folder is tried, and the pause between them: what a process that was killed had started ends
/// soon after it, and may write until then.
const REMOVALS: u32 = 50;
const PAUSE: Duration = Duration::from_millis(20);

/// What has to go at a signal.
#[derive(Default)]
struct Doomed {
    folders: Vec<PathBuf>,
    /// Descriptors stand for processes, because numbers are used again.
    processes: Vec<OwnedFd>,
}

/// While this lives, a signal kills the registered processes, removes the registered folders and ends the program with
/// 128 + signal.
pub struct Interruptible {
    doomed: Arc<Mutex<Doomed>>,
    handle: Handle,
    thread: Option<JoinHandle<()>>,
}

impl Interruptible {
    /// Starts to listen.
    pub fn new() -> Result<Self, Failure> {
        let mut signals =
            Signals::new(ENDING).map_err(|error| Failure::os("listen to signals", &error))?;
        let doomed = Arc::<Mutex<Doomed>>::default();
        let handle = signals.handle();
        let shared = Arc::clone(&doomed);
        // An error where a host allows no more.
        let thread = thread::Builder::new().spawn(move || {
            let first = signals.forever().next();
            // Another program that the terminal's signal ended may have made this one fail before the signal
            // was seen here; it is the signal that counts.
            if let Some(signal) = first.or_else(|| signals.pending().next()) {
                shared.lock().unwrap_or_else(PoisonError::into_inner).remove();
                std::process::exit(128 + signal);
            }
        });
        let thread = thread.map_err(|error| Failure::os("start a thread", &error))?;
        Ok(Self { doomed, handle, thread: Some(thread) })
    }

    fn doomed(&self) -> MutexGuard<'_, Doomed> {
        self.doomed.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Registers a folder of unfinished files.
    pub fn remove_on_signal(&self, folder: &Path) {
        self.doomed().folders.push(folder.to_owned());
    }

    /// Registers a process that writes to such a folder.
    pub fn kill_on_signal(&self, child: &Child) -> Result<(), Failure> {
        let process = pidfd_open(Pid::from_child(child), PidfdFlags::empty())
            .map_err(|error| Failure::os("watch a process", &error.into()))?;
        self.doomed().processes.push(process);
        Ok(())
    }
}

impl Doomed {
    /// What cannot be ended or removed stays; the program ends either way.
    fn remove(&self) {
        for process in &self.processes {
            // One that has ended already is no matter.
            if pidfd_send_signal(process, Signal::KILL).is_ok() {
                let _ = poll(&mut [PollFd::new(process, PollFlags::IN)], None);
            }
        }
        for folder in &self.folders {
            let gone = || fs::remove_dir_all(folder).is_ok() || !folder.exists();
            let _ = (0..REMOVALS).any(|_| {
                gone() || {
                    thread::sleep(PAUSE);
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
            // It only fails if the thread panicked, which has been reported then.
            let _ = thread.join();
        }
    }
}
