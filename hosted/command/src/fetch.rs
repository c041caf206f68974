//! Downloads Debian packages with apt, which verifies them, and caches the used files.
//!
//! The cache has a folder per package version. Folders appear complete or not at all, so an
//! interrupted download leaves nothing that would be used later.

use crate::cache;
use crate::failure::{self, Failure, IoContext};
use crate::interrupt::Interruptible;
use crate::steps::Step;
use crate::supervise::{self, AtEnd};
use hw_tables::elf::{Elf, Machine};
use std::ffi::OsStr;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use tempfile::TempDir;

/// Metapackage that depends on the current cloud kernel.
const KERNEL_PACKAGE: &str = "linux-image-cloud-amd64";
const BUSYBOX_PACKAGE: &str = "busybox-static";
const INSTALLED_BUSYBOX: &str = "/bin/busybox";
/// Drivers for guest devices in load order: panic device, virtio, power button. Debian's kernel has
/// them as modules.
const MODULES: [&str; 15] = [
    "pvpanic.ko",
    "pvpanic-mmio.ko",
    "virtio_ring.ko",
    "virtio.ko",
    "virtio_pci_legacy_dev.ko",
    "virtio_pci_modern_dev.ko",
    "virtio_pci.ko",
    "virtio-rng.ko",
    "virtio_console.ko",
    "virtio_blk.ko",
    "failover.ko",
    "net_failover.ko",
    "virtio_net.ko",
    "button.ko",
    "evdev.ko",
];
/// Linux source for `hosted/kbuild`, and the file in the package.
const SOURCE_PACKAGE: &str = "linux-source-6.1";
const SOURCE: &str = "linux-source-6.1.tar.xz";
/// Changes with the set of files that are kept of a package.
const KEPT: u32 = 4;

/// Files from a package.
pub struct Fetched {
    /// Folder in the cache.
    pub folder: PathBuf,
    /// Package and version, for messages.
    pub title: String,
    package: Package,
}

impl Fetched {
    /// Returns the path of the kernel image.
    pub fn kernel(&self) -> PathBuf {
        self.folder.join("vmlinuz")
    }

    /// Returns the kernel modules in load order.
    pub fn modules(&self) -> Vec<PathBuf> {
        let modules = MODULES.iter().map(|name| self.folder.join(name));
        modules.filter(|path| path.is_file()).collect()
    }

    /// Returns name and version of the package, suitable for a file name.
    pub fn version(&self) -> String {
        self.package.file_name()
    }
}

/// Folders below `usr/src` of unpacked header packages.
pub struct Headers {
    /// Headers of the kernel's flavour.
    pub headers: String,
    /// Headers common to all flavours, with the top Makefile.
    pub common: String,
}

/// Unpacks the headers of a kernel into the folder `to`.
pub fn kernel_headers(kernel: &Fetched, to: &Path, step: &Step) -> Result<Headers, Failure> {
    let Package { name, version } = &kernel.package;
    let headers = name.replacen("linux-image-", "linux-headers-", 1);
    let shown = apt_show(&headers)?;
    let depends = shown.field("Depends").unwrap_or_default();
    // `linux-headers-6.1.0-56-common (= 6.1.192-2), linux-kbuild-6.1 (>= 6.1.192-2), ...`
    let find = |prefix: &str| {
        let mut names = depends.split(',').filter_map(|depend| depend.split_whitespace().next());
        names.find(|name| name.starts_with(prefix)).map(str::to_owned).ok_or_else(|| {
            Failure::new(
                failure::UNAVAILABLE,
                format!("package {headers} has no dependency {prefix}"),
            )
        })
    };
    let (common, tools) = (find("linux-headers-")?, find("linux-kbuild-")?);
    for name in [&headers, &common, &tools] {
        let package = Package { name: name.clone(), version: version.clone() };
        step.now(format!("fetching {name} {version}"));
        let download = to.join("download").join(name);
        let archive = download_package(&package, &download)?;
        step.now(format!("unpacking {name} {version}"));
        run("dpkg-deb", name, |command| command.arg("--extract").arg(archive).arg(to))?;
    }
    Ok(Headers { headers, common })
}

