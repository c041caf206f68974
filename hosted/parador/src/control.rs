//! A running machine as others see it: its state, what happens to it, what is wanted of it.
//!
//! [`Control`] is between the loop that serves the machine ([`Supervisor`]) and the thread that serves the control socket. Only the former
//! acts; what is wanted waits in a queue until it has been done or refused.

use crate::config::Config;
use crate::events::{Event, Events};
use crate::failure::Failure;
use crate::machine::{self, End, Watched};
use crate::perf::Maps;
use crate::statistics::{self, Statistics};
use hyper::body::Bytes;
use proto::wedge::control as byte;
use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::{Errno, read, write};
use schemars::JsonSchema;
use serde::Serialize;
use std::collections::VecDeque;
use std::fs::File;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};
use tokio::sync::{mpsc, oneshot};

/// Wishes that may wait.
const MOST_WISHES: usize = 16;

/// Where a machine is in its life.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum State {
    /// It has not been started: it waits for boot.
    Created,
    /// Its first instruction is still to come.
    Starting,
    /// The guest runs.
    Running,
    /// The guest is stopped, and can go on.
    Paused,
    /// It is over.
    Ended,
}

/// What can be wanted of a machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wish {
    /// A machine that waits for it is started.
    Boot,
    /// The guest stops.
    Pause,
    /// It goes on.
    Resume,
    /// The machine starts anew.
    Reset,
    /// The power button is pressed.
    Shutdown,
    /// Virtual CPUs stop for the debugger.
    Halt,
    /// They go on, as it has said.
    Go,
    /// The machine ends, whatever the guest does.
    End,
}

/// What becomes of a wish: the state after it, or why not.
pub type Answer = Result<State, String>;

/// What is known of the machine.
struct Known {
    state: State,
    /// When it was started, the last time.
    began: Instant,
    /// How long the guest's first instruction took to come.
    start: Option<Duration>,
    /// How often it was started anew.
    resets: u64,
    /// Its device process.
    process: Option<u32>,
    /// Its memory, and the memory of the wedge.
    memory: Option<(File, File)>,
    events: Events,
    wishes: VecDeque<(Wish, oneshot::Sender<Answer>)>,
    /// Wakes the debugger.
    debugger: Option<UnixStream>,
}

impl Known {
    /// Something may have happened that the debugger wants to know.
    fn news(&self) {
        if let Some(debugger) = &self.debugger {
            // If the pipe is full, it will look in any case.
            let _ = write(debugger, &[0]);
        }
    }
}

/// A handle on a machine; all handles are of the same one.
#[derive(Clone)]
pub struct Control(Arc<Inner>);

struct Inner {
    known: Mutex<Known>,
    /// Makes the loop look at the wishes.
    wake: UnixStream,
    config: Config,
    /// Bytes of the guest's memory.
    size: u64,
    /// How the guest is run.
    backend: &'static str,
}

impl Inner {
    /// Of machines of KVM nobody counts what the wedge counts.
    fn has_wedge(&self) -> bool {
        self.backend == "process"
    }
}

/// `GET /v1/vm`.
#[derive(Debug, Serialize, JsonSchema)]
pub struct Vm {
    /// Where it is in its life.
    pub state: State,
    /// How the guest is run.
    pub backend: String,
    /// Number of the machine's first process; the others are its children.
    pub process: Option<u32>,
    /// Version of Parador.
    pub version: String,
    /// What was said of the machine: file and options together.
    pub config: Config,
}

impl Control {
    /// Of a machine with `size` bytes of memory that is going to be started by this back end. Events are written to `sink`, too. The other value is for [`Supervisor::new`].
    pub fn new(
        config: Config,
        size: u64,
        backend: &'static str,
        sink: Option<File>,
    ) -> Result<(Self, UnixStream), Failure> {
        let pair = UnixStream::pair().and_then(|(wake, woken)| {
            wake.set_nonblocking(true)?;
            woken.set_nonblocking(true)?;
            Ok((wake, woken))
        });
        let (wake, woken) = pair.map_err(|error| Failure::os("make a pipe", &error))?;
        let known = Known {
            state: State::Starting,
            began: Instant::now(),
            start: None,
            resets: 0,
            process: None,
            memory: None,
            events: Events::new(sink),
            wishes: VecDeque::new(),
            debugger: None,
        };
        Ok((Self(Arc::new(Inner { known: Mutex::new(known), wake, config, size, backend })), woken))
    }

