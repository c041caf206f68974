//! Containers: namespaces, root directory, file systems and devices, which the first process makes
//! for itself, and which further processes enter.
//!
//! All paths of a container are resolved after its root has become this process' root, so that its
//! symbolic links lead nowhere else.

use crate::{cgroup, copy_up};
use nix::sched::{CloneFlags, unshare};
use proto::agent::Strings;
use proto::agent::container::{Container, ContainerMount, Device};
use rustix::fs::{self, CWD, FileType, Gid, Mode, OFlags, ResolveFlags, StatVfsMountFlags, Uid};
use rustix::io::Errno;
use rustix::mount::{
    MountFlags, MountPropagationFlags, MoveMountFlags, OpenTreeFlags, UnmountFlags, mount,
    mount_bind_recursive, mount_change, mount_remount, move_mount, open_tree, unmount,
};
use rustix::process::{Pid, chdir, pivot_root};
use rustix::pty::OpenptFlags;
use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};
use serde::{Deserialize, Serialize};
use std::ffi::{CString, OsStr};
use std::fs as files;
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt, symlink};
use std::path::{Path, PathBuf};

/// Place of the disk with changes of containers, each in a folder of its name.
pub const SCRATCH: &str = "/scratch";
/// Kernel parameters.
const PARAMETERS: &str = "/proc/sys";

/// Devices that every container has: character devices with these numbers (OCI runtime
/// specification, "Default Devices").
const DEVICES: [(&str, u32, u32); 6] = [
    (NULL, 1, 3),
    ("/dev/zero", 1, 5),
    ("/dev/full", 1, 7),
    ("/dev/random", 1, 8),
    ("/dev/urandom", 1, 9),
    ("/dev/tty", 5, 0),
];
const NULL: &str = "/dev/null";
const CONSOLE: &str = "/dev/console";
/// Links that every container has.
const LINKS: [(&str, &str); 5] = [
    ("/proc/self/fd", "/dev/fd"),
    ("/proc/self/fd/0", "/dev/stdin"),
    ("/proc/self/fd/1", "/dev/stdout"),
    ("/proc/self/fd/2", "/dev/stderr"),
    ("pts/ptmx", "/dev/ptmx"),
];

/// Adds to an error what was done.
fn named(what: impl std::fmt::Display) -> impl FnOnce(io::Error) -> io::Error {
    move |error| io::Error::new(error.kind(), format!("{what}: {error}"))
}

/// Gives this process, the first one of its PID namespace if the container has one of its own, the
/// other namespaces, the root and the file systems of a container.
pub fn create(container: &Container<'_>, has_terminal: bool) -> io::Result<()> {
    cgroup::create(container.name, &container.limits, &container.device_filter)?;
    cgroup::join(container.name)?;
    let mut flags = CloneFlags::CLONE_NEWNS | CloneFlags::CLONE_NEWCGROUP;
    flags.set(CloneFlags::CLONE_NEWIPC, container.namespaces.ipc);
    flags.set(CloneFlags::CLONE_NEWUTS, container.namespaces.uts);
    unshare(flags).map_err(io::Error::from).map_err(named("make namespaces"))?;
    let private = MountPropagationFlags::PRIVATE | MountPropagationFlags::REC;
    mount_change("/", private)?;
    if container.namespaces.uts && !container.hostname.is_empty() {
        let set = rustix::system::sethostname(container.hostname.as_bytes());
        set.map_err(io::Error::from).map_err(named("set the host name"))?;
    }
    set_parameters(&container.parameters)?;
    // Modes of new files are those that are stated.
    rustix::process::umask(Mode::empty());
    let sources = container.mounts.iter().map(|mount| match mount.kind {
        "" => copy_tree(mount.source).map(Some),
        _ => Ok(None),
    });
    let sources = sources.collect::<io::Result<Vec<_>>>()?;
    let console = has_terminal.then(terminal).transpose()?;
    let covers = container.masked.iter().map(|_| copy_tree(NULL.as_bytes()));
    let covers = covers.collect::<io::Result<Vec<_>>>()?;
    let guest_devices = match container.has_all_devices {
        true => guest_devices(Path::new("/dev")).map_err(named("list the guest's devices"))?,
        false => Vec::new(),
    };
    let root = Path::new(OsStr::from_bytes(container.root));
    match container.has_scratch {
        true => change_root(&mount_overlay(container.name, root)?)?,
        false => change_root(root)?,
    }
    for (mount, source) in container.mounts.iter().zip(sources) {
        let place = Path::new(OsStr::from_bytes(mount.place));
        mount_one(mount, source, place)
            .map_err(named(format_args!("mount {}", place.display())))?;
    }
    // As other runtimes do; one that cannot be created fails when the process enters it.
    let _ = create_folder(Path::new(OsStr::from_bytes(container.process.command.folder)));
    make_devices(&container.devices, &guest_devices).map_err(named("make devices"))?;
    if let Some(console) = console {
        attach(console, Path::new(CONSOLE)).map_err(named("mount the console"))?;
    }
    protect(container.masked, covers, container.read_only_paths)?;
    if container.read_only {
        remount("/", MountFlags::RDONLY).map_err(named("make the root read-only"))?;
    }
    Ok(())
}

