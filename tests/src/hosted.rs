//! Hosted VMs without KVM: `parador run` with the kernel of `parador kernel build`. No QEMU.

pub mod addresses;
pub mod commands;
pub mod control;
pub mod counters;
pub mod debugger;
pub mod disks;
pub mod durability;
pub mod escape;
pub mod exec;
pub mod features;
pub mod host;
pub mod linux;
pub mod memory;
pub mod names;
pub mod net;
pub mod observed;
pub mod oci;
pub mod package;
pub mod qemu;
pub mod remains;
pub mod setup;
pub mod share;
pub mod tracing;
pub mod vsock;
pub mod wedge;
pub mod words;

use crate::previrt::Kernel;
use crate::system::{artifacts, parador};
use crate::transcript::ensure_lacks;
use anyhow::{Context, Result, bail, ensure};
use rustix::io::ioctl_fionread;
use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};
use tempfile::TempDir;

/// Path of a kernel to use instead of building one; `dummy.ko` is beside it.
const KERNEL: &str = "PARADOR_HOSTED_KERNEL";
/// Time limit of a VM on a busy host, in seconds.
pub const LIMIT: u32 = 120;
/// Program of a VM's processes.
const WEDGE: &str = "parador-wedge";
/// Prompt of the shell.
pub const PROMPT: &str = "guest:/root #";
/// Time limit for a process to disappear.
const GONE: Duration = Duration::from_secs(10);
/// Time limit for the start of a guest: under a second on an idle host, half a minute beside eight
/// builds on two CPUs.
const SLOW: Duration = Duration::from_secs(150);
/// Command of a guest that carries out the script on its first disk.
const RUN_SCRIPT: &str = "mkdir -p /mnt; mount /dev/vda /mnt; sh -e /mnt/script";
/// Texts of messages with an error number in place of its name.
const NUMBERS: [&str; 5] = ["os error", "Errno(", ": error ", "(error ", "with error "];
/// Texts that Linux prints when it detects a kernel bug.
const WRONG: [&str; 4] = ["BUG:", "WARNING:", "Oops", "Call Trace"];

/// The pre-virtualized kernel.
pub fn kernel() -> Result<PathBuf> {
    match std::env::var_os(KERNEL) {
        Some(path) => Ok(path.into()),
        None => Ok(Kernel::get()?.vmlinux()),
    }
}

/// A module of the kernel.
fn dummy() -> Result<PathBuf> {
    match std::env::var_os(KERNEL) {
        Some(path) => Ok(Path::new(&path).with_file_name("dummy.ko")),
        None => Kernel::get()?.dummy(),
    }
}

/// Makes a disk of this many MiB with a script and files.
fn make_disk(path: &Path, mib: u64, script: &str, files: &[&Path]) -> Result<()> {
    let tree = TempDir::with_prefix("parador-test-").context("cannot make a folder")?;
    fs::write(tree.path().join("script"), script).context("cannot write the script")?;
    for file in files {
        let name = file.file_name().context("a file without name")?;
        fs::copy(file, tree.path().join(name)).with_context(|| format!("no {}", file.display()))?;
    }
    File::create(path).and_then(|file| file.set_len(mib << 20)).context("cannot make a disk")?;
    let mut make = Command::new("mke2fs");
    succeed(make.args(["-q", "-t", "ext4", "-d"]).args([tree.path(), path]))
}

/// A folder with the inputs of VMs.
pub struct Rig {
    folder: TempDir,
    kernel: PathBuf,
}

/// Exit status and output of a VM.
#[derive(Debug)]
pub struct Ended {
    code: i32,
    console: String,
    messages: String,
}

/// Console without a warning of Linux 6.1 after its power-down: it may report free pages to its
/// balloon, which it has shut down (docs/CAVEATS.md).
fn judged(console: &str) -> &str {
    match console.split_once("reboot: Power down") {
        Some((before, after)) if after.contains("virtballoon_free_page_report+") => before,
        _ => console,
    }
}

