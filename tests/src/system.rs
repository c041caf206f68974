//! A system built and emulated by `parador`.

use crate::bochs;
use crate::transcript::Transcript;
use anyhow::{Context, Result, bail, ensure};
use std::fs::File;
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};
use tempfile::TempDir;

/// Time after the end of a process in which the last of its output arrives.
const LAST_OUTPUT: Duration = Duration::from_secs(5);

/// Accelerator of [`qemu`]: each processor is a thread of the host. What QEMU does wrong then:
/// docs/CAVEATS.md.
pub const PARALLEL: &str = "tcg";
/// Accelerator of [`qemu`]: processors take turns.
pub const ONE_THREAD: &str = "tcg,thread=single";

/// Returns QEMU without KVM, with its serial line on standard output and a time limit in seconds.
pub fn qemu(limit: u32, accelerator: &str) -> Command {
    let mut machine = Command::new("setpriv");
    machine.args(["--pdeathsig", "KILL", "timeout", "--kill-after=5", &limit.to_string()]);
    machine.args(["qemu-system-x86_64", "-M", "q35", "-accel", accelerator, "-nodefaults"]);
    machine.args(["-no-user-config", "-display", "none", "-serial", "stdio", "-no-reboot"]);
    machine
}

/// Root of the source tree.
pub fn workspace() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().map(Path::to_path_buf).unwrap_or_default()
}

/// Returns the folder of build products.
pub fn target() -> PathBuf {
    match std::env::var_os("CARGO_TARGET_DIR") {
        Some(path) => workspace().join(path),
        None => workspace().join("target"),
    }
}

/// The folder of native programs and micro-guests, made by `cargo xtask build`.
pub fn artifacts() -> PathBuf {
    target().join("artifacts")
}

/// `parador`, to be run in `folder`; killed when the thread that starts it ends.
pub fn parador(folder: &Path) -> Command {
    // Setting the signal here would take unsafe code; `setpriv` is in every Debian.
    let mut command = Command::new("setpriv");
    command
        .args(["--pdeathsig", "KILL"])
        .arg(target().join("release").join("parador"))
        .current_dir(folder)
        .env("PARADOR_ARTIFACTS", artifacts());
    command
}

/// Options of an emulated system.
#[derive(Clone, Debug)]
pub struct Machine {
    /// CPUs.
    pub cpus: u32,
    /// Memory, such as `512M`; `None`: what the description needs.
    pub memory: Option<&'static str>,
    /// Boot from a CD-ROM image through GRUB instead of QEMU's own loader.
    pub disc: bool,
    /// Count instructions instead of time.
    pub counted: bool,
    /// Boot the kernel that measures its longest path.
    pub measured: bool,
    /// Further arguments for QEMU.
    pub qemu: &'static [&'static str],
}

impl Default for Machine {
    fn default() -> Self {
        Self { cpus: 1, memory: None, disc: false, counted: false, measured: false, qemu: &[] }
    }
}

/// A system that runs. Dropping it ends it.
pub struct Running {
    pub(crate) child: Child,
    pub(crate) input: Box<dyn Write + Send>,
    /// The machine stays on: the log has its exit code.
    pub(crate) stays_on: bool,
    pub(crate) log_ended: Arc<AtomicBool>,
    pub(crate) folder: TempDir,
    /// The guest's console.
    pub console: Transcript,
    /// The kernel's log, with what root writes there.
    pub log: Transcript,
    /// Messages of `parador`.
    pub messages: Transcript,
}

/// Files that are made as disks where a description names them.
const DISKS: &[&str] = &["first.img", "second.img"];

/// Makes a disk of 64 MiB of zeros with two MBR partitions of 8 MiB, from 1 MiB and 16 MiB on.
fn make_disk(path: &Path) -> io::Result<()> {
    let mut first = [0; 512];
    for (entry, start) in [(446, 1_u32 << 11), (462, 16 << 11)] {
        first[entry + 4] = 0x83;
        first[entry + 8..entry + 12].copy_from_slice(&start.to_le_bytes());
        first[entry + 12..entry + 16].copy_from_slice(&(8_u32 << 11).to_le_bytes());
    }
    first[510..].copy_from_slice(&[0x55, 0xaa]);
    let mut file = File::create(path)?;
    file.write_all(&first)?;
    file.set_len(64 << 20)
}

/// A folder with all programs, in which the kernel is the one that measures itself.
fn measured_artifacts(folder: &Path) -> Result<PathBuf> {
    const KERNEL: &str = "kernel.elf";
    let measured = folder.join("measured");
    std::fs::create_dir(&measured).context("cannot make a folder")?;
    for entry in std::fs::read_dir(artifacts()).context("cannot list the programs")? {
        let path = entry.context("cannot list the programs")?.path();
        let Some(name) = path.file_name().filter(|name| *name != KERNEL) else { continue };
        std::os::unix::fs::symlink(&path, measured.join(name)).context("cannot make a link")?;
    }
    let kernel = artifacts().join("kernel-measured.elf");
    std::os::unix::fs::symlink(kernel, measured.join(KERNEL)).context("cannot make a link")?;
    Ok(measured)
}

