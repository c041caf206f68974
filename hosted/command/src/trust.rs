//! Trusted paths: files and folders that only root and the caller can change. Parador executes
//! programs and boots kernels from trusted paths only.
//!
//! Every component of the path is checked, because the right to rename one of them decides about
//! the target of the path.
//!
//! In a user namespace without an ID for the host's root, as rootless engines make them, files of
//! root have the overflow ID (user_namespaces(7)), and so have those of all other users without an
//! ID. There it is accepted for the files of the installed package only ([`INSTALLED`]): they, and
//! the folders above, are made by root. `docs/threat-model.md` has the reasons.

use crate::failure::{self, Failure, IoContext};
use nix::unistd::{Gid, Group, Uid, User};
use std::fs::{self, Metadata};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

/// Mode bits of `stat(2)`: write permission of group and others, and the restricted deletion flag
/// (sticky bit).
const GROUP_WRITE: u32 = 0o020;
const OTHER_WRITE: u32 = 0o002;
const STICKY: u32 = 0o1000;
/// Folder of the package's files.
const INSTALLED: &str = "/usr/lib/parador";
/// IDs of this process' user namespace, and those of its parent: first ID, parent's, count.
const ID_MAP: &str = "/proc/self/uid_map";
/// Owner that stat(2) states for users without an ID.
const OVERFLOW_ID: &str = "/proc/sys/kernel/overflowuid";

/// Resolves symbolic links in `path` and checks that only root and the caller can change its
/// target.
///
/// Each component must belong to root or the caller, and must not be writable by group or others.
/// Two exceptions: the caller's private group (with the caller's name, without other members) may
/// write, and an intermediate folder may be writable with the sticky bit, as `/tmp` is: only the
/// owners can rename or remove its entries, and the owner of the next component is checked in turn.
///
/// Components of a path of the installed package may belong to the overflow ID if the host's root
/// has no ID here; neither exception applies to them.
///
/// # Errors
/// [`failure::PERMISSION`] with the component, its mode and owner; the code of the error if it
/// cannot be read.
pub fn check(path: &Path) -> Result<PathBuf, Failure> {
    check_for(path, None)
}

/// Does the same as [`check`]; components may also belong to `owner`, the user who called sudo.
pub fn check_for(path: &Path, owner: Option<u32>) -> Result<PathBuf, Failure> {
    let trusted = TrustedOwners::new(owner);
    let read = |path: &Path| fs::symlink_metadata(path).file_error("read", path);
    let path = path.canonicalize().file_error("find", path)?;
    let is_installed = path.starts_with(INSTALLED);
    for component in path.ancestors() {
        let found = Component::new(&read(component)?, component == path);
        if let Some(problem) = found.problem(&trusted, is_installed, is_private) {
            return Err(refusal(&path, component, &problem));
        }
    }
    Ok(path)
}

fn refusal(path: &Path, component: &Path, problem: &Problem) -> Failure {
    let shown = component.display();
    let (text, help) = match problem {
        Problem::Owner(owner) => (
            format!("{shown} belongs to another user (ID {owner})"),
            "use a folder of yours, or run this as that user".to_owned(),
        ),
        Problem::Unmapped(owner) => (
            format!("{shown} belongs to a user without an ID in this user namespace (ID {owner})"),
            format!("install the package: here only {INSTALLED} may belong to the host's root"),
        ),
        Problem::Writable(mode) => (
            format!("{shown} is writable by other users (mode {mode:o})"),
            format!("`chmod go-w {shown}`, or use a folder that only you can write to"),
        ),
    };
    let text = format!("{} is not trusted: {text}", path.display());
    Failure::new(failure::PERMISSION, text).help(help)
}

/// Users whose files are trusted.
struct TrustedOwners {
    caller: u32,
    /// User who called sudo.
    sudo: Option<u32>,
    /// Overflow ID, if it stands for the host's root among others.
    unmapped: Option<u32>,
}

impl TrustedOwners {
    fn new(sudo: Option<u32>) -> Self {
        let read = |path| fs::read_to_string(path).unwrap_or_default();
        let unmapped = unmapped(&read(ID_MAP), &read(OVERFLOW_ID));
        Self { caller: Uid::effective().as_raw(), sudo, unmapped }
    }

    fn include(&self, owner: u32) -> bool {
        owner == 0 || owner == self.caller || Some(owner) == self.sudo
    }
}

