//! Debian 12 in folders of this host, for tools that use Parador: a fresh one without a compiler,
//! and one with Debian's tools and a mirror of their packages. Both are made once, with apt's
//! mirror and PyPI, in `target/tools`; tests and benchmarks work on copies, without these.

pub mod shows;

use crate::system::{target, workspace};
use anyhow::{Context, Result, bail, ensure};
use rustix::process::geteuid;
use std::fs;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::{Mutex, MutexGuard, PoisonError};
use tempfile::TempDir;

/// Debian's release.
pub const SUITE: &str = "bookworm";
/// Name of the fresh Debian's folder.
const FRESH: &str = "debian-bookworm";
/// Version of its Python.
const PYTHON: &str = "3.11";
/// Mirror where apt names none.
const MIRROR: &str = "http://deb.debian.org/debian";
/// Script that adds the tools to a fresh Debian.
const PREPARE: &str = include_str!("../tools/prepare.sh");
/// Script that makes a host with systemd and podman of a fresh Debian.
const SYSTEMD: &str = include_str!("../tools/systemd.sh");
/// Script that builds Kubernetes.
const KUBERNETES: &str = include_str!("../tools/kubernetes.sh");
/// Mounts of a folder that becomes the root directory, `$0`, in a mount name space of its own. It
/// is no chroot: there, Linux refuses the user name spaces of passt.
const ENTER: &str = "mount --rbind \"$0\" \"$0\" && mount --rbind /dev \"$0/dev\" && \
    mount --rbind /sys \"$0/sys\" && mount -t proc proc \"$0/proc\" && \
    mount --bind /etc/resolv.conf \"$0/etc/resolv.conf\" && \
    cd \"$0\" && pivot_root . . && umount -l . && cd / && \
    script=\"$1\" && shift && exec /bin/sh -ec \"$script\" sh \"$@\"";

/// Held while a Debian is made.
static MAKING: Mutex<()> = Mutex::new(());

/// A Debian of its own in a folder. Dropping it removes the folder.
#[derive(Debug)]
pub struct Debian {
    folder: TempDir,
}

impl Debian {
    /// Copies a fresh Debian without a compiler.
    ///
    /// # Errors
    /// The caller is not root; debootstrap fails.
    pub fn fresh() -> Result<Self> {
        let _held = lock();
        Self::copy(&made(FRESH, bootstrap)?)
    }

    /// Copies a Debian with debos, fakemachine, debvm, lintian, virtme-ng (in `/opt/vng/bin`),
    /// bpftrace, perf, and a mirror (`/srv/mirror`).
    ///
    /// # Errors
    /// The caller is not root; a package cannot be fetched or installed.
    pub fn with_tools() -> Result<Self> {
        let _held = lock();
        Self::copy(&made(&name_for("debian-tools", PREPARE)?, |folder| {
            let fresh = made(FRESH, bootstrap)?;
            copy_tree(&fresh, folder)?;
            fetch_wheels(&folder.join("srv/wheels"))?;
            output(shell(folder, PREPARE).arg(mirror()?)).map(drop)
        })?)
    }

    /// Copies a Debian that boots, with systemd, podman and a kernel. It executes `/srv/test.sh`,
    /// whose output goes to the serial line, and ends.
    ///
    /// # Errors
    /// The caller is not root; a package cannot be fetched or installed.
    pub fn with_systemd() -> Result<Self> {
        let _held = lock();
        Self::copy(&made(&name_for("debian-systemd", SYSTEMD)?, |folder| {
            let fresh = made(FRESH, bootstrap)?;
            copy_tree(&fresh, folder)?;
            output(&mut shell(folder, SYSTEMD)).map(drop)
        })?)
    }

    fn copy(original: &Path) -> Result<Self> {
        let folder = TempDir::with_prefix_in("copy-", work()).context("cannot make a folder")?;
        let copy = Self { folder };
        copy_tree(original, copy.root())?;
        Ok(copy)
    }

    /// Returns the folder.
    pub fn root(&self) -> &Path {
        self.folder.path()
    }

    /// Creates a command for a shell in the folder, which ends at the first error; with `/proc`,
    /// and this host's `/dev`, `/sys` and network. Its mounts and all its processes end with it.
    pub fn shell(&self, script: &str) -> Command {
        shell(self.root(), script)
    }

    /// Copies a package to `/root` and returns its path there.
    ///
    /// # Errors
    /// It cannot be copied.
    pub fn add(&self, package: &Path) -> Result<String> {
        let name = package.file_name().context("a package without a name")?;
        fs::copy(package, self.root().join("root").join(name))
            .context("cannot copy the package")?;
        Ok(format!("/root/{}", name.to_string_lossy()))
    }

    /// Installs a package whose dependencies are installed.
    ///
    /// # Errors
    /// dpkg fails.
    pub fn install(&self, package: &Path) -> Result<()> {
        let path = self.add(package)?;
        output(&mut self.shell(&format!("dpkg --install {path} >&2"))).map(drop)
    }
}

fn shell(root: &Path, script: &str) -> Command {
    let mut command = Command::new("setpriv");
    command.args(["--pdeathsig", "KILL", "unshare", "--mount", "--pid", "--fork", "--kill-child"]);
    command.args(["/bin/sh", "-ec", ENTER]).arg(root).arg(script).env_clear();
    command.env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin").env("HOME", "/root");
    command.env("DEBIAN_FRONTEND", "noninteractive").env("LC_ALL", "C");
    command
}

