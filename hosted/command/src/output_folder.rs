//! Output folder of a command: it appears complete or not at all, and an older one is replaced by
//! a single step.
//!
//! A command replaces only what it has made itself: [`OutputFolder::foreign_entry`] finds the rest.

use crate::failure::{self, Failure, IoContext};
use crate::interrupt::Interruptible;
use rustix::fs::{AtFlags, CWD, RenameFlags, StatxAttributes, StatxFlags, renameat_with, statx};
use rustix::io::Errno;
use std::env;
use std::fs::{self, File};
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

/// Longest chain of symbolic links, as that of Linux (path_resolution(7)).
const LINKS: u32 = 40;

/// Folder that a command creates or replaces.
#[derive(Debug)]
pub struct OutputFolder {
    /// Path with a file name, which is no symbolic link.
    path: PathBuf,
}

impl OutputFolder {
    /// Follows symbolic links at the end of `given`, so that a link stays and its target is
    /// replaced.
    ///
    /// # Errors
    /// The target is no folder, or one that cannot be replaced: a mount point, the current folder
    /// or one above it.
    pub fn resolve(given: &Path) -> Result<Self, Failure> {
        // Without separators at the end, which would make the system follow a link.
        let mut path: PathBuf = given.components().collect();
        for _ in 0..LINKS {
            let Ok(target) = fs::read_link(&path) else { break };
            path = parent(&path).join(target).components().collect();
        }
        let wrong = |text: &str, help: String| {
            let text = format!("the output folder {} {text}", given.display());
            Err(Failure::new(failure::USAGE, text).help(help))
        };
        let beside = || "use a folder that does not exist".to_owned();
        match fs::metadata(&path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Ok(found) if !found.is_dir() => return wrong("is not a folder", beside()),
            found => {
                found.file_error("read", given)?;
                let real = path.canonicalize().file_error("find", given)?;
                let example = real.join("NAME");
                let inside =
                    || format!("use a new folder in it, for example `-o {}`", example.display());
                if env::current_dir().is_ok_and(|current| current.starts_with(&real)) {
                    let text = "is or contains the current folder, which cannot be replaced";
                    return wrong(text, inside());
                }
                if is_mount_point(&real).file_error("read", given)? {
                    return wrong("is a mount point, which cannot be replaced", inside());
                }
                if path.file_name().is_none() {
                    path = real;
                }
            }
        }
        match path.file_name() {
            Some(_) => Ok(Self { path }),
            None => wrong("does not exist and has no name", beside()),
        }
    }

    /// Returns the path.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Returns the folder that contains this one.
    pub fn parent(&self) -> &Path {
        parent(&self.path)
    }

    /// Returns the folder of this name in `parent`, another path of the same folder.
    pub fn in_parent(&self, parent: &Path) -> Self {
        Self { path: parent.join(self.path.file_name().unwrap_or_default()) }
    }

    /// Returns whether the folder does not exist or has no entries.
    ///
    /// # Errors
    /// It cannot be read.
    pub fn is_empty(&self) -> Result<bool, Failure> {
        Ok(self.entries()?.is_empty())
    }

    /// Returns the first entry by name that is not in `known`.
    ///
    /// # Errors
    /// The folder cannot be read.
    pub fn foreign_entry(&self, known: &[&str]) -> Result<Option<PathBuf>, Failure> {
        let is_known =
            |path: &PathBuf| known.iter().any(|name| path.file_name() == Some(name.as_ref()));
        Ok(self.entries()?.into_iter().filter(|path| !is_known(path)).min())
    }

    fn entries(&self) -> Result<Vec<PathBuf>, Failure> {
        match fs::read_dir(&self.path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(Vec::new()),
            entries => entries
                .and_then(|entries| entries.map(|entry| Ok(entry?.path())).collect())
                .file_error("read", &self.path),
        }
    }

    /// Moves the folder `made` into place, once its file system has written it and `check` allows
    /// it. `made` is then the old folder, if there was one. No cleanup at a signal runs meanwhile.
    ///
    /// # Errors
    /// That of `check`; or the folder cannot be moved, and the old one stays.
    pub fn put(
        &self,
        made: &Path,
        interruptible: &Interruptible,
        check: impl FnOnce() -> Result<(), Failure>,
    ) -> Result<(), Failure> {
        sync(made).file_error("write", made)?;
        interruptible.uninterrupted(|| {
            check()?;
            replace(made, &self.path).file_error("replace", &self.path)
        })?;
        let parent = self.parent();
        File::open(parent).and_then(|folder| folder.sync_all()).file_error("write", parent)
    }
}

/// Returns the folder that contains `path`.
fn parent(path: &Path) -> &Path {
    path.parent().filter(|parent| *parent != Path::new("")).unwrap_or(Path::new("."))
}

fn is_mount_point(path: &Path) -> io::Result<bool> {
    let is_root = StatxAttributes::MOUNT_ROOT;
    match statx(CWD, path, AtFlags::empty(), StatxFlags::BASIC_STATS) {
        Ok(found) if found.stx_attributes_mask.contains(is_root) => {
            Ok(found.stx_attributes.contains(is_root))
        }
        // Before Linux 5.8: a mount of another file system.
        _ => Ok(fs::metadata(path)?.dev() != fs::metadata(path.join(".."))?.dev()),
    }
}

/// Writes all data of the file system of a folder to its disk: after a loss of power, files that
/// were moved into place before would be empty.
///
/// # Errors
/// The folder cannot be opened, or its file system cannot write.
pub fn sync(folder: &Path) -> io::Result<()> {
    Ok(rustix::fs::syncfs(File::open(folder)?)?)
}

/// Moves the folder `made` to `place`, and the old one, if there is one, to `made`.
///
/// # Errors
/// A folder cannot be moved; the old one stays.
pub fn replace(made: &Path, place: &Path) -> io::Result<()> {
    swap(made, place, |a, b| renameat_with(CWD, a, CWD, b, RenameFlags::EXCHANGE))
}

/// Does the same as [`replace`].
fn swap(
    made: &Path,
    place: &Path,
    exchange: impl FnOnce(&Path, &Path) -> Result<(), Errno>,
) -> io::Result<()> {
    if place.symlink_metadata().is_err() {
        return fs::rename(made, place);
    }
    match exchange(made, place) {
        // The file system cannot exchange.
        Err(Errno::INVAL | Errno::NOSYS | Errno::OPNOTSUPP) => swap_by_name(made, place),
        result => Ok(result?),
    }
}

/// Does the same as [`swap`] without an exchange. The old folder gets a name beside `place` for the
/// time in between, which no cleanup removes.
fn swap_by_name(made: &Path, place: &Path) -> io::Result<()> {
    let mut prefix = place.file_name().unwrap_or_default().to_owned();
    prefix.push(".old-");
    let aside = tempfile::Builder::new().prefix(&prefix).tempdir_in(parent(place))?;
    // Replaces the empty folder.
    fs::rename(place, aside.path())?;
    let aside = aside.keep();
    if let Err(error) = fs::rename(made, place) {
        fs::rename(&aside, place)?;
        return Err(error);
    }
    fs::rename(&aside, made)
}

#[cfg(test)]
mod tests;
