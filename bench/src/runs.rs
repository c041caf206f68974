//! Runs on the emulated machine, bare and under Parador.

use crate::guest::folder;
use abi::bundle::Header;
use anyhow::{Context, Result, bail};
use parador_tests::system::{Machine, Running, parador};
use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// Guest memory in MiB, the same on the bare machine.
pub const MEMORY: &str = "256";
/// Fixed layout and a fixed clock, so that every run takes the same course.
pub const COMMAND_LINE: &str = "console=ttyS0 quiet panic=-1 nokaslr norandmaps mitigations=off \
                            tsc=reliable tsc_early_khz=1000000 lpj=4000000";
/// Start of the real-time clock, independent of the date.
const RTC: &str = "base=2024-01-01T00:00:00,clock=vm";
/// Time limit of one run on a busy host, in seconds.
const LIMIT: u64 = 3600;

/// Output of one run.
#[derive(Clone, Debug, Default)]
pub struct Output {
    /// Instructions per operation, by name: the lines `VB name value ns`.
    pub values: BTreeMap<String, f64>,
    /// Console transcript.
    pub console: String,
    /// Kernel log; empty on the bare machine.
    pub log: String,
}

impl Output {
    fn parse(console: String, log: String) -> Self {
        let mut values = BTreeMap::new();
        for line in console.lines().chain(log.lines()) {
            let Some(at) = line.find("VB ") else { continue };
            let mut words = line[at + 3..].split_whitespace();
            if let (Some(name), Some(value), Some("ns")) =
                (words.next(), words.next(), words.next())
                && let Ok(value) = value.parse()
            {
                values.insert(name.to_owned(), value);
            }
        }
        Self { values, console, log }
    }

    /// Returns a value; fails if the run has not printed it.
    pub fn value(&self, name: &str) -> Result<f64> {
        match self.values.get(name) {
            Some(&value) => Ok(value),
            None => bail!("no `VB {name}` in the output:\n{}\n{}", self.console, self.log),
        }
    }

    /// Returns a property of the system: the line `VBSYS name text`.
    pub fn fact(&self, name: &str) -> &str {
        let mark = format!("VBSYS {name} ");
        self.console.lines().find_map(|line| line.strip_prefix(mark.as_str())).unwrap_or("unknown")
    }
}

/// Clock source of the measured guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Clock {
    /// The TSC, which the command line declares reliable, with its frequency.
    Tsc,
    /// The same plus kvmclock, which Linux prefers for its scheduler.
    Kvm,
}

/// Returns the description of a system with the measured guest. `more` is appended to its command
/// line.
pub fn guest_description(ram_disk: &Path, more: &str, clock: Clock) -> String {
    let kvmclock = clock == Clock::Kvm;
    format!(
        "[system]\nboard = \"qemu-q35\"\nlog = \"com2\"\n\n[[vm]]\nname = \"guest\"\n\
         memory = \"{MEMORY}M\"\nkernel = \"debian\"\ninitrd = \"{}\"\n\
         cmdline = \"{COMMAND_LINE}{more}\"\nconsole = \"com1\"\nkvmclock = {kvmclock}\n",
        ram_disk.display()
    )
}

/// Returns the guest kernel of a built system: the bare machine runs the same file.
pub fn guest_kernel(description: &str) -> Result<PathBuf> {
    let folder = folder();
    fs::write(folder.join("guest.toml"), description)?;
    let built = parador(&folder)
        .args(["system", "build", "guest.toml", "--output", "image"])
        .stdout(Stdio::null())
        .status()
        .context("cannot start parador")?;
    if !built.success() {
        bail!("parador cannot build the measured system");
    }
    let bundle = fs::read(folder.join("image/bundle")).context("cannot read the bundle")?;
    let header = Header::parse(&bundle, bundle.len() as u64)
        .map_err(|error| anyhow::anyhow!("the bundle is damaged: {error:?}"))?;
    // Magic of the header (Linux/x86 boot protocol).
    let kernel = header
        .files()
        .map(|file| &bundle[file.offset as usize..][..file.length as usize])
        .find(|bytes| bytes.get(0x202..0x206) == Some(b"HdrS"))
        .context("there is no Linux kernel in the bundle")?;
    let path = folder.join("vmlinuz");
    fs::write(&path, kernel)?;
    Ok(path)
}

/// QEMU's instruction counter for systems that wait for no device: idle time passes at once.
pub const NO_SLEEP: &str = "shift=0,sleep=off";
/// The same with a disk, which completes in real time: the machine sleeps until then.
pub const SLEEP: &str = "shift=0";

/// An emulated machine that runs Linux without a hypervisor.
pub struct BareMachine {
    /// QEMU's program for the architecture.
    program: &'static str,
    /// Board and processor.
    arguments: &'static [&'static str],
    /// Command line of Linux, that of the measured guest.
    command_line: &'static str,
}

/// The PC on which Parador is measured.
pub const PC: BareMachine = BareMachine {
    program: "qemu-system-x86_64",
    arguments: &["-M", "q35", "-cpu", "EPYC,+svm,+npt"],
    command_line: COMMAND_LINE,
};
/// The AArch64 machine on which Parador is measured, with Linux at EL1, as in a guest.
pub const ARM64: BareMachine = BareMachine {
    program: "qemu-system-aarch64",
    arguments: &["-M", "virt,virtualization=off,gic-version=3", "-cpu", "cortex-a76"],
    command_line: COMMAND_LINE_ARM64,
};
/// As [`COMMAND_LINE`], and the benchmark that the RAM disk of `parador` starts.
pub const COMMAND_LINE_ARM64: &str = "console=ttyAMA0 quiet panic=-1 nokaslr norandmaps \
                            mitigations=off parador.run=/root/vbench";