fn set_parameters(parameters: &[(&str, &str)]) -> io::Result<()> {
    for (name, value) in parameters {
        let path = Path::new(PARAMETERS).join(name.replace('.', "/"));
        files::write(path, value).map_err(named(format_args!("set {name}")))?;
    }
    Ok(())
}

/// Returns a copy of the file systems at a path of the guest, to be attached elsewhere.
fn copy_tree(source: &[u8]) -> io::Result<OwnedFd> {
    let flags = OpenTreeFlags::OPEN_TREE_CLONE
        | OpenTreeFlags::OPEN_TREE_CLOEXEC
        | OpenTreeFlags::AT_RECURSIVE;
    let source = Path::new(OsStr::from_bytes(source));
    let tree = open_tree(CWD, source, flags).map_err(io::Error::from);
    tree.map_err(named(format_args!("find {}", source.display())))
}

/// Returns the terminal of this process, to be attached as the console.
fn terminal() -> io::Result<OwnedFd> {
    let path = files::read_link("/proc/self/fd/0")?;
    copy_tree(path.as_os_str().as_bytes())
}

/// Mounts the root of a container below its changes, and returns the place.
fn mount_overlay(name: &str, root: &Path) -> io::Result<PathBuf> {
    let own = Path::new(SCRATCH).join(name);
    let [upper, work, place] = ["upper", "work", "root"].map(|folder| own.join(folder));
    let mount = || {
        for folder in [&upper, &work, &place] {
            files::create_dir_all(folder)?;
        }
        // The overlay's root has mode and owner of the upper folder.
        let below = fs::stat(root)?;
        fs::chown(&upper, Some(Uid::from_raw(below.st_uid)), Some(Gid::from_raw(below.st_gid)))?;
        fs::chmod(&upper, Mode::from_raw_mode(below.st_mode & 0o7777))?;
        let [root, upper, work] = [root, &upper, &work].map(Path::display);
        let data = format!("lowerdir={root},upperdir={upper},workdir={work}");
        mount("overlay", &place, "overlay", MountFlags::empty(), Some(&*CString::new(data)?))?;
        Ok(())
    };
    mount().map_err(named("mount the scratch disk above the root"))?;
    Ok(place)
}

/// Removes the changes of a container that has ended, if there is a disk of them.
pub fn remove_scratch(name: &str) {
    // A process that was just killed may still have files open; the disk ends with the guest.
    let _ = files::remove_dir_all(Path::new(SCRATCH).join(name));
}

