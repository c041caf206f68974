//! Operator shell (`steward`): lists, starts, stops and pauses VMs from the console.
//!
//! Its only capabilities are its console session and the management gate; root checks every
//! request.
#![cfg_attr(not(test), no_std, no_main)]
#![forbid(unsafe_code)]
#![cfg_attr(test, allow(dead_code, reason = "the rest needs the kernel"))]

mod commands;
mod editor;
mod screen;
mod table;

use core::fmt::Write;

use abi::FOREVER;
use native_rt::manage::ManagementGate;
use native_rt::{error, time};
use proto::console::MAX_BYTES;
use proto::control::code;
use proto::manage::{self, Figures, Kind, Refusal, State};
use proto::start::{Clock, Start, event};
use proto::system::{MAX_NAME, MAX_VMS};

use crate::commands::{COMMANDS, Command, Completion, ParsedCommand, SyntaxError, Word};
use crate::editor::{Editor, Event};
use crate::screen::Screen;

/// One second, in ns.
const SECOND: u64 = 1_000_000_000;
/// Time limit of a VMM's report, in ns.
const REPORT_TIME: u64 = 20_000_000;
/// Maximum number of repetitions of that wait.
const REPORT_TURNS: u32 = 10;
/// Seconds that guests have to shut down.
const SHUTDOWN_SECONDS: u32 = 20;

type Name = heapless::String<MAX_NAME>;

/// A VM of root's list.
struct Listed {
    number: u32,
    name: Name,
    state: State,
}

#[cfg(not(test))]
native_rt::entry!(main);

/// Runs the shell until `shutdown`; returns the exit code.
fn main(start: &Start<'static>) -> u64 {
    let screen = match Screen::open() {
        Ok(screen) => screen,
        Err(status) => {
            error!("no console: {status:?}");
            return code::BAD_CONFIG;
        }
    };
    let mut steward = Shell {
        screen,
        root: ManagementGate::new(),
        clock: start.clock,
        editor: Editor::new("steward> "),
    };
    steward.print(format_args!("Operator shell of this system; `help` lists the commands."));
    steward.serve()
}

struct Shell {
    screen: Screen,
    root: ManagementGate,
    clock: Clock,
    editor: Editor,
}

/// Action after a command.
#[derive(PartialEq, Eq)]
enum Next {
    Another,
    End,
}

impl Shell {
    fn serve(&mut self) -> u64 {
        self.editor.show(&mut self.screen);
        loop {
            let events = self.screen.wait(FOREVER);
            if events & event::STOP != 0 {
                return code::OK;
            }
            if self.screen.is_gone() {
                error!("the console server has ended");
                return code::INTERNAL;
            }
            if events & event::CONSOLE != 0 && self.read() == Next::End {
                self.screen.flush();
                return code::OK;
            }
        }
    }

    /// Processes all pending keys.
    fn read(&mut self) -> Next {
        let mut buffer = [0; MAX_BYTES];
        loop {
            let keys = self.screen.read(&mut buffer);
            for &key in keys {
                match self.editor.key(key, &mut self.screen) {
                    Event::None => {}
                    Event::Complete => self.complete(),
                    Event::Line => {
                        let line = self.editor.take_line();
                        if self.execute(&line) == Next::End {
                            return Next::End;
                        }
                        self.editor.show(&mut self.screen);
                    }
                }
            }
            if keys.len() < MAX_BYTES {
                return Next::Another;
            }
        }
    }

    fn print(&mut self, text: core::fmt::Arguments) {
        // A screen accepts all text.
        let _ = write!(self.screen, "{text}\r\n");
    }

    // ---- completion --------------------------------------------------------------------------

    fn complete(&mut self) {
        let (kind, word) = commands::word_at_end(self.editor.before_cursor());
        let mut typed = editor::Line::new();
        // It is a part of a line.
        let _ = typed.push_str(word);
        let mut completion = Completion::default();
        if kind == Word::Command {
            COMMANDS.iter().for_each(|command| completion.offer(&typed, command.name));
        } else {
            // Without a reply there are no candidates.
            let _ = self.root.list(|entry| {
                if commands::matches_kind(kind, entry.kind, entry.state) {
                    completion.offer(&typed, entry.name);
                }
            });
        }
        let (rest, whole) = completion.rest(&typed);
        let shown = completion.choices().filter(|_| rest.is_empty());
        self.editor.insert_text(rest, &mut self.screen);
        if whole {
            self.editor.insert_space(&mut self.screen);
        }
        if let Some(choices) = shown {
            let _ = write!(self.screen, "\r\n{choices}\r\n");
            self.editor.show(&mut self.screen);
        }
    }

