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
    /// Closed files of all names.
    closed: Arc<Mutex<Closed>>,
}

impl Drop for NamedFile {
    fn drop(&mut self) {
        let key = Closed::key(self);
        let state = self.state.get_mut().unwrap_or_else(PoisonError::into_inner);
        if let State::Closed(path) = state {
            lock(&self.closed).remove(key, path);
        }
    }
}

/// Device, inode number and type.
type Identity = (u64, u64, u32);

/// Closed files by identity and address, and the bytes of their paths.
struct Closed {
    all: BTreeMap<(Identity, usize), Weak<NamedFile>>,
    path_bytes: usize,
    most_path_bytes: usize,
}

impl Closed {
    /// Adds a file if there is room for its path.
    fn add(&mut self, named: &Arc<NamedFile>, path: &[u8]) -> bool {
        let has_room = self.has_room_for(path_bytes(path));
        if has_room {
            self.path_bytes += path_bytes(path);
            self.all.insert(Self::key(named), Arc::downgrade(named));
        }
        has_room
    }

    fn remove(&mut self, key: (Identity, usize), path: &[u8]) {
        self.path_bytes -= path_bytes(path);
        self.all.remove(&key);
    }

    fn has_room_for(&self, bytes: usize) -> bool {
        self.path_bytes + bytes <= self.most_path_bytes
    }

    fn of(&self, identity: Identity) -> Vec<Arc<NamedFile>> {
        let all = self.all.range((identity, 0)..=(identity, usize::MAX));
        all.filter_map(|(_, named)| named.upgrade()).collect()
    }

    fn key(named: &NamedFile) -> (Identity, usize) {
        (named.identity, std::ptr::from_ref(named).addr())
    }
}

