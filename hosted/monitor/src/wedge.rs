//! The wedge's binary (`wedge/on-linux`): from the source tree or a folder of binaries, else the
//! copy in `parador`.
//!
//! With the copy, `parador` alone can be copied to another host. The copy is executed from memory
//! (memfd_create(2)) by the process that becomes the wedge ([`supervise`]).

use hosted_command::failure::{self, Failure};
use hosted_command::programs::{Named, Programs};
use hosted_command::steps::Steps;
use hosted_command::supervise::{self, AtEnd};
use hosted_command::trust;
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, memfd_create};
use rustix::io::Errno;
use std::fs::File;
use std::io::{self, Write};
use std::path::PathBuf;
use std::process::Command;

/// File name of the binary, and its name in messages.
pub const NAME: &str = "parador-wedge";

/// Binary of `cargo xtask build` when `parador` was built (`build.rs`); empty if there was none.
static COPY: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/parador-wedge"));

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
        let programs = match Programs::known(named)? {
            None if !COPY.is_empty() => return Ok(Self::Copy),
            None => return Err(Programs::missing()),
            Some(programs) => programs,
        };
        let folder = match programs.finished() {
            Some(folder) if folder.join(NAME).is_file() => folder,
            _ => {
                let steps = Steps::stderr();
                steps.run("Building Parador's binaries", |step| programs.build(step))?
            }
        };
        let wedge = folder.join(NAME);
        if !wedge.is_file() {
            let text = format!("no such binary: {}", wedge.display());
            return Err(Failure::new(failure::MISSING_FILE, text).help("run `cargo xtask build`"));
        }
        trust::check(&wedge).map(Self::File)
    }

    /// Creates a command that runs the wedge and ends with `parador`.
    pub fn command(&self) -> Result<Command, Failure> {
        match self {
            Self::File(path) => supervise::command(path.as_os_str(), AtEnd::Kill),
            Self::Copy => Ok(supervise::copied(AtEnd::Kill)),
        }
    }
}

/// Returns a memory file with the copy, executable and sealed. `exec` closes it.
pub fn copy() -> io::Result<File> {
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    // Hosts before Linux 6.3 do not support the flag and do not need it.
    let made = match memfd_create(NAME, flags | MemfdFlags::EXEC) {
        Err(Errno::INVAL) => memfd_create(NAME, flags),
        made => made,
    };
    let mut file = File::from(made?);
    file.write_all(COPY)?;
    let seals = SealFlags::WRITE | SealFlags::GROW | SealFlags::SHRINK | SealFlags::SEAL;
    fcntl_add_seals(&file, seals)?;
    Ok(file)
}
