//! A built kernel, and copies of it.

use super::layout::{BZIMAGE, CONFIGURED, COST, HEADERS_FOLDER, MODULES, SYMBOLS, VMLINUX};
use super::store::{RECORD, has_record};
use super::tools::{follow, tool};
use hosted_command::digest::file_digest;
use hosted_command::failure::{self, Failure, IoContext};
use hosted_command::interrupt::Interruptible;
use hosted_command::output_folder::OutputFolder;
use hosted_command::scratch::{self, ScratchFolder};
use hosted_command::store::UseLock;
use std::fs;
use std::path::{Path, PathBuf};

/// All entries of a kernel's folder.
const ENTRIES: [&str; 8] =
    [BZIMAGE, CONFIGURED, COST, HEADERS_FOLDER, RECORD, MODULES, SYMBOLS, VMLINUX];
/// Name prefix of the folders of running copies, which are in users' folders.
const WORK: &str = ".parador-kernel-";

/// A built kernel.
#[derive(Debug)]
pub struct Kernel {
    /// Its folder.
    pub folder: PathBuf,
    /// Keeps a cached kernel in the cache.
    pub held: UseLock,
}

impl Kernel {
    /// Describes the kernel in `folder`, which `held` keeps there.
    pub fn new(folder: PathBuf, held: UseLock) -> Self {
        Self { folder, held }
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
    ///
    /// # Errors
    /// Those of [`check_output`]; the folder cannot be written.
    pub fn copy_to(&self, given: &Path) -> Result<Self, Failure> {
        let output = check_output(given)?;
        let parent = output.parent();
        let failed = |error| Failure::file("create the folder", parent, &error);
        fs::create_dir_all(parent).map_err(failed)?;
        let interruptible = Interruptible::new()?;
        scratch::remove_abandoned(parent, WORK);
        let work = ScratchFolder::new_in(parent, WORK).map_err(failed)?;
        interruptible.remove_on_signal(work.path());
        let copy = work.path().join("kernel");
        let mut command = tool("cp")?;
        command.arg("--recursive").arg("--preserve=mode,links,timestamps");
        follow(command.arg(&self.folder).arg(&copy), "cp", &interruptible, |_| {})?;
        // The old kernel is removed with the work folder.
        output.put(&copy, &interruptible, || check_contents(&output))?;
        Ok(Self { folder: given.to_owned(), held: UseLock::default() })
    }
}

/// Checks that the output folder is new, empty or a kernel that this command has made.
///
/// # Errors
/// It contains something else, which must not be lost; or those of [`OutputFolder::resolve`].
pub fn check_output(given: &Path) -> Result<OutputFolder, Failure> {
    let output = OutputFolder::resolve(given)?;
    check_contents(&output)?;
    Ok(output)
}

fn check_contents(output: &OutputFolder) -> Result<(), Failure> {
    if output.is_empty()? {
        return Ok(());
    }
    let shown = output.path().display();
    let text = match output.foreign_entry(&ENTRIES)? {
        Some(entry) => {
            format!(
                "{shown} is no folder of `parador kernel build`: it contains {}",
                entry.display()
            )
        }
        None if has_record(output.path()) => return Ok(()),
        None => format!("{shown} is no folder of `parador kernel build`: no valid {RECORD} in it"),
    };
    Err(Failure::new(failure::USAGE, text).help("use a folder that does not exist"))
}

#[cfg(test)]
mod tests;
