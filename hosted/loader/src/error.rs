//! Errors of the loader.

use std::fmt;
use std::io;

use proto::errno::Cause;
use vmm_boot::BootError;

/// Reason that a VM cannot be started.
#[derive(Debug)]
pub enum Error {
    /// The kernel is unsuitable: reason and remedy.
    Kernel(&'static str, &'static str),
    /// The kernel is not a valid ELF file.
    Elf(object::Error),
    /// The kernel's site tables are invalid.
    Sites(wedge_sites::Error),
    /// The kernel lacks this symbol.
    Symbol(&'static str),
    /// A relocation overflows at the new address: address and symbol.
    Relocation(u64, String),
    /// Kernel, command line and RAM disk do not fit into memory.
    Boot(BootError),
    /// A system call failed.
    Host(&'static str, io::Error),
    /// More memory than the host has, in bytes.
    TooMuchMemory {
        /// Requested.
        wanted: u64,
        /// Available.
        available: u64,
    },
    /// More memory than the guest kernel's direct map has room for, in bytes.
    MemoryLimit {
        /// Requested.
        memory: u64,
        /// Largest supported size.
        limit: u64,
    },
    /// More disks than supported.
    TooManyDisks(usize),
    /// More networks than supported.
    TooManyNets(usize),
    /// More shared directories than supported.
    TooManyShares(usize),
    /// The seccomp filters cannot be built.
    Filters(hosted_filters::Error),
    /// The host lacks a required feature.
    Lacking(&'static str),
}

/// An error while the kernel file is read.
impl From<io::Error> for Error {
    fn from(error: io::Error) -> Self {
        match error.kind() {
            io::ErrorKind::UnexpectedEof => Self::TRUNCATED,
            _ => Self::Host("read the kernel", error),
        }
    }
}

impl Error {
    /// The kernel file ends too early.
    pub(crate) const TRUNCATED: Self =
        Self::Kernel("the kernel file is truncated", "build or copy it again");
    /// A symbol or value that the VM's start uses is not one of Linux.
    pub(crate) const UNUSABLE: Self = Self::Kernel(
        "a symbol of the kernel is outside of its image, or has an invalid value",
        "use the `vmlinux` of `parador kernel build`",
    );
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Kernel(what, _) => f.write_str(what),
            Self::Elf(error) => write!(f, "the kernel is not a valid ELF file: {error}"),
            Self::Sites(error) => write!(f, "the kernel's site tables are invalid: {error}"),
            Self::Symbol(name) => write!(f, "the kernel has no symbol `{name}`"),
            Self::Relocation(address, name) => {
                write!(
                    f,
                    "cannot relocate the kernel: the reference to {name} at {address:#x} overflows"
                )
            }
            Self::Boot(error) => write!(f, "{error}"),
            Self::Host(action, error) => {
                write!(f, "cannot {action}: {}", Cause::new(error.raw_os_error(), error))
            }
            Self::TooMuchMemory { wanted, available } => {
                let (wanted, available) = (wanted >> 20, available >> 20);
                write!(f, "{wanted} MiB of memory requested; the host has {available} MiB")
            }
            Self::MemoryLimit { memory, limit } => {
                write!(f, "{} MiB of memory requested (limit {} MiB)", memory >> 20, limit >> 20)
            }
            Self::TooManyDisks(count) => {
                write!(f, "{count} disks (limit {})", proto::hosted::MAX_DISKS)
            }
            Self::TooManyNets(count) => {
                write!(f, "{count} networks (limit {})", proto::hosted::MAX_NETS)
            }
            Self::TooManyShares(count) => {
                let most = proto::hosted::MAX_SHARES;
                write!(f, "{count} shared directories (limit {most})")
            }
            Self::Filters(error) => write!(f, "{error}"),
            Self::Lacking(what) => write!(f, "the host has no {what}"),
        }
    }
}

impl Error {
    /// Returns the remedy, if there is one.
    pub fn help(&self) -> Option<&'static str> {
        match self {
            Self::Kernel(_, help) => Some(help),
            Self::Sites(wedge_sites::Error::WrongVersion { .. }) => {
                Some("build the kernel with this version of `parador kernel build`")
            }
            Self::Elf(_) | Self::Sites(_) | Self::Symbol(_) | Self::Relocation(..) => {
                Some("use the `vmlinux` of `parador kernel build`")
            }
            Self::Boot(BootError::TooLittleMemory { .. } | BootError::InitrdTooLarge { .. }) => {
                Some("increase --memory")
            }
            Self::TooMuchMemory { .. } | Self::MemoryLimit { .. } => Some("reduce --memory"),
            Self::Lacking(_) => Some("`parador system emulate` runs VMs without it, slowly"),
            _ => None,
        }
    }
}

impl From<BootError> for Error {
    fn from(error: BootError) -> Self {
        Self::Boot(error)
    }
}

impl From<object::Error> for Error {
    fn from(error: object::Error) -> Self {
        Self::Elf(error)
    }
}

impl From<wedge_sites::Error> for Error {
    fn from(error: wedge_sites::Error) -> Self {
        Self::Sites(error)
    }
}
