//! `parador run` by KVM: whether this host has it, and the process that is the machine.

use std::env;
use std::fs::File;
use std::io::{Seek, Write};
use std::os::fd::OwnedFd;
use std::path::Path;
use std::process::{Child, Command, ExitCode, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use hosted_kvm::{Machine, descriptor};
use nix::time::{ClockId, clock_getcpuclockid};
use nix::unistd::Pid;
use rustix::fs::{MemfdFlags, memfd_create};
use vmm_boot::Kernel;

use crate::failure::{self, Failure, describe};
use crate::guest::least_memory;
use crate::supervise::{self, AtEnd};

/// First argument of the process that is a machine.
const MARK: &str = "--kvm-machine";
/// Time of a CPU that the trial of KVM may take: on a processor it takes a millisecond, also on a host that is busy.
const TRIAL: Duration = Duration::from_secs(5);
/// How long it may take in all: a host's kernel may not come back, and use no time of a CPU.
const PATIENCE: Duration = Duration::from_secs(60);

/// Becomes a machine if this process was started to be one. Returns `None` if this is an ordinary start.
pub fn become_machine() -> Option<ExitCode> {
    (env::args_os().nth(1)? == MARK).then(|| hosted_kvm::run())
}

/// Whether KVM runs anything here, which a device `/dev/kvm` does not say: it is tried, in a process of its own (`parador doctor --try-kvm`),
/// for a limited time. The error is the reason.
pub fn trial() -> Result<(), String> {
    if !Path::new("/dev/kvm").exists() {
        return Err("no /dev/kvm".to_owned());
    }
    let mut command = own_program().map_err(|failure| failure.to_string())?;
    command.args(["doctor", "--try-kvm"]).stdin(Stdio::null()).stderr(Stdio::null());
    let mut child = command.stdout(Stdio::piped()).spawn().map_err(|error| describe(&error))?;
    let start = Instant::now();
    while start.elapsed() < PATIENCE && used(&child) < TRIAL {
        match child.try_wait().map_err(|error| describe(&error))? {
            Some(status) if status.success() => return Ok(()),
            Some(_) => {
                let output = child.wait_with_output().map_err(|error| describe(&error))?;
                return Err(String::from_utf8_lossy(&output.stdout).trim().to_owned());
            }
            None => thread::sleep(Duration::from_micros(500)),
        }
    }
    let time = used(&child);
    // Fails if it has ended just now. Nobody waits: the host's kernel may not let go of it.
    let _ = child.kill();
    Err(format!("no answer in {:.0?} of a CPU's time, {:.0?} in all", time, start.elapsed()))
}

/// Time of CPUs that a process has used; none if that cannot be told.
fn used(process: &Child) -> Duration {
    let clock = clock_getcpuclockid(Pid::from_raw(process.id().cast_signed()));
    clock.and_then(ClockId::now).map_or(Duration::ZERO, Duration::from)
}

/// This program, to be started again.
fn own_program() -> Result<Command, Failure> {
    let own = env::current_exe().map_err(|error| Failure::os("find this program", &error))?;
    supervise::command(own.as_os_str(), AtEnd::Kill)
}

/// Checks a kernel, and that it has room.
pub fn check(path: &Path, bytes: &[u8], initrd: u64, memory: u64) -> Result<(), Failure> {
    let wrong = |error: &dyn std::fmt::Display| {
        Failure::new(failure::BAD_CONFIG, format!("{}: {error}", path.display()))
    };
    let kernel = Kernel::detect(bytes).map_err(|error| wrong(&error))?;
    let least = least_memory(&kernel, initrd);
    if least > memory {
        let (least, memory) = (least.div_ceil(1 << 20), memory >> 20);
        let text = format!("kernel and RAM disk need {least} MiB of memory, not {memory} MiB");
        return Err(wrong(&text).help("give the machine more memory with --memory"));
    }
    Ok(())
}

/// The process that is the machine.
pub fn command() -> Result<Command, Failure> {
    let mut command = own_program()?;
    command.arg(MARK);
    Ok(command)
}

/// Descriptors that only this back end's process has: what the machine is, and what it boots.
pub fn files(
    machine: &Machine,
    kernel: &[u8],
    initrd: &[u8],
) -> Result<Vec<(OwnedFd, u32)>, Failure> {
    let description = serde_json::to_vec(machine)
        .map_err(|error| Failure::new(failure::INTERNAL, error.to_string()))?;
    Ok(vec![
        (file("parador-machine", &description)?, descriptor::DESCRIPTION),
        (file("parador-kernel", kernel)?, descriptor::KERNEL),
        (file("parador-initrd", initrd)?, descriptor::INITRD),
    ])
}

/// A file of these bytes, in memory.
fn file(name: &str, bytes: &[u8]) -> Result<OwnedFd, Failure> {
    let failed = |error| Failure::os("hand a file to the machine", &error);
    let descriptor =
        memfd_create(name, MemfdFlags::CLOEXEC).map_err(|error| failed(error.into()))?;
    let mut file = File::from(descriptor);
    file.write_all(bytes).and_then(|()| file.rewind()).map_err(failed)?;
    Ok(file.into())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A process that waits uses no time of a CPU, one that works does.
    #[test]
    fn time_is_that_of_a_cpu() {
        let start = |script: &str| Command::new("sh").args(["-c", script]).spawn().unwrap();
        let (mut working, mut waiting) = (start("while :; do :; done"), start("exec sleep 100"));
        let deadline = Instant::now() + Duration::from_secs(60);
        while used(&working) < Duration::from_millis(200) {
            assert!(Instant::now() < deadline);
            thread::sleep(Duration::from_millis(10));
        }
        assert!(used(&waiting) < Duration::from_millis(100));
        for child in [&mut working, &mut waiting] {
            child.kill().and_then(|()| child.wait()).unwrap();
        }
    }
}
