//! What a machine's process gives up beside system calls, as far as the host lets its users: namespaces without anything in them, and Landlock.
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

/// A folder that every host has, where an empty one is mounted.
const EMPTY: &str = "/proc";
/// Access to it, which the process does not have any longer.
const RIGHTS: ABI = ABI::V6;

/// What the host has refused.
#[derive(Debug, Default)]
pub struct Refused {
    namespaces: Option<io::Error>,
    landlock: Option<String>,
}

impl Refused {
    /// Nothing.
    pub fn is_empty(&self) -> bool {
        self.namespaces.is_none() && self.landlock.is_none()
    }

    /// Why the host refuses namespaces.
    pub fn namespaces(&self) -> Option<String> {
        self.namespaces.as_ref().map(|error| Cause::new(error.raw_os_error(), error).to_string())
    }

    /// Why the host refuses Landlock.
    pub fn landlock(&self) -> Option<&str> {
        self.landlock.as_deref()
    }
}

impl fmt::Display for Refused {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let namespaces = self.namespaces().map(|error| format!("namespaces: {error}"));
        let landlock = self.landlock.as_ref().map(|error| format!("Landlock: {error}"));
        let all: Vec<_> = namespaces.into_iter().chain(landlock).collect();
        f.write_str(&all.join("; "))
    }
}

/// Gives up everything that the host lets this process give up, but for capabilities, of which namespaces of users give it all:
/// [`drop_capabilities`](crate::drop_capabilities) comes behind this, whether the host has refused anything or not. It has one thread.
pub fn enter() -> Refused {
    // Landlock forbids mounts, which namespaces need.
    let namespaces = leave_namespaces().err().map(io::Error::from);
    Refused { namespaces, landlock: forbid_files().err() }
}

fn leave_namespaces() -> rustix::io::Result<()> {
    let namespaces = UnshareFlags::NEWUSER
        | UnshareFlags::NEWNS
        | UnshareFlags::NEWNET
        | UnshareFlags::NEWIPC
        | UnshareFlags::NEWUTS
        | UnshareFlags::NEWCGROUP;
    // SAFETY: descriptors stay shared with nobody else than before; only names and numbers mean something else from here on.
    unsafe { unshare_unsafe(namespaces) }?;
    mount_change("/", MountPropagationFlags::REC | MountPropagationFlags::PRIVATE)?;
    let flags = MountFlags::RDONLY | MountFlags::NOSUID | MountFlags::NODEV | MountFlags::NOEXEC;
    mount("tmpfs", EMPTY, "tmpfs", flags, Some(c"nr_inodes=1"))?;
    chdir(EMPTY)?;
    chroot(EMPTY)
}

/// Forbids everything that the host's Landlock knows (landlock(7)): files, ports, sockets without a file, signals to others.
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
        RulesetStatus::NotEnforced => Err("the kernel has none".to_owned()),
        RulesetStatus::FullyEnforced | RulesetStatus::PartiallyEnforced => Ok(()),
    }
}
