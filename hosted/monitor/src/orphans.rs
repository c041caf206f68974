//! Processes of a VM that outlive its first process.
//!
//! Each of them exits shortly after its parent, by its parent-death signal, and becomes a child of
//! `parador`, which reaps it: when `parador run` exits, no process of the VM is left, and no file
//! that one of them had open.

use hosted_command::failure::{Failure, IoContext};
use hosted_command::messages::{Level, say};
use rustix::io::Errno;
use rustix::process::{
    Pid, Signal, WaitOptions, getpid, kill_process_group, set_child_subreaper, waitpgid,
};
use std::thread;
use std::time::{Duration, Instant};

/// Time limit for processes to exit by themselves, and then by SIGKILL: freeing many GiB takes the
/// host kernel a second.
const TIMEOUT: Duration = Duration::from_secs(5);
/// Polling interval.
const POLL_INTERVAL: Duration = Duration::from_millis(1);

/// Makes `parador` the subreaper of its descendants (prctl(2), `PR_SET_CHILD_SUBREAPER`).
pub fn adopt() -> Result<(), Failure> {
    set_child_subreaper(Some(getpid())).os_error("become the subreaper of the VM's processes")
}

/// Reaps all processes of a group whose leader was a child of `parador` and has been reaped.
pub fn wait(group: Pid) {
    if is_gone(group, Instant::now() + TIMEOUT) {
        return;
    }
    // The group is not empty, so its ID is still valid. Fails if its processes have just exited.
    let _ = kill_process_group(group, Signal::KILL);
    if !is_gone(group, Instant::now() + TIMEOUT) {
        say(Level::Warn, "processes of the VM do not exit: the host kernel blocks them");
    }
}

fn is_gone(group: Pid, deadline: Instant) -> bool {
    loop {
        match waitpgid(group, WaitOptions::NOHANG) {
            Ok(Some(_)) | Err(Errno::INTR) => {}
            Ok(None) if Instant::now() >= deadline => return false,
            Ok(None) => thread::sleep(POLL_INTERVAL),
            // No child in this group.
            Err(_) => return true,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::process::CommandExt;
    use std::process::Command;

    /// An orphan is reaped.
    #[test]
    fn orphans_are_waited_for() {
        adopt().unwrap();
        let mut shell = Command::new("sh");
        let mut child = shell.args(["-c", "sleep 0.5 & exit 3"]).process_group(0).spawn().unwrap();
        let group = Pid::from_child(&child);
        assert_eq!(child.wait().unwrap().code(), Some(3));
        assert!(!is_gone(group, Instant::now()), "it sleeps");
        wait(group);
        assert!(is_gone(group, Instant::now()));
    }
}