fn change_root(root: &Path) -> io::Result<()> {
    let change = || {
        // The new root must be a mount point.
        mount_bind_recursive(root, root)?;
        // Devices of a container whose `/dev` is no file system of its own are there: the shared
        // directory's `nodev` is not for them.
        mount_remount(root, MountFlags::BIND, "")?;
        chdir(root)?;
        // The old root is below the new one, and goes (pivot_root(2)).
        pivot_root(".", ".")?;
        unmount(".", UnmountFlags::DETACH)?;
        chdir("/")
    };
    change().map_err(io::Error::from).map_err(named("change to the container's root"))
}

/// Mounts one file system, or attaches what was copied before the change of the root.
fn mount_one(one: &ContainerMount<'_>, source: Option<OwnedFd>, place: &Path) -> io::Result<()> {
    let place = &resolve(Path::new("/"), place)?;
    let flags = MountFlags::from_bits_retain(one.flags);
    if let Some(source) = source {
        let is_folder = FileType::from_raw_mode(fs::fstat(&source)?.st_mode) == FileType::Directory;
        match is_folder {
            true => create_folder(place)?,
            false => create_file(place)?,
        }
        attach(source, place)?;
        // Without a flag, too: the copied file system has that of the shared directory, `nodev`.
        return remount(place, flags);
    }
    let has_place = place.is_dir();
    create_folder(place)?;
    // Guests have cgroups of version 2 only.
    let kind = if one.kind == "cgroup" { "cgroup2" } else { one.kind };
    let mut data = one.data.to_owned();
    if kind == "tmpfs" && has_place && !data.split(',').any(|option| option.starts_with("mode=")) {
        let comma = if data.is_empty() { "" } else { "," };
        data = format!("mode={:o}{comma}{data}", place.metadata()?.mode() & 0o7777);
    }
    let below = one.copies.then(|| files::File::open(place)).transpose()?;
    // A file system that is to be read-only is so after the copy.
    let mut first = flags;
    first.set(MountFlags::RDONLY, flags.contains(MountFlags::RDONLY) && !one.copies);
    let name = Path::new(OsStr::from_bytes(one.source));
    mount(name, place, kind, first, Some(&*CString::new(data)?))?;
    let Some(below) = below else { return Ok(()) };
    copy_up::fill(&below, place).map_err(named("copy the folder below"))?;
    if first == flags { Ok(()) } else { remount(place, flags) }
}

/// Returns the path to which the links of a path in a root lead, which need not exist.
///
/// # Errors
/// `ELOOP`: the path has more links than Linux follows.
fn resolve(root: &Path, place: &Path) -> io::Result<PathBuf> {
    /// Of Linux: `MAXSYMLINKS` (include/linux/namei.h).
    const MAX_LINKS: u32 = 40;
    let reversed = |path: &Path| path.iter().rev().map(OsStr::to_owned).collect::<Vec<_>>();
    let mut rest = reversed(place);
    let mut found = root.to_owned();
    let mut links = 0;
    while let Some(part) = rest.pop() {
        match part.as_bytes() {
            b"/" => found = root.to_owned(),
            b"." => {}
            b".." if found == root => {}
            b".." => drop(found.pop()),
            _ => {
                found.push(part);
                let Ok(target) = files::read_link(&found) else { continue };
                links += 1;
                if links > MAX_LINKS {
                    return Err(Errno::LOOP.into());
                }
                found.pop();
                rest.extend(reversed(&target));
            }
        }
    }
    Ok(found)
}

/// Creates a folder and those above it, which only root may change.
fn create_folder(place: &Path) -> io::Result<()> {
    files::DirBuilder::new().recursive(true).mode(0o755).create(place)
}

/// Creates an empty file as a mount point, unless something is there.
fn create_file(place: &Path) -> io::Result<()> {
    if place.exists() {
        return Ok(());
    }
    if let Some(parent) = place.parent() {
        create_folder(parent)?;
    }
    let mut options = files::OpenOptions::new();
    options.write(true).create(true).truncate(false).mode(0o644).open(place).map(drop)
}

