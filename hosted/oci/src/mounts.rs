//! File systems of a container: their options, and folders and files of the host, which are mounted
//! into the directory that the VM shares.
//!
//! | path below the VM's folder | content |
//! |---|---|
//! | `share` | the shared directory, [`POD`](proto::agent::POD) in the guest |
//! | `share/ID/root` | root directory of container ID |
//! | `share/ID/0`, `share/ID/1` ... | its bind mounts, in the order of the configuration |

use crate::refuse;
use hosted_command::failure::{Failure, IoContext};
use oci_spec::runtime::Mount;
use rustix::fs::Mode;
use rustix::mount::{
    MountFlags, MountPropagationFlags, UnmountFlags, mount_bind, mount_bind_recursive,
    mount_change, unmount,
};
use std::ffi::{OsStr, OsString};
use std::fs::{self, DirBuilder, File};
use std::io;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};

/// Name of the shared directory in the VM's folder.
const SHARE: &str = "share";
/// Root directory in the container's part of it.
const ROOT: &str = "root";
/// Kinds of file systems that a guest has for containers.
const KINDS: [&str; 7] = ["proc", "sysfs", "tmpfs", "devpts", "mqueue", "cgroup", "cgroup2"];
/// Mounts of this process (proc(5)).
const MOUNTS: &str = "/proc/self/mountinfo";

/// Options of mounts as mount(8) has them: flags that they set and clear.
const FLAGS: [(&str, MountFlags, bool); 24] = [
    ("ro", MountFlags::RDONLY, true),
    ("rw", MountFlags::RDONLY, false),
    ("nosuid", MountFlags::NOSUID, true),
    ("suid", MountFlags::NOSUID, false),
    ("nodev", MountFlags::NODEV, true),
    ("dev", MountFlags::NODEV, false),
    ("noexec", MountFlags::NOEXEC, true),
    ("exec", MountFlags::NOEXEC, false),
    ("noatime", MountFlags::NOATIME, true),
    ("atime", MountFlags::NOATIME, false),
    ("nodiratime", MountFlags::NODIRATIME, true),
    ("diratime", MountFlags::NODIRATIME, false),
    ("relatime", MountFlags::RELATIME, true),
    ("norelatime", MountFlags::RELATIME, false),
    ("strictatime", MountFlags::STRICTATIME, true),
    ("nostrictatime", MountFlags::STRICTATIME, false),
    ("sync", MountFlags::SYNCHRONOUS, true),
    ("async", MountFlags::SYNCHRONOUS, false),
    ("dirsync", MountFlags::DIRSYNC, true),
    ("lazytime", MountFlags::LAZYTIME, true),
    ("nolazytime", MountFlags::LAZYTIME, false),
    ("nosymfollow", MountFlags::NOSYMFOLLOW, true),
    ("symfollow", MountFlags::NOSYMFOLLOW, false),
    ("defaults", MountFlags::empty(), true),
];
/// Those of [`FLAGS`] that an option with `r` before its name sets for the file systems below, too.
/// A guest sees the host's file systems at and below a path as one.
const RECURSIVE: MountFlags = MountFlags::RDONLY
    .union(MountFlags::NOSUID)
    .union(MountFlags::NODEV)
    .union(MountFlags::NOEXEC)
    .union(MountFlags::NOATIME)
    .union(MountFlags::NODIRATIME)
    .union(MountFlags::RELATIME)
    .union(MountFlags::STRICTATIME)
    .union(MountFlags::NOSYMFOLLOW);
/// Options without effect in a VM: its mounts do not propagate to the host, and the host's do;
/// those of no file system that a guest has.
const IGNORED: [&str; 18] = [
    "private",
    "rprivate",
    "slave",
    "rslave",
    "unbindable",
    "runbindable",
    "z",
    "Z",
    "newinstance",
    "remount",
    "silent",
    "loud",
    "acl",
    "noacl",
    "iversion",
    "noiversion",
    "mand",
    "nomand",
];
/// Option of a file system in memory: it begins with a copy of the folder below it.
const COPY_UP: &str = "tmpcopyup";

/// File system of a container.
#[derive(Debug, PartialEq, Eq)]
pub struct MountPlan {
    /// Kind; empty for a bind mount.
    pub kind: String,
    /// Path on the host, or name.
    pub source: PathBuf,
    /// Path in the container.
    pub place: PathBuf,
    pub flags: u32,
    /// Options of the file system, separated by commas.
    pub data: String,
    /// It begins with a copy of the folder below it.
    pub copies: bool,
    /// A bind mount with the file systems below it.
    is_recursive: bool,
}

