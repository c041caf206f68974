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
use proto::errno::Cause;
use rustix::process::{
    DumpableBehavior, Resource, Rlimit, getrlimit, set_dumpable_behavior, setrlimit,
};

use crate::threads::Threads;

/// Limit of a process's own memory: tables of an image with the largest clusters fit.
const OWN_MEMORY: u64 = 512 << 20;

/// Limit of a process's descriptors.
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
    /// Full access below a folder.
    Change(BorrowedFd<'a>),
    /// None: it copies data between sockets that it has, accepts or receives.
    Sockets,
}

impl FileAccess<'_> {
    fn access(self) -> DeviceAccess {
        match self {
            Self::Own => DeviceAccess::Own,
            Self::Read(_) => DeviceAccess::Read,
            Self::Change(_) => DeviceAccess::Change,
            Self::Sockets => DeviceAccess::Sockets,
        }
    }
}

/// Drops all privileges except this file access and the open descriptors, and creates `threads`
/// threads: the filter forbids later ones.
pub fn confine(files: FileAccess<'_>, threads: usize) -> Result<Threads, SetupError> {
    let failed =
        |error: rustix::io::Errno| SetupError::host("cannot set resource limits", &error.into());
    set_dumpable_behavior(DumpableBehavior::NotDumpable).map_err(failed)?;
    let limit = Rlimit { current: Some(OWN_MEMORY), maximum: Some(OWN_MEMORY) };
    setrlimit(Resource::Data, limit).map_err(failed)?;
    // The driver holds a descriptor for each name that it has looked up; each costs host memory.
    let most = getrlimit(Resource::Nofile).maximum.map_or(MAX_FILES, |most| most.min(MAX_FILES));
    let limit = Rlimit { current: Some(most), maximum: Some(most) };
    setrlimit(Resource::Nofile, limit).map_err(failed)?;
    // A superuser's process then has only the rights of the files' owner.
    sandbox::drop_capabilities()
        .map_err(|error| SetupError::new("cannot drop capabilities", error))?;
    restrict_files(files)
        .map_err(|error| SetupError::new("cannot enforce Landlock", describe(&error)))?;
    // Threads inherit the restrictions up to here; the filter is applied to all of them.
    let threads = Threads::start(threads)
        .map_err(|error| SetupError::host("cannot start threads", &error))?;
    confine_device(files.access())
        .map_err(|error| SetupError::new("cannot install the seccomp filter", error))?;
    Ok(threads)
}

/// Restricts file access with Landlock. On hosts without Landlock, the server and the seccomp
/// filter restrict it.
fn restrict_files(files: FileAccess<'_>) -> Result<(), landlock::RulesetError> {
    let abi = ABI::V5;
    let allowed = match files {
        FileAccess::Own | FileAccess::Sockets => None,
        FileAccess::Read(folder) => Some((folder, AccessFs::from_read(abi) & !AccessFs::Execute)),
        FileAccess::Change(folder) => {
            let allowed = AccessFs::from_all(abi)
                & !(AccessFs::Execute
                    | AccessFs::MakeChar
                    | AccessFs::MakeBlock
                    | AccessFs::MakeSock
                    | AccessFs::MakeFifo
                    | AccessFs::IoctlDev);
            Some((folder, allowed))
        }
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
