//! Namespaces of a carrier's first thread: engines enter those of the process that they know
//! (`/proc/PID/ns`), and take its root directory for the container's.
//!
//! podman copies files into a running container, and out of it, in this mount namespace: in that of
//! the host it would write the host's files. A network that an engine sets up after `create`, as
//! buildah does, must not be the host's either. The thread sleeps there; all others stay in the
//! host's mount namespace.

use crate::bundle::Bundle;
use crate::network;
use crate::share;
use crate::store::ContainerRecord;
use hosted_command::failure::{Failure, IoContext};
use nix::sched::{CloneFlags, unshare};
use rustix::fs::CWD;
use rustix::mount::{
    MountPropagationFlags, MoveMountFlags, UnmountFlags, mount_bind_recursive, mount_change,
    move_mount, unmount,
};
use rustix::process::{chdir, pivot_root};
use std::fs::File;
use std::io;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};

/// Contents of the namespaces.
#[derive(Debug)]
pub struct View {
    root: PathBuf,
    /// Bind mounts: place on the host, and path in the container.
    binds: Vec<(PathBuf, PathBuf)>,
    /// Network namespace; `None`: a new one.
    network: Option<File>,
}

impl View {
    /// Returns the view of a container, whose file systems are mounted. The calling thread has
    /// entered its network namespace, except for a container in the VM of its sandbox.
    ///
    /// # Errors
    /// That cannot be opened, or is the host's.
    pub fn new(state: &ContainerRecord, bundle: &Bundle) -> Result<Self, Failure> {
        let shared = share::path(&state.vm_folder);
        let binds = bundle.mounts.iter().enumerate().filter(|(_, mount)| mount.is_bind());
        let binds = binds
            .map(|(index, mount)| (shared.join(share::bind_of(&state.id, index)), &mount.place));
        let is_member = bundle.sandbox.is_some();
        Ok(Self {
            root: shared.join(share::root_of(&state.id)),
            binds: binds.map(|(source, place)| (source, place.clone())).collect(),
            network: network_of(is_member, bundle.network.as_deref())?,
        })
    }

    /// Moves this thread to the namespaces.
    ///
    /// # Errors
    /// The host refuses it.
    pub fn enter(&self) -> Result<(), Failure> {
        match &self.network {
            Some(namespace) => network::move_to(namespace)
                .os_error("enter the network namespace of the container")?,
            None => network::enter_own()?,
        }
        self.change_root().os_error("make the mount namespace of the container")
    }

    /// Enters a mount namespace whose root directory is that of the container. All paths of the
    /// container are resolved below it.
    fn change_root(&self) -> io::Result<()> {
        unshare(CloneFlags::CLONE_NEWNS)?;
        mount_change("/", MountPropagationFlags::PRIVATE | MountPropagationFlags::REC)?;
        let copies = self.binds.iter().map(|(source, _)| share::copy_tree(source, true));
        let copies = copies.collect::<io::Result<Vec<_>>>()?;
        mount_bind_recursive(&self.root, &self.root)?;
        chdir(&self.root)?;
        // The old root is below the new one, and goes (pivot_root(2)).
        pivot_root(".", ".")?;
        unmount(".", UnmountFlags::DETACH)?;
        chdir("/")?;
        for (copy, (_, place)) in copies.iter().zip(&self.binds) {
            let flags =
                MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH | MoveMountFlags::MOVE_MOUNT_T_SYMLINKS;
            // Its place may be in a file system of the guest's own, such as `/dev`.
            let _ = move_mount(copy.as_fd(), "", CWD, place, flags);
        }
        Ok(())
    }
}

/// Returns the network namespace of the view; `None`: a new one.
fn network_of(is_member: bool, stated: Option<&Path>) -> Result<Option<File>, Failure> {
    match (is_member, stated) {
        (false, _) => network::current().map(Some),
        (true, stated) => stated.map(network::open).transpose(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_network_is_never_that_of_the_host() {
        assert!(network_of(false, None).unwrap().is_some());
        assert!(network_of(true, None).unwrap().is_none());
        let refused = network_of(true, Some(Path::new("/proc/self/ns/net"))).unwrap_err();
        assert_eq!(refused.message(), "a VM cannot have the host's network namespace");
    }
}
