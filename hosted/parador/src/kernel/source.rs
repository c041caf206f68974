//! Linux' source: where it is, and as much of it in a folder as our kernel is built from.

use crate::failure::{self, Failure};
use crate::fetch;
use crate::interrupt::Interruptible;
use crate::steps::Step;
use crate::supervise::{self, AtEnd};
use std::ffi::OsStr;
use std::fs;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::io;
use std::path::{Component, Path, PathBuf};
use std::process::Stdio;
use std::time::UNIX_EPOCH;

/// Where Debian's package puts it.
const INSTALLED: &str = "/usr/src/linux-source-6.1.tar.xz";
/// Folders of which only what describes the build is needed: no configuration of ours uses the rest. It is three quarters of all.
const UNUSED: [&str; 20] = [
    "Documentation",
    "LICENSES",
    "debian",
    "drivers/gpu",
    "drivers/iio",
    "drivers/infiniband",
    "drivers/media",
    "drivers/net/ethernet",
    "drivers/net/wireless",
    "drivers/scsi",
    "drivers/staging",
    "drivers/usb",
    "drivers/video",
    "samples",
    "sound",
    "tools/perf",
    "tools/power",
    "tools/testing",
    "tools/virtio",
    "tools/usb",
];

/// Linux' source.
#[derive(Debug)]
pub enum Source {
    /// A compressed archive, as Debian has it.
    Archive(PathBuf),
    /// A folder.
    Folder(PathBuf),
}

impl Source {
    /// What was named, else the installed package, else the package from apt.
    pub fn find(
        named: Option<&Path>,
        cache: &Path,
        step: &Step,
        interruptible: &Interruptible,
    ) -> Result<Self, Failure> {
        let installed = Path::new(INSTALLED);
        match named {
            Some(path) if path.is_dir() => Ok(Self::Folder(path.to_owned())),
            Some(path) if path.is_file() => Ok(Self::Archive(path.to_owned())),
            Some(path) => Err(Failure::new(
                failure::MISSING_FILE,
                format!("no source of Linux: {}", path.display()),
            )),
            None if installed.is_file() => Ok(Self::Archive(installed.to_owned())),
            None => fetch::linux_source(cache, step, interruptible).map(Self::Archive),
        }
    }

    /// What makes it the same source as another time, without reading all of it.
    pub fn identity(&self) -> Result<u64, Failure> {
        let mut hasher = DefaultHasher::new();
        match self {
            Self::Archive(path) => {
                let read = |error| Failure::file("read", path, &error);
                let file = fs::metadata(path).map_err(read)?;
                hash_file(&file, &mut hasher).map_err(read)?;
            }
            Self::Folder(path) => {
                let mut files = Vec::new();
                list(path, Path::new(""), &mut files)?;
                for file in files {
                    let path = path.join(&file);
                    let read = |error| Failure::file("read", &path, &error);
                    file.hash(&mut hasher);
                    hash_file(&fs::symlink_metadata(&path).map_err(read)?, &mut hasher)
                        .map_err(read)?;
                }
            }
        }
        Ok(hasher.finish())
    }

    /// Puts it into the folder `to`, which is not there yet.
    pub fn unpack(&self, to: &Path) -> Result<(), Failure> {
        match self {
            Self::Archive(path) => unpack(path, to),
            Self::Folder(from) => {
                let mut files = Vec::new();
                list(from, Path::new(""), &mut files)?;
                files.iter().try_for_each(|file| copy(&from.join(file), &to.join(file)))
            }
        }?;
        match to.join("Kbuild").is_file() && to.join("arch/x86/Kconfig").is_file() {
            true => Ok(()),
            false => Err(Failure::new(failure::BAD_CONFIG, "that is no source of Linux")
                .help("give linux-source-6.1.tar.xz of Debian's package, or its unpacked folder")),
        }
    }
}

/// The first line of the top Makefile's `VERSION`, `PATCHLEVEL` and `SUBLEVEL`, as a number with dots.
pub fn version(tree: &Path) -> Result<String, Failure> {
    let path = tree.join("Makefile");
    let text = fs::read_to_string(&path).map_err(|error| Failure::file("read", &path, &error))?;
    let field = |name: &str| {
        let value = text.lines().find_map(|line| line.strip_prefix(name)?.trim().strip_prefix('='));
        value.map(|value| value.trim().to_owned()).unwrap_or_default()
    };
    Ok(["VERSION", "PATCHLEVEL", "SUBLEVEL"].map(field).join("."))
}

/// Seconds since 1970 when the source was made: the date of its top Makefile.
pub fn date(tree: &Path) -> Result<u64, Failure> {
    let path = tree.join("Makefile");
    let modified = fs::metadata(&path).and_then(|file| file.modified());
    let modified = modified.map_err(|error| Failure::file("read", &path, &error))?;
    Ok(modified.duration_since(UNIX_EPOCH).map_or(0, |time| time.as_secs()))
}

fn hash_file(file: &fs::Metadata, hasher: &mut DefaultHasher) -> io::Result<()> {
    file.len().hash(hasher);
    file.modified()?.hash(hasher);
    Ok(())
}

/// Whether a file of Linux, by its path there, can be of use.
fn is_used(path: &Path) -> bool {
    let name = path.file_name().and_then(OsStr::to_str).unwrap_or_default();
    let describes = ["Kconfig", "Makefile", "Kbuild"].iter().any(|start| name.starts_with(start));
    let other_machine = path
        .strip_prefix("arch")
        .is_ok_and(|path| path.components().count() > 1 && !path.starts_with("x86"));
    let unused = other_machine || UNUSED.iter().any(|folder| path.starts_with(folder));
    describes || !unused
}

