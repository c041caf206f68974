//! Execution of commands on a running VM.

use super::{Answer, Command, Control, milliseconds};
use crate::event_loop::drain;
use crate::events::Event;
use crate::exit::ExitCause;
use crate::metrics::Metrics;
use crate::perf::Maps;
use crate::state::State;
use crate::statistics;
use crate::vm_process::EventSource;
use proto::hosted::control as byte;
use rustix::io::{Errno, read, write};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use tokio::sync::oneshot;

/// Executes commands and follows the VM's state, in the loop that serves the VM.
pub struct CommandExecutor<'a> {
    control: &'a Control,
    /// Readable when commands are pending.
    wakeup: &'a UnixStream,
    metrics: Option<&'a Metrics>,
    /// Symbol maps for profilers.
    maps: Option<&'a mut Maps>,
    /// Control socket of the VM's first process; `None` if it has closed it.
    device: Option<UnixStream>,
    /// Commands sent to the first process, with the receivers of their results.
    waiting: Vec<(u8, oneshot::Sender<Answer>)>,
}

impl<'a> CommandExecutor<'a> {
    /// Creates the executor. `device` is this side of the control socket of the VM's first
    /// process.
    pub fn new(
        control: &'a Control,
        wakeup: &'a UnixStream,
        device: UnixStream,
        metrics: Option<&'a Metrics>,
        maps: Option<&'a mut Maps>,
    ) -> Self {
        Self { control, wakeup, metrics, maps, device: Some(device), waiting: Vec::new() }
    }

    fn commands(&mut self) -> Option<ExitCause> {
        drain(self.wakeup.as_fd());
        loop {
            let (state, command) = {
                let mut status = self.control.status();
                (status.state, status.commands.pop_front())
            };
            let (command, answer) = command?;
            let byte = match (command, state) {
                (Command::Terminate, _) => {
                    let _ = answer.send(Ok(State::Ended));
                    return Some(ExitCause::Request);
                }
                (Command::Boot, _) => {
                    let _ = answer.send(Err("the VM has already been started".to_owned()));
                    continue;
                }
                (Command::Reset, _) => {
                    let _ = answer.send(Ok(State::Starting));
                    return Some(ExitCause::Reset);
                }
                (Command::Halt, State::Starting | State::Running | State::Paused) => byte::HALT,
                (Command::Go, State::Starting | State::Running | State::Paused) => byte::GO,
                (Command::MemoryStatistics, State::Running) => byte::MEMORY_STATISTICS,
                (Command::Balloon(bytes), State::Running) => {
                    match self.control.set_balloon(bytes) {
                        Ok(()) => byte::BALLOON,
                        Err(text) => {
                            let _ = answer.send(Err(text));
                            continue;
                        }
                    }
                }
                (Command::Pause, State::Running) => byte::PAUSE,
                (Command::Resume, State::Paused) => byte::RESUME,
                (Command::Shutdown, State::Running) => byte::POWER_BUTTON,
                (Command::Pause, State::Paused) => {
                    let _ = answer.send(Err("the VM is already paused".to_owned()));
                    continue;
                }
                (Command::MemoryStatistics | Command::Balloon(_), State::Paused) => {
                    let _ = answer.send(Err("the VM is paused".to_owned()));
                    continue;
                }
                (Command::Shutdown, State::Paused) => {
                    let text = "the VM is paused: resume it, or use --force";
                    let _ = answer.send(Err(text.to_owned()));
                    continue;
                }
                (Command::Resume, State::Running) => {
                    let _ = answer.send(Err("the VM is not paused".to_owned()));
                    continue;
                }
                (_, State::Created | State::Starting | State::Ended) => {
                    let _ = answer.send(Err("the guest is not running yet".to_owned()));
                    continue;
                }
            };
            match self.device.as_ref().map(|device| write(device, &[byte])) {
                Some(Ok(1)) => self.waiting.push((byte, answer)),
                _ => drop(answer.send(Err("the VM's control socket is closed".to_owned()))),
            }
        }
    }

    /// Handles the creation of a process of the VM.
    fn on_process_created(&mut self) {
        let process = self.control.status().process;
        if let (Some(maps), Some(process)) = (&mut self.maps, process) {
            maps.processes(statistics::children(process));
        }
    }

    /// Handles messages of the VM's first process.
    fn on_device_message(&mut self) {
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
                self.on_process_created();
                continue;
            }
            let mut status = self.control.status();
            let (state, event) = match byte {
                byte::STARTED if status.start.is_none() => {
                    let start = status.began.elapsed();
                    status.start = Some(start);
                    (State::Running, Event::Running { start_ms: milliseconds(start) })
                }
                byte::HALTED => {
                    status.notify_debugger();
                    continue;
                }
                byte::HALT | byte::GO | byte::MEMORY_STATISTICS | byte::BALLOON => {
                    let state = status.state;
                    drop(status);
                    self.answer(byte, state);
                    continue;
                }
                byte::PAUSE => (State::Paused, Event::Paused),
                byte::RESUME => (State::Running, Event::Resumed),
                byte::POWER_BUTTON => (status.state, Event::ShutdownRequested),
                _ => continue,
            };
            status.state = state;
            status.events.record(event);
            drop(status);
            self.answer(byte, state);
        }
    }

    /// Completes the oldest command of this kind.
    fn answer(&mut self, byte: u8, state: State) {
        if let Some(index) = self.waiting.iter().position(|waiting| waiting.0 == byte) {
            // The client may have disconnected in the meantime.
            let _ = self.waiting.swap_remove(index).1.send(Ok(state));
        }
    }
}

impl EventSource for CommandExecutor<'_> {
    fn descriptors(&self) -> Vec<BorrowedFd<'_>> {
        let metrics = self.metrics.map_or(self.wakeup.as_fd(), Metrics::request);
        let mut all = vec![self.wakeup.as_fd(), metrics];
        all.extend(self.device.as_ref().map(AsFd::as_fd));
        all
    }

    fn readable(&mut self, index: usize) -> Option<ExitCause> {
        match index {
            0 => return self.commands(),
            1 => {
                if let Some(metrics) = self.metrics {
                    metrics.take_request();
                    metrics.write(&self.control.statistics());
                }
            }
            _ => self.on_device_message(),
        }
        None
    }
}
