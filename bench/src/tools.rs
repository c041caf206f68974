//! `cargo xtask bench tools`: the time from a package to the first output of a VM, the size of the
//! package, and the time of one command in a VM.
//!
//! The package is installed in a fresh Debian 12 without a compiler, a folder that debootstrap
//! makes once from the mirror of this host's apt. Packages that it depends on come from that
//! mirror, so `install_s` includes their download.

use crate::report::{self, Figure};
use anyhow::{Context, Result, bail, ensure};
use parador_tests::system::{target, workspace};
use serde_json::json;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Instant;

/// Runs of `parador exec / -- true`; the figure is their median.
const ROUNDS: usize = 10;
/// Debian's release.
const SUITE: &str = "bookworm";
/// Mirror where apt names none.
const MIRROR: &str = "http://deb.debian.org/debian";
/// Parts of the package, compressed: key, title, and paths below the root directory.
const PARTS: [(&str, &str, &[&str]); 5] = [
    ("package_mib_parador", "package: parador", &["usr/bin"]),
    ("package_mib_vmlinux", "package: vmlinux", &["usr/lib/parador/vmlinux"]),
    ("package_mib_modules", "package: vmlinuz, modules", &["usr/lib/modules"]),
    (
        "package_mib_guest",
        "package: wedge, agent",
        &["usr/lib/parador/parador-wedge", "usr/lib/parador/agent.cpio"],
    ),
    ("package_mib_documents", "package: documents", &["usr/share", "lib/systemd"]),
];

/// Measures, prints and stores the figures.
pub fn measure() -> Result<()> {
    ensure!(is_root()?, "a chroot needs root: run this with sudo");
    let package = package()?;
    fs::create_dir_all(work()).context("cannot make a folder for the bench")?;
    let mut figures = sizes(&package)?;
    let debian = Debian::new()?;
    figures.push(Figure::new(
        "install_s",
        "apt install to the first output of parador exec",
        debian.install(&package)?,
        "s",
    )?);
    figures.push(exec_time(&debian)?);
    report::print(&figures);
    report::write_json("bench-tools.json", &figures)?;
    report::append_line("tools.jsonl", &json!({ "figures": report::series(&figures) }))?;
    if figures.iter().any(|figure| !figure.holds()) {
        bail!("a figure misses its limit");
    }
    Ok(())
}

fn is_root() -> Result<bool> {
    Ok(output(Command::new("id").arg("-u"))?.trim() == "0")
}

