//! Why a guest cannot be booted.

use core::fmt;
use hw_tables::elf::ElfError;
use vmm_mem::MemoryError;

/// Why a guest cannot be booted.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum BootError {
    /// Neither a bzImage nor an ELF file.
    UnknownFormat,
    /// The image is shorter than its header says.
    Truncated {
        /// Bytes that it should have at least.
        needed: u64,
        /// Bytes that it has.
        actual: u64,
    },
    /// bzImage of a boot protocol before 2.12.
    OldProtocol {
        /// Its version: major in the high byte, minor in the low.
        version: u16,
    },
    /// bzImage without a 64-bit entry.
    No64BitEntry,
    /// bzImage that asks for addresses below 1 MiB or beyond 4 GiB.
    BadHeader,
    /// ELF file that is no executable.
    BadElf(ElfError),
    /// ELF file for another processor.
    WrongMachine,
    /// ELF file without the PVH entry note, and without a Multiboot header.
    NoPvhEntry,
    /// A Multiboot header that contradicts itself, or asks for what this loader does not have.
    BadMultiboot,
    /// A segment of an ELF kernel lies where the loader puts its own data (below 1 MiB), or beyond
    /// 4 GiB.
    BadSegment {
        /// First guest-physical address of the segment.
        start: u64,
        /// First address after it.
        end: u64,
    },
    /// The command line is longer than the kernel takes.
    CommandLineTooLong {
        /// Bytes that the kernel takes.
        limit: u64,
        /// Bytes that it has.
        length: u64,
    },
    /// The command line contains a zero byte.
    BadCommandLine,
    /// The kernel and initial RAM disk do not fit.
    TooLittleMemory {
        /// Bytes of RAM needed.
        needed: u64,
        /// Bytes of RAM below the PCI hole.
        available: u64,
    },
    /// The initial RAM disk does not fit below the highest address that the kernel allows.
    InitrdTooLarge {
        /// Largest possible length in bytes.
        limit: u64,
        /// Its length in bytes.
        length: u64,
    },
    /// No virtual CPU, or more than APIC ids of 8 bits can number.
    BadVcpus,
    /// The tables do not fit into their region; a bug.
    TablesTooLarge,
    /// Guest memory lacks a page that its ranges promise; a bug.
    Memory(MemoryError),
}

impl From<MemoryError> for BootError {
    fn from(error: MemoryError) -> Self {
        Self::Memory(error)
    }
}

impl From<ElfError> for BootError {
    fn from(error: ElfError) -> Self {
        match error {
            ElfError::BadMachine => Self::WrongMachine,
            other => Self::BadElf(other),
        }
    }
}

/// Mebibytes, rounded up.
struct Mebibytes(u64);

impl fmt::Display for Mebibytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} MiB", self.0.div_ceil(1 << 20))
    }
}

impl fmt::Display for BootError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Self::UnknownFormat => f.write_str(
                "the kernel is neither a bzImage nor an ELF file, nor has it a Multiboot header",
            ),
            Self::Truncated { needed, actual } => {
                write!(f, "the kernel is cut short: it has {actual} of at least {needed} bytes")
            }
            Self::OldProtocol { version } => write!(
                f,
                "the kernel speaks boot protocol {}.{:02}; 2.12 or newer is needed",
                version >> 8,
                version & 0xff
            ),
            Self::No64BitEntry => f.write_str("the kernel has no 64-bit entry"),
            Self::BadHeader => {
                f.write_str("the kernel asks for addresses below 1 MiB or beyond 4 GiB")
            }
            Self::BadElf(ElfError::Truncated) => f.write_str("the kernel is cut short"),
            Self::BadElf(error) => write!(f, "the kernel is a damaged ELF file: {error:?}"),
            Self::WrongMachine => f.write_str("the kernel is for another processor"),
            Self::NoPvhEntry => f.write_str(
                "the kernel is an ELF file without a PVH entry note and without a Multiboot header",
            ),
            Self::BadMultiboot => f.write_str(
                "the kernel's Multiboot header contradicts itself or needs a video mode",
            ),
            Self::BadSegment { start, end } => write!(
                f,
                "the kernel wants memory {start:#x}..{end:#x}, which is not between 1 MiB and 4 GiB"
            ),
            Self::CommandLineTooLong { limit, length } => {
                write!(f, "the command line has {length} bytes; the kernel takes {limit}")
            }
            Self::BadCommandLine => f.write_str("the command line contains a zero byte"),
            Self::TooLittleMemory { needed, available } => write!(
                f,
                "kernel and initial RAM disk need {} of memory; the machine has {}",
                Mebibytes(needed),
                Mebibytes(available)
            ),
            Self::InitrdTooLarge { limit, length } => write!(
                f,
                "the initial RAM disk has {length} bytes; the kernel allows {limit} in this memory"
            ),
            Self::BadVcpus => f.write_str("the number of virtual CPUs is 0 or too large"),
            Self::TablesTooLarge => f.write_str("the firmware tables are too large"),
            Self::Memory(error) => write!(f, "guest memory has a hole: {error:?}"),
        }
    }
}

impl core::error::Error for BootError {}
