//! Environments in which programs are timed: this host, and VMs in processes of this host (`parador
//! run`, QEMU with TCG, User-Mode Linux).

use anyhow::{Context, Result, bail, ensure};
use parador_tests::debian::PARTITION;
use parador_tests::system::parador;
use parador_tests::transcript::Transcript;
use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use crate::guest::{self, folder};

/// CPUs of each VM, and of the programs that run on the host itself.
pub const CPUS: u32 = 1;
/// Time limit of a VM, in seconds.
const LIMIT: u32 = 1800;
/// Kernel command line of all VMs.
const COMMAND_LINE: &str =
    "console=ttyS0 panic=-1 mitigations=off transparent_hugepage=always quiet";
/// Init of a VM with Debian, on the second disk.
const FIRST: &str = "init=/bin/bash -- -c \"mount -o ro DISK /mnt && . /mnt/userland-init\"";
/// User-Mode Linux, from Debian's package of this name.
const UML: &str = "linux.uml";
const UML_PACKAGE: &str = "user-mode-linux";
/// Prompt of the shell of `-i busybox`.
const PROMPT: &str = "guest:/root #";
/// Name of guest memory in `/proc/PID/smaps`.
const GUEST_MEMORY: &str = "memfd:parador-guest";

/// An environment in which programs are timed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Environment {
    /// This host itself.
    Native,
    /// `parador run`.
    Parador,
    /// QEMU without KVM.
    Tcg,
    /// User-Mode Linux).
    Uml,
}

impl Environment {
    /// All environments, in the order of their turns.
    pub const ALL: [Self; 4] = [Self::Native, Self::Parador, Self::Tcg, Self::Uml];

    /// Its name in results.
    pub fn name(self) -> &'static str {
        match self {
            Self::Native => "native",
            Self::Parador => "parador",
            Self::Tcg => "tcg",
            Self::Uml => "uml",
        }
    }
}

/// Values by row: one per round (which may be a median itself), and the best of all.
#[derive(Clone, Default)]
pub struct Times {
    rounds: BTreeMap<String, Vec<f64>>,
    best: BTreeMap<String, f64>,
}

impl Times {
    /// Reads the lines `HB NAME MEDIAN BEST ...` of a program's output.
    pub fn read(&mut self, output: &str) {
        for line in output.lines() {
            // Kernel messages may be in between.
            let Some((_, rest)) = line.split_once("HB ") else { continue };
            let mut words = rest.split_whitespace();
            let (Some(name), Some(median), Some(best)) = (words.next(), words.next(), words.next())
            else {
                continue;
            };
            let (Ok(median), Ok(best)) = (median.parse::<f64>(), best.parse::<f64>()) else {
                continue;
            };
            self.add(name, median, best);
        }
    }

    /// Copies the rounds of a row from other times, under another name.
    pub fn copy(&mut self, from: &Self, name: &str, new: &str) -> Result<()> {
        let rounds = from.rounds.get(name).with_context(|| format!("no times for {name}"))?;
        self.rounds.insert(new.to_owned(), rounds.clone());
        self.best.insert(new.to_owned(), from.best(name)?);
        Ok(())
    }

    /// Adds a round.
    pub fn add(&mut self, name: &str, median: f64, best: f64) {
        self.rounds.entry(name.to_owned()).or_default().push(median);
        let known = self.best.entry(name.to_owned()).or_insert(f64::MAX);
        *known = known.min(best);
    }

    /// Returns the median of the rounds and their spread relative to it.
    pub fn median(&self, name: &str) -> Result<(f64, f64)> {
        let rounds = self.rounds.get(name).with_context(|| format!("no times for {name}"))?;
        let mut sorted = rounds.clone();
        sorted.sort_by(f64::total_cmp);
        let (first, last) = (sorted[0], sorted[sorted.len() - 1]);
        let median = sorted[sorted.len() / 2];
        Ok((median, (last - first) / median))
    }

    /// Returns the smallest value.
    pub fn best(&self, name: &str) -> Result<f64> {
        self.best.get(name).copied().with_context(|| format!("no times for {name}"))
    }
}

/// Kernels and options of the VMs.
#[derive(Clone, Default)]
pub struct Kernels {
    /// Pre-virtualized kernel.
    pub parador: PathBuf,
    /// Kernel for QEMU, and the RAM disk that it needs to mount a disk.
    pub tcg: PathBuf,
    /// RAM disk of that kernel.
    pub tcg_initrd: Option<PathBuf>,
    /// Further options of `parador run`.
    pub options: Vec<String>,
    /// Further parameters of the pre-virtualized kernel, with a space after each.
    pub parameters: &'static str,
}

