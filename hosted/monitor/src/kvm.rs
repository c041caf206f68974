//! KVM back end of `parador run`: its availability, and the process that runs the VM.

use std::fs::File;
use std::io::{Seek, Write};
use std::os::fd::OwnedFd;
use std::path::Path;
use std::process::{Child, Command, ExitCode, Stdio};
use std::sync::OnceLock;
use std::thread;
use std::time::{Duration, Instant};

use hosted_kvm::{KvmConfig, descriptor};
use nix::time::{ClockId, clock_getcpuclockid};
use nix::unistd::Pid;
use rustix::fs::{MemfdFlags, memfd_create};

use hosted_command::architecture::Architecture;
use hosted_command::failure::{self, Failure, describe};
use hosted_command::supervise::{self, AtEnd};
use hosted_system::guest::least_memory;

/// First argument of a KVM process.
const MARK: &str = "--kvm-machine";
/// Limit of the probe's CPU time: it takes a millisecond on hardware, even on a busy host.
const TRIAL: Duration = Duration::from_secs(5);
/// Limit of the probe's real time: the host kernel may hang without using CPU time.
const TIMEOUT: Duration = Duration::from_secs(60);

/// Runs a VM if this process was started for that. Returns `None` in an ordinary `parador`.
pub fn become_machine() -> Option<ExitCode> {
    (supervise::arguments().nth(1)? == MARK).then(|| hosted_kvm::run())
}

/// Probes whether KVM can run a guest, which the presence of `/dev/kvm` does not show. A process of
/// its own (`parador doctor --try-kvm`) runs a virtual CPU with a time limit. The error is the
/// reason.
pub fn trial() -> Result<(), String> {
    static RESULT: OnceLock<Result<(), String>> = OnceLock::new();
    RESULT.get_or_init(try_once).clone()
}

fn try_once() -> Result<(), String> {
    if !Path::new("/dev/kvm").exists() {
        return Err("no /dev/kvm".to_owned());
    }
    let mut command = supervise::own(AtEnd::Kill).map_err(|failure| failure.to_string())?;
    command.args(["doctor", "--try-kvm"]).stdin(Stdio::null()).stderr(Stdio::null());
    let mut child = command.stdout(Stdio::piped()).spawn().map_err(|error| describe(&error))?;
    let start = Instant::now();
    while start.elapsed() < TIMEOUT && used(&child) < TRIAL {
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
    // Fails if the process has just exited. It is not waited for: the host kernel may never release
    // it.
    let _ = child.kill();
    Err(format!(
        "the probe did not finish in {:.0?} of CPU time, {:.0?} of real time",
        time,
        start.elapsed()
    ))
}

/// Returns the CPU time of a process; 0 if it is unknown.
fn used(process: &Child) -> Duration {
    let clock = clock_getcpuclockid(Pid::from_raw(process.id().cast_signed()));
    clock.and_then(ClockId::now).map_or(Duration::ZERO, Duration::from)
}

/// Checks that a kernel is valid and fits into guest memory.
pub fn check(path: &Path, bytes: &[u8], initrd: u64, memory: u64) -> Result<(), Failure> {
    let wrong = |error: &dyn std::fmt::Display| {
        Failure::new(failure::BAD_CONFIG, format!("{}: {error}", path.display()))
    };
    let least = least_memory(Architecture::X86, bytes, initrd).map_err(|error| wrong(&error))?;
    if least > memory {
        let (least, memory) = (least.div_ceil(1 << 20), memory >> 20);
        let text =
            format!("kernel and RAM disk need at least {least} MiB of memory (got {memory} MiB)");
        return Err(wrong(&text).help("increase --memory"));
    }
    Ok(())
}

/// Creates the command of the KVM process.
pub fn command() -> Result<Command, Failure> {
    let mut command = supervise::own(AtEnd::Kill)?;
    command.arg(MARK);
    Ok(command)
}

/// Creates the descriptors of the KVM process only: VM configuration, kernel and RAM disk.
pub fn files(
    machine: &KvmConfig,
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

/// Creates a memory file with this content.
fn file(name: &str, bytes: &[u8]) -> Result<OwnedFd, Failure> {
    let failed = |error| Failure::os("create a memory file for the VM", &error);
    let descriptor =
        memfd_create(name, MemfdFlags::CLOEXEC).map_err(|error| failed(error.into()))?;
    let mut file = File::from(descriptor);
    file.write_all(bytes).and_then(|()| file.rewind()).map_err(failed)?;
    Ok(file.into())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A waiting process uses no CPU time, a busy one does.
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
