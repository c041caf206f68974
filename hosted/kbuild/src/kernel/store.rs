//! Kernel store in the user's cache: each kernel in a folder named by the digest of its inputs.
//!
//! A kernel's folder appears complete or not at all, by a rename. A lock file per name makes two
//! builders of one kernel share one build. Users of a kernel hold a shared lock on its folder, and
//! only folders without one are removed. All locks are flock(2) locks: they end with their process
//! in any case.

use super::layout::{BZIMAGE, CONFIGURED, HEADERS_FOLDER, MODULES, SYMBOLS, VMLINUX};
use hosted_command::cache;
use hosted_command::failure::{self, Failure, IoContext};
use hosted_command::interrupt::Interruptible;
use hosted_command::messages::{Level, say};
use hosted_command::steps::Steps;
use hosted_command::trust;
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use std::collections::HashMap;
use std::fmt::Write as _;
use std::fs::{self, DirBuilder, File, OpenOptions, TryLockError};
use std::io::{self, Read};
use std::os::unix::fs::{DirBuilderExt, FileExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, SystemTime};
use tempfile::TempDir;

/// Folder of the kernels in the cache.
const FOLDER: &str = "kernels";
/// File in a kernel's folder with its [`Record`], written last.
const RECORD: &str = "kernel.json";
/// Format version of the record; folders with another one are ignored.
const FORMAT: u32 = 1;
/// Number of kernels that are kept.
pub const KEPT: usize = 3;
/// Name prefixes of lock files, and of folders of running builds and of kernels being removed.
const LOCK: &str = ".lock-";
const WORK: &str = ".work-";
/// Least age of an abandoned folder: a younger one may be about to be locked.
const YOUNG: Duration = Duration::from_secs(60);
/// Polling interval of another builder's lock.
const POLL_INTERVAL: Duration = Duration::from_millis(200);
/// Longest displayed status of another builder in bytes.
const LONGEST_STATUS: usize = 200;
/// Free space required by a build in bytes: the tree with its objects takes 1.6 GB.
pub const ROOM: u64 = 2 << 30;

/// Returns the SHA-256 over parts, each with its length, in hexadecimal.
pub fn digest<'a>(parts: impl IntoIterator<Item = &'a [u8]>) -> String {
    let mut sha = Sha256::new();
    for part in parts {
        sha.update((part.len() as u64).to_le_bytes());
        sha.update(part);
    }
    hexadecimal(&sha.finalize())
}

/// Returns the SHA-256 of a file in the format of sha256sum(1).
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

/// All inputs of a kernel. Equal inputs give equal kernels.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Inputs {
    /// Name of the variant.
    pub kind: String,
    /// Digest of Parador's part: configuration, patches, headers, afterburner.
    pub recipe: String,
    /// Digest of the Linux source.
    pub source: String,
    /// First lines of the version texts of compiler and linker.
    pub compiler: String,
}

impl Inputs {
    /// Returns the name of the kernel's folder.
    pub fn name(&self) -> String {
        let Self { kind, recipe, source, compiler } = self;
        let all = [kind, recipe, source, compiler].map(|part| part.as_bytes());
        format!("linux-{kind}-{}", &digest(all)[..32])
    }
}

/// Description of a built kernel, stored with it.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Record {
    format: u32,
    /// Inputs.
    #[serde(flatten)]
    pub inputs: Inputs,
    /// Linux version.
    pub linux: String,
    /// SHA-256 and length in bytes of `vmlinux`.
    pub sha256: String,
    bytes: u64,
    /// Time of the end of the build, RFC 3339.
    pub built: String,
}

/// A kernel in the cache.
#[derive(Debug)]
pub struct CachedKernel {
    /// Folder.
    pub folder: PathBuf,
    /// Description.
    pub record: Record,
    /// Time of the last build or use.
    pub used: SystemTime,
}

impl CachedKernel {
    /// Reads the kernel in `folder`; `None` if it is incomplete, or writable by other users.
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

    /// Records a use and keeps the kernel until the result is dropped.
    pub fn hold(&self) -> UseLock {
        hold(&self.folder)
    }
}

/// Keeps a kernel in the cache.
#[derive(Debug)]
pub struct UseLock {
    _folder: Option<File>,
}

/// If `vmlinux` in `folder` is a cached kernel, records a use and keeps it until the result is
/// dropped. A folder that cannot be locked, as on some network file systems, is used without a
/// lock.
pub fn hold(folder: &Path) -> UseLock {
    let held = folder.join(RECORD).is_file().then(|| File::open(folder).ok()).flatten();
    if let Some(file) = &held {
        let _ = file.set_modified(SystemTime::now());
        let _ = file.try_lock_shared();
    }
    UseLock { _folder: held }
}

