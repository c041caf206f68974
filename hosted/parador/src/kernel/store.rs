//! The kernels in the user's cache: each in a folder named by the digest of what it was built from.
//!
//! A kernel's folder appears complete or not at all, by a rename. A lock file for each name makes
//! two builders of one kernel share one build; who uses a kernel holds a shared lock on its folder,
//! and only folders without one are removed. Locks are those of flock(2): they end with their
//! process, however that ends.

use super::{BZIMAGE, CONFIGURED, HEADERS_FOLDER, MODULES, SYMBOLS, VMLINUX};
use crate::cache;
use crate::failure::{self, Failure};
use crate::interrupt::Interruptible;
use crate::messages::{Level, say};
use crate::steps::Steps;
use crate::trust;
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use std::fmt::Write as _;
use std::fs::{self, DirBuilder, File, OpenOptions, TryLockError};
use std::io::{self, Read};
use std::os::unix::fs::{DirBuilderExt, FileExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, SystemTime};
use tempfile::TempDir;

/// Folder of the cache that has the kernels.
const FOLDER: &str = "kernels";
/// File in a kernel's folder with its [`Record`], written last.
const RECORD: &str = "kernel.json";
/// Format of the record; a folder with another one is not used.
const FORMAT: u32 = 1;
/// Kernels that are kept.
pub const KEPT: usize = 3;
/// Beginnings of names of lock files, and of folders of builds that go on and of kernels that are
/// being removed.
const LOCK: &str = ".lock-";
const WORK: &str = ".work-";
/// An abandoned folder is at least this old: a younger one may be about to be locked.
const YOUNG: Duration = Duration::from_secs(60);
/// Pause between looks at another builder's lock.
const PAUSE: Duration = Duration::from_millis(200);
/// Longest status of a builder that is shown, in bytes.
const LONGEST_STATUS: usize = 200;
/// Free space of a build in bytes: the tree with its objects takes 1.6 GB.
pub const ROOM: u64 = 2 << 30;

/// SHA-256 over parts, each with its length, as hexadecimal digits.
pub fn digest<'a>(parts: impl IntoIterator<Item = &'a [u8]>) -> String {
    let mut sha = Sha256::new();
    for part in parts {
        sha.update((part.len() as u64).to_le_bytes());
        sha.update(part);
    }
    hexadecimal(&sha.finalize())
}

/// SHA-256 of a file as sha256sum(1) prints it.
pub fn file_digest(path: &Path) -> io::Result<String> {
    let mut file = File::open(path)?;
    let mut sha = Sha256::new();
    let mut buffer = vec![0; 1 << 20];
    loop {
        let length = file.read(&mut buffer)?;
        if length == 0 {
            return Ok(hexadecimal(&sha.finalize()));
        }
        sha.update(&buffer[..length]);
    }
}

fn hexadecimal(bytes: &[u8]) -> String {
    bytes.iter().fold(String::new(), |mut text, byte| {
        // Writing to a string does not fail.
        let _ = write!(text, "{byte:02x}");
        text
    })
}

/// Everything that a kernel is built from. Equal inputs give equal kernels.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Inputs {
    /// With pads and tables of sites (`previrt`), or without (`plain`).
    pub kind: String,
    /// Digest of what is Parador's own in it: configuration, edits, headers, afterburner.
    pub recipe: String,
    /// Digest of Linux' source.
    pub source: String,
    /// Compiler and linker: the first lines that they print of themselves.
    pub compiler: String,
}

impl Inputs {
    /// Name of the kernel's folder.
    pub fn name(&self) -> String {
        let Self { kind, recipe, source, compiler } = self;
        let all = [kind, recipe, source, compiler].map(|part| part.as_bytes());
        format!("linux-{kind}-{}", &digest(all)[..32])
    }
}

/// Description of a finished kernel, beside it.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Record {
    format: u32,
    /// What it was built from.
    #[serde(flatten)]
    pub inputs: Inputs,
    /// Linux' version.
    pub linux: String,
    /// SHA-256 and length in bytes of `vmlinux`.
    pub sha256: String,
    bytes: u64,
    /// When the build ended, as in RFC 3339.
    pub built: String,
}

/// A kernel in the cache.
#[derive(Debug)]
pub struct Entry {
    /// Its folder.
    pub folder: PathBuf,
    /// What it says of itself.
    pub record: Record,
    /// When it was last built or used.
    pub used: SystemTime,
}

