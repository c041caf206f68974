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
use std::time::Duration;
use tempfile::NamedTempFile;

/// Sources of packages for another architecture: those of the host's in a new installation.
const SOURCE: &str = "\
deb http://deb.debian.org/debian bookworm main
deb http://deb.debian.org/debian bookworm-updates main
deb http://deb.debian.org/debian-security bookworm-security main
";
/// File whose modification is the last update of a foreign architecture's lists, and whose contents
/// are the sources of it.
const STAMP: &str = "updated";
/// Age at which these lists are updated: a mirror has no packages that have been replaced.
const MAX_AGE: Duration = Duration::from_secs(24 * 60 * 60);

/// Apt for an architecture.
#[derive(Clone, Debug)]
pub(super) struct Apt {
    /// Settings for each command.
    options: Vec<String>,
    architecture: GuestArchitecture,
    /// Lists of packages that are not the host's.
    lists: Option<Lists>,
}

/// Lists of packages of a foreign architecture.
#[derive(Clone, Debug)]
struct Lists {
    /// Folder with the lists, the packages, and the settings.
    folder: PathBuf,
    /// This process has updated them.
    is_updated: bool,
}

impl Lists {
    fn path(&self) -> PathBuf {
        self.folder.join("lists")
    }

    /// Returns whether lists of packages have been fetched.
    fn exist(&self) -> Result<bool, Failure> {
        let path = self.path();
        let entries = fs::read_dir(&path).file_error("read", &path)?;
        let mut names = entries.flatten().map(|entry| entry.file_name());
        Ok(names.any(|name| name.to_string_lossy().contains("_Packages")))
    }

    /// Returns whether the lists are those of all sources, and not too old.
    fn are_current(&self) -> Result<bool, Failure> {
        let stamp = self.folder.join(STAMP);
        let modified = fs::metadata(&stamp).and_then(|found| found.modified());
        let age = modified.ok().and_then(|time| time.elapsed().ok());
        let is_young = age.is_some_and(|age| age < MAX_AGE);
        let is_same = fs::read(&stamp).is_ok_and(|bytes| bytes == SOURCE.as_bytes());
        Ok(is_young && is_same && self.exist()?)
    }

    /// Waits for other processes that update the lists, which apt would refuse.
    fn lock(&self, step: &Step) -> Result<Lock, Failure> {
        Lock::wait_within(&self.folder.join("lock"), step)
    }
}

impl Apt {
    /// Calls `act` with apt for packages of this architecture. If it fails with older lists of a
    /// foreign one, updates them and calls it again: it may name a package that was replaced.
    pub(super) fn with<T>(
        architecture: GuestArchitecture,
        step: &Step,
        act: impl Fn(&Self) -> Result<T, Failure>,
    ) -> Result<T, Failure> {
        step.now("querying apt");
        let mut apt = Self::new(architecture, step)?;
        act(&apt).or_else(|failure| match &apt.lists {
            Some(lists) if !lists.is_updated && failure.code() == failure::UNAVAILABLE => {
                let _lock = lists.lock(step)?;
                apt.update(step)?;
                act(&apt)
            }
            _ => Err(failure),
        })
    }

    /// Returns apt for packages of this architecture; updates the lists of packages of a foreign
    /// one if there are none or they are old.
    pub(super) fn new(architecture: GuestArchitecture, step: &Step) -> Result<Self, Failure> {
        if architecture == GuestArchitecture::X86 {
            return Ok(Self { options: Vec::new(), architecture, lists: None });
        }
        let folder = cache::folder()?.join(format!("apt-{}", architecture.debian()));
        let archives = folder.join("cache");
        let lists = Lists { folder: folder.clone(), is_updated: false };
        let (partial, source) = ("partial", folder.join("sources.list"));
        for path in [lists.path().join(partial), archives.join("archives").join(partial)] {
            fs::create_dir_all(&path).file_error("create the folder", &path)?;
        }
        write_source(&source)?;
        let name = architecture.debian();
        let shown = |path: &Path| path.display().to_string();
        let settings = [
            ("APT::Architecture", name.to_owned()),
            ("APT::Architectures", name.to_owned()),
            ("Dir::State::Lists", shown(&lists.path())),
            ("Dir::Cache", shown(&archives)),
            ("Dir::Etc::SourceParts", "/dev/null".to_owned()),
            ("Dir::Etc::SourceList", shown(&source)),
        ];
        let words = settings.map(|(name, value)| ["-o".to_owned(), format!("{name}={value}")]);
        let mut apt = Self { options: words.concat(), architecture, lists: Some(lists.clone()) };
        if !lists.are_current()? {
            let _lock = lists.lock(step)?;
            if !lists.are_current()? {
                apt.update(step)?;
            }
        }
        Ok(apt)
    }

    /// Returns the remedy for packages that cannot be fetched.
    pub(super) fn help(&self) -> &'static str {
        match self.lists {
            None => {
                "check the network and run `apt-get update`, or use a file in the description \
                 instead of \"debian\" or \"busybox\""
            }
            Some(_) => {
                "check the network, then run the same command again, or use a file in the \
                 description instead of \"debian\" or \"busybox\""
            }
        }
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

    /// Updates the lists of packages of a foreign architecture, which the caller has locked. Those
    /// of a source that cannot be reached stay as they are.
    fn update(&mut self, step: &Step) -> Result<(), Failure> {
        step.now("fetching the lists of packages");
        let what = "the lists of packages";
        let updated = self.run("apt-get", what, |command| command.arg("update"));
        let Some(lists) = &mut self.lists else { return updated.map(drop) };
        match updated {
            Err(failure) if lists.exist()? => step.warn(&failure.message()),
            updated => drop(updated?),
        }
        lists.is_updated = true;
        // After a failure, too: without a network each build would wait for it.
        let stamp = lists.folder.join(STAMP);
        fs::write(&stamp, SOURCE).file_error("write", &stamp)
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
            .map_err(|failure| failure.help(self.help()))
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
    Err(Failure::new(failure::UNAVAILABLE, format!("{name} cannot get {what}: {reason}")))
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