    fn known(&self) -> MutexGuard<'_, Known> {
        // Nothing is left half done where it could panic.
        self.0.known.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The machine has been started: `process` is its device process, the descriptors are those of its memory and of the wedge's.
    pub fn started(&self, process: u32, memory: (OwnedFd, OwnedFd), began: Instant) {
        let mut known = self.known();
        known.state = State::Starting;
        known.began = began;
        known.start = None;
        known.process = Some(process);
        known.memory = Some((memory.0.into(), memory.1.into()));
        known.events.happened(Event::Started { process });
    }

    /// The machine waits for boot: see [`Self::await_boot`].
    pub fn created(&self) {
        let mut known = self.known();
        known.state = State::Created;
        known.events.happened(Event::Created);
    }

    /// Waits until somebody wants the machine to be started; if something else ends it, what. `woken` is that of [`Self::new`], `asked` as in [`Supervisor::new`].
    pub fn await_boot(
        &self,
        woken: &UnixStream,
        deadline: Option<Instant>,
        asked: Option<(&UnixStream, &dyn Fn())>,
    ) -> Result<Option<End>, Failure> {
        let signals = machine::ending_signals()?;
        loop {
            let mut fds = vec![woken.as_fd(), asked.map_or(woken, |asked| asked.0).as_fd()];
            fds.extend(signals.iter().map(|signal| signal.1.as_fd()));
            let mut fds: Vec<_> =
                fds.iter().map(|fd| PollFd::from_borrowed_fd(*fd, PollFlags::IN)).collect();
            let Some(left) = machine::left(deadline) else { return Ok(Some(End::Timeout)) };
            match poll(&mut fds, left.as_ref()) {
                Ok(_) | Err(Errno::INTR) => {}
                Err(error) => return Err(Failure::os("wait for boot", &error.into())),
            }
            let is_ready = |index: usize| !fds[index].revents().is_empty();
            let signal = signals.iter().enumerate().find(|(index, _)| is_ready(index + 2));
            if let Some((_, (signal, _))) = signal {
                return Ok(Some(End::Signal(*signal)));
            }
            if let Some((pipe, write)) = asked.filter(|_| is_ready(1)) {
                drain(pipe.as_fd());
                write();
            }
            drain(woken.as_fd());
            if let Some(what) = self.wishes_before_boot() {
                return Ok(what);
            }
        }
    }

    /// Answers what is wanted of a machine that waits for boot: whether it is started or ended then.
    fn wishes_before_boot(&self) -> Option<Option<End>> {
        let mut known = self.known();
        loop {
            let (wish, answer) = known.wishes.pop_front()?;
            let (said, what) = match wish {
                Wish::Boot => (Ok(State::Starting), Some(None)),
                Wish::End => (Ok(State::Ended), Some(Some(End::Request))),
                _ => (Err("the machine waits for boot".to_owned()), None),
            };
            if what == Some(None) {
                known.state = State::Starting;
            }
            // Who has gone away in the meantime wants no answer.
            let _ = answer.send(said);
            if what.is_some() {
                return what;
            }
        }
    }

    /// A debugger is told by this of what happens.
    pub fn debugger(&self, news: UnixStream) {
        self.known().debugger = Some(news);
    }

    /// Where the machine is in its life.
    pub fn state(&self) -> State {
        self.known().state
    }

    /// Its memory, and the memory of the wedge; `None`: it has ended, or is still to come.
    pub fn memory(&self) -> Option<(File, File)> {
        let known = self.known();
        let (memory, shared) = known.memory.as_ref().filter(|_| known.process.is_some())?;
        memory.try_clone().and_then(|memory| Ok((memory, shared.try_clone()?))).ok()
    }

    /// The machine has ended, with this code, and is started anew.
    pub fn reset(&self, code: u8) {
        let mut known = self.known();
        known.process = None;
        known.resets += 1;
        known.events.happened(Event::Reset { code });
    }