impl Entry {
    /// The kernel in `folder`; `None` if it is not complete, or others may write to it.
    fn read(folder: PathBuf) -> Option<Self> {
        let record: Record = serde_json::from_slice(&fs::read(folder.join(RECORD)).ok()?).ok()?;
        let vmlinux = folder.join(VMLINUX);
        let named = folder.file_name().is_some_and(|name| name == &*record.inputs.name());
        let whole = [BZIMAGE, SYMBOLS, CONFIGURED].iter().all(|name| folder.join(name).is_file())
            && [MODULES, HEADERS_FOLDER].iter().all(|name| folder.join(name).is_dir())
            && fs::metadata(&vmlinux).is_ok_and(|file| file.len() == record.bytes);
        let sound = record.format == FORMAT && named && whole && trust::check(&vmlinux).is_ok();
        let used = fs::metadata(&folder).and_then(|folder| folder.modified()).ok()?;
        sound.then_some(Self { folder, record, used })
    }

    /// Notes a use of it, and keeps it from being removed until the result is dropped.
    pub fn hold(&self) -> Held {
        hold(&self.folder)
    }
}

/// Keeps a kernel from being removed from the cache.
#[derive(Debug)]
pub struct Held {
    _folder: Option<File>,
}

/// Notes a use of the kernel whose `vmlinux` is in `folder` if it is one of a cache, and keeps it
/// there until the result is dropped. A folder that cannot be locked, as on some network file
/// systems, is used without.
pub fn hold(folder: &Path) -> Held {
    let held = folder.join(RECORD).is_file().then(|| File::open(folder).ok()).flatten();
    if let Some(file) = &held {
        let _ = file.set_modified(SystemTime::now());
        let _ = file.try_lock_shared();
    }
    Held { _folder: held }
}

/// A kernel that a build has made in a folder.
pub struct Made {
    /// The folder.
    pub folder: PathBuf,
    /// Linux' version.
    pub linux: String,
}

/// The kernels in the user's cache.
#[derive(Debug)]
pub struct Store {
    folder: PathBuf,
}

impl Store {
    /// The store, whose folder is made if it is not there.
    pub fn open() -> Result<Self, Failure> {
        let folder = cache::folder()?.join(FOLDER);
        let made = DirBuilder::new().recursive(true).mode(0o700).create(&folder);
        made.map_err(|error| cache::failed(&folder, &error))?;
        Ok(Self { folder: trust::check(&folder)? })
    }

    /// The store, if its folder is there.
    pub fn existing() -> Result<Option<Self>, Failure> {
        let folder = cache::existing()?.map(|cache| cache.join(FOLDER));
        let folder = folder.filter(|folder| folder.is_dir());
        folder.map(|folder| Ok(Self { folder: trust::check(&folder)? })).transpose()
    }

    /// Its folder.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// All folders of kernels, complete or not, by name.
    fn all(&self) -> Result<Vec<PathBuf>, Failure> {
        let folders = fs::read_dir(&self.folder)
            .map_err(|error| Failure::file("read", &self.folder, &error))?;
        let mut folders: Vec<_> = folders.flatten().map(|entry| entry.path()).collect();
        folders.retain(|folder| !is_hidden(folder) && folder.is_dir());
        folders.sort();
        Ok(folders)
    }

    /// All complete kernels, the one that was used last first.
    pub fn entries(&self) -> Result<Vec<Entry>, Failure> {
        let mut entries: Vec<_> = self.all()?.into_iter().filter_map(Entry::read).collect();
        entries.sort_by(|a, b| b.used.cmp(&a.used).then_with(|| a.folder.cmp(&b.folder)));
        Ok(entries)
    }

    /// The complete kernel of these inputs, whose `vmlinux` has the digest that was recorded.
    fn find(&self, inputs: &Inputs) -> Option<Entry> {
        let entry = Entry::read(self.folder.join(inputs.name()))?;
        let digest = file_digest(&entry.folder.join(VMLINUX)).ok()?;
        if digest == entry.record.sha256 {
            return Some(entry);
        }
        let place = entry.folder.display();
        say(Level::Warn, &format!("the kernel in {place} is damaged and is built anew"));
        None
    }

