//! The kernel for AArch64 on QEMU's machine `virt`: with a root that checks it from inside
//! (`native/first`), with Debian's Linux as its guest (`native/solo`), and its refusals of machines
//! that do not fit.

use crate::foreign::fetched;
use crate::system::artifacts;
use anyhow::{Context, Result, ensure};
use rustix::process::{Pid, Signal, kill_process};
use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use tempfile::TempDir;

/// Time limit of a run on a busy host, in seconds.
const LIMIT: u32 = 300;
const QEMU: &str = "qemu-system-aarch64";
/// Last line of a kernel that does not run on a machine.
const STOPPED: &str = "kernel: stopped";
/// A machine that fits.
const GOOD: &str = "virt,virtualization=on,gic-version=3";

/// Machines that do not fit: name, QEMU's machine and processor, and a part of the reason.
pub const REFUSED: [(&str, &str, &str, &str); 4] = [
    ("el1", "virt,gic-version=3", "cortex-a76", "must be started at EL2"),
    ("no-vhe", GOOD, "cortex-a72", "has no VHE"),
    ("gicv2", "virt,virtualization=on,gic-version=2", "cortex-a76", "no GICv3"),
    ("no-bundle", GOOD, "cortex-a76", "cannot start root: no boot module"),
];

/// Debian's kernel for VMs.
const LINUX: &str = "linux-image-cloud-arm64";
/// Line of its user space that asks for input, and the input.
const QUESTION: &str = "name?";
const ANSWER: &str = "parador\n";
/// First process of the guest. busybox has no floating point of its own, but its `sleep` has.
const INIT: &str = "#!/bin/busybox sh
/bin/busybox --install -s /bin
mount -t devtmpfs dev /dev
mkdir /proc
mount -t proc proc /proc
exec </dev/ttyAMA0 >/dev/ttyAMA0 2>&1
n=0; for i in $(seq 20); do n=$((n + $(echo 1))); done
echo $(uname -m) forked $n on $(grep -c ^processor /proc/cpuinfo) CPUs
for cpu in 0 1 2 3; do taskset $((1 << cpu)) sleep 0.02 2>/dev/null && echo slept on CPU $cpu; done
[ $(date +%s) -gt 1700000000 ] && echo the time is right
if grep -q shell /proc/cmdline; then
    setsid sh -c 'exec sh -i </dev/ttyAMA0 >/dev/ttyAMA0 2>&1'
    poweroff -f
fi
echo name?
read name
echo hello $name
poweroff -f
";

/// Adds the arguments of QEMU to its command: machine, processor and CPUs, and the bundle.
fn add_machine(
    command: &mut Command,
    (machine, processor, cpus): (&str, &str, u32),
    bundle: Option<&Path>,
) {
    command.args(["-nodefaults", "-no-user-config", "-display", "none", "-no-reboot"]);
    command.args(["-m", "512", "-M", machine, "-cpu", processor, "-smp", &cpus.to_string()]);
    command.args(["-append", "panic=off", "-kernel"]);
    command.arg(artifacts().join("kernel-arm64.image"));
    if let Some(bundle) = bundle {
        command.arg("-initrd").arg(bundle);
    }
}

/// Runs the kernel and returns its log. `machine`: QEMU's machine, processor and CPUs. The answer
/// follows each line with the question.
fn run(machine: (&str, &str, u32), bundle: Option<&Path>) -> Result<String> {
    let mut command = Command::new("setpriv");
    command.args(["--pdeathsig", "KILL", "timeout", "--kill-after=5", &LIMIT.to_string()]);
    command.args([QEMU, "-serial", "stdio"]);
    add_machine(&mut command, machine, bundle);
    command.stdin(Stdio::piped()).stdout(Stdio::piped());
    let mut qemu = command.spawn().context("cannot start QEMU")?;
    let mut input = qemu.stdin.take().context("no input")?;
    let lines = BufReader::new(qemu.stdout.take().context("no output")?).lines();
    let mut log = String::new();
    for line in lines {
        let line = line.context("cannot read the log")?;
        log += &line;
        log.push('\n');
        if line.contains(QUESTION) {
            input.write_all(ANSWER.as_bytes()).context("cannot answer")?;
        }
        if line.contains(STOPPED) {
            // `timeout` passes it on.
            kill_process(Pid::from_child(&qemu), Signal::TERM).context("cannot end QEMU")?;
        }
    }
    qemu.wait().context("QEMU has no result")?;
    Ok(log)
}

