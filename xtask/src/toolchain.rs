//! Which compiler builds for bare metal.
//!
//! Two are supported: a rustup toolchain that has the `x86_64-unknown-none` target, and Debian's
//! own packages, which have no such target but ship the standard library's sources, from which
//! cargo builds `core` and `alloc` for it. Nothing is ever installed here; `install.sh` does that.

use crate::process::{output, succeeds};
use anyhow::{Result, bail};
use std::path::Path;
use std::process::Command;

/// The target triple of the kernel, the native programs and the micro-guests on x86-64.
pub const X86: &str = "x86_64-unknown-none";
/// That of the kernel and native programs on AArch64, without floating point.
pub const ARM64: &str = "aarch64-unknown-none-softfloat";

const DEBIAN_CARGO: &str = "/usr/bin/cargo";
const DEBIAN_RUSTC: &str = "/usr/bin/rustc";
const DEBIAN_SOURCES: &str = "/usr/lib/rustlib/src/rust/library/core/Cargo.toml";
const DEBIAN_CLIPPY: &str = "/usr/bin/cargo-clippy";
const LINKER: &str = "/usr/bin/ld.lld";

/// A compiler that can build for bare metal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Bare {
    /// The toolchain that runs this program, with its precompiled `core`.
    Rustup,
    /// Debian's packages, with `core` and `alloc` built from source.
    Debian,
}

impl Bare {
    /// Selects a compiler for a target. The error names the packages to install.
    pub fn choose_for(target: &str) -> Result<Self> {
        if rustup_has(target) {
            return Ok(Self::Rustup);
        }
        let needed = [DEBIAN_CARGO, DEBIAN_RUSTC, DEBIAN_SOURCES, LINKER];
        let missing: Vec<&str> =
            needed.into_iter().filter(|path| !Path::new(path).exists()).collect();
        if missing.is_empty() {
            return Ok(Self::Debian);
        }
        bail!(
            "no compiler for {target}: neither `rustup target add {target}` was done, nor are \
             Debian's rustc-web, cargo-web, rust-web-src and lld installed (missing: {}); \
             run ./install.sh",
            missing.join(", ")
        )
    }

    /// Returns true if this compiler's own clippy is installed; another version cannot read its
    /// `core`.
    pub fn has_clippy(self) -> bool {
        match self {
            Self::Rustup => succeeds(host_cargo().args(["clippy", "--version"])),
            Self::Debian => Path::new(DEBIAN_CLIPPY).exists(),
        }
    }

    /// `cargo SUBCOMMAND` for a target, with these compiler flags in addition to the common ones.
    pub fn cargo_for(self, target: &str, subcommand: &str, flags: &[&str]) -> Command {
        let mut all = vec!["-Clink-arg=-zmax-page-size=4096"];
        let mut command = match self {
            Self::Rustup => host_cargo(),
            Self::Debian => {
                all.push("-Clinker=ld.lld");
                // As an external subcommand of cargo, clippy would be searched in rustup's folder
                // first.
                let program = if subcommand == "clippy" { DEBIAN_CLIPPY } else { DEBIAN_CARGO };
                let mut command = Command::new(program);
                // `-Zbuild-std` is not yet stable: the variable lets this released compiler use it.
                command
                    .env("RUSTC_BOOTSTRAP", "1")
                    .env("CARGO", DEBIAN_CARGO)
                    .env("RUSTC", DEBIAN_RUSTC)
                    .env_remove("RUSTUP_TOOLCHAIN");
                command
            }
        };
        all.extend_from_slice(flags);
        command
            .arg(subcommand)
            .args(["--profile", "bare", "--target", target])
            .env("CARGO_ENCODED_RUSTFLAGS", all.join("\u{1f}"))
            .env_remove("RUSTFLAGS");
        if self == Self::Debian {
            if target.contains("-linux-") {
                // Debian packages `std` for another processor only as a foreign architecture.
                command.arg("-Zbuild-std=std,panic_abort");
            } else {
                command.args([
                    "-Zbuild-std=core,alloc,compiler_builtins",
                    "-Zbuild-std-features=compiler-builtins-mem",
                ]);
            }
        }
        command
    }
}

/// The cargo that runs this program: it builds everything for the host.
pub fn host_cargo() -> Command {
    let mut command = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    command.current_dir(crate::process::workspace());
    command
}

fn rustup_has(target: &str) -> bool {
    let compiler = std::env::var_os("RUSTC").unwrap_or_else(|| "rustc".into());
    let Ok(path) =
        output(Command::new(compiler).args(["--print", "target-libdir", "--target", target]))
    else {
        return false;
    };
    let directory = Path::new(path.trim());
    let has_core = std::fs::read_dir(directory).is_ok_and(|entries| {
        entries.flatten().any(|entry| entry.file_name().to_string_lossy().starts_with("libcore-"))
    });
    has_core && succeeds(host_cargo().arg("--version"))
}
