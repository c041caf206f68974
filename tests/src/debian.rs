//! A whole Debian in a guest, used from outside, on a disk of `parador rootfs debian`:
//! `examples/debian.toml`, and in processes of this host.

use crate::hosted::{self, Rig};
use crate::scenario::Backend;
use crate::system::{Machine, Running, parador, target, workspace};
use crate::transcript::Transcript;
use anyhow::{Context, Result, bail, ensure};
use std::ffi::OsStr;
use std::fs::{self, File};
use std::net::{Ipv4Addr, TcpListener};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};
use tempfile::TempDir;

/// Time that the guest may take on a busy machine; a minute or two on an idle one.
const LIMIT: Duration = Duration::from_secs(1500);
/// Time beyond it for building the image and for ending.
const SLACK: Duration = Duration::from_secs(60);
/// Time between attempts to reach the guest.
const PAUSE: Duration = Duration::from_secs(2);
/// First byte of the disk's only partition.
pub const PARTITION: u32 = 1 << 20;

/// Exit codes of `parador rootfs`: the existing disk has other contents; only root can make a disk.
const USAGE: i32 = 64;
const PERMISSION: i32 = 77;

/// A package that only the test has, and what its program prints.
const CONTROL: &str = "Package: parador-guest\nVersion: 1.0\nArchitecture: all\n\
                       Maintainer: Test <test@example.org>\nDescription: prints its environment\n";
const PROGRAM: &str = "#!/bin/sh\necho \"installed on $(nproc) processors\"\n";

/// Script for the guest. Every command has to succeed. Units that have not started in time on a
/// slow host are started again, and kernel warnings about slow progress are ignored.
const SCRIPT: &str = "\
set -eux
systemctl start serial-getty@{serial} postgresql@15-main
apt-get -q -y install /root/parador-guest.deb
parador-guest
until pg_isready -q; do sleep 1; done
cd /tmp
runuser -u postgres -- createdb bench
runuser -u postgres -- pgbench -q -i -s 1 bench
runuser -u postgres -- pgbench -c 2 -j 2 -t 50 bench
! dmesg | grep -E 'BUG:|Oops|XSAVE consistency|I/O error|EXT4-fs error|ACPI Error'
";
/// Texts that the output must contain.
const ANSWERS: [&str; 2] =
    ["installed on 2 processors", "number of transactions actually processed: 100/100"];
/// The router of QEMU's network answers.
const PING: &str = "ping -c 1 10.0.2.2\n";
/// systemd has started all that there is; it fails if anything has failed.
const STARTED: &str = "systemctl is-system-running --wait\n";

/// Boots it, logs in from outside, installs a package, runs a database, shuts it down, and checks
/// its disk. `keys`: further keys of the VM.
pub fn run(backend: Backend, cpus: u32, keys: &str) -> Result<()> {
    let arch = match backend {
        Backend::NativeArm64Vhe | Backend::NativeArm64NoVhe => "arm64",
        _ => "x86",
    };
    let made = make_disk("debian", arch, "postgresql")?;
    let folder = TempDir::with_prefix("parador-test-").context("cannot make a folder")?;
    let disk = copy(&made, folder.path())?;
    let package = package(folder.path())?;
    let port = free_port()?;
    let ssh = Ssh { key: made.join("ssh-key"), port };

    let machine = Machine { cpus, ..Machine::default() };
    let description = backend.describe(&description(&made, &disk, port, keys)?);
    let mut running = Running::start(&description, &machine, LIMIT)?;
    let outcome = use_it(&mut running, &ssh, &package, backend);
    outcome.with_context(|| format!("\n{}", running.transcripts()))?;
    drop(running);
    check(&disk)
}

/// A copy of a disk, in a folder.
fn copy(made: &Path, folder: &Path) -> Result<PathBuf> {
    let disk = folder.join("debian.img");
    succeed(Command::new("cp").arg("--sparse=always").arg(made.join("disk.img")).arg(&disk))?;
    Ok(disk)
}

