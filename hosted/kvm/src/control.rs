//! Control commands from `parador run`, and responses: bytes of [`proto::hosted::control`].

use std::fs::File;
use std::io::{ErrorKind, Read, Write};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

use proto::hosted::control;
use proto::hosted::debug::DebugState;

use crate::debug;
use crate::vcpu_thread::{VcpuThread, event};

/// Barrier at which vCPUs wait while the VM is paused.
#[derive(Default)]
pub struct PauseGate {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    is_closed: bool,
    /// Number of vCPUs at the barrier.
    waiting: usize,
}

impl PauseGate {
    fn state(&self) -> MutexGuard<'_, State> {
        // Every update is atomic under the lock.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Blocks a vCPU that has received [`event::PAUSE`] while the VM is paused.
    pub fn wait_if_paused(&self) {
        self.outside_guest(|| ());
    }

    /// Runs a blocking operation of a vCPU outside of the guest. If the VM is paused at its end,
    /// waits until it is resumed.
    pub fn outside_guest<T>(&self, act: impl FnOnce() -> T) -> T {
        self.state().waiting += 1;
        self.changed.notify_all();
        let done = act();
        let state = self.state();
        let is_closed = |state: &mut State| state.is_closed;
        let mut state =
            self.changed.wait_while(state, is_closed).unwrap_or_else(PoisonError::into_inner);
        state.waiting -= 1;
        done
    }

    /// Pauses all vCPUs; returns when they have stopped.
    fn pause(&self, vcpu_threads: &[VcpuThread]) {
        let mut state = self.state();
        state.is_closed = true;
        vcpu_threads.iter().for_each(|vcpu_thread| vcpu_thread.notify(event::PAUSE));
        let is_passed = |state: &mut State| state.waiting < vcpu_threads.len();
        drop(self.changed.wait_while(state, is_passed).unwrap_or_else(PoisonError::into_inner));
    }

    /// Resumes all vCPUs.
    fn resume(&self) {
        self.state().is_closed = false;
        self.changed.notify_all();
    }
}

/// Reports the guest's first instruction.
pub fn started(mut to: &File) {
    // A write error has no receiver.
    let _ = to.write(&[control::STARTED]);
}

/// Executes commands and acknowledges them, until the peer disconnects.
pub fn serve(mut stream: &File, gate: &PauseGate, vcpu_threads: &[VcpuThread], debug: &DebugState) {
    let mut byte = [0];
    loop {
        match stream.read(&mut byte) {
            Ok(1..) => {}
            Err(error) if error.kind() == ErrorKind::Interrupted => continue,
            Ok(0) | Err(_) => return,
        }
        match byte[0] {
            // Disks complete the requests in progress.
            control::PAUSE => gate.pause(vcpu_threads),
            control::RESUME => gate.resume(),
            control::POWER_BUTTON => vcpu_threads[0].notify(event::POWER_BUTTON),
            control::HALT => debug::stop(debug, vcpu_threads),
            control::GO => debug::go(debug),
            _ => continue,
        }
        let _ = stream.write(&byte);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::fd::OwnedFd;
    use std::os::unix::net::UnixStream;
    use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::SeqCst};
    use std::thread;
    use vmm_vcpu::CounterClock;

    #[test]
    fn vcpus_pause_and_resume() {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let (ours, theirs) = (File::from(OwnedFd::from(ours)), File::from(OwnedFd::from(theirs)));
        let (gate, vcpu_threads) =
            (PauseGate::default(), [VcpuThread::default(), VcpuThread::default()]);
        let debug = DebugState::default();
        let (rounds, pressed) = (AtomicU64::new(0), AtomicBool::new(false));
        let ended = AtomicBool::new(false);
        let ask = |byte| {
            (&ours).write_all(&[byte]).unwrap();
            let mut said = [0];
            (&ours).read_exact(&mut said).unwrap();
            assert_eq!(said[0], byte);
        };
        thread::scope(|scope| {
            scope.spawn(|| serve(&theirs, &gate, &vcpu_threads, &debug));
            for vcpu_thread in &vcpu_threads {
                let (gate, rounds, pressed, ended) = (&gate, &rounds, &pressed, &ended);
                scope.spawn(move || {
                    vcpu_thread.register_current();
                    let clock = CounterClock::new(1_000_000, 0);
                    while !ended.load(SeqCst) {
                        let events = vcpu_thread.wait(&clock, crate::vcpu_thread::tsc() + 100_000);
                        if events & event::PAUSE != 0 {
                            gate.wait_if_paused();
                        }
                        pressed.fetch_or(events & event::POWER_BUTTON != 0, SeqCst);
                        rounds.fetch_add(1, SeqCst);
                    }
                });
            }
            for _ in 0..20 {
                ask(control::PAUSE);
                let before = rounds.load(SeqCst);
                thread::yield_now();
                assert_eq!(rounds.load(SeqCst), before);
                ask(control::RESUME);
            }
            ask(control::POWER_BUTTON);
            while !pressed.load(SeqCst) {
                thread::yield_now();
            }
            ended.store(true, SeqCst);
            // The peer disconnects.
            rustix::net::shutdown(&ours, rustix::net::Shutdown::Both).unwrap();
        });
    }
}
