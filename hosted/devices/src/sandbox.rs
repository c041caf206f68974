//! Sandbox of a VM's processes in addition to the seccomp filter, as far as the host permits it to
//! unprivileged users: empty namespaces and Landlock.
//!
//! The wedge does the same for its processes without a library (`wedge/on-linux`).

use std::fmt;
use std::io;

use landlock::{ABI, Access, AccessFs, AccessNet, Scope};
use landlock::{CompatLevel, Compatible, Ruleset, RulesetAttr, RulesetStatus};
use proto::errno::Cause;
use rustix::mount::{MountFlags, MountPropagationFlags, mount, mount_change};
use rustix::process::{chdir, chroot};
use rustix::thread::{UnshareFlags, unshare_unsafe};

use crate::confine::describe;

/// A folder that exists on every host, over which an empty file system is mounted.
const EMPTY: &str = "/proc";
/// Access mode to it, which the process no longer has.
const RIGHTS: ABI = ABI::V6;

/// Sandbox mechanisms that the host has refused.
#[derive(Debug, Default)]
pub struct SandboxRefusal {
    namespaces: Option<io::Error>,
    landlock: Option<String>,
}

impl SandboxRefusal {
    /// Returns whether nothing was refused.
    pub fn is_empty(&self) -> bool {
        self.namespaces.is_none() && self.landlock.is_none()
    }

    /// Returns the host's reason to refuse namespaces.
    pub fn namespaces(&self) -> Option<String> {
        self.namespaces.as_ref().map(|error| Cause::new(error.raw_os_error(), error).to_string())
    }

    /// Returns the host's reason to refuse Landlock.
    pub fn landlock(&self) -> Option<&str> {
        self.landlock.as_deref()
    }
}

impl fmt::Display for SandboxRefusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let namespaces = self.namespaces().map(|error| format!("namespaces: {error}"));
        let landlock = self.landlock.as_ref().map(|error| format!("Landlock: {error}"));
        let all: Vec<_> = namespaces.into_iter().chain(landlock).collect();
        f.write_str(&all.join("; "))
    }
}

/// Enters the sandbox as far as the host permits it. A user namespace grants all capabilities in
/// it, so [`drop_capabilities`](crate::drop_capabilities) must follow in any case. The process must
/// have one thread.
pub fn enter() -> SandboxRefusal {
    // Landlock forbids mounts, which the namespaces need.
    let namespaces = leave_namespaces().err().map(io::Error::from);
    SandboxRefusal { namespaces, landlock: forbid_files().err() }
}

fn leave_namespaces() -> rustix::io::Result<()> {
    let namespaces = UnshareFlags::NEWUSER
        | UnshareFlags::NEWNS
        | UnshareFlags::NEWNET
        | UnshareFlags::NEWIPC
        | UnshareFlags::NEWUTS
        | UnshareFlags::NEWCGROUP;
    // SAFETY: descriptors stay shared as before; only names and IDs change their meaning from here
    // on.
    unsafe { unshare_unsafe(namespaces) }?;
    mount_change("/", MountPropagationFlags::REC | MountPropagationFlags::PRIVATE)?;
    let flags = MountFlags::RDONLY | MountFlags::NOSUID | MountFlags::NODEV | MountFlags::NOEXEC;
    mount("tmpfs", EMPTY, "tmpfs", flags, Some(c"nr_inodes=1"))?;
    chdir(EMPTY)?;
    chroot(EMPTY)
}

/// Forbids all accesses that the host's Landlock supports (landlock(7)): files, ports, abstract
/// sockets, signals to other processes.
///
/// # Errors
/// The host has no Landlock.
pub fn forbid_files() -> Result<(), String> {
    let locked = Ruleset::default()
        .set_compatibility(CompatLevel::BestEffort)
        .handle_access(AccessFs::from_all(RIGHTS))
        .and_then(|rules| rules.handle_access(AccessNet::from_all(RIGHTS)))
        .and_then(|rules| rules.scope(Scope::from_all(RIGHTS)))
        .and_then(|rules| rules.create()?.restrict_self());
    match locked.map_err(|error| describe(&error))?.ruleset {
        RulesetStatus::NotEnforced => Err("not supported by the host kernel".to_owned()),
        RulesetStatus::FullyEnforced | RulesetStatus::PartiallyEnforced => Ok(()),
    }
}
