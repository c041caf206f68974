//! Removes unfinished files when a signal ends `parador` during a build.

use crate::failure::{Failure, IoContext};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::flag;
use signal_hook::iterator::{Handle, Signals};
use std::fs;
use std::io;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::process::Child;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::Duration;

/// Termination signals.
pub const ENDING: [i32; 3] = [SIGINT, SIGTERM, SIGHUP];

/// Attempts to remove a folder, and the interval between them: children of a killed process exit
/// shortly after it and may write until then.
const REMOVALS: u32 = 50;
const POLL_INTERVAL: Duration = Duration::from_millis(20);

/// Returns those of `signals` that this process does not ignore: nohup(1) and shells start programs
/// that ignore the signals which shall not end them, and handlers would undo that. The caller
/// handles the returned ones from now on: they do not end this process after a cleanup, either.
pub fn heeded(signals: &[i32]) -> Vec<i32> {
    Handlers::update(|handlers| handlers.has_others = true);
    not_ignored(signals)
}

fn not_ignored(signals: &[i32]) -> Vec<i32> {
    // Without procfs all are heeded.
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let ignored = ignored(&status);
    signals.iter().copied().filter(|signal| ignored >> (signal - 1) & 1 == 0).collect()
}

/// Returns the mask of ignored signals of a process (proc(5), `status`); signal 1 is bit 0.
fn ignored(status: &str) -> u64 {
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    mask.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok()).unwrap_or_default()
}

/// Users of the termination signals in this process. signal-hook keeps its handler of a signal for
/// ever: without a user the signal would have no effect.
struct Handlers {
    /// Number of living [`Interruptible`].
    cleanups: usize,
    /// Others than cleanups use them until the process ends.
    has_others: bool,
    /// Gives the signals their default action while it is true.
    is_default: Option<Arc<AtomicBool>>,
}

static HANDLERS: Mutex<Handlers> =
    Mutex::new(Handlers { cleanups: 0, has_others: false, is_default: None });

impl Handlers {
    fn update<T>(act: impl FnOnce(&mut Self) -> T) -> T {
        let mut handlers = HANDLERS.lock().unwrap_or_else(PoisonError::into_inner);
        let result = act(&mut handlers);
        let is_unused = handlers.cleanups == 0 && !handlers.has_others;
        handlers.is_default.iter().for_each(|is_default| is_default.store(is_unused, SeqCst));
        result
    }

    /// Counts a cleanup, and registers the default action at the first one.
    fn add_cleanup(&mut self) -> io::Result<()> {
        if self.is_default.is_none() {
            let is_default = Arc::<AtomicBool>::default();
            for signal in not_ignored(&ENDING) {
                flag::register_conditional_default(signal, Arc::clone(&is_default))?;
            }
            self.is_default = Some(is_default);
        }
        self.cleanups += 1;
        Ok(())
    }
}

/// Cleanup at a signal.
#[derive(Default)]
struct Doomed {
    /// The cleanup has begun, and the process ends.
    has_begun: bool,
    folders: Vec<PathBuf>,
    /// Descriptors instead of process IDs, which are reused.
    processes: Vec<OwnedFd>,
}

/// While this lives, a termination signal kills the registered processes, removes the registered
/// folders and ends `parador` with 128 + signal. Afterwards it has its default action, unless
/// another handler exists ([`heeded`]).
pub struct Interruptible {
    doomed: Arc<Mutex<Doomed>>,
    handle: Handle,
    thread: Option<JoinHandle<()>>,
}

impl Interruptible {
    /// Installs the handlers.
    pub fn new() -> Result<Self, Failure> {
        let failed = "install signal handlers";
        let mut signals = Signals::new(not_ignored(&ENDING)).os_error(failed)?;
        let doomed = Arc::<Mutex<Doomed>>::default();
        let handle = signals.handle();
        let shared = Arc::clone(&doomed);
        // An error where a host allows no more.
        let thread = thread::Builder::new().spawn(move || {
            let first = signals.forever().next();
            // Another program that the terminal's signal killed may have caused a failure here
            // before this signal arrived; the signal takes precedence.
            if let Some(signal) = first.or_else(|| signals.pending().next()) {
                shared.lock().unwrap_or_else(PoisonError::into_inner).remove();
                std::process::exit(128 + signal);
            }
        });
        let thread = thread.os_error("create a thread")?;
        Handlers::update(Handlers::add_cleanup).os_error(failed)?;
        Ok(Self { doomed, handle, thread: Some(thread) })
    }

