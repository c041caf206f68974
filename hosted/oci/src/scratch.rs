//! Scratch disks: sparse files with an ext4 file system, for changes of containers' root
//! directories. They are not in the runtime folder, whose files are in memory.

use crate::refuse;
use hosted_command::failure::{Failure, IoContext};
use hosted_command::value::Size;
use hosted_monitor::config::disk::{DiskConfig, Format};
use std::ffi::OsString;
use std::fs::{self, File};
use std::io;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// Program that makes the file system (e2fsprogs).
const PROGRAM: &str = "mke2fs";
/// Nothing survives the VM, so there is no journal; the guest's kernel initializes the rest.
const OPTIONS: [&str; 10] = [
    "-q",
    "-F",
    "-t",
    "ext4",
    "-m",
    "0",
    "-O",
    "^has_journal,^resize_inode",
    "-E",
    "lazy_itable_init=1,nodiscard,root_owner=0:0",
];
/// Folder of the disks, on a disk of the host.
const FOLDER: &str = "/var/tmp";
/// Prefix of their names.
const PREFIX: &str = "parador-";

/// Returns the path of the disk of a VM with this folder, whose name is unique.
pub fn path(vm_folder: &Path) -> PathBuf {
    let mut name = OsString::from(PREFIX);
    name.push(vm_folder.file_name().unwrap_or_default());
    Path::new(FOLDER).join(name)
}

/// Makes the scratch disk of a VM.
///
/// # Errors
/// The file exists, e2fsprogs is missing, or the file system has no space for its tables.
pub fn make(path: &Path, size: Size) -> Result<DiskConfig, Failure> {
    // Others can write to the folder: the file must be new.
    let made = File::options().write(true).create_new(true).mode(0o600).open(path);
    made.and_then(|file| file.set_len(size.0)).file_error("create", path)?;
    let mut command = Command::new(PROGRAM);
    command.args(OPTIONS).arg(path).stdin(Stdio::null());
    let ended = command.output().start_error(PROGRAM)?;
    if !ended.status.success() {
        let text = String::from_utf8_lossy(&ended.stderr);
        return Err(refuse(format!("{PROGRAM} {}: {}", path.display(), text.trim())));
    }
    Ok(DiskConfig {
        path: path.to_owned(),
        ro: false,
        overlay: false,
        backing: None,
        id: None,
        format: Some(Format::Raw),
    })
}

/// Removes a scratch disk, which may be gone.
///
/// # Errors
/// It cannot be removed.
pub fn remove(path: &Path) -> Result<(), Failure> {
    match fs::remove_file(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        removed => removed.file_error("remove", path),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::MetadataExt;

    #[test]
    fn disks_are_sparse() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("disk");
        let disk = make(&path, Size(8 << 30)).unwrap();
        let found = disk.path.metadata().unwrap();
        assert!(found.len() == 8 << 30 && found.blocks() * 512 < 8 << 20, "{}", found.blocks());
        assert!(make(&path, Size(8 << 30)).is_err());
        remove(&path).unwrap();
        remove(&path).unwrap();
        assert_eq!(super::path(Path::new("/run/oci-1")), Path::new("/var/tmp/parador-oci-1"));
    }
}
