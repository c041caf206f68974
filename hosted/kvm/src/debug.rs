//! Stops of virtual processors for a debugger, which is another process (`docs/design/0015-debugger.md`): their side of what is shared
//! ([`proto::wedge::debug`]).

use std::fs::File;
use std::io::Write;
use std::sync::atomic::{AtomicU32, Ordering::SeqCst};
use std::time::Duration;

use kvm_bindings::{KVM_GUESTDBG_ENABLE, KVM_GUESTDBG_SINGLESTEP, kvm_guest_debug};
use proto::wedge::control;
use proto::wedge::debug::{DebugHost, DebugState, command, register};
use rustix::fs::Timespec;
use rustix::thread::futex;

use crate::control::Gate;
use crate::seat::{Seat, event};

/// How long a processor waits before it looks whether it is still to wait.
const LOOK: Duration = Duration::from_millis(100);

/// What a processor needs in order to stop.
#[derive(Clone, Copy)]
pub struct Stops<'s> {
    /// Which one it is.
    pub index: usize,
    /// What debugger and processors leave for each other.
    pub shared: &'s DebugState,
    /// The machine may be paused while a processor has stopped.
    pub gate: &'s Gate,
    /// Its own seat.
    pub seat: &'s Seat,
    /// To the one who has started the machine.
    pub stream: &'s File,
}

impl Stops<'_> {
    /// Stops until the debugger lets the processor go on, with these registers: `true` for one instruction.
    pub fn halt(&self, why: u32, registers: &mut [u64; register::COUNT]) -> bool {
        self.gate.stay(|| self.shared.halt(self.index, why, registers, self))
    }
}

impl DebugHost for Stops<'_> {
    fn notify_debugger(&self) {
        let mut stream = self.stream;
        // If nobody listens, the machine ends.
        let _ = stream.write(&[control::HALTED]);
    }

    fn wait(&self, word: &AtomicU32) {
        let time = Timespec { tv_sec: 0, tv_nsec: LOOK.subsec_nanos().into() };
        // An early return is allowed.
        let _ = futex::wait(word, futex::Flags::empty(), command::WAIT, Some(&time));
    }

    fn on_resume(&self) {
        self.seat.forget(event::DEBUG);
    }
}

/// Tells those that have not stopped to do so.
pub fn stop(shared: &DebugState, seats: &[Seat]) {
    for (seat, vcpu) in seats.iter().zip(&shared.vcpus) {
        if vcpu.halted.load(SeqCst) == 0 {
            seat.tell(event::DEBUG);
        }
    }
}

/// Those that the debugger lets go on look.
pub fn go(shared: &DebugState) {
    for vcpu in &shared.vcpus {
        // It cannot fail with a mapped word.
        let _ = futex::wake(&vcpu.command, futex::Flags::empty(), 1);
    }
}

/// What KVM is to leave the guest for: each instruction if it `steps`. Breakpoints are instructions that it is left for in any case.
pub fn control(steps: bool) -> kvm_guest_debug {
    let step = if steps { KVM_GUESTDBG_SINGLESTEP } else { 0 };
    kvm_guest_debug { control: KVM_GUESTDBG_ENABLE | step, ..Default::default() }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proto::wedge::debug::reason;
    use std::io::Read;
    use std::os::fd::OwnedFd;
    use std::os::unix::net::UnixStream;
    use std::thread;

    #[test]
    fn a_processor_stops_and_goes_on() {
        let (mut ours, theirs) = UnixStream::pair().unwrap();
        let stream = File::from(OwnedFd::from(theirs));
        let (shared, gate, seat) = (DebugState::default(), Gate::default(), Seat::default());
        let stops = Stops { index: 1, shared: &shared, gate: &gate, seat: &seat, stream: &stream };
        let own = &shared.vcpus[1];
        for (wanted, then) in [(1, command::GO), (1, command::STEP), (0, command::WAIT)] {
            shared.wanted.store(wanted, SeqCst);
            seat.tell(event::DEBUG | event::KICK);
            thread::scope(|scope| {
                let stopped = scope.spawn(|| {
                    let mut registers = [5; register::COUNT];
                    (stops.halt(reason::WANTED, &mut registers), registers)
                });
                ours.read_exact(&mut [0]).unwrap();
                if wanted != 0 {
                    assert_eq!((own.halted.load(SeqCst), own.registers[3].load(SeqCst)), (1, 5));
                    own.registers[3].store(7, SeqCst);
                    own.registers[register::CS].store(7, SeqCst);
                    own.command.store(then, SeqCst);
                    go(&shared);
                }
                let (steps, registers) = stopped.join().unwrap();
                assert_eq!(steps, then == command::STEP);
                let changed = if wanted != 0 { 7 } else { 5 };
                assert_eq!((registers[3], registers[register::CS]), (changed, 5));
            });
            assert_eq!((own.halted.load(SeqCst), seat.take()), (0, event::KICK));
        }
        assert_eq!(own.halts.load(SeqCst), 3);
        // Only who has not stopped is told to.
        let seats = [Seat::default(), Seat::default()];
        shared.vcpus[0].halted.store(1, SeqCst);
        stop(&shared, &seats);
        assert_eq!(seats.map(|seat| seat.take()), [0, event::DEBUG]);
    }
}
