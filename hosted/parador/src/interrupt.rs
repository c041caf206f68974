//! Removes unfinished files when a signal ends the program while it builds.

use crate::failure::Failure;
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::iterator::{Handle, Signals};
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{self, JoinHandle};

/// Signals that end the program.
pub const ENDING: [i32; 3] = [SIGINT, SIGTERM, SIGHUP];

/// While this lives, a signal removes the registered folders and ends the program with 128 + signal.
pub struct Interruptible {
    folders: Arc<Mutex<Vec<PathBuf>>>,
    handle: Handle,
    thread: Option<JoinHandle<()>>,
}

impl Interruptible {
    /// Starts to listen.
    pub fn new() -> Result<Self, Failure> {
        let mut signals =
            Signals::new(ENDING).map_err(|error| Failure::os("listen to signals", &error))?;
        let folders = Arc::new(Mutex::new(Vec::<PathBuf>::new()));
        let handle = signals.handle();
        let doomed = Arc::clone(&folders);
        let thread = thread::spawn(move || {
            let first = signals.forever().next();
            // Another program that the terminal's signal ended may have made this one fail before the signal
            // was seen here; it is the signal that counts.
            if let Some(signal) = first.or_else(|| signals.pending().next()) {
                for folder in doomed.lock().unwrap_or_else(PoisonError::into_inner).iter() {
                    // What cannot be removed stays; the program ends either way.
                    let _ = fs::remove_dir_all(folder);
                }
                std::process::exit(128 + signal);
            }
        });
        Ok(Self { folders, handle, thread: Some(thread) })
    }

    /// Registers a folder of unfinished files.
    pub fn remove_on_signal(&self, folder: &Path) {
        let mut folders = self.folders.lock().unwrap_or_else(PoisonError::into_inner);
        folders.push(folder.to_owned());
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