fn attach(tree: OwnedFd, place: &Path) -> io::Result<()> {
    if place == Path::new(CONSOLE) {
        create_file(place)?;
    }
    let flags = MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH | MoveMountFlags::MOVE_MOUNT_T_SYMLINKS;
    move_mount(tree.as_fd(), "", CWD, place, flags).map_err(io::Error::from)
}

fn remount(place: impl rustix::path::Arg, flags: MountFlags) -> io::Result<()> {
    mount_remount(place, MountFlags::BIND | flags, "").map_err(io::Error::from)
}

/// Device node of the guest.
struct GuestDevice {
    path: PathBuf,
    mode: u32,
    number: u64,
}

impl GuestDevice {
    fn node(&self) -> Device<'_> {
        Device {
            path: self.path.as_os_str().as_bytes(),
            mode: self.mode,
            major: fs::major(self.number),
            minor: fs::minor(self.number),
            user: 0,
            group: 0,
        }
    }
}

/// Lists the devices in a folder of the guest and below, without those of other file systems, which
/// are terminals, and without the console.
fn guest_devices(folder: &Path) -> io::Result<Vec<GuestDevice>> {
    let own = folder.symlink_metadata()?.dev();
    let mut found = Vec::new();
    for entry in files::read_dir(folder)? {
        let path = entry?.path();
        let it = path.symlink_metadata()?;
        let kind = FileType::from_raw_mode(it.mode());
        if it.dev() != own || path == Path::new(CONSOLE) {
            continue;
        }
        match kind {
            FileType::Directory => found.extend(guest_devices(&path)?),
            FileType::CharacterDevice | FileType::BlockDevice => {
                found.push(GuestDevice { path, mode: it.mode(), number: it.rdev() });
            }
            _ => {}
        }
    }
    Ok(found)
}

/// Makes a device node of a container. What exists stays, except for a file of another kind in the
/// `replaced` file system, that of an image, which may have a link there.
fn make_device(device: &Device<'_>, replaced: Option<u64>) -> io::Result<()> {
    let path = Path::new(OsStr::from_bytes(device.path));
    if let Some(parent) = path.parent() {
        create_folder(parent)?;
    }
    let kind = FileType::from_raw_mode(device.mode);
    let mode = Mode::from_raw_mode(device.mode);
    let number = fs::makedev(device.major, device.minor);
    let make = |path: &Path| fs::mknodat(CWD, path, kind, mode, number);
    let is_other = || fs::lstat(path).is_ok_and(|it| FileType::from_raw_mode(it.st_mode) != kind);
    // Of a mount of the configuration the files may be the host's. On an overlay only folders have
    // its number.
    let folder = || path.parent().and_then(|folder| fs::stat(folder).ok()).map(|it| it.st_dev);
    match make(path) {
        Err(Errno::EXIST) if replaced.is_some() && replaced == folder() && is_other() => {
            let new = path.with_extension("parador");
            if make(&new).and_then(|()| fs::rename(&new, path)).is_err() {
                let _ = fs::unlink(&new);
                return Ok(());
            }
        }
        Err(Errno::EXIST) => return Ok(()),
        made => made?,
    }
    let (user, group) = (Uid::from_raw(device.user), Gid::from_raw(device.group));
    Ok(fs::chown(path, Some(user), Some(group))?)
}

