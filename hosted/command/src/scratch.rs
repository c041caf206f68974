//! Folders of unfinished work, which the next process removes if theirs was killed.

use rustix::fs::OFlags;
use std::fs::{self, File};
use std::io;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::time::Duration;
use tempfile::TempDir;

/// Least age of an abandoned folder: a younger one may be about to be locked.
pub const YOUNG: Duration = Duration::from_secs(60);

/// Folder that is removed when it is dropped. Its process holds a flock(2) lock on it, which ends
/// with the process in any case.
#[derive(Debug)]
pub struct ScratchFolder {
    folder: TempDir,
    _lock: File,
}

impl ScratchFolder {
    /// Creates a folder in `parent`, whose name begins with `prefix`.
    ///
    /// # Errors
    /// It cannot be created or locked.
    pub fn new_in(parent: &Path, prefix: &str) -> io::Result<Self> {
        let folder = TempDir::with_prefix_in(prefix, parent)?;
        let lock = File::open(folder.path())?;
        lock.lock()?;
        Ok(Self { folder, _lock: lock })
    }

    /// Returns the path.
    pub fn path(&self) -> &Path {
        self.folder.path()
    }

    /// Removes the folder.
    ///
    /// # Errors
    /// Something in it cannot be removed.
    pub fn close(self) -> io::Result<()> {
        self.folder.close()
    }
}

/// Removes the folders of killed processes in `parent` whose names begin with `prefix`. Those that
/// cannot be removed stay.
pub fn remove_abandoned(parent: &Path, prefix: &str) {
    for entry in fs::read_dir(parent).into_iter().flatten().flatten() {
        let path = entry.path();
        let is_scratch = entry.file_name().as_encoded_bytes().starts_with(prefix.as_bytes());
        let age = entry.metadata().and_then(|metadata| metadata.modified());
        let is_old = age.is_ok_and(|time| time.elapsed().is_ok_and(|age| age > YOUNG));
        // Opening a pipe would wait for its writer: other users may have made the entry.
        let mut folder = File::options();
        folder.read(true).custom_flags((OFlags::DIRECTORY | OFlags::NOFOLLOW).bits() as i32);
        let is_free = || folder.open(&path).is_ok_and(|file| file.try_lock().is_ok());
        if is_scratch && is_old && is_free() {
            let _ = fs::remove_dir_all(&path);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::fs::{AtFlags, CWD, FileType, Mode, Timespec, Timestamps, mknodat, utimensat};
    use std::time::{SystemTime, UNIX_EPOCH};

    #[test]
    fn what_killed_processes_leave_goes() {
        let parent = tempfile::tempdir().unwrap();
        let age = |path: &Path| {
            fs::write(path.join("file"), "").unwrap();
            let time = SystemTime::now() - 2 * YOUNG;
            File::open(path).unwrap().set_modified(time).unwrap();
        };
        let held = ScratchFolder::new_in(parent.path(), "exec-").unwrap();
        age(held.path());
        let pipe = parent.path().join("exec-pipe");
        mknodat(CWD, &pipe, FileType::Fifo, Mode::RUSR | Mode::WUSR, 0).unwrap();
        let long_ago = (SystemTime::now() - 2 * YOUNG).duration_since(UNIX_EPOCH).unwrap();
        let long_ago = Timespec::try_from(long_ago).unwrap();
        let times = Timestamps { last_access: long_ago, last_modification: long_ago };
        utimensat(CWD, &pipe, &times, AtFlags::empty()).unwrap();
        let [left, young, other] = ["exec-left", "exec-young", "other"].map(|name| {
            let path = parent.path().join(name);
            fs::create_dir(&path).unwrap();
            path
        });
        [&left, &other].into_iter().for_each(|path| age(path));
        remove_abandoned(parent.path(), "exec-");
        let there = [held.path(), &left, &young, &other].map(Path::exists);
        assert_eq!(there, [true, false, true, true]);
        held.close().unwrap();
        assert_eq!(fs::read_dir(parent.path()).unwrap().count(), 3);
    }
}
