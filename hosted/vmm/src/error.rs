//! Why a machine cannot be started.

use std::fmt;
use std::io;

use proto::errno::Cause;
use vmm_boot::BootError;

/// Why a machine cannot be started.
#[derive(Debug)]
pub enum Error {
    /// The kernel is not one that can run: why, and what to do.
    Kernel(&'static str, &'static str),
    /// The kernel's file is not a sound ELF file.
    Elf(object::Error),
    /// The kernel's tables of sites are not sound.
    Sites(wedge_sites::Error),
    /// The kernel has no such symbol.
    Symbol(&'static str),
    /// A relocation of the kernel does not fit the place that it is moved to: address and symbol.
    Relocation(u64, String),
    /// Memory, command line and RAM disk do not fit together.
    Boot(BootError),
    /// The host refused something.
    Host(&'static str, io::Error),
    /// More memory than the host has: both in bytes.
    TooMuchMemory {
        /// What the machine is to have.
        wanted: u64,
        /// What the host has.
        available: u64,
    },
    /// More disks than a machine has.
    TooManyDisks(usize),
    /// More networks than a machine has.
    TooManyNets(usize),
    /// More shared directories than a machine has.
    TooManyShares(usize),
    /// Filters of system calls cannot be made: why.
    Filters(String),
    /// The host's processor or kernel lacks something.
    Lacking(&'static str),
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Kernel(what, _) => f.write_str(what),
            Self::Elf(error) => write!(f, "the kernel is no sound ELF file: {error}"),
            Self::Sites(error) => write!(f, "the kernel's site tables: {error}"),
            Self::Symbol(name) => write!(f, "the kernel has no symbol `{name}`"),
            Self::Relocation(address, name) => {
                write!(f, "the kernel cannot be moved: {name} does not fit at {address:#x}")
            }
            Self::Boot(error) => write!(f, "{error}"),
            Self::Host(action, error) => {
                write!(f, "cannot {action}: {}", Cause::new(error.raw_os_error(), error))
            }
            Self::TooMuchMemory { wanted, available } => {
                let (wanted, available) = (wanted >> 20, available >> 20);
                write!(f, "{wanted} MiB of memory are more than the {available} MiB of this host")
            }
            Self::TooManyDisks(count) => {
                write!(f, "{count} disks are more than {}", proto::wedge::MAX_DISKS)
            }
            Self::TooManyNets(count) => {
                write!(f, "{count} networks are more than {}", proto::wedge::MAX_NETS)
            }
            Self::TooManyShares(count) => {
                let most = proto::wedge::MAX_SHARES;
                write!(f, "{count} shared directories are more than {most}")
            }
            Self::Filters(why) => write!(f, "no filters of system calls: {why}"),
            Self::Lacking(what) => write!(f, "this host has no {what}"),
        }
    }
}

impl Error {
    /// What to do about it.
    pub fn help(&self) -> Option<&'static str> {
        match self {
            Self::Kernel(_, help) => Some(help),
            Self::Sites(wedge_sites::Error::WrongVersion { .. }) => {
                Some("build the kernel with this version of `parador kernel build`")
            }
            Self::Elf(_) | Self::Sites(_) | Self::Symbol(_) | Self::Relocation(..) => {
                Some("take the `vmlinux` that `parador kernel build` made")
            }
            Self::Boot(BootError::TooLittleMemory { .. } | BootError::InitrdTooLarge { .. }) => {
                Some("give the machine more memory with --memory")
            }
            Self::TooMuchMemory { .. } => Some("give the machine less memory with --memory"),
            Self::Lacking(_) => {
                Some("`parador system emulate` runs machines on hosts that lack it, slowly")
            }
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
