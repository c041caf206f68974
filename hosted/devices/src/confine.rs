//! Privileges that a device process drops before it serves: system calls, file access, descriptors,
//! memory.

use std::error::Error;
use std::fmt;
use std::io;
use std::iter;
use std::os::fd::BorrowedFd;

use host_linux::sandbox;
use hosted_filters::{DeviceAccess, confine_device};
use landlock::{
    ABI, Access, AccessFs, AccessNet, CompatLevel, Compatible, PathBeneath, Ruleset, RulesetAttr,
    RulesetCreatedAttr,
};
use linux_raw_sys::general as linux;
use proto::errno::Cause;
use rustix::fs::Mode;
use rustix::process::{
    DumpableBehavior, Resource, Rlimit, getrlimit, set_dumpable_behavior, setrlimit, umask,
};

use crate::threads::Threads;

/// Limit of a process's own memory: tables of an image with the largest clusters fit.
pub const OWN_MEMORY: u64 = 512 << 20;

/// Limit of a process's descriptors, each of which costs host memory.
const MAX_FILES: u64 = 1 << 16;

/// Describes the cause of an error: the host's error by its name if there is one, else the text.
pub fn describe(error: &(dyn Error + 'static)) -> String {
    let host = iter::successors(Some(error), |&error| error.source())
        .find_map(|error| error.downcast_ref::<io::Error>());
    match host {
        Some(host) => Cause::new(host.raw_os_error(), host).to_string(),
        None => error.to_string(),
    }
}

/// Failure to set up a device process.
#[derive(Debug)]
pub struct SetupError {
    text: String,
    is_of_host: bool,
}

impl SetupError {
    /// Creates a failure with a reason.
    pub fn new(what: &str, why: impl fmt::Display) -> Self {
        Self { text: format!("{what}: {why}"), is_of_host: false }
    }

    /// Creates a failure with the host's error as the reason.
    pub fn host(what: &str, why: &io::Error) -> Self {
        Self { is_of_host: true, ..Self::new(what, Cause::new(why.raw_os_error(), why)) }
    }

    /// Returns whether the host refused an operation; otherwise an input is invalid.
    pub fn is_of_host(&self) -> bool {
        self.is_of_host
    }
}

impl fmt::Display for SetupError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

impl From<io::Error> for SetupError {
    fn from(error: io::Error) -> Self {
        Self::host("cannot set up a device process", &error)
    }
}

/// File access of a process.
#[derive(Clone, Copy, Debug)]
pub enum FileAccess<'a> {
    /// Reads and writes its open file.
    Own,
    /// Reads below a folder.
    Read(BorrowedFd<'a>),
    /// Reads below a folder, files of all owners.
    ReadOwners(BorrowedFd<'a>),
    /// Reads and changes files below a folder.
    Change(BorrowedFd<'a>),
    /// Reads and changes files of all owners below a folder, and creates device nodes.
    Owners(BorrowedFd<'a>),
    /// None: it copies data between sockets that it has, accepts or receives.
    Sockets,
}

impl FileAccess<'_> {
    fn access(self) -> DeviceAccess {
        match self {
            Self::Own => DeviceAccess::Own,
            Self::Read(_) | Self::ReadOwners(_) => DeviceAccess::Read,
            Self::Change(_) => DeviceAccess::Change,
            Self::Owners(_) => DeviceAccess::Owners,
            Self::Sockets => DeviceAccess::Sockets,
        }
    }

    /// Returns the capabilities that the access requires (capabilities(7)), as a set of bits.
    fn capabilities(self) -> u32 {
        let set = |all: &[u32]| all.iter().fold(0, |set, capability| set | 1 << capability);
        match self {
            Self::Own | Self::Read(_) | Self::Change(_) | Self::Sockets => 0,
            Self::ReadOwners(_) => set(&[linux::CAP_DAC_READ_SEARCH]),
            Self::Owners(_) => set(&[
                linux::CAP_CHOWN,
                linux::CAP_DAC_OVERRIDE,
                linux::CAP_FOWNER,
                linux::CAP_FSETID,
                // Of the owners of new files.
                linux::CAP_SETGID,
                linux::CAP_SETUID,
                linux::CAP_MKNOD,
                linux::CAP_SETFCAP,
            ]),
        }
    }
}

/// Returns the number of descriptors that a device process may have.
pub fn most_files() -> u64 {
    getrlimit(Resource::Nofile).maximum.map_or(MAX_FILES, |most| most.min(MAX_FILES))
}

/// Drops all privileges except this file access and the open descriptors, and creates `threads`
/// threads: the filter forbids later ones.
pub fn confine(files: FileAccess<'_>, threads: usize) -> Result<Threads, SetupError> {
    let failed =
        |error: rustix::io::Errno| SetupError::host("cannot set resource limits", &error.into());
    set_dumpable_behavior(DumpableBehavior::NotDumpable).map_err(failed)?;
    let limit = Rlimit { current: Some(OWN_MEMORY), maximum: Some(OWN_MEMORY) };
    setrlimit(Resource::Data, limit).map_err(failed)?;
    let most = most_files();
    let limit = Rlimit { current: Some(most), maximum: Some(most) };
    setrlimit(Resource::Nofile, limit).map_err(failed)?;
    restrict_capabilities(files)?;
    restrict_files(files)
        .map_err(|error| SetupError::new("cannot enforce Landlock", describe(&error)))?;
    // Threads inherit the restrictions up to here; the filter is applied to all of them.
    let threads = Threads::start(threads)
        .map_err(|error| SetupError::host("cannot start threads", &error))?;
    confine_device(files.access())
        .map_err(|error| SetupError::new("cannot install the seccomp filter", error))?;
    Ok(threads)
}

/// Drops the capabilities that the access does not require. Without owners a superuser's process
/// then has only the rights of the files' owner.
fn restrict_capabilities(files: FileAccess<'_>) -> Result<(), SetupError> {
    let host = |error: host_linux::sys::Errno| io::Error::from_raw_os_error(error.0);
    if let FileAccess::Owners(_) = files {
        sandbox::keep_capabilities_of_other_users().map_err(|error| {
            SetupError::host("cannot keep capabilities for owners=on", &host(error))
        })?;
        // The guest's own mask is in the modes that it sends.
        umask(Mode::empty());
    }
    sandbox::keep_capabilities(files.capabilities())
        .map_err(|error| SetupError::host("cannot restrict capabilities", &host(error)))
}

/// Restricts file access with Landlock. On hosts without Landlock, the server and the seccomp
/// filter restrict it.
fn restrict_files(files: FileAccess<'_>) -> Result<(), landlock::RulesetError> {
    let abi = ABI::V5;
    let changes = AccessFs::from_all(abi) & !(AccessFs::Execute | AccessFs::IoctlDev);
    let allowed = match files {
        FileAccess::Own | FileAccess::Sockets => None,
        FileAccess::Read(folder) | FileAccess::ReadOwners(folder) => {
            Some((folder, AccessFs::from_read(abi) & !AccessFs::Execute))
        }
        FileAccess::Change(folder) => {
            let devices = AccessFs::MakeChar | AccessFs::MakeBlock;
            Some((folder, changes & !devices))
        }
        FileAccess::Owners(folder) => Some((folder, changes)),
    };
    let mut ruleset = Ruleset::default()
        .set_compatibility(CompatLevel::BestEffort)
        .handle_access(AccessFs::from_all(abi))?
        .handle_access(AccessNet::from_all(abi))?
        .create()?;
    if let Some((folder, allowed)) = allowed {
        ruleset = ruleset.add_rule(PathBeneath::new(folder, allowed))?;
    }
    ruleset.restrict_self().map(drop)
}
