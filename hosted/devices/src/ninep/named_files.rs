//! Descriptors of the files that the driver's names stand for. A driver may look up any number of
//! files (Linux keeps a name for each file that it caches), but a process may have few open. The
//! descriptor of a file that was not used for a while is closed, and opened again at its next use.
//!
//! Invariant: a file is opened again below the served folder only, name by name, without following
//! links, and is the same file then, by device, inode number and type; otherwise its uses fail with
//! `ESTALE`. (After a removal a number has another file: a driver could make it a device's.) A file
//! without a path below the folder stays open, as one that was removed. One that the driver removes
//! or renames is opened before; paths below a renamed folder change with it.

use std::collections::{BTreeMap, VecDeque};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use linux_raw_sys::general as linux;
use rustix::fs::{self, AtFlags, Stat};
use rustix::io::Errno;

use super::{Failed, look_up, number};

/// Descriptor of a file, only for lookups (`O_PATH`).
pub(super) struct Descriptor {
    file: OwnedFd,
    /// Counts descriptors: see [`NamedFiles`].
    _counted: Arc<()>,
}

impl AsFd for Descriptor {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}

/// File of a name.
pub(super) struct NamedFile {
    state: Mutex<State>,
    /// It was used since the last look for unused files.
    is_used: AtomicBool,
    /// It stays open.
    is_kept: AtomicBool,
    identity: Identity,
}

/// Device, inode number and type.
type Identity = (u64, u64, u32);

/// Closed files by identity and address, those of some dropped names included.
#[derive(Default)]
struct Closed {
    all: BTreeMap<(Identity, usize), Weak<NamedFile>>,
    /// Number of entries at which those of dropped names are removed.
    purge_at: usize,
}

impl Closed {
    fn add(&mut self, named: &Arc<NamedFile>) {
        /// Number of entries below which none are removed.
        const LEAST: usize = 1024;
        if self.all.len() >= self.purge_at {
            self.all.retain(|_, named| named.strong_count() != 0);
            self.purge_at = LEAST.max(2 * self.all.len());
        }
        self.all.insert(Self::key(named), Arc::downgrade(named));
    }

    fn remove(&mut self, named: &Arc<NamedFile>) {
        self.all.remove(&Self::key(named));
    }

    fn of(&self, identity: Identity) -> Vec<Arc<NamedFile>> {
        let all = self.all.range((identity, 0)..=(identity, usize::MAX));
        all.filter_map(|(_, named)| named.upgrade()).collect()
    }

    fn key(named: &Arc<NamedFile>) -> (Identity, usize) {
        (named.identity, Arc::as_ptr(named).addr())
    }
}

enum State {
    Open(Arc<Descriptor>),
    /// Path from the folder.
    Closed(Vec<u8>),
}

/// All files that are open for names.
pub(super) struct NamedFiles {
    /// Path of the served folder; `None`: no file is closed.
    folder: Option<Vec<u8>>,
    /// Number of open files from which on unused ones are closed.
    most: usize,
    /// Has one reference more than files are open.
    counted: Arc<()>,
    closed: Mutex<Closed>,
    /// Files in the order in which they were opened, those of dropped names included.
    queue: Mutex<VecDeque<Weak<NamedFile>>>,
}

impl NamedFiles {
    /// Creates the state without files; `descriptors` is `/proc/self/fd`.
    pub(super) fn new(folder: &OwnedFd, descriptors: &OwnedFd, most: usize) -> Self {
        let folder = path_of(descriptors, folder).ok();
        let counted = Arc::new(());
        Self { folder, most, counted, closed: Mutex::default(), queue: Mutex::default() }
    }

    /// Sets the number of open files from which on unused ones are closed.
    #[cfg(test)]
    pub(super) fn set_most(&mut self, most: usize) {
        self.most = most;
    }

    /// Returns the number of open files.
    #[cfg(test)]
    pub(super) fn open_files(&self) -> usize {
        Arc::strong_count(&self.counted) - 1
    }

    /// Makes an open file the one of a name.
    pub(super) fn name(&self, file: OwnedFd, stat: &Stat) -> Arc<NamedFile> {
        let descriptor = Descriptor { file, _counted: Arc::clone(&self.counted) };
        let named = Arc::new(NamedFile {
            state: Mutex::new(State::Open(Arc::new(descriptor))),
            is_used: AtomicBool::new(true),
            is_kept: AtomicBool::new(false),
            identity: identity(stat),
        });
        self.append(&named);
        named
    }