/// Its file system is sound.
fn check(disk: &Path) -> Result<()> {
    let device = format!("{}?offset={PARTITION}", disk.display());
    succeed(Command::new("/sbin/e2fsck").args(["-f", "-n"]).arg(device)).map(drop)
}

/// The same in processes of this host: systemd starts all of it.
pub fn in_processes() -> Result<()> {
    /// Seconds that the machine may run.
    const SECONDS: u32 = 300;
    let made = make_disk("debian", "x86", "postgresql")?;
    let rig = Rig::new()?;
    let disk = copy(&made, rig.folder())?;
    let package = package(rig.folder())?;
    let port = free_port()?;
    let ssh = Ssh { key: made.join("ssh-key"), port };
    let mut machine = rig.bare(SECONDS);
    machine.arg("-d").arg(&disk).args(["-c", "2", "-p", "root=/dev/vda1 rw quiet"]);
    machine.args(["--net", &format!("user,hostfwd=tcp:{port}:22")]);
    let mut child = hosted::start(&mut machine)?;
    let output = child.stdout.take().context("no console")?;
    let mut console = Transcript::follow("console", output);
    let deadline = Instant::now() + Duration::from_secs(SECONDS.into());
    let script = format!("{SCRIPT}{STARTED}").replace("{serial}", "ttyS0");
    work(&ssh, &package, &script, deadline, || Ok(child.try_wait()?.is_some()))
        .and_then(|_| console.expect("debian login:", deadline))
        .with_context(|| console.text())?;
    // The connection may end before the command does.
    let _ = ssh.run("poweroff", Stdio::null());
    let code = child.wait().context("cannot wait for parador")?.code();
    ensure!(code == Some(0), "ended with code {code:?}\n{}", console.text());
    check(&disk)
}

/// Does what a script says, with the package there; gives what it prints.
fn work(
    ssh: &Ssh,
    package: &Path,
    script: &str,
    deadline: Instant,
    mut has_ended: impl FnMut() -> Result<bool>,
) -> Result<String> {
    while let Err(error) = ssh.run("cat >parador-guest.deb", File::open(package)?.into()) {
        ensure!(Instant::now() < deadline, "the guest cannot be reached: {error:#}");
        if has_ended()? {
            bail!("the guest has ended: {error:#}");
        }
        sleep(PAUSE);
    }
    let text = ssh.run(script, Stdio::null())?;
    if let Some(missing) = ANSWERS.iter().find(|answer| !text.contains(**answer)) {
        bail!("`{missing}` is not in what the guest says:\n{text}");
    }
    Ok(text)
}

fn use_it(running: &mut Running, ssh: &Ssh, package: &Path, backend: Backend) -> Result<()> {
    let deadline = Instant::now() + LIMIT + SLACK;
    let script = backend.describe(&format!("{SCRIPT}{PING}"));
    let text = work(ssh, package, &script, deadline, || running.has_ended())?;
    ensure!(text.contains("1 packets transmitted, 1 received"), "no answer:\n{text}");
    running.console.expect("debian login:", deadline)?;
    // The connection may end before the command does.
    let _ = ssh.run("poweroff", Stdio::null());
    let code = running.wait(deadline)?;
    ensure!(code == 0, "ended with code {code}");
    Ok(())
}

/// The example, with this disk and port, and these keys of the VM.
fn description(made: &Path, disk: &Path, port: u16, keys: &str) -> Result<String> {
    let mut text = fs::read_to_string(workspace().join("examples/debian.toml"))?;
    let changes = [
        ("../target/debian/disk.img", disk.display().to_string()),
        ("../target/debian", made.display().to_string()),
        ("tcp:2222:", format!("tcp:{port}:")),
        ("[[vm]]\n", format!("[[vm]]\n{keys}\n")),
        ("\"qemu-q35\"", "\"{board}\"".to_owned()),
    ];
    for (from, to) in changes {
        ensure!(text.contains(from), "the example has no `{from}`");
        text = text.replace(from, &to);
    }
    Ok(text)
}

