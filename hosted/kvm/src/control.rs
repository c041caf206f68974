//! What the one who has started the machine wants of it, and is told: bytes of [`proto::wedge::control`].

use std::fs::File;
use std::io::{ErrorKind, Read, Write};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

use proto::wedge::control;
use proto::wedge::debug::DebugState;

use crate::debug;
use crate::seat::{Seat, event};

/// Where virtual processors wait while the machine is paused.
#[derive(Default)]
pub struct Gate {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    is_closed: bool,
    /// Processors that wait.
    waiting: usize,
}

impl Gate {
    fn state(&self) -> MutexGuard<'_, State> {
        // Nobody leaves it half changed.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A processor that was told of [`event::PAUSE`] waits, if it still has to.
    pub fn pass(&self) {
        self.stay(|| ());
    }

    /// A processor does what it does outside of the guest, for however long. If the machine is paused then, it waits until it is not.
    pub fn stay<T>(&self, act: impl FnOnce() -> T) -> T {
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

    /// Stops all processors; returns when they have stopped.
    fn close(&self, seats: &[Seat]) {
        let mut state = self.state();
        state.is_closed = true;
        seats.iter().for_each(|seat| seat.tell(event::PAUSE));
        let is_passed = |state: &mut State| state.waiting < seats.len();
        drop(self.changed.wait_while(state, is_passed).unwrap_or_else(PoisonError::into_inner));
    }

    /// They go on.
    fn open(&self) {
        self.state().is_closed = false;
        self.changed.notify_all();
    }
}

/// Says that the guest's first instruction comes now.
pub fn started(mut to: &File) {
    // Nobody to tell if it cannot be written.
    let _ = to.write(&[control::STARTED]);
}

/// Does what is wanted, and says so, until the other side goes.
pub fn serve(mut stream: &File, gate: &Gate, seats: &[Seat], debug: &DebugState) {
    let mut byte = [0];
    loop {
        match stream.read(&mut byte) {
            Ok(1..) => {}
            Err(error) if error.kind() == ErrorKind::Interrupted => continue,
            Ok(0) | Err(_) => return,
        }
        match byte[0] {
            // Disks finish what they have begun.
            control::PAUSE => gate.close(seats),
            control::RESUME => gate.open(),
            control::POWER_BUTTON => seats[0].tell(event::POWER_BUTTON),
            control::HALT => debug::stop(debug, seats),
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
    use vmm_cpu::TscClock;

    #[test]
    fn processors_stop_and_go_on() {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let (ours, theirs) = (File::from(OwnedFd::from(ours)), File::from(OwnedFd::from(theirs)));
        let (gate, seats) = (Gate::default(), [Seat::default(), Seat::default()]);
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
            scope.spawn(|| serve(&theirs, &gate, &seats, &debug));
            for seat in &seats {
                let (gate, rounds, pressed, ended) = (&gate, &rounds, &pressed, &ended);
                scope.spawn(move || {
                    seat.take_place();
                    let clock = TscClock::new(1_000_000, 0);
                    while !ended.load(SeqCst) {
                        let events = seat.wait(&clock, crate::seat::tsc() + 100_000);
                        if events & event::PAUSE != 0 {
                            gate.pass();
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
            // The other side goes.
            rustix::net::shutdown(&ours, rustix::net::Shutdown::Both).unwrap();
        });
    }
}