impl MountPlan {
    /// Reads a mount of a configuration.
    ///
    /// # Errors
    /// A VM cannot have it.
    pub fn new(mount: &Mount, bundle: &Path) -> Result<Self, Failure> {
        let place = mount.destination().clone();
        let shown = place.display();
        let mut flags = MountFlags::empty();
        let mut data = Vec::new();
        let mut bind = None;
        let mut copies = false;
        for option in mount.options().iter().flatten().map(String::as_str) {
            if let Some((flag, is_set)) = flag(option) {
                flags.set(flag, is_set);
                continue;
            }
            match option {
                COPY_UP => copies = true,
                "bind" => bind = Some(false),
                "rbind" => bind = Some(true),
                "shared" | "rshared" => {
                    let text = format!("mount {shown}: a VM cannot propagate mounts to the host");
                    return Err(refuse(text));
                }
                // Without it the owners of files would be wrong.
                "idmap" | "ridmap" => {
                    return Err(refuse(format!("mount {shown}: a VM cannot map the IDs of users")));
                }
                option if IGNORED.contains(&option) => {}
                option => data.push(option),
            }
        }
        let kind = mount.typ().as_deref().unwrap_or_default();
        let bind = bind.or_else(|| (kind == "bind").then_some(true));
        if bind.is_none() && !KINDS.contains(&kind) {
            return Err(refuse(format!("mount {shown}: a VM has no file system of type {kind:?}")));
        }
        let source = mount.source().clone().unwrap_or_default();
        Ok(match bind {
            Some(is_recursive) => Self {
                kind: String::new(),
                source: bundle.join(source),
                place,
                flags: flags.bits(),
                // Bind mounts have no options of their file systems.
                data: String::new(),
                copies: false,
                is_recursive,
            },
            None => {
                let kind = kind.to_owned();
                let data = data.join(",");
                let copies = copies && kind == "tmpfs";
                Self { kind, source, place, flags: flags.bits(), data, copies, is_recursive: false }
            }
        })
    }

    /// Returns whether it is a bind mount.
    pub fn is_bind(&self) -> bool {
        self.kind.is_empty()
    }
}

/// Returns the flag of an option and whether it is set; `None`: the option is another one.
fn flag(option: &str) -> Option<(MountFlags, bool)> {
    let find = |name: &str| FLAGS.iter().find(|(known, ..)| *known == name);
    let found = find(option).or_else(|| {
        let below = find(option.strip_prefix('r')?);
        below.filter(|(_, flag, _)| !flag.is_empty() && RECURSIVE.contains(*flag))
    });
    found.map(|&(_, flag, is_set)| (flag, is_set))
}