    // ---- commands ----------------------------------------------------------------------------

    fn execute(&mut self, line: &str) -> Next {
        let result = match commands::parse(line) {
            None => Ok(()),
            Some(Err(SyntaxError::Unknown(name))) => {
                self.print(format_args!("unknown command {name:?}; `help` lists all"));
                Ok(())
            }
            Some(Err(SyntaxError::Usage(command))) => {
                self.show_usage(command);
                Ok(())
            }
            Some(Ok(ParsedCommand { command, words })) => {
                let first = words.first().copied().unwrap_or_default();
                let second = words.get(1).copied().unwrap_or_default();
                match command.name {
                    "shutdown" => {
                        self.shutdown();
                        return Next::End;
                    }
                    name => self.command(name, first, second),
                }
            }
        };
        if let Err(refusal) = result {
            self.print(format_args!("refused: {}", refusal.text()));
        }
        Next::Another
    }

    fn command(&mut self, command: &str, first: &str, second: &str) -> Result<(), Refusal> {
        let label = match command {
            "help" => return self.help(first),
            "list" => return self.list(),
            "top" => return self.top(first),
            "memory" => return self.memory(),
            "start" => manage::START,
            "stop" => manage::STOP,
            "kill" => manage::KILL,
            "pause" => manage::PAUSE,
            "resume" => manage::RESUME,
            "restart" => manage::RESTART,
            "create" => manage::CREATE,
            _ => manage::DESTROY,
        };
        self.root.request(label, first, second)?;
        self.print(format_args!("{command} {first}: done"));
        Ok(())
    }

    fn show_usage(&mut self, command: &Command) {
        let Command { name, usage, help, .. } = command;
        self.print(format_args!("{name} {usage}: {help}"));
    }

    fn help(&mut self, name: &str) -> Result<(), Refusal> {
        if let Some(command) = commands::find(name) {
            self.show_usage(command);
            return Ok(());
        }
        for Command { name, usage, help, .. } in COMMANDS {
            let space = 21_usize.saturating_sub(name.len());
            self.print(format_args!("  {name} {usage:<space$} {help}"));
        }
        self.print(format_args!(
            "Tab completes, arrow keys select earlier lines, Ctrl-] ? shows the console's help."
        ));
        Ok(())
    }

    fn list(&mut self) -> Result<(), Refusal> {
        self.print(format_args!("{}", table::LIST_HEAD));
        let Self { root, screen, .. } = self;
        root.list(|entry| {
            let _ = table::entry(entry, screen);
            let _ = write!(screen, "\r\n");
        })
    }

    fn memory(&mut self) -> Result<(), Refusal> {
        let [free, pieces, used, all] = self.root.memory()?;
        let kib = free >> 10;
        self.print(format_args!("free: {kib} KiB in {pieces} pieces"));
        self.print(format_args!("kernel memory: {used} of {all} pages in use"));
        Ok(())
    }

    /// Returns the VMs in a state that `wanted` accepts.
    fn vms(
        &self,
        wanted: impl Fn(State) -> bool,
    ) -> Result<heapless::Vec<Listed, MAX_VMS>, Refusal> {
        let mut vms = heapless::Vec::new();
        self.root.list(|entry| {
            if entry.kind == Kind::Vm && wanted(entry.state) {
                let name = entry.name.try_into().unwrap_or_default();
                // There are at most `MAX_VMS`.
                let _ = vms.push(Listed { number: entry.number, name, state: entry.state });
            }
        })?;
        Ok(vms)
    }

    /// Waits; returns `false` if an event arrived, such as a key. It stays pending.
    fn sleep(&mut self, nanos: u64) -> bool {
        !self.screen.has_event(time::after(&self.clock, nanos))
    }

    /// Requests reports of VMs and returns their figures.
    fn figures(&mut self, of: &[Listed]) -> Option<heapless::Vec<Option<Figures>, MAX_VMS>> {
        for vm in of {
            // This call triggers a report. A VM that has ended has no figures below.
            let _ = self.root.figures(vm.number);
        }
        let mut figures = heapless::Vec::new();
        for _ in 0..REPORT_TURNS {
            if !self.sleep(REPORT_TIME) {
                return None;
            }
            figures = of.iter().map(|vm| self.root.figures(vm.number).ok()).collect();
            // On a loaded machine the first report takes longer.
            if figures.iter().flatten().all(|figures: &Figures| figures.lived != 0) {
                break;
            }
        }
        Some(figures)
    }