/// Returns the overflow ID by the contents of [`ID_MAP`] and [`OVERFLOW_ID`]; `None`: the parent's
/// root has an ID, or a text is malformed.
fn unmapped(map: &str, overflow: &str) -> Option<u32> {
    let overflow = overflow.trim().parse().ok()?;
    let ranges = id_ranges(map)?;
    let has_root = ranges.iter().any(|&[_, outside, length]| outside == 0 && length > 0);
    (!ranges.is_empty() && !has_root).then_some(overflow)
}

/// Returns the ranges of [`ID_MAP`]; `None`: it is malformed.
fn id_ranges(map: &str) -> Option<Vec<[u32; 3]>> {
    let range = |line: &str| {
        let fields: Result<Vec<u32>, _> = line.split_whitespace().map(str::parse).collect();
        fields.ok()?.try_into().ok()
    };
    map.lines().map(range).collect()
}

/// Returns whether this process is root for the services of the host: effective user 0, and not the
/// root of a user namespace that an ordinary user has made, as rootless engines do.
pub fn is_host_root() -> bool {
    let map = fs::read_to_string(ID_MAP).unwrap_or_default();
    parent_id(&map, Uid::effective().as_raw()) == Some(0)
}

/// Returns the ID of a user in the parent of this user namespace, by the contents of [`ID_MAP`].
fn parent_id(map: &str, user: u32) -> Option<u32> {
    let mut ranges = id_ranges(map)?.into_iter();
    ranges.find_map(|[inside, outside, length]| {
        let offset = user.checked_sub(inside).filter(|&offset| offset < length)?;
        outside.checked_add(offset)
    })
}

/// A component of a path.
struct Component {
    owner: u32,
    group: u32,
    mode: u32,
    /// Last component.
    is_last: bool,
}

/// Reason to distrust a component.
#[derive(Debug, PartialEq, Eq)]
enum Problem {
    /// Owned by this user.
    Owner(u32),
    /// Owned by a user without an ID; it has this overflow ID.
    Unmapped(u32),
    /// Writable by others; mode.
    Writable(u32),
}

impl Component {
    fn new(metadata: &Metadata, is_last: bool) -> Self {
        let (owner, group) = (metadata.uid(), metadata.gid());
        Self { owner, group, mode: metadata.mode() & 0o7777, is_last }
    }

    fn problem(
        &self,
        trusted: &TrustedOwners,
        is_installed: bool,
        is_private: impl Fn(u32) -> bool,
    ) -> Option<Problem> {
        if !trusted.include(self.owner) {
            return match trusted.unmapped == Some(self.owner) {
                true if is_installed => {
                    let writable = self.mode & (GROUP_WRITE | OTHER_WRITE) != 0;
                    writable.then_some(Problem::Writable(self.mode))
                }
                true => Some(Problem::Unmapped(self.owner)),
                false => Some(Problem::Owner(self.owner)),
            };
        }
        if self.mode & STICKY != 0 && !self.is_last {
            return None;
        }
        let by_group = self.mode & GROUP_WRITE != 0 && !is_private(self.group);
        let writable = by_group || self.mode & OTHER_WRITE != 0;
        writable.then_some(Problem::Writable(self.mode))
    }
}