impl Ended {
    /// The exit code.
    pub fn code(&self) -> i32 {
        self.code
    }

    /// Checks the exit code and the texts, and that Linux detected no bug.
    pub fn well(self, code: i32, texts: &[&str]) -> Result<Self> {
        ensure_lacks(&self.console, &WRONG).with_context(|| self.messages.clone())?;
        self.has(code, texts)
    }

    /// Checks that none of these texts appeared, but in the warning of [`judged`].
    pub fn never(&self, texts: &[&str]) -> Result<()> {
        ensure_lacks(judged(&self.console), texts)
    }

    fn has(self, code: i32, texts: &[&str]) -> Result<Self> {
        let all = format!("{}\n{}", self.console, self.messages);
        if let Some(number) = NUMBERS.iter().find(|number| self.messages.contains(**number)) {
            bail!("`{number}`: a message has a number in place of a cause:\n{}", self.messages);
        }
        ensure!(self.code == code, "exit code {}, not {code}:\n{all}", self.code);
        if let Some(missing) = texts.iter().find(|text| !all.contains(**text)) {
            bail!("`{missing}` did not appear:\n{all}");
        }
        Ok(self)
    }
}

impl Rig {
    /// Everything that a test needs to run VMs.
    pub fn new() -> Result<Self> {
        let folder = TempDir::with_prefix("parador-test-").context("cannot make a folder")?;
        Ok(Self { folder, kernel: kernel()? })
    }

    /// The folder.
    pub fn folder(&self) -> &Path {
        self.folder.path()
    }

