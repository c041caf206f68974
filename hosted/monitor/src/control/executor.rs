//! Execution of commands on a running VM.

use super::{Command, Control, milliseconds};
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
}

/// Reaction to a command.
enum Reaction {
    /// Sends this byte to the VM's first process.
    Forward(u8),
    /// Answers with the reason.
    Refuse(String),
    /// Answers with the state and ends the VM's processes.
    End(State, ExitCause),
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
        // Commands may follow the one that has started the VM: their wakeups are consumed.
        control.wake_supervisor();
        Self { control, wakeup, metrics, maps, device: Some(device) }
    }

    fn commands(&mut self) -> Option<ExitCause> {
        drain(self.wakeup.as_fd());
        loop {
            let (state, command) = {
                let mut status = self.control.status();
                (status.state, status.next_command())
            };
            let (command, answer) = command?;
            let byte = match self.reaction(command, state) {
                Reaction::Forward(byte) => byte,
                Reaction::Refuse(text) => {
                    let _ = answer.send(Err(text));
                    continue;
                }
                Reaction::End(state, cause) => {
                    let _ = answer.send(Ok(state));
                    return Some(cause);
                }
            };
            match self.device.as_ref().map(|device| write(device, &[byte])) {
                Some(Ok(1)) => self.control.status().waiting.push((byte, answer)),
                _ => drop(answer.send(Err("the VM's control socket is closed".to_owned()))),
            }
        }
    }

    /// Returns the reaction to a command in this state of the VM.
    fn reaction(&self, command: Command, state: State) -> Reaction {
        let refuse = |text: &str| Reaction::Refuse(text.to_owned());
        let byte = match (command, state) {
            (Command::Terminate, _) => return Reaction::End(State::Ended, ExitCause::Request),
            (Command::Boot, _) => return refuse("the VM has already been started"),
            (Command::Reset, _) => return Reaction::End(State::Starting, ExitCause::Reset),
            (Command::Halt, State::Starting | State::Running | State::Paused) => byte::HALT,
            (Command::Go, State::Starting | State::Running | State::Paused) => byte::GO,
            (Command::MemoryStatistics, State::Running) => byte::MEMORY_STATISTICS,
            (Command::Balloon(bytes), State::Running) => match self.control.set_balloon(bytes) {
                Ok(()) => byte::BALLOON,
                Err(text) => return Reaction::Refuse(text),
            },
            (Command::Pause, State::Running) => byte::PAUSE,
            (Command::Resume, State::Paused) => byte::RESUME,
            (Command::Shutdown, State::Running) => byte::POWER_BUTTON,
            (Command::Pause, State::Paused) => return refuse("the VM is already paused"),
            (Command::MemoryStatistics | Command::Balloon(_), State::Paused) => {
                return refuse("the VM is paused");
            }
            (Command::Shutdown, State::Paused) => {
                return refuse("the VM is paused: resume it, or use --force");
            }
            (Command::Resume, State::Running) => return refuse("the VM is not paused"),
            (_, State::Created | State::Starting | State::Ended) => {
                return refuse("the guest is not running yet");
            }
        };
        Reaction::Forward(byte)
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
                    status.complete(byte, state);
                    continue;
                }
                byte::PAUSE => (State::Paused, Event::Paused),
                byte::RESUME => (State::Running, Event::Resumed),
                byte::POWER_BUTTON => (status.state, Event::ShutdownRequested),
                _ => continue,
            };
            status.state = state;
            status.events.record(event);
            status.complete(byte, state);
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Config;
    use crate::event_loop;
    use std::time::Duration;

    #[test]
    fn commands_of_a_client_are_neither_lost_nor_late() {
        let (control, wakeup) = Control::new(Config::default(), 1 << 20, "kvm", None).unwrap();
        control.created();
        let started = control.submit(Command::Boot);
        let mut early = control.submit(Command::Pause);
        let limit = event_loop::deadline(Some(Duration::from_secs(60)));
        assert!(control.await_boot(&wakeup, limit, None).unwrap().is_none());
        assert_eq!(started.blocking_recv().unwrap(), Ok(State::Starting));

        let (device, first_process) = UnixStream::pair().unwrap();
        let mut executor = CommandExecutor::new(&control, &wakeup, device, None, None);
        // The loop is woken for the command after `boot`.
        read(&wakeup, &mut [0]).unwrap();
        assert!(executor.readable(0).is_none());
        assert_eq!(early.try_recv().unwrap(), Err("the guest is not running yet".to_owned()));

        write(&first_process, &[byte::STARTED]).unwrap();
        executor.on_device_message();
        // The client of the first command has got an error, that of the second one waits.
        drop(control.submit(Command::Terminate));
        let mut pending = control.submit(Command::Pause);
        assert!(executor.readable(0).is_none());
        let mut sent = [0; 2];
        assert_eq!((read(&first_process, &mut sent), sent[0]), (Ok(1), byte::PAUSE));
        control.reset(0);
        assert_eq!(pending.try_recv().unwrap(), Err("the VM restarts".to_owned()));
    }
}
