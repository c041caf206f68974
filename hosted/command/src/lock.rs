//! Locks that are files: one process at a time has a right, and others see which.

use crate::cache;
use crate::failure::Failure;
use crate::messages::{Level, say};
use crate::steps::{Step, Steps};
use std::fs::{self, File, OpenOptions, TryLockError};
use std::io;
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::thread;
use std::time::Duration;

/// Polling interval of another builder's lock.
pub const POLL_INTERVAL: Duration = Duration::from_millis(200);

/// Longest displayed status in bytes.
const LONGEST_STATUS: usize = 200;

/// Exclusive right, held by a flock(2) lock on a file. It ends with its process in any case;
/// dropping it removes the file.
#[derive(Debug)]
pub struct Lock {
    file: File,
    path: PathBuf,
}

impl Lock {
    /// Takes the lock if it is free.
    ///
    /// # Errors
    /// The file cannot be created or locked.
    pub fn take(path: &Path) -> io::Result<Option<Self>> {
        loop {
            let mut options = OpenOptions::new();
            options.read(true).write(true).create(true).truncate(false).mode(0o600);
            let file = options.open(path)?;
            match file.try_lock() {
                Err(TryLockError::WouldBlock) => return Ok(None),
                Err(TryLockError::Error(error)) => return Err(error),
                Ok(()) => {}
            }
            // The last holder may have removed the file after it was opened here.
            if is_at(&file, path)? {
                let lock = Self { file, path: path.to_owned() };
                lock.note("starting");
                return Ok(Some(lock));
            }
        }
    }

    /// Takes the lock of a build in a cache; waits for another builder, and says so. `what` is
    /// the result in messages.
    ///
    /// # Errors
    /// The file cannot be created or locked.
    pub fn wait(path: &Path, what: &str, steps: &Steps) -> Result<Self, Failure> {
        if let Some(lock) = Self::take_in_cache(path)? {
            return Ok(lock);
        }
        let status = Self::status(path);
        say(Level::Info, &format!("waiting for another build of {what} ({status})"));
        steps.run("waiting", |step| {
            Ok((Self::wait_within(path, step)?, "the other build has finished".to_owned()))
        })
    }

    /// Takes a lock in a cache; shows its holder's status as the progress of `step` until it is
    /// free.
    ///
    /// # Errors
    /// The file cannot be created or locked.
    pub fn wait_within(path: &Path, step: &Step) -> Result<Self, Failure> {
        loop {
            if let Some(lock) = Self::take_in_cache(path)? {
                return Ok(lock);
            }
            step.now(Self::status(path));
            thread::sleep(POLL_INTERVAL);
        }
    }

    fn take_in_cache(path: &Path) -> Result<Option<Self>, Failure> {
        Self::take(path).map_err(|error| cache::failed(path, &error))
    }

    /// Reports progress to those who wait, for display only.
    pub fn note(&self, text: &str) {
        let text = format!("process {}: {text}\n", crate::proc_number::own());
        let _ = self.file.set_len(0).and_then(|()| self.file.write_all_at(text.as_bytes(), 0));
    }

    /// Returns the path of the file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Returns the progress of the holder of the lock with this file.
    pub fn status(path: &Path) -> String {
        let text = fs::read(path).unwrap_or_default();
        let text = String::from_utf8_lossy(&text);
        let line = text.lines().next().unwrap_or("starting");
        line.chars().filter(|c| !c.is_control()).take(LONGEST_STATUS).collect()
    }
}

impl Drop for Lock {
    fn drop(&mut self) {
        // The file is still locked, so no other process has taken it.
        let _ = fs::remove_file(&self.path);
    }
}

/// Returns whether an opened file or folder is still at its path.
///
/// # Errors
/// The opened one cannot be examined.
pub fn is_at(file: &File, path: &Path) -> io::Result<bool> {
    let identity = |metadata: fs::Metadata| (metadata.dev(), metadata.ino());
    let opened = identity(file.metadata()?);
    Ok(fs::metadata(path).is_ok_and(|found| identity(found) == opened))
}