    fn top(&mut self, rounds: &str) -> Result<(), Refusal> {
        let rounds: u32 = rounds.parse().unwrap_or(1);
        let vms = self.vms(is_alive)?;
        let Some(mut before) = self.figures(&vms) else { return Ok(()) };
        for _ in 0..rounds {
            if !self.sleep(SECOND) {
                break;
            }
            let Some(now) = self.figures(&vms) else { break };
            self.print(format_args!("{}", table::TOP_HEAD));
            let Self { root, screen, .. } = self;
            root.list(|entry| {
                let index = vms.iter().position(|vm| vm.number == entry.number);
                let both = index.and_then(|index| Some((before[index]?, now[index]?)));
                if let Some((before, now)) = both {
                    let _ = table::figures(entry, &before, &now, screen);
                    let _ = write!(screen, "\r\n");
                }
            })?;
            before = now;
        }
        Ok(())
    }

    /// Ends all VMs. If root orders the shell to end meanwhile, it limits the time itself.
    fn shutdown(&mut self) {
        // Numbers of the VMs whose VMM has got the request.
        let mut requested = heapless::Vec::<u32, MAX_VMS>::new();
        for round in 0..=SHUTDOWN_SECONDS {
            let vms = self.vms(|state| is_alive(state) || state == State::Waiting);
            let vms = vms.unwrap_or_default();
            if vms.is_empty() {
                break;
            }
            for Listed { number, name, state } in &vms {
                let step = ShutdownStep::of(*state, round, requested.contains(number));
                let label = match step {
                    None => continue,
                    Some(ShutdownStep::CancelRestart) => {
                        self.print(format_args!("{name}: restart cancelled"));
                        manage::KILL
                    }
                    Some(ShutdownStep::Request) => {
                        self.print(format_args!("{name}: shutdown requested"));
                        // Paused, it would not see the request.
                        let _ = self.root.request(manage::RESUME, name, "");
                        manage::STOP
                    }
                    Some(ShutdownStep::Kill) => {
                        self.print(format_args!(
                            "{name}: no shutdown within {SHUTDOWN_SECONDS} s, killed"
                        ));
                        manage::KILL
                    }
                };
                // A VM that has just ended needs none, unless it restarts.
                let is_accepted = self.root.request(label, name, "").is_ok();
                if is_accepted && step == Some(ShutdownStep::Request) {
                    // There are at most `MAX_VMS`, each once.
                    let _ = requested.push(*number);
                }
            }
            if round < SHUTDOWN_SECONDS {
                self.screen.pause(time::after(&self.clock, SECOND));
            }
        }
        self.print(format_args!("the operator shell ends"));
    }
}

/// Returns whether a VM in this state has a VMM.
fn is_alive(state: State) -> bool {
    matches!(state, State::Running | State::Paused)
}

/// Action of a shutdown on a VM.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ShutdownStep {
    CancelRestart,
    Request,
    Kill,
}

impl ShutdownStep {
    /// Returns the action on a VM in this state in round `round`, if any. `is_requested`: a request
    /// has been accepted. One in the first round is refused if the VM has just ended; it may wait
    /// for its restart or run again in a later round.
    fn of(state: State, round: u32, is_requested: bool) -> Option<Self> {
        match (state, round) {
            (State::Waiting, _) => Some(Self::CancelRestart),
            (State::Running | State::Paused, SHUTDOWN_SECONDS) => Some(Self::Kill),
            (State::Running | State::Paused, _) if !is_requested => Some(Self::Request),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_shutdown_leaves_no_vm_that_restarts() {
        let steps = |state, is_requested| {
            [0, 1, SHUTDOWN_SECONDS].map(|round| ShutdownStep::of(state, round, is_requested))
        };
        let kill = Some(ShutdownStep::Kill);
        for state in [State::Running, State::Paused] {
            let request = Some(ShutdownStep::Request);
            assert_eq!(steps(state, false), [request, request, kill], "refused, then restarted");
            assert_eq!(steps(state, true), [None, None, kill]);
        }
        for is_requested in [false, true] {
            let steps = |state| steps(state, is_requested);
            assert_eq!(steps(State::Waiting), [Some(ShutdownStep::CancelRestart); 3]);
            assert_eq!(steps(State::New), [None; 3]);
            assert_eq!(steps(State::Ended(0)), [None; 3]);
        }
    }
}