/// Returns the shared directory of a VM.
pub fn share(vm_folder: &Path) -> PathBuf {
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

/// Mounts the root and the bind mounts of a container into the shared directory.
///
/// # Errors
/// One does not exist or cannot be mounted.
pub fn mount_all(
    vm_folder: &Path,
    id: &str,
    rootfs: &Path,
    mounts: &[MountPlan],
) -> Result<(), Failure> {
    let share = share(vm_folder);
    // Only root enters it: the guest's set-user-ID programs are not for the host's users.
    let mut builder = DirBuilder::new();
    builder.recursive(true).mode(Mode::RWXU.bits());
    let own = share.join(id);
    builder.create(&own).file_error("create", &own)?;
    bind(rootfs, &share.join(root_of(id)), true)?;
    for (index, mount) in mounts.iter().enumerate().filter(|(_, mount)| mount.is_bind()) {
        bind(&mount.source, &share.join(bind_of(id, index)), mount.is_recursive)?;
    }
    Ok(())
}

fn bind(source: &Path, place: &Path, is_recursive: bool) -> Result<(), Failure> {
    let found = fs::metadata(source).file_error("mount", source)?;
    match found.is_dir() {
        true => fs::create_dir(place),
        false => File::create(place).map(drop),
    }
    .file_error("create", place)?;
    let mounted = match is_recursive {
        true => mount_bind_recursive(source, place),
        false => mount_bind(source, place),
    };
    // What the host mounts below it later appears here, too, and not the other way round.
    let following = MountPropagationFlags::DOWNSTREAM | MountPropagationFlags::REC;
    let mounted = mounted.and_then(|()| mount_change(place, following));
    mounted.map_err(io::Error::from).file_error("mount", source)
}

/// Unmounts everything at and below a container's part of the shared directory, and removes it. It
/// may be gone.
///
/// # Errors
/// The mounts cannot be read, or one cannot be removed.
pub fn unmount_all(vm_folder: &Path, id: &str) -> Result<(), Failure> {
    let own = share(vm_folder).join(id);
    let table = fs::read(MOUNTS).file_error("read", Path::new(MOUNTS))?;
    for place in places_below(&table, &own).iter().rev() {
        // The guest may still use it, and ends soon.
        let removed = unmount(place, UnmountFlags::DETACH | UnmountFlags::NOFOLLOW);
        removed.map_err(io::Error::from).file_error("unmount", place)?;
    }
    match remove_empty(&own) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => {
            Err(Failure::file("remove", &own, &error))
        }
        _ => Ok(()),
    }
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

/// Returns the mount points below a folder, in the order in which they were mounted.
fn places_below(table: &[u8], folder: &Path) -> Vec<PathBuf> {
    let lines = table.split(|&byte| byte == b'\n');
    let places = lines.filter_map(|line| line.split(|&byte| byte == b' ').nth(4));
    let places = places.map(|place| PathBuf::from(unescaped(place)));
    places.filter(|place| place.starts_with(folder)).collect()
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

/// Returns the bytes of a path.
pub fn bytes(path: &Path) -> &[u8] {
    OsStr::as_bytes(path.as_os_str())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn plan(text: &str) -> Result<MountPlan, String> {
        let mount: Mount = serde_json::from_str(text).unwrap();
        let plan = MountPlan::new(&mount, Path::new("/bundle"));
        plan.map_err(|failure| crate::report::text(&failure))
    }

    #[test]
    fn options_are_flags_and_data() {
        let found = plan(
            r#"{"destination": "/dev/pts", "type": "devpts", "source": "devpts",
            "options": ["nosuid", "noexec", "newinstance", "ptmxmode=0666", "mode=0620"]}"#,
        );
        let found = found.unwrap();
        assert_eq!((&*found.kind, &*found.data), ("devpts", "ptmxmode=0666,mode=0620"));
        assert_eq!(found.flags, (MountFlags::NOSUID | MountFlags::NOEXEC).bits());
        let found = plan(
            r#"{"destination": "/etc/hosts", "type": "bind", "source": "hosts",
            "options": ["rbind", "rprivate", "ro"]}"#,
        );
        let found = found.unwrap();
        assert!(found.is_bind() && found.is_recursive && found.data.is_empty());
        assert_eq!(found.source, Path::new("/bundle/hosts"));
    }

    #[test]
    fn flags_of_the_file_systems_below_are_those_of_the_mount() {
        let options = |text: &str| {
            let text = format!(
                r#"{{"destination": "/v", "type": "bind", "source": "/v", "options": [{text}]}}"#
            );
            plan(&text).unwrap().flags
        };
        assert_eq!(options(r#""rbind", "rro""#), MountFlags::RDONLY.bits());
        assert_eq!(options(r#""ro", "rrw""#), 0);
        let all = MountFlags::NOSUID | MountFlags::NODEV | MountFlags::NOEXEC;
        assert_eq!(options(r#""rnosuid", "rnodev", "rnoexec""#), all.bits());
        assert_eq!(options(r#""rrelatime""#), MountFlags::RELATIME.bits());
        assert_eq!(options(r#""nosymfollow", "lazytime", "iversion""#), (1 << 8) | (1 << 25));
        assert_eq!((flag("rdefaults"), flag("rsync"), flag("r")), (None, None, None));
    }

    #[test]
    fn file_systems_in_memory_begin_with_a_copy_on_demand() {
        let copies = |kind: &str| {
            let text = format!(
                r#"{{"destination": "/v", "type": "{kind}", "source": "/v", "options": ["tmpcopyup"]}}"#
            );
            let plan = plan(&text).unwrap();
            assert_eq!(plan.data, "");
            plan.copies
        };
        assert!(copies("tmpfs") && !copies("bind") && !copies("proc"));
    }

    #[test]
    fn mounts_that_a_vm_cannot_have_are_refused() {
        let shared =
            plan(r#"{"destination": "/a", "source": "/a", "options": ["bind", "rshared"]}"#);
        assert_eq!(shared, Err("mount /a: a VM cannot propagate mounts to the host".to_owned()));
        let mapped = plan(r#"{"destination": "/a", "source": "/a", "options": ["bind", "idmap"]}"#);
        assert_eq!(mapped, Err("mount /a: a VM cannot map the IDs of users".to_owned()));
        let nfs = plan(r#"{"destination": "/a", "type": "nfs", "source": "host:/a"}"#);
        assert_eq!(nfs, Err("mount /a: a VM has no file system of type \"nfs\"".to_owned()));
    }

    #[test]
    fn mount_points_below_a_folder() {
        let table = b"1 0 8:1 / / rw - ext4 /dev/vda rw\n2 1 8:1 /x /a/b rw - ext4 x rw\n\
            3 2 8:1 /y /a/b/c\\040d rw - ext4 x rw\n4 1 8:1 /y /a/bb rw - ext4 x rw\n";
        let found = places_below(table, Path::new("/a/b"));
        assert_eq!(found, [Path::new("/a/b"), Path::new("/a/b/c d")]);
        assert_eq!(unescaped(b"a\\04"), "a\\04");
    }
}
