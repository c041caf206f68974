//! Descriptors of the files that the driver's names stand for. A driver may look up any number of
//! files (Linux keeps a name for each file that it caches), but a process may have few open. The
//! descriptor of a file that was not used for a while is closed, and opened again at its next use.
//!
//! Invariant: a file is opened again below the served folder only, name by name, without following
//! links, and is the same file then, by device and inode number; otherwise its uses fail with
//! `ESTALE`. A file that has no path below the folder, as one that was removed, stays open.

use std::collections::VecDeque;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use rustix::fs::{self, Stat};
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
    /// Device and inode number.
    identity: (u64, u64),
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
    /// A file was closed.
    has_closed: AtomicBool,
    /// Files in the order in which they were opened, those of dropped names included.
    queue: Mutex<VecDeque<Weak<NamedFile>>>,
}

impl NamedFiles {
    /// Creates the state without files; `descriptors` is `/proc/self/fd`.
    pub(super) fn new(folder: &OwnedFd, descriptors: &OwnedFd, most: usize) -> Self {
        let folder = path_of(descriptors, folder).ok();
        let (counted, has_closed) = (Arc::new(()), AtomicBool::new(false));
        Self { folder, most, counted, has_closed, queue: Mutex::default() }
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
            identity: (stat.st_dev, stat.st_ino),
        });
        self.append(&named);
        named
    }

    fn append(&self, named: &Arc<NamedFile>) {
        /// Number of dropped names that the queue may contain.
        const DROPPED: usize = 1024;
        let mut queue = self.queue.lock().unwrap_or_else(PoisonError::into_inner);
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
        let stat = fs::fstat(&file)?;
        if (stat.st_dev, stat.st_ino) != named.identity {
            return Err(Errno::STALE);
        }
        let descriptor = Arc::new(Descriptor { file, _counted: Arc::clone(&self.counted) });
        *state = State::Open(Arc::clone(&descriptor));
        self.append(named);
        Ok(descriptor)
    }

    /// Closes some files that were not used since the last call, if many are open.
    pub(super) fn close_unused(&self, descriptors: &OwnedFd) {
        /// Number of files that are looked at.
        const LOOKS: usize = 64;
        let queue = || self.queue.lock().unwrap_or_else(PoisonError::into_inner);
        let is_full = || Arc::strong_count(&self.counted) > self.most;
        // Each at most once.
        let looks = queue().len().min(LOOKS);
        for _ in 0..looks {
            if !is_full() {
                return;
            }
            let next = queue().pop_front();
            let Some(named) = next else { return };
            let Some(named) = named.upgrade() else { continue };
            if named.is_used.swap(false, Relaxed) || !self.close(&named, descriptors) {
                self.append(&named);
            }
        }
    }

    /// Closes a file unless a request uses it or it has no path.
    fn close(&self, named: &NamedFile, descriptors: &OwnedFd) -> bool {
        let mut state = named.state();
        let State::Open(descriptor) = &*state else { return true };
        if named.is_kept.load(Relaxed) || Arc::strong_count(descriptor) != 1 {
            return false;
        }
        let Ok(path) = path_of(descriptors, &**descriptor) else { return false };
        let Some(path) = self.below(&path).filter(|path| !path.is_empty()) else { return false };
        *state = State::Closed(path.to_vec());
        self.has_closed.store(true, Relaxed);
        true
    }

    /// Returns the path of an entry from the served folder on, if closed files may depend on it.
    pub(super) fn entry(
        &self,
        descriptors: &OwnedFd,
        folder: &Descriptor,
        name: &[u8],
    ) -> Option<Vec<u8>> {
        if !self.has_closed.load(Relaxed) {
            return None;
        }
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

    /// Follows the renaming of a file or folder, given by paths from the served folder on.
    pub(super) fn follow_rename(&self, old: &[u8], new: &[u8]) {
        if let State::Closed(path) = &mut *self.state()
            && let Some(rest) = path.strip_prefix(old)
            && (rest.is_empty() || rest.starts_with(b"/"))
        {
            *path = [new, rest].concat();
        }
    }
}

/// Returns the path of a descriptor.
fn path_of(descriptors: &OwnedFd, file: &impl AsFd) -> Result<Vec<u8>, Failed> {
    Ok(fs::readlinkat(descriptors, number(file), Vec::new())?.into_bytes())
}
