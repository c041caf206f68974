//! Sandbox of a VM's processes in addition to the seccomp filters (see `hosted_filters`): no access
//! to files, networks and other processes.
//!
//! Each part is an additional layer, which not every host permits to its users: a refused part is
//! skipped, or ends the VM, according to the VM's options.

use core::fmt;

use linux_raw_sys::general as linux;
use linux_raw_sys::landlock;
use linux_raw_sys::prctl;

use crate::sys::{self, Errno};

/// Empty namespaces (namespaces(7)).
const NAMESPACES: u32 = linux::CLONE_NEWUSER
    | linux::CLONE_NEWNS
    | linux::CLONE_NEWNET
    | linux::CLONE_NEWIPC
    | linux::CLONE_NEWUTS
    | linux::CLONE_NEWCGROUP;

/// Parts of the sandbox that the host has refused.
#[derive(Clone, Copy, Debug, Default)]
pub struct Refused {
    /// Namespaces, and an empty root directory.
    pub namespaces: Option<Errno>,
    /// Landlock.
    pub landlock: Option<Errno>,
}

impl Refused {
    /// Returns whether the host has refused nothing.
    pub fn is_empty(&self) -> bool {
        self.namespaces.is_none() && self.landlock.is_none()
    }
}

impl fmt::Display for Refused {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let parts = [("namespaces", self.namespaces), ("Landlock", self.landlock)];
        let mut parts = parts.iter().filter_map(|(name, error)| Some((name, (*error)?)));
        if let Some((name, error)) = parts.next() {
            write!(out, "{name}: {error}")?;
        }
        parts.try_for_each(|(name, error)| write!(out, "; {name}: {error}"))
    }
}

/// Result of [`enter`].
#[derive(Debug)]
pub struct Entered {
    /// Refused parts.
    pub refused: Refused,
    /// The next child of this process begins a PID namespace.
    pub has_pid_namespace: bool,
    /// Landlock confines signals to this process and its children.
    pub has_signal_scope: bool,
}

/// Enters all parts of the sandbox that the host permits, for the only thread of a process; with
/// `separates_children` also a PID namespace for its children. A user namespace grants all
/// capabilities in it, so [`drop_capabilities`] must follow in any case.
pub fn enter(separates_children: bool) -> Entered {
    let mut has_pid_namespace = false;
    // Before Landlock, which forbids the mounts of the namespaces.
    let namespaces = enter_empty_namespaces(separates_children, &mut has_pid_namespace).err();
    let landlock = restrict_with_landlock();
    Entered {
        has_pid_namespace,
        has_signal_scope: landlock == Ok(true),
        refused: Refused { namespaces, landlock: landlock.err() },
    }
}

/// Gives the calling thread new namespaces.
pub(crate) fn unshare(namespaces: u32) -> Result<(), Errno> {
    let arguments = [namespaces.into(), 0, 0, 0, 0, 0];
    // SAFETY: no memory is accessed.
    unsafe { sys::call(linux::__NR_unshare, arguments).map(drop) }
}

fn enter_empty_namespaces(
    separates_children: bool,
    has_pid_namespace: &mut bool,
) -> Result<(), Errno> {
    const EMPTY: &core::ffi::CStr = c"/proc";
    let flags = linux::MS_RDONLY | linux::MS_NOSUID | linux::MS_NODEV | linux::MS_NOEXEC;
    let (type_name, empty) = (c"tmpfs".as_ptr() as u64, EMPTY.as_ptr() as u64);
    let (root, size) = (c"/".as_ptr() as u64, c"nr_inodes=1".as_ptr() as u64);
    let private = u64::from(linux::MS_REC | linux::MS_PRIVATE);
    unshare(NAMESPACES)?;
    // The host may refuse this namespace alone, or permit it and refuse the following calls.
    *has_pid_namespace = separates_children && unshare(linux::CLONE_NEWPID).is_ok();
    let calls = [
        (linux::__NR_mount, [0, root, 0, private, 0, 0]),
        (linux::__NR_mount, [type_name, empty, type_name, flags.into(), size, 0]),
        (linux::__NR_chdir, [empty, 0, 0, 0, 0, 0]),
        (linux::__NR_chroot, [empty, 0, 0, 0, 0, 0]),
    ];
    for (number, arguments) in calls {
        // SAFETY: strings and structures are only read; no memory of this process changes.
        unsafe { sys::call(number, arguments) }?;
    }
    Ok(())
}

/// Drops all capabilities (capabilities(7)), independent of the other parts: without namespaces
/// those of root, or of a container's root, would remain.
pub fn drop_capabilities() -> Result<(), Errno> {
    keep_capabilities(0)
}