/// Result of a build.
pub struct BuiltKernel {
    /// Folder.
    pub folder: PathBuf,
    /// Linux version.
    pub linux: String,
}

/// Kernels in the user's cache.
#[derive(Debug)]
pub struct Store {
    folder: PathBuf,
}

impl Store {
    /// Opens the store and creates its folder if necessary.
    pub fn open() -> Result<Self, Failure> {
        let folder = cache::folder()?.join(FOLDER);
        let made = DirBuilder::new().recursive(true).mode(0o700).create(&folder);
        made.map_err(|error| cache::failed(&folder, &error))?;
        Ok(Self { folder: trust::check(&folder)? })
    }

    /// Opens the store if its folder exists.
    pub fn existing() -> Result<Option<Self>, Failure> {
        let folder = cache::existing()?.map(|cache| cache.join(FOLDER));
        let folder = folder.filter(|folder| folder.is_dir());
        folder.map(|folder| Ok(Self { folder: trust::check(&folder)? })).transpose()
    }

    /// Returns the folder of the store.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// Returns all kernel folders, complete or not, by name.
    fn all(&self) -> Result<Vec<PathBuf>, Failure> {
        let folders = fs::read_dir(&self.folder).file_error("read", &self.folder)?;
        let mut folders: Vec<_> = folders.flatten().map(|entry| entry.path()).collect();
        folders.retain(|folder| !is_hidden(folder) && folder.is_dir());
        folders.sort();
        Ok(folders)
    }

    /// Returns all complete kernels, most recently used first.
    pub fn entries(&self) -> Result<Vec<CachedKernel>, Failure> {
        let mut entries: Vec<_> = self.all()?.into_iter().filter_map(CachedKernel::read).collect();
        entries.sort_by(|a, b| b.used.cmp(&a.used).then_with(|| a.folder.cmp(&b.folder)));
        Ok(entries)
    }

    /// Returns the complete kernel with these inputs, if `vmlinux` has the recorded digest.
    fn find(&self, inputs: &Inputs) -> Option<CachedKernel> {
        let entry = CachedKernel::read(self.folder.join(inputs.name()))?;
        let digest = file_digest(&entry.folder.join(VMLINUX)).ok()?;
        if digest == entry.record.sha256 {
            return Some(entry);
        }
        let place = entry.folder.display();
        say(Level::Warn, &format!("the kernel in {place} is damaged; rebuilding it"));
        None
    }

    /// Returns the kernel with these inputs: from the store, from another process that is building
    /// it, or from `make`, which builds it in the given folder and reports its progress in the
    /// [`Lock`]. Afterwards, all but the newest [`KEPT`] kernels of each variant are
    /// removed.
    pub fn get(
        &self,
        inputs: &Inputs,
        interruptible: &Interruptible,
        steps: &Steps,
        make: impl FnOnce(&Path, &Lock) -> Result<BuiltKernel, Failure>,
    ) -> Result<(CachedKernel, UseLock), Failure> {
        let lock = match self.find(inputs) {
            Some(entry) => return kept(entry, steps),
            None => self.lock(&inputs.name(), steps)?,
        };
        // Another builder may have finished meanwhile.
        if let Some(entry) = self.find(inputs) {
            return kept(entry, steps);
        }
        self.remove_abandoned();
        let failed = |error: io::Error| cache::failed(&self.folder, &error);
        self.check_room()?;
        let work = TempDir::with_prefix_in(WORK, &self.folder).map_err(failed)?;
        interruptible.remove_on_signal(work.path());
        interruptible.remove_on_signal(&lock.path);
        // Held until the end of the build.
        let held = File::open(work.path()).map_err(failed)?;
        held.lock().map_err(failed)?;

        let made = make(work.path(), &lock).map_err(|failure| self.explain(failure))?;
        let entry = self.put(inputs, made, work.path()).map_err(failed)?;
        let entry = entry
            .ok_or_else(|| Failure::new(failure::INTERNAL, "the built kernel is incomplete"))?;
        let held = entry.hold();
        // Kernels that cannot be removed stay.
        let _ = self.prune(KEPT);
        Ok((entry, held))
    }

    /// Writes the record and moves the kernel into place, in this order also on disk.
    fn put(
        &self,
        inputs: &Inputs,
        made: BuiltKernel,
        work: &Path,
    ) -> io::Result<Option<CachedKernel>> {
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
        // Damaged, or with another format version.
        if place.symlink_metadata().is_ok() {
            fs::rename(&place, work.join("old"))?;
        }
        fs::rename(&made.folder, &place)?;
        File::open(&self.folder)?.sync_all()?;
        Ok(CachedKernel::read(place))
    }

