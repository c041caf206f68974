//! Trusted paths: files and folders that only root and the caller can change. Parador executes
//! programs and boots kernels from trusted paths only.
//!
//! Every component of the path is checked, because the right to rename one of them decides about
//! the target of the path.

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

/// Resolves symbolic links in `path` and checks that only root and the caller can change its
/// target.
///
/// Each component must belong to root or the caller, and must not be writable by group or others.
/// Two exceptions: the caller's private group (with the caller's name, without other members) may
/// write, and an intermediate folder may be writable with the sticky bit, as `/tmp` is: only the
/// owners can rename or remove its entries, and the owner of the next component is checked in turn.
///
/// # Errors
/// [`failure::PERMISSION`] with the component, its mode and owner; the code of the error if it
/// cannot be read.
pub fn check(path: &Path) -> Result<PathBuf, Failure> {
    check_for(path, None)
}

/// Does the same as [`check`]; components may also belong to `owner`, the user who called sudo.
pub fn check_for(path: &Path, owner: Option<u32>) -> Result<PathBuf, Failure> {
    let caller = Uid::effective().as_raw();
    let read = |path: &Path| fs::symlink_metadata(path).file_error("read", path);
    let path = path.canonicalize().file_error("find", path)?;
    for component in path.ancestors() {
        let found = Component::new(&read(component)?, component == path);
        let owned = found.owner == 0 || found.owner == caller || Some(found.owner) == owner;
        if let Some(problem) = found.problem(owned, is_private) {
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
        Problem::Writable(mode) => (
            format!("{shown} is writable by other users (mode {mode:o})"),
            format!("`chmod go-w {shown}`, or use a folder that only you can write to"),
        ),
    };
    let text = format!("{} is not trusted: {text}", path.display());
    Failure::new(failure::PERMISSION, text).help(help)
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
    /// Writable by others; mode.
    Writable(u32),
}

impl Component {
    fn new(metadata: &Metadata, is_last: bool) -> Self {
        let (owner, group) = (metadata.uid(), metadata.gid());
        Self { owner, group, mode: metadata.mode() & 0o7777, is_last }
    }

    fn problem(&self, owned: bool, is_private: impl Fn(u32) -> bool) -> Option<Problem> {
        if !owned {
            return Some(Problem::Owner(self.owner));
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

    fn problem(owned: bool, mode: u32, is_last: bool) -> Option<Problem> {
        let private = 5;
        let component = Component { owner: 7, group: private, mode, is_last };
        component.problem(owned, |group| group == private)
    }

    #[test]
    fn owner_and_mode_of_a_component() {
        assert_eq!(problem(true, 0o755, true), None);
        assert_eq!(problem(true, 0o775, true), None, "a private group");
        assert_eq!(problem(false, 0o755, true), Some(Problem::Owner(7)));
        assert_eq!(problem(true, 0o757, true), Some(Problem::Writable(0o757)));
        assert_eq!(problem(true, 0o1777, false), None, "/tmp on the way");
        assert_eq!(problem(true, 0o1777, true), Some(Problem::Writable(0o1777)));
        assert_eq!(problem(false, 0o1777, false), Some(Problem::Owner(7)));
        let component = Component { owner: 7, group: 6, mode: 0o775, is_last: true };
        assert_eq!(component.problem(true, |_| false), Some(Problem::Writable(0o775)));
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
