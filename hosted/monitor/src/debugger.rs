//! `--gdb`: GDB server for a VM, with GDB's remote serial protocol
//! (`docs/design/0015-debugger.md`).
//!
//! A thread of `parador` accesses guest memory and shared memory as files, and asks the VM's first
//! process to stop and resume virtual CPUs. It does not trust the contents of either: the guest may
//! have written them. Virtual CPUs are threads 1, 2 ... of the debugger.

mod guest_kernel;
mod memory;
mod protocol;
mod server;
mod session;

use crate::config::gdb::GdbEndpoint;
use crate::control::Control;
pub use guest_kernel::GuestKernel;
use hosted_command::failure::{Failure, IoContext};
use hosted_command::messages::{Level, say};
pub use memory::Ram;
use proto::hosted::debug::{DebugState, stop};
use proto::hosted::layout;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::Shutdown;
use server::{Connection, Listener};
use session::Session;
use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io;
use std::mem::offset_of;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

/// Time for the debugger to receive the VM's exit.
const LINGER: Duration = Duration::from_millis(500);

/// Makes a VM that is about to start wait for the debugger; `shared` is its shared memory.
pub fn make_wait(shared: &OwnedFd) -> Result<(), Failure> {
    let file = shared.try_clone().map(File::from);
    let at = layout::DEBUG + offset_of!(DebugState, wanted) as u64;
    let written = file.and_then(|file| file.write_all_at(&stop::REQUESTED.to_le_bytes(), at));
    written.os_error("make the VM wait for the debugger")
}

/// Listens for debuggers in a thread; dropping it ends the thread.
pub struct Debugger {
    /// Has the commands of the session.
    control: Control,
    path: Option<PathBuf>,
    thread: Option<JoinHandle<()>>,
    connected: Arc<Mutex<Option<OwnedFd>>>,
    /// Set on drop, even if no VM was ever started.
    end: Arc<AtomicBool>,
    wake: UnixStream,
}

impl Debugger {
    /// Listens at `place`.
    ///
    /// # Errors
    /// The socket cannot be created.
    pub fn start(
        place: &GdbEndpoint,
        control: Control,
        kernel: GuestKernel,
        (vcpus, ram): (u8, Ram),
    ) -> Result<Self, Failure> {
        let (listener, path) = Listener::open(place.address())?;
        let failed = |error| Failure::os("listen for a debugger", &error);
        let (news, wake) = UnixStream::pair().map_err(failed)?;
        let copy = wake.try_clone().map_err(failed)?;
        news.set_nonblocking(true).and_then(|()| wake.set_nonblocking(true)).map_err(failed)?;
        control.set_debugger(copy);
        let own = control.clone();
        let connected = Arc::new(Mutex::new(None));
        let end = Arc::<AtomicBool>::default();
        let mut session = Session {
            control,
            end: Arc::clone(&end),
            kernel,
            vcpus: usize::from(vcpus),
            waits: place.waits(),
            ram,
            news,
            connection: None,
            connected: Arc::clone(&connected),
            resets: 0,
            breakpoints: BTreeMap::new(),
            seen: vec![0; vcpus.into()],
            actions: BTreeMap::new(),
            locked: false,
        };
        let thread = thread::Builder::new().name("gdb".to_owned());
        let thread = thread.spawn(move || serve(&mut session, &listener)).map_err(failed)?;
        Ok(Self { control: own, path, thread: Some(thread), connected, end, wake })
    }
}

impl Drop for Debugger {
    fn drop(&mut self) {
        if let Some(path) = &self.path {
            // The socket may have been removed already.
            let _ = fs::remove_file(path);
        }
        let Some(thread) = self.thread.take() else { return };
        self.end.store(true, Ordering::Relaxed);
        // The session may wait for a command that nothing executes any more: see [`Session::ask`].
        self.control.discard_commands();
        let _ = rustix::io::write(&self.wake, &[0]);
        let deadline = Instant::now() + LINGER;
        while !thread.is_finished() && Instant::now() < deadline {
            thread::sleep(Duration::from_millis(5));
        }
        let connected = self.connected.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(connection) = connected {
            // The connection may be closed already.
            let _ = rustix::net::shutdown(&connection, Shutdown::Both);
        }
        // Joining fails only after a panic of the thread, which has been reported.
        let _ = thread.join();
    }
}