/// Returns Debian's current cloud kernel.
pub fn debian_kernel(step: &Step, interruptible: &Interruptible) -> Result<Fetched, Failure> {
    step.now("querying apt");
    let meta = apt_show(KERNEL_PACKAGE)?;
    let image = meta.field("Depends").and_then(|depends| {
        let mut packages = depends.split([',', '|']).map(str::trim);
        packages.find(|package| package.starts_with("linux-image-"))
    });
    let package = image.and_then(Package::exact).ok_or_else(|| {
        Failure::new(
            failure::UNAVAILABLE,
            format!("package {KERNEL_PACKAGE} has no kernel dependency"),
        )
        .help("run `apt-get update`, or use a file as `kernel`")
    })?;
    let pick = |name: &Path| match name.file_name()?.to_str()? {
        file if name.starts_with("boot") && file.starts_with("vmlinuz-") => Some("vmlinuz"),
        file => MODULES.into_iter().find(|module| *module == file),
    };
    fetch(&package, step, interruptible, pick, "vmlinuz")
}

/// Returns Debian's archive of the Linux source.
pub fn linux_source(step: &Step, interruptible: &Interruptible) -> Result<PathBuf, Failure> {
    step.now("querying apt");
    let version = apt_show(SOURCE_PACKAGE)?.field("Version").unwrap_or_default().to_owned();
    let package = Package { name: SOURCE_PACKAGE.to_owned(), version };
    let pick = |name: &Path| (name.file_name()? == SOURCE).then_some(SOURCE);
    let fetched = fetch(&package, step, interruptible, pick, SOURCE)?;
    Ok(fetched.folder.join(SOURCE))
}

/// Returns a static busybox: the installed one, else the one from its package.
pub fn busybox(step: &Step, interruptible: &Interruptible) -> Result<(PathBuf, String), Failure> {
    let installed = Path::new(INSTALLED_BUSYBOX);
    if fs::read(installed).is_ok_and(|bytes| is_static_program(&bytes)) {
        return Ok((installed.to_owned(), format!("installed {INSTALLED_BUSYBOX}")));
    }
    let pick = |name: &Path| (name.file_name()? == "busybox").then_some("busybox");
    let version = apt_show(BUSYBOX_PACKAGE)?.field("Version").unwrap_or_default().to_owned();
    let package = Package { name: BUSYBOX_PACKAGE.to_owned(), version };
    let fetched = fetch(&package, step, interruptible, pick, "busybox")?;
    Ok((fetched.folder.join("busybox"), fetched.title))
}

/// Returns whether this is a static x86-64 Linux program.
pub fn is_static_program(bytes: &[u8]) -> bool {
    Elf::parse(bytes).is_ok_and(|elf| elf.machine() == Machine::X86_64 && !elf.has_interpreter())
}

/// A version of a package.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Package {
    name: String,
    version: String,
}

impl Package {
    /// Parses a dependency on an exact version: `linux-image-6.1.0-56-cloud-amd64 (= 6.1.192-2)`.
    fn exact(dependency: &str) -> Option<Self> {
        let (name, version) = dependency.split_once(" (= ")?;
        let version = version.strip_suffix(')')?;
        Some(Self { name: name.trim().to_owned(), version: version.trim().to_owned() })
    }

    fn file_name(&self) -> String {
        let safe = |c: char| if c.is_ascii_alphanumeric() || "+-.~".contains(c) { c } else { '_' };
        format!("{}_{}", self.name, self.version.chars().map(safe).collect::<String>())
    }

    fn title(&self) -> String {
        format!("{} {}", self.name, self.version)
    }
}

/// Downloads a package into a new folder and returns the path of its archive.
fn download_package(package: &Package, folder: &Path) -> Result<PathBuf, Failure> {
    fs::create_dir_all(folder).file_error("create the folder", folder)?;
    let (title, target) = (package.title(), format!("{}={}", package.name, package.version));
    run("apt-get", &title, |command| command.args(["download", &target]).current_dir(folder))?;
    let first = fs::read_dir(folder)
        .and_then(|mut entries| entries.next().transpose())
        .file_error("read", folder)?;
    first.map(|entry| entry.path()).ok_or_else(|| {
        Failure::new(failure::UNAVAILABLE, format!("apt-get downloaded no file for {title}"))
    })
}

