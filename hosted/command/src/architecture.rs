//! Processor architectures that Parador's kernel runs on, and the names of files for them.

use clap::ValueEnum;

/// A processor architecture.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Architecture {
    /// x86-64.
    #[value(name = "x86")]
    X86,
    /// AArch64.
    Arm64,
}

impl Architecture {
    /// Returns the file name of the kernel among the programs.
    pub const fn kernel(self) -> &'static str {
        match self {
            Self::X86 => "kernel.elf",
            Self::Arm64 => "kernel-arm64.image",
        }
    }

    /// Returns the file name of a native program.
    pub fn program(self, name: &str) -> String {
        match self {
            Self::X86 => name.to_owned(),
            Self::Arm64 => format!("{name}-arm64"),
        }
    }

    /// Returns the file name of a micro-guest.
    pub fn micro_guest(self, name: &str) -> String {
        match self {
            Self::X86 => format!("guest-{name}"),
            Self::Arm64 => format!("guest-{name}-arm64.image"),
        }
    }

    /// Returns the argument of `cargo xtask build` for the programs.
    pub const fn build_group(self) -> &'static str {
        match self {
            Self::X86 => "runtime",
            Self::Arm64 => "arm64",
        }
    }
}

/// Architecture of a guest's software.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum GuestArchitecture {
    /// x86-64.
    X86,
    /// AArch64.
    Arm64,
    /// AArch32, on a machine of AArch64.
    Arm32,
}

impl From<Architecture> for GuestArchitecture {
    fn from(machine: Architecture) -> Self {
        match machine {
            Architecture::X86 => Self::X86,
            Architecture::Arm64 => Self::Arm64,
        }
    }
}

impl GuestArchitecture {
    /// Returns the prefix of the names of compiler and binary tools, and the architecture's name
    /// in Linux.
    pub const fn tools(self) -> (&'static str, &'static str) {
        match self {
            Self::X86 => ("", "x86"),
            Self::Arm64 => ("aarch64-linux-gnu-", "arm64"),
            Self::Arm32 => ("arm-linux-gnueabihf-", "arm"),
        }
    }

    /// Returns the architecture's name at Debian.
    pub const fn debian(self) -> &'static str {
        match self {
            Self::X86 => "amd64",
            Self::Arm64 => "arm64",
            Self::Arm32 => "armhf",
        }
    }

    /// Returns the name of Debian's package that depends on its current kernel for guests.
    pub const fn kernel_package(self) -> &'static str {
        match self {
            Self::X86 => "linux-image-cloud-amd64",
            Self::Arm64 => "linux-image-cloud-arm64",
            Self::Arm32 => "linux-image-armmp",
        }
    }
}
