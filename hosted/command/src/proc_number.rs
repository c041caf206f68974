//! Numbers of processes in `/proc`. They are those of the PID namespace in which `/proc` was
//! mounted; a process in another one has a different number for itself (pid_namespaces(7)), as the
//! VMs of containers do.

use rustix::process::{Pid, PidfdFlags, pidfd_open};
use std::fs;
use std::os::fd::AsRawFd;
use std::process::Child;

/// Returns the number of this process.
pub fn own() -> u32 {
    let link = fs::read_link("/proc/self").ok();
    let number = link.as_deref().and_then(|link| link.to_str()?.parse().ok());
    number.unwrap_or_else(std::process::id)
}

/// Returns the number of a child that has not been waited for.
pub fn of_child(child: &Child) -> u32 {
    match own() == std::process::id() {
        true => child.id(),
        false => translated(child).unwrap_or_else(|| child.id()),
    }
}

/// Asks the kernel for the number (proc_pid_fdinfo(5)).
fn translated(child: &Child) -> Option<u32> {
    let process = pidfd_open(Pid::from_child(child), PidfdFlags::empty()).ok()?;
    let info = fs::read_to_string(format!("/proc/self/fdinfo/{}", process.as_raw_fd())).ok()?;
    info.lines().find_map(|line| line.strip_prefix("Pid:"))?.trim().parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::{Command, Stdio};

    #[test]
    fn numbers_are_those_of_proc() {
        assert_eq!(own(), std::process::id());
        let mut child = Command::new("cat").stdin(Stdio::piped()).spawn().unwrap();
        assert_eq!((of_child(&child), translated(&child)), (child.id(), Some(child.id())));
        drop(child.stdin.take());
        child.wait().unwrap();
        assert_eq!(translated(&child), None);
    }
}
