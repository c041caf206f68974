//! Kernel store in the user's cache: each kernel in a folder named by the digest of its inputs
//! ([`hosted_command::store`]).

use super::layout::{BZIMAGE, CONFIGURED, HEADERS_FOLDER, MODULES, SYMBOLS, VMLINUX};
use hosted_command::digest::{digest, file_digest};
use hosted_command::failure::{self, Failure};
use hosted_command::interrupt::Interruptible;
use hosted_command::lock::Lock;
use hosted_command::messages::{Level, say};
use hosted_command::steps::Steps;
use hosted_command::store::{self, Kind, UseLock};
use hosted_command::{cache, trust};
use serde::{Deserialize, Serialize};
use std::collections::HashMap;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

/// Kernels in the cache.
pub const KIND: Kind = Kind { folder: "kernels", record: RECORD, item: "kernel" };
/// File in a kernel's folder with its [`Record`].
pub const RECORD: &str = "kernel.json";
/// Format version of the record; folders with another one are ignored.
const FORMAT: u32 = 1;
/// Number of kernels that are kept.
pub const KEPT: usize = 3;
/// Free space required by a build in bytes: the tree with its objects and DWARF takes 2.5 GB.
pub const ROOM: u64 = 3 << 30;

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
    /// Reads the kernel in `folder`; `None` if it is incomplete, or, with a warning, if other users
    /// can change it.
    fn read(folder: PathBuf) -> Option<Self> {
        let record = read_record(&folder)?;
        let vmlinux = folder.join(VMLINUX);
        let named = folder.file_name().is_some_and(|name| name == &*record.inputs.name());
        let whole = [BZIMAGE, SYMBOLS, CONFIGURED].iter().all(|name| folder.join(name).is_file())
            && [MODULES, HEADERS_FOLDER].iter().all(|name| folder.join(name).is_dir())
            && fs::metadata(&vmlinux).is_ok_and(|file| file.len() == record.bytes);
        if record.format != FORMAT || !named || !whole {
            return None;
        }
        if let Err(failure) = trust::check(&vmlinux) {
            let (Failure::Simple { message: reason, .. } | Failure::Report { text: reason, .. }) =
                failure;
            say(Level::Warn, &format!("the cached kernel {reason}"));
            return None;
        }
        let used = fs::metadata(&folder).and_then(|folder| folder.modified()).ok()?;
        Some(Self { folder, record, used })
    }

    /// Records a use and keeps the kernel until the result is dropped; `None`: another process has
    /// removed it.
    pub fn hold(&self) -> Option<UseLock> {
        KIND.hold(&self.folder)
    }
}

/// Reads the record of the kernel in `folder`.
fn read_record(folder: &Path) -> Option<Record> {
    serde_json::from_slice(&fs::read(folder.join(RECORD)).ok()?).ok()
}

/// Returns whether `folder` has the record of a built kernel, complete or not, of any version.
pub fn has_record(folder: &Path) -> bool {
    read_record(folder).is_some()
}

/// If `folder` has a cached kernel or a copy of one, records a use and keeps it until the result is
/// dropped.
///
/// # Errors
/// Another process removes the kernel: code 66.
pub fn hold(folder: &Path) -> Result<UseLock, Failure> {
    let folder = if folder == Path::new("") { Path::new(".") } else { folder };
    if !folder.join(RECORD).is_file() {
        return Ok(UseLock::default());
    }
    KIND.hold(folder).ok_or_else(|| {
        let text = format!("another process removes the kernel in {}", folder.display());
        Failure::new(failure::MISSING_FILE, text).help("`parador kernel build` builds one")
    })
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
    entries: store::Store,
}

impl Store {
    /// Opens the store and creates its folder if necessary.
    pub fn open() -> Result<Self, Failure> {
        Ok(Self { entries: store::Store::open(KIND)? })
    }

    /// Opens the store if its folder exists.
    pub fn existing() -> Result<Option<Self>, Failure> {
        Ok(store::Store::existing(KIND)?.map(|entries| Self { entries }))
    }

    /// Returns the folder of the store.
    pub fn folder(&self) -> &Path {
        self.entries.folder()
    }

    /// Returns all complete kernels, most recently used first.
    pub fn entries(&self) -> Result<Vec<CachedKernel>, Failure> {
        let mut entries: Vec<_> =
            self.entries.all()?.into_iter().filter_map(CachedKernel::read).collect();
        entries.sort_by(|a, b| b.used.cmp(&a.used).then_with(|| a.folder.cmp(&b.folder)));
        Ok(entries)
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
        let make = |work: &Path, lock: &Lock| {
            self.entries.check_room(ROOM)?;
            let made = make(work, lock)?;
            let recorded = write_record(inputs, &made);
            recorded.map_err(|error| cache::failed(self.folder(), &error))?;
            Ok(made.folder)
        };
        let (entry, held, is_new) =
            self.entries.get(&inputs.name(), interruptible, steps, find, make)?;
        if is_new {
            // Kernels that cannot be removed stay.
            let _ = self.prune(KEPT, |_| {});
        } else {
            steps.run("kernel", |_| Ok(((), format!("cached, built {}", entry.record.built))))?;
        }
        Ok((entry, held))
    }

    /// Removes all but the newest `keep` kernels of each variant and calls `removed` with the name
    /// of each removed one. Kernels in use stay. With `keep` 0, folders without a complete kernel
    /// of this version are removed, too.
    ///
    /// # Errors
    /// A kernel cannot be removed; the others are.
    pub fn prune(&self, keep: usize, removed: impl FnMut(&str)) -> Result<(), Failure> {
        let folders = match keep {
            0 => self.entries.all()?,
            _ => self.older(keep)?,
        };
        self.entries.remove_each(folders, removed)
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
}

/// Reads the complete kernel in `folder`, if `vmlinux` has the recorded digest.
fn find(folder: &Path) -> Option<CachedKernel> {
    let entry = CachedKernel::read(folder.to_owned())?;
    let digest = file_digest(&entry.folder.join(VMLINUX)).ok()?;
    if digest == entry.record.sha256 {
        return Some(entry);
    }
    let place = entry.folder.display();
    say(Level::Warn, &format!("the kernel in {place} is damaged; rebuilding it"));
    None
}

/// Writes the record of a built kernel.
fn write_record(inputs: &Inputs, made: &BuiltKernel) -> io::Result<()> {
    let vmlinux = made.folder.join(VMLINUX);
    let record = Record {
        format: FORMAT,
        inputs: inputs.clone(),
        linux: made.linux.clone(),
        sha256: file_digest(&vmlinux)?,
        bytes: fs::metadata(&vmlinux)?.len(),
        built: humantime::format_rfc3339_seconds(SystemTime::now()).to_string(),
    };
    fs::write(made.folder.join(RECORD), serde_json::to_vec_pretty(&record)?)
}

#[cfg(test)]
mod tests;
