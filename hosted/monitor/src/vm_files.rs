//! Files of a VM that stay open over its restarts: kernel, disks and shared directories.

use crate::config::Config;
use crate::descriptors::duplicate_inherited;
use crate::disk::{self, Disk};
use crate::share::Share;
use hosted_command::failure::{self, Failure, IoContext};
use hosted_command::{input, release};
pub use hosted_kbuild::kernel::KernelFile;
use hosted_loader::KernelReader;
use std::collections::HashSet;
use std::fs::File;

/// Open files of a VM.
pub struct VmFiles {
    /// Descriptor of `--event-fd`, until the supervisor takes it.
    pub events: Option<File>,
    /// Kernel, which a restart reads again.
    pub kernel: KernelFile,
    /// Disks, locked for this VM.
    pub disks: Vec<Disk>,
    /// Shared directories.
    pub shares: Vec<Share>,
}

impl VmFiles {
    /// Opens the files of a configuration.
    pub fn open(config: &Config) -> Result<Self, Failure> {
        // First, so that the number is that of none of these files.
        let events = config.vm.event_fd.map(open_events).transpose()?;
        let kernel = KernelFile::find(config.vm.kernel.as_deref())?;
        let disks = config.disk.iter().enumerate();
        let disks = disks.map(|(index, disk)| disk.open(index)).collect::<Result<_, _>>()?;
        Ok(Self { events, kernel, disks, shares: open_shares(config)? })
    }

    /// Opens the kernel.
    ///
    /// # Errors
    /// It cannot be read, or belongs to another release of Parador.
    pub fn open_kernel(&self) -> Result<KernelReader, Failure> {
        let KernelFile { path, is_installed, .. } = &self.kernel;
        let opened =
            input::open(path).and_then(|file| KernelReader::new(file).file_error("read", path));
        let kernel = opened.map_err(|failure| {
            failure.help("`parador kernel build` builds a kernel for the process back end")
        })?;
        match is_installed {
            true => release::check(kernel.parts(), path)?,
            false => release::check_if_marked(kernel.parts(), path)?,
        }
        Ok(kernel)
    }

    /// Closes the files of an exited VM.
    pub fn close(self) {
        disk::release(self.disks);
    }
}

/// Duplicates the descriptor of `--event-fd`.
fn open_events(number: u32) -> Result<File, Failure> {
    duplicate_inherited(number).map_err(|error| {
        let text = format!("cannot write to descriptor {number}: {}", failure::describe(&error));
        Failure::new(failure::BAD_CONFIG, text).help(
            "--event-fd takes the number of an open file or pipe, as in --event-fd 9 9>events",
        )
    })
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
