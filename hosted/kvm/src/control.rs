//! Control commands from `parador run`, and responses: bytes of [`proto::hosted::control`].

use std::fs::File;
use std::io::{ErrorKind, Read, Write};

use proto::hosted::balloon::BalloonReport;
use proto::hosted::control;
use proto::hosted::debug::DebugState;

use crate::debug;
use crate::pause::PauseGate;
use crate::vcpu_thread::{Notify, VcpuThread, event};

/// Reports the guest's first instruction.
pub fn started(mut to: &File) {
    // A write error has no receiver.
    let _ = to.write(&[control::STARTED]);
}

/// Executes commands and acknowledges them, until the peer disconnects.
pub fn serve(
    mut stream: &File,
    gate: &PauseGate,
    vcpu_threads: &[VcpuThread],
    debug: &DebugState,
    report: &BalloonReport,
) {
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
            control::MEMORY_STATISTICS => {
                report.request();
                vcpu_threads[0].notify(event::BALLOON);
            }
            control::BALLOON => vcpu_threads[0].notify(event::BALLOON),
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
        let (debug, report) = (DebugState::default(), BalloonReport::default());
        let (rounds, pressed) = (AtomicU64::new(0), AtomicBool::new(false));
        let ended = AtomicBool::new(false);
        let ask = |byte| {
            (&ours).write_all(&[byte]).unwrap();
            let mut said = [0];
            (&ours).read_exact(&mut said).unwrap();
            assert_eq!(said[0], byte);
        };
        thread::scope(|scope| {
            scope.spawn(|| serve(&theirs, &gate, &vcpu_threads, &debug, &report));
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
            ask(control::MEMORY_STATISTICS);
            assert!(report.take_request());
            ask(control::BALLOON);
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
