//! Commands of apt: for the host's architecture with the host's settings, for another one with
//! folders of its own in the cache, so that the host's apt stays as it is.

use crate::architecture::GuestArchitecture;
use crate::cache;
use crate::failure::{self, Failure, IoContext};
use crate::lock::Lock;
use crate::steps::Step;
use crate::supervise::{self, AtEnd};
use std::ffi::OsStr;
use std::fs;
use std::io::Write as _;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use tempfile::NamedTempFile;

/// Source of packages for another architecture.
const SOURCE: &str = "deb http://deb.debian.org/debian bookworm main\n";

/// Apt for an architecture.
#[derive(Clone, Debug)]
pub(super) struct Apt {
    /// Settings for each command.
    options: Vec<String>,
    architecture: GuestArchitecture,
}

impl Apt {
    /// Returns apt for packages of this architecture; fetches the lists of packages of a foreign
    /// one if there are none.
    pub(super) fn new(architecture: GuestArchitecture, step: &Step) -> Result<Self, Failure> {
        if architecture == GuestArchitecture::X86 {
            return Ok(Self { options: Vec::new(), architecture });
        }
        let folder = cache::folder()?.join(format!("apt-{}", architecture.debian()));
        let (lists, archives) = (folder.join("lists"), folder.join("cache"));
        let (partial, source) = ("partial", folder.join("sources.list"));
        for path in [lists.join(partial), archives.join("archives").join(partial)] {
            fs::create_dir_all(&path).file_error("create the folder", &path)?;
        }
        write_source(&source)?;
        let name = architecture.debian();
        let shown = |path: &Path| path.display().to_string();
        let settings = [
            ("APT::Architecture", name.to_owned()),
            ("APT::Architectures", name.to_owned()),
            ("Dir::State::Lists", shown(&lists)),
            ("Dir::Cache", shown(&archives)),
            ("Dir::Etc::SourceParts", "/dev/null".to_owned()),
            ("Dir::Etc::SourceList", shown(&source)),
        ];
        let words = settings.map(|(name, value)| ["-o".to_owned(), format!("{name}={value}")]);
        let apt = Self { options: words.concat(), architecture };
        if !has_packages(&lists)? {
            // apt refuses to update lists that another process updates.
            let _lock = Lock::wait_within(&folder.join("lock"), step)?;
            if !has_packages(&lists)? {
                apt.update(step)?;
            }
        }
        Ok(apt)
    }

    /// Returns the architecture of the packages.
    pub(super) fn architecture(&self) -> GuestArchitecture {
        self.architecture
    }

    /// Returns the end of names in the cache: packages of different architectures share names.
    pub(super) fn suffix(&self) -> &'static str {
        match self.architecture {
            GuestArchitecture::X86 => "",
            GuestArchitecture::Arm64 => "_arm64",
            GuestArchitecture::Arm32 => "_armhf",
        }
    }

    /// Fetches the lists of packages.
    fn update(&self, step: &Step) -> Result<(), Failure> {
        step.now("fetching the lists of packages");
        self.run("apt-get", "the lists of packages", |command| command.arg("update")).map(drop)
    }

    /// Returns the description of a package.
    pub(super) fn show(&self, package: &str) -> Result<Shown, Failure> {
        let show = ["show", "--no-all-versions", package];
        let output = self.run("apt-cache", package, |command| command.args(show))?;
        Ok(Shown(String::from_utf8_lossy(&output.stdout).into_owned()))
    }

    /// Downloads `target`, a package and its version, into a new folder and returns the path of its
    /// archive.
    pub(super) fn download(
        &self,
        title: &str,
        target: &str,
        folder: &Path,
    ) -> Result<PathBuf, Failure> {
        fs::create_dir_all(folder).file_error("create the folder", folder)?;
        self.run("apt-get", title, |command| {
            command.args(["download", target]).current_dir(folder)
        })?;
        let first = fs::read_dir(folder)
            .and_then(|mut entries| entries.next().transpose())
            .file_error("read", folder)?;
        first.map(|entry| entry.path()).ok_or_else(|| {
            Failure::new(failure::UNAVAILABLE, format!("apt-get downloaded no file for {title}"))
        })
    }

    /// Runs a tool of apt for `what`.
    fn run(
        &self,
        name: &str,
        what: &str,
        arguments: impl FnOnce(&mut Command) -> &mut Command,
    ) -> Result<Output, Failure> {
        run(name, what, |command| arguments(command.args(&self.options)))
    }
}

