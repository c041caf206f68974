//! Namespaces of a carrier's first thread: engines enter those of the process that they know
//! (`/proc/PID/ns`), and take its root directory for the container's.
//!
//! podman copies files into a running container, and out of it, in this mount namespace: in that of
//! the host it would write the host's files. A network that an engine sets up after `create`, as
//! buildah does, must not be the host's either. The thread sleeps there; all others stay in the
//! host's mount namespace.

use crate::bundle::Bundle;
use crate::mounts;
use crate::network;
use crate::store::ContainerRecord;
use hosted_command::failure::{Failure, IoContext};
use nix::sched::{CloneFlags, unshare};
use rustix::fs::CWD;
use rustix::mount::{
    MountPropagationFlags, MoveMountFlags, OpenTreeFlags, UnmountFlags, mount_bind_recursive,
    mount_change, move_mount, open_tree, unmount,
};
use rustix::process::{chdir, pivot_root};
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::PathBuf;

/// Contents of the namespaces.
#[derive(Debug)]
pub struct View {
    root: PathBuf,
    /// Bind mounts: place on the host, and path in the container.
    binds: Vec<(PathBuf, PathBuf)>,
    network: ViewedNetwork,
}

/// Network namespace of the thread.
#[derive(Debug)]
enum ViewedNetwork {
    /// That of the host: the sandbox has the pod's.
    Host,
    /// One of its own, without interfaces.
    Empty,
    /// The engine's.
    Engine(PathBuf),
}

impl View {
    /// Returns the view of a container, whose file systems are mounted.
    pub fn new(state: &ContainerRecord, bundle: &Bundle) -> Self {
        let share = mounts::share(&state.vm_folder);
        let binds = bundle.mounts.iter().enumerate().filter(|(_, mount)| mount.is_bind());
        let binds = binds
            .map(|(index, mount)| (share.join(mounts::bind_of(&state.id, index)), &mount.place));
        Self {
            root: share.join(mounts::root_of(&state.id)),
            binds: binds.map(|(source, place)| (source, place.clone())).collect(),
            network: match (&bundle.sandbox, &bundle.network) {
                (Some(_), _) => ViewedNetwork::Host,
                (None, None) => ViewedNetwork::Empty,
                (None, Some(path)) => ViewedNetwork::Engine(path.clone()),
            },
        }
    }

    /// Moves this thread to the namespaces.
    ///
    /// # Errors
    /// The host refuses it.
    pub fn enter(&self) -> Result<(), Failure> {
        match &self.network {
            ViewedNetwork::Host => {}
            ViewedNetwork::Empty => unshare(CloneFlags::CLONE_NEWNET)
                .map_err(io::Error::from)
                .os_error("make a network namespace")?,
            ViewedNetwork::Engine(path) => network::enter(path)?,
        }
        self.change_root().os_error("make the mount namespace of the container")
    }

    /// Enters a mount namespace whose root directory is that of the container. All paths of the
    /// container are resolved below it.
    fn change_root(&self) -> io::Result<()> {
        unshare(CloneFlags::CLONE_NEWNS)?;
        mount_change("/", MountPropagationFlags::PRIVATE | MountPropagationFlags::REC)?;
        let copies = self.binds.iter().map(|(source, _)| copy_tree(source));
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

fn copy_tree(source: &PathBuf) -> io::Result<OwnedFd> {
    let flags = OpenTreeFlags::OPEN_TREE_CLONE
        | OpenTreeFlags::OPEN_TREE_CLOEXEC
        | OpenTreeFlags::AT_RECURSIVE;
    Ok(open_tree(CWD, source, flags)?)
}