/// Drops all capabilities of this thread but these, of which bit `n` is capability `n`.
///
/// # Errors
/// The thread does not have one of them.
pub fn keep_capabilities(kept: u32) -> Result<(), Errno> {
    // `struct __user_cap_header_struct`, and twice `struct __user_cap_data_struct`: effective,
    // permitted and inheritable ones, the first 32 of each and then the others.
    let header = [linux::_LINUX_CAPABILITY_VERSION_3, 0];
    let sets = [kept, kept, 0, 0, 0, 0];
    let arguments = [header.as_ptr() as u64, sets.as_ptr() as u64, 0, 0, 0, 0];
    // SAFETY: both structures are only read.
    unsafe { sys::call(linux::__NR_capset, arguments).map(drop) }
}

/// Keeps this thread's capabilities whatever its file system user is, and those of threads that it
/// creates ([`set_file_owner`]).
///
/// # Errors
/// The thread does not have `CAP_SETPCAP`.
pub fn keep_capabilities_of_other_users() -> Result<(), Errno> {
    // `SECBIT_NO_SETUID_FIXUP` and its lock (`include/uapi/linux/securebits.h` in Linux).
    const NO_SETUID_FIXUP: u32 = 1 << 2 | 1 << 3;
    sys::set_attribute(prctl::PR_SET_SECUREBITS, NO_SETUID_FIXUP)
}

/// Sets the user and group that own the files which this thread creates (setfsuid(2)).
///
/// # Errors
/// `EINVAL`: the host does not know an id, or the thread may not use it. Then one of the ids may
/// have changed.
pub fn set_file_owner(user: u32, group: u32) -> Result<(), Errno> {
    for (number, id) in [(linux::__NR_setfsgid, group), (linux::__NR_setfsuid, user)] {
        let set = |id: u32| {
            // SAFETY: no memory is accessed.
            unsafe { sys::call(number, [id.into(), 0, 0, 0, 0, 0]) }
        };
        set(id)?;
        // The call reports no error, but the previous id; this one is never valid.
        if set(u32::MAX)? != u64::from(id) {
            return Err(Errno(linux_raw_sys::errno::EINVAL as i32));
        }
    }
    Ok(())
}

/// Restricts everything that the host's Landlock supports (landlock(7)): files, TCP ports, abstract
/// Unix sockets, signals. Returns whether the last two are supported.
pub fn restrict_with_landlock() -> Result<bool, Errno> {
    const FIRST_FILES: u64 = landlock::LANDLOCK_ACCESS_FS_MAKE_SYM as u64 * 2 - 1;
    let query = [0, 0, landlock::LANDLOCK_CREATE_RULESET_VERSION.into(), 0, 0, 0];
    // SAFETY: no memory is accessed.
    let version = unsafe { sys::call(linux::__NR_landlock_create_ruleset, query) }?;
    let since = |first: u64, rights: u32| if version >= first { u64::from(rights) } else { 0 };
    let files = FIRST_FILES
        | since(2, landlock::LANDLOCK_ACCESS_FS_REFER)
        | since(3, landlock::LANDLOCK_ACCESS_FS_TRUNCATE)
        | since(5, landlock::LANDLOCK_ACCESS_FS_IOCTL_DEV);
    let ports = since(4, landlock::LANDLOCK_ACCESS_NET_BIND_TCP)
        | since(4, landlock::LANDLOCK_ACCESS_NET_CONNECT_TCP);
    let scopes = since(6, landlock::LANDLOCK_SCOPE_ABSTRACT_UNIX_SOCKET)
        | since(6, landlock::LANDLOCK_SCOPE_SIGNAL);
    // `struct landlock_ruleset_attr`, truncated to the host's version.
    let rules = [files, ports, scopes];
    let known = match version {
        ..4 => 1,
        4..6 => 2,
        6.. => 3,
    };
    let arguments = [rules.as_ptr() as u64, 8 * known, 0, 0, 0, 0];
    // SAFETY: the structure is only read.
    let rules = unsafe { sys::call(linux::__NR_landlock_create_ruleset, arguments) }?;
    sys::set_attribute(prctl::PR_SET_NO_NEW_PRIVS, 1)?;
    // SAFETY: no memory is accessed.
    let locked = unsafe { sys::call(linux::__NR_landlock_restrict_self, [rules, 0, 0, 0, 0, 0]) };
    sys::close(rules as u32, rules as u32)?;
    locked.map(|_| version >= 6)
}