/// Makes the device nodes and links of a container.
fn make_devices(stated: &[Device<'_>], guest: &[GuestDevice]) -> io::Result<()> {
    const CHARACTER: u32 = 0o020_000;
    let default = DEVICES.iter().map(|&(path, major, minor)| Device {
        path: path.as_bytes(),
        mode: CHARACTER | 0o666,
        major,
        minor,
        user: 0,
        group: 0,
    });
    let image = fs::stat("/")?.st_dev;
    for device in default {
        make_device(&device, Some(image))?;
    }
    for device in stated.iter().cloned().chain(guest.iter().map(GuestDevice::node)) {
        make_device(&device, None)?;
    }
    for (target, link) in LINKS {
        match symlink(target, link) {
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
            made => made?,
        }
    }
    Ok(())
}

/// Hides paths, files by `covers`, which are the guest's `/dev/null`: that of an image may lead to
/// another file. Makes others read-only. Paths that do not exist need neither.
fn protect(masked: Strings<'_>, covers: Vec<OwnedFd>, read_only: Strings<'_>) -> io::Result<()> {
    let masked = masked.iter().map(|path| Path::new(OsStr::from_bytes(path)));
    for (path, cover) in masked.zip(covers) {
        let hide = match path.metadata() {
            Err(_) => continue,
            Ok(it) if it.is_dir() => {
                mount("tmpfs", path, "tmpfs", MountFlags::RDONLY, Some(c"size=0k,nr_inodes=2"))
                    .map_err(io::Error::from)
            }
            Ok(_) => attach(cover, path),
        };
        hide.map_err(named(format_args!("hide {}", path.display())))?;
    }
    for path in read_only.iter().map(|path| Path::new(OsStr::from_bytes(path))) {
        if !path.exists() {
            continue;
        }
        let bound = mount_bind_recursive(path, path).map_err(io::Error::from);
        bound
            .and_then(|()| remount(path, flags_of(path)? | MountFlags::RDONLY))
            .map_err(named(format_args!("protect {}", path.display())))?;
    }
    Ok(())
}

/// Returns the flags of the file system at a path that a change of one of them keeps.
fn flags_of(path: &Path) -> io::Result<MountFlags> {
    const KEPT: [(StatVfsMountFlags, MountFlags); 3] = [
        (StatVfsMountFlags::NOSUID, MountFlags::NOSUID),
        (StatVfsMountFlags::NODEV, MountFlags::NODEV),
        (StatVfsMountFlags::NOEXEC, MountFlags::NOEXEC),
    ];
    let found = fs::statvfs(path)?.f_flag;
    let kept = KEPT.iter().filter(|(flag, _)| found.contains(*flag));
    Ok(kept.fold(MountFlags::empty(), |all, (_, flag)| all | *flag))
}

/// Container that further processes enter.
#[derive(Serialize, Deserialize)]
pub struct Member<'a> {
    /// Name of the container.
    pub name: &'a str,
    /// Its first process.
    pub first: i32,
}

impl Member<'_> {
    fn open(&self, namespace: &str) -> io::Result<OwnedFd> {
        let path = format!("/proc/{}/ns/{namespace}", self.first);
        files::File::open(path).map(OwnedFd::from).map_err(named("find the container"))
    }

    /// Opens a pseudoterminal of the container's own file system of terminals; `None`: it has none
    /// at `/dev/pts`. Links of the container lead nowhere else.
    pub fn open_terminal(&self, flags: OpenptFlags) -> Option<OwnedFd> {
        // Of Linux: `linux/magic.h`, and Documentation/admin-guide/devices.txt.
        const DEVPTS: u64 = 0x1cd1;
        const MULTIPLEXER: (u32, u32) = (5, 2);
        let root = files::File::open(format!("/proc/{}/root", self.first)).ok()?;
        let how = ResolveFlags::IN_ROOT | ResolveFlags::NO_MAGICLINKS;
        let found = OFlags::PATH | OFlags::CLOEXEC;
        let found = fs::openat2(&root, "dev/pts/ptmx", found, Mode::empty(), how).ok()?;
        // Another file might have an effect when it is opened.
        let device = fs::fstat(&found).ok()?.st_rdev;
        let is_right = (fs::major(device), fs::minor(device)) == MULTIPLEXER
            && fs::fstatfs(&found).ok()?.f_type.cast_unsigned() == DEVPTS;
        let path = format!("/proc/self/fd/{}", found.as_raw_fd());
        let flags = OFlags::from_bits_retain(flags.bits());
        is_right.then(|| fs::open(path, flags, Mode::empty()).ok()).flatten()
    }

    /// Makes the container's PID namespace that of the later children of this thread.
    pub fn enter_pid_namespace(&self) -> io::Result<()> {
        let namespace = self.open("pid")?;
        let kind = Some(LinkNameSpaceType::ProcessID);
        move_into_link_name_space(namespace.as_fd(), kind).map_err(io::Error::from)
    }

    /// Moves this process into the container, except for its PID namespace.
    pub fn enter(&self) -> io::Result<()> {
        // All are opened before the root changes.
        let all = ["ipc", "uts", "cgroup", "mnt"].map(|name| self.open(name));
        cgroup::join_beside(self.name, self.first)?;
        for namespace in all {
            move_into_link_name_space(namespace?.as_fd(), None)
                .map_err(io::Error::from)
                .map_err(named("enter the container"))?;
        }
        Ok(())
    }
}