/// A folder with a description; `{artifacts}` in it stands for the folder of programs.
pub(crate) fn described(description: &str) -> Result<TempDir> {
    let folder = TempDir::with_prefix("parador-test-").context("cannot make a folder")?;
    let text = description.replace("{artifacts}", &artifacts().display().to_string());
    std::fs::write(folder.path().join("system.toml"), text).context("cannot write TOML")?;
    Ok(folder)
}

/// Follows a log that another process writes, until `ended` is set.
pub(crate) fn follow_log(path: &Path, ended: &Arc<AtomicBool>) -> Result<Transcript> {
    let file = File::open(path).context("cannot open the log")?;
    Ok(Transcript::follow("kernel's log", Growing { file, ended: Arc::clone(ended) }))
}

impl Running {
    /// Builds and starts the system that `description` (TOML) says. `{artifacts}` in it stands for
    /// the folder of programs. The machine ends after `limit`.
    pub fn start(description: &str, machine: &Machine, limit: Duration) -> Result<Self> {
        let folder = described(description)?;
        for name in DISKS.iter().filter(|name| description.contains(**name)) {
            make_disk(&folder.path().join(name)).context("cannot make a disk")?;
        }
        let log = folder.path().join("log");
        File::create(&log).context("cannot make the log")?;

        let mut command = parador(folder.path());
        command.args(["system", "emulate", "system.toml", "--output", "image", "--log", "log"]);
        command.arg("--cpus").arg(machine.cpus.to_string());
        command.arg("--timeout").arg(format!("{}s", limit.as_secs()));
        if let Some(memory) = machine.memory {
            command.args(["--memory", memory]);
        }
        if machine.disc {
            command.arg("--iso");
        }
        if machine.counted {
            command.arg("--icount");
        }
        if machine.measured {
            command.arg("--artifacts").arg(measured_artifacts(folder.path())?);
        }
        let mut child = command
            .arg("--")
            .args(machine.qemu)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .context("cannot start parador through setpriv")?;
        let (Some(input), Some(output), Some(errors)) =
            (child.stdin.take(), child.stdout.take(), child.stderr.take())
        else {
            bail!("parador has no pipes");
        };
        let log_ended = Arc::default();
        Ok(Self {
            child,
            input: Box::new(input),
            stays_on: false,
            folder,
            console: Transcript::follow("console", output),
            log: follow_log(&log, &log_ended)?,
            log_ended,
            messages: Transcript::follow("messages of parador", errors),
        })
    }

    /// Types on the console.
    pub fn type_text(&mut self, text: &str) -> Result<()> {
        self.input.write_all(text.as_bytes()).context("cannot type on the console")
    }

    /// Waits for the end and returns the exit code.
    pub fn wait(&mut self, deadline: Instant) -> Result<i32> {
        loop {
            if self.stays_on {
                if let Some(code) = bochs::code(&self.log.text())? {
                    self.child.kill().context("cannot end Bochs")?;
                    self.child.wait().context("cannot wait for Bochs")?;
                    self.finish();
                    return Ok(code);
                }
                ensure!(!self.has_ended()?, "Bochs has ended by itself");
            } else if let Some(status) = self.child.try_wait().context("cannot wait for parador")? {
                self.finish();
                return status.code().context("parador was killed");
            }
            if Instant::now() >= deadline {
                bail!("the system did not end in time");
            }
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// Takes the last output of a process that has ended.
    fn finish(&self) {
        self.log_ended.store(true, Ordering::Release);
        for transcript in [&self.console, &self.log, &self.messages] {
            transcript.finish(LAST_OUTPUT);
        }
    }

    /// Returns true if the process has ended by itself.
    pub fn has_ended(&mut self) -> Result<bool> {
        Ok(self.child.try_wait().context("cannot ask for parador")?.is_some())
    }

    /// The ends of everything that it wrote, to explain a failure.
    pub fn transcripts(&self) -> String {
        [&self.console, &self.log, &self.messages].map(|transcript| transcript.tail()).concat()
    }

    /// The folder of the built system.
    pub fn image(&self) -> PathBuf {
        self.folder.path().join("image")
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.log_ended.store(true, Ordering::Release);
        // The process may have ended by itself; in both cases it is gone afterwards.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A file that another process writes: its end is the end of that process.
struct Growing {
    file: File,
    ended: Arc<AtomicBool>,
}

impl Read for Growing {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        loop {
            let ended = self.ended.load(Ordering::Acquire);
            let length = self.file.read(buffer)?;
            if length > 0 || ended {
                return Ok(length);
            }
            std::thread::sleep(Duration::from_millis(20));
        }
    }
}
