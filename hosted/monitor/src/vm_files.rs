//! Files of a VM that stay open over its restarts: kernel, disks and shared directories.

use crate::config::Config;
use crate::disk::{self, Disk};
use crate::share::Share;
use hosted_command::failure::{self, Failure, IoContext};
use hosted_kbuild::kernel::{self, UseLock};
use std::collections::HashSet;
use std::fs::File;
use std::path::{Path, PathBuf};
use vmm_mem::large::Large;

/// Open files of a VM.
pub struct VmFiles {
    /// Path of the kernel.
    pub kernel: PathBuf,
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
        let (kernel, held) = kernel_file(config.vm.kernel.as_deref())?;
        let disks = config.disk.iter().enumerate();
        let disks = disks.map(|(index, disk)| disk.open(index)).collect::<Result<_, _>>()?;
        Ok(Self { kernel, _held: held, disks, shares: open_shares(config)? })
    }

    /// Reads the kernel.
    pub fn read_kernel(&self) -> Result<Large, Failure> {
        let read = File::open(&self.kernel).and_then(|mut file| Large::read(&mut file));
        read.file_error("read", &self.kernel)
    }

    /// Closes the files of an exited VM.
    pub fn close(self) {
        disk::release(self.disks);
    }
}

/// Returns the named kernel, else the cached one, and the lock that keeps it in the cache.
fn kernel_file(named: Option<&Path>) -> Result<(PathBuf, UseLock), Failure> {
    let keep = |path: &Path| kernel::hold(path.parent().unwrap_or(Path::new("")));
    match named {
        Some(path) => Ok((path.to_owned(), keep(path))),
        None => {
            let cached = kernel::cached()?;
            let path = cached.vmlinux();
            let held = keep(&path);
            Ok((path, held))
        }
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
