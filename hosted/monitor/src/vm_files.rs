//! Files of a VM that stay open over its restarts: kernel, disks and shared directories.

use crate::config::Config;
use crate::disk::{self, Disk};
use crate::share::Share;
use hosted_command::failure::{self, Failure, IoContext};
use hosted_command::release;
use hosted_kbuild::kernel::{self, UseLock};
use std::collections::HashSet;
use std::fs::File;
use std::path::{Path, PathBuf};
use vmm_mem::large::Large;

/// Open files of a VM.
pub struct VmFiles {
    /// Path of the kernel.
    pub kernel: PathBuf,
    /// The kernel was installed with `parador`, and must be of the same release.
    is_installed: bool,
    /// Keeps a cached kernel until the VM ends: a restart reads it again.
    _held: UseLock,
    /// Disks, locked for this VM.
    pub disks: Vec<Disk>,
    /// Shared directories.
    pub shares: Vec<Share>,
}

impl VmFiles {
    /// Opens the files of a configuration.
    pub fn open(config: &Config) -> Result<Self, Failure> {
        let KernelFile { path: kernel, held, is_installed } =
            KernelFile::find(config.vm.kernel.as_deref())?;
        let disks = config.disk.iter().enumerate();
        let disks = disks.map(|(index, disk)| disk.open(index)).collect::<Result<_, _>>()?;
        Ok(Self { kernel, is_installed, _held: held, disks, shares: open_shares(config)? })
    }

    /// Reads the kernel.
    ///
    /// # Errors
    /// It cannot be read, or belongs to another release of Parador.
    pub fn read_kernel(&self) -> Result<Large, Failure> {
        let read = File::open(&self.kernel).and_then(|mut file| Large::read(&mut file));
        let bytes = read.file_error("read", &self.kernel).map_err(|failure| {
            failure.help("`parador kernel build` builds a kernel for the process back end")
        })?;
        let check = if self.is_installed { release::check } else { release::check_if_marked };
        check(&bytes, &self.kernel)?;
        Ok(bytes)
    }

    /// Closes the files of an exited VM.
    pub fn close(self) {
        disk::release(self.disks);
    }
}

/// The kernel of a VM.
pub struct KernelFile {
    path: PathBuf,
    /// Keeps it in the cache.
    held: UseLock,
    is_installed: bool,
}

impl KernelFile {
    /// Returns the named kernel, else the one that was installed with `parador`, else the cached
    /// one.
    ///
    /// # Errors
    /// None is named, installed or cached; or another user can change the installed one.
    pub fn find(named: Option<&Path>) -> Result<Self, Failure> {
        let new = |path: PathBuf, is_installed| {
            let held = kernel::hold(path.parent().unwrap_or(Path::new("")));
            Self { path, held, is_installed }
        };
        if let Some(path) = named {
            return Ok(new(path.to_owned(), false));
        }
        if let Some(path) = kernel::installed()? {
            return Ok(new(path, true));
        }
        let cached = kernel::cached()?;
        Ok(new(cached.vmlinux(), false))
    }

    /// Returns the folder of the kernel's modules, whose name is the kernel's release, if it has
    /// modules.
    pub fn modules(&self) -> Option<PathBuf> {
        kernel::modules_of(&self.path)
    }
}

/// Opens the configured shared directories.
fn open_shares(config: &Config) -> Result<Vec<Share>, Failure> {
    let opened: Vec<_> = config.share.iter().map(|share| share.open()).collect::<Result<_, _>>()?;
    let tags: HashSet<_> = opened.iter().map(|share| share.record.tag).collect();
    if tags.len() < opened.len() {
        return Err(Failure::new(failure::BAD_CONFIG, "two shared directories have the same tag"));
    }
    Ok(opened)
}