    /// The kernel.
    pub fn kernel(&self) -> &Path {
        &self.kernel
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// A module of the kernel's own, by its path.
    fn module(&self, path: &str) -> Result<PathBuf> {
        let versions = self.kernel.with_file_name("modules").join("lib/modules");
        let mut versions = fs::read_dir(&versions).context("the kernel has no modules")?;
        let version = versions.next().context("the kernel has no modules")?;
        Ok(version.context("the kernel has no modules")?.path().join(path))
    }

    /// A VM without options, but a time limit in seconds.
    pub fn bare(&self, limit: u32) -> Command {
        let mut command = parador(self.folder.path());
        command.arg("run").arg(&self.kernel).args(["--timeout", &format!("{limit}s")]);
        // Also where KVM could be used.
        command.args(["--backend", "process"]);
        command
    }

    /// A VM with a shell.
    pub fn run(&self) -> Command {
        self.run_for(LIMIT)
    }

    /// A VM with a shell and a time limit in seconds.
    fn run_for(&self, limit: u32) -> Command {
        let mut command = self.bare(limit);
        command.args(["-i", "busybox"]);
        command
    }

    /// A VM that runs a script from its first disk, which also has these files. The end of the
    /// script ends the VM.
    pub fn script(&self, text: &str, files: &[&Path]) -> Result<Command> {
        self.script_with(LIMIT, "", text, files)
    }

    /// The same with a time limit in seconds and a word on the kernel command line.
    pub fn script_with(
        &self,
        limit: u32,
        word: &str,
        text: &str,
        files: &[&Path],
    ) -> Result<Command> {
        self.disk("disk.img", text, files)?;
        let mut command = self.run_for(limit);
        command.args(["-d", "disk.img", "-p", &format!("{word} parador.run=\"{RUN_SCRIPT}\"")]);
        Ok(command)
    }

    /// Returns a command with a limit of resources, as the shell's `ulimit` takes it.
    pub fn limited(&self, limit: &str, inner: &Command) -> Command {
        let mut machine = Command::new("sh");
        machine.args(["-c", &format!("ulimit {limit}; exec \"$@\""), "sh"]);
        machine.arg(inner.get_program()).args(inner.get_args()).current_dir(self.folder());
        machine.envs(inner.get_envs().filter_map(|(name, value)| Some((name, value?))));
        machine
    }

    /// Makes a disk with a script and files.
    pub fn disk(&self, name: &str, script: &str, files: &[&Path]) -> Result<()> {
        make_disk(&self.path(name), 96, script, files)
    }

    /// Checks that the file system of a disk has no error.
    fn check_disk(&self, name: &str) -> Result<()> {
        // The journal of a VM that was switched off is replayed first.
        let mut check = Command::new("e2fsck");
        check.args(["-fp"]).arg(self.path(name));
        let status = check.stdout(Stdio::null()).status().context("cannot start e2fsck")?;
        // 1: it has done so.
        ensure!(matches!(status.code(), Some(0 | 1)), "e2fsck: {status}");
        Ok(())
    }
}

/// A guest kernel that makes a forbidden system call of the host ends its own VM only.
pub fn escapes() -> Result<()> {
    const READ: u32 = 0;
    const WRITE: u32 = 1;
    const MMAP: u32 = 9;
    const GETRANDOM: u32 = 318;
    /// Signal number of an unhandled fault of a guest process.
    const KILLED: i32 = 81;
    let rig = Rig::new()?;
    let module = Kernel::get()?.check_host();
    let ask = |call: u32, arguments: &str| {
        let script = format!("insmod /mnt/check_host.ko call={call} {arguments}; echo continues\n");
        end(&mut rig.script(&script, &[&module])?, "")
    };
    ask(GETRANDOM, "")?.well(0, &["host: call 318 gives 0", "continues"])?;
    // Nothing is written to the console, the disk or shared memory; of mappings, none but of guest
    // memory or of nothing.
    for (call, arguments) in [(READ, "first=0"), (WRITE, "first=1"), (MMAP, "fourth=17 fifth=4")] {
        ask(call, arguments)?.has(KILLED, &["seccomp filter (signal 31, SIGSYS)"])?;
    }
    // open, socket, clone, execve, kill, ptrace, prctl, mount, openat, process_vm_writev,
    // io_uring_setup, pidfd_getfd
    for call in [2, 41, 56, 59, 62, 101, 157, 165, 257, 311, 425, 438] {
        let ended = ask(call, "")?.has(KILLED, &["signal 31"])?;
        ensure!(!ended.console.contains("continues"), "call {call}:\n{}", ended.console);
    }
    Ok(())
}

/// The processes of a VM have neither files nor networks nor capabilities; if the host refuses
/// that, the user's option decides.
pub fn sandbox() -> Result<()> {
    let rig = Rig::new()?;
    rig.disk("disk.img", "", &[])?;
    let network = |process: &str| fs::read_link(format!("/proc/{process}/ns/net"));
    let outside = network("self").context("no namespaces")?;
    for (which, is_confined) in [("strict", true), ("off", false)] {
        let mut child = start(rig.run().args(["-d", "disk.img", "--sandbox", which]))?;
        let mut numbered = false;
        let all = children(&child)?;
        only_guests_have_code(&all).with_context(|| which.to_owned())?;
        for process in all.into_iter().skip(1) {
            let status = fs::read_to_string(format!("/proc/{process}/status"))
                .with_context(|| format!("no process {process}"))?;
            let has = |text: &str| status.contains(text);
            ensure!(has("NoNewPrivs:\t1") && has("Seccomp:\t2"), "{which}:\n{status}");
            ensure!(has("CapEff:\t0000000000000000"), "{which}:\n{status}");
            ensure!(has("CapPrm:\t0000000000000000"), "{which}:\n{status}");
            // On the host, and in a namespace of those that the device process makes.
            let numbers = status.lines().find_map(|line| line.strip_prefix("NSpid:"));
            numbered |= numbers.is_some_and(|numbers| numbers.split_whitespace().count() > 1);
            // Only the superuser may look.
            if let Ok(inside) = network(&process.to_string()) {
                ensure!((inside != outside) == is_confined, "{which}: {inside:?}");
                let files = fs::read_dir(format!("/proc/{process}/root"));
                let is_empty = files.context("no root folder")?.next().is_none();
                ensure!(is_empty == is_confined, "{which}: files of process {process}");
            }
        }
        ensure!(numbered == is_confined, "{which}: a namespace of processes: {numbered}");
        drop(child.stdin.take());
        succeed(Command::new("kill").arg(child.id().to_string()))?;
        child.wait().context("cannot wait for parador")?;
    }
    // A host that refuses namespaces.
    let none = "echo 0 >/proc/sys/user/max_user_namespaces && exec \"$@\"";
    for (which, code, text) in [
        ("strict", 69, "cannot enter the sandbox: namespaces: No space left on device (ENOSPC)"),
        ("on", 0, "Power down"),
    ] {
        let run = rig.run();
        let mut command = Command::new("unshare");
        command.args(["--user", "--map-root-user", "sh", "-c", none, "sh"]);
        command.arg(run.get_program()).args(run.get_args()).current_dir(rig.folder.path());
        command.envs(run.get_envs().filter_map(|(name, value)| Some((name, value?))));
        command.args(["--sandbox", which, "-p", "parador.run=true"]);
        end(&mut command, "")?.has(code, &[text])?;
    }
    Ok(())
}

/// Only guest processes map memory executable that the guest can write; the device process and the
/// disk processes do not. None of them has the environment of the user who has started the VM.
fn only_guests_have_code(all: &[u32]) -> Result<()> {
    let mut with_code = Vec::new();
    for (index, process) in all.iter().enumerate().skip(1) {
        // Only the superuser may look.
        let Ok(maps) = fs::read_to_string(format!("/proc/{process}/maps")) else { return Ok(()) };
        let is_code = |line: &str| {
            let rights = line.split_whitespace().nth(1).unwrap_or_default();
            rights.contains('x') && line.contains("memfd:parador")
        };
        if maps.lines().any(is_code) {
            with_code.push(index);
        }
        let environment = fs::read(format!("/proc/{process}/environ"));
        let environment = environment.context("no environment")?;
        ensure!(environment.is_empty(), "process {process}: {environment:?}");
    }
    // The device process comes first, then that of the disk, or two.
    let first = with_code.first().copied().unwrap_or_default();
    ensure!(matches!(first, 3 | 4), "processes {with_code:?} of {all:?} have a guest's code");
    Ok(())
}

/// Runs a VM to its end with this input.
pub fn end(command: &mut Command, typed: &str) -> Result<Ended> {
    let mut child = start(command)?;
    if let Some(mut input) = child.stdin.take() {
        // The caller checks a VM that ends before it reads its input.
        let _ = input.write_all(typed.as_bytes());
    }
    ended(child)
}

/// Waits for the end of a VM.
pub fn ended(child: Child) -> Result<Ended> {
    let output = child.wait_with_output().context("cannot wait for parador")?;
    let text = |bytes| String::from_utf8_lossy(bytes).replace('\r', "");
    Ok(Ended {
        code: output.status.code().context("parador was killed")?,
        console: text(&output.stdout),
        messages: text(&output.stderr),
    })
}

/// Starts a command with pipes.
pub fn start(command: &mut Command) -> Result<Child> {
    command
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .context("cannot start parador through setpriv")
}

fn succeed(command: &mut Command) -> Result<()> {
    let output = command.output().with_context(|| format!("cannot start {command:?}"))?;
    let errors = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "{command:?} failed ({}): {errors}", output.status);
    Ok(())
}

