//! File systems of the guest: its root below an overlay in memory, those of the kernel, and shared
//! directories.

use crate::{container, modules};
use proto::agent::{Guest, Mount, POD, Root};
use rustix::fs::{self, Mode};
use rustix::io::Errno;
use rustix::mount::{MountFlags, mount, mount_move};
use rustix::process::{chdir, chroot};
use std::ffi::{CStr, CString, OsStr};
use std::fs as files;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{DirBuilderExt, symlink};
use std::path::{Path, PathBuf};

/// Folders in which the agent builds the new root.
const LOWER: &str = "/lower";
const MEMORY: &str = "/memory";
const NEW: &str = "/new";
/// Disks in the order of their options.
const DISK: &str = "vda";

/// File systems of the kernel and in memory: name, place, options, mode of the mount point.
const KERNEL: [(&str, &str, MountFlags, &str); 3] = [
    ("devtmpfs", "/dev", MountFlags::NOSUID, "mode=755"),
    ("proc", "/proc", PRIVATE, ""),
    ("sysfs", "/sys", PRIVATE, ""),
];
/// As [`KERNEL`], only in the new root.
const MORE: [(&str, &str, MountFlags, &str); 5] = [
    ("devpts", "/dev/pts", MountFlags::NOSUID, "gid=5,mode=620,ptmxmode=666"),
    ("tmpfs", "/dev/shm", MountFlags::NOSUID, "mode=1777"),
    ("tmpfs", "/run", MountFlags::NOSUID, "mode=755"),
    ("tmpfs", "/tmp", MountFlags::NOSUID, "mode=1777"),
    ("cgroup2", "/sys/fs/cgroup", PRIVATE, ""),
];
/// As [`MORE`], if the guest's kernel has them: for tracing, by root.
const TRACING: [(&str, &str, MountFlags, &str); 3] = [
    ("tracefs", "/sys/kernel/tracing", PRIVATE, ""),
    ("debugfs", "/sys/kernel/debug", PRIVATE, ""),
    ("bpf", "/sys/fs/bpf", PRIVATE, "mode=700"),
];
const PRIVATE: MountFlags = MountFlags::NOSUID.union(MountFlags::NODEV).union(MountFlags::NOEXEC);

/// Parameter of Linux: free blocks of 4 KiB << n return to the host (mm/page_reporting.c). Linux
/// sets it to 2 MiB when its balloon starts; most of what the start of a guest leaves free is in
/// smaller blocks.
const REPORTING_ORDER: (&str, &str) =
    ("/sys/module/page_reporting/parameters/page_reporting_order", "5");

/// Parameter of Linux: the largest limit of open files that a process may have. This is the most
/// that Linux takes for 64-bit machines (fs/file.c), and what systemd sets on hosts, so that limits
/// of containers which hosts accept are not refused.
const MOST_FILES: (&str, &str) = ("/proc/sys/fs/nr_open", "2147483584");

/// Parameter of Linux: programs of BPF are interpreted. The first one that is compiled occupies
/// 2 MiB (kernel/bpf/core.c), and the filters of containers are short: seccomp keeps the decisions
/// for most system calls, and that for devices runs when a device node is opened.
const NO_COMPILATION: (&str, &str) = ("/proc/sys/net/core/bpf_jit_enable", "0");

/// Links in `/dev` that programs expect (Linux' `Documentation/admin-guide/devices.rst`).
const LINKS: [(&str, &str); 4] = [
    ("/proc/self/fd", "/dev/fd"),
    ("/proc/self/fd/0", "/dev/stdin"),
    ("/proc/self/fd/1", "/dev/stdout"),
    ("/proc/self/fd/2", "/dev/stderr"),
];

/// 9P over virtio with one session for all users: the kernel of the guest checks modes, the host
/// its own rights.
const NINEP: &str = "trans=virtio,version=9p2000.L,msize=512000,access=any";
/// The same for a directory with the owners of files: one session for each user.
const NINEP_OWNERS: &CStr = c"trans=virtio,version=9p2000.L,msize=512000,cache=mmap";

/// Adds to an error what was done.
fn named(what: impl std::fmt::Display) -> impl FnOnce(Errno) -> io::Error {
    move |error| {
        let error = io::Error::from(error);
        io::Error::new(error.kind(), format!("{what}: {error}"))
    }
}