    /// The machine has ended, with this code, for ever. Event streams end.
    pub fn ended(&self, code: u8, reason: &str) {
        let mut known = self.known();
        known.state = State::Ended;
        known.news();
        known.process = None;
        known.wishes.clear();
        known.events.happened(Event::Ended { code, reason: reason.to_owned() });
        known.events.close();
    }

    /// The guest's kernel has panicked.
    pub fn panicked(&self) {
        self.known().events.happened(Event::Panic);
    }

    /// What there is to say of it.
    pub fn vm(&self) -> Vm {
        let known = self.known();
        Vm {
            state: known.state,
            backend: self.0.backend.to_owned(),
            process: known.process,
            version: env!("CARGO_PKG_VERSION").to_owned(),
            config: self.0.config.clone(),
        }
    }

    /// What it has done, and needs.
    pub fn statistics(&self) -> Statistics {
        let known = self.known();
        let memory = known.memory.as_ref();
        let cpu = statistics::cpu(known.process);
        Statistics {
            state: known.state,
            uptime_ms: milliseconds(known.began.elapsed()),
            start_ms: known.start.map(milliseconds),
            resets: known.resets,
            processes: cpu.processes,
            user_ms: cpu.user_ms,
            system_ms: cpu.system_ms,
            memory_bytes: self.0.size,
            memory_used_bytes: memory.map_or(0, |memory| statistics::used(&memory.0)),
            wedge: memory
                .filter(|_| self.0.has_wedge())
                .map(|memory| statistics::wedge(&memory.1))
                .unwrap_or_default(),
        }
    }

    /// Everything that has happened, and what will. `None`: too many listen.
    pub fn listen(&self) -> Option<mpsc::Receiver<Bytes>> {
        self.known().events.listen()
    }

    /// Wants something of the machine.
    pub fn wish(&self, wish: Wish) -> oneshot::Receiver<Answer> {
        let (answer, answered) = oneshot::channel();
        let mut known = self.known();
        // One that is dropped says that the machine has ended.
        if known.state != State::Ended {
            if known.wishes.len() < MOST_WISHES {
                known.wishes.push_back((wish, answer));
            } else {
                let _ = answer.send(Err("too much is wanted of it at once".to_owned()));
            }
        }
        // If the pipe is full, the loop will look in any case.
        let _ = write(&self.0.wake, &[0]);
        answered
    }
}

fn milliseconds(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}

/// The loop's side.
pub struct Supervisor<'a> {
    control: &'a Control,
    /// Readable when there are wishes.
    woken: &'a UnixStream,
    /// Readable when statistics are wanted, by a signal; and who writes them.
    asked: Option<(&'a UnixStream, &'a dyn Fn())>,
    /// Maps for profilers.
    maps: Option<&'a mut Maps>,
    /// To the device process; `None`: it has ended.
    device: Option<UnixStream>,
    /// Who waits for the device process, and for what.
    waiting: Vec<(u8, oneshot::Sender<Answer>)>,
}

impl<'a> Supervisor<'a> {
    /// `device` is the other side of the device process's descriptor.
    pub fn new(
        control: &'a Control,
        woken: &'a UnixStream,
        device: UnixStream,
        asked: Option<(&'a UnixStream, &'a dyn Fn())>,
        maps: Option<&'a mut Maps>,
    ) -> Self {
        Self { control, woken, asked, maps, device: Some(device), waiting: Vec::new() }
    }

