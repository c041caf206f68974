//! What a process gives up before it serves: filters of system calls, access to files, descriptors.

use std::collections::BTreeMap;
use std::error::Error;
use std::fmt;
use std::io;
use std::iter;
use std::os::fd::BorrowedFd;

use landlock::{
    ABI, Access, AccessFs, AccessNet, CompatLevel, Compatible, PathBeneath, Ruleset, RulesetAttr,
    RulesetCreatedAttr,
};
use linux_raw_sys::{general as linux, ioctl};
use proto::errno::Cause;
use rustix::process::{
    DumpableBehavior, Resource, Rlimit, getrlimit, set_dumpable_behavior, setrlimit,
};
use rustix::thread::{CapabilitySet, CapabilitySets, set_capabilities};
use seccompiler::SeccompCmpArgLen::Dword;
use seccompiler::SeccompCmpOp::MaskedEq;
use seccompiler::{
    BackendError, BpfProgram, SeccompAction, SeccompCondition, SeccompFilter, SeccompRule,
    TargetArch,
};

use crate::threads::Threads;

/// Memory that a process may have for itself: tables of an image with the largest clusters fit.
const OWN_MEMORY: u64 = 512 << 20;

/// Descriptors that a process may have.
const MOST_FILES: u64 = 1 << 16;