    /// The kernel of these inputs: the one that is kept, else the one that another process is
    /// building, else what `make` builds in the folder that it is given. `make` writes what it does
    /// into the [`Lock`], for those who wait. Older kernels than the newest [`KEPT`] go afterwards.
    pub fn get(
        &self,
        inputs: &Inputs,
        interruptible: &Interruptible,
        steps: &Steps,
        make: impl FnOnce(&Path, &Lock) -> Result<Made, Failure>,
    ) -> Result<(Entry, Held), Failure> {
        let lock = match self.find(inputs) {
            Some(entry) => return kept(entry, steps),
            None => self.lock(&inputs.name(), steps)?,
        };
        // Another builder may have ended just now.
        if let Some(entry) = self.find(inputs) {
            return kept(entry, steps);
        }
        self.remove_abandoned();
        let failed = |error: io::Error| cache::failed(&self.folder, &error);
        self.check_room()?;
        let work = TempDir::with_prefix_in(WORK, &self.folder).map_err(failed)?;
        interruptible.remove_on_signal(work.path());
        interruptible.remove_on_signal(&lock.path);
        // Held until the end, however that comes.
        let held = File::open(work.path()).map_err(failed)?;
        held.lock().map_err(failed)?;

        let made = make(work.path(), &lock).map_err(|failure| self.explain(failure))?;
        let entry = self.put(inputs, made, work.path()).map_err(failed)?;
        let entry = entry.ok_or_else(|| {
            Failure::new(failure::INTERNAL, "the kernel that was built is not complete")
        })?;
        let held = entry.hold();
        // What cannot be removed is in nobody's way.
        let _ = self.prune(KEPT);
        Ok((entry, held))
    }

    /// Records what was made and moves it to its place, in this order also on the disk.
    fn put(&self, inputs: &Inputs, made: Made, work: &Path) -> io::Result<Option<Entry>> {
        let vmlinux = made.folder.join(VMLINUX);
        let record = Record {
            format: FORMAT,
            inputs: inputs.clone(),
            linux: made.linux,
            sha256: file_digest(&vmlinux)?,
            bytes: fs::metadata(&vmlinux)?.len(),
            built: humantime::format_rfc3339_seconds(SystemTime::now()).to_string(),
        };
        let text = serde_json::to_vec_pretty(&record)?;
        fs::write(made.folder.join(RECORD), text)?;
        rustix::fs::syncfs(File::open(&made.folder)?)?;
        let place = self.folder.join(inputs.name());
        // A damaged one, or one of another format.
        if place.symlink_metadata().is_ok() {
            fs::rename(&place, work.join("old"))?;
        }
        fs::rename(&made.folder, &place)?;
        File::open(&self.folder)?.sync_all()?;
        Ok(Entry::read(place))
    }

    /// The lock of a kernel's builder, after waiting for another one.
    fn lock(&self, name: &str, steps: &Steps) -> Result<Lock, Failure> {
        let path = self.folder.join(format!("{LOCK}{name}"));
        let failed = |error: io::Error| cache::failed(&path, &error);
        if let Some(lock) = Lock::take(&path).map_err(failed)? {
            return Ok(lock);
        }
        let status = Lock::status(&path);
        say(Level::Info, &format!("waiting for another build of this kernel ({status})"));
        steps.run("waiting", |step| {
            loop {
                if let Some(lock) = Lock::take(&path).map_err(failed)? {
                    return Ok((lock, "the other build has ended".to_owned()));
                }
                step.now(Lock::status(&path));
                thread::sleep(PAUSE);
            }
        })
    }

    /// Free space of the cache's file system in bytes.
    fn room(&self) -> Result<u64, Failure> {
        let found = rustix::fs::statvfs(&self.folder).map_err(io::Error::from);
        let found = found.map_err(|error| Failure::file("read", &self.folder, &error))?;
        Ok(found.f_bavail.saturating_mul(found.f_frsize))
    }

    fn check_room(&self) -> Result<(), Failure> {
        enough(self.room()?, &self.folder)
    }

    /// Says so if a build failed for lack of space: compilers do so in many ways.
    fn explain(&self, failure: Failure) -> Failure {
        const FULL: u64 = 16 << 20;
        match self.room() {
            Ok(room) if room < FULL => {
                let folder = self.folder.display();
                failure.help(format!(
                    "the file system of {folder} is full; set XDG_CACHE_HOME to a folder with {}",
                    crate::description::Size(ROOM)
                ))
            }
            _ => failure,
        }
    }