    fn wishes(&mut self) -> Option<End> {
        drain(self.woken.as_fd());
        loop {
            let (state, wish) = {
                let mut known = self.control.known();
                (known.state, known.wishes.pop_front())
            };
            let (wish, answer) = wish?;
            let byte = match (wish, state) {
                (Wish::End, _) => {
                    let _ = answer.send(Ok(State::Ended));
                    return Some(End::Request);
                }
                (Wish::Boot, _) => {
                    let _ = answer.send(Err("the machine has been started already".to_owned()));
                    continue;
                }
                (Wish::Reset, _) => {
                    let _ = answer.send(Ok(State::Starting));
                    return Some(End::Reset);
                }
                (Wish::Halt, State::Starting | State::Running | State::Paused) => byte::HALT,
                (Wish::Go, State::Starting | State::Running | State::Paused) => byte::GO,
                (Wish::Pause, State::Running) => byte::PAUSE,
                (Wish::Resume, State::Paused) => byte::RESUME,
                (Wish::Shutdown, State::Running) => byte::POWER_BUTTON,
                (Wish::Pause, State::Paused) => {
                    let _ = answer.send(Err("the machine is paused already".to_owned()));
                    continue;
                }
                (Wish::Shutdown, State::Paused) => {
                    let text = "the machine is paused: resume it, or force its end";
                    let _ = answer.send(Err(text.to_owned()));
                    continue;
                }
                (Wish::Resume, State::Running) => {
                    let _ = answer.send(Err("the machine is not paused".to_owned()));
                    continue;
                }
                (_, State::Created | State::Starting | State::Ended) => {
                    let _ = answer.send(Err("the guest does not run yet".to_owned()));
                    continue;
                }
            };
            match self.device.as_ref().map(|device| write(device, &[byte])) {
                Some(Ok(1)) => self.waiting.push((byte, answer)),
                _ => drop(answer.send(Err("the machine does not listen".to_owned()))),
            }
        }
    }

    /// There is a further process.
    fn made(&mut self) {
        let process = self.control.known().process;
        if let (Some(maps), Some(process)) = (&mut self.maps, process) {
            maps.processes(statistics::children(process));
        }
    }

    /// The device process says something.
    fn told(&mut self) {
        let Some(device) = &self.device else { return };
        let mut bytes = [0; 64];
        let length = match read(device, &mut bytes[..]) {
            Err(Errno::INTR | Errno::AGAIN) => return,
            Err(_) | Ok(0) => {
                self.device = None;
                return;
            }
            Ok(length) => length,
        };
        for &byte in &bytes[..length] {
            if byte == byte::PROCESS_CREATED {
                self.made();
                continue;
            }
            let mut known = self.control.known();
            let (state, event) = match byte {
                byte::STARTED if known.start.is_none() => {
                    let start = known.began.elapsed();
                    known.start = Some(start);
                    (State::Running, Event::Running { start_ms: milliseconds(start) })
                }
                byte::HALTED => {
                    known.news();
                    continue;
                }
                byte::HALT | byte::GO => {
                    let state = known.state;
                    drop(known);
                    self.answer(byte, state);
                    continue;
                }
                byte::PAUSE => (State::Paused, Event::Paused),
                byte::RESUME => (State::Running, Event::Resumed),
                byte::POWER_BUTTON => (known.state, Event::ShutdownRequested),
                _ => continue,
            };
            known.state = state;
            known.events.happened(event);
            drop(known);
            self.answer(byte, state);
        }
    }

    /// Answers who has wanted this of the device process.
    fn answer(&mut self, byte: u8, state: State) {
        if let Some(index) = self.waiting.iter().position(|waiting| waiting.0 == byte) {
            // Who has gone away in the meantime wants no answer.
            let _ = self.waiting.swap_remove(index).1.send(Ok(state));
        }
    }
}

impl Watched for Supervisor<'_> {
    fn descriptors(&self) -> Vec<BorrowedFd<'_>> {
        let asked = self.asked.map_or(self.woken, |asked| asked.0);
        let mut all = vec![self.woken.as_fd(), asked.as_fd()];
        all.extend(self.device.as_ref().map(AsFd::as_fd));
        all
    }

    fn readable(&mut self, index: usize) -> Option<End> {
        match index {
            0 => return self.wishes(),
            1 => {
                if let Some((pipe, write)) = self.asked {
                    drain(pipe.as_fd());
                    write();
                }
            }
            _ => self.told(),
        }
        None
    }
}

/// Reads what is in a pipe that only wakes.
fn drain(pipe: BorrowedFd<'_>) {
    let mut bytes = [0; 64];
    // It does not block.
    while matches!(read(pipe, &mut bytes[..]), Ok(1..)) {}
}