/// An error's cause: the error of the host that is behind it, by its name, else its own text.
pub fn describe(error: &(dyn Error + 'static)) -> String {
    let host = iter::successors(Some(error), |&error| error.source())
        .find_map(|error| error.downcast_ref::<io::Error>());
    match host {
        Some(host) => Cause::new(host.raw_os_error(), host).to_string(),
        None => error.to_string(),
    }
}

/// Why a process does not serve.
#[derive(Debug)]
pub struct Failed {
    text: String,
    is_of_host: bool,
}

impl Failed {
    /// With a reason.
    pub fn new(what: &str, why: impl fmt::Display) -> Self {
        Self { text: format!("{what}: {why}"), is_of_host: false }
    }

    /// With the error of the host that is the reason.
    pub fn host(what: &str, why: &io::Error) -> Self {
        Self { is_of_host: true, ..Self::new(what, Cause::new(why.raw_os_error(), why)) }
    }

    /// Whether the host has refused something; else what was given is not as it has to be.
    pub fn is_of_host(&self) -> bool {
        self.is_of_host
    }
}

impl fmt::Display for Failed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

impl From<io::Error> for Failed {
    fn from(error: io::Error) -> Self {
        Self::host("a process of the machine cannot be set up", &error)
    }
}

/// What a process does with files.
#[derive(Clone, Copy, Debug)]
pub enum Files<'a> {
    /// Reads and writes the one that it has.
    Own,
    /// Reads below a folder.
    Read(BorrowedFd<'a>),
    /// Everything below a folder.
    Change(BorrowedFd<'a>),
    /// Nothing: it carries bytes between sockets that it has, accepts, or is given.
    Sockets,
}

/// Gives up everything but these files, and what this process has already; makes so many threads, since none is made later.
pub fn confine(files: Files<'_>, threads: usize) -> Result<Threads, Failed> {
    let failed = |error: rustix::io::Errno| Failed::host("cannot limit a process", &error.into());
    set_dumpable_behavior(DumpableBehavior::NotDumpable).map_err(failed)?;
    let limit = Rlimit { current: Some(OWN_MEMORY), maximum: Some(OWN_MEMORY) };
    setrlimit(Resource::Data, limit).map_err(failed)?;
    // A guest keeps a descriptor for each name that it has looked at; each is memory of the host.
    let most = getrlimit(Resource::Nofile).maximum.map_or(MOST_FILES, |most| most.min(MOST_FILES));
    let limit = Rlimit { current: Some(most), maximum: Some(most) };
    setrlimit(Resource::Nofile, limit).map_err(failed)?;
    drop_capabilities().map_err(failed)?;
    restrict_files(files)
        .map_err(|error| Failed::new("cannot enforce Landlock", describe(&error)))?;
    // Threads inherit what has been done up to here, and the filter is for all of them.
    let threads =
        Threads::start(threads).map_err(|error| Failed::host("cannot start threads", &error))?;
    let failed = |error: &(dyn Error + 'static)| {
        Failed::new("cannot install the seccomp filter", describe(error))
    };
    let filter = filter(files).map_err(|error| failed(&error))?;
    seccompiler::apply_filter_all_threads(&filter).map_err(|error| failed(&error))?;
    Ok(threads)
}

/// Gives up all capabilities. An administrator's process is then one of a user who has these files: it gives none away, and reads none
/// of others.
///
/// # Errors
/// None that is known.
pub fn drop_capabilities() -> rustix::io::Result<()> {
    let none = CapabilitySet::empty();
    set_capabilities(None, CapabilitySets { effective: none, permitted: none, inheritable: none })
}

/// Hosts without Landlock leave it to the server and the filter.
fn restrict_files(files: Files<'_>) -> Result<(), landlock::RulesetError> {
    let abi = ABI::V5;
    let allowed = match files {
        Files::Own | Files::Sockets => None,
        Files::Read(folder) => Some((folder, AccessFs::from_read(abi) & !AccessFs::Execute)),
        Files::Change(folder) => {
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

/// The calls of a process of a device.
fn filter(files: Files<'_>) -> Result<BpfProgram, BackendError> {
    let any = |call: u32| (i64::from(call), Vec::new());
    let always = [
        linux::__NR_close,
        linux::__NR_clock_gettime,
        linux::__NR_exit_group,
        linux::__NR_brk,
        linux::__NR_fdatasync,
        linux::__NR_fstat,
        linux::__NR_fstatfs,
        linux::__NR_fsync,
        linux::__NR_getrandom,
        // What a panic says.
        linux::__NR_gettid,
        linux::__NR_lseek,
        linux::__NR_madvise,
        linux::__NR_mremap,
        linux::__NR_munmap,
        linux::__NR_pread64,
        linux::__NR_read,
        // A wait goes on after the process was stopped.
        linux::__NR_restart_syscall,
        linux::__NR_rt_sigreturn,
        linux::__NR_sigaltstack,
        linux::__NR_statx,
        linux::__NR_write,
    ];
    let own = [
        linux::__NR_fallocate,
        linux::__NR_ftruncate,
        linux::__NR_preadv,
        linux::__NR_pwrite64,
        linux::__NR_pwritev,
        // A thread that waits for another's lock.
        linux::__NR_sched_yield,
    ];
    let below = [linux::__NR_getdents64, linux::__NR_newfstatat, linux::__NR_readlinkat];
    let changes = [
        linux::__NR_fchmodat,
        linux::__NR_fchownat,
        linux::__NR_ftruncate,
        linux::__NR_linkat,
        linux::__NR_mkdirat,
        linux::__NR_pwrite64,
        linux::__NR_renameat,
        linux::__NR_unlinkat,
        linux::__NR_utimensat,
    ];
    let sockets = [
        linux::__NR_accept4,
        linux::__NR_poll,
        linux::__NR_ppoll,
        linux::__NR_recvfrom,
        linux::__NR_recvmsg,
        linux::__NR_sendto,
        linux::__NR_shutdown,
    ];
    let more = match files {
        Files::Sockets => sockets.to_vec(),
        Files::Own => own.to_vec(),
        Files::Read(_) => below.to_vec(),
        Files::Change(_) => [&below[..], &changes, &[linux::__NR_openat]].concat(),
    };
    let mut rules: BTreeMap<_, _> = always.into_iter().chain(more).map(any).collect();
    let condition = |argument, mask: u32, value: u32| {
        SeccompCondition::new(argument, Dword, MaskedEq(mask.into()), value.into())
    };
    let mut allow = |call: u32, conditions| {
        let rule = SeccompRule::new(conditions)?;
        rules.entry(call.into()).or_insert_with(Vec::new).push(rule);
        Ok::<_, BackendError>(())
    };
    // The last as the standard library's locks wait.
    for operation in [linux::FUTEX_WAIT, linux::FUTEX_WAKE, linux::FUTEX_WAIT_BITSET] {
        allow(linux::__NR_futex, vec![condition(1, !linux::FUTEX_PRIVATE_FLAG, operation)?])?;
    }
    // Of signals about descriptors, which go to processes of the same user, nothing.
    let commands = [linux::F_DUPFD_CLOEXEC, linux::F_GETFD, linux::F_SETFD, linux::F_GETFL];
    for command in commands {
        allow(linux::__NR_fcntl, vec![condition(1, u32::MAX, command)?])?;
    }
    // Memory for the allocator, never code.
    let kind = linux::MAP_PRIVATE | linux::MAP_ANONYMOUS;
    allow(linux::__NR_mmap, vec![condition(2, linux::PROT_EXEC, 0)?, condition(3, kind, kind)?])?;
    if let Files::Sockets = files {
        allow(linux::__NR_ioctl, vec![condition(1, u32::MAX, ioctl::FIONBIO)?])?;
    }
    if let Files::Read(_) = files {
        let writes = linux::O_ACCMODE | linux::O_CREAT | linux::O_TRUNC;
        allow(linux::__NR_openat, vec![condition(2, writes, linux::O_RDONLY)?])?;
    }
    let (kill, allow) = (SeccompAction::KillProcess, SeccompAction::Allow);
    SeccompFilter::new(rules, kill, allow, TargetArch::x86_64).and_then(BpfProgram::try_from)
}
