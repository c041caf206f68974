//! The kernel for AArch64 on QEMU's machine `virt`: with a root that checks it from inside
//! (`native/first`), and its refusals of machines that do not fit. Systems: `systems::arm64`.

use crate::system::artifacts;
use anyhow::{Context, Result, ensure};
use rustix::process::{Pid, Signal, kill_process};
use std::fs;
use std::io::{BufRead, BufReader};
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
pub const REFUSED: [(&str, &str, &str, &str); 2] = [
    ("el1", "virt,gic-version=3", "cortex-a76", "must be started at EL2"),
    ("no-bundle", GOOD, "cortex-a76", "cannot start root: no boot module"),
];

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

/// Runs the kernel and returns its log. `machine`: QEMU's machine, processor and CPUs.
fn run(machine: (&str, &str, u32), bundle: Option<&Path>) -> Result<String> {
    let mut command = Command::new("setpriv");
    command.args(["--pdeathsig", "KILL", "timeout", "--kill-after=5", &LIMIT.to_string()]);
    command.args([QEMU, "-serial", "stdio"]);
    add_machine(&mut command, machine, bundle);
    command.stdin(Stdio::null()).stdout(Stdio::piped());
    let mut qemu = command.spawn().context("cannot start QEMU")?;
    let lines = BufReader::new(qemu.stdout.take().context("no output")?).lines();
    let mut log = String::new();
    for line in lines {
        let line = line.context("cannot read the log")?;
        log += &line;
        log.push('\n');
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
pub fn first(processor: &'static str, cpus: u32, has_vhe: bool) -> Result<()> {
    let folder = TempDir::new()?;
    let files = [
        (abi::bundle::ROOT_NAME, artifacts().join("first-arm64")),
        ("guest", artifacts().join("guest-exits-arm64.image")),
    ];
    let log = run((GOOD, processor, cpus), Some(&bundle(folder.path(), &files)?))?;
    ensure!(log.contains(&format!("{cpus} of {cpus} CPUs started")), "not all CPUs:\n{log}");
    ensure!(log.contains("CHECK first ok"), "no success:\n{log}");
    let level = format!("booted at EL2{}\n", if has_vhe { "" } else { " without VHE" });
    ensure!(log.contains(&level), "another exception level:\n{log}");
    ensure!(log.contains("privileged instructions refused"), "none was tried:\n{log}");
    // The thread that reads a page which was taken away; no other fault.
    let faults = log.matches("thread stopped by exception 36").count();
    ensure!(faults == 1 && !log.contains("PANIC"), "{faults} faults:\n{log}");
    Ok(())
}

/// The kernel states why it does not run on a machine.
pub fn refused(machine: &str, processor: &str, reason: &str) -> Result<()> {
    let log = run((machine, processor, 1), None)?;
    ensure!(log.contains(reason), "`{reason}` is missing:\n{log}");
    ensure!(!log.lines().any(|line| line.starts_with("root: ")), "a root has run:\n{log}");
    Ok(())
}