/// Linux on the bare emulated machine.
pub struct Bare<'a> {
    /// The machine.
    pub machine: BareMachine,
    /// Memory in MiB.
    pub memory: &'a str,
    /// Kernel image.
    pub kernel: &'a Path,
    /// RAM disk.
    pub ram_disk: &'a Path,
    /// Text appended to the command line.
    pub more: &'a str,
    /// [`NO_SLEEP`] or [`SLEEP`].
    pub icount: &'a str,
}

impl Bare<'_> {
    /// Runs the system to its end, with further arguments for QEMU.
    pub fn run(&self, arguments: &[String]) -> Result<Output> {
        let output = Command::new("timeout")
            .args(["--kill-after=5", &LIMIT.to_string(), self.machine.program])
            .args(self.machine.arguments)
            .args(["-accel", "tcg", "-smp", "1"])
            .args(["-m", self.memory, "-icount", self.icount, "-seed", "1"])
            .args(["-rtc", RTC, "-nodefaults", "-no-user-config"])
            .args(["-display", "none", "-serial", "stdio", "-no-reboot"])
            .arg("-kernel")
            .arg(self.kernel)
            .arg("-initrd")
            .arg(self.ram_disk)
            .args(["-append", &format!("{}{}", self.machine.command_line, self.more)])
            .args(arguments)
            .stdin(Stdio::null())
            .output()
            .context("cannot start QEMU")?;
        let console = String::from_utf8_lossy(&output.stdout).replace('\r', "");
        if !output.status.success() {
            let errors = String::from_utf8_lossy(&output.stderr);
            bail!("the bare run failed ({})\n{console}\n{errors}", output.status);
        }
        Ok(Output::parse(console, String::new()))
    }
}

/// Runs the measured system on the bare emulated machine.
pub fn bare(kernel: &Path, ram_disk: &Path) -> Result<Output> {
    let machine = PC;
    Bare { machine, memory: MEMORY, kernel, ram_disk, more: "", icount: NO_SLEEP }.run(&[])
}

/// Reads the bundle of a system that has run ([`system_with`]).
pub fn bundle(name: &str) -> Result<Vec<u8>> {
    fs::read(folder().join(format!("image-{name}/bundle"))).context("cannot read the bundle")
}

/// Runs a system under Parador to its end, with further arguments for QEMU.
pub fn system_with(
    name: &str,
    description: &str,
    icount: &str,
    arguments: &[String],
) -> Result<Output> {
    let folder = folder();
    let file = format!("{name}.toml");
    fs::write(folder.join(&file), description)?;
    let log = folder.join(format!("{name}.log"));
    if log.exists() {
        fs::remove_file(&log).context("cannot remove an old log")?;
    }
    let output = parador(&folder)
        .args(["system", "emulate", &file, "--output", &format!("image-{name}"), "--log"])
        .arg(&log)
        .args(["--timeout", &format!("{LIMIT}s")])
        .args(["--", "-icount", icount, "-seed", "1", "-rtc", RTC])
        .args(arguments)
        .stdin(Stdio::null())
        .output()
        .context("cannot start parador")?;
    let console = String::from_utf8_lossy(&output.stdout).replace('\r', "");
    // A description with an error leaves no log.
    let log = fs::read(&log).map_or_else(|error| format!("no log: {error}"), text);
    if !output.status.success() {
        let errors = String::from_utf8_lossy(&output.stderr);
        bail!("the system failed ({})\n{console}\n{log}\n{errors}", output.status);
    }
    Ok(Output::parse(console, log))
}

fn text(bytes: Vec<u8>) -> String {
    String::from_utf8_lossy(&bytes).into_owned()
}

/// Runs a system under Parador to its end.
pub fn system(description: &str) -> Result<Output> {
    on(description, &Machine { counted: true, ..Machine::default() })
}

/// Runs a system to its end on the kernel build that measures its longest path.
pub fn measured(description: &str) -> Result<Output> {
    on(description, &Machine { counted: true, measured: true, ..Machine::default() })
}

fn on(description: &str, machine: &Machine) -> Result<Output> {
    let limit = Duration::from_secs(LIMIT);
    let mut running = Running::start(description, machine, limit)?;
    let code = running.wait(Instant::now() + limit + Duration::from_secs(60))?;
    if code != 0 {
        bail!("the system ended with code {code}\n{}", running.transcripts());
    }
    Ok(Output::parse(running.console.text(), running.log.text()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_values() {
        let console =
            "VB nullsys        340.5 ns n=10\nVBSYS kernel 6.1.0\nVB x unavailable (signal 4)\n";
        let output = Output::parse(console.into(), "[root] VB exits 99 ns\n".into());
        assert_eq!(output.value("nullsys").unwrap(), 340.5);
        assert_eq!(output.value("exits").unwrap(), 99.0);
        assert!(output.value("x").is_err());
        assert_eq!(output.fact("kernel"), "6.1.0");
    }
}