/// Makes a bundle in a folder, of files with these names.
fn bundle(folder: &Path, of: &[(&str, PathBuf)]) -> Result<PathBuf> {
    let mut contents = Vec::new();
    for (_, path) in of {
        contents.push(fs::read(path).with_context(|| format!("no {}", path.display()))?);
    }
    let lengths = contents.iter().map(|file| file.len() as u64);
    let files: Vec<_> = of.iter().map(|(name, _)| *name).zip(lengths).collect();
    let mut bytes = Vec::new();
    let header = abi::bundle::write_header(&files, |index, offset| {
        bytes.resize(offset as usize, 0);
        bytes.extend_from_slice(&contents[index]);
    });
    let header = header.context("no header")?;
    bytes[..header.len()].copy_from_slice(&header);
    let path = folder.join("bundle");
    fs::write(&path, bytes).context("cannot write the bundle")?;
    Ok(path)
}

/// The root finds no fault in the kernel on this many CPUs.
pub fn first(processor: &'static str, cpus: u32) -> Result<()> {
    let folder = TempDir::new()?;
    let files = [
        (abi::bundle::ROOT_NAME, artifacts().join("first-arm64")),
        ("guest", artifacts().join("guest-exits-arm64.image")),
    ];
    let log = run((GOOD, processor, cpus), Some(&bundle(folder.path(), &files)?))?;
    ensure!(log.contains(&format!("{cpus} of {cpus} CPUs started")), "not all CPUs:\n{log}");
    ensure!(log.contains("CHECK first ok"), "no success:\n{log}");
    // The thread that reads a page which was taken away; no other fault.
    let faults = log.matches("thread stopped by exception 36").count();
    ensure!(faults == 1 && !log.contains("PANIC"), "{faults} faults:\n{log}");
    Ok(())
}

/// Makes a bundle in a folder, with Debian's Linux and this command line.
fn linux_bundle(folder: &Path, command_line: &str) -> Result<PathBuf> {
    let kept = fetched(("arm64", LINUX), INIT, "kernel", |kernel| Ok(fs::read(kernel)?))?;
    let line = folder.join("command-line");
    fs::write(&line, command_line).context("cannot write the command line")?;
    let files = [
        (abi::bundle::ROOT_NAME, artifacts().join("solo-arm64")),
        ("kernel", kept.join("kernel")),
        ("initrd", kept.join("disk")),
        ("command-line", line),
    ];
    bundle(folder, &files)
}

/// Runs Debian's Linux with a shell on this terminal.
pub fn run_shell(cpus: u32) -> Result<()> {
    let folder = TempDir::new()?;
    let bundle = linux_bundle(folder.path(), "console=ttyAMA0 quiet shell")?;
    let mut command = Command::new(QEMU);
    command.args(["-serial", "mon:stdio"]);
    add_machine(&mut command, (GOOD, "cortex-a76", cpus), Some(&bundle));
    let status = command.status().context("cannot start QEMU")?;
    ensure!(status.success(), "QEMU has failed: {status}");
    Ok(())
}

/// Debian's Linux boots on this many vCPUs, and its user space talks by the console.
pub fn linux(processor: &'static str, cpus: u32) -> Result<()> {
    let folder = TempDir::new()?;
    let bundle = linux_bundle(folder.path(), "console=ttyAMA0 panic=-1")?;
    let log = run((GOOD, processor, cpus), Some(&bundle))?;
    let greeting = format!("aarch64 forked 20 on {cpus} CPUs");
    let mut texts = vec![
        greeting,
        "hello parador".into(),
        "the time is right".into(),
        "the guest has ended: PowerOff".into(),
    ];
    texts.extend((0..cpus).map(|cpu| format!("slept on CPU {cpu}")));
    for text in texts {
        ensure!(log.contains(&text), "`{text}` is missing:\n{log}");
    }
    for never in ["PANIC", "Oops", "BUG: ", "WARNING: CPU", "rcu: INFO", "thread stopped"] {
        ensure!(!log.contains(never), "`{never}`:\n{log}");
    }
    Ok(())
}

/// A guest that accesses everything harms only itself.
pub fn hostile(processor: &'static str) -> Result<()> {
    let folder = TempDir::new()?;
    let files = [
        (abi::bundle::ROOT_NAME, artifacts().join("solo-arm64")),
        ("kernel", artifacts().join("guest-hostile-arm64.image")),
    ];
    let log = run((GOOD, processor, 1), Some(&bundle(folder.path(), &files)?))?;
    ensure!(log.contains("the guest has ended: PowerOff"), "the guest has failed:\n{log}");
    ensure!(!log.contains("PANIC"), "the kernel has failed:\n{log}");
    Ok(())
}

/// The kernel states why it does not run on a machine.
pub fn refused(machine: &str, processor: &str, reason: &str) -> Result<()> {
    let log = run((machine, processor, 1), None)?;
    ensure!(log.contains(reason), "`{reason}` is missing:\n{log}");
    ensure!(!log.lines().any(|line| line.starts_with("root: ")), "a root has run:\n{log}");
    Ok(())
}