/// A shell that loses no input typed before its start; an exit code from the guest.
pub fn shell() -> Result<()> {
    let rig = Rig::new()?;
    end(&mut rig.run(), "echo $((6*7)) is\nuname -r\nmachine-exit 7\n")?
        .well(7, &["\n42 is\n", PROMPT, "-parador\n", "the guest ended with code 7"])?;
    end(&mut rig.run(), "poweroff\n")?.well(0, &["the guest powered off"])?;
    // Quotes, spaces and the end of a command are the user's.
    let quoted = "parador.run=\"echo \\\"two  words\\\" 'and  two'; machine-exit 5\" behind";
    end(rig.run().args(["-p", quoted]), "")?.well(5, &["two  words and  two\n"])?;
    // Standard output has the guest's console only; SIGUSR1 without `--metrics` ends nothing.
    let mut child = start(rig.run().args([
        "-q",
        "-p",
        "quiet parador.run=\"echo it runs; sleep 2; echo it ends\"",
    ]))?;
    net::wait_for(&mut child, "it runs")?;
    succeed(Command::new("kill").args(["-USR1", &child.id().to_string()]))?;
    let output = child.wait_with_output().context("cannot wait for parador")?;
    let printed = String::from_utf8_lossy(&output.stdout);
    ensure!(output.status.success() && printed.contains("it ends"), "quiet: {output:?}");
    ensure!(output.stderr.is_empty(), "quiet: {}", String::from_utf8_lossy(&output.stderr));
    let long = "x".repeat(2048);
    end(rig.run().args(["-p", &long]), "")?.has(65, &["(limit 2047)"])?;
    // Without input the guest runs on.
    end(rig.run().args(["-p", "parador.run=false"]), "")?.well(1, &[])?;
    let mut output = rig.run();
    output.args(["-p", "parador.run=\"seq 20000\""]);
    let lines = end(&mut output, "")?.well(0, &[])?.console;
    let counted = lines.lines().filter_map(|line| line.parse::<u32>().ok());
    ensure!(counted.eq(1..=20_000), "output is missing or mixed up:\n{lines}");
    Ok(())
}