/// Returns `parador run` with the pre-virtualized kernel.
fn run_parador(kernels: &Kernels) -> Command {
    let mut run = parador(&folder());
    run.arg("run").arg(&kernels.parador);
    run.args(["-c", &CPUS.to_string(), "--timeout", &format!("{LIMIT}s")]);
    run.args(&kernels.options);
    run
}

fn limited(program: &str) -> Command {
    let mut command = Command::new("timeout");
    command.arg(LIMIT.to_string()).arg(program);
    command
}

fn run_qemu(kernels: &Kernels) -> Command {
    let mut qemu = limited("qemu-system-x86_64");
    qemu.args(["-M", "q35", "-accel", "tcg", "-cpu", "max", "-m", "1024"]);
    qemu.args(["-smp", &CPUS.to_string(), "-nodefaults", "-no-user-config", "-display", "none"]);
    qemu.args(["-serial", "stdio", "-no-reboot", "-kernel"]).arg(&kernels.tcg);
    qemu
}

fn run_uml() -> Command {
    let mut uml = limited(UML);
    uml.args(["mem=1024M", "con=null", "con0=null,fd:1", "quiet"]);
    uml
}

/// Binds this process and its children to as many CPUs as the VMs have, so that all environments
/// have the same: host programs as well as the threads that serve a VM beside its vCPUs.
pub fn bind() -> Result<()> {
    let cpus = format!("0-{}", CPUS - 1);
    let own = std::process::id().to_string();
    output(Command::new("taskset").args(["--cpu-list", "--pid", &cpus, &own])).map(drop)
}

/// Environment variables of a program.
pub type Variables<'a> = &'a [(&'a str, &'a str)];

/// Formats environment variables for a kernel command line: Linux passes unknown parameters to init
/// as environment.
fn kernel_parameters(variables: Variables<'_>) -> String {
    variables.iter().map(|(name, value)| format!("{name}={value} ")).collect()
}

/// Starts a RAM disk in an environment that is a VM.
pub fn with_ram_disk(
    environment: Environment,
    kernels: &Kernels,
    disk: &Path,
    variables: Variables<'_>,
) -> Result<Command> {
    let variables = kernel_parameters(variables);
    Ok(match environment {
        Environment::Native => bail!("a RAM disk is started in machines only"),
        Environment::Parador => {
            let mut run = run_parador(kernels);
            run.arg("-i").arg(disk).args(["-p", &(variables + kernels.parameters + "quiet")]);
            run
        }
        Environment::Tcg => {
            let mut qemu = run_qemu(kernels);
            qemu.arg("-initrd").arg(disk).args(["-append", &(variables + COMMAND_LINE)]);
            qemu
        }
        Environment::Uml => {
            let mut uml = run_uml();
            uml.arg(format!("initrd={}", disk.display())).args(variables.split_whitespace());
            uml
        }
    })
}

/// Runs a benchmark program, with one of its rows or all, and returns its output. In a VM the init
/// of the RAM disk starts it.
pub fn program(
    environment: Environment,
    kernels: &Kernels,
    program: &Path,
    disk: &Path,
    row: Option<&str>,
) -> Result<String> {
    if environment != Environment::Native {
        let variables = row.map(|row| ("HB_ROW", row));
        return output(&mut with_ram_disk(environment, kernels, disk, variables.as_slice())?);
    }
    output(Command::new(program).args(row))
}

/// Returns the milliseconds from the start of a VM until the init of its RAM disk prints `text`.
pub fn start(environment: Environment, kernels: &Kernels, disk: &Path, text: &str) -> Result<f64> {
    let mut command = with_ram_disk(environment, kernels, disk, &[])?;
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::null());
    let begin = Instant::now();
    let mut child = command.spawn().with_context(|| format!("cannot start {command:?}"))?;
    let output = child.stdout.take().context("no output")?;
    let mut console = Transcript::follow("console", output);
    let seen = console.expect(text, begin + Duration::from_secs(LIMIT.into()));
    let time = begin.elapsed();
    child.wait().context("cannot wait for a machine")?;
    seen.map(|()| time.as_secs_f64() * 1e3)
}