    fn doomed(&self) -> MutexGuard<'_, Doomed> {
        self.doomed.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Registers a folder of unfinished files, or a file.
    pub fn remove_on_signal(&self, folder: &Path) {
        self.doomed().folders.push(folder.to_owned());
    }

    /// Runs `act` while no cleanup runs: a signal during it takes effect afterwards. If a cleanup
    /// has begun before, waits for the end of the process. `act` must not register anything.
    pub fn uninterrupted<T>(&self, act: impl FnOnce() -> T) -> T {
        let doomed = self.doomed();
        if doomed.has_begun {
            loop {
                thread::park();
            }
        }
        act()
    }

    /// Registers a process that writes to such a folder.
    pub fn kill_on_signal(&self, child: &Child) -> Result<(), Failure> {
        let process = pidfd_open(Pid::from_child(child), PidfdFlags::empty())
            .os_error("open a process descriptor")?;
        self.doomed().processes.push(process);
        Ok(())
    }
}

impl Doomed {
    /// Errors are ignored: the program ends in any case.
    fn remove(&mut self) {
        self.has_begun = true;
        for process in &self.processes {
            // Fails if the process has exited.
            if pidfd_send_signal(process, Signal::KILL).is_ok() {
                let _ = poll(&mut [PollFd::new(process, PollFlags::IN)], None);
            }
        }
        for folder in &self.folders {
            let removed =
                || fs::remove_dir_all(folder).or_else(|_| fs::remove_file(folder)).is_ok();
            let gone = || removed() || !folder.exists();
            let _ = (0..REMOVALS).any(|_| {
                gone() || {
                    thread::sleep(POLL_INTERVAL);
                    false
                }
            });
        }
    }
}

impl Drop for Interruptible {
    fn drop(&mut self) {
        self.handle.close();
        if let Some(thread) = self.thread.take() {
            // Joining fails only after a panic of the thread, which has been reported.
            let _ = thread.join();
        }
        Handlers::update(|handlers| handlers.cleanups -= 1);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::process::{getpid, kill_process};
    use std::env;
    use std::os::unix::process::ExitStatusExt;
    use std::process::Command;

    #[test]
    fn a_cleanup_waits_for_the_last_step() {
        let folder = tempfile::tempdir().unwrap();
        let work = folder.path().join("work");
        fs::create_dir(&work).unwrap();
        let interruptible = Interruptible::new().unwrap();
        interruptible.remove_on_signal(&work);
        thread::scope(|scope| {
            let cleanup = interruptible.uninterrupted(|| {
                let cleanup = scope.spawn(|| interruptible.doomed().remove());
                thread::sleep(5 * POLL_INTERVAL);
                assert!(work.is_dir() && !cleanup.is_finished());
                fs::rename(&work, folder.path().join("result")).unwrap();
                cleanup
            });
            cleanup.join().unwrap();
        });
        assert!(folder.path().join("result").is_dir());
        assert!(interruptible.doomed().has_begun);
    }

    #[test]
    fn ignored_signals_are_found() {
        // SIGHUP and SIGQUIT; this process ignores SIGPIPE, as all of Rust's.
        assert_eq!(ignored("Name:\tx\nSigIgn:\t0000000000000005\n"), 5);
        assert_eq!(ignored("SigIgn:\tx"), 0);
        assert_eq!(not_ignored(&[SIGTERM, Signal::PIPE.as_raw()]), [SIGTERM]);
    }

    /// The action of a signal is one of the process, so the test is in a process of its own.
    #[test]
    fn a_signal_ends_the_process_after_the_last_cleanup() {
        const MARK: &str = "PARADOR_TEST_OWN_PROCESS";
        const NAME: &str = "interrupt::tests::a_signal_ends_the_process_after_the_last_cleanup";
        if env::var_os(MARK).is_none() {
            let mut own = Command::new(env::current_exe().unwrap());
            let output = own.args(["--exact", NAME]).env(MARK, "1").output().unwrap();
            let text = String::from_utf8_lossy(&output.stdout);
            assert_eq!(output.status.signal(), Some(SIGTERM), "{text}");
            return;
        }
        let is_default =
            || Handlers::update(|handlers| handlers.is_default.clone()).unwrap().load(SeqCst);
        let first = Interruptible::new().unwrap();
        drop(Interruptible::new().unwrap());
        assert!(!is_default(), "the first one handles signals");
        drop(first);
        heeded(&ENDING);
        assert!(!is_default(), "the caller handles signals");
        Handlers::update(|handlers| handlers.has_others = false);
        kill_process(getpid(), Signal::TERM).unwrap();
        thread::sleep(Duration::from_secs(5));
    }
}