/// Adds the files in use below `root/folder`, in order.
fn list(root: &Path, folder: &Path, files: &mut Vec<PathBuf>) -> Result<(), Failure> {
    let path = root.join(folder);
    let read = |error| Failure::file("read", &path, &error);
    let entries: io::Result<Vec<_>> =
        fs::read_dir(&path).map_err(read)?.map(|entry| Ok((entry?.path(), ()))).collect();
    let mut entries = entries.map_err(read)?;
    entries.sort();
    for (entry, ()) in entries {
        let Ok(name) = entry.strip_prefix(root) else { continue };
        let kind = fs::symlink_metadata(&entry).map_err(read)?;
        if kind.is_dir() {
            if name != Path::new(".git") {
                list(root, name, files)?;
            }
        } else if is_used(name) {
            files.push(name.to_owned());
        }
    }
    Ok(())
}

fn copy(from: &Path, to: &Path) -> Result<(), Failure> {
    let failed = |error: io::Error| Failure::file("copy", from, &error);
    if let Some(folder) = to.parent() {
        fs::create_dir_all(folder).map_err(failed)?;
    }
    let file = fs::symlink_metadata(from).map_err(failed)?;
    if file.is_symlink() {
        let target = fs::read_link(from).map_err(failed)?;
        return std::os::unix::fs::symlink(target, to).map_err(failed);
    }
    fs::copy(from, to).map_err(failed)?;
    let time = file.modified().map_err(failed)?;
    fs::File::options().write(true).open(to).and_then(|to| to.set_modified(time)).map_err(failed)
}

fn unpack(archive: &Path, to: &Path) -> Result<(), Failure> {
    let mut child = supervise::command(OsStr::new("xz"), AtEnd::Kill)?
        .args(["--decompress", "--stdout"])
        .arg(archive)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .map_err(|error| Failure::program("xz", &error))?;
    let broken = |error: io::Error| {
        let reason = failure::describe(&error);
        let message = format!("cannot unpack {}: {reason}", archive.display());
        Failure::new(failure::code_of(&error), message).help("is the disk full?")
    };
    if let Some(stdout) = child.stdout.take() {
        let mut tar = tar::Archive::new(stdout);
        for entry in tar.entries().map_err(broken)? {
            let mut entry = entry.map_err(broken)?;
            let path = entry.path().map_err(broken)?.into_owned();
            // Its one folder has the version in its name.
            let mut parts = path.components().filter(|part| *part != Component::CurDir);
            parts.next();
            let name: PathBuf = parts.collect();
            let kind = entry.header().entry_type();
            if !(kind.is_file() || kind.is_symlink()) || !is_used(&name) {
                continue;
            }
            if name.components().any(|part| !matches!(part, Component::Normal(_))) {
                continue;
            }
            let place = to.join(name);
            if let Some(folder) = place.parent() {
                fs::create_dir_all(folder).map_err(broken)?;
            }
            entry.unpack(&place).map_err(broken)?;
        }
    }
    let status = child.wait().map_err(|error| Failure::os("wait for xz", &error))?;
    match status.success() {
        true => Ok(()),
        false => {
            let message = format!("{} is damaged, or not compressed by xz", archive.display());
            Err(Failure::new(failure::BAD_CONFIG, message))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_used() {
        for used in ["Makefile", "arch/Kconfig", "arch/x86/mm/tlb.c", "drivers/net/dummy.c"] {
            assert!(is_used(Path::new(used)), "{used}");
        }
        for used in ["sound/Kconfig", "arch/arm/Kconfig.debug", "drivers/scsi/Makefile"] {
            assert!(is_used(Path::new(used)), "{used}");
        }
        for unused in ["arch/arm/mm/mmu.c", "sound/core/init.c", "drivers/gpu/drm/drm_drv.c"] {
            assert!(!is_used(Path::new(unused)), "{unused}");
        }
    }

    #[test]
    fn a_folder_is_copied_and_known_again() {
        let from = tempfile::tempdir().unwrap();
        for file in ["Kbuild", "arch/x86/Kconfig", "arch/arm/a.c", "sound/b.c", ".git/x"] {
            let path = from.path().join(file);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, file).unwrap();
        }
        let makefile = from.path().join("Makefile");
        fs::write(&makefile, "VERSION = 6\nPATCHLEVEL = 1\nSUBLEVEL = 192\n").unwrap();
        let source = Source::Folder(from.path().to_owned());
        let identity = source.identity().unwrap();
        assert_eq!(source.identity().unwrap(), identity);

        let to = from.path().join("copy");
        source.unpack(&to).unwrap();
        assert_eq!(version(&to).unwrap(), "6.1.192");
        assert_eq!(date(&to).unwrap(), date(from.path()).unwrap());
        assert!(!to.join("sound").exists() && !to.join(".git").exists());
        fs::remove_dir_all(&to).unwrap();

        fs::write(&makefile, "VERSION = 7").unwrap();
        assert_ne!(source.identity().unwrap(), identity);
        fs::remove_file(from.path().join("Kbuild")).unwrap();
        assert_eq!(source.unpack(&to).unwrap_err().code(), failure::BAD_CONFIG);
    }
}
