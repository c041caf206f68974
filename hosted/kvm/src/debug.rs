//! Debugger stops of vCPUs (`docs/design/0015-debugger.md`): the vCPUs' side of the shared area
//! ([`proto::hosted::debug`]).

use std::fs::File;
use std::io::Write;
use std::sync::atomic::{AtomicU32, Ordering::SeqCst};
use std::time::Duration;

use kvm_bindings::{KVM_GUESTDBG_ENABLE, KVM_GUESTDBG_SINGLESTEP, kvm_guest_debug};
use proto::hosted::control;
use proto::hosted::debug::{DebugHost, DebugState, command, register};
use rustix::fs::Timespec;
use rustix::thread::futex;

use crate::pause::PauseGate;
use crate::vcpu_thread::{Notify, VcpuThread, event};

/// Polling interval of a stopped vCPU.
const LOOK: Duration = Duration::from_millis(100);

/// Context of a vCPU for debugger stops.
#[derive(Clone, Copy)]
pub struct DebugStops<'s> {
    /// vCPU index.
    pub index: usize,
    /// Area shared with the debugger.
    pub shared: &'s DebugState,
    /// Pause barrier: the VM may be paused while the vCPU is stopped.
    pub gate: &'s PauseGate,
    /// Event state of the vCPU's thread.
    pub vcpu_thread: &'s VcpuThread,
    /// Control stream to `parador run`.
    pub stream: &'s File,
}

impl DebugStops<'_> {
    /// Stops until the debugger resumes the vCPU or the VM ends, with these registers. Returns
    /// `true` to step one instruction.
    pub fn halt(&self, why: u32, registers: &mut [u64; register::COUNT]) -> bool {
        self.gate.outside_guest(|| self.shared.halt(self.index, why, registers, self))
    }
}

impl DebugHost for DebugStops<'_> {
    fn notify_debugger(&self) {
        let mut stream = self.stream;
        // If the stream is closed, the VM ends.
        let _ = stream.write(&[control::HALTED]);
    }

    fn wait(&self, word: &AtomicU32) -> bool {
        let time = Timespec { tv_sec: 0, tv_nsec: LOOK.subsec_nanos().into() };
        // Early returns are allowed.
        let _ = futex::wait(word, futex::Flags::empty(), command::WAIT, Some(&time));
        !self.gate.has_ended()
    }

    fn on_resume(&self) {
        self.vcpu_thread.clear(event::DEBUG);
    }
}

/// Notifies the vCPUs that have not stopped.
pub fn stop(shared: &DebugState, vcpu_threads: &[VcpuThread]) {
    for (vcpu_thread, vcpu) in vcpu_threads.iter().zip(&shared.vcpus) {
        if vcpu.halted.load(SeqCst) == 0 {
            vcpu_thread.notify(event::DEBUG);
        }
    }
}

/// Wakes the stopped vCPUs, which check whether they are resumed.
pub fn go(shared: &DebugState) {
    for vcpu in &shared.vcpus {
        // Cannot fail for a mapped word.
        let _ = futex::wake(&vcpu.command, futex::Flags::empty(), 1);
    }
}

/// Returns the KVM debug control: exits at breakpoints, and after each instruction if `steps`.
pub fn control(steps: bool) -> kvm_guest_debug {
    let step = if steps { KVM_GUESTDBG_SINGLESTEP } else { 0 };
    kvm_guest_debug { control: KVM_GUESTDBG_ENABLE | step, ..Default::default() }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proto::hosted::debug::reason;
    use std::io::Read;
    use std::os::fd::OwnedFd;
    use std::os::unix::net::UnixStream;
    use std::thread;

    #[test]
    fn a_vcpu_stops_and_resumes() {
        let (mut ours, theirs) = UnixStream::pair().unwrap();
        let stream = File::from(OwnedFd::from(theirs));
        let (shared, gate, vcpu_thread) =
            (DebugState::default(), PauseGate::default(), VcpuThread::default());
        let stops = DebugStops {
            index: 1,
            shared: &shared,
            gate: &gate,
            vcpu_thread: &vcpu_thread,
            stream: &stream,
        };
        let own = &shared.vcpus[1];
        for (wanted, then) in [(1, command::GO), (1, command::STEP), (0, command::WAIT)] {
            shared.wanted.store(wanted, SeqCst);
            vcpu_thread.notify(event::DEBUG | event::KICK);
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
            assert_eq!((own.halted.load(SeqCst), vcpu_thread.take_events()), (0, event::KICK));
        }
        assert_eq!(own.halts.load(SeqCst), 3);
        // Only vCPUs that have not stopped are notified.
        let vcpu_threads = [VcpuThread::default(), VcpuThread::default()];
        shared.vcpus[0].halted.store(1, SeqCst);
        stop(&shared, &vcpu_threads);
        assert_eq!(vcpu_threads.map(|vcpu_thread| vcpu_thread.take_events()), [0, event::DEBUG]);
        // The VM ends while this vCPU is stopped.
        gate.end();
        assert!(!stops.halt(reason::STEP, &mut [0; register::COUNT]));
    }
}
