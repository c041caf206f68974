//! Containers of a guest, as an OCI configuration states them.
//!
//! The host has read and checked the configuration; paths of files on the host have become paths
//! below [`POD`](super::POD). Lists are as long as a message permits.

extern crate std;

use super::{GuestCommand, Strings};
use serde::{Deserialize, Serialize};
use std::vec::Vec;

/// Container, and its first process.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Container<'a> {
    /// Name, unique in the guest, without slashes.
    pub name: &'a str,
    /// Root directory: a path in the guest.
    pub root: &'a [u8],
    /// The root directory is read-only.
    pub read_only: bool,
    /// Changes of the root directory are on the guest's disk ([`Root::Pod`](super::Root::Pod)), and
    /// end with the container.
    pub has_scratch: bool,
    /// Host name of its own; empty: that of the guest.
    pub hostname: &'a str,
    /// Namespaces of its own; the rest are those of the guest.
    pub namespaces: Namespaces,
    /// Container whose PID namespace it has, unless it has one of its own; empty: the guest's.
    pub sandbox: &'a str,
    /// File systems, in this order.
    #[serde(borrow)]
    pub mounts: Vec<ContainerMount<'a>>,
    /// Devices besides those that every container has.
    #[serde(borrow)]
    pub devices: Vec<Device<'a>>,
    /// It has all devices of the guest.
    pub has_all_devices: bool,
    /// Program that decides which devices its processes may use (`struct bpf_insn` of Linux, type
    /// `BPF_PROG_TYPE_CGROUP_DEVICE`); empty: all.
    pub device_filter: Vec<u64>,
    /// Paths that are hidden.
    pub masked: Strings<'a>,
    /// Paths that cannot be changed.
    pub read_only_paths: Strings<'a>,
    /// Kernel parameters, by names as in `/proc/sys`, with dots.
    #[serde(borrow)]
    pub parameters: Vec<(&'a str, &'a str)>,
    /// Limits in the guest.
    pub limits: Limits,
    /// First process.
    #[serde(borrow)]
    pub process: ContainerProcess<'a>,
}

/// Limits of a container in the guest; `None`: as before, [`u64::MAX`]: no limit.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Limits {
    /// Memory in bytes.
    pub memory: Option<u64>,
    /// CPU time in each period, in microseconds.
    pub cpu_quota: Option<u64>,
    /// Period in microseconds.
    pub cpu_period: Option<u64>,
    /// Share of CPU time beside other containers of the guest, from 1 to 10,000.
    pub cpu_weight: Option<u64>,
    /// Number of processes and threads.
    pub processes: Option<u64>,
}

/// Statistics of a container; [`u64::MAX`] as a limit: there is none.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ContainerStatistics {
    /// CPU time in microseconds.
    pub cpu_us: u64,
    /// That of user mode.
    pub user_us: u64,
    /// That of the kernel.
    pub system_us: u64,
    /// Periods with a limit of CPU time.
    pub periods: u64,
    /// Those in which it was reached.
    pub throttled_periods: u64,
    /// Time in microseconds during which the container had to wait for that reason.
    pub throttled_us: u64,
    /// Memory in bytes.
    pub memory: u64,
    /// Most memory that it had.
    pub memory_peak: u64,
    /// Limit of memory.
    pub memory_limit: u64,
    /// Bytes of files in the guest's cache.
    pub file_cache: u64,
    /// Processes that were killed for lack of memory.
    pub oom_kills: u64,
    /// Processes and threads.
    pub processes: u64,
    /// Limit of their number.
    pub process_limit: u64,
}

/// Namespaces that a container has of its own. It always has one of mounts and one of cgroups.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Namespaces {
    /// Process IDs.
    pub pid: bool,
    /// System V IPC and message queues.
    pub ipc: bool,
    /// Host name.
    pub uts: bool,
}

/// File system of a container.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ContainerMount<'a> {
    /// Kind of file system; empty: a file or folder of the guest, with the file systems below it.
    pub kind: &'a str,
    /// Name of the file system, or path in the guest.
    pub source: &'a [u8],
    /// Absolute path in the container, created if necessary.
    pub place: &'a [u8],
    /// Flags as for mount(2): `MS_RDONLY` and those of its kind.
    pub flags: u32,
    /// Options of the file system.
    pub data: &'a str,
    /// A file system in memory that begins with a copy of the folder below it.
    pub copies: bool,
}

/// Device node.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Device<'a> {
    /// Absolute path in the container.
    pub path: &'a [u8],
    /// Type and permissions as in `st_mode`: a character or block device, or a FIFO.
    pub mode: u32,
    /// Device number.
    pub major: u32,
    /// Device number.
    pub minor: u32,
    /// Owner.
    pub user: u32,
    /// Group.
    pub group: u32,
}

/// Process of a container.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ContainerProcess<'a> {
    /// Program, environment, folder, user, terminal.
    #[serde(borrow)]
    pub command: GuestCommand<'a>,
    /// Capabilities; `None`: those of its user.
    pub capabilities: Option<Capabilities>,
    /// Resource limits.
    pub limits: Vec<ResourceLimit>,
    /// Adjustment of its score for the OOM killer, from -1000 to 1000 (proc(5)); `None`: that of
    /// the agent.
    pub oom_score: Option<i16>,
    /// Execution domain (personality(2)); `None`: that of Linux.
    pub personality: Option<u32>,
    /// It cannot gain privileges by `execve` (`PR_SET_NO_NEW_PRIVS`).
    pub no_new_privileges: bool,
    /// File mode creation mask.
    pub umask: Option<u32>,
    /// Seccomp filter as instructions (`struct sock_filter` of Linux); empty: none.
    pub filter: Vec<u64>,
}

/// Sets of capabilities, bit n for capability n (capabilities(7)).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Capabilities {
    /// Limit of what `execve` can give.
    pub bounding: u64,
    /// In effect.
    pub effective: u64,
    /// Permitted.
    pub permitted: u64,
    /// Kept by programs with file capabilities.
    pub inheritable: u64,
    /// Kept by programs without file capabilities.
    pub ambient: u64,
}

/// Resource limit (setrlimit(2)); `u64::MAX` is infinity.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ResourceLimit {
    /// Number of the resource (`RLIMIT_*` of Linux).
    pub resource: u8,
    /// Soft limit.
    pub soft: u64,
    /// Hard limit.
    pub hard: u64,
}