    /// Takes the build lock of a kernel; waits for another builder.
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
                    return Ok((lock, "the other build has finished".to_owned()));
                }
                step.now(Lock::status(&path));
                thread::sleep(POLL_INTERVAL);
            }
        })
    }

    /// Returns the free space of the cache's file system in bytes.
    fn room(&self) -> Result<u64, Failure> {
        let found = rustix::fs::statvfs(&self.folder).map_err(io::Error::from);
        let found = found.file_error("read", &self.folder)?;
        Ok(found.f_bavail.saturating_mul(found.f_frsize))
    }

    fn check_room(&self) -> Result<(), Failure> {
        enough(self.room()?, &self.folder)
    }

    /// Adds a remedy if a build failed for lack of space, which compilers report in many ways.
    fn explain(&self, failure: Failure) -> Failure {
        const FULL: u64 = 16 << 20;
        match self.room() {
            Ok(room) if room < FULL => {
                let folder = self.folder.display();
                failure.help(format!(
                    "the file system of {folder} is full; set XDG_CACHE_HOME to a folder with {} of free space",
                    hosted_command::value::Size(ROOM)
                ))
            }
            _ => failure,
        }
    }

    /// Removes all but the newest `keep` kernels of each variant and returns the names of the
    /// removed ones. Kernels in use stay. With `keep` 0, folders without a complete kernel of this
    /// version are removed, too.
    pub fn prune(&self, keep: usize) -> Result<Vec<String>, Failure> {
        self.remove_abandoned();
        let folders = match keep {
            0 => self.all()?,
            _ => self.older(keep)?,
        };
        let mut removed = Vec::new();
        for folder in folders {
            let gone = remove(&folder, &self.folder).file_error("remove the kernel", &folder)?;
            let name = folder.file_name().unwrap_or_default().to_string_lossy();
            removed.extend(gone.then(|| name.into_owned()));
        }
        Ok(removed)
    }

    /// Returns the folders of complete kernels, without the newest `keep` of each variant.
    fn older(&self, keep: usize) -> Result<Vec<PathBuf>, Failure> {
        let mut counts: HashMap<String, usize> = HashMap::new();
        let mut folders = Vec::new();
        for entry in self.entries()? {
            let count = counts.entry(entry.record.inputs.kind).or_default();
            *count += 1;
            if *count > keep {
                folders.push(entry.folder);
            }
        }
        Ok(folders)
    }

    /// Removes work folders and lock files of killed processes. Those that cannot be removed stay.
    fn remove_abandoned(&self) {
        for entry in fs::read_dir(&self.folder).into_iter().flatten().flatten() {
            let path = entry.path();
            let name = entry.file_name();
            let starts = |text: &str| name.as_encoded_bytes().starts_with(text.as_bytes());
            let age = entry.metadata().and_then(|metadata| metadata.modified());
            let is_old = age.is_ok_and(|time| time.elapsed().is_ok_and(|age| age > YOUNG));
            if starts(LOCK) {
                // Taking and releasing the lock removes its file.
                drop(Lock::take(&path));
            }
            let is_free = || File::open(&path).is_ok_and(|file| file.try_lock().is_ok());
            if starts(WORK) && is_old && is_free() {
                let _ = fs::remove_dir_all(&path);
            }
        }
    }
}

fn kept(entry: CachedKernel, steps: &Steps) -> Result<(CachedKernel, UseLock), Failure> {
    let held = entry.hold();
    steps.run("kernel", |_| Ok(((), format!("cached, built {}", entry.record.built))))?;
    Ok((entry, held))
}

fn is_hidden(path: &Path) -> bool {
    path.file_name().is_none_or(|name| name.as_encoded_bytes().starts_with(b"."))
}

/// Removes a kernel unless it is in use. It is renamed first, so that no half-removed kernel is
/// found.
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
    let text = format!("building a kernel requires {needed} MiB; {folder} has {room} MiB left");
    Err(Failure::new(failure::OS_ERROR, text)
        .help("free some space, or set XDG_CACHE_HOME to another folder of yours"))
}

/// Exclusive right to build one kernel. Dropping it removes its file.
#[derive(Debug)]
pub struct Lock {
    file: File,
    path: PathBuf,
}

impl Lock {
    /// Takes the lock if it is free.
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

    /// Reports progress to waiting builders, for display only.
    pub fn note(&self, text: &str) {
        let text = format!("process {}: {text}\n", std::process::id());
        let _ = self.file.set_len(0).and_then(|()| self.file.write_all_at(text.as_bytes(), 0));
    }

    /// Returns the holder's progress.
    fn status(path: &Path) -> String {
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

#[cfg(test)]
mod tests;
