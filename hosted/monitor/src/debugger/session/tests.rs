//! Sessions over shared memory in which a test acts for the virtual CPUs.

use super::*;
use crate::config::Config;
use crate::control::executor::CommandExecutor;
use crate::spec::MIN_MEMORY;
use crate::statistics;
use crate::vm_process::EventSource;
use proto::hosted::control;
use proto::hosted::debug::{DebugHost, HALT};
use rustix::io::{read, write};
use std::cell::RefCell;
use std::sync::atomic::AtomicU32;
use std::sync::atomic::Ordering::SeqCst;

/// Writes one word at each look of a stopped virtual CPU.
struct Writer<'s>(&'s DebugState, RefCell<std::vec::IntoIter<(usize, u32)>>);

impl DebugHost for Writer<'_> {
    fn notify_debugger(&self) {}

    fn wait(&self, _: &AtomicU32) -> bool {
        let (at, value) = self.1.borrow_mut().next().expect("it has been released");
        match at {
            at if at == offset_of!(DebugState, wanted) => &self.0.wanted,
            at if at == of(0, offset_of!(VcpuDebug, command)) => &self.0.vcpus[0].command,
            at => {
                assert_eq!(at, of(1, offset_of!(VcpuDebug, command)));
                &self.0.vcpus[1].command
            }
        }
        .store(value, SeqCst);
        true
    }

    fn on_resume(&self) {}
}

#[test]
fn a_command_reaches_a_cpu_that_looks_between_its_words() {
    for locked in [false, true] {
        for (commands, steps) in [
            (&[(1, command::STEP)][..], true),
            (&[(0, command::GO), (1, command::STEP)], true),
            (&[(1, command::GO), (0, command::STEP)], false),
        ] {
            let state = DebugState::default();
            state.wanted.store(stop::REQUESTED, SeqCst);
            let words = release(locked, commands).into_iter();
            let writer = Writer(&state, RefCell::new(words));
            let mut registers = [0; register::COUNT];
            assert_eq!(
                state.halt(1, reason::WANTED, &mut registers, &writer),
                steps,
                "{commands:?}"
            );
        }
    }
    // One without a command resumes at the end, and one that is locked does not.
    let words = release(false, &[]);
    assert_eq!(words.last(), Some(&(offset_of!(DebugState, wanted), stop::NONE)));
    let words = release(true, &[]);
    assert_eq!(words, [(offset_of!(DebugState, wanted), stop::REQUESTED)]);
}

/// Records a start of the VM.
fn start(control: &Control) {
    let prepared = hosted_loader::empty(MIN_MEMORY).unwrap();
    let counters = statistics::devices::create().unwrap();
    let memory = (prepared.memory, prepared.shared);
    control.started(std::process::id(), memory, counters, Instant::now());
}

/// Returns a session with a started VM, and the stream that wakes the loop of its supervisor.
pub fn session(vcpus: usize) -> (Session, UnixStream) {
    let (control, wakeup) = Control::new(Config::default(), MIN_MEMORY, "kvm", None).unwrap();
    start(&control);
    let (news, wake) = UnixStream::pair().unwrap();
    news.set_nonblocking(true).unwrap();
    control.set_debugger(wake);
    let session = Session {
        control,
        end: Arc::default(),
        kernel: GuestKernel::Kvm,
        vcpus,
        waits: false,
        ram: Ram { low: MIN_MEMORY, size: MIN_MEMORY },
        news,
        connection: None,
        connected: Arc::default(),
        resets: 0,
        breakpoints: BTreeMap::new(),
        seen: vec![0; vcpus],
        actions: BTreeMap::new(),
        locked: false,
    };
    (session, wakeup)
}

#[test]
fn a_cpu_with_a_command_is_not_stopped() {
    let (mut session, wakeup) = session(2);
    let control = session.control.clone();
    let shared = control.memory().unwrap().1;
    let set = |vcpu, field, value: u32| {
        let at = layout::DEBUG + of(vcpu, field) as u64;
        shared.write_all_at(&value.to_le_bytes(), at).unwrap();
    };
    let halted = offset_of!(VcpuDebug, halted);
    let command = offset_of!(VcpuDebug, command);
    set(0, halted, 1);
    set(1, halted, 1);
    set(1, command, command::GO);
    let (device, first_process) = UnixStream::pair().unwrap();
    device.set_nonblocking(true).unwrap();
    first_process.set_nonblocking(true).unwrap();
    let mut executor = CommandExecutor::new(&control, &wakeup, device, None, None);
    let mut requests = 0;
    thread::scope(|scope| {
        let stopping = scope.spawn(|| session.stop_all());
        while !stopping.is_finished() {
            assert!(executor.readable(0).is_none());
            let mut byte = [0];
            if read(&first_process, &mut byte) == Ok(1) {
                assert_eq!(byte, [control::HALT]);
                requests += 1;
                match requests {
                    // The thread of the virtual CPU has not run yet.
                    1 => {}
                    2 => {
                        set(1, halted, 0);
                        set(1, command, command::WAIT);
                    }
                    _ => set(1, halted, 1),
                }
                write(&first_process, &byte).unwrap();
                assert!(executor.readable(2).is_none());
            }
            thread::sleep(Duration::from_millis(1));
        }
        stopping.join().unwrap().unwrap();
    });
    assert!(requests >= 3, "it has stopped after {requests} requests");
}

#[test]
fn a_restart_ends_the_session() {
    const AT: u64 = 0x5000;
    let (mut session, _wakeup) = session(1);
    let control = session.control.clone();
    session.breakpoints.insert(0x1000, (0x90, AT));
    session.seen[0] = 3;
    assert!(session.stopped().is_ok());
    control.reset(0);
    assert_eq!(read(&session.news, &mut [0]), Ok(1), "the debugger is notified");
    assert!(session.is_before_start());
    start(&control);
    assert!(!session.is_before_start());
    // By chance a breakpoint instruction of the new guest.
    let memory = control.memory().unwrap().0;
    memory.write_all_at(&[HALT], AT).unwrap();
    assert_eq!(session.stopped().unwrap_err().0, "the VM has restarted");
    session.leave();
    let mut byte = [0];
    memory.read_exact_at(&mut byte, AT).unwrap();
    assert_eq!(byte, [HALT]);

    session.breakpoints.insert(0x1000, (0x90, AT));
    session.begin();
    assert_eq!((session.breakpoints.len(), session.seen[0]), (0, 0));
    assert!(session.stopped().is_ok());
}

#[test]
fn other_commands_do_not_refuse_those_of_the_debugger() {
    let (session, _wakeup) = session(1);
    let submit = |command| session.control.submit(command);
    let _others: Vec<_> = (0..16).map(|_| submit(Command::Pause)).collect();
    assert!(submit(Command::Pause).blocking_recv().unwrap().is_err());
    let mut queued: Vec<_> = (0..16).map(|_| submit(Command::Halt)).collect();
    assert!(queued.iter_mut().all(|answer| answer.try_recv().is_err()));
    // The end has the reason of a refusal.
    let gone = session.ask(Command::Halt).unwrap_err();
    assert_eq!(gone.0, "too many pending commands (limit 32)");
}