/// Ends caused by the guest, each with its exit code.
pub fn ends() -> Result<()> {
    let rig = Rig::new()?;
    let typed = |line: &str, text: &str| end(rig.run().args(["-p", line]), text);
    typed("", "echo c >/proc/sysrq-trigger\n")?
        .has(80, &["Kernel panic - not syncing", "the guest kernel panicked"])?;
    typed("parador.run=\"reboot -f\"", "")?.has(83, &["the guest reset (exit code 83"])?;
    typed("reboot=triple parador.run=\"reboot -f\"", "")?.has(81, &["triple fault"])?;
    let mut machine = parador(rig.folder.path());
    machine.arg("run").arg(&rig.kernel).args(["-i", "busybox", "--timeout", "3s"]);
    machine.args(["--backend", "process"]);
    end(&mut machine, "")?.has(124, &["time limit"])?;
    let mut full = rig.run();
    full.stdin(Stdio::null()).stdout(File::create("/dev/full").context("no /dev/full")?);
    let output = full.output().context("cannot start parador")?;
    ensure!(output.status.code() == Some(71), "full output: {output:?}");
    unread_output(&rig)
}

/// A VM whose output has no room ends by its time limit and by a signal.
fn unread_output(rig: &Rig) -> Result<()> {
    let limited = |time: &str| {
        let mut command = parador(rig.folder.path());
        command.arg("run").arg(&rig.kernel).args(["-i", "busybox", "--backend", "process"]);
        command.args(["--timeout", time, "-p", "parador.run=\"yes\""]);
        command
    };
    let mut child = start(&mut limited("20s"))?;
    fills(&child)?;
    ensure!(ended_within(&mut child, 4 * GONE)? == Some(124), "the time limit had no effect");
    let mut child = start(&mut limited("120s"))?;
    fills(&child)?;
    succeed(Command::new("kill").arg(child.id().to_string()))?;
    ensure!(ended_within(&mut child, GONE)? == Some(143), "the signal had no effect");
    Ok(())
}

/// Waits until the pipe of a process' output takes no more. Its pages need not be full.
fn fills(child: &Child) -> Result<()> {
    let output = child.stdout.as_ref().context("no pipe")?;
    let length = || ioctl_fionread(output).context("cannot examine the pipe");
    let begun = Instant::now();
    let mut before = 0;
    loop {
        sleep(Duration::from_secs(1));
        let now = length()?;
        // More than a guest without output prints.
        if now == before && now > 30_000 {
            return Ok(());
        }
        ensure!(begun.elapsed() < 3 * GONE, "the pipe was not filled: {now} bytes");
        before = now;
    }
}

