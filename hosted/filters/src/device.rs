//! Filters of device processes.

use linux_raw_sys::{general as linux, ioctl};
use seccompiler::SeccompCmpArgLen::Dword;
use seccompiler::SeccompCmpOp::MaskedEq;
use seccompiler::{BackendError, SeccompCondition, SeccompRule, apply_filter_all_threads};

use crate::Error;
use crate::rules::{Rules, allow, allow_all, compile, own_memory};

/// File access of a device process.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum DeviceAccess {
    /// Reads and writes its open file.
    Own,
    /// Reads below a folder.
    Read,
    /// Reads and changes files below a folder, as its user.
    Change,
    /// The same for files of all owners, and device nodes.
    Owners,
    /// None: it copies data between sockets that it has, accepts or receives.
    Sockets,
}

/// Calls of all device processes.
const ALWAYS: &[u32] = &[
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
    // Polling for requests.
    linux::__NR_sched_yield,
    linux::__NR_sigaltstack,
    linux::__NR_statx,
    linux::__NR_write,
];

/// Calls on its own file.
const OWN: &[u32] = &[
    linux::__NR_fallocate,
    linux::__NR_ftruncate,
    linux::__NR_preadv,
    linux::__NR_pwrite64,
    linux::__NR_pwritev,
];

/// Calls that read below a folder.
const BELOW: &[u32] = &[
    linux::__NR_getdents64,
    linux::__NR_getxattr,
    linux::__NR_listxattr,
    linux::__NR_newfstatat,
    linux::__NR_readlinkat,
];

/// Calls that change files below a folder.
const CHANGES: &[u32] = &[
    linux::__NR_fchmodat,
    linux::__NR_fchownat,
    linux::__NR_ftruncate,
    linux::__NR_linkat,
    linux::__NR_mkdirat,
    linux::__NR_pwrite64,
    linux::__NR_removexattr,
    linux::__NR_renameat,
    linux::__NR_setxattr,
    linux::__NR_symlinkat,
    linux::__NR_unlinkat,
    linux::__NR_utimensat,
];

/// Types of the nodes that a process without capabilities may create: no devices.
const NODES: [u32; 3] = [linux::S_IFREG, linux::S_IFIFO, linux::S_IFSOCK];

/// Calls that create files of other owners: nodes of any type, and whose the thread's files are.
const OWNERS: &[u32] = &[linux::__NR_mknodat, linux::__NR_setfsgid, linux::__NR_setfsuid];

/// Calls on sockets.
const SOCKETS: &[u32] = &[
    linux::__NR_accept4,
    #[cfg(target_arch = "x86_64")]
    linux::__NR_poll,
    linux::__NR_ppoll,
    linux::__NR_recvfrom,
    linux::__NR_recvmsg,
    linux::__NR_sendto,
    linux::__NR_shutdown,
];

/// Installs the filter of a device process in all its threads.
///
/// # Errors
/// The filter cannot be installed.
pub fn confine_device(access: DeviceAccess) -> Result<(), Error> {
    Ok(apply_filter_all_threads(&device_process(access).and_then(compile)?)?)
}

/// Filter of a device process.
pub fn device_process(access: DeviceAccess) -> Result<Rules, BackendError> {
    let mut rules = Rules::new();
    allow_all(&mut rules, ALWAYS);
    match access {
        DeviceAccess::Own => {
            allow_all(&mut rules, OWN);
            // Size of a block device, the base of an overlay.
            allow(&mut rules, linux::__NR_ioctl, &[&[(1, ioctl::BLKGETSIZE64)]])?;
        }
        DeviceAccess::Read => {
            allow_all(&mut rules, BELOW);
            let writes = linux::O_ACCMODE | linux::O_CREAT | linux::O_TRUNC;
            allow_masked(&mut rules, linux::__NR_openat, (2, writes, linux::O_RDONLY))?;
        }
        DeviceAccess::Change => {
            allow_all(&mut rules, BELOW);
            allow_all(&mut rules, CHANGES);
            allow_all(&mut rules, &[linux::__NR_openat]);
            for kind in NODES {
                allow_masked(&mut rules, linux::__NR_mknodat, (2, linux::S_IFMT, kind))?;
            }
        }
        DeviceAccess::Owners => {
            allow_all(&mut rules, BELOW);
            allow_all(&mut rules, CHANGES);
            allow_all(&mut rules, &[linux::__NR_openat]);
            allow_all(&mut rules, OWNERS);
        }
        DeviceAccess::Sockets => {
            allow_all(&mut rules, SOCKETS);
            allow(&mut rules, linux::__NR_ioctl, &[&[(1, ioctl::FIONBIO)]])?;
        }
    }
    // The last one as the standard library's locks use it.
    for operation in [linux::FUTEX_WAIT, linux::FUTEX_WAKE, linux::FUTEX_WAIT_BITSET] {
        let condition = (1, !linux::FUTEX_PRIVATE_FLAG, operation);
        allow_masked(&mut rules, linux::__NR_futex, condition)?;
    }
    // No signals on descriptor events: their receiver may be any process of the user.
    for command in [linux::F_DUPFD_CLOEXEC, linux::F_GETFD, linux::F_SETFD, linux::F_GETFL] {
        allow(&mut rules, linux::__NR_fcntl, &[&[(1, command)]])?;
    }
    rules.insert(linux::__NR_mmap.into(), vec![own_memory()?]);
    Ok(rules)
}

/// Allows a call if an argument, masked, has a value.
fn allow_masked(
    rules: &mut Rules,
    call: u32,
    (argument, mask, value): (u8, u32, u32),
) -> Result<(), BackendError> {
    let condition = SeccompCondition::new(argument, Dword, MaskedEq(mask.into()), value.into())?;
    rules.entry(call.into()).or_default().push(SeccompRule::new(vec![condition])?);
    Ok(())
}
