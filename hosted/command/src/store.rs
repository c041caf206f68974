//! Store of results in the user's cache: each entry is a folder named by the digest of its inputs.
//!
//! An entry's folder appears complete or not at all, by a rename. A lock file per name makes two
//! builders of one entry share one build. Users of an entry hold a shared lock on its folder, and
//! only folders without one are removed: a lookup locks the folder before it reads it, and a
//! builder before the folder appears. All locks are flock(2) locks: they end with their process in
//! any case.

use crate::cache;
use crate::failure::{self, Failure, IoContext};
use crate::interrupt::Interruptible;
use crate::lock::{Lock, is_at};
use crate::output_folder;
use crate::scratch::{self, ScratchFolder};
use crate::steps::Steps;
use crate::trust;
use crate::value::Size;
use std::fs::{self, DirBuilder, File, TryLockError};
use std::io;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::time::SystemTime;

/// Name prefixes of lock files, and of folders of running builds and of entries being removed.
const LOCK: &str = ".lock-";
const WORK: &str = ".work-";

/// Kind of the entries of a store.
#[derive(Clone, Copy, Debug)]
pub struct Kind {
    /// Folder in the cache.
    pub folder: &'static str,
    /// File in an entry's folder that describes it, written last.
    pub record: &'static str,
    /// Noun of an entry in messages.
    pub item: &'static str,
}

impl Kind {
    /// Records a use of the entry in `folder` and keeps it until the result is dropped; `None`:
    /// there is no entry, or another process removes it. A folder that cannot be locked, as on some
    /// network file systems, is used without a lock.
    pub fn hold(&self, folder: &Path) -> Option<UseLock> {
        let is_entry = || folder.join(self.record).is_file();
        let Ok(file) = File::open(folder) else { return is_entry().then(UseLock::default) };
        if let Err(TryLockError::WouldBlock) = file.try_lock_shared() {
            return None;
        }
        // Another process may have moved the folder after it was opened here.
        if !is_at(&file, folder).unwrap_or(false) || !is_entry() {
            return None;
        }
        let _ = file.set_modified(SystemTime::now());
        Some(UseLock { _folder: Some(file) })
    }
}

/// Keeps an entry in the cache. The default value keeps none.
#[derive(Debug, Default)]
pub struct UseLock {
    _folder: Option<File>,
}

/// Store of one kind of entries.
#[derive(Debug)]
pub struct Store {
    folder: PathBuf,
    kind: Kind,
}

impl Store {
    /// Opens the store and creates its folder if necessary.
    ///
    /// # Errors
    /// There is no cache, or its folder is not trusted ([`cache::folder`]).
    pub fn open(kind: Kind) -> Result<Self, Failure> {
        let folder = cache::folder()?.join(kind.folder);
        let made = DirBuilder::new().recursive(true).mode(0o700).create(&folder);
        made.map_err(|error| cache::failed(&folder, &error))?;
        Ok(Self { folder: trust::check(&folder)?, kind })
    }

    /// Opens the store if its folder exists.
    ///
    /// # Errors
    /// As those of [`Store::open`].
    pub fn existing(kind: Kind) -> Result<Option<Self>, Failure> {
        let folder = cache::existing()?.map(|cache| cache.join(kind.folder));
        let folder = folder.filter(|folder| folder.is_dir());
        folder.map(|folder| Ok(Self { folder: trust::check(&folder)?, kind })).transpose()
    }

    /// Creates the store of a folder that exists and is trusted.
    pub fn at(folder: PathBuf, kind: Kind) -> Self {
        Self { folder, kind }
    }

    /// Returns the folder of the store.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// Returns the folders of all entries, complete or not, by name.
    ///
    /// # Errors
    /// The folder of the store cannot be read.
    pub fn all(&self) -> Result<Vec<PathBuf>, Failure> {
        let folders = fs::read_dir(&self.folder).file_error("read", &self.folder)?;
        let mut folders: Vec<_> = folders.flatten().map(|entry| entry.path()).collect();
        folders.retain(|folder| !is_hidden(folder) && folder.is_dir());
        folders.sort();
        Ok(folders)
    }

