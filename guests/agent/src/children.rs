//! Processes of the guest: those that the agent has started, and orphans, which process 1 inherits.
//!
//! One thread takes the ends of all. The standard library waits for a child whose program it cannot
//! start, so nothing is taken while one is started.

use proto::agent::End;
use rustix::io::Errno;
use rustix::process::{Pid, WaitId, WaitIdOptions, WaitOptions, WaitStatus, wait, waitid};
use std::collections::BTreeMap;
use std::io;
use std::process::{Child, Command};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

/// Children whose end a connection waits for, by process ID.
#[derive(Default)]
struct Shared {
    waiting: Mutex<BTreeMap<i32, SyncSender<End>>>,
    started: Condvar,
}

impl Shared {
    fn waiting(&self) -> MutexGuard<'_, BTreeMap<i32, SyncSender<End>>> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The agent's children.
pub struct Children(Arc<Shared>);

impl Children {
    /// Starts the thread that takes the ends.
    pub fn new() -> io::Result<Self> {
        let shared = Arc::<Shared>::default();
        let own = Arc::clone(&shared);
        std::thread::Builder::new().name("reaper".to_owned()).spawn(move || reap(&own))?;
        Ok(Self(shared))
    }

    /// Starts a program; its process ID, and what receives its end.
    pub fn spawn(&self, command: &mut Command) -> io::Result<(Pid, Receiver<End>)> {
        let mut waiting = self.0.waiting();
        let child: Child = command.spawn()?;
        let (sender, receiver) = sync_channel(1);
        let pid = Pid::from_child(&child);
        waiting.insert(pid.as_raw_nonzero().get(), sender);
        self.0.started.notify_one();
        Ok((pid, receiver))
    }

    /// Carries out an action unless the end of a child was taken: until then no other process has
    /// its number.
    pub fn while_known<T>(&self, child: Pid, action: impl FnOnce() -> T) -> Option<T> {
        let waiting = self.0.waiting();
        waiting.contains_key(&child.as_raw_nonzero().get()).then(action)
    }

    /// Starts a program in a PID namespace, which `enter` selects for the children of its thread.
    pub fn spawn_in(
        &self,
        enter: impl FnOnce() -> io::Result<()> + Send,
        command: &mut Command,
    ) -> io::Result<(Pid, Receiver<End>)> {
        // The thread could create no other threads afterwards, and ends.
        std::thread::scope(|scope| {
            let spawn = || enter().and_then(|()| self.spawn(command));
            let thread = std::thread::Builder::new().spawn_scoped(scope, spawn)?;
            thread.join().unwrap_or_else(|_| Err(io::Error::other("start a process")))
        })
    }
}

/// Takes the ends of all children, for ever.
fn reap(shared: &Shared) {
    loop {
        // Reports an end without taking it.
        let options = WaitIdOptions::EXITED | WaitIdOptions::NOWAIT;
        let ended = waitid(WaitId::All, options);
        let mut waiting = shared.waiting();
        match ended {
            Err(Errno::CHILD) => {
                // A child that was started meanwhile is in the list, and waits to be taken.
                if waiting.is_empty() {
                    drop(shared.started.wait(waiting).unwrap_or_else(PoisonError::into_inner));
                }
            }
            _ => {
                while let Ok(Some((pid, status))) = wait(WaitOptions::NOHANG) {
                    let receiver = waiting.remove(&pid.as_raw_nonzero().get());
                    if let (Some(receiver), Some(end)) = (receiver, end(status)) {
                        // The command's connection may have ended.
                        let _ = receiver.try_send(end);
                    }
                }
            }
        }
    }
}

/// Returns how a process ended; `None`: it has not.
fn end(status: WaitStatus) -> Option<End> {
    let exited = status.exit_status().map(|code| End::Exited(code as u8));
    exited.or_else(|| status.terminating_signal().map(|signal| End::Signalled(signal as u8)))
}

#[cfg(test)]
pub mod testing {
    //! Children for tests that start none.

    use super::{Arc, Children};

    /// Returns a list whose ends no thread takes: it would take those of other tests.
    pub fn idle() -> Children {
        Children(Arc::default())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::process::{Signal, kill_process};

    #[test]
    fn ends_reach_their_receivers() {
        let children = Children::new().expect("a thread");
        let shell = |script: &str| children.spawn(Command::new("sh").args(["-c", script]));
        let (_, seven) = shell("exit 7").expect("a shell");
        assert_eq!(seven.recv(), Ok(End::Exited(7)));
        // The reaper sleeps without children, and wakes up.
        std::thread::sleep(std::time::Duration::from_millis(50));
        let (pid, killed) = shell("exec sleep 100").expect("a shell");
        let (_, two) = shell("exit 2").expect("a shell");
        assert_eq!(two.recv(), Ok(End::Exited(2)));
        children
            .while_known(pid, || kill_process(pid, Signal::KILL))
            .expect("known")
            .expect("runs");
        assert_eq!(killed.recv(), Ok(End::Signalled(9)));
        assert_eq!(children.while_known(pid, || ()), None);
        // Taking the child of a start that fails would be a panic.
        assert!(children.spawn(&mut Command::new("/no/such/program")).is_err());
    }
}