/// Fetches a package. `pick` selects the files to keep; `must` has to be among them.
fn fetch(
    package: &Package,
    step: &Step,
    interruptible: &Interruptible,
    pick: impl Fn(&Path) -> Option<&'static str>,
    must: &str,
) -> Result<Fetched, Failure> {
    let cache = cache::folder()?;
    let folder = cache.join(format!("{}.{KEPT}", package.file_name()));
    let title = package.title();
    let fetched = |how: &str| Fetched {
        folder: folder.clone(),
        title: format!("{title}, {how}"),
        package: package.clone(),
    };
    if folder.join(must).is_file() {
        return Ok(fetched("cached"));
    }

    let create = |path: &Path| fs::create_dir_all(path).file_error("create the folder", path);
    let work = TempDir::with_prefix_in(".fetch-", &cache)
        .map_err(|error| cache::failed(&cache, &error))?;
    interruptible.remove_on_signal(work.path());
    step.now(format!("fetching {title}"));
    let archive = download_package(package, &work.path().join("download"))?;

    step.now(format!("unpacking {title}"));
    let kept = work.path().join("kept");
    create(&kept)?;
    unpack(&archive, &kept, pick)?;
    if !kept.join(must).is_file() {
        return Err(Failure::new(
            failure::UNAVAILABLE,
            format!("{title} does not contain `{must}`"),
        )
        .help("use a file instead"));
    }
    match fs::rename(&kept, &folder) {
        // Another process has finished first.
        Err(_) if folder.join(must).is_file() => {}
        Err(error) => return Err(Failure::file("create", &folder, &error)),
        Ok(()) => {}
    }
    Ok(fetched("fetched"))
}

fn unpack(
    archive: &Path,
    to: &Path,
    pick: impl Fn(&Path) -> Option<&'static str>,
) -> Result<(), Failure> {
    let mut child = apt_command("dpkg-deb")?
        .arg("--fsys-tarfile")
        .arg(archive)
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .start_error("dpkg-deb")?;
    let broken = |error: io::Error| {
        Failure::new(
            failure::code_of(&error),
            format!("cannot unpack {}: {}", archive.display(), failure::describe(&error)),
        )
        .help("check that the disk is not full")
    };
    if let Some(stdout) = child.stdout.take() {
        let mut tar = tar::Archive::new(stdout);
        for entry in tar.entries().map_err(broken)? {
            let mut entry = entry.map_err(broken)?;
            if !entry.header().entry_type().is_file() {
                continue;
            }
            let path = entry.path().map_err(broken)?;
            let Some(name) = pick(path.strip_prefix(".").unwrap_or(&path)) else { continue };
            let mut file = fs::File::create(to.join(name)).map_err(broken)?;
            io::copy(&mut entry, &mut file).map_err(broken)?;
        }
    }
    let status = child.wait().os_error("wait for dpkg-deb")?;
    match status.success() {
        true => Ok(()),
        false => {
            Err(Failure::new(failure::UNAVAILABLE, format!("{} is damaged", archive.display())))
        }
    }
}

/// Output of `apt-cache show` about one version of a package.
struct Shown(String);

impl Shown {
    fn field(&self, name: &str) -> Option<&str> {
        let mut lines = self.0.lines();
        lines.find_map(|line| Some(line.strip_prefix(name)?.strip_prefix(':')?.trim()))
    }
}

fn apt_show(package: &str) -> Result<Shown, Failure> {
    let show = ["show", "--no-all-versions", package];
    let output = run("apt-cache", package, |command| command.args(show))?;
    Ok(Shown(String::from_utf8_lossy(&output.stdout).into_owned()))
}

/// Creates a command for a tool of apt or dpkg.
fn apt_command(name: &str) -> Result<Command, Failure> {
    let mut command =
        supervise::command(OsStr::new(name), AtEnd::Terminate).map_err(|failure| {
            failure.help("this requires Debian; on other systems, use files in the description")
        })?;
    command.env("LC_ALL", "C").stdin(Stdio::null());
    Ok(command)
}

/// Runs a tool of apt for `what`.
fn run(
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

    #[test]
    fn fields_of_a_package() {
        let shown = Shown("Package: a\nVersion: 1:2-3\nDepends: b (= 2), c\n".into());
        assert_eq!(shown.field("Version"), Some("1:2-3"));
        assert_eq!(shown.field("Depends"), Some("b (= 2), c"));
        assert_eq!(shown.field("Dep"), None);
    }

    #[test]
    fn exact_dependencies() {
        let package = Package { name: "linux-image-6".into(), version: "6.1-2".into() };
        assert_eq!(Package::exact("linux-image-6 (= 6.1-2)"), Some(package));
        assert_eq!(Package::exact("linux-image-6 (>= 6.1-2)"), None);
        assert_eq!(Package::exact("linux-image-6"), None);
    }

    #[test]
    fn names_of_files() {
        let package = Package { name: "a".into(), version: "1:2.0+b~/..3".into() };
        assert_eq!(package.file_name(), "a_1_2.0+b~_..3");
        assert_eq!(package.title(), "a 1:2.0+b~/..3");
    }

    #[test]
    fn other_files_are_no_static_programs() {
        assert!(!is_static_program(b"#!/bin/sh\n"));
        assert!(!is_static_program(&[]));
    }
}