    /// Returns an entry that `find` reads from its folder: from the store, or from another process
    /// that is building it, or from `make`, which builds it in the given folder, reports its
    /// progress in the [`Lock`] and returns the folder with the result. The entry stays until the
    /// second value is dropped. The third value is true if `make` has built it.
    ///
    /// # Errors
    /// Those of `make`; the store cannot be written.
    pub fn get<E>(
        &self,
        name: &str,
        interruptible: &Interruptible,
        steps: &Steps,
        find: impl Fn(&Path) -> Option<E>,
        make: impl FnOnce(&Path, &Lock) -> Result<PathBuf, Failure>,
    ) -> Result<(E, UseLock, bool), Failure> {
        let place = self.folder.join(name);
        let find_and_hold = || {
            let held = self.kind.hold(&place)?;
            find(&place).map(|entry| (entry, held, false))
        };
        let lock = match find_and_hold() {
            Some(found) => return Ok(found),
            None => {
                let what = format!("this {}", self.kind.item);
                Lock::wait(&self.lock_path(name), &what, steps)?
            }
        };
        // Another builder may have finished meanwhile.
        if let Some(found) = find_and_hold() {
            return Ok(found);
        }
        self.remove_abandoned();
        let failed = |error: io::Error| cache::failed(&self.folder, &error);
        let work = ScratchFolder::new_in(&self.folder, WORK).map_err(failed)?;
        interruptible.remove_on_signal(work.path());
        interruptible.remove_on_signal(lock.path());

        let made = make(work.path(), &lock).map_err(|failure| self.explain(failure))?;
        let incomplete = || {
            let text = format!("the built {} is incomplete", self.kind.item);
            Failure::new(failure::INTERNAL, text)
        };
        exclude_writers(&made).map_err(failed)?;
        let held = self.kind.hold(&made).ok_or_else(incomplete)?;
        output_folder::sync(&made).map_err(failed)?;
        let put = || self.put(&made, &place, work.path());
        interruptible.uninterrupted(put).map_err(failed)?;
        find(&place).ok_or_else(incomplete).map(|entry| (entry, held, true))
    }

    /// Moves an entry into place, whose files are on the disk.
    fn put(&self, made: &Path, place: &Path, work: &Path) -> io::Result<()> {
        // Damaged, or with another format version.
        if place.symlink_metadata().is_ok() {
            fs::rename(place, work.join("old"))?;
        }
        fs::rename(made, place)?;
        File::open(&self.folder)?.sync_all()
    }

    /// Returns the path of the lock file of an entry.
    pub fn lock_path(&self, name: &str) -> PathBuf {
        self.folder.join(format!("{LOCK}{name}"))
    }

    /// Returns the free space of the cache's file system in bytes.
    fn room(&self) -> Result<u64, Failure> {
        let found = rustix::fs::statvfs(&self.folder).map_err(io::Error::from);
        let found = found.file_error("read", &self.folder)?;
        Ok(found.f_bavail.saturating_mul(found.f_frsize))
    }

    /// Checks that `needed` bytes are free for an entry.
    ///
    /// # Errors
    /// They are not, or the file system cannot be asked: code 71.
    pub fn check_room(&self, needed: u64) -> Result<(), Failure> {
        enough(self.room()?, needed, &self.folder, self.kind.item)
    }

    /// Adds a remedy if a build failed for lack of space, which programs report in many ways.
    fn explain(&self, failure: Failure) -> Failure {
        const FULL: u64 = 16 << 20;
        match self.room() {
            Ok(room) if room < FULL => {
                let folder = self.folder.display();
                failure.help(format!(
                    "the file system of {folder} is full; set XDG_CACHE_HOME to a folder with free space"
                ))
            }
            _ => failure,
        }
    }

    /// Removes the entries in these folders unless they are in use, and returns the names of the
    /// removed ones.
    ///
    /// # Errors
    /// As those of [`Store::remove_each`].
    pub fn remove(&self, folders: Vec<PathBuf>) -> Result<Vec<String>, Failure> {
        let mut removed = Vec::new();
        self.remove_each(folders, |name| removed.push(name.to_owned()))?;
        Ok(removed)
    }

    /// Removes the entries in these folders unless they are in use or gone, and calls `removed`
    /// with the name of each removed one.
    ///
    /// # Errors
    /// A folder cannot be removed, the first one of several; the others are.
    pub fn remove_each(
        &self,
        folders: Vec<PathBuf>,
        mut removed: impl FnMut(&str),
    ) -> Result<(), Failure> {
        self.remove_abandoned();
        let action = format!("remove the {}", self.kind.item);
        let mut result = Ok(());
        for folder in folders {
            let deleted = detach(&folder, &self.folder).and_then(|detached| {
                let Some(work) = detached else { return Ok(()) };
                removed(&folder.file_name().unwrap_or_default().to_string_lossy());
                work.close()
            });
            result = result.and(deleted.file_error(&action, &folder));
        }
        result
    }