/// Mounts what the agent itself needs.
pub fn mount_kernel_file_systems() -> io::Result<()> {
    KERNEL.iter().try_for_each(|entry| mount_in(Path::new("/"), entry))?;
    // Some VM has no balloon, some kernel no such parameter.
    let (file, value) = REPORTING_ORDER;
    let _ = files::write(file, value);
    let (file, value) = MOST_FILES;
    files::write(file, value).map_err(|error| {
        io::Error::new(error.kind(), format!("raise the limit of open files: {error}"))
    })
}

/// Changes to the root of a guest, without its shared directories: all files there are the guest's
/// own.
pub fn change(guest: &Guest<'_>) -> io::Result<()> {
    rustix::system::sethostname(guest.name.as_bytes()).map_err(named("set the host name"))?;
    for folder in [LOWER, MEMORY, NEW] {
        create(Path::new(folder))?;
    }
    match &guest.root {
        Root::Share(tag) => mount_share(tag, Path::new(LOWER), true)?,
        Root::Disk => mount_disk()?,
        Root::FileSystem => {
            let mounted = mount_ext4(DISK);
            mounted.map_err(named("mount the file system of the first disk"))?;
        }
        Root::Pod { .. } => {}
    }
    match &guest.root {
        Root::Pod { tag, has_scratch, .. } => {
            mount_pod(tag, *has_scratch)?;
            // Some kernel has no compiler.
            let (file, value) = NO_COMPILATION;
            let _ = files::write(file, value);
        }
        _ => mount_overlay()?,
    }
    let new = Path::new(NEW);
    KERNEL.iter().chain(&MORE).try_for_each(|entry| mount_in(new, entry))?;
    let has_place = |entry: &&(_, &str, _, _)| new.join(entry.1.trim_start_matches('/')).is_dir();
    // No container sees those of a pod, and their files occupy 7 MiB.
    if !matches!(guest.root, Root::Pod { .. }) {
        TRACING.iter().filter(has_place).try_for_each(|entry| mount_in(new, entry))?;
    }
    enter_new_root()?;
    if let Root::Pod { modules, .. } = guest.root
        && !modules.is_empty()
    {
        create(Path::new(modules::PLACE))?;
        symlink(Path::new(OsStr::from_bytes(modules)), modules::folder())?;
    }
    modules::become_loader()?;
    for (target, link) in LINKS {
        // The kernel's file system of devices is new.
        symlink(target, link)?;
    }
    Ok(())
}

