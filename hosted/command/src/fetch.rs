//! Downloads Debian packages with apt, which verifies them, and caches the used files.
//!
//! The cache has a folder per package version. Folders appear complete or not at all, so an
//! interrupted download leaves nothing that would be used later.

mod apt;

use crate::architecture::GuestArchitecture;
use crate::cache;
use crate::failure::{self, Failure, IoContext};
use crate::interrupt::Interruptible;
use crate::scratch::{self, ScratchFolder};
use crate::steps::Step;
use crate::{output_folder, store};
use apt::{Apt, apt_command, run};
use hw_tables::elf::{Elf, Machine};
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::process::Stdio;

const BUSYBOX_PACKAGE: &str = "busybox-static";
const INSTALLED_BUSYBOX: &str = "/bin/busybox";
/// Drivers for guest devices in load order: panic device, virtio, power button. Debian's kernel has
/// them as modules; [`is_for`] selects those of an architecture.
const MODULES: [&str; 17] = [
    "pvpanic.ko",
    "pvpanic-mmio.ko",
    "virtio_ring.ko",
    "virtio.ko",
    "virtio_pci_legacy_dev.ko",
    "virtio_pci_modern_dev.ko",
    "virtio_pci.ko",
    "virtio_mmio.ko",
    "virtio_input.ko",
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
/// Name prefix of the folders of running downloads.
const WORK: &str = ".fetch-";
/// Changes with the set of files that are kept of a package.
const KEPT: u32 = 7;

/// Returns whether guests of an architecture may have a device for this module: virtio is on PCI
/// with x86, and on PCI or MMIO with AArch64; there it stands for the power button, too.
fn is_for(architecture: GuestArchitecture, module: &str) -> bool {
    let is_arm = architecture != GuestArchitecture::X86;
    match module {
        "virtio_mmio.ko" | "virtio_input.ko" => is_arm,
        "button.ko" => !is_arm,
        name => !is_arm || !name.starts_with("pvpanic"),
    }
}

/// Files from a package.
pub struct Fetched {
    /// Folder in the cache.
    pub folder: PathBuf,
    /// Package and version, for messages.
    pub title: String,
    /// GuestArchitecture of the package.
    pub architecture: GuestArchitecture,
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
    let host_apt = Apt::new(GuestArchitecture::X86, step)?;
    let newest = |name: &str| Ok(Package::newest(&host_apt, name)?.version);
    Apt::with(kernel.architecture, step, |apt| {
        let shown = apt.show(&headers)?;
        let depends = shown.field("Depends").unwrap_or_default();
        let [own, common, tools] = header_packages((&headers, version), depends, newest)?;
        for (apt, package) in [(apt, &own), (apt, &common), (&host_apt, &tools)] {
            let (name, title) = (&package.name, package.title());
            step.now(format!("fetching {title}"));
            let archive = download_package(apt, package, &to.join("download").join(name))?;
            step.now(format!("unpacking {title}"));
            run("dpkg-deb", name, |command| command.arg("--extract").arg(archive).arg(to))
                .map_err(|failure| failure.help("check that the disk is not full"))?;
        }
        Ok(Headers { headers: headers.clone(), common: common.name })
    })
}

/// Returns the packages of a kernel's headers, of those common to all flavours, and of the programs
/// that build modules. `headers`: name and version of the first; `depends`: what it depends on.
/// The programs run here, and are the `newest`: when Debian has updated the kernel's source, it has
/// no others, while the kernel itself is not signed yet.
fn header_packages(
    headers: (&str, &str),
    depends: &str,
    newest: impl FnOnce(&str) -> Result<String, Failure>,
) -> Result<[Package; 3], Failure> {
    // `linux-headers-6.1.0-56-common (= 6.1.192-2), linux-kbuild-6.1 (>= 6.1.192-2), ...`
    let find = |prefix: &str| {
        let mut names = depends.split(',').filter_map(|depend| depend.split_whitespace().next());
        names.find(|name| name.starts_with(prefix)).ok_or_else(|| {
            let message = format!("package {} has no dependency {prefix}", headers.0);
            Failure::new(failure::UNAVAILABLE, message)
        })
    };
    let (common, tools) = (find("linux-headers-")?, find("linux-kbuild-")?);
    let newest = newest(tools)?;
    let all = [headers, (common, headers.1), (tools, &newest)];
    Ok(all.map(|(name, version)| Package { name: name.to_owned(), version: version.to_owned() }))
}

/// Returns Debian's current kernel for guests: the cloud kernel, or `armmp` for AArch32.
pub fn debian_kernel(
    architecture: GuestArchitecture,
    step: &Step,
    interruptible: &Interruptible,
) -> Result<Fetched, Failure> {
    let name = architecture.kernel_package();
    let pick = |name: &Path| match name.file_name()?.to_str()? {
        file if name.starts_with("boot") && file.starts_with("vmlinuz-") => Some("vmlinuz"),
        file => MODULES.into_iter().find(|name| *name == file && is_for(architecture, name)),
    };
    Apt::with(architecture, step, |apt| {
        let meta = apt.show(name)?;
        let image = meta.field("Depends").and_then(|depends| {
            let mut packages = depends.split([',', '|']).map(str::trim);
            packages.find(|package| package.starts_with("linux-image-"))
        });
        let package = image.and_then(Package::exact).ok_or_else(|| {
            let text = format!("package {name} has no kernel dependency");
            Failure::new(failure::UNAVAILABLE, text).help(apt.help())
        })?;
        fetch((apt, &package), step, interruptible, pick, "vmlinuz")
    })
}

/// Returns Debian's archive of the Linux source.
pub fn linux_source(step: &Step, interruptible: &Interruptible) -> Result<PathBuf, Failure> {
    let pick = |name: &Path| (name.file_name()? == SOURCE).then_some(SOURCE);
    let fetched = Apt::with(GuestArchitecture::X86, step, |apt| {
        fetch((apt, &Package::newest(apt, SOURCE_PACKAGE)?), step, interruptible, pick, SOURCE)
    })?;
    Ok(fetched.folder.join(SOURCE))
}

/// Returns a static busybox: the installed one, else the one from its package.
pub fn busybox(
    architecture: GuestArchitecture,
    step: &Step,
    interruptible: &Interruptible,
) -> Result<(PathBuf, String), Failure> {
    let installed = Path::new(INSTALLED_BUSYBOX);
    if architecture == GuestArchitecture::X86
        && fs::read(installed).is_ok_and(|bytes| is_static_program(&bytes))
    {
        return Ok((installed.to_owned(), format!("installed {INSTALLED_BUSYBOX}")));
    }
    // Not the settings of the same name for initramfs-tools.
    let is_program = |name: &Path| name.ends_with("bin/busybox");
    let pick = |name: &Path| is_program(name).then_some("busybox");
    let fetched = Apt::with(architecture, step, |apt| {
        fetch((apt, &Package::newest(apt, BUSYBOX_PACKAGE)?), step, interruptible, pick, "busybox")
    })?;
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

    /// Returns the version of a package that apt prefers.
    fn newest(apt: &Apt, name: &str) -> Result<Self, Failure> {
        let version = apt.show(name)?.field("Version").unwrap_or_default().to_owned();
        Ok(Self { name: name.to_owned(), version })
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
fn download_package(apt: &Apt, package: &Package, folder: &Path) -> Result<PathBuf, Failure> {
    let target = format!("{}={}", package.name, package.version);
    apt.download(&package.title(), &target, folder)
}

/// Fetches a package. `pick` selects the files to keep; `must` has to be among them.
fn fetch(
    (apt, package): (&Apt, &Package),
    step: &Step,
    interruptible: &Interruptible,
    pick: impl Fn(&Path) -> Option<&'static str>,
    must: &str,
) -> Result<Fetched, Failure> {
    let cache = cache::folder()?;
    let folder = cache.join(format!("{}{}.{KEPT}", package.file_name(), apt.suffix()));
    let title = package.title();
    let fetched = |how: &str| Fetched {
        folder: folder.clone(),
        title: format!("{title}, {how}"),
        architecture: apt.architecture(),
        package: package.clone(),
    };
    if store::is_whole(&folder, must) {
        return Ok(fetched("cached"));
    }

    let create = |path: &Path| fs::create_dir_all(path).file_error("create the folder", path);
    scratch::remove_abandoned(&cache, WORK);
    let work =
        ScratchFolder::new_in(&cache, WORK).map_err(|error| cache::failed(&cache, &error))?;
    interruptible.remove_on_signal(work.path());
    step.now(format!("fetching {title}"));
    let archive = download_package(apt, package, &work.path().join("download"))?;

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
    store::exclude_writers(&kept).file_error("change", &kept)?;
    output_folder::sync(&kept).file_error("write", &kept)?;
    let put = || store::put_whole(&kept, &folder, must);
    interruptible.uninterrupted(put).file_error("create", &folder)?;
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

#[cfg(test)]
mod tests {
    use super::apt::Shown;
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
    fn programs_of_an_unsigned_update_fit_the_signed_kernel() {
        let depends =
            "linux-headers-6.1.0-56-common (= 6.1.192-2), linux-kbuild-6.1 (>= 6.1.192-2)";
        let headers = ("linux-headers-6.1.0-56-cloud-amd64", "6.1.192-2");
        let newest = |name: &str| {
            assert_eq!(name, "linux-kbuild-6.1");
            Ok("6.1.192-3".to_owned())
        };
        let titles = header_packages(headers, depends, newest).unwrap().map(|it| it.title());
        assert_eq!(
            titles,
            [
                "linux-headers-6.1.0-56-cloud-amd64 6.1.192-2",
                "linux-headers-6.1.0-56-common 6.1.192-2",
                "linux-kbuild-6.1 6.1.192-3",
            ]
        );
        let none = header_packages(headers, "linux-compiler-gcc-12-x86", |_| Ok(String::new()));
        assert!(none.is_err());
    }

    #[test]
    fn modules_are_those_of_the_board() {
        let of = |architecture| {
            MODULES.into_iter().filter(|name| is_for(architecture, name)).collect::<Vec<_>>()
        };
        let (x86, arm64) = (of(GuestArchitecture::X86), of(GuestArchitecture::Arm64));
        assert!(x86.contains(&"virtio_pci.ko") && !x86.contains(&"virtio_mmio.ko"));
        assert!(["virtio_mmio.ko", "virtio_pci.ko"].iter().all(|name| arm64.contains(name)));
        assert!(!arm64.contains(&"button.ko"));
        assert_eq!(arm64, of(GuestArchitecture::Arm32));
        assert!([x86, arm64].iter().all(|names| names.contains(&"virtio_blk.ko")));
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
