//! The emulated machine: QEMU with the guest console on the first serial port and the kernel's log
//! on the second.

use crate::image::Image;
use crate::transcript::Transcript;
use anyhow::{Context, Result, bail};
use std::io::Write;
use std::path::Path;
use std::process::{Child, ChildStdin, Command, Stdio};
use std::time::{Duration, Instant};

/// What root adds to the outcome before it writes it to the exit device, so that no outcome of a
/// system can be mistaken for a status of QEMU's own.
const OUTCOME_BASE: i32 = 0x10;
/// What the kernel writes to the exit device when it panics.
const PANIC_VALUE: i32 = 0x3f;

/// Properties of the machine.
#[derive(Clone, Debug)]
pub struct Machine {
    /// CPUs.
    pub cpus: u32,
    /// Memory in MiB.
    pub memory: u32,
    /// Value of QEMU's `-cpu`.
    pub processor: &'static str,
}

impl Machine {
    /// An AMD server processor with SVM and nested paging.
    pub const AMD: &'static str = "EPYC,+svm,+npt";
    /// The same without SVM.
    pub const NO_SVM: &'static str = "EPYC,-svm";
}

/// What the machine starts from.
#[derive(Clone, Copy, Debug)]
pub enum Boot<'a> {
    /// Kernel and bundle given to QEMU (PVH).
    Direct(&'a Image),
    /// CD-ROM image started by GRUB (multiboot2).
    Disc(&'a Path),
}

/// How a system ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    /// Root ended it with this exit code.
    Code(u8),
    /// The kernel panicked: always a bug.
    KernelPanic,
    /// QEMU ended without an outcome: reset or power-off of the machine itself, or a failure of QEMU.
    Qemu(i32),
}

impl End {
    fn from_status(status: i32) -> Self {
        let value = (status - 1) / 2;
        if status & 1 == 0 || value < OUTCOME_BASE {
            return Self::Qemu(status);
        }
        match u8::try_from(value - OUTCOME_BASE) {
            _ if value == PANIC_VALUE => Self::KernelPanic,
            Ok(code) => Self::Code(code),
            Err(_) => Self::Qemu(status),
        }
    }
}

/// A machine that runs. Dropping it ends QEMU.
pub struct Running {
    child: Child,
    input: ChildStdin,
    /// Text of the first serial port.
    pub console: Transcript,
    /// Text of the second serial port, and of QEMU itself.
    pub log: Transcript,
}

impl Running {
    /// Starts the machine.
    pub fn start(machine: &Machine, boot: Boot<'_>) -> Result<Self> {
        // The parent-death signal is set by `setpriv`, because doing it here takes unsafe code.
        let mut command = Command::new("setpriv");
        command.args(["--pdeathsig", "KILL", "qemu-system-x86_64"]);
        command.args(["-M", "q35", "-accel", "tcg", "-cpu", machine.processor]);
        command.arg("-smp").arg(machine.cpus.to_string());
        command.arg("-m").arg(machine.memory.to_string());
        command.args(["-nodefaults", "-no-user-config", "-display", "none", "-no-reboot"]);
        command.args(["-chardev", "stdio,id=console,signal=off", "-serial", "chardev:console"]);
        command.args(["-chardev", "file,id=log,path=/dev/stderr", "-serial", "chardev:log"]);
        command.args(["-device", "isa-debug-exit,iobase=0xf4,iosize=4"]);
        match boot {
            Boot::Direct(image) => {
                command.arg("-kernel").arg(&image.kernel).arg("-initrd").arg(&image.bundle);
                command.args(["-append", "log=com2 panic=debug-exit"]);
            }
            Boot::Disc(path) => {
                command.arg("-boot").arg("d").arg("-cdrom").arg(path);
            }
        }
        let mut child = command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .context("cannot start QEMU through setpriv")?;
        let (Some(input), Some(output), Some(errors)) =
            (child.stdin.take(), child.stdout.take(), child.stderr.take())
        else {
            bail!("QEMU has no pipes");
        };
        Ok(Self {
            child,
            input,
            console: Transcript::follow("console", output),
            log: Transcript::follow("kernel's log", errors),
        })
    }

    /// Types on the console.
    pub fn type_text(&mut self, text: &str) -> Result<()> {
        self.input.write_all(text.as_bytes()).context("cannot type on the console")
    }

    /// Waits for the end.
    pub fn wait(&mut self, deadline: Instant) -> Result<End> {
        loop {
            if let Some(status) = self.child.try_wait().context("cannot wait for QEMU")? {
                self.console.finish(Duration::from_secs(2));
                self.log.finish(Duration::from_secs(2));
                return Ok(End::from_status(status.code().unwrap_or(0)));
            }
            if Instant::now() >= deadline {
                bail!("the system did not end in time");
            }
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// Whether it has ended.
    pub fn has_ended(&mut self) -> bool {
        !matches!(self.child.try_wait(), Ok(None))
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        // It may have ended by itself; either way it is not there afterwards.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn statuses() {
        assert_eq!(End::from_status(0), End::Qemu(0));
        assert_eq!(End::from_status(1), End::Qemu(1));
        assert_eq!(End::from_status(2 * 0x10 + 1), End::Code(0));
        assert_eq!(End::from_status(2 * (80 + 0x10) + 1), End::Code(80));
        assert_eq!(End::from_status(2 * 0x3f + 1), End::KernelPanic);
    }
}