    fn closed(&self) -> MutexGuard<'_, Closed> {
        self.closed.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn queue(&self) -> MutexGuard<'_, VecDeque<Weak<NamedFile>>> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn append(&self, named: &Arc<NamedFile>) {
        /// Number of dropped names that the queue may contain.
        const DROPPED: usize = 1024;
        let mut queue = self.queue();
        if queue.len() > 2 * Arc::strong_count(&self.counted) + DROPPED {
            queue.retain(|named| named.strong_count() != 0);
        }
        queue.push_back(Arc::downgrade(named));
    }

    /// Returns the descriptor of a file, opened again below `folder` if it is closed.
    ///
    /// # Errors
    /// `STALE`: it has another path by now. Those of a lookup.
    pub(super) fn open(
        &self,
        named: &Arc<NamedFile>,
        folder: &OwnedFd,
    ) -> Result<Arc<Descriptor>, Failed> {
        named.is_used.store(true, Relaxed);
        let mut state = named.state();
        let path = match &*state {
            State::Open(descriptor) => return Ok(Arc::clone(descriptor)),
            State::Closed(path) => path,
        };
        let mut file = None;
        for name in path.split(|&byte| byte == b'/') {
            let from = file.as_ref().unwrap_or(folder);
            file = Some(look_up(from, name).map_err(|error| match error {
                Errno::NOENT | Errno::NOTDIR => Errno::STALE,
                other => other,
            })?);
        }
        // The path has one name at least.
        let file = file.ok_or(Errno::STALE)?;
        if identity(&fs::fstat(&file)?) != named.identity {
            return Err(Errno::STALE);
        }
        let descriptor = Arc::new(Descriptor { file, _counted: Arc::clone(&self.counted) });
        *state = State::Open(Arc::clone(&descriptor));
        self.closed().remove(named);
        self.append(named);
        Ok(descriptor)
    }

    /// Closes some files that were not used since the last call, if many are open.
    pub(super) fn close_unused(&self, descriptors: &OwnedFd) {
        /// Number of files that are looked at.
        const LOOKS: usize = 64;
        let is_full = || Arc::strong_count(&self.counted) > self.most;
        // Each at most once.
        let looks = if is_full() { self.queue().len().min(LOOKS) } else { 0 };
        for _ in 0..looks {
            if !is_full() {
                return;
            }
            let next = self.queue().pop_front();
            let Some(named) = next else { return };
            let Some(named) = named.upgrade() else { continue };
            if named.is_used.swap(false, Relaxed) || !self.close(&named, descriptors) {
                self.append(&named);
            }
        }
    }

    /// Closes a file unless a request uses it or it has no path.
    fn close(&self, named: &Arc<NamedFile>, descriptors: &OwnedFd) -> bool {
        let mut state = named.state();
        let State::Open(descriptor) = &*state else { return true };
        if named.is_kept.load(Relaxed) || Arc::strong_count(descriptor) != 1 {
            return false;
        }
        let Ok(path) = path_of(descriptors, &**descriptor) else { return false };
        let Some(path) = self.below(&path).filter(|path| !path.is_empty()) else { return false };
        *state = State::Closed(path.to_vec());
        self.closed().add(named);
        true
    }

    /// Opens the file of an entry, if it is closed, before the driver removes or renames it.
    /// Returns whether it is a folder in which other files may be closed.
    pub(super) fn open_entry(&self, served: &OwnedFd, folder: &Descriptor, name: &[u8]) -> bool {
        if self.closed().all.is_empty() {
            return false;
        }
        let Ok(stat) = fs::statat(folder, name, AtFlags::SYMLINK_NOFOLLOW) else { return false };
        let all = self.closed().of(identity(&stat));
        for named in all {
            // If the host has moved it, its uses fail.
            let _ = self.open(&named, served);
        }
        stat.st_mode & linux::S_IFMT == linux::S_IFDIR
    }

    /// Returns the path of an entry from the served folder on, if it is below it.
    pub(super) fn entry(
        &self,
        descriptors: &OwnedFd,
        folder: &Descriptor,
        name: &[u8],
    ) -> Option<Vec<u8>> {
        let path = path_of(descriptors, folder).ok()?;
        match self.below(&path)? {
            [] => Some(name.to_vec()),
            folder => Some([folder, b"/", name].concat()),
        }
    }

    /// Returns the part of a path after the served folder: empty for the folder itself.
    fn below<'a>(&self, path: &'a [u8]) -> Option<&'a [u8]> {
        /// Suffix of Linux for the path of a removed file (proc(5)).
        const REMOVED: &[u8] = b" (deleted)";
        let rest = path.strip_prefix(self.folder.as_deref()?)?;
        if rest.ends_with(REMOVED) {
            return None;
        }
        // Only the path of the root ends with a slash.
        let is_root = self.folder.as_deref() == Some(b"/");
        if is_root || rest.is_empty() { Some(rest) } else { rest.strip_prefix(b"/") }
    }
}

impl NamedFile {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Keeps the file open as long as the name exists.
    pub(super) fn keep(&self) {
        self.is_kept.store(true, Relaxed);
    }

    /// Follows the renaming of a folder, given by paths from the served folder on.
    pub(super) fn follow_rename(&self, old: &[u8], new: &[u8]) {
        if let State::Closed(path) = &mut *self.state()
            && let Some(rest) = path.strip_prefix(old)
            && (rest.is_empty() || rest.starts_with(b"/"))
        {
            *path = [new, rest].concat();
        }
    }
}

fn identity(stat: &Stat) -> Identity {
    (stat.st_dev, stat.st_ino, stat.st_mode & linux::S_IFMT)
}

/// Returns the path of a descriptor.
fn path_of(descriptors: &OwnedFd, file: &impl AsFd) -> Result<Vec<u8>, Failed> {
    Ok(fs::readlinkat(descriptors, number(file), Vec::new())?.into_bytes())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_number_with_another_type_is_another_file() {
        let file = tempfile::tempfile().unwrap();
        let stat = fs::fstat(&file).unwrap();
        let (mut device, mut other_mode) = (stat, stat);
        device.st_mode = linux::S_IFBLK | stat.st_mode & !linux::S_IFMT;
        other_mode.st_mode ^= 0o022;
        assert_ne!(identity(&stat), identity(&device));
        assert_eq!(identity(&stat), identity(&other_mode));
    }
}
