//! Maps of the guest kernel for host profilers: `/tmp/perf-PID.map`, one function per line
//! (`tools/perf/Documentation/jit-interface.txt` in Linux).
//!
//! All processes of a VM have the kernel at the same addresses, so one file gets a hard link per
//! process, which never replaces a file of another user. The links are removed with the VM.

use hosted_command::failure::{Failure, describe};
use hosted_command::messages::{Level, say};
use hosted_loader::Image;
use rustix::process::geteuid;
use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::fs;
use std::io::{self, ErrorKind, Write};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use tempfile::NamedTempFile;

/// Folder that profilers search, independent of the environment.
const FOLDER: &str = "/tmp";

/// Maps of a VM. Dropping them removes them.
pub struct Maps {
    file: NamedTempFile,
    paths: BTreeSet<PathBuf>,
    told: bool,
}

impl Maps {
    /// Writes the functions of a kernel to the file, without a link.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn new(image: &Image<'_>) -> Result<Self, Failure> {
        let written =
            NamedTempFile::with_prefix_in("parador-perf-", FOLDER).and_then(|mut file| {
                file.write_all(text(&image.functions()).as_bytes())?;
                Ok(file)
            });
        let failed = |error| Failure::file("write a perf map in", Path::new(FOLDER), &error);
        Ok(Self { file: written.map_err(failed)?, paths: BTreeSet::new(), told: false })
    }

    /// Links the map for processes of the VM.
    pub fn processes(&mut self, processes: impl Iterator<Item = u32>) {
        for process in processes {
            let path = Path::new(FOLDER).join(format!("perf-{process}.map"));
            if self.paths.contains(&path) {
                continue;
            }
            match link(self.file.path(), &path) {
                Ok(()) => drop(self.paths.insert(path)),
                Err(error) if !self.told => {
                    self.told = true;
                    let cause = describe(&error);
                    let text = format!("cannot create the perf map {}: {cause}", path.display());
                    say(Level::Warn, &text);
                }
                Err(_) => {}
            }
        }
    }
}

impl Drop for Maps {
    fn drop(&mut self) {
        for path in &self.paths {
            // The link may have been removed already.
            let _ = fs::remove_file(path);
        }
    }
}

/// Creates a link to the file. A stale map of the same user with this process ID is replaced.
fn link(file: &Path, path: &Path) -> io::Result<()> {
    match fs::hard_link(file, path) {
        Err(error) if error.kind() == ErrorKind::AlreadyExists => {
            let found = fs::symlink_metadata(path)?;
            if !found.is_file() || found.uid() != geteuid().as_raw() {
                return Err(error);
            }
            fs::remove_file(path)?;
            fs::hard_link(file, path)
        }
        linked => linked,
    }
}

/// Formats address, size and name.
fn text(functions: &[(u64, u64, String)]) -> String {
    let mut text = String::new();
    for (address, size, name) in functions {
        // Writing to a string does not fail.
        let _ = writeln!(text, "{address:x} {size:x} {name}");
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_is_given_once_and_taken_back() {
        let folder = tempfile::tempdir().unwrap();
        let [file, path] = ["file", "perf-1.map"].map(|name| folder.path().join(name));
        fs::write(&file, text(&[(0x4100_0000, 16, "start".to_owned())])).unwrap();
        for _ in 0..2 {
            link(&file, &path).unwrap();
            assert_eq!(fs::read_to_string(&path).unwrap(), "41000000 10 start\n");
        }
        fs::remove_file(&path).unwrap();
        std::os::unix::fs::symlink("elsewhere", &path).unwrap();
        assert_eq!(link(&file, &path).unwrap_err().kind(), ErrorKind::AlreadyExists);
    }
}