/// Waits for the end of a process; `None`: it had to be killed.
fn ended_within(child: &mut Child, limit: Duration) -> Result<Option<i32>> {
    let begun = Instant::now();
    while begun.elapsed() < limit {
        if let Some(status) = child.try_wait().context("cannot wait for parador")? {
            return Ok(status.code());
        }
        sleep(Duration::from_millis(50));
    }
    child.kill().context("cannot kill parador")?;
    child.wait().context("cannot wait for parador")?;
    Ok(None)
}

/// Stress of all kinds of system calls for some seconds, on one vCPU and on two.
pub fn stress(seconds: u32) -> Result<()> {
    let rig = Rig::new()?;
    let script = format!("/mnt/linux-stress {seconds}\n");
    for cpus in ["1", "2"] {
        let mut machine = rig.script(&script, &[&stress_program()])?;
        end(machine.args(["-c", cpus]), "")?.well(0, &["stress: all well"])?;
        rig.check_disk("disk.img")?;
    }
    Ok(())
}

fn stress_program() -> PathBuf {
    artifacts().join("linux-stress")
}

/// When any process of a VM is killed, the whole VM ends and leaves nothing.
pub fn kills() -> Result<()> {
    let rig = Rig::new()?;
    rig.disk("disk.img", "", &[])?;
    for (victim, signal, code) in [
        (0, "KILL", None),
        (1, "KILL", Some(137)),
        // A worker of the disk, the first processes of both virtual CPUs, the last one.
        (2, "KILL", Some(137)),
        (4, "KILL", Some(137)),
        (5, "KILL", Some(137)),
        (usize::MAX, "KILL", Some(137)),
        (0, "TERM", Some(143)),
        (0, "INT", Some(130)),
    ] {
        let child = start(rig.run().args(["-d", "disk.img", "-c", "2"]))?;
        let all = children(&child)?;
        let process = all.get(victim).or(all.last()).copied().context("no process")?;
        killed(child, &all, process, signal, code).with_context(|| format!("victim {victim}"))?;
    }
    Ok(())
}

/// Sends a signal to one of a machine's processes, and waits for its end with this code, which
/// leaves none of them.
pub fn killed(
    mut child: Child,
    all: &[u32],
    process: u32,
    signal: &str,
    code: Option<i32>,
) -> Result<()> {
    succeed(Command::new("kill").args([&format!("-{signal}"), &process.to_string()]))?;
    drop(child.stdin.take());
    let output = child.wait_with_output().context("cannot wait for parador")?;
    let said = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.code() == code, "{signal}: {}\n{said}", output.status);
    let deadline = Instant::now() + GONE;
    while let Some(left) = all.iter().find(|process| is_alive(**process)) {
        ensure!(Instant::now() < deadline, "{signal}: process {left} has stayed");
        std::thread::sleep(Duration::from_millis(20));
    }
    Ok(())
}

/// Returns the device process of a VM and its children, or nothing yet.
pub fn vm_processes(child: &Child) -> Vec<u32> {
    let below = |process: u32| -> Vec<u32> {
        let path = format!("/proc/{process}/task/{process}/children");
        let text = fs::read_to_string(path).unwrap_or_default();
        text.split_whitespace().filter_map(|number| number.parse().ok()).collect()
    };
    let is_device = |process: &u32| {
        // Until it has taken its name it may still be a copy of `parador`, which waits for it.
        let name = fs::read_to_string(format!("/proc/{process}/comm"));
        name.is_ok_and(|name| name.trim() == WEDGE)
    };
    let device = below(child.id()).into_iter().find(is_device);
    device.into_iter().flat_map(|device| std::iter::once(device).chain(below(device))).collect()
}

/// The processes of a machine whose shell is there: `parador`, the device process, those of the
/// disk, the guest's.
pub fn children(child: &Child) -> Result<Vec<u32>> {
    let deadline = Instant::now() + GONE;
    loop {
        let mut all = vec![child.id()];
        all.extend(vm_processes(child));
        // The guest's own programs have begun.
        if all.len() > 6 {
            return Ok(all);
        }
        ensure!(Instant::now() < deadline, "the machine has only the processes {all:?}");
        std::thread::sleep(Duration::from_millis(50));
    }
}