/// Gives the later children of this thread a PID namespace of their own.
pub fn new_pid_namespace() -> io::Result<()> {
    unshare(CloneFlags::CLONE_NEWPID).map_err(io::Error::from)
}

/// Returns the number of a process.
pub fn number(pid: Pid) -> i32 {
    pid.as_raw_nonzero().get()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn links_lead_to_what_need_not_exist_in_the_root() {
        let folder = tempfile::tempdir().expect("a folder");
        let root = folder.path();
        for folder in ["etc", "var/lib"] {
            files::create_dir_all(root.join(folder)).expect("a folder");
        }
        for (target, link) in [
            ("../run/resolve/stub", "etc/resolv.conf"),
            ("/run", "var/run"),
            ("../../../../run/lock", "var/lock"),
            ("./lib/../lock/", "var/other"),
            ("loop", "etc/loop"),
            ("etc", "0"),
        ] {
            symlink(target, root.join(link)).expect("a link");
        }
        for link in 1..=40 {
            symlink((link - 1).to_string(), root.join(link.to_string())).expect("a link");
        }
        let found = |place: &str| resolve(root, Path::new(place)).map_err(|it| it.raw_os_error());
        for (place, expected) in [
            ("/", ""),
            ("/etc/new", "etc/new"),
            ("etc/./new/", "etc/new"),
            ("/../etc/missing/../new", "etc/new"),
            ("/etc/resolv.conf", "run/resolve/stub"),
            ("/var/run/secrets/key", "run/secrets/key"),
            ("/var/run/../lib", "lib"),
            ("/var/lock", "run/lock"),
            ("/var/other/a", "run/lock/a"),
            ("/39/new", "etc/new"),
        ] {
            assert_eq!(found(place), Ok(root.join(expected)), "{place}");
        }
        let many = Err(Some(Errno::LOOP.raw_os_error()));
        assert_eq!((found("/etc/loop"), found("/40")), (many.clone(), many));
    }
    #[test]
    fn a_device_replaces_a_link_of_the_image() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("dev/null");
        // Pipes need no privileges.
        let mode = 0o010_600;
        let user = rustix::process::getuid().as_raw();
        let group = rustix::process::getgid().as_raw();
        let bytes = path.as_os_str().as_bytes();
        let device = Device { path: bytes, mode, major: 0, minor: 0, user, group };
        files::create_dir(folder.path().join("dev")).expect("a folder");
        symlink("/proc/sys/kernel/core_pattern", &path).expect("a link");
        let is_pipe = || path.symlink_metadata().expect("a file").mode() == mode;
        let image = Some(folder.path().metadata().expect("a folder").dev());
        for replaced in [None, Some(u64::MAX)] {
            make_device(&device, replaced).expect("it stays");
            assert!(!is_pipe());
        }
        make_device(&device, image).expect("a pipe");
        assert!(is_pipe());
        make_device(&Device { mode: mode | 0o77, ..device }, image).expect("it stays");
        assert!(is_pipe());
        assert_eq!(files::read_dir(folder.path().join("dev")).expect("a folder").count(), 1);
    }
}
