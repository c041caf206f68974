//! File systems of a container, as its configuration describes them.

use crate::refuse;
use hosted_command::failure::Failure;
use oci_spec::runtime::Mount;
use rustix::mount::MountFlags;
use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::path::{Display, Path, PathBuf};

/// Kinds of file systems that a guest has for containers.
const KINDS: [&str; 7] = ["proc", "sysfs", "tmpfs", "devpts", "mqueue", "cgroup", "cgroup2"];

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
/// Options without effect in a VM: its mounts do not propagate to the host; those of no file system
/// that a guest has.
const IGNORED: [&str; 16] = [
    "private",
    "rprivate",
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
    pub is_recursive: bool,
    /// Later mounts of the host below a bind mount appear in it. Below a read-only one they would
    /// be writable, so it must be demanded (`slave`).
    pub follows: bool,
}

/// Refuses a map without which the owners of files would be wrong.
fn no_map(place: Display<'_>) -> Failure {
    refuse(format!("mount {place}: a VM cannot map the IDs of users"))
}

/// Returns the source of a mount, which a bind mount must have: a path without one would be that of
/// the bundle.
fn source_of(mount: &Mount, is_bind: bool) -> Result<PathBuf, Failure> {
    let source = mount.source().clone().unwrap_or_default();
    match is_bind && source.as_os_str().is_empty() {
        true => {
            let place = mount.destination().display();
            Err(refuse(format!("mount {place}: `source` of the bind mount is missing")))
        }
        false => Ok(source),
    }
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
        let mut is_slave = false;
        for option in mount.options().iter().flatten().map(String::as_str) {
            if let Some((flag, is_set)) = flag(option) {
                flags.set(flag, is_set);
                continue;
            }
            match option {
                COPY_UP => copies = true,
                "bind" => bind = Some(false),
                "rbind" => bind = Some(true),
                "slave" | "rslave" => is_slave = true,
                "shared" | "rshared" => {
                    let text = format!("mount {shown}: a VM cannot propagate mounts to the host");
                    return Err(refuse(text));
                }
                "idmap" | "ridmap" => return Err(no_map(shown)),
                option if IGNORED.contains(&option) => {}
                option => data.push(option),
            }
        }
        let maps = [mount.uid_mappings(), mount.gid_mappings()].into_iter().flatten().flatten();
        if maps.into_iter().any(|map| map.container_id() != map.host_id()) {
            return Err(no_map(shown));
        }
        let kind = mount.typ().as_deref().unwrap_or_default();
        let bind = bind.or_else(|| (kind == "bind").then_some(true));
        if bind.is_none() && !KINDS.contains(&kind) {
            return Err(refuse(format!("mount {shown}: a VM has no file system of type {kind:?}")));
        }
        let source = source_of(mount, bind.is_some())?;
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
                follows: is_slave || !flags.contains(MountFlags::RDONLY),
            },
            None => {
                let kind = kind.to_owned();
                let data = data.join(",");
                Self {
                    copies: copies && kind == "tmpfs",
                    kind,
                    source,
                    place,
                    flags: flags.bits(),
                    data,
                    is_recursive: false,
                    follows: false,
                }
            }
        })
    }

    /// Returns whether it is a bind mount.
    pub fn is_bind(&self) -> bool {
        self.kind.is_empty()
    }

    /// Returns whether nothing may be changed in it.
    pub fn is_read_only(&self) -> bool {
        MountFlags::from_bits_retain(self.flags).contains(MountFlags::RDONLY)
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
        for source in ["", r#""source": "","#] {
            let text = format!(r#"{{"destination": "/a", {source} "options": ["bind"]}}"#);
            let missing = "mount /a: `source` of the bind mount is missing".to_owned();
            assert_eq!(plan(&text), Err(missing));
        }
        let nfs = plan(r#"{"destination": "/a", "type": "nfs", "source": "host:/a"}"#);
        assert_eq!(nfs, Err("mount /a: a VM has no file system of type \"nfs\"".to_owned()));
    }
}