/// Returns whether a group is the caller's private group, as Debian creates one for each user.
fn is_private(group: u32) -> bool {
    let user = User::from_uid(Uid::effective()).ok().flatten();
    let group = Group::from_gid(Gid::from_raw(group)).ok().flatten();
    let (Some(user), Some(group)) = (user, group) else { return false };
    let alone = group.mem.iter().all(|member| *member == user.name);
    user.gid == group.gid && user.name == group.name && alone
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::Permissions;
    use std::os::unix::fs::{PermissionsExt, symlink};

    /// The caller is user 7, and has a private group.
    const CALLER: u32 = 7;
    const PRIVATE: u32 = 5;

    fn problem_of(
        owner: u32,
        mode: u32,
        is_last: bool,
        unmapped: Option<u32>,
        is_installed: bool,
    ) -> Option<Problem> {
        let component = Component { owner, group: PRIVATE, mode, is_last };
        let trusted = TrustedOwners { caller: CALLER, sudo: Some(8), unmapped };
        component.problem(&trusted, is_installed, |group| group == PRIVATE)
    }

    #[test]
    fn owner_and_mode_of_a_component() {
        let problem = |owner, mode, is_last| problem_of(owner, mode, is_last, None, false);
        for owner in [0, CALLER, 8] {
            assert_eq!(problem(owner, 0o755, true), None);
        }
        assert_eq!(problem(CALLER, 0o775, true), None, "a private group");
        assert_eq!(problem(9, 0o755, true), Some(Problem::Owner(9)));
        assert_eq!(problem(CALLER, 0o757, true), Some(Problem::Writable(0o757)));
        assert_eq!(problem(0, 0o1777, false), None, "/tmp on the way");
        assert_eq!(problem(0, 0o1777, true), Some(Problem::Writable(0o1777)));
        assert_eq!(problem(9, 0o1777, false), Some(Problem::Owner(9)));
        let component = Component { owner: CALLER, group: 6, mode: 0o775, is_last: true };
        let trusted = TrustedOwners { caller: CALLER, sudo: None, unmapped: None };
        let found = component.problem(&trusted, false, |_| false);
        assert_eq!(found, Some(Problem::Writable(0o775)));
    }

    #[test]
    fn owners_without_an_id() {
        const OVERFLOW: u32 = 65534;
        let problem =
            |mode, is_installed| problem_of(OVERFLOW, mode, true, Some(OVERFLOW), is_installed);
        assert_eq!(problem(0o755, true), None, "the installed package");
        assert_eq!(problem(0o755, false), Some(Problem::Unmapped(OVERFLOW)), "a tree");
        for mode in [0o775, 0o757, 0o1777] {
            assert_eq!(problem(mode, true), Some(Problem::Writable(mode)));
            let above = problem_of(OVERFLOW, mode, false, Some(OVERFLOW), true);
            assert_eq!(above, Some(Problem::Writable(mode)), "no exception for parents");
        }
        // Where the host's root has an ID, the overflow ID is not root.
        let refused = problem_of(OVERFLOW, 0o755, true, None, true);
        assert_eq!(refused, Some(Problem::Owner(OVERFLOW)));
        let other = problem_of(9, 0o755, true, Some(OVERFLOW), true);
        assert_eq!(other, Some(Problem::Owner(9)), "another user with an ID");
        assert_eq!(problem_of(CALLER, 0o755, true, Some(OVERFLOW), true), None, "a mount");
    }

    #[test]
    fn namespaces_without_the_hosts_root() {
        let rootless = "         0       1000          1\n         1     100000      65536\n";
        assert_eq!(unmapped(rootless, "65534\n"), Some(65534));
        assert_eq!(unmapped("0 1000 1\n", "99"), Some(99));
        let parents = [0, 1, 65_536, 65_537].map(|user| parent_id(rootless, user));
        assert_eq!(parents, [Some(1000), Some(100_000), Some(165_535), None]);
        let initial = "         0          0 4294967295\n";
        for (map, overflow) in [
            (initial, "65534\n"),
            ("0 1000 1\n1000 0 1\n", "65534"),
            ("", "65534"),
            ("0 1000\n", "65534"),
            ("0 1000 1 1\n", "65534"),
            ("0 x 1\n", "65534"),
            (rootless, ""),
            (rootless, "-1"),
        ] {
            assert_eq!(unmapped(map, overflow), None, "{map:?} {overflow:?}");
        }
    }

    #[test]
    fn only_the_package_is_installed() {
        // Resolved, so that no link and no `..` remains.
        let is_installed = |path: &str| Path::new(path).starts_with(INSTALLED);
        assert!(is_installed("/usr/lib/parador") && is_installed("/usr/lib/parador/vmlinux"));
        for other in ["/usr/lib", "/usr/lib/parador2", "/home/a/usr/lib/parador", "/usr/local/lib"]
        {
            assert!(!is_installed(other), "{other}");
        }
    }

    #[test]
    fn every_component_counts() {
        let folder = tempfile::tempdir().unwrap();
        let deep = folder.path().join("a/b");
        fs::create_dir_all(&deep).unwrap();
        let mode = |path: &Path, mode| {
            fs::set_permissions(path, Permissions::from_mode(mode)).unwrap();
        };
        let real = deep.canonicalize().unwrap();
        assert_eq!(check(&deep).unwrap(), real);
        let link = folder.path().join("link");
        symlink("a/b", &link).unwrap();
        assert_eq!(check(&link).unwrap(), real);

        let above = folder.path().join("a");
        mode(&above, 0o777);
        for path in [&deep, &link] {
            let failure = check(path).unwrap_err();
            assert_eq!(failure.code(), failure::PERMISSION);
            assert!(failure.to_string().contains("chmod go-w"), "{failure}");
        }
        mode(&above, 0o1777);
        assert!(check(&deep).is_ok(), "no other user can rename `b`");
        assert!(check(&above).is_err(), "every user can create files there");
        assert_eq!(check(&above.join("none")).unwrap_err().code(), failure::MISSING_FILE);
    }
}