/// Returns the bytes of a kept path, with the allocator's overhead.
fn path_bytes(path: &[u8]) -> usize {
    const OVERHEAD: usize = 24;
    path.len() + OVERHEAD
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

enum State {
    Open(Arc<Descriptor>),
    /// Path from the folder; empty: none is known.
    Closed(Box<[u8]>),
}

/// All files that are open for names.
pub(super) struct NamedFiles {
    /// Path of the served folder; `None`: no file is closed.
    folder: Option<Vec<u8>>,
    /// Number of open files from which on unused ones are closed.
    most: usize,
    /// Has one reference more than files are open.
    counted: Arc<()>,
    closed: Arc<Mutex<Closed>>,
    /// Files in the order in which they were opened, those of dropped names included.
    queue: Mutex<VecDeque<Weak<NamedFile>>>,
}

impl NamedFiles {
    /// Creates the state without files; `descriptors` is `/proc/self/fd`.
    pub(super) fn new(
        folder: &OwnedFd,
        descriptors: &OwnedFd,
        most: usize,
        most_path_bytes: usize,
    ) -> Self {
        let folder = path_of(descriptors, folder).ok();
        let counted = Arc::new(());
        let closed = Closed { all: BTreeMap::new(), path_bytes: 0, most_path_bytes };
        let closed = Arc::new(Mutex::new(closed));
        Self { folder, most, counted, closed, queue: Mutex::default() }
    }

    /// Sets the number of open files from which on unused ones are closed.
    #[cfg(test)]
    pub(super) fn set_most(&mut self, most: usize) {
        self.most = most;
    }

    /// Sets the number of bytes that paths of closed files may take.
    #[cfg(test)]
    pub(super) fn set_path_bytes(&self, most: usize) {
        self.closed().most_path_bytes = most;
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
            closed: Arc::clone(&self.closed),
        });
        self.append(&named);
        named
    }

    fn closed(&self) -> MutexGuard<'_, Closed> {
        lock(&self.closed)
    }

    /// Returns whether paths of closed files may take `bytes` more.
    pub(super) fn has_room_for(&self, bytes: usize) -> bool {
        self.closed().has_room_for(bytes)
    }

    /// Returns whether a further file may be closed, whatever its path.
    pub(super) fn has_room_for_path(&self) -> bool {
        self.has_room_for(linux::PATH_MAX as usize)
    }

    fn queue(&self) -> MutexGuard<'_, VecDeque<Weak<NamedFile>>> {
        lock(&self.queue)
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

    /// Returns the descriptor of a file, opened again below `folder` if it is closed. Others may be
    /// closed for it.
    ///
    /// # Errors
    /// `STALE`: it has another path by now. Those of a lookup.
    pub(super) fn open(
        &self,
        named: &Arc<NamedFile>,
        folder: &OwnedFd,
        descriptors: &OwnedFd,
    ) -> Result<Arc<Descriptor>, Failed> {
        let (descriptor, is_reopened) =
            self.make_descriptor(descriptors, || self.open_once(named, folder))?;
        if is_reopened {
            self.close_unused(descriptors);
        }
        Ok(descriptor)
    }

    /// Returns the descriptor of a file, and whether it has been opened again.
    fn open_once(
        &self,
        named: &Arc<NamedFile>,
        folder: &OwnedFd,
    ) -> Result<(Arc<Descriptor>, bool), Failed> {
        named.is_used.store(true, Relaxed);
        let mut state = named.state();
        let path = match &*state {
            State::Open(descriptor) => return Ok((Arc::clone(descriptor), false)),
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
        self.closed().remove(Closed::key(named), path);
        *state = State::Open(Arc::clone(&descriptor));
        self.append(named);
        Ok((descriptor, true))
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
            self.close_next(descriptors);
        }
    }

    /// Makes a descriptor. If the process may have no more, closes some files and tries once more.
    pub(super) fn make_descriptor<T>(
        &self,
        descriptors: &OwnedFd,
        make: impl Fn() -> Result<T, Failed>,
    ) -> Result<T, Failed> {
        match make() {
            Err(Errno::MFILE) if self.close_some(descriptors) => make(),
            made => made,
        }
    }

    /// Closes files that no request uses, however many are open. Returns whether there were any.
    fn close_some(&self, descriptors: &OwnedFd) -> bool {
        /// Number of files: enough for requests that are served in parallel.
        const ENOUGH: usize = 64;
        // A file is closed at the second look if it was used before the first one.
        let looks = 2 * self.queue().len();
        (0..looks).filter(|_| self.close_next(descriptors)).take(ENOUGH).count() != 0
    }

    /// Closes the file that was opened first if it was not used since the last look at it. Returns
    /// whether it is closed.
    fn close_next(&self, descriptors: &OwnedFd) -> bool {
        let next = self.queue().pop_front();
        let Some(named) = next.and_then(|named| named.upgrade()) else { return false };
        let is_closed = !named.is_used.swap(false, Relaxed) && self.close(&named, descriptors);
        if !is_closed {
            self.append(&named);
        }
        is_closed
    }

    /// Closes a file unless a request uses it, or it has no path or none that there is room for.
    fn close(&self, named: &Arc<NamedFile>, descriptors: &OwnedFd) -> bool {
        let mut state = named.state();
        let State::Open(descriptor) = &*state else { return true };
        if named.is_kept.load(Relaxed) || Arc::strong_count(descriptor) != 1 {
            return false;
        }
        let Ok(path) = path_of(descriptors, &**descriptor) else { return false };
        let Some(path) = self.below(&path).filter(|path| !path.is_empty()) else { return false };
        let has_room = self.closed().add(named, path);
        if has_room {
            *state = State::Closed(path.into());
        }
        has_room
    }

    /// Opens the file of an entry, if it is closed, before the driver removes or renames it.
    /// Returns whether it is a folder in which other files may be closed, and the descriptors,
    /// which stay open as long as the caller has them.
    pub(super) fn open_entry(
        &self,
        served: &OwnedFd,
        descriptors: &OwnedFd,
        folder: &Descriptor,
        name: &[u8],
    ) -> (bool, Vec<Arc<Descriptor>>) {
        if self.closed().all.is_empty() {
            return (false, Vec::new());
        }
        let Ok(stat) = fs::statat(folder, name, AtFlags::SYMLINK_NOFOLLOW) else {
            return (false, Vec::new());
        };
        let all = self.closed().of(identity(&stat));
        // If the host has moved it, its uses fail.
        let open = all.iter().filter_map(|named| self.open(named, served, descriptors).ok());
        (stat.st_mode & linux::S_IFMT == linux::S_IFDIR, open.collect())
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
        lock(&self.state)
    }

    /// Keeps the file open as long as the name exists.
    pub(super) fn keep(&self) {
        self.is_kept.store(true, Relaxed);
    }

    /// Follows the renaming of a folder, given by paths from the served folder on.
    pub(super) fn follow_rename(&self, old: &[u8], new: &[u8]) {
        let mut state = self.state();
        let State::Closed(path) = &mut *state else { return };
        let Some(rest) = below(path, old) else { return };
        let renamed = [new, rest].concat();
        let mut closed = lock(&self.closed);
        closed.path_bytes -= path_bytes(path);
        // Others were closed meanwhile if there is no room. Its uses fail then.
        *path = if closed.has_room_for(path_bytes(&renamed)) { renamed } else { Vec::new() }.into();
        closed.path_bytes += path_bytes(path);
    }

    /// Returns the number of bytes by which [`Self::follow_rename`] lengthens the path.
    pub(super) fn growth_by_rename(&self, old: &[u8], new: &[u8]) -> usize {
        match &*self.state() {
            State::Closed(path) if below(path, old).is_some() => {
                new.len().saturating_sub(old.len())
            }
            _ => 0,
        }
    }
}

/// Returns the part of a path after that of a folder.
fn below<'a>(path: &'a [u8], folder: &[u8]) -> Option<&'a [u8]> {
    path.strip_prefix(folder).filter(|rest| rest.is_empty() || rest.starts_with(b"/"))
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

    /// The driver's other requests may close files while it renames their folder.
    #[test]
    fn a_path_without_room_is_forgotten() {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("name"), "").unwrap();
        let open = |path: &std::path::Path| OwnedFd::from(std::fs::File::open(path).unwrap());
        let (served, descriptors) = (open(folder.path()), open("/proc/self/fd".as_ref()));
        let files = NamedFiles::new(&served, &descriptors, 0, 0);
        let file = open(&folder.path().join("name"));
        let stat = fs::fstat(&file).unwrap();
        let named = files.name(file, &stat);
        files.set_path_bytes(path_bytes(b"name") - 1);
        assert!(!files.close_some(&descriptors), "it stays open");
        files.set_path_bytes(100);
        assert!(files.close_some(&descriptors));
        assert_eq!(files.closed().path_bytes, path_bytes(b"name"));
        named.follow_rename(b"name", &[b'x'; 100]);
        assert_eq!(files.closed().path_bytes, path_bytes(b""));
        assert_eq!(files.open(&named, &served, &descriptors).err(), Some(Errno::STALE));
        drop(named);
        assert!(files.closed().path_bytes == 0 && files.closed().all.is_empty());
    }

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
