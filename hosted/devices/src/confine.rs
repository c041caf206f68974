//! Privileges that a device process drops before it serves: system calls, file access, descriptors,
//! memory.

use std::collections::BTreeMap;
use std::error::Error;
use std::fmt;
use std::io;
use std::iter;
use std::os::fd::BorrowedFd;

use host_linux::sandbox;
use landlock::{
    ABI, Access, AccessFs, AccessNet, CompatLevel, Compatible, PathBeneath, Ruleset, RulesetAttr,
    RulesetCreatedAttr,
};
use linux_raw_sys::{general as linux, ioctl};
use proto::errno::Cause;
use rustix::process::{
    DumpableBehavior, Resource, Rlimit, getrlimit, set_dumpable_behavior, setrlimit,
};
use seccompiler::SeccompCmpArgLen::Dword;
use seccompiler::SeccompCmpOp::MaskedEq;
use seccompiler::{
    BackendError, BpfProgram, SeccompAction, SeccompCondition, SeccompFilter, SeccompRule,
    TargetArch,
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
    let failed = |error: &(dyn Error + 'static)| {
        SetupError::new("cannot install the seccomp filter", describe(error))
    };
    let filter = filter(files).map_err(|error| failed(&error))?;
    seccompiler::apply_filter_all_threads(&filter).map_err(|error| failed(&error))?;
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

/// Builds the seccomp filter of a device process.
fn filter(files: FileAccess<'_>) -> Result<BpfProgram, BackendError> {
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
        // Output of a panic.
        linux::__NR_gettid,
        linux::__NR_lseek,
        linux::__NR_madvise,
        linux::__NR_mremap,
        linux::__NR_munmap,
        linux::__NR_pread64,
        linux::__NR_read,
        // Restart of a wait after SIGSTOP and SIGCONT.
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
        // Contended locks.
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
        #[cfg(target_arch = "x86_64")]
        linux::__NR_poll,
        linux::__NR_ppoll,
        linux::__NR_recvfrom,
        linux::__NR_recvmsg,
        linux::__NR_sendto,
        linux::__NR_shutdown,
    ];
    let more = match files {
        FileAccess::Sockets => sockets.to_vec(),
        FileAccess::Own => own.to_vec(),
        FileAccess::Read(_) => below.to_vec(),
        FileAccess::Change(_) => [&below[..], &changes, &[linux::__NR_openat]].concat(),
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
    // The last one as the standard library's locks use it.
    for operation in [linux::FUTEX_WAIT, linux::FUTEX_WAKE, linux::FUTEX_WAIT_BITSET] {
        allow(linux::__NR_futex, vec![condition(1, !linux::FUTEX_PRIVATE_FLAG, operation)?])?;
    }
    // No signals on descriptor events: their receiver may be any process of the user.
    let commands = [linux::F_DUPFD_CLOEXEC, linux::F_GETFD, linux::F_SETFD, linux::F_GETFL];
    for command in commands {
        allow(linux::__NR_fcntl, vec![condition(1, u32::MAX, command)?])?;
    }
    // Memory for the allocator, never executable.
    let kind = linux::MAP_PRIVATE | linux::MAP_ANONYMOUS;
    allow(linux::__NR_mmap, vec![condition(2, linux::PROT_EXEC, 0)?, condition(3, kind, kind)?])?;
    if let FileAccess::Sockets = files {
        allow(linux::__NR_ioctl, vec![condition(1, u32::MAX, ioctl::FIONBIO)?])?;
    }
    if let FileAccess::Read(_) = files {
        let writes = linux::O_ACCMODE | linux::O_CREAT | linux::O_TRUNC;
        allow(linux::__NR_openat, vec![condition(2, writes, linux::O_RDONLY)?])?;
    }
    let (kill, allow) = (SeccompAction::KillProcess, SeccompAction::Allow);
    let arch = TargetArch::try_from(std::env::consts::ARCH)?;
    SeccompFilter::new(rules, kill, allow, arch).and_then(BpfProgram::try_from)
}
