//! Programs that belong to `parador`: the wedge (`wedge/on-linux`), and process 1 of the guests of
//! `parador exec` (`guests/agent`). They come from the source tree or a folder of binaries, else
//! from the copies in `parador`. Files of another release are refused ([`release`]).
//!
//! With the copies, `parador` alone can be copied to another host. That of the wedge is executed
//! from memory (memfd_create(2)) by the process that becomes the wedge ([`supervise`]).

use hosted_command::architecture::Architecture;
use hosted_command::failure::{self, Failure, IoContext};
use hosted_command::programs::{Named, Programs};
use hosted_command::release::{self, Mark};
use hosted_command::steps::Steps;
use hosted_command::supervise::{self, AtEnd};
use hosted_command::trust;
use hosted_system::initramfs;
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, memfd_create};
use rustix::io::Errno;
use std::borrow::Cow;
use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::process::Command;

/// Program that belongs to `parador`.
pub struct Companion {
    /// File name of the binary, and its name in messages.
    pub name: &'static str,
    /// Binary of `cargo xtask build` when `parador` was built (`build.rs`); empty if there was
    /// none.
    copy: &'static [u8],
}

/// The wedge.
pub static WEDGE: Companion = Companion {
    name: "parador-wedge",
    copy: include_bytes!(concat!(env!("OUT_DIR"), "/parador-wedge")),
};

/// Process 1 of the guests of `parador exec`.
pub static AGENT: Companion = Companion {
    name: "parador-agent",
    copy: include_bytes!(concat!(env!("OUT_DIR"), "/parador-agent")),
};

impl Companion {
    /// Locates and reads the binary, and builds it in a source tree if necessary; `None`: the copy.
    ///
    /// # Errors
    /// The location that is set has none; it cannot be built; another user can change it
    /// ([`trust::check`]); it is of another release.
    fn find(&self, named: &Named) -> Result<Option<(PathBuf, Vec<u8>)>, Failure> {
        let programs = match Programs::known(named)? {
            None if !self.copy.is_empty() => return Ok(None),
            None => return Err(Programs::missing()),
            Some(programs) => programs,
        };
        let folder = match programs.finished() {
            Some(folder) if folder.join(self.name).is_file() => folder,
            _ => {
                let steps = Steps::stderr();
                steps.run("Building Parador's binaries", |step| {
                    programs.build(Architecture::X86, step)
                })?
            }
        };
        let binary = folder.join(self.name);
        if !binary.is_file() {
            let text = format!("no such binary: {}", binary.display());
            return Err(Failure::new(failure::MISSING_FILE, text)
                .help("run `cargo xtask build`, or install the package again"));
        }
        let (binary, bytes) = read_trusted(&binary)?;
        release::check(&*bytes, &binary)?;
        Ok(Some((binary, bytes)))
    }

    /// Returns the contents of the binary.
    ///
    /// # Errors
    /// As [`Wedge::find`]; it cannot be read.
    pub fn read(&self, named: &Named) -> Result<Cow<'static, [u8]>, Failure> {
        let found = self.find(named)?;
        Ok(found.map_or(Cow::Borrowed(self.copy), |(_, bytes)| Cow::Owned(bytes)))
    }
}

/// Returns the real path and the contents of a file that no other user can change.
fn read_trusted(path: &Path) -> Result<(PathBuf, Vec<u8>), Failure> {
    let path = trust::check(path)?;
    let bytes = fs::read(&path).file_error("read", &path)?;
    Ok((path, bytes))
}

/// File name of the RAM disk with the agent, in a package.
const AGENT_DISK: &str = "agent.cpio";

/// Returns the RAM disk with the agent: the finished one of an installed `parador`, else one with
/// the binary.
///
/// # Errors
/// As [`Wedge::find`]; it cannot be read.
pub fn agent_disk(named: &Named) -> Result<Vec<u8>, Failure> {
    let folder = match Programs::known(named)? {
        Some(Programs::Folder(folder)) => Some(folder),
        _ => None,
    };
    let disk = folder.map(|folder| folder.join(AGENT_DISK)).filter(|disk| disk.is_file());
    let Some(disk) = disk else {
        return AGENT.read(named).map(|agent| initramfs::agent(&agent));
    };
    let (disk, bytes) = read_trusted(&disk)?;
    release::check_mark(initramfs::init(&bytes).and_then(Mark::of), &disk)?;
    Ok(bytes)
}

/// Location of the wedge's binary.
#[derive(Debug)]
pub enum Wedge {
    /// Trusted file.
    File(PathBuf),
    /// Copy in `parador`.
    Copy,
}

impl Wedge {
    /// Locates the binary, and builds it in a source tree if necessary.
    ///
    /// # Errors
    /// The location that is set has none; it cannot be built; another user can change it
    /// ([`trust::check`]); it is of another release.
    pub fn find(named: &Named) -> Result<Self, Failure> {
        Ok(WEDGE.find(named)?.map_or(Self::Copy, |(path, _)| Self::File(path)))
    }

    /// Creates a command that runs the wedge and ends with `parador`.
    pub fn command(&self) -> Result<Command, Failure> {
        match self {
            Self::File(path) => supervise::command(path.as_os_str(), AtEnd::Kill),
            Self::Copy => Ok(supervise::copied(AtEnd::Kill)),
        }
    }
}

/// Creates a memory file that can be executed.
pub fn executable_memory(name: &str, flags: MemfdFlags) -> io::Result<File> {
    // Hosts before Linux 6.3 do not support the flag and do not need it.
    let made = match memfd_create(name, flags | MemfdFlags::EXEC) {
        Err(Errno::INVAL) => memfd_create(name, flags),
        made => made,
    };
    Ok(made?.into())
}

/// Returns a memory file with the copy of the wedge, executable and sealed. `exec` closes it.
pub fn wedge_in_memory() -> io::Result<File> {
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    let mut file = executable_memory(WEDGE.name, flags)?;
    file.write_all(WEDGE.copy)?;
    let seals = SealFlags::WRITE | SealFlags::GROW | SealFlags::SHRINK | SealFlags::SEAL;
    fcntl_add_seals(&file, seals)?;
    Ok(file)
}