fn is_alive(process: u32) -> bool {
    let stat = fs::read_to_string(format!("/proc/{process}/stat")).unwrap_or_default();
    stat.rsplit(')').next().is_some_and(|rest| !rest.is_empty() && !rest.starts_with(" Z"))
}

/// Kernels that have been tampered with, each with its reason.
pub fn refusals() -> Result<()> {
    let rig = Rig::new()?;
    let objcopy = |name: &str, arguments: &[&str]| {
        let path = rig.path(name);
        succeed(Command::new("objcopy").args(arguments).arg(&rig.kernel).arg(&path))?;
        Ok::<_, anyhow::Error>(path)
    };
    let refused = |kernel: &Path, code: i32, text: &str| {
        let mut command = parador(rig.folder.path());
        command.arg("run").arg(kernel).args(["-i", "busybox", "--timeout", "20s"]);
        command.args(["--backend", "process"]);
        end(&mut command, "")?.has(code, &[text]).map(drop)
    };
    let rename = |to: &str| format!("parador_sites_1={to}");
    let none = objcopy("none", &["--rename-section", &rename("sites")])?;
    refused(&none, 65, "not pre-virtualized")?;
    let newer = objcopy("newer", &["--rename-section", &rename("parador_sites_2")])?;
    refused(&newer, 65, "build the kernel with this version")?;
    let stripped = objcopy("stripped", &["--remove-relocations=*"])?;
    refused(&stripped, 65, "do not strip it")?;

    let whole = fs::read(&rig.kernel).context("cannot read the kernel")?;
    let short = rig.path("short");
    fs::write(&short, &whole[..whole.len() / 2]).context("cannot write a file")?;
    refused(&short, 65, "not a valid ELF file")?;
    // An instruction that is no site's where the first site is.
    let text = succeed_with(Command::new("objdump").args(["-h", "-w"]).arg(&rig.kernel))?;
    let (table, address) = place(&text, "parador_sites_1").context("no table of sites")?;
    let record = whole.get(table..table + 4).context("no record")?;
    let offset = i32::from_le_bytes(record.try_into().context("no record")?);
    let site = address.wrapping_add_signed(offset.into());
    let (code, start) = place(&text, ".text").context("no code")?;
    let mut bytes = whole;
    let at = code + usize::try_from(site - start).context("the first site is elsewhere")?;
    bytes.get_mut(at..at + 2).context("no site")?.copy_from_slice(&[0x0f, 0x0b]);
    let odd = rig.path("odd");
    fs::write(&odd, &bytes).context("cannot write a file")?;
    refused(&odd, 65, "unknown instruction at")?;
    Ok(())
}

/// Offset in the file and address of a section, as `objdump -h -w` prints it.
fn place(text: &str, name: &str) -> Option<(usize, u64)> {
    let line = text.lines().find(|line| line.split_whitespace().nth(1) == Some(name))?;
    let mut words = line.split_whitespace().skip(3);
    let address = u64::from_str_radix(words.next()?, 16).ok()?;
    let offset = usize::from_str_radix(words.nth(1)?, 16).ok()?;
    Some((offset, address))
}

fn succeed_with(command: &mut Command) -> Result<String> {
    let output = command.output().with_context(|| format!("cannot start {command:?}"))?;
    ensure!(output.status.success(), "{command:?} failed ({})", output.status);
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

#[cfg(test)]
mod tests {
    use super::judged;

    #[test]
    fn only_a_late_report_of_free_pages_is_left_out() {
        let late = "up\nreboot: Power down\nWARNING: virtballoon_free_page_report+0x107/0x120\n";
        assert_eq!(judged(late), "up\n");
        for other in ["WARNING: virtballoon_free_page_report+0x1", "reboot: Power down\nWARNING: x"]
        {
            assert_eq!(judged(other), other);
        }
    }
}