/// A Debian for all environments: its disk, the same files for the host, and a second disk with the
/// benchmarks.
pub struct Userland {
    disk: PathBuf,
    tree: PathBuf,
    work: PathBuf,
    work_disk: PathBuf,
}

impl Userland {
    /// `made` is a folder of `parador rootfs debian`; `work` holds the benchmarks.
    pub fn new(made: &Path, work: &Path) -> Result<Self> {
        let disk = made.join("disk.img");
        let tree = folder().join("debian");
        let record = fs::read(made.join("made-with")).context("no record of the disk")?;
        let copied = folder().join("debian-made-with");
        if !fs::read(&copied).is_ok_and(|copied| copied == record) {
            if tree.exists() {
                fs::remove_dir_all(&tree).context("cannot remove an old tree")?;
            }
            fs::create_dir_all(&tree).context("cannot make a folder")?;
            let mut copy = Command::new("/sbin/debugfs");
            copy.arg("-R").arg(format!("rdump / {}", tree.display()));
            output(copy.arg(format!("{}?offset={PARTITION}", disk.display())))?;
            ensure!(tree.join("usr/bin/gcc").exists(), "debugfs has not copied the disk");
            fs::write(&copied, &record).context("cannot write a record")?;
        }
        let work_disk = work.with_extension("img");
        if work_disk.exists() {
            fs::remove_file(&work_disk).context("cannot remove an old disk")?;
        }
        let mut make = Command::new("/sbin/mke2fs");
        make.args(["-q", "-t", "ext4", "-d"]).args([work, &work_disk]).arg("16M");
        output(&mut make)?;
        Ok(Self { disk, tree, work: work.to_owned(), work_disk })
    }

    /// Runs `userland` in an environment, with these environment variables, and returns its output.
    pub fn run(
        &self,
        environment: Environment,
        kernels: &Kernels,
        variables: Variables<'_>,
    ) -> Result<String> {
        let parameters = kernel_parameters(variables);
        let first = |device: &str| parameters.clone() + &FIRST.replace("DISK", device);
        let virtio = first("/dev/vdb");
        let mut command = match environment {
            Environment::Native => {
                let mut command = self.native()?;
                command.envs(variables.iter().copied());
                command
            }
            Environment::Parador => {
                let mut run = run_parador(kernels);
                for disk in [&self.disk, &self.work_disk] {
                    run.arg("-d").arg(format!("path={},ro=on", disk.display()));
                }
                run.args(["-p", &format!("root=/dev/vda1 ro quiet {virtio}")]);
                run
            }
            Environment::Tcg => {
                let mut qemu = run_qemu(kernels);
                if let Some(initrd) = &kernels.tcg_initrd {
                    qemu.arg("-initrd").arg(initrd);
                }
                for disk in [&self.disk, &self.work_disk] {
                    let drive = format!("file={},if=virtio,format=raw,readonly=on", disk.display());
                    qemu.args(["-drive", &drive]);
                }
                qemu.arg("-append").arg(format!("{COMMAND_LINE} root=/dev/vda1 ro {virtio}"));
                qemu
            }
            Environment::Uml => {
                let mut uml = run_uml();
                uml.arg(format!("ubd0r={}", self.disk.display()));
                uml.arg(format!("ubd1r={}", self.work_disk.display()));
                uml.args(["root=/dev/ubda1", "ro", &first("/dev/ubdb")]);
                uml
            }
        };
        output(&mut command)
    }

    /// Runs in a chroot, with network, mount and PID namespaces of its own.
    fn native(&self) -> Result<Command> {
        let script = "mount --rbind /dev \"$1/dev\"; mount --rbind /proc \"$1/proc\"; \
                      mount -t tmpfs tmp \"$1/tmp\"; mount --bind \"$2\" \"$1/mnt\"; \
                      chroot \"$1\" ip link set lo up; shift 2; exec \"$@\"";
        let mut command = limited("unshare");
        command.args(["--mount", "--net"]);
        if output(Command::new("id").arg("-u"))?.trim() != "0" {
            command.arg("--map-root-user");
        }
        command.args(["sh", "-ec", script, "sh"]).args([&self.tree, &self.work]);
        command.arg("chroot").arg(&self.tree);
        command.args(["bash", "/mnt/userland", &CPUS.to_string()]);
        Ok(command)
    }
}

/// Returns the reason why User-Mode Linux cannot run; `None`: it can.
pub fn uml_lacks() -> Option<String> {
    let there = Command::new(UML).arg("--version").stdout(Stdio::null()).status();
    there.err().map(|error| format!("{UML} (package {UML_PACKAGE}): {error}"))
}