/// Folder of these Debians.
fn work() -> PathBuf {
    target().join("tools")
}

/// Keeps other threads from making a Debian. A panic leaves no half of one.
fn lock() -> MutexGuard<'static, ()> {
    MAKING.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Returns the name of the folder that a script makes, and removes those that earlier ones have
/// made.
fn name_for(prefix: &str, script: &str) -> Result<String> {
    let mut hasher = DefaultHasher::new();
    script.hash(&mut hasher);
    let name = format!("{prefix}-{:016x}", hasher.finish());
    for entry in fs::read_dir(work()).into_iter().flatten() {
        let entry = entry.context("cannot read the folder of tools")?;
        let found = entry.file_name().to_string_lossy().into_owned();
        if found.starts_with(prefix) && found != name {
            fs::remove_dir_all(entry.path()).with_context(|| found)?;
        }
    }
    Ok(name)
}

/// Returns the folder with this name, which `make` makes if there is none. It appears complete or
/// not at all.
fn made(name: &str, make: impl FnOnce(&Path) -> Result<()>) -> Result<PathBuf> {
    ensure!(geteuid().is_root(), "folders of tools need root: run this with sudo");
    let folder = work().join(name);
    if !folder.is_dir() {
        fs::create_dir_all(work()).context("cannot make a folder")?;
        let partial =
            TempDir::with_prefix_in("partial-", work()).context("cannot make a folder")?;
        let inner = partial.path().join("made");
        make(&inner)?;
        fs::rename(&inner, &folder).with_context(|| format!("cannot move {}", inner.display()))?;
    }
    Ok(folder)
}

fn bootstrap(folder: &Path) -> Result<()> {
    let mirror = mirror()?;
    println!("making a Debian from {mirror}");
    let mut debootstrap = Command::new("debootstrap");
    debootstrap.args(["--variant=minbase", SUITE]).arg(folder).arg(&mirror);
    output(&mut debootstrap)?;
    output(Command::new("chroot").arg(folder).args(["apt-get", "clean"])).map(drop)
}

/// Fetches virtme-ng and what it needs from PyPI, with the certificates and proxies of this host.
fn fetch_wheels(folder: &Path) -> Result<()> {
    let mut pip = Command::new("python3");
    pip.args(["-m", "pip", "download", "-q", "--python-version", PYTHON]);
    pip.args(["--only-binary=:all:", "virtme-ng", "setuptools", "--dest"]).arg(folder);
    output(&mut pip).map(drop)
}

/// Returns the mirror of Debian's release from the configuration of apt.
fn mirror() -> Result<String> {
    let format = "$(ORIGIN) $(CODENAME) $(REPO_URI)";
    let targets = output(Command::new("apt-get").args(["indextargets", "--format", format]))?;
    let wanted = format!("Debian {SUITE} ");
    let found = targets.lines().find_map(|line| line.strip_prefix(&wanted));
    Ok(found.unwrap_or(MIRROR).trim_end_matches('/').to_owned())
}

fn copy_tree(from: &Path, to: &Path) -> Result<()> {
    let mut copy = Command::new("cp");
    output(copy.args(["--archive", "--no-target-directory"]).arg(from).arg(to)).map(drop)
}

/// Returns a folder with kube-apiserver, kubelet, kubectl and etcd, which is made once, from
/// modules of the Go proxy.
///
/// # Errors
/// The caller is not root; a module cannot be fetched or built.
pub fn kubernetes() -> Result<PathBuf> {
    let _held = lock();
    let folder = made(&name_for("kubernetes", KUBERNETES)?, |folder| {
        println!("building Kubernetes, which takes half an hour");
        let mut build = Command::new("sh");
        output(build.args(["-c", KUBERNETES, "sh"]).arg(folder)).map(drop)
    })?;
    Ok(folder.join("bin"))
}

/// Returns the newest package of `cargo xtask package`.
///
/// # Errors
/// There is none.
pub fn package() -> Result<PathBuf> {
    let found = fs::read_dir(target()).context("cannot list the folder of build products")?;
    let mut packages: Vec<_> = found
        .flatten()
        .map(|entry| entry.path())
        .filter(|path| {
            let name = path.file_name().unwrap_or_default().to_string_lossy();
            name.starts_with("parador_") && name.ends_with("_amd64.deb")
        })
        .collect();
    packages.sort_by_key(|path| fs::metadata(path).and_then(|file| file.modified()).ok());
    packages.pop().context("no package: run `cargo xtask package`")
}

/// Runs a command without input to its end and returns its standard output.
///
/// # Errors
/// It fails; with its messages.
pub fn output(command: &mut Command) -> Result<String> {
    let output = command.current_dir(workspace()).stdin(Stdio::null()).output();
    let output = output.with_context(|| format!("cannot start {command:?}"))?;
    let [text, errors] =
        [output.stdout, output.stderr].map(|bytes| String::from_utf8_lossy(&bytes).into_owned());
    if !output.status.success() {
        bail!("{command:?}: {}\n{text}{errors}", output.status);
    }
    Ok(text)
}