/// Mounts shared directories, whose files are the host's from here on.
pub fn mount_shares(mounts: &[Mount<'_>]) -> io::Result<()> {
    // Parents come before the directories below them, whatever the order of the request.
    let mut mounts: Vec<&Mount<'_>> = mounts.iter().collect();
    mounts.sort_by_key(|mount| mount.place.len());
    for Mount { tag, place, read_only, owners } in mounts {
        let place = Path::new(OsStr::from_bytes(place));
        create(place)?;
        if *owners {
            mount_owners(tag, place)?;
        } else {
            mount_share(tag, place, *read_only)?;
        }
    }
    Ok(())
}

/// Creates a folder and its parents, readable by all users.
fn create(folder: &Path) -> io::Result<()> {
    let made = files::DirBuilder::new().recursive(true).mode(0o755).create(folder);
    made.map_err(|error| {
        io::Error::new(error.kind(), format!("create {}: {error}", folder.display()))
    })
}

fn mount_in(
    root: &Path,
    &(kind, place, flags, data): &(&str, &str, MountFlags, &str),
) -> io::Result<()> {
    let place = root.join(place.trim_start_matches('/'));
    create(&place)?;
    let data = CString::new(data)?;
    match mount(kind, &place, kind, flags, Some(&*data)) {
        // The agent's own, which the kernel has mounted.
        Err(Errno::BUSY) => Ok(()),
        done => done.map_err(named(format_args!("mount {}", place.display()))),
    }
}

/// Mounts a shared directory. What cannot be written is cached; the host may change the rest at any
/// time.
fn mount_share(tag: &str, place: &Path, read_only: bool) -> io::Result<()> {
    let (flags, cache) = match read_only {
        true => (MountFlags::RDONLY, "loose"),
        false => (MountFlags::empty(), "mmap"),
    };
    let data = CString::new(format!("{NINEP},cache={cache}"))?;
    mount(tag, place, "9p", flags | MountFlags::NODEV, Some(&*data))
        .map_err(named(format_args!("mount the shared directory {tag} at {}", place.display())))
}

/// Mounts a shared directory with the owners of files, for changes.
fn mount_owners(tag: &str, place: &Path) -> io::Result<()> {
    mount(tag, place, "9p", MountFlags::NODEV, Some(NINEP_OWNERS))
        .map_err(named(format_args!("mount the shared directory {tag} at {}", place.display())))
}

/// Mounts a new root in memory, with the directory of containers, and a disk for their changes.
fn mount_pod(tag: &str, has_scratch: bool) -> io::Result<()> {
    mount("tmpfs", NEW, "tmpfs", MountFlags::empty(), Some(c"mode=755"))
        .map_err(named("mount the root"))?;
    let place = Path::new(NEW).join(POD.trim_start_matches('/'));
    create(&place)?;
    mount_owners(tag, &place)?;
    if has_scratch {
        let place = Path::new(NEW).join(container::SCRATCH.trim_start_matches('/'));
        create(&place)?;
        let disk = Path::new("/dev").join(DISK);
        mount(disk, &place, "ext4", MountFlags::NODEV, None)
            .map_err(named("mount the scratch disk"))?;
    }
    Ok(())
}

/// Mounts the root on the first disk, or on the first of its partitions that has one. It is not
/// written: a journal of a system that was not shut down is not replayed.
fn mount_disk() -> io::Result<()> {
    let mut names: Vec<String> = files::read_dir(Path::new("/sys/block").join(DISK))
        .map_err(|error| io::Error::new(error.kind(), format!("find the disk: {error}")))?
        .filter_map(|entry| entry.ok()?.file_name().into_string().ok())
        .filter(|name| name.starts_with(DISK))
        .collect();
    names.sort_by_key(|name| (name.len(), name.clone()));
    names.insert(0, DISK.to_owned());
    for name in names {
        if mount_ext4(&name).is_err() {
            continue;
        }
        // A link to a program below its own root may lead nowhere here.
        if ["bin/sh", "usr/bin/sh"]
            .iter()
            .any(|shell| files::symlink_metadata(Path::new(LOWER).join(shell)).is_ok())
        {
            return Ok(());
        }
        rustix::mount::unmount(LOWER, rustix::mount::UnmountFlags::empty())?;
    }
    Err(io::Error::other("the disk has no ext4 file system with /bin/sh"))
}

/// Mounts the file system of a block device below the overlay.
fn mount_ext4(name: &str) -> Result<(), Errno> {
    let device = PathBuf::from("/dev").join(name);
    mount(&device, LOWER, "ext4", MountFlags::RDONLY, Some(c"noload"))
}

/// Mounts the new root: what is below, and changes in memory.
fn mount_overlay() -> io::Result<()> {
    let data = c"mode=755";
    mount("tmpfs", MEMORY, "tmpfs", MountFlags::empty(), Some(data))
        .map_err(named("mount the memory of changes"))?;
    let [upper, work] = ["upper", "work"].map(|name| format!("{MEMORY}/{name}"));
    for folder in [&upper, &work] {
        create(Path::new(folder))?;
    }
    // The overlay's root has the mode of the upper folder.
    let below = fs::stat(LOWER).map_err(named("find the mode of the root"))?;
    fs::chmod(&upper, Mode::from_raw_mode(below.st_mode & 0o7777))?;
    let data = CString::new(format!("lowerdir={LOWER},upperdir={upper},workdir={work}"))?;
    mount("overlay", NEW, "overlay", MountFlags::empty(), Some(&*data))
        .map_err(named("mount the overlay"))
}

/// Makes the new root this process' root.
fn enter_new_root() -> io::Result<()> {
    let step = |done: Result<(), Errno>| done.map_err(named("change to the new root"));
    step(chdir(NEW))?;
    step(mount_move(".", "/"))?;
    step(chroot("."))?;
    step(chdir("/"))
}