/// Writes the file of sources unless it is there. Whole: another process may read it now, and apt
/// knows no packages without a source.
fn write_source(path: &Path) -> Result<(), Failure> {
    if fs::read(path).is_ok_and(|bytes| bytes == SOURCE.as_bytes()) {
        return Ok(());
    }
    let folder = path.parent().unwrap_or(path);
    let written = NamedTempFile::new_in(folder).and_then(|mut file| {
        file.write_all(SOURCE.as_bytes())?;
        fs::set_permissions(file.path(), fs::Permissions::from_mode(0o644))?;
        Ok(file.persist(path)?)
    });
    written.map(drop).file_error("write", path)
}

/// Returns whether lists of packages have been fetched into the folder `lists`.
fn has_packages(lists: &Path) -> Result<bool, Failure> {
    let entries = fs::read_dir(lists).file_error("read", lists)?;
    let mut names = entries.flatten().map(|entry| entry.file_name());
    Ok(names.any(|name| name.to_string_lossy().contains("_Packages")))
}

/// Output of `apt-cache show` about one version of a package.
pub(super) struct Shown(pub(super) String);

impl Shown {
    /// Returns the value of a field.
    pub(super) fn field(&self, name: &str) -> Option<&str> {
        let mut lines = self.0.lines();
        lines.find_map(|line| Some(line.strip_prefix(name)?.strip_prefix(':')?.trim()))
    }
}

/// Creates a command for a tool of apt or dpkg.
pub(super) fn apt_command(name: &str) -> Result<Command, Failure> {
    let mut command =
        supervise::command(OsStr::new(name), AtEnd::Terminate).map_err(|failure| {
            failure.help("this requires Debian; on other systems, use files in the description")
        })?;
    command.env("LC_ALL", "C").stdin(Stdio::null());
    Ok(command)
}

/// Runs a tool of apt or dpkg for `what`.
pub(super) fn run(
    name: &str,
    what: &str,
    arguments: impl FnOnce(&mut Command) -> &mut Command,
) -> Result<Output, Failure> {
    let mut command = apt_command(name)?;
    let output = arguments(&mut command).output().start_error(name)?;
    if output.status.success() {
        return Ok(output);
    }
    let stderr = String::from_utf8_lossy(&output.stderr);
    let reasons: Vec<&str> = stderr.lines().filter(|line| line.starts_with("E:")).collect();
    let reason = if reasons.is_empty() { stderr.trim().to_owned() } else { reasons.join(" ") };
    Err(Failure::new(failure::UNAVAILABLE, format!("{name} cannot get {what}: {reason}")).help(
        "check the network and run `apt-get update`, or use a file in the description instead of \
         \"debian\" or \"busybox\"",
    ))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::MetadataExt as _;

    #[test]
    fn a_reader_never_finds_an_empty_list_of_sources() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("sources.list");
        let inode = || fs::metadata(&path).expect("a file").ino();
        fs::write(&path, "deb of an earlier version\n").expect("written");
        let reader = fs::File::open(&path).expect("a file");
        write_source(&path).expect("written");
        assert_eq!(std::io::read_to_string(reader).expect("text"), "deb of an earlier version\n");
        let first = inode();
        write_source(&path).expect("written");
        assert_eq!((inode(), fs::read_to_string(&path).expect("text")), (first, SOURCE.to_owned()));
    }
}
