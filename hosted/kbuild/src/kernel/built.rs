//! A built kernel, and copies of it.

use super::layout::VMLINUX;
use super::tools::{follow, tool};
use hosted_command::digest::file_digest;
use hosted_command::failure::{self, Failure, IoContext};
use hosted_command::interrupt::Interruptible;
use hosted_command::store::UseLock;
use std::fs;
use std::path::{Path, PathBuf};
use tempfile::TempDir;

/// A built kernel.
#[derive(Debug)]
pub struct Kernel {
    /// Its folder.
    pub folder: PathBuf,
    /// Keeps a cached kernel in the cache.
    _held: Option<UseLock>,
}

impl Kernel {
    /// Describes the kernel in `folder`, which `held` keeps there.
    pub fn new(folder: PathBuf, held: Option<UseLock>) -> Self {
        Self { folder, _held: held }
    }

    /// Returns the path of the kernel.
    pub fn vmlinux(&self) -> PathBuf {
        self.folder.join(VMLINUX)
    }

    /// Returns the SHA-256 of the kernel in hexadecimal.
    pub fn digest(&self) -> Result<String, Failure> {
        let path = self.vmlinux();
        file_digest(&path).file_error("read", &path)
    }

    /// Copies the kernel to another folder, which appears complete or not at all.
    pub fn copy_to(&self, output: &Path) -> Result<Self, Failure> {
        let parent = match output.parent() {
            Some(parent) if parent != Path::new("") => parent,
            _ => Path::new("."),
        };
        let failed = |path: &Path, error| Failure::file("create the folder", path, &error);
        fs::create_dir_all(parent).map_err(|error| failed(parent, error))?;
        if output.exists() && !output.join(VMLINUX).is_file() {
            let empty = fs::read_dir(output).is_ok_and(|mut entries| entries.next().is_none());
            if !empty {
                let message = format!("{} contains other files", output.display());
                return Err(Failure::new(failure::USAGE, message)
                    .help("use a folder that does not exist, or one with a kernel"));
            }
        }
        let interruptible = Interruptible::new()?;
        let work =
            TempDir::with_prefix_in(".partial-", parent).map_err(|error| failed(parent, error))?;
        interruptible.remove_on_signal(work.path());
        let copy = work.path().join("kernel");
        let mut command = tool("cp")?;
        command.arg("--recursive").arg("--preserve=mode,links,timestamps");
        follow(command.arg(&self.folder).arg(&copy), "cp", &interruptible, |_| {})?;
        let put = |from: &Path, to: &Path| fs::rename(from, to).file_error("move", from);
        if output.exists() {
            put(output, &work.path().join("old"))?;
        }
        put(&copy, output)?;
        Ok(Self { folder: output.to_owned(), _held: None })
    }
}
