//! The wedge's program (`wedge/on-linux`): a file of the source tree or of a folder of programs, else the copy that this program contains.
//!
//! With the copy, a `parador` that was copied to another host needs no other file. It is executed from memory (memfd_create(2)), by the process that
//! becomes it ([`supervise`]).

use crate::failure::{self, Failure};
use crate::programs::{Named, Programs};
use crate::steps::Steps;
use crate::supervise::{self, AtEnd};
use crate::trust;
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, memfd_create};
use rustix::io::Errno;
use std::fs::File;
use std::io::{self, Write};
use std::path::PathBuf;
use std::process::Command;

/// The program's name, among Parador's own and in messages.
pub const NAME: &str = "parador-wedge";

/// The program as `cargo xtask build` had made it when this one was built (`build.rs`); empty if it had not.
static COPY: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/parador-wedge"));

/// Where the wedge's program is.
#[derive(Debug)]
pub enum Wedge {
    /// A file that nobody else can change.
    File(PathBuf),
    /// In this program.
    Copy,
}

impl Wedge {
    /// Finds the program, and builds it if it is that of a source tree and has not been built.
    ///
    /// # Errors
    /// There is none where the command line or the environment says; it cannot be built; others can change it ([`trust::check`]).
    pub fn find(named: &Named) -> Result<Self, Failure> {
        let programs = match Programs::known(named)? {
            None if !COPY.is_empty() => return Ok(Self::Copy),
            None => return Err(Programs::missing()),
            Some(programs) => programs,
        };
        let folder = match programs.finished() {
            Some(folder) if folder.join(NAME).is_file() => folder,
            _ => {
                let steps = Steps::new();
                steps.run("Building Parador's programs", |step| programs.build(step))?
            }
        };
        let wedge = folder.join(NAME);
        if !wedge.is_file() {
            let text = format!("no program {}", wedge.display());
            return Err(Failure::new(failure::MISSING_FILE, text).help("run `cargo xtask build`"));
        }
        trust::check(&wedge).map(Self::File)
    }

    /// A command that runs it and ends with this program.
    pub fn command(&self) -> Result<Command, Failure> {
        match self {
            Self::File(path) => supervise::command(path.as_os_str(), AtEnd::Kill),
            Self::Copy => Ok(supervise::copied(AtEnd::Kill)),
        }
    }
}

/// Returns a file in memory with the copy, which can be executed and not be changed. It is closed by `exec`.
pub fn copy() -> io::Result<File> {
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    // Hosts before Linux 6.3 do not know the flag, and need none.
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