/// Returns the package of this commit, which `cargo xtask bench tools` has built.
fn package() -> Result<PathBuf> {
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

/// Returns the size of the package and of its parts, each compressed alone.
fn sizes(package: &Path) -> Result<Vec<Figure>> {
    let mib = |bytes: u64| bytes as f64 / f64::from(1 << 20);
    let bytes = fs::metadata(package).with_context(|| package.display().to_string())?.len();
    let mut figures = vec![Figure::new("package_mib", "package", mib(bytes), "MiB")?];
    let root = work().join("contents");
    remove(&root)?;
    succeed(Command::new("dpkg-deb").arg("--extract").arg(package).arg(&root))?;
    for (key, title, paths) in PARTS {
        let mut tar = Command::new("sh");
        tar.args(["-c", "tar -c \"$@\" | xz -9 --threads=1 | wc -c", "sh"]).args(paths);
        let bytes = output(tar.current_dir(&root))?.trim().parse().context("no size")?;
        figures.push(Figure {
            key: key.to_owned(),
            title: title.to_owned(),
            limit: f64::INFINITY,
            value: mib(bytes),
            ..figures[0].clone()
        });
    }
    remove(&root)?;
    Ok(figures)
}

/// A fresh Debian in a folder. Dropping it removes the folder.
struct Debian {
    root: PathBuf,
}

impl Debian {
    /// Copies the Debian that debootstrap has made.
    fn new() -> Result<Self> {
        let original = work().join(format!("debian-{SUITE}"));
        if !original.join("var/lib/apt/lists").is_dir() {
            bootstrap(&original)?;
        }
        let root = work().join("fresh");
        remove(&root)?;
        succeed(Command::new("cp").arg("--archive").arg(original).arg(&root))?;
        Ok(Self { root })
    }

    /// Creates a command for a shell in the folder, with `/proc` and this host's `/dev`. The mounts
    /// are in a name space of their own, which ends with the shell.
    fn shell(&self, script: &str) -> Command {
        let mut command = Command::new("unshare");
        let mounts = "mount -t proc proc \"$0/proc\" && mount --rbind /dev \"$0/dev\" && \
            mount --bind /etc/resolv.conf \"$0/etc/resolv.conf\" && \
            exec chroot \"$0\" /bin/sh -ec \"$1\"";
        command.args(["--mount", "--fork", "--kill-child", "/bin/sh", "-ec", mounts]);
        command.arg(&self.root).arg(script).env_clear();
        command.env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin").env("HOME", "/root");
        command.env("DEBIAN_FRONTEND", "noninteractive");
        command
    }

    /// Installs the package and returns the time in seconds until a command in a VM has printed.
    fn install(&self, package: &Path) -> Result<f64> {
        let name = package.file_name().context("a package without a name")?;
        fs::copy(package, self.root.join("root").join(name)).context("cannot copy the package")?;
        let name = name.to_string_lossy();
        // A fresh Debian has the present list of packages.
        output(&mut self.shell("apt-get update -q >&2"))?;
        let script = format!(
            "cd /root\napt-get install -q -y --no-install-recommends ./{name} >&2\n\
             parador exec / -- uname -r\n"
        );
        let start = Instant::now();
        let printed = output(&mut self.shell(&script))?;
        let time = start.elapsed().as_secs_f64();
        ensure!(printed.trim().ends_with("-parador"), "another kernel has answered: {printed}");
        println!("kernel of the guest: {}", printed.trim());
        Ok(time)
    }
}

impl Drop for Debian {
    fn drop(&mut self) {
        if let Err(error) = remove(&self.root) {
            eprintln!("bench: {error:#}");
        }
    }
}

/// Makes the Debian of [`Debian::new`], which appears complete or not at all.
fn bootstrap(folder: &Path) -> Result<()> {
    let partial = work().join("partial");
    remove(&partial)?;
    let mirror = mirror()?;
    println!("making a Debian from {mirror}");
    let mut debootstrap = Command::new("debootstrap");
    debootstrap.args(["--variant=minbase", SUITE]).arg(&partial).arg(&mirror);
    succeed(debootstrap.stdout(Stdio::null()))?;
    succeed(Command::new("chroot").arg(&partial).args(["apt-get", "clean"]))?;
    fs::rename(&partial, folder).with_context(|| format!("cannot move {}", partial.display()))
}

/// Returns the mirror of Debian's release from the configuration of apt.
fn mirror() -> Result<String> {
    let format = "$(ORIGIN) $(CODENAME) $(REPO_URI)";
    let targets = output(Command::new("apt-get").args(["indextargets", "--format", format]))?;
    let wanted = format!("Debian {SUITE} ");
    let found = targets.lines().find_map(|line| line.strip_prefix(&wanted));
    Ok(found.unwrap_or(MIRROR).trim_end_matches('/').to_owned())
}

/// Returns the median time of a command that does nothing.
fn exec_time(debian: &Debian) -> Result<Figure> {
    let mut times = Vec::new();
    for _ in 0..ROUNDS {
        // The shell reads its clock beside the command: the chroot does not count.
        let printed = output(&mut debian.shell(
            "a=$(date +%s%N); parador exec / -- true; b=$(date +%s%N); echo $(((b - a) / 1000))",
        ))?;
        let us: f64 = printed.trim().parse().context("the shell printed no time")?;
        times.push(us / 1000.0);
    }
    times.sort_by(f64::total_cmp);
    let median = (times[ROUNDS / 2 - 1] + times[ROUNDS / 2]) / 2.0;
    let spread = (times[ROUNDS - 1] - times[0]) / median;
    Ok(Figure { spread, ..Figure::new("exec_ms", "parador exec / -- true, median", median, "ms")? })
}

/// Folder of this measurement.
fn work() -> PathBuf {
    target().join("bench/tools")
}

fn remove(folder: &Path) -> Result<()> {
    match folder.exists() {
        true => succeed(Command::new("rm").args(["-rf", "--one-file-system"]).arg(folder)),
        false => Ok(()),
    }
}

fn succeed(command: &mut Command) -> Result<()> {
    let status = command.current_dir(workspace()).status();
    let status = status.with_context(|| format!("cannot start {command:?}"))?;
    ensure!(status.success(), "{command:?}: {status}");
    Ok(())
}

fn output(command: &mut Command) -> Result<String> {
    let output = command.stdin(Stdio::null()).stderr(Stdio::inherit()).output();
    let output = output.with_context(|| format!("cannot start {command:?}"))?;
    ensure!(output.status.success(), "{command:?}: {}", output.status);
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}
