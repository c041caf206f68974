//! The kernel that a VM boots, and its modules.

use super::layout::MODULES;
use super::store::hold;
use hosted_command::failure::Failure;
use hosted_command::store::UseLock;
use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

/// End of the releases of pre-virtualized kernels (`CONFIG_LOCALVERSION`).
const SUFFIX: &[u8] = b"-parador";

/// The kernel of a VM.
#[derive(Debug)]
pub struct KernelFile {
    /// Path.
    pub path: PathBuf,
    /// The kernel was installed with `parador`, and must be of the same release.
    pub is_installed: bool,
    /// Keeps it in the cache.
    _held: UseLock,
}

impl KernelFile {
    /// Returns the named kernel, else the one that was installed with `parador`, else the cached
    /// one.
    ///
    /// # Errors
    /// None is named, installed or cached; another user can change the installed one; or another
    /// process removes the named one.
    pub fn find(named: Option<&Path>) -> Result<Self, Failure> {
        let new = |path: PathBuf, is_installed| {
            let held = hold(path.parent().unwrap_or(Path::new("")))?;
            Ok(Self { path, is_installed, _held: held })
        };
        if let Some(path) = named {
            return new(path.to_owned(), false);
        }
        if let Some(path) = super::installed()? {
            return new(path, true);
        }
        let kernel = super::cached()?;
        Ok(Self { path: kernel.vmlinux(), is_installed: false, _held: kernel.held })
    }

    /// Returns the folder of the kernel's modules, whose name is the kernel's release: beside a
    /// built kernel, or where a package has installed them. `None`: there is none.
    pub fn modules(&self) -> Option<PathBuf> {
        let folder = self.path.parent()?;
        let places = [folder.join(MODULES).join("lib/modules"), folder.join("../modules")];
        let entries = places.iter().filter_map(|place| fs::read_dir(place).ok()).flatten();
        let folders = entries.flatten().map(|entry| entry.path()).filter(|path| path.is_dir());
        folders.filter(|path| path.as_os_str().as_bytes().ends_with(SUFFIX)).max()
    }
}
