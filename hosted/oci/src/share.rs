//! The directory that a VM shares, [`POD`](proto::agent::POD) in the guest: root directories and
//! bind mounts of its containers.
//!
//! | path below the VM's folder | content |
//! |---|---|
//! | `mount-points` | folders and empty files, on which the host mounts |
//! | `share` | the same, mounted read-only: what the VM shares |
//! | `share/ID/root` | root directory of container ID |
//! | `share/ID/0`, `share/ID/1` ... | its bind mounts, in the order of the configuration |
//! | `share/ID/modules` | the modules of the guest's kernel, if it is the VM's first container |
//!
//! The guest may be hostile, and the host follows paths in this directory. Hence it can change what
//! is mounted, but none of the folders on the way. A mount has all of its attributes before it
//! appears: there is no moment at which a read-only one can be written.

use crate::mounts::MountPlan;
use host_linux::sys::{MountChange, change_mounts};
use hosted_command::failure::{Failure, IoContext};
use rustix::fs::{CWD, FileType, Mode, fstat};
use rustix::mount::{
    MountPropagationFlags, MoveMountFlags, OpenTreeFlags, UnmountFlags, mount_change, move_mount,
    open_tree, unmount,
};
use std::ffi::OsString;
use std::fs::{self, DirBuilder, File};
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::ffi::OsStringExt;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};

/// Name of the shared directory in the VM's folder.
const SHARE: &str = "share";
/// Name of the folder with the mount points.
const MOUNT_POINTS: &str = "mount-points";
/// Root directory in a container's part of them.
const ROOT: &str = "root";
/// Folder with the modules of the guest's kernel there.
const MODULES: &str = "modules";
/// Mounts of this process (proc(5)).
const MOUNTS: &str = "/proc/self/mountinfo";

/// Returns the shared directory of a VM.
pub fn path(vm_folder: &Path) -> PathBuf {
    vm_folder.join(SHARE)
}

/// Returns the path of a container's root below the shared directory.
pub fn root_of(id: &str) -> PathBuf {
    Path::new(id).join(ROOT)
}

/// Returns the path of a bind mount below the shared directory.
pub fn bind_of(id: &str, index: usize) -> PathBuf {
    Path::new(id).join(index.to_string())
}

/// Returns the path of the modules of the guest's kernel below the shared directory, if they were
/// mounted.
pub fn modules_of(vm_folder: &Path, id: &str) -> Option<PathBuf> {
    let modules = Path::new(id).join(MODULES);
    path(vm_folder).join(&modules).is_dir().then_some(modules)
}

/// Makes the shared directory of a VM.
///
/// # Errors
/// A folder cannot be made or mounted: Linux before 5.12 makes no mount read-only in this way.
pub fn make(vm_folder: &Path) -> Result<(), Failure> {
    let (points, share) = (vm_folder.join(MOUNT_POINTS), path(vm_folder));
    // Only root enters it: the guest's set-user-ID programs are not for the host's users.
    for folder in [&points, &share] {
        DirBuilder::new().mode(Mode::RWXU.bits()).create(folder).file_error("create", folder)?;
    }
    let mount = || {
        let tree = copy_tree(&points, false)?;
        change(&tree, true, false)?;
        attach(&tree, &share)?;
        // A group of its own: an unmount ends copies in other mount namespaces, too.
        mount_change(&share, MountPropagationFlags::SHARED).map_err(io::Error::from)
    };
    mount().file_error("mount", &share)
}

/// Unmounts the shared directory of a VM, with all that is mounted there. It may be gone.
///
/// # Errors
/// The mounts cannot be read, or it cannot be unmounted.
pub fn unmount_shared(vm_folder: &Path) -> Result<(), Failure> {
    let share = path(vm_folder);
    unmount_those(|place| place == share)
}

/// Mounts the root and the bind mounts of a container into the shared directory, and the modules of
/// the guest's kernel if there are any.
///
/// # Errors
/// One does not exist or cannot be mounted.
pub fn mount_all(
    vm_folder: &Path,
    id: &str,
    rootfs: &Path,
    mounts: &[MountPlan],
    modules: Option<&Path>,
) -> Result<(), Failure> {
    let own = vm_folder.join(MOUNT_POINTS).join(id);
    DirBuilder::new().mode(Mode::RWXU.bits()).create(&own).file_error("create", &own)?;
    let bind = |source: &Path, name: &Path, options: BindOptions| {
        let place = vm_folder.join(MOUNT_POINTS).join(name);
        let tree = copy_tree(source, options.is_recursive);
        let tree = tree.file_error("mount", source)?;
        let found = fstat(&tree).map_err(io::Error::from).file_error("mount", source)?;
        match FileType::from_raw_mode(found.st_mode) == FileType::Directory {
            true => fs::create_dir(&place),
            false => File::create_new(&place).map(drop),
        }
        .file_error("create", &place)?;
        let mounted = change(&tree, options.is_read_only, options.follows)
            .and_then(|()| attach(&tree, &path(vm_folder).join(name)));
        mounted.file_error("mount", source)
    };
    let root = BindOptions { is_recursive: true, is_read_only: false, follows: true };
    bind(rootfs, &root_of(id), root)?;
    for (index, mount) in mounts.iter().enumerate().filter(|(_, mount)| mount.is_bind()) {
        bind(&mount.source, &bind_of(id, index), BindOptions::of(mount))?;
    }
    let modules_options = BindOptions { is_read_only: true, ..root };
    modules.map_or(Ok(()), |modules| bind(modules, &Path::new(id).join(MODULES), modules_options))
}