/// The folder with a disk that has what people do with a Linux: compile, serve pages and data,
/// compute, load a machine.
pub fn busy_disk() -> Result<PathBuf> {
    make_disk("debian-hosted", "x86", "gcc,libc6-dev,make,postgresql,nginx,wrk,stress-ng,povray")
}

/// The folder with a disk that has what Linux is built with.
pub fn compiler_disk() -> Result<PathBuf> {
    make_disk("debian-compiler", "x86", "gcc,libc6-dev,make,flex,bison,bc,xz-utils,libelf-dev")
}

/// The folder of this name with a disk for an architecture that has these packages, too; it is made
/// once and kept until disks are made otherwise.
fn make_disk(name: &str, arch: &str, packages: &str) -> Result<PathBuf> {
    let cache = target().join("cache");
    fs::create_dir_all(&cache).with_context(|| format!("cannot make {}", cache.display()))?;
    let folder = cache.join(if arch == "x86" { name.into() } else { format!("{name}-{arch}") });
    let make = |as_root: bool, more: &[&str]| {
        let mut command = parador(&cache);
        command.args(["rootfs", "debian", "--arch", arch, "--include", packages]);
        command.args(more).arg("--output").arg(&folder);
        if as_root {
            let mut root = Command::new("sudo");
            root.arg("-n").arg(command.get_program()).args(command.get_args()).current_dir(&cache);
            command = root;
        }
        command.output().context("cannot start parador")
    };
    let is_root = succeed(Command::new("id").arg("-u"))?.trim() == "0";
    let mut output = make(false, &[])?;
    if output.status.code() == Some(USAGE) {
        output = make(!is_root, &["--force"])?;
    } else if output.status.code() == Some(PERMISSION) {
        output = make(!is_root, &[])?;
    }
    let errors = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "cannot make a disk with Debian:\n{errors}");
    Ok(folder)
}

/// Makes the package in a folder.
pub fn package(folder: &Path) -> Result<PathBuf> {
    let tree = folder.join("package");
    let program = tree.join("usr/bin/parador-guest");
    fs::create_dir_all(tree.join("DEBIAN"))?;
    fs::create_dir_all(tree.join("usr/bin"))?;
    fs::write(tree.join("DEBIAN/control"), CONTROL)?;
    fs::write(&program, PROGRAM)?;
    succeed(Command::new("chmod").arg("755").arg(&program))?;
    let package = folder.join("parador-guest.deb");
    let build = ["--root-owner-group", "--build"].map(OsStr::new);
    succeed(Command::new("dpkg-deb").args(build).args([&tree, &package]))?;
    Ok(package)
}

/// Returns a free TCP port.
fn free_port() -> Result<u16> {
    Ok(TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?.local_addr()?.port())
}

/// Returns the ssh command that logs in.
struct Ssh {
    key: PathBuf,
    port: u16,
}

impl Ssh {
    /// Runs a command in the guest and returns what it wrote.
    fn run(&self, command: &str, input: Stdio) -> Result<String> {
        let mut ssh = Command::new("ssh");
        for option in [
            "BatchMode=yes",
            "ConnectTimeout=120",
            "IdentitiesOnly=yes",
            "LogLevel=ERROR",
            "ServerAliveInterval=60",
            "ServerAliveCountMax=5",
            "StrictHostKeyChecking=no",
            "UserKnownHostsFile=/dev/null",
        ] {
            ssh.args(["-o", option]);
        }
        ssh.arg("-i").arg(&self.key).arg("-p").arg(self.port.to_string());
        succeed(ssh.arg("root@127.0.0.1").arg(command).stdin(input))
    }
}

/// Runs a command to its end; returns what it wrote. An error unless it succeeds.
fn succeed(command: &mut Command) -> Result<String> {
    let name = command.get_program().to_string_lossy().into_owned();
    let output = command.output().with_context(|| format!("cannot start {name}"))?;
    let text =
        [&output.stdout, &output.stderr].map(|bytes| String::from_utf8_lossy(bytes)).concat();
    ensure!(output.status.success(), "{name} ended with {}:\n{text}", output.status);
    Ok(text)
}
