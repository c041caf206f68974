//! Errors of booting a guest.

use core::fmt;
use hw_tables::elf::ElfError;
use vmm_mem::MemoryError;

/// Reason why a guest cannot be booted.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum BootError {
    /// Neither a bzImage nor an ELF file.
    UnknownFormat,
    /// The image is shorter than its header states.
    Truncated {
        /// Minimum bytes.
        needed: u64,
        /// Actual bytes.
        actual: u64,
    },
    /// bzImage of a boot protocol before 2.12.
    OldProtocol {
        /// Version of the image: major in the high byte, minor in the low.
        version: u16,
    },
    /// bzImage without a 64-bit entry.
    No64BitEntry,
    /// bzImage with addresses below 1 MiB or beyond 4 GiB.
    BadHeader,
    /// ELF file that is not a valid executable.
    BadElf(ElfError),
    /// ELF file for another architecture.
    WrongMachine,
    /// Big-endian image for AArch64.
    BigEndian,
    /// ELF file without the PVH entry note, and without a Multiboot header.
    NoPvhEntry,
    /// An inconsistent Multiboot header, or one that requires an unsupported feature.
    BadMultiboot,
    /// A segment of an ELF kernel overlaps the loader's data below 1 MiB, or is beyond 4 GiB.
    BadSegment {
        /// First guest-physical address of the segment.
        start: u64,
        /// First address after it.
        end: u64,
    },
    /// The command line exceeds the kernel's limit.
    CommandLineTooLong {
        /// Limit of the kernel in bytes.
        limit: u64,
        /// Actual length in bytes.
        length: u64,
    },
    /// The command line contains a zero byte.
    BadCommandLine,
    /// The kernel and initial RAM disk do not fit into RAM.
    TooLittleMemory {
        /// Bytes of RAM needed.
        needed: u64,
        /// Bytes of RAM below the PCI hole.
        available: u64,
    },
    /// The initial RAM disk does not fit below the kernel's highest permitted address.
    InitrdTooLarge {
        /// Maximum length in bytes.
        limit: u64,
        /// Actual length in bytes.
        length: u64,
    },
    /// No vCPU, or more than 8-bit APIC ids can number.
    BadVcpus,
    /// The tables do not fit into their region; a bug.
    TablesTooLarge,
    /// Guest memory lacks a page inside its ranges; a bug.
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
                "the kernel is neither a bzImage nor an ELF file, and has no Multiboot header",
            ),
            Self::Truncated { needed, actual } => {
                write!(
                    f,
                    "the kernel is truncated: it has {actual} bytes, at least {needed} are needed"
                )
            }
            Self::OldProtocol { version } => write!(
                f,
                "the kernel uses boot protocol {}.{:02}; 2.12 or later is required",
                version >> 8,
                version & 0xff
            ),
            Self::No64BitEntry => f.write_str("the kernel has no 64-bit entry"),
            Self::BadHeader => {
                f.write_str("the kernel header has addresses below 1 MiB or beyond 4 GiB")
            }
            Self::BadElf(ElfError::Truncated) => f.write_str("the kernel is truncated"),
            Self::BadElf(error) => write!(f, "the kernel is an invalid ELF file: {error:?}"),
            Self::WrongMachine => f.write_str("the kernel is for another architecture"),
            Self::BigEndian => f.write_str(
                "the kernel is big-endian, but devices are little-endian: use a little-endian one",
            ),
            Self::NoPvhEntry => f.write_str(
                "the kernel is an ELF file without a PVH entry note and without a Multiboot header",
            ),
            Self::BadMultiboot => f.write_str(
                "the kernel's Multiboot header is inconsistent or requires a video mode",
            ),
            Self::BadSegment { start, end } => {
                write!(f, "kernel segment {start:#x}..{end:#x} is not between 1 MiB and 4 GiB")
            }
            Self::CommandLineTooLong { limit, length } => {
                write!(f, "the command line has {length} bytes; the kernel's limit is {limit}")
            }
            Self::BadCommandLine => f.write_str("the command line contains a zero byte"),
            Self::TooLittleMemory { needed, available } => write!(
                f,
                "kernel and initial RAM disk need {} of memory; the VM has {}",
                Mebibytes(needed),
                Mebibytes(available)
            ),
            Self::InitrdTooLarge { limit, length } => write!(
                f,
                "the initial RAM disk has {length} bytes; the limit in this memory is {limit}"
            ),
            Self::BadVcpus => f.write_str("the number of vCPUs is 0 or too large"),
            Self::TablesTooLarge => f.write_str("the firmware tables are too large"),
            Self::Memory(error) => write!(f, "guest memory has an unmapped page: {error:?}"),
        }
    }
}

impl core::error::Error for BootError {}
