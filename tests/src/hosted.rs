//! Hosted VMs without KVM: `parador run` with the kernel of `parador kernel build`. No QEMU.

pub mod addresses;
pub mod commands;
pub mod debugger;
pub mod durability;
pub mod escape;
pub mod host;
pub mod net;
pub mod observed;
pub mod remains;
pub mod setup;
pub mod vsock;
pub mod words;

use crate::previrt::Kernel;
use crate::system::{artifacts, parador};
use anyhow::{Context, Result, bail, ensure};
use std::fs::{self, File};
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Command, Stdio};
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

impl Ended {
    /// The exit code.
    pub fn code(&self) -> i32 {
        self.code
    }

    /// Checks the exit code and the texts, and that Linux detected no bug.
    pub fn well(self, code: i32, texts: &[&str]) -> Result<Self> {
        if let Some(wrong) = WRONG.iter().find(|wrong| self.console.contains(**wrong)) {
            bail!("`{wrong}` appeared:\n{}\n{}", self.console, self.messages);
        }
        self.has(code, texts)
    }

    /// Checks that none of these texts appeared.
    pub fn never(&self, texts: &[&str]) -> Result<()> {
        let wrong = texts.iter().find(|text| self.console.contains(**text));
        wrong.map_or(Ok(()), |wrong| bail!("`{wrong}` appeared:\n{}", self.console))
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

    /// A module of the kernel.
    fn dummy(&self) -> Result<PathBuf> {
        match std::env::var_os(KERNEL) {
            Some(_) => Ok(self.kernel.with_file_name("dummy.ko")),
            None => Kernel::get()?.dummy(),
        }
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
        let start = "mkdir -p /mnt; mount /dev/vda /mnt; sh -e /mnt/script";
        command.args(["-d", "disk.img", "-p", &format!("{word} parador.run=\"{start}\"")]);
        Ok(command)
    }

    /// Makes a disk with a script and files.
    pub fn disk(&self, name: &str, script: &str, files: &[&Path]) -> Result<()> {
        let tree = self.path("tree");
        fs::create_dir_all(&tree).context("cannot make a folder")?;
        fs::write(tree.join("script"), script).context("cannot write the script")?;
        for file in files {
            let name = file.file_name().context("a file without name")?;
            fs::copy(file, tree.join(name)).with_context(|| format!("no {}", file.display()))?;
        }
        let path = self.path(name);
        File::create(&path)
            .and_then(|file| file.set_len(96 << 20))
            .context("cannot make a disk")?;
        let mut make = Command::new("mke2fs");
        succeed(make.args(["-q", "-t", "ext4", "-d"]).args([&tree, &path]))
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

/// The wedge patches the kernel's code on its behalf; without that the kernel does so itself.
pub fn functions() -> Result<()> {
    let rig = Rig::new()?;
    let script = "for on in 1 0 1; do echo $on >/proc/sys/kernel/task_delayacct; done
        insmod /mnt/dummy.ko numdummies=3; rmmod dummy; echo changed\n";
    let dummy = rig.dummy()?;
    for (options, counted) in [(&[][..], true), (&["--without", "functions"][..], false)] {
        let mut run = rig.script(script, &[&dummy])?;
        let ended = end(run.arg("--counters").args(options), "")?.well(0, &["changed"])?;
        let replaced = ended.messages.lines().any(|line| line.ends_with(" functions"));
        ensure!(replaced == counted, "{options:?}:\n{}", ended.messages);
    }
    Ok(())
}

/// Frequent system calls cause no signal: those that load their number as an immediate, and
/// read(2), whose number is 0.
pub fn calls() -> Result<()> {
    const BYTES: u64 = 50_000;
    let rig = Rig::new()?;
    let copy = format!("dd if=/dev/zero bs=1 count={BYTES} 2>/dev/null | wc -c");
    for (options, by_signal) in [(&[][..], false), (&["--without", "call-sites"][..], true)] {
        let mut run = rig.script(&format!("{copy}\n"), &[])?;
        let ended = end(run.arg("--counters").args(options), "")?.well(0, &[&BYTES.to_string()])?;
        let count = |name: &str| {
            let line = ended.messages.lines().find(|line| line.ends_with(name));
            line.and_then(|line| line.split_whitespace().rev().nth(name.split(' ').count()))
                .and_then(|count| count.parse::<u64>().ok())
                .with_context(|| format!("no count of {name}:\n{}", ended.messages))
        };
        let signals = count("calls by signal")?;
        // `dd` reads and writes each byte.
        ensure!((signals > 2 * BYTES) == by_signal, "{options:?}: {signals} signals");
        if !by_signal {
            let without = count("calls without a signal")?;
            ensure!(without > 2 * BYTES, "{without} calls without a signal");
            ensure!(signals < BYTES / 5, "{signals} calls by signal");
        }
    }
    Ok(())
}

/// Each optimisation can be switched off without another effect than speed.
pub fn ladder() -> Result<()> {
    const ALL: &str = "fast-sites,call-sites,functions,batches,spaces,in-process";
    let rig = Rig::new()?;
    // Seconds in which even a busy host gets once through everything.
    for (seconds, options) in [
        (1, &["--without", "batches"][..]),
        (1, &["--without", "spaces"]),
        (3, &["--without", "in-process", "-c", "2"]),
        (6, &["--protection", "remap", "-c", "2"]),
        (6, &["--without", ALL, "--protection", "remap"]),
    ] {
        let script = format!("/mnt/linux-stress {seconds}\n");
        let mut run = rig.script(&script, &[&stress_program()])?;
        end(run.args(options), "")?.well(0, &[]).with_context(|| format!("{options:?}"))?;
    }
    // The end of a traced process is the machine's, with its code.
    let mut run = rig.run();
    run.args(["--without", "in-process", "-p", "parador.run=\"machine-exit 7\""]);
    end(&mut run, "")?.well(7, &["the guest ended with code 7"])?;
    Ok(())
}

/// Every store to a page table is annotated: starting, stopping and changing the memory of
/// programs, and modules.
pub fn profile() -> Result<()> {
    let rig = Rig::new()?;
    let mut run = rig.script("/mnt/linux-stress 2\n", &[&stress_program()])?;
    let ended = end(run.args(["--profile-writes", "profile"]), "")?;
    ended.well(0, &[])?;
    let report = fs::read_to_string(rig.path("profile")).context("no profile")?;
    // N by annotated instructions, M by others.
    let mut numbers = report.split_whitespace().filter_map(|word| word.parse::<u64>().ok());
    let (Some(annotated), Some(others)) = (numbers.next(), numbers.next()) else {
        bail!("the profile is not understood:\n{report}");
    };
    ensure!(annotated > 10_000, "few writes:\n{report}");
    // The page of a root that has been freed may get contents that look like entries.
    ensure!(others * 5000 <= annotated, "stores are not annotated:\n{report}");
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

/// Written data is found by the next VM; a read-only disk does not change.
pub fn disk() -> Result<()> {
    let rig = Rig::new()?;
    let write = "dd if=/dev/urandom of=/mnt/data bs=1M count=40 2>/dev/null
        md5sum /mnt/data >/mnt/sum; sync; echo 3 >/proc/sys/vm/drop_caches; md5sum -c /mnt/sum
        cat /sys/block/vda/serial; echo; fstrim -v /mnt || true; md5sum -c /mnt/sum; mount -o remount,ro /mnt\n";
    end(&mut rig.script(write, &[])?, "")?.well(0, &["/mnt/data: OK", "disk0"])?;
    rig.check_disk("disk.img")?;

    fs::rename(rig.path("disk.img"), rig.path("second.img")).context("cannot rename a disk")?;
    let read = "mkdir /second; mount -o ro /dev/vdb /second
        sed 's,/mnt,/second,' /second/sum | md5sum -c; cat /sys/block/vdb/serial; echo
        ! dd if=/dev/zero of=/dev/vdb bs=512 count=1
        for n in 1 2 3 4; do dd if=/dev/vdb of=/dev/null bs=64k & done; wait
        head -c 64 /dev/hwrng | wc -c\n";
    let before = fs::read(rig.path("second.img")).context("cannot read a disk")?;
    let mut machine = rig.script(read, &[])?;
    machine.args(["--disk", "path=second.img,ro=on,id=the second"]);
    end(&mut machine, "")?.well(0, &["/second/data: OK", "the second", "\n64\n"])?;
    let after = fs::read(rig.path("second.img")).context("cannot read a disk")?;
    ensure!(before == after, "a disk that is read only has changed");
    Ok(())
}

/// Two VMs cannot write to one disk; the end of a VM releases its disk.
pub fn disk_in_use() -> Result<()> {
    let rig = Rig::new()?;
    let mut first = rig.script("sleep 1000\n", &[])?;
    let mut child = start(&mut first)?;
    children(&child)?;
    let refused = end(rig.run().args(["-d", "disk.img"]), "")?;
    refused.has(71, &["is in use by another VM"])?;
    child.kill().and_then(|()| child.wait()).context("cannot end parador")?;
    end(rig.run().args(["-d", "disk.img"]), "poweroff\n")?.well(0, &["the guest powered off"])?;
    Ok(())
}

/// On a full host disk the guest gets I/O errors and the VM continues.
pub fn disk_full() -> Result<()> {
    let rig = Rig::new()?;
    let large = File::create(rig.path("large.img")).context("cannot make a disk")?;
    large.set_len(400 << 20).context("cannot make a disk")?;
    let script = "dd if=/dev/zero of=/dev/vdb bs=1M count=8 conv=fsync
        ! dd if=/dev/zero of=/dev/vdb bs=1M seek=390 count=8 conv=fsync
        echo continues\n";
    let mut inner = rig.script(script, &[])?;
    inner.args(["-m", "256M"]);
    // The limit of file sizes, in units of 512 bytes: between guest memory and the end of the disk.
    let mut machine = Command::new("sh");
    machine.args(["-c", "ulimit -f 650000; exec \"$@\" -d large.img", "sh"]);
    machine.arg(inner.get_program()).args(inner.get_args()).current_dir(rig.folder.path());
    machine.envs(inner.get_envs().filter_map(|(name, value)| Some((name, value?))));
    end(&mut machine, "")?.has(0, &["I/O error", "continues", "request failed"])?;
    Ok(())
}

/// A module can be loaded and unloaded.
pub fn module() -> Result<()> {
    let rig = Rig::new()?;
    let script = "for round in 1 2 3; do
            insmod /mnt/dummy.ko; ifconfig dummy0 up; ifconfig dummy0 down; rmmod dummy
        done; echo modules work\n";
    let dummy = rig.dummy()?;
    end(&mut rig.script(script, &[&dummy])?, "")?.well(0, &["modules work"])?;
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
    Ok(())
}

/// Crashing user programs get their signals.
pub fn crashes() -> Result<()> {
    let rig = Rig::new()?;
    let script = "set +e
        for way in null divide undefined breakpoint privileged kernel; do
            /mnt/linux-stress crash $way; echo $way $?
        done\n";
    end(&mut rig.script(script, &[&stress_program()])?, "")?.well(
        0,
        &[
            "\nnull 139\n",
            "\ndivide 136\n",
            "\nundefined 132\n",
            "\nbreakpoint 133\n",
            "\nprivileged 139\n",
            "\nkernel 139\n",
        ],
    )?;
    Ok(())
}

/// A looping user program does not starve others.
pub fn preemption() -> Result<()> {
    let rig = Rig::new()?;
    let script = "for n in 1 2 3; do (while :; do :; done) & done
        n=0; while [ $n -lt 20000 ]; do n=$((n+1)); done; sleep 0.1; ls / >/dev/null; echo counted\n";
    end(&mut rig.script(script, &[])?, "")?.well(0, &["counted"])?;
    Ok(())
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

/// Several virtual CPUs: the guest has them, its programs run on each, what they change of their
/// memory holds on all; code is changed and modules come and go meanwhile; a CPU can be taken out
/// and put back. They interrupt each other, or the device process does.
pub fn cpus() -> Result<()> {
    let rig = Rig::new()?;
    let dummy = rig.dummy()?;
    for (cpus, sandbox) in [(2, "off"), (2, "on"), (4, "on")] {
        let script = format!(
            "[ $(nproc) = {cpus} ]; cat /sys/devices/system/clocksource/clocksource0/current_clocksource
            for cpu in $(seq 0 {last}); do
                taskset -c $cpu grep Cpus_allowed_list: /proc/self/status
                taskset -c $cpu sh -c 'while :; do :; done' &
                eval loop$cpu=$!
            done
            sleep 0.5; kill $(jobs -p); wait || true
            /mnt/linux-stress 4 & stress=$!
            for round in 1 2 3; do
                insmod /mnt/dummy.ko; ifconfig dummy0 up; ifconfig dummy0 down; rmmod dummy
                for on in 1 0 1; do echo $on >/proc/sys/kernel/task_delayacct; done
            done
            wait $stress; echo stress ended
            for round in 1 2 3; do
                echo 0 >/sys/devices/system/cpu/cpu1/online; nproc | sed 's/^/without: /'
                echo 1 >/sys/devices/system/cpu/cpu1/online; [ $(nproc) = {cpus} ]
            done
            for kind in RES CAL TLB; do
                grep $kind: /proc/interrupts | tr -s ' ' | cut -d ' ' -f 2-{end}
            done\n",
            last = cpus - 1,
            end = cpus + 1,
        );
        let mut machine = rig.script(&script, &[&dummy, &stress_program()])?;
        machine.args(["-c", &cpus.to_string(), "--sandbox", sandbox]);
        let each = format!("Cpus_allowed_list:\t{}\n", cpus - 1);
        let without = format!("without: {}\n", cpus - 1);
        let ended = end(&mut machine, "")?
            .well(0, &["\ntsc\n", &each, "stress: all well", "\nstress ended\n", &without])?;
        // All of them have been interrupted by others.
        let numbers = |line: &str| line.split(' ').map(|word| word.parse::<u32>().ok()).collect();
        let counts = ended.console.lines().filter_map(numbers);
        let counts: Vec<Vec<u32>> = counts.filter(|all: &Vec<_>| all.len() == cpus).collect();
        let all = counts.len() == 3 && counts.iter().flatten().all(|&count| count != 0);
        ensure!(all, "interrupts between {cpus} CPUs: {counts:?}\n{}", ended.console);
    }
    Ok(())
}

/// 32-bit programs, and `int $0x80` of 64-bit ones; where the host cannot, there is an error, and
/// nothing else is lost.
pub fn compat() -> Result<()> {
    let rig = Rig::new()?;
    let [short, long] = ["linux-compat-32", "linux-compat-64"].map(|name| artifacts().join(name));
    let script =
        "/mnt/linux-compat-64; for n in 1 2 3; do /mnt/linux-compat-32 & all=\"$all $!\"; done
        for one in $all; do wait $one; done; echo done\n";
    for cpus in ["1", "2"] {
        let mut machine = rig.script(script, &[&short, &long])?;
        let ended = end(machine.args(["-c", cpus]), "")?
            .well(0, &["64-bit code: all well", "old calls: all well", "\ndone"])?;
        let well = ended.console.matches("32-bit code: all well").count();
        ensure!(well == 3, "{well} of 3 are well:\n{}", ended.console);
    }
    let script = "/mnt/linux-compat-32 || echo refused; /mnt/linux-compat-64\n";
    let mut machine = rig.disk("disk.img", script, &[&short, &long]).map(|()| rig.run())?;
    let start =
        "ia32_emulation=off parador.run=\"mkdir -p /mnt; mount /dev/vda /mnt; sh /mnt/script\"";
    machine.args(["-d", "disk.img", "-p", start]);
    end(&mut machine, "")?.well(0, &["refused", "64-bit code: all well"])?;
    Ok(())
}

fn stress_program() -> PathBuf {
    artifacts().join("linux-stress")
}

/// Memory from the least to more than fits below 4 GiB; the host gives what is used of it. Programs
/// get it in pieces, if they may.
pub fn memory() -> Result<()> {
    let rig = Rig::new()?;
    for (size, least, most) in
        [("64M", 20_000, 64 << 10), ("321M", 250_000, 321 << 10), ("4G", 3_800_000, 4 << 20)]
    {
        let mut machine = rig.run();
        machine.args(["-m", size, "-p", "parador.run=\"grep MemTotal /proc/meminfo\""]);
        let ended = end(&mut machine, "")?.well(0, &[])?;
        let line = ended.console.lines().find_map(|line| line.strip_prefix("MemTotal:"));
        let words = line.and_then(|line| line.split_whitespace().next());
        let total: u64 = words.and_then(|word| word.parse().ok()).context("no MemTotal")?;
        ensure!((least..most).contains(&total), "{size}: {total} KiB");
    }
    let use_it = "mkdir /ram; mount -t tmpfs -o size=3600M ram /ram
        dd if=/dev/zero of=/ram/a bs=1M count=1200 2>/dev/null; md5sum </ram/a\n";
    let mut machine = rig.script(use_it, &[])?;
    // Of 1,200 MiB of zeros, in memory on both sides of the hole.
    machine.args(["-m", "4G"]);
    end(&mut machine, "")?.well(0, &["8c2297c9abaf3b724f6192f65efe9a89"])?;

    // A buffer of 1.9 MiB is too small for a large page: 475 pages, in pieces or one by one.
    let touch = "faults() { sed -n 's/^pgfault //p' /proc/vmstat; }; faults >/before
        dd if=/dev/zero of=/dev/null bs=1900k count=1 2>/dev/null
        echo took $(($(faults) - $(cat /before))) faults\n";
    for (how, expected) in [("always", 0..300), ("never", 475..800)] {
        let word = format!("transparent_hugepage={how}");
        let ended = end(&mut rig.script_with(LIMIT, &word, touch, &[])?, "")?.well(0, &[])?;
        let line = ended.console.lines().find_map(|line| line.strip_prefix("took "));
        let count = line.and_then(|line| line.split(' ').next()?.parse().ok());
        ensure!(count.is_some_and(|count| expected.contains(&count)), "{how}: {count:?} faults");
    }
    Ok(())
}

/// Memory that the guest frees returns to the host; the balloon takes memory and gives it back when
/// the guest needs it.
pub fn balloon() -> Result<()> {
    const MIB: u64 = 1 << 20;
    let rig = Rig::new()?;
    let script = "mkdir /ram; mount -t tmpfs -o size=500M ram /ram
        dd if=/dev/zero of=/ram/a bs=1M count=400 2>/dev/null; sleep 2; rm /ram/a; sleep 1000\n";
    for (option, is_given_back) in [("on", true), ("off", false)] {
        let mut child = start(rig.script(script, &[])?.args(["--balloon", option]))?;
        let mut wait_for =
            |what: &str, limit: u64, reached: &dyn Fn(u64) -> bool| -> Result<bool> {
                let deadline = Instant::now() + Duration::from_secs(limit);
                loop {
                    let used = children(&child)?.into_iter().map(memory_of).max().unwrap_or(0);
                    if reached(used) {
                        return Ok(true);
                    }
                    if Instant::now() > deadline {
                        let ended = child.try_wait().context("cannot look at parador")?;
                        ensure!(ended.is_none(), "{what}: the machine has ended");
                        return Ok(false);
                    }
                    std::thread::sleep(Duration::from_millis(100));
                }
            };
        ensure!(wait_for("fill", 60, &|used| used > 400 * MIB)?, "memory is not used");
        let is_less =
            wait_for("free", if is_given_back { 60 } else { 10 }, &|used| used < 200 * MIB)?;
        child.kill().and_then(|()| child.wait()).context("cannot end parador")?;
        ensure!(is_less == is_given_back, "--balloon {option}: given back: {is_less}");
    }
    let script =
        "sleep 3; grep MemFree /proc/meminfo; mkdir /ram; mount -t tmpfs -o size=500M ram /ram
        dd if=/dev/zero of=/ram/a bs=1M count=400 2>/dev/null; md5sum </ram/a\n";
    let mut machine = rig.script(script, &[])?;
    machine.args(["-m", "640M", "--balloon", "400M"]);
    // Of 400 MiB of zeros, more than the balloon leaves.
    let ended = end(&mut machine, "")?.well(0, &["61eabaf2bf278703738b433ff884c91f"])?;
    let line = ended.console.lines().find_map(|line| line.strip_prefix("MemFree:"));
    let free = line.and_then(|line| line.split_whitespace().next()?.parse::<u64>().ok());
    ensure!(free.is_some_and(|free| free < 230 << 10), "{free:?} KiB beside a balloon");
    Ok(())
}

/// Returns the resident bytes of shared memory of a process.
fn memory_of(process: u32) -> u64 {
    let text = fs::read_to_string(format!("/proc/{process}/statm")).unwrap_or_default();
    let pages = text.split_whitespace().nth(2).and_then(|word| word.parse::<u64>().ok());
    pages.unwrap_or(0) * 4096
}

/// A folder of the host is a file system of the guest, which changes there what it may and sees
/// nothing else.
pub fn share() -> Result<()> {
    let rig = Rig::new()?;
    let shared = rig.path("shared");
    fs::create_dir(&shared).context("cannot make a folder")?;
    let big: Vec<u8> =
        (0..9_000_000_u32).map(|number| (number.wrapping_mul(2_654_435_761) >> 24) as u8).collect();
    fs::write(shared.join("big"), &big).context("cannot write a file")?;
    fs::write(shared.join("word"), "old\n").context("cannot write a file")?;
    std::os::unix::fs::symlink("/etc/hostname", shared.join("link"))
        .context("cannot make a link")?;
    std::os::unix::fs::symlink("../..", shared.join("up")).context("cannot make a link")?;
    let sum = succeed_with(Command::new("md5sum").arg(shared.join("big")))?;
    let sum = sum.split_whitespace().next().context("no checksum")?;

    let mount = "mkdir /h; mount -t 9p -o trans=virtio,version=9p2000.L,msize=65560";
    let script = format!(
        "{mount} host /h; cd /h; md5sum big; readlink link
        dd if=big of=copy bs=100k 2>/dev/null & dd if=/dev/urandom of=new bs=64k count=100 2>/dev/null; wait; md5sum new >sum
        mkdir many; for n in $(seq 300); do echo $n >many/$n; done; ls many | wc -l
        rm many/7; mv many/8 many/9; mv sum many; chmod 600 new; ln new hard; truncate -s 5 word; cat word
        ln -s word other || echo no links; mknod pipe p || echo no pipes; cat ../h/../../etc/none || echo nothing there
        chmod 4755 new || echo no rights to lend; cat up/etc/hostname || echo nothing above
        sync; cp new /dev/null; touch ready
        until grep changed word 2>/dev/null; do sleep 0.1; done\n"
    );
    let mut machine = rig.script(&script, &[])?;
    let child = start(machine.args(["-c", "2", "--share", "shared:host"]))?;
    let deadline = Instant::now() + Duration::from_secs(100);
    while !shared.join("ready").exists() && Instant::now() < deadline {
        std::thread::sleep(Duration::from_millis(50));
    }
    fs::write(shared.join("word"), "changed\n").context("cannot write a file")?;
    ended(child)?.well(
        0,
        &[
            sum,
            "\n/etc/hostname\n",
            "\n300\n",
            "no links",
            "no pipes",
            "nothing there",
            "no rights to lend",
            "nothing above",
            "changed",
        ],
    )?;
    ensure!(fs::read(shared.join("copy")).is_ok_and(|copy| copy == big), "the copy differs");
    let sum = fs::read_to_string(shared.join("many/sum")).context("no checksum")?;
    let new = succeed_with(Command::new("md5sum").arg("new").current_dir(&shared))?;
    ensure!(sum == new, "{sum} is not {new}");
    let many = fs::read_dir(shared.join("many")).context("no folder")?.count();
    ensure!(many == 299, "{many} files, not 299");

    let script = format!(
        "{mount} host /h; cat /h/word; md5sum /h/big | cut -c 1-4
        for attempt in 'touch /h/no' 'rm /h/word' 'chmod 777 /h/word' 'mkdir /h/no' 'dd if=/dev/zero of=/h/word'; do
            $attempt 2>&1 | grep -o 'Read-only file system'; done\n"
    );
    let mut machine = rig.script(&script, &[])?;
    let all = end(machine.args(["--share", "shared:host,ro=on"]), "")?.well(0, &["changed"])?;
    let refused = all.console.matches("Read-only file system").count();
    ensure!(refused == 5, "{refused} of 5 attempts are refused:\n{}", all.console);

    // A file that the host is slow with holds nothing else up, neither does who waits for it and is
    // killed, and what waits does not keep a machine from its end.
    fs::write(shared.join("slow"), "slow\n").context("cannot write a file")?;
    let script = format!(
        "{mount} host /h; cd /h
        echo more >>slow & until [ -e go ]; do sleep 0.1; done
        cat slow & kill -9 $!
        echo old >word; sed -i s/old/in-the-meantime/ word; mkdir between; ls | wc -l; mv word between/answer
        wait; cat slow; rm go; touch again
        until [ -e go ]; do sleep 0.1; done; cat slow & until [ ! -e go ]; do sleep 0.1; done; echo to the end\n"
    );
    let mut lease = Lease::take(&shared.join("slow"))?;
    let mut machine = rig.script(&script, &[])?;
    let child = start(machine.args(["-c", "2", "--share", "shared:host"]))?;
    let place = |name: &str| shared.join(name);
    let go = || fs::write(place("go"), "").context("cannot write a file");
    lease.asked()?;
    go()?;
    appears(&place("between/answer"))?;
    lease.give_up()?;
    appears(&place("again"))?;
    let mut lease = Lease::take(&shared.join("slow"))?;
    go()?;
    lease.asked()?;
    fs::remove_file(place("go")).context("cannot remove a file")?;
    ended(child)?.well(0, &["slow\nmore\n", "to the end"])?;
    lease.give_up()?;
    let answer = fs::read_to_string(place("between/answer")).context("no answer")?;
    ensure!(answer == "in-the-meantime\n", "{answer}");

    // Its process is the machine's.
    let mut machine = rig.script("sleep 1000\n", &[])?;
    let child = start(machine.arg("--share").arg("shared:host"))?;
    let all = children(&child)?;
    let text = fs::read_to_string(format!("/proc/{0}/task/{0}/children", child.id()));
    let text = text.context("no processes")?;
    let mut own = text.split_whitespace().filter_map(|number| number.parse::<u32>().ok());
    let server = own.find(|process| !all.contains(process)).context("no process of the share")?;
    // Each of its threads has given up the same.
    let threads = fs::read_dir(format!("/proc/{server}/task")).context("no threads")?;
    let mut count = 0;
    for thread in threads {
        let path = thread.context("no thread")?.path().join("status");
        let status = fs::read_to_string(path).context("no thread")?;
        for line in ["Seccomp:\t2\n", "NoNewPrivs:\t1\n", "CapPrm:\t0000000000000000\n"] {
            ensure!(status.contains(line), "not {line}{status}");
        }
        count += 1;
    }
    ensure!(count > 2, "{count} threads");
    succeed(Command::new("kill").args(["-KILL", &server.to_string()]))?;
    ended(child)?.has(137, &["shared directory host"])?;
    Ok(())
}

/// Waits for a file.
fn appears(file: &Path) -> Result<()> {
    let deadline = Instant::now() + Duration::from_secs(100);
    while !file.exists() {
        ensure!(Instant::now() < deadline, "no {}", file.display());
        std::thread::sleep(Duration::from_millis(20));
    }
    Ok(())
}

/// A lease of a file: who opens it otherwise waits until it is given up, at most for
/// `/proc/sys/fs/lease-break-time` (fcntl(2)).
struct Lease {
    holder: Child,
    says: BufReader<ChildStdout>,
}

impl Lease {
    fn take(file: &Path) -> Result<Self> {
        // F_SETLEASE is 1024; F_WRLCK is 1, F_UNLCK 2, which says no if the host has taken the
        // lease away.
        let program = r#"$| = 1; $SIG{IO} = sub { print "asked\n" };
            open F, "+<", $ARGV[0] and fcntl F, 1024, 1 or die "no lease: $!"; print "held\n";
            <STDIN>; fcntl F, 1024, 2 or die "the lease is gone: $!"; print "given up\n""#;
        let mut holder = Command::new("perl");
        holder.args(["-e", program]).arg(file).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut holder = holder.spawn().context("cannot start perl")?;
        let says = BufReader::new(holder.stdout.take().context("no output")?);
        let mut lease = Self { holder, says };
        lease.expect("held")?;
        Ok(lease)
    }

    fn expect(&mut self, text: &str) -> Result<()> {
        let mut line = String::new();
        self.says.read_line(&mut line).context("cannot read what is said of a lease")?;
        ensure!(line.trim() == text, "of a lease: {line}, not {text}");
        Ok(())
    }

    /// Waits for a process that wants to open the file.
    fn asked(&mut self) -> Result<()> {
        self.expect("asked")
    }

    /// Gives the lease up, if the host has not revoked it.
    fn give_up(&mut self) -> Result<()> {
        drop(self.holder.stdin.take());
        self.expect("given up")?;
        self.holder.wait().context("cannot wait for perl")?;
        Ok(())
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        // It is over already if all went well.
        let _ = self.holder.kill();
        let _ = self.holder.wait();
    }
}

/// A disk that is a qcow2 image: what the guest has written is in it when the machine has ended,
/// and QEMU finds nothing wrong.
pub fn qcow2() -> Result<()> {
    let rig = Rig::new()?;
    let image = |arguments: &[&str]| {
        succeed_with(Command::new("qemu-img").args(arguments).current_dir(rig.folder.path()))
    };
    for (version, more) in [("1.1", "compat=1.1"), ("0.10", "compat=0.10,cluster_size=4k")] {
        image(&["create", "-q", "-f", "qcow2", "-o", more, "new.qcow2", "4G"])?;
        let script = "dd if=/dev/urandom of=/tmp/data bs=1M count=12 2>/dev/null
            dd if=/tmp/data of=/dev/vdb bs=1M seek=3000 2>/dev/null
            sync; echo 3 >/proc/sys/vm/drop_caches
            dd if=/dev/vdb bs=1M skip=3000 count=12 2>/dev/null | cmp - /tmp/data && echo the same
            dd if=/dev/vdb bs=1M skip=100 count=9 2>/dev/null | cmp -n 9000000 - /dev/zero && echo zeros
            blkdiscard -z -o 3145728000 -l 1000960 /dev/vdb || dd if=/dev/zero of=/dev/vdb bs=512 seek=6144000 count=1955 2>/dev/null
            dd if=/dev/vdb bs=512 skip=6144000 count=1955 2>/dev/null | cmp -n 1000960 - /dev/zero && echo zeroed
            /mnt/linux-disk vdb 256 || :
            mkdir /second; mount /dev/vdc /second; cp /tmp/data /second; fstrim /second; sync
            for n in 1 2 3 4; do cp /tmp/data /second/$n & done; wait; rm /second/2; umount /second
            blockdev --getsize64 /dev/vdb; md5sum /tmp/data\n";
        let mut machine = rig.script(script, &[&artifacts().join("linux-disk")])?;
        image(&["convert", "-q", "-O", "qcow2", "-o", more, "disk.img", "copy.qcow2"])?;
        machine.args(["-c", "2", "-d", "new.qcow2", "-d", "copy.qcow2"]);
        let mut texts = vec!["the same", "zeros", "zeroed", "\n4294967296\n"];
        // Images of the older version have no zeros of their own, so that they take a while.
        if version == "0.10" {
            texts.push("disk: a read beside zeros");
        }
        let ended = end(&mut machine, "")?.well(0, &texts)?;
        let said = ended.console.lines().find_map(|line| line.strip_suffix("  /tmp/data"));
        let sum = said.context("no checksum")?.trim();
        for name in ["new.qcow2", "copy.qcow2"] {
            image(&["check", name]).with_context(|| format!("{name}, version {version}"))?;
        }
        image(&["convert", "-O", "raw", "copy.qcow2", "copy.img"])?;
        rig.check_disk("copy.img")?;
        let script = "mkdir /second; mount -o ro /dev/vdb /second; cat /second/4 | md5sum
            ! dd if=/dev/zero of=/dev/vdb bs=512 count=1\n";
        let mut machine = rig.script(script, &[])?;
        let before = fs::read(rig.path("copy.qcow2")).context("cannot read an image")?;
        machine.args(["-d", "copy.qcow2,ro=on"]);
        end(&mut machine, "")?.well(0, &[sum])?;
        let after = fs::read(rig.path("copy.qcow2")).context("cannot read an image")?;
        ensure!(before == after, "an image that is read only has changed");
    }

    // What was to last is there, whatever ends the machine.
    let script = "echo root: | dd of=/dev/vdb bs=512 seek=77 count=1 conv=sync,fsync 2>/dev/null
        echo is to last; sleep 1000\n";
    let mut machine = rig.script(script, &[])?;
    let mut child = start(machine.args(["-d", "new.qcow2"]))?;
    let mut console = child.stdout.take().context("no console")?;
    let (mut text, mut bytes) = (Vec::new(), [0; 4096]);
    while !String::from_utf8_lossy(&text).contains("is to last") {
        let count = console.read(&mut bytes).context("cannot read the console")?;
        ensure!(count != 0, "no message:\n{}", String::from_utf8_lossy(&text));
        text.extend(&bytes[..count]);
    }
    child.kill().and_then(|()| child.wait()).context("cannot end parador")?;
    std::thread::sleep(Duration::from_secs(1));
    image(&["check", "new.qcow2"])?;
    image(&["convert", "-O", "raw", "new.qcow2", "new.img"])?;
    let mut sector = [0; 5];
    let raw = File::open(rig.path("new.img")).context("no image")?;
    raw.read_exact_at(&mut sector, 77 * 512).context("cannot read a sector")?;
    ensure!(sector == *b"root:", "flushed data is missing");

    // Images that are none, or need others, or are broken.
    let refused =
        |name: &str, code, text: &str| end(rig.run().args(["-d", name]), "")?.has(code, &[text]);
    image(&["create", "-q", "-f", "qcow2", "-b", "copy.qcow2", "-F", "qcow2", "above.qcow2"])?;
    refused("above.qcow2", 65, "with a backing file")?;
    fs::write(rig.path("none.qcow2"), [0; 4096]).context("cannot write a file")?;
    refused("none.qcow2", 65, "is not a qcow2 image")?;
    let mut bytes = fs::read(rig.path("copy.qcow2")).context("cannot read an image")?;
    bytes[40..48].copy_from_slice(&u64::MAX.to_be_bytes());
    fs::write(rig.path("broken.qcow2"), bytes).context("cannot write an image")?;
    refused("broken.qcow2", 65, "broken.qcow2: the image is unusable")?;
    Ok(())
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

/// A machine that is asked and told by its control socket, by `parador ctl`.
struct Controlled<'a> {
    rig: &'a Rig,
    child: Child,
}

impl<'a> Controlled<'a> {
    const SOCKET: &'static str = "vm.sock";
    const CONSOLE: &'static str = "console";

    /// Starts it; its console goes to a file.
    fn start(rig: &'a Rig, command: &mut Command) -> Result<Self> {
        let console = File::create(rig.path(Self::CONSOLE)).context("cannot make a file")?;
        command.args(["--api-socket", Self::SOCKET]).stdin(Stdio::null()).stdout(console);
        let child = command.stderr(Stdio::piped()).spawn().context("cannot start parador")?;
        Ok(Self { rig, child })
    }

    /// Code and output of `parador ctl`.
    fn ctl(&self, words: &[&str]) -> Result<(i32, String)> {
        let mut command = parador(self.rig.folder.path());
        command.args(["ctl", "--socket", Self::SOCKET]).args(words);
        let output = command.output().context("cannot start parador ctl")?;
        let text = [output.stdout, output.stderr].concat();
        let code = output.status.code().context("parador ctl was killed")?;
        Ok((code, String::from_utf8_lossy(&text).into_owned()))
    }

    /// `parador ctl` ends with this code and prints this text.
    fn told(&self, words: &[&str], code: i32, text: &str) -> Result<String> {
        let (ended, said) = self.ctl(words)?;
        ensure!(ended == code && said.contains(text), "ctl {words:?}: {ended}\n{said}");
        Ok(said)
    }

    /// Until it waits for boot.
    fn waits(&self) -> Result<()> {
        let deadline = Instant::now() + SLOW;
        loop {
            let (code, said) = self.ctl(&["status"])?;
            if code == 0 && said.contains("\"state\": \"created\"") {
                return Ok(());
            }
            ensure!(Instant::now() < deadline, "it does not wait: {code}\n{said}");
            std::thread::sleep(Duration::from_millis(50));
        }
    }

    /// Returns the last number that the guest has counted to.
    fn count(&self) -> usize {
        let console = fs::read_to_string(self.rig.path(Self::CONSOLE)).unwrap_or_default();
        console.lines().filter(|line| line.starts_with("count ")).count()
    }

    /// Waits until the guest has counted on.
    fn counts(&self) -> Result<()> {
        let (before, deadline) = (self.count(), Instant::now() + SLOW);
        while self.count() <= before {
            let console = || fs::read_to_string(self.rig.path(Self::CONSOLE)).unwrap_or_default();
            ensure!(
                Instant::now() < deadline,
                "the guest does not count beyond {before}:\n{}",
                console()
            );
            std::thread::sleep(Duration::from_millis(50));
        }
        Ok(())
    }

    fn wait(mut self) -> Result<(Option<i32>, String)> {
        let mut messages = String::new();
        if let Some(mut errors) = self.child.stderr.take() {
            errors.read_to_string(&mut messages).context("no messages")?;
        }
        let status = self.child.wait().context("cannot wait for parador")?;
        Ok((status.code(), messages))
    }
}

/// Script of a guest that counts, and powers off when its power button is pressed.
const COUNT: &str = "set +e; insmod /mnt/evdev.ko; mkdir -p /etc/acpi/PWRF
    printf '#!/bin/sh\npoweroff -f\n' >/etc/acpi/PWRF/00000080; chmod +x /etc/acpi/PWRF/00000080
    acpid -l /dev/null
    n=0; while :; do n=$((n+1)); echo count $n; sleep 0.1; done\n";

/// Events of a VM that is booted, paused, resumed, reset and shut down.
pub const LIFE: [&str; 10] = [
    "created",
    "started",
    "running",
    "paused",
    "resumed",
    "reset",
    "started",
    "running",
    "shutdown-requested",
    "ended",
];

/// A VM pauses, resumes, resets and shuts down on command, and reports these events.
pub fn api() -> Result<()> {
    let rig = Rig::new()?;
    let evdev = rig.module("kernel/drivers/input/evdev.ko")?;
    let mut run = rig.script(COUNT, &[&evdev])?;
    run.args(["--metrics", "metrics", "--wait-boot"]);
    let machine = Controlled::start(&rig, &mut run)?;
    // Everything is there but the guest.
    machine.waits()?;
    machine.told(&["stats"], 0, "\"processes\": 0")?;
    for words in [&["pause"][..], &["resume"], &["reset"], &["shutdown"]] {
        machine.told(words, 1, "waits for boot")?;
    }
    ensure!(machine.count() == 0, "a machine that waits has counted");
    machine.told(&["boot"], 0, "starting")?;
    machine.counts()?;
    machine.told(&["boot"], 1, "already been started")?;
    machine.told(&["resume"], 1, "not paused")?;
    machine.told(&["pause"], 0, "paused")?;
    let before = machine.count();
    std::thread::sleep(Duration::from_secs(1));
    let after = machine.count();
    // A line may have been on its way.
    ensure!(after <= before + 1, "a paused guest has counted from {before} to {after}");
    machine.told(&["status"], 0, "\"state\": \"paused\"")?;
    machine.told(&["stats"], 0, "\"mappings_filled_in\"")?;
    machine.told(&["shutdown"], 1, "is paused")?;
    machine.told(&["resume"], 0, "running")?;
    machine.counts()?;
    machine.told(&["reset"], 0, "starting")?;
    machine.counts()?;
    machine.told(&["metrics"], 0, "parador_resets_total 1")?;
    machine.told(&["top", "-n", "1"], 0, "running  up ")?;
    let socket = rig.path(Controlled::SOCKET);
    let second = end(rig.run().args(["--api-socket", Controlled::SOCKET]), "")?;
    second.has(71, &["is in use by another process"])?;
    let events =
        start(parador(rig.folder.path()).args(["ctl", "-s", Controlled::SOCKET, "events"]))?;
    machine.told(&["shutdown"], 0, "running")?;
    let (code, messages) = machine.wait()?;
    ensure!(code == Some(0) && messages.contains("powered off"), "{code:?}: {messages}");
    ensure!(!socket.exists(), "the control socket has stayed");
    let events = events.wait_with_output().context("cannot wait for parador ctl")?;
    let events = String::from_utf8_lossy(&events.stdout).into_owned();
    let kinds: Vec<&str> = events.lines().filter_map(|line| line.split('"').nth(3)).collect();
    ensure!(kinds == LIFE, "{events}");
    let metrics = fs::read_to_string(rig.path("metrics")).context("no metrics")?;
    ensure!(metrics.contains("\"state\":\"ended\""), "{metrics}");

    // A killed VM leaves its socket, which the next VM replaces at once.
    let mut machine = Controlled::start(&rig, &mut rig.script(COUNT, &[&evdev])?)?;
    machine.counts()?;
    let events =
        start(parador(rig.folder.path()).args(["ctl", "-s", Controlled::SOCKET, "events"]))?;
    machine.child.kill().context("cannot kill parador")?;
    machine.child.wait().context("cannot wait for parador")?;
    events.wait_with_output().context("cannot wait for parador ctl")?;
    machine.told(&["status"], 69, "stale control socket")?;
    let machine = Controlled::start(&rig, &mut rig.script(COUNT, &[&evdev])?)?;
    machine.counts()?;
    machine.told(&["pause"], 0, "paused")?;
    machine.told(&["shutdown", "--force"], 0, "ended")?;
    let (code, messages) = machine.wait()?;
    ensure!(code == Some(0) && messages.contains("ended by request"), "{code:?}: {messages}");
    Ok(())
}

/// A machine that waits for boot and is ended otherwise.
pub fn boot() -> Result<()> {
    let rig = Rig::new()?;
    let waiting = |limit, more: &[&str]| -> Result<Controlled<'_>> {
        let mut run = rig.bare(limit);
        run.args(["-i", "busybox", "--wait-boot"]).args(more);
        let machine = Controlled::start(&rig, &mut run)?;
        machine.waits()?;
        Ok(machine)
    };
    let socket = rig.path(Controlled::SOCKET);
    let is_over = |machine: Controlled<'_>, code, text| -> Result<()> {
        let (ended, messages) = machine.wait()?;
        ensure!(ended == Some(code) && messages.contains(text), "{ended:?}: {messages}");
        ensure!(!socket.exists(), "the control socket has stayed");
        Ok(())
    };
    let machine = waiting(LIMIT, &[])?;
    machine.told(&["shutdown", "--force"], 0, "ended")?;
    is_over(machine, 0, "ended by request")?;
    let machine = waiting(LIMIT, &[])?;
    succeed(Command::new("kill").arg(machine.child.id().to_string()))?;
    is_over(machine, 128 + 15, "signal 15")?;
    is_over(waiting(2, &[])?, 124, "time limit")?;
    // The VM resets by itself.
    let machine = waiting(LIMIT, &["--on-reset", "reset", "-p", "parador.run=\"reboot -f\""])?;
    machine.told(&["boot"], 0, "starting")?;
    let deadline = Instant::now() + 3 * GONE;
    while !machine.ctl(&["metrics"])?.1.contains("parador_resets_total 2") {
        ensure!(Instant::now() < deadline, "the guest does not restart");
        std::thread::sleep(Duration::from_millis(50));
    }
    machine.told(&["shutdown", "--force"], 0, "ended")?;
    is_over(machine, 0, "ended by request")?;
    end(rig.run().arg("--wait-boot"), "")?.has(64, &["--wait-boot requires --api-socket"])?;
    Ok(())
}

/// A machine that is described by a file, and what follows its ends.
pub fn config() -> Result<()> {
    let rig = Rig::new()?;
    let file = |more: &str| {
        let kernel = rig.kernel.display();
        let text = format!(
            "[vm]\nkernel = \"{kernel}\"\ninitrd = \"busybox\"\ntimeout = \"{LIMIT}\"\n{more}"
        );
        fs::write(rig.path("vm.toml"), text).context("cannot write a file")
    };
    let run = |words: &[&str]| {
        let mut command = parador(rig.folder.path());
        command.args(["run", "--config", "vm.toml"]).args(words);
        end(&mut command, "")
    };
    let reboot = "cmdline = \"parador.run=\\\"reboot -f\\\"\"\n";
    file(reboot)?;
    run(&["-m", "128M"])?.well(83, &["the guest reset (exit code 83"])?;
    run(&["--on-reset", "exit:9"])?.well(9, &[])?;
    // The second start finds what the first has left on the disk.
    let twice = "if [ -e /mnt/second ]; then exit 5; fi; touch /mnt/second; sync; reboot -f\n";
    rig.disk("disk.img", twice, &[])?;
    let start = "mkdir -p /mnt; mount /dev/vda /mnt; sh -e /mnt/script";
    file(&format!(
        "cmdline = \"parador.run=\\\"{start}\\\"\"\non-reset = \"reset\"\n[[disk]]\npath = \"disk.img\"\n"
    ))?;
    run(&[])?.well(5, &["restarting the VM"])?;
    file("on-panic = \"exit:3\"\ncmdline = \"parador.run=\\\"echo c >/proc/sysrq-trigger\\\"\"\n")?;
    run(&[])?.has(3, &["panicked"])?;
    Ok(())
}

/// The processes of a machine whose shell is there: `parador`, the device process, those of the
/// disk, the guest's.
pub fn children(child: &Child) -> Result<Vec<u32>> {
    let deadline = Instant::now() + GONE;
    let below = |process: u32| -> Vec<u32> {
        let path = format!("/proc/{process}/task/{process}/children");
        let text = fs::read_to_string(path).unwrap_or_default();
        text.split_whitespace().filter_map(|number| number.parse().ok()).collect()
    };
    loop {
        let mut all = vec![child.id()];
        let is_device = |process: &u32| {
            let name = fs::read_to_string(format!("/proc/{process}/comm"));
            // Names end after fifteen bytes.
            name.is_ok_and(|name| WEDGE.starts_with(name.trim()))
        };
        if let Some(device) = below(child.id()).into_iter().find(is_device) {
            all.push(device);
            all.extend(below(device));
        }
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
