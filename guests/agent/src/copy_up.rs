//! File systems in memory that begin with a copy of the folder below them, which podman's `--tmpfs`
//! and `--read-only` want.

use rustix::fs::{self, AtFlags, CWD, FileType, Gid, Mode, Uid};
use rustix::process::fchdir;
use std::fs::{self as files, File};
use std::io;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, symlink};
use std::path::Path;

/// Copies what a folder contains to a place that hides it. The working directory is `/` then.
///
/// # Errors
/// A file cannot be read, or the memory does not suffice.
pub fn fill(below: &File, place: &Path) -> io::Result<()> {
    // Its path leads to the new file system now.
    fchdir(below)?;
    let filled = copy_folder(Path::new("."), place);
    std::env::set_current_dir("/")?;
    filled
}

fn copy_folder(from: &Path, to: &Path) -> io::Result<()> {
    for entry in files::read_dir(from)? {
        let entry = entry?;
        copy(&entry.path(), &to.join(entry.file_name()))?;
    }
    Ok(())
}

fn copy(from: &Path, to: &Path) -> io::Result<()> {
    let found = from.symlink_metadata()?;
    match FileType::from_raw_mode(found.mode()) {
        FileType::Directory => {
            files::DirBuilder::new().mode(0o700).create(to)?;
            copy_folder(from, to)?;
        }
        FileType::Symlink => symlink(files::read_link(from)?, to)?,
        FileType::RegularFile => files::copy(from, to).map(drop)?,
        // Sockets have no meaning without their servers.
        FileType::Socket => return Ok(()),
        kind => fs::mknodat(CWD, to, kind, Mode::RUSR | Mode::WUSR, found.rdev())?,
    }
    give_owner(&found, to)
}

/// Sets owner and mode, in this order: a change of the owner clears set-user-ID bits.
fn give_owner(found: &files::Metadata, to: &Path) -> io::Result<()> {
    let (user, group) = (Uid::from_raw(found.uid()), Gid::from_raw(found.gid()));
    fs::chownat(CWD, to, Some(user), Some(group), AtFlags::SYMLINK_NOFOLLOW)?;
    if found.file_type().is_symlink() {
        return Ok(());
    }
    Ok(fs::chmod(to, Mode::from_raw_mode(found.mode() & 0o7777))?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    #[test]
    fn folders_are_copied_with_links_and_modes() {
        let folder = tempfile::tempdir().expect("a folder");
        let [from, to] = ["from", "to"].map(|name| folder.path().join(name));
        files::create_dir_all(from.join("inner")).expect("a folder");
        files::create_dir(&to).expect("a folder");
        files::write(from.join("inner/file"), "text").expect("a file");
        let mode = |path: &Path, mode: u32| {
            files::set_permissions(path, files::Permissions::from_mode(mode)).expect("a mode");
        };
        mode(&from.join("inner/file"), 0o640);
        mode(&from.join("inner"), 0o1770);
        symlink("inner/file", from.join("link")).expect("a link");
        fs::mknodat(CWD, from.join("fifo"), FileType::Fifo, Mode::from_raw_mode(0o600), 0)
            .expect("a FIFO");
        copy_folder(&from, &to).expect("a copy");
        let found = |name: &str| to.join(name).symlink_metadata().expect("a file");
        assert_eq!(files::read_to_string(to.join("link")).expect("a file"), "text");
        assert_eq!(found("inner/file").mode() & 0o7777, 0o640);
        assert_eq!(found("inner").mode() & 0o7777, 0o1770);
        assert!(found("link").is_symlink());
        assert_eq!(FileType::from_raw_mode(found("fifo").mode()), FileType::Fifo);
    }
}