/// Options of the mount of a file or folder of the host.
#[derive(Clone, Copy)]
struct BindOptions {
    /// With the file systems below it.
    is_recursive: bool,
    is_read_only: bool,
    /// Later mounts below the original appear in it, too.
    follows: bool,
}

impl BindOptions {
    fn of(mount: &MountPlan) -> Self {
        let &MountPlan { is_recursive, follows, .. } = mount;
        Self { is_recursive, is_read_only: mount.is_read_only(), follows }
    }
}

/// Makes the root of a container read-only, in which the guest has made the mount points.
///
/// # Errors
/// The host refuses it.
pub fn protect_root(vm_folder: &Path, id: &str) -> Result<(), Failure> {
    let root = path(vm_folder).join(root_of(id));
    let protect = || {
        let root = open_tree(CWD, &root, OpenTreeFlags::OPEN_TREE_CLOEXEC)?;
        set(&root, MountChange { makes_read_only: true, propagation: None })
    };
    protect().file_error("make read-only", &root)
}

/// Returns a copy of the file system at a path, of those below it, too, if it `is_recursive`.
///
/// # Errors
/// There is no such path, or the host refuses it.
pub fn copy_tree(source: &Path, is_recursive: bool) -> io::Result<OwnedFd> {
    let mut flags = OpenTreeFlags::OPEN_TREE_CLONE | OpenTreeFlags::OPEN_TREE_CLOEXEC;
    flags.set(OpenTreeFlags::AT_RECURSIVE, is_recursive);
    Ok(open_tree(CWD, source, flags)?)
}

/// Sets the attributes of a copy: with `follows` what the host mounts below the original later
/// appears in it, too, and not the other way round.
fn change(tree: &OwnedFd, makes_read_only: bool, follows: bool) -> io::Result<()> {
    let propagation = match follows {
        true => MountPropagationFlags::DOWNSTREAM,
        false => MountPropagationFlags::PRIVATE,
    };
    set(tree, MountChange { makes_read_only, propagation: Some(propagation.bits()) })
}

fn set(tree: &OwnedFd, change: MountChange) -> io::Result<()> {
    let changed = change_mounts(tree.as_raw_fd().unsigned_abs(), change);
    changed.map_err(|error| io::Error::from_raw_os_error(error.0))
}

fn attach(tree: &OwnedFd, place: &Path) -> io::Result<()> {
    let flags = MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH;
    Ok(move_mount(tree.as_fd(), "", CWD, place, flags)?)
}

/// Unmounts everything of a container in the shared directory, and removes the mount points. They
/// may be gone.
///
/// # Errors
/// The mounts cannot be read, or one cannot be removed.
pub fn unmount_all(vm_folder: &Path, id: &str) -> Result<(), Failure> {
    let own = path(vm_folder).join(id);
    // Those further below go with them: the guest may rename the folders that they are in.
    unmount_those(|place| place.parent() == Some(&own))?;
    let points = vm_folder.join(MOUNT_POINTS).join(id);
    match remove_empty(&points) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => {
            Err(Failure::file("remove", &points, &error))
        }
        _ => Ok(()),
    }
}

/// Unmounts the mount points that `is_meant` accepts, with all below them.
fn unmount_those(is_meant: impl Fn(&Path) -> bool) -> Result<(), Failure> {
    let table = fs::read(MOUNTS).file_error("read", Path::new(MOUNTS))?;
    for place in places(&table).iter().rev().filter(|place| is_meant(place)) {
        // The guest may still use it, and ends soon.
        let removed = unmount(place, UnmountFlags::DETACH | UnmountFlags::NOFOLLOW);
        removed.map_err(io::Error::from).file_error("unmount", place)?;
    }
    Ok(())
}

/// Removes a folder of mount points, which are empty: nothing that is still mounted is lost.
fn remove_empty(own: &Path) -> io::Result<()> {
    for entry in fs::read_dir(own)? {
        let entry = entry?;
        match entry.file_type()?.is_dir() {
            true => fs::remove_dir(entry.path())?,
            false => fs::remove_file(entry.path())?,
        }
    }
    fs::remove_dir(own)
}

/// Returns all mount points, in the order in which they were mounted.
fn places(table: &[u8]) -> Vec<PathBuf> {
    let lines = table.split(|&byte| byte == b'\n');
    let places = lines.filter_map(|line| line.split(|&byte| byte == b' ').nth(4));
    places.map(|place| PathBuf::from(unescaped(place))).collect()
}

/// Replaces a backslash and three octal digits by their byte.
fn unescaped(text: &[u8]) -> OsString {
    let mut bytes = Vec::new();
    let mut rest = text;
    while let Some((&first, tail)) = rest.split_first() {
        let digits = tail.get(..3).and_then(|digits| str::from_utf8(digits).ok());
        let value = digits.and_then(|digits| u8::from_str_radix(digits, 8).ok());
        let (byte, tail) = match value.filter(|_| first == b'\\') {
            Some(value) => (value, &tail[3..]),
            None => (first, tail),
        };
        rest = tail;
        bytes.push(byte);
    }
    OsString::from_vec(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mount_points_of_the_table() {
        let table = b"1 0 8:1 / / rw - ext4 /dev/vda rw\n2 1 8:1 /x /a/b rw - ext4 x rw\n\
            3 2 8:1 /y /a/b/c\\040d rw - ext4 x rw\n";
        assert_eq!(places(table), ["/", "/a/b", "/a/b/c d"].map(Path::new));
        assert_eq!(unescaped(b"a\\04"), "a\\04");
    }
}
