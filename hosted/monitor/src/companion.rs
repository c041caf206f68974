//! Programs that belong to `parador`: the wedge (`wedge/on-linux`), and process 1 of the guests of
//! `parador exec` (`guests/agent`). They come from the source tree or a folder of binaries, else
//! from the copies in `parador`.
//!
//! With the copies, `parador` alone can be copied to another host. That of the wedge is executed
//! from memory (memfd_create(2)) by the process that becomes the wedge ([`supervise`]).

use hosted_command::failure::{self, Failure, IoContext};
use hosted_command::programs::{Named, Programs};
use hosted_command::steps::Steps;
use hosted_command::supervise::{self, AtEnd};
use hosted_command::trust;
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, memfd_create};
use rustix::io::Errno;
use std::borrow::Cow;
use std::fs::{self, File};
use std::io::{self, Write};
use std::path::PathBuf;
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
    /// Locates the binary, and builds it in a source tree if necessary; `None`: the copy.
    ///
    /// # Errors
    /// The location that is set has none; it cannot be built; another user can change it
    /// ([`trust::check`]).
    fn find(&self, named: &Named) -> Result<Option<PathBuf>, Failure> {
        let programs = match Programs::known(named)? {
            None if !self.copy.is_empty() => return Ok(None),
            None => return Err(Programs::missing()),
            Some(programs) => programs,
        };
        let folder = match programs.finished() {
            Some(folder) if folder.join(self.name).is_file() => folder,
            _ => {
                let steps = Steps::stderr();
                steps.run("Building Parador's binaries", |step| programs.build(step))?
            }
        };
        let binary = folder.join(self.name);
        if !binary.is_file() {
            let text = format!("no such binary: {}", binary.display());
            return Err(Failure::new(failure::MISSING_FILE, text).help("run `cargo xtask build`"));
        }
        trust::check(&binary).map(Some)
    }

    /// Returns the contents of the binary.
    ///
    /// # Errors
    /// As [`Wedge::find`]; it cannot be read.
    pub fn read(&self, named: &Named) -> Result<Cow<'static, [u8]>, Failure> {
        match self.find(named)? {
            Some(path) => fs::read(&path).file_error("read", &path).map(Cow::Owned),
            None => Ok(Cow::Borrowed(self.copy)),
        }
    }
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
    /// ([`trust::check`]).
    pub fn find(named: &Named) -> Result<Self, Failure> {
        Ok(WEDGE.find(named)?.map_or(Self::Copy, Self::File))
    }

    /// Creates a command that runs the wedge and ends with `parador`.
    pub fn command(&self) -> Result<Command, Failure> {
        match self {
            Self::File(path) => supervise::command(path.as_os_str(), AtEnd::Kill),
            Self::Copy => Ok(supervise::copied(AtEnd::Kill)),
        }
    }
}

/// Returns a memory file with the copy of the wedge, executable and sealed. `exec` closes it.
pub fn wedge_in_memory() -> io::Result<File> {
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    // Hosts before Linux 6.3 do not support the flag and do not need it.
    let made = match memfd_create(WEDGE.name, flags | MemfdFlags::EXEC) {
        Err(Errno::INVAL) => memfd_create(WEDGE.name, flags),
        made => made,
    };
    let mut file = File::from(made?);
    file.write_all(WEDGE.copy)?;
    let seals = SealFlags::WRITE | SealFlags::GROW | SealFlags::SHRINK | SealFlags::SEAL;
    fcntl_add_seals(&file, seals)?;
    Ok(file)
}