/// Serves debuggers, one after another, until the VM ends. Those that connect before it has
/// processes wait for them.
fn serve(session: &mut Session, listener: &Listener) {
    while !session.has_ended() {
        let fds = [session.news.as_fd(), listener.descriptor()];
        let mut fds = fds.map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN));
        let count = if session.is_before_start() { 1 } else { fds.len() };
        let _ = poll(&mut fds[..count], Some(&Timespec { tv_sec: 1, tv_nsec: 0 }));
        let is_news = !fds[0].revents().is_empty();
        if is_news {
            session.drain();
        }
        // The VM may have started, restarted or ended.
        if is_news || count == 1 {
            continue;
        }
        let (connection, copy, second) = match accept(listener) {
            Ok(accepted) => accepted,
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => continue,
            Err(_) => {
                // Most likely file descriptors are exhausted; closing connections free some.
                thread::sleep(Duration::from_millis(100));
                continue;
            }
        };
        *session.connected.lock().unwrap_or_else(PoisonError::into_inner) = Some(second);
        session.connection = Some(copy);
        session.begin();
        if let Err(error) = protocol::serve(session, connection) {
            say(Level::Warn, &format!("debugger connection failed: {error}"));
        }
        session.connection = None;
        *session.connected.lock().unwrap_or_else(PoisonError::into_inner) = None;
        session.leave();
    }
}

/// Accepts a connection and duplicates its descriptor twice.
fn accept(listener: &Listener) -> io::Result<(Connection, OwnedFd, OwnedFd)> {
    let (connection, copy) = listener.accept()?;
    let second = copy.try_clone()?;
    Ok((connection, copy, second))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Config;
    use std::io::{Read, Write};

    #[test]
    fn an_early_connection_waits_for_the_start() {
        for waits_for_boot in [false, true] {
            let folder = tempfile::tempdir().unwrap();
            let path = folder.path().join("gdb");
            let endpoint = format!("unix={}", path.display());
            let endpoint = GdbEndpoint::parse(&endpoint).unwrap();
            let (control, _wakeup) = Control::new(Config::default(), 1 << 20, "kvm", None).unwrap();
            if waits_for_boot {
                control.created();
            }
            let ram = Ram { low: 1 << 20, size: 1 << 20 };
            let debugger = Debugger::start(&endpoint, control, GuestKernel::Kvm, (1, ram)).unwrap();
            let mut connection = UnixStream::connect(&path).unwrap();
            connection.write_all(b"+$?#3f").unwrap();
            connection.set_read_timeout(Some(Duration::from_millis(300))).unwrap();
            let read = connection.read(&mut [0]);
            assert_eq!(read.unwrap_err().kind(), io::ErrorKind::WouldBlock);
            drop(debugger);
        }
    }

    #[test]
    fn the_end_does_not_wait_for_commands() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("gdb");
        let endpoint = GdbEndpoint::parse(&format!("unix={}", path.display())).unwrap();
        let size = crate::spec::MIN_MEMORY;
        let (control, mut wakeup) = Control::new(Config::default(), size, "kvm", None).unwrap();
        let prepared = hosted_loader::empty(size).unwrap();
        let counters = crate::statistics::devices::create().unwrap();
        let memory = (prepared.memory, prepared.shared);
        control.started(std::process::id(), memory, counters, Instant::now());
        let ram = Ram { low: size, size };
        let debugger = Debugger::start(&endpoint, control, GuestKernel::Kvm, (1, ram)).unwrap();
        let _connection = UnixStream::connect(&path).unwrap();
        // The session has queued a command, which nothing executes.
        wakeup.set_nonblocking(false).unwrap();
        wakeup.read_exact(&mut [0]).unwrap();
        let (done, ended) = std::sync::mpsc::channel();
        thread::spawn(move || {
            drop(debugger);
            done.send(()).unwrap();
        });
        ended.recv_timeout(Duration::from_secs(60)).expect("the debugger does not end");
    }
}