/// Returns the host memory in bytes that an idle VM takes beyond guest memory: the proportional set
/// size of each of its processes, and its page tables.
pub fn machine_bytes(kernels: &Kernels) -> Result<f64> {
    let mut run = run_parador(kernels);
    run.args(["-i", "busybox", "-p", "quiet"]);
    run.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null());
    let mut child = run.spawn().context("cannot start parador")?;
    let deadline = Instant::now() + Duration::from_secs(60);
    let output = child.stdout.take().context("no output")?;
    let shell = Transcript::follow("console", output).expect(PROMPT, deadline);
    let bytes = shell.and_then(|()| family_bytes(child.id()));
    child.kill().and_then(|()| child.wait()).context("cannot end parador")?;
    bytes
}

/// The same for a process and its descendants.
fn family_bytes(process: u32) -> Result<f64> {
    let read = |name: &str| {
        let path = format!("/proc/{process}/{name}");
        fs::read_to_string(&path).with_context(|| format!("cannot read {path}"))
    };
    let tables = kibibytes(&read("status")?, "VmPTE:");
    let mut bytes = 1024.0 * (share(&read("smaps")?) + tables);
    for child in read(&format!("task/{process}/children"))?.split_whitespace() {
        bytes += family_bytes(child.parse().context("no number of a process")?)?;
    }
    Ok(bytes)
}

/// Sum of the proportional set sizes in `smaps`, in KiB, without guest memory.
fn share(smaps: &str) -> f64 {
    let mut counted = true;
    let mut sum = 0.0;
    for line in smaps.lines() {
        // The first line of a mapping has addresses; the other lines have a name and a colon.
        match line.split_whitespace().next() {
            Some(word) if !word.ends_with(':') => counted = !line.contains(GUEST_MEMORY),
            _ if counted => sum += kibibytes(line, "Pss:"),
            _ => {}
        }
    }
    sum
}

/// Returns the number of a line `NAME  123 kB`.
fn kibibytes(text: &str, name: &str) -> f64 {
    let line = text.lines().find_map(|line| line.strip_prefix(name));
    let word = line.and_then(|line| line.split_whitespace().next());
    word.and_then(|word| word.parse().ok()).unwrap_or(0.0)
}

/// Runs a command that must succeed and returns its output.
pub fn output(command: &mut Command) -> Result<String> {
    let output = command
        .stdin(Stdio::null())
        .output()
        .with_context(|| format!("cannot start {command:?}"))?;
    ensure!(
        output.status.success(),
        "{command:?} failed ({}):\n{}\n{}",
        output.status,
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr)
    );
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

/// Returns a source archive with this digest; downloads it once.
pub fn archive(url: &str, digest: &str) -> Result<PathBuf> {
    let name = url.rsplit('/').next().context("no name")?;
    let path = guest::folder().join(name);
    if !path.exists() {
        // apt-helper knows apt's proxies and checks the digest.
        let mut fetch = Command::new("/usr/lib/apt/apt-helper");
        output(fetch.arg("download-file").args([url.as_ref(), path.as_os_str()]).arg(digest))?;
    }
    Ok(path)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_what_the_program_prints() {
        let mut times = Times::default();
        for median in [3.0, 1.0, 2.0, 5.0, 4.0] {
            times.read(&format!("[ 0.1] noise\nHB fork {median} 0.5 9\nHB broken\n"));
        }
        assert_eq!(times.median("fork").unwrap(), (3.0, 4.0 / 3.0));
        assert_eq!(times.best("fork").unwrap(), 0.5);
        assert!(times.median("pipe").is_err());
    }

    #[test]
    fn guest_memory_is_not_counted() {
        let smaps = "1000-2000 rw-p 0 00:00 0 [heap]\nSize: 8 kB\nPss: 5 kB\nPss_Dirty: 5 kB\n\
                     3000-4000 rw-s 0 00:01 7 /memfd:parador-guest (deleted)\nPss: 70 kB\n\
                     5000-6000 rw-s 0 00:01 8 /memfd:parador-shared (deleted)\nPss: 2 kB\n";
        assert_eq!(share(smaps), 7.0);
        assert_eq!(kibibytes("VmRSS: 5 kB\nVmPTE:\t  12 kB\n", "VmPTE:"), 12.0);
    }
}
