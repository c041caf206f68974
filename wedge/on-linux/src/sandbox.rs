//! What a machine's processes give up beside system calls (see `hosted_vmm`'s filters): names of files, networks, other processes.
//!
//! The device process does it before it makes any other, which inherit it. Each part is one more wall behind the filters, and not every
//! host lets its users have it: a part that the host refuses is left out, or ends the machine, as the loader says.

use core::fmt;

use linux_raw_sys::general as linux;
use linux_raw_sys::landlock;
use proto::wedge::option;

use crate::config::has;
use crate::sys::{self, Errno};

/// Namespaces without anything in them (namespaces(7)).
const NAMESPACES: u32 = linux::CLONE_NEWUSER
    | linux::CLONE_NEWNS
    | linux::CLONE_NEWNET
    | linux::CLONE_NEWIPC
    | linux::CLONE_NEWUTS
    | linux::CLONE_NEWCGROUP;

/// What keeps signals of this process's children within the machine.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Signals {
    /// Nothing.
    Unconfined,
    /// Landlock.
    Landlock,
    /// A namespace of processes, which begins with the next one that this one makes.
    PidNamespace,
}

/// What the host has refused.
#[derive(Clone, Copy, Debug, Default)]
pub struct Refused {
    /// Namespaces, and an empty folder as root of all files.
    pub namespaces: Option<Errno>,
    /// Landlock.
    pub landlock: Option<Errno>,
}

impl Refused {
    /// Nothing.
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

/// Gives up everything that the host lets this process give up.
pub fn enter() -> (Refused, Signals) {
    let mut signals = Signals::Unconfined;
    // Landlock forbids mounts, which namespaces need.
    let namespaces = enter_empty_namespaces(&mut signals).err();
    let landlock = restrict_with_landlock();
    // A process that traces is told of signals first.
    if landlock == Ok(true) && signals == Signals::Unconfined && !has(option::TRACED) {
        signals = Signals::Landlock;
    }
    (Refused { namespaces, landlock: landlock.err() }, signals)
}

fn unshare(namespaces: u32) -> Result<(), Errno> {
    let arguments = [namespaces.into(), 0, 0, 0, 0, 0];
    // SAFETY: no memory is touched.
    unsafe { sys::call(linux::__NR_unshare, arguments).map(drop) }
}

fn enter_empty_namespaces(signals: &mut Signals) -> Result<(), Errno> {
    const EMPTY: &core::ffi::CStr = c"/proc";
    let flags = linux::MS_RDONLY | linux::MS_NOSUID | linux::MS_NODEV | linux::MS_NOEXEC;
    let (type_name, empty) = (c"tmpfs".as_ptr() as u64, EMPTY.as_ptr() as u64);
    let (root, size) = (c"/".as_ptr() as u64, c"nr_inodes=1".as_ptr() as u64);
    let private = u64::from(linux::MS_REC | linux::MS_PRIVATE);
    unshare(NAMESPACES)?;
    // It may be refused alone, and may have been had when what follows is refused.
    if !has(option::TRACED) && unshare(linux::CLONE_NEWPID).is_ok() {
        *signals = Signals::PidNamespace;
    }
    let calls = [
        (linux::__NR_mount, [0, root, 0, private, 0, 0]),
        (linux::__NR_mount, [type_name, empty, type_name, flags.into(), size, 0]),
        (linux::__NR_chdir, [empty, 0, 0, 0, 0, 0]),
        (linux::__NR_chroot, [empty, 0, 0, 0, 0, 0]),
    ];
    for (number, arguments) in calls {
        // SAFETY: texts and structures are read; none of this process's memory changes.
        unsafe { sys::call(number, arguments) }?;
    }
    Ok(())
}

/// Gives up all capabilities (capabilities(7)), whatever else the host has refused: without namespaces those of root, or those
/// of root in a container, would be left.
pub fn drop_capabilities() -> Result<(), Errno> {
    // `struct __user_cap_header_struct`, and twice `struct __user_cap_data_struct`.
    let header = [u64::from(linux::_LINUX_CAPABILITY_VERSION_3)];
    let none = [0_u64; 3];
    let arguments = [header.as_ptr() as u64, none.as_ptr() as u64, 0, 0, 0, 0];
    // SAFETY: both structures are read.
    unsafe { sys::call(linux::__NR_capset, arguments).map(drop) }
}

/// Forbids everything that the host's Landlock knows (landlock(7)): files, ports, sockets without a file, signals to others. Gives whether it knows these.
fn restrict_with_landlock() -> Result<bool, Errno> {
    const FIRST_FILES: u64 = landlock::LANDLOCK_ACCESS_FS_MAKE_SYM as u64 * 2 - 1;
    let query = [0, 0, landlock::LANDLOCK_CREATE_RULESET_VERSION.into(), 0, 0, 0];
    // SAFETY: no memory is touched.
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
    // `struct landlock_ruleset_attr`, as long as this host knows it.
    let rules = [files, ports, scopes];
    let known = match version {
        ..4 => 1,
        4..6 => 2,
        6.. => 3,
    };
    let arguments = [rules.as_ptr() as u64, 8 * known, 0, 0, 0, 0];
    // SAFETY: the structure is read.
    let rules = unsafe { sys::call(linux::__NR_landlock_create_ruleset, arguments) }?;
    // SAFETY: no memory is touched.
    let locked = unsafe { sys::call(linux::__NR_landlock_restrict_self, [rules, 0, 0, 0, 0, 0]) };
    sys::close(rules as u32, rules as u32)?;
    locked.map(|_| version >= 6)
}