    /// Removes work folders and lock files of killed processes. Those that cannot be removed stay.
    fn remove_abandoned(&self) {
        for entry in fs::read_dir(&self.folder).into_iter().flatten().flatten() {
            if entry.file_name().as_encoded_bytes().starts_with(LOCK.as_bytes()) {
                // Taking and releasing the lock removes its file.
                drop(Lock::take(&entry.path()));
            }
        }
        scratch::remove_abandoned(&self.folder, WORK);
    }
}

fn is_hidden(path: &Path) -> bool {
    path.file_name().is_none_or(|name| name.as_encoded_bytes().starts_with(b"."))
}

/// Moves an entry into a work folder, so that no half-removed entry is found; `None`: it is in use
/// or gone.
fn detach(entry: &Path, store: &Path) -> io::Result<Option<ScratchFolder>> {
    let is_gone = |error: &io::Error| error.kind() == io::ErrorKind::NotFound;
    let file = match File::open(entry) {
        Err(error) if is_gone(&error) => return Ok(None),
        opened => opened?,
    };
    match file.try_lock() {
        Err(TryLockError::WouldBlock) => return Ok(None),
        Err(TryLockError::Error(error)) => return Err(error),
        Ok(()) => {}
    }
    // After the folder was opened, another process may have removed it, and a third one may have
    // built the entry again.
    if !is_at(&file, entry).unwrap_or(false) {
        return Ok(None);
    }
    let work = ScratchFolder::new_in(store, WORK)?;
    match fs::rename(entry, work.path().join("old")) {
        Err(error) if is_gone(&error) => Ok(None),
        renamed => renamed.map(|()| Some(work)),
    }
}

/// Returns whether the folder of an entry without a record has the file `must`, and all of its
/// files have contents: earlier versions did not call [`output_folder::sync`].
pub fn is_whole(folder: &Path, must: &str) -> bool {
    let has_bytes =
        |path: &Path| fs::metadata(path).is_ok_and(|found| found.is_file() && found.len() > 0);
    let mut entries = fs::read_dir(folder).into_iter().flatten().flatten();
    has_bytes(&folder.join(must)) && entries.all(|entry| has_bytes(&entry.path()))
}

/// Moves the folder `made` of such an entry, whose files are on the disk, to `place`, unless
/// another process has moved a whole one there. It is exchanged for a damaged one, which is then
/// `made`: a whole one that another process moves there meanwhile is replaced, never missing.
///
/// # Errors
/// A folder cannot be moved.
pub fn put_whole(made: &Path, place: &Path, must: &str) -> io::Result<()> {
    if is_whole(place, must) {
        return Ok(());
    }
    match output_folder::replace(made, place) {
        Err(_) if is_whole(place, must) => Ok(()),
        moved => moved,
    }
}

/// Removes the write permission of group and others from all files and folders of a tree, which the
/// umask may have left: only what no other user can change is trusted ([`trust::check`]). Symbolic
/// links are not followed.
///
/// # Errors
/// A file cannot be read or changed.
pub fn exclude_writers(tree: &Path) -> io::Result<()> {
    const WRITERS: u32 = 0o022;
    let metadata = fs::symlink_metadata(tree)?;
    if metadata.is_symlink() {
        return Ok(());
    }
    let mode = metadata.mode() & 0o7777;
    if mode & WRITERS != 0 {
        fs::set_permissions(tree, fs::Permissions::from_mode(mode & !WRITERS))?;
    }
    if metadata.is_dir() {
        for entry in fs::read_dir(tree)? {
            exclude_writers(&entry?.path())?;
        }
    }
    Ok(())
}

fn enough(room: u64, needed: u64, folder: &Path, item: &str) -> Result<(), Failure> {
    if room >= needed {
        return Ok(());
    }
    // Whole MiB: more than what is needed, less than what is left.
    let (needed, room) = (Size(needed.next_multiple_of(1 << 20)), room >> 20);
    let folder = folder.display();
    let text = format!("the {item} requires {needed} of free space; {folder} has {room} MiB left");
    Err(Failure::new(failure::OS_ERROR, text)
        .help("free some space, or set XDG_CACHE_HOME to another folder of yours"))
}

#[cfg(test)]
mod tests;
