//! Contents of a package in a folder, with fixed modes and times.

use crate::process::{output, run};
use anyhow::{Context, Result};
use std::fs::{self, File, Permissions};
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, UNIX_EPOCH};

/// Parts of the package whose sizes are printed: title, and paths below the root directory. The
/// rest is the last part.
const PARTS: [(&str, &[&str]); 5] = [
    ("parador", &["usr/bin"]),
    ("vmlinux", &["usr/lib/parador/vmlinux"]),
    ("wedge, agent", &["usr/lib/parador/parador-wedge", "usr/lib/parador/agent.cpio"]),
    ("vmlinuz, modules", &["usr/lib/modules"]),
    ("documents", &["usr/share"]),
];

/// Executable files.
const PROGRAMS: [&str; 2] = ["usr/bin/parador", "usr/lib/parador/parador-wedge"];
const PROGRAM: u32 = 0o755;
const DATA: u32 = 0o644;

/// Folder that becomes a package.
pub struct Stage {
    /// Root directory of the installed files.
    pub root: PathBuf,
}

impl Stage {
    /// Creates an empty folder.
    pub fn new(root: &Path) -> Result<Self> {
        if root.exists() {
            fs::remove_dir_all(root)
                .with_context(|| format!("cannot remove {}", root.display()))?;
        }
        fs::create_dir_all(root).with_context(|| format!("cannot create {}", root.display()))?;
        Ok(Self { root: root.to_owned() })
    }

    /// Returns the path of a file in the folder, after making the folders above.
    pub fn place(&self, path: &str) -> Result<PathBuf> {
        let path = self.root.join(path);
        let parent = path.parent().unwrap_or(&self.root);
        fs::create_dir_all(parent)
            .with_context(|| format!("cannot create {}", parent.display()))?;
        Ok(path)
    }

    /// Adds a folder.
    pub fn folder(&self, path: &str) -> Result<()> {
        let path = self.place(path)?;
        fs::create_dir(&path).with_context(|| format!("cannot create {}", path.display()))
    }

    /// Adds a file.
    pub fn write(&self, path: &str, text: &str) -> Result<()> {
        let path = self.place(path)?;
        fs::write(&path, text).with_context(|| format!("cannot write {}", path.display()))
    }

    /// Adds a copy of a file.
    pub fn copy(&self, from: &Path, path: &str) -> Result<()> {
        let path = self.place(path)?;
        fs::copy(from, &path).with_context(|| format!("cannot copy {}", from.display()))?;
        Ok(())
    }

    /// Adds a program without its symbols.
    pub fn program(&self, from: &Path, path: &str) -> Result<()> {
        run(Command::new("strip").arg("--strip-all").arg("-o").arg(self.place(path)?).arg(from))
    }

    /// Adds a symbolic link.
    pub fn link(&self, path: &str, to: &str) -> Result<()> {
        let path = self.place(path)?;
        symlink(to, &path).with_context(|| format!("cannot create {}", path.display()))
    }

    /// Adds copies of the files below a folder.
    pub fn copy_folder(&self, from: &Path, path: &str) -> Result<()> {
        for file in files(from)? {
            let inside = file.strip_prefix(from).unwrap_or(&file);
            self.copy(&file, &format!("{path}/{}", inside.display()))?;
        }
        Ok(())
    }

    /// Compresses a file, or the files in a folder, as Debian's policy demands (12.1, 12.7).
    pub fn compress(&self, path: &str) -> Result<()> {
        for file in files(&self.root.join(path))? {
            run(Command::new("gzip").args(["-9", "--no-name", "--force"]).arg(file))?;
        }
        Ok(())
    }

    /// Sets modes and times of everything, and returns the size of the files in bytes.
    pub fn finish(&self, time: u64) -> Result<u64> {
        let mut size = 0;
        for path in entries(&self.root)? {
            let metadata = path.symlink_metadata()?;
            size += metadata.len();
            set(&path, time).with_context(|| format!("cannot set a mode: {}", path.display()))?;
        }
        Ok(size)
    }

    /// Adds the file `control` of the package, and the digests of all files.
    pub fn control(&self, text: &str, time: u64) -> Result<()> {
        let mut digests = Command::new("md5sum");
        for file in files(&self.root)?.iter().filter(|file| !file.is_symlink()) {
            digests.arg(file.strip_prefix(&self.root).unwrap_or(file));
        }
        let digests = output(digests.current_dir(&self.root))?;
        for (name, text) in [("control", text), ("md5sums", &digests)] {
            self.write(&format!("DEBIAN/{name}"), text)?;
        }
        let control = self.root.join("DEBIAN");
        for path in entries(&control)?.into_iter().chain([control, self.root.clone()]) {
            set(&path, time).with_context(|| format!("cannot set a mode: {}", path.display()))?;
        }
        Ok(())
    }

    /// Prints the sizes of the parts, uncompressed.
    pub fn print_sizes(&self) -> Result<()> {
        let size = |path: &str| -> Result<u64> {
            let path = self.root.join(path);
            files(&path)?.iter().map(|file| Ok(file.symlink_metadata()?.len())).sum()
        };
        for (title, paths) in PARTS {
            let bytes = paths.iter().map(|path| size(path)).sum::<Result<u64>>()?;
            println!("{title:<18} {:>6.1} MiB installed", bytes as f64 / f64::from(1 << 20));
        }
        Ok(())
    }
}

/// Sets mode and time of a file, a folder or a link.
fn set(path: &Path, time: u64) -> Result<()> {
    if path.is_symlink() {
        // The standard library does not set the times of a link itself.
        let date = format!("--date=@{time}");
        return run(Command::new("touch").arg("--no-dereference").arg(date).arg(path));
    }
    let is_program = path.is_dir() || PROGRAMS.iter().any(|program| path.ends_with(program));
    let mode = if is_program { PROGRAM } else { DATA };
    fs::set_permissions(path, Permissions::from_mode(mode))?;
    let time = UNIX_EPOCH + Duration::from_secs(time);
    Ok(File::open(path)?.set_modified(time)?)
}

/// Returns all files and links at and below `path`, in order.
pub fn files(path: &Path) -> Result<Vec<PathBuf>> {
    if path.is_symlink() || path.is_file() {
        return Ok(vec![path.to_owned()]);
    }
    Ok(entries(path)?.into_iter().filter(|path| path.is_symlink() || !path.is_dir()).collect())
}

/// Returns everything below a folder, the contents of a folder before it.
fn entries(folder: &Path) -> Result<Vec<PathBuf>> {
    let read = || format!("cannot list {}", folder.display());
    let mut names = Vec::new();
    for entry in fs::read_dir(folder).with_context(read)? {
        names.push(entry.with_context(read)?.path());
    }
    names.sort();
    let mut all = Vec::new();
    for path in names {
        if path.is_dir() && !path.is_symlink() {
            all.extend(entries(&path)?);
        }
        all.push(path);
    }
    Ok(all)
}