    /// Removes all but the newest `keep` kernels, and returns the names of those. One that is in
    /// use stays. With `keep` 0 folders go, too, that are no complete kernels for this version of
    /// Parador.
    pub fn prune(&self, keep: usize) -> Result<Vec<String>, Failure> {
        self.remove_abandoned();
        let mut folders: Vec<_> = self.entries()?.into_iter().map(|entry| entry.folder).collect();
        if keep == 0 {
            folders = self.all()?;
        }
        let mut removed = Vec::new();
        for folder in folders.into_iter().skip(keep) {
            let gone = remove(&folder, &self.folder)
                .map_err(|error| Failure::file("remove the kernel", &folder, &error))?;
            let name = folder.file_name().unwrap_or_default().to_string_lossy();
            removed.extend(gone.then(|| name.into_owned()));
        }
        Ok(removed)
    }

    /// Removes the work folders and lock files that killed processes left, which nobody holds. What
    /// cannot be removed stays.
    fn remove_abandoned(&self) {
        for entry in fs::read_dir(&self.folder).into_iter().flatten().flatten() {
            let path = entry.path();
            let name = entry.file_name();
            let starts = |text: &str| name.as_encoded_bytes().starts_with(text.as_bytes());
            let age = entry.metadata().and_then(|metadata| metadata.modified());
            let is_old = age.is_ok_and(|time| time.elapsed().is_ok_and(|age| age > YOUNG));
            if starts(LOCK) {
                // Taking it and giving it back removes it.
                drop(Lock::take(&path));
            }
            let is_free = || File::open(&path).is_ok_and(|file| file.try_lock().is_ok());
            if starts(WORK) && is_old && is_free() {
                let _ = fs::remove_dir_all(&path);
            }
        }
    }
}

fn kept(entry: Entry, steps: &Steps) -> Result<(Entry, Held), Failure> {
    let held = entry.hold();
    steps.run("kernel", |_| Ok(((), format!("kept from {}", entry.record.built))))?;
    Ok((entry, held))
}

fn is_hidden(path: &Path) -> bool {
    path.file_name().is_none_or(|name| name.as_encoded_bytes().starts_with(b"."))
}

/// Removes a kernel unless it is in use. It is moved away first: nobody finds half a kernel.
fn remove(kernel: &Path, store: &Path) -> io::Result<bool> {
    let file = File::open(kernel)?;
    match file.try_lock() {
        Err(TryLockError::WouldBlock) => return Ok(false),
        Err(TryLockError::Error(error)) => return Err(error),
        Ok(()) => {}
    }
    let work = TempDir::with_prefix_in(WORK, store)?;
    fs::rename(kernel, work.path().join("old"))?;
    work.close().map(|()| true)
}

fn enough(room: u64, folder: &Path) -> Result<(), Failure> {
    if room >= ROOM {
        return Ok(());
    }
    let [needed, room] = [ROOM, room].map(|bytes| bytes >> 20);
    let folder = folder.display();
    let text = format!("building a kernel takes {needed} MiB; {folder} has {room} MiB left");
    Err(Failure::new(failure::OS_ERROR, text)
        .help("make room, or set XDG_CACHE_HOME to a folder of yours that has it"))
}

/// The right to build one kernel. Its file goes with it.
#[derive(Debug)]
pub struct Lock {
    file: File,
    path: PathBuf,
}

impl Lock {
    /// Takes the lock if nobody holds it.
    fn take(path: &Path) -> io::Result<Option<Self>> {
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
            let identity = |metadata: fs::Metadata| (metadata.dev(), metadata.ino());
            let opened = identity(file.metadata()?);
            if fs::metadata(path).is_ok_and(|found| identity(found) == opened) {
                let lock = Self { file, path: path.to_owned() };
                lock.note("starting");
                return Ok(Some(lock));
            }
        }
    }

    /// Says to those who wait how far the build is. Nothing depends on it.
    pub fn note(&self, text: &str) {
        let text = format!("process {}: {text}\n", std::process::id());
        let _ = self.file.set_len(0).and_then(|()| self.file.write_all_at(text.as_bytes(), 0));
    }

    /// What the holder says.
    fn status(path: &Path) -> String {
        let text = fs::read(path).unwrap_or_default();
        let text = String::from_utf8_lossy(&text);
        let line = text.lines().next().unwrap_or("starting");
        line.chars().filter(|c| !c.is_control()).take(LONGEST_STATUS).collect()
    }
}

impl Drop for Lock {
    fn drop(&mut self) {
        // It is still locked: nobody has taken this file for theirs.
        let _ = fs::remove_file(&self.path);
    }
}

#[cfg(test)]
mod tests;
