//! Processes that a machine leaves when its first one has ended.
//!
//! Each of them ends soon after its parent, by a signal of its own, and becomes a child of this program, which waits for it: who waits for
//! `parador run` finds no process, and no file that one of them had open.

use crate::failure::Failure;
use crate::messages::{Level, say};
use rustix::io::Errno;
use rustix::process::{
    Pid, Signal, WaitOptions, getpid, kill_process_group, set_child_subreaper, waitpgid,
};
use std::thread;
use std::time::{Duration, Instant};

/// How long processes may take to end by themselves, and then by SIGKILL: memory of many GiB takes the host's kernel a second to free.
const PATIENCE: Duration = Duration::from_secs(5);
/// Pause between two looks.
const PAUSE: Duration = Duration::from_millis(1);

/// Makes this program the parent of descendants whose own parent ends (prctl(2), `PR_SET_CHILD_SUBREAPER`).
pub fn adopt() -> Result<(), Failure> {
    set_child_subreaper(Some(getpid()))
        .map_err(|error| Failure::os("adopt processes of the machine", &error.into()))
}

/// Waits until no process of a group is left, whose leader was this program's child and has been waited for.
pub fn wait(group: Pid) {
    if is_gone(group, Instant::now() + PATIENCE) {
        return;
    }
    // There are some, so the number still means them. It fails if they have just ended.
    let _ = kill_process_group(group, Signal::KILL);
    if !is_gone(group, Instant::now() + PATIENCE) {
        say(Level::Warn, "processes of the machine do not end: the host's kernel holds them");
    }
}

fn is_gone(group: Pid, deadline: Instant) -> bool {
    loop {
        match waitpgid(group, WaitOptions::NOHANG) {
            Ok(Some(_)) | Err(Errno::INTR) => {}
            Ok(None) if Instant::now() >= deadline => return false,
            Ok(None) => thread::sleep(PAUSE),
            // There is no child in this group.
            Err(_) => return true,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::process::CommandExt;
    use std::process::Command;

    /// A process whose parent has ended is waited for.
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
