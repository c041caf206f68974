//! Device process: serves the consoles, creates the guest processes, forwards notifications, and
//! ends all processes with the VM.

mod output;

use core::fmt;
use core::sync::atomic::Ordering::SeqCst;

use host_linux::sys;
use linux_raw_sys::general as linux;
use proto::hosted::layout::SLOTS;
use proto::hosted::{
    Filters, MAX_DISKS, MAX_SHARES, Start, console, control, exit, layout, option,
};
use vmm_vcpu::MAX_VCPUS;

use crate::device::output::{ConsoleOutput, OutputState};
use crate::isolation::user_thread;
use crate::linux::poll::{READABLE, WRITABLE, wait};
use crate::linux::signals::{KICK, TIMER};
use crate::mmu::ram::Ram;
use crate::report::{HOST, INTERNAL, warn};
use crate::state::config::{self, config, has};
use crate::state::setup::{self, Kind};
use crate::state::shared::{ByteRing, RING, SharedVcpu, event, shared, started, vcpus};
use crate::{balloon, children, debug, disk, kick, net, processes};

/// Number and interval in milliseconds of the checks for a process exit that explains a failed
/// fork.
const EXIT_TRIES: u32 = 20;
const EXIT_WAIT: u64 = 10;
/// Longest wait in milliseconds, in case a notification was missed: each wakes an idle VM's host.
const MAX_WAIT: u64 = 60_000;
/// Mask of the signal of a child's exit.
const EXITS: u64 = 1 << (linux::SIGCHLD - 1);

/// State of the device process. It trusts nothing in shared memory, which the guest can overwrite:
/// process ids are its own copies.
pub struct DeviceServer {
    ram: Ram,
    /// Guest process by vCPU and slot; 0: none.
    guests: [[u32; SLOTS]; MAX_VCPUS],
    /// User process by vCPU and slot; 0: none.
    user_processes: [[u32; SLOTS]; MAX_VCPUS],
    disks: [u32; disk::MAX_WORKERS],
    nets: [u32; net::MAX_WORKERS],
    /// By console.
    outputs: [ConsoleOutput; 2],
    /// The guest may run: statements of guest processes are the guest's from then on.
    has_started: bool,
}

/// Serial port or virtio console.
struct ConsoleLine {
    /// Descriptors for input and output.
    typed: u32,
    printed: u32,
    input: &'static ByteRing,
    output: &'static ByteRing,
}

/// Inputs that have not ended.
struct Inputs {
    /// By console.
    open: [bool; 2],
    is_controlled: bool,
}

/// Request queues of the VM's devices, each with the event of its completions. Unused queues are
/// not touched: each would take a page of memory.
fn used_queues() -> impl Iterator<Item = (usize, u32)> {
    let Start { disks, shares, .. } = config().start;
    let disks = 0..(disks as usize).min(MAX_DISKS);
    let shares = MAX_DISKS..MAX_DISKS + (shares as usize).min(MAX_SHARES);
    disks.map(|index| (index, event::DISK)).chain(shares.map(|index| (index, event::SHARE)))
}

/// Returns both consoles.
fn lines() -> [ConsoleLine; 2] {
    let shared = shared();
    [
        ConsoleLine {
            typed: layout::INPUT_FD,
            printed: layout::OUTPUT_FD,
            input: &shared.input,
            output: &shared.output,
        },
        ConsoleLine {
            typed: layout::CONSOLE_FD,
            printed: layout::CONSOLE_FD,
            input: &shared.console_input,
            output: &shared.console_output,
        },
    ]
}

impl DeviceServer {
    /// Creates the state with the workers of disks and networks, and without guest processes.
    pub fn new(ram: Ram, disks: [u32; disk::MAX_WORKERS], nets: [u32; net::MAX_WORKERS]) -> Self {
        let none = [[0; SLOTS]; MAX_VCPUS];
        let outputs = [const { ConsoleOutput::new() }; 2];
        Self { ram, guests: none, user_processes: none, disks, nets, outputs, has_started: false }
    }

    /// Creates the process of a slot of a vCPU, if the slot exists and has none.
    pub fn create_guest(&mut self, vcpu: usize, slot: usize) -> Result<(), sys::Errno> {
        let guests = self.guests.get_mut(vcpu);
        let guest = guests.and_then(|guests| guests[..config::slots()].get_mut(slot));
        if let Some(guest) = guest.filter(|guest| **guest == 0) {
            *guest = processes::create(vcpu, slot, self.ram)?;
            // An error of the control socket has no consequence.
            let _ = sys::write(layout::CONTROL_FD, &[control::PROCESS_CREATED]);
        }
        Ok(())
    }

    /// Creates a slot's user process if one is requested. The previous one is killed, with all
    /// changes that user mode has made to it.
    fn create_user_process(&mut self, index: usize, vcpu: &SharedVcpu) -> Result<(), sys::Errno> {
        let slot = vcpu.user_wanted.load(SeqCst).wrapping_sub(1) as usize;
        let user_processes = self.user_processes.get_mut(index);
        let program = user_processes
            .and_then(|user_processes| user_processes[..config::slots()].get_mut(slot));
        let Some(program) = program.filter(|_| has(option::USER_PROCESS)) else { return Ok(()) };
        if *program != 0 {
            sys::kill(*program, linux::SIGKILL);
            ChildExit::of(*program);
            // Its id may be that of another process by now.
            *program = 0;
        }
        *program = user_thread::create(index, slot, &config().filters)?;
        vcpu.user_wanted.store(0, SeqCst);
        sys::wake(&vcpu.user_wanted);
        Ok(())
    }

    /// Stops user mode for vCPUs that may not send signals themselves.
    fn send_stops(&self) {
        for (index, vcpu) in vcpus().iter().enumerate() {
            let requested = vcpu.stop_requests.load(SeqCst);
            if vcpu.stops_sent.load(SeqCst) != requested {
                let running = vcpu.running.load(SeqCst) as usize;
                if let Some(&process @ 1..) = self.user_processes[index].get(running) {
                    sys::kill(process, KICK);
                }
                vcpu.stops_sent.store(requested, SeqCst);
                sys::wake(&vcpu.stops_sent);
            }
        }
    }

    /// Creates the process that a vCPU will need next, before it is needed: Linux uses the lowest
    /// free PCID.
    fn create_next_guest(&mut self, vcpu: usize) {
        let guests = self.guests.get(vcpu);
        // The last slot serves all address spaces without their own slot.
        if let Some(slot) = guests.and_then(|guests| guests.iter().position(|guest| *guest == 0))
            && slot < config::slots() - 1
        {
            // The vCPU requests it if this fails.
            let _ = self.create_guest(vcpu, slot);
        }
    }

    /// Installs the seccomp filter and serves until the VM ends; returns its exit code.
    pub fn serve(&mut self) -> u8 {
        // Children set their own masks.
        let listens = sys::change_signal_mask(linux::SIG_BLOCK, EXITS)
            .and_then(|()| sys::open_signals(EXITS, layout::EXITS_FD));
        if let Err(error) = listens {
            warn(format_args!("cannot open a descriptor for exits of processes: {error}"));
            self.end_all();
            return HOST;
        }
        if let Err(error) = children::confine(&config().filters, Filters::DEVICE) {
            warn(format_args!("cannot install the seccomp filter of the device process: {error}"));
            self.end_all();
            return HOST;
        }
        let shared = shared();
        let mut inputs = Inputs { open: [true, has_console()], is_controlled: true };
        loop {
            shared.pending.store(0, SeqCst);
            let outputs = self.drain();
            let ended = shared.ended.load(SeqCst);
            if ended != 0 {
                self.end_all();
                return self.code_of_guest(ended - 1);
            }
            if let Err(error) = self.create_wanted() {
                return self.end_refused(error);
            }
            self.forward_notifications();
            if let Some(exit) = ChildExit::next(linux::WNOHANG) {
                return self.end_after(exit);
            }
            self.report_state();
            self.read_inputs(&mut inputs, outputs);
        }
    }

    /// Creates the processes that vCPUs wait for.
    fn create_wanted(&mut self) -> Result<(), sys::Errno> {
        for (index, vcpu) in vcpus().iter().enumerate() {
            let wanted = vcpu.wanted.swap(0, SeqCst);
            if wanted != 0 {
                self.create_guest(index, wanted as usize - 1)?;
                self.create_next_guest(index);
            }
            self.create_user_process(index, vcpu)?;
        }
        Ok(())
    }

    /// Notifies vCPUs for processes that may not.
    fn forward_notifications(&self) {
        let kick = shared().kick.swap(0, SeqCst);
        for index in (0..vcpus().len()).filter(|index| kick & 1 << index != 0) {
            self.interrupt(index);
        }
        self.send_stops();
        // Workers outside of the VM's process tree cannot notify a vCPU themselves.
        for (queue_index, what) in used_queues() {
            if disk::queue(queue_index).pending.swap(0, SeqCst) != 0 {
                self.raise_event(disk::target(queue_index), what);
            }
        }
    }

    /// Reports the guest's start and the debugger's stops on the control socket, whose errors have
    /// no consequence.
    fn report_state(&mut self) {
        let shared = shared();
        if !self.has_started && shared.started.load(SeqCst) == started::READY {
            self.has_started = true;
            let _ = sys::write(layout::CONTROL_FD, &[control::STARTED]);
            shared.started.store(started::ALLOWED, SeqCst);
            sys::wake(&shared.started);
        }
        if debug::shared().halt_pending.swap(0, SeqCst) != 0 {
            let _ = sys::write(layout::CONTROL_FD, &[control::HALTED]);
        }
    }

    /// Waits for notifications, exits, commands, console input and readers of blocked output, and
    /// handles inputs. It does not wait if other output is pending.
    fn read_inputs(&self, inputs: &mut Inputs, outputs: [OutputState; 2]) {
        let lines = lines();
        let wanted = |index: usize| {
            let is_wanted = inputs.open[index] && lines[index].input.room() > RING / 2;
            is_wanted.then_some((lines[index].typed, READABLE))
        };
        let blocked = |index: usize| {
            let is_blocked = outputs[index] == OutputState::Blocked;
            is_blocked.then_some((lines[index].printed, WRITABLE))
        };
        let descriptors = [
            Some((layout::DOORBELL_FD, READABLE)),
            Some((layout::EXITS_FD, READABLE)),
            inputs.is_controlled.then_some((layout::CONTROL_FD, READABLE)),
            wanted(0),
            wanted(1),
            blocked(0),
            blocked(1),
        ];
        let timeout = if outputs.contains(&OutputState::Pending) { 0 } else { MAX_WAIT };
        let [is_notified, has_exit, has_command, typed @ .., _, _] = wait(descriptors, timeout);
        if has_command {
            let mut byte = [0];
            match sys::read(layout::CONTROL_FD, &mut byte) {
                Ok(0) | Err(_) => inputs.is_controlled = false,
                Ok(_) => self.control(byte[0]),
            }
        }
        if is_notified {
            let mut count = [0; 8];
            // poll(2) has reported it readable.
            let _ = sys::read(layout::DOORBELL_FD, &mut count);
        }
        if has_exit {
            // Its `struct signalfd_siginfo` does not state all exits: the caller asks wait4(2).
            let _ = sys::read(layout::EXITS_FD, &mut [0; 128]);
        }
        for (index, line) in lines.iter().enumerate().filter(|(index, _)| typed[*index]) {
            let mut bytes = [0; 4096];
            match sys::read(line.typed, &mut bytes) {
                Ok(0) | Err(_) => inputs.open[index] = false,
                Ok(count) => {
                    for &byte in &bytes[..count] {
                        // The ring has room: more than half of it.
                        line.input.put(byte);
                    }
                    self.raise_event(0, event::CONSOLE);
                }
            }
        }
    }

    /// Ends the VM because one of its processes has ended; returns the exit code.
    fn end_after(&mut self, exit: ChildExit) -> u8 {
        let others = self.end_all();
        // The exit of a namespace's first process kills the rest, and is reported last.
        let exit = if exit.is_killed() { others.unwrap_or(exit) } else { exit };
        let kind = self.kind_of(&exit);
        warn(format_args!("{kind} {exit}"));
        exit.code(kind)
    }

    /// Ends the VM because fork has failed; returns the exit code. A PID namespace whose first
    /// process was killed refuses new processes slightly before the others die: then that exit is
    /// the cause.
    fn end_refused(&mut self, error: sys::Errno) -> u8 {
        for _ in 0..EXIT_TRIES {
            if let Some(exit) = ChildExit::next(linux::WNOHANG) {
                return self.end_after(exit);
            }
            wait([], EXIT_WAIT);
        }
        warn(format_args!("cannot create a guest process: {error}"));
        self.end_all();
        HOST
    }

    /// Returns the exit code for one requested by a guest process. A guest may only cause codes of
    /// `docs/spec/exit-codes.md`; any other code is a fault. Before the guest's first instruction,
    /// the wedge may use all codes.
    fn code_of_guest(&self, code: u32) -> u8 {
        match u8::try_from(code) {
            Ok(code) if !self.has_started || exit::is_guest_code(code) => code,
            _ => {
                warn(format_args!("the guest has requested exit code {code}, which is reserved"));
                exit::FAULT
            }
        }
    }

    /// Returns the kind of an ended process.
    fn kind_of(&self, exit: &ChildExit) -> ProcessKind {
        for (kind, processes) in [(Kind::Guest, &self.guests), (Kind::User, &self.user_processes)] {
            let place = processes.as_flattened().iter().position(|id| *id == exit.process);
            let Some(place) = place else { continue };
            let mark = setup::words().confined(kind, place / SLOTS, place % SLOTS);
            return if mark.load(SeqCst) { ProcessKind::Guest } else { ProcessKind::Setup };
        }
        ProcessKind::Worker
    }

    /// Executes a command of the control socket and acknowledges it.
    fn control(&self, what: u8) {
        match what {
            // By the host kernel, independent of the guest. Disk workers finish their requests.
            control::PAUSE => self.signal_all(linux::SIGSTOP),
            control::RESUME => self.signal_all(linux::SIGCONT),
            control::POWER_BUTTON => self.raise_event(0, event::POWER_BUTTON),
            control::MEMORY_STATISTICS => {
                balloon::report().request();
                self.raise_event(0, event::BALLOON);
            }
            control::BALLOON => self.raise_event(0, event::BALLOON),
            control::HALT => self.halt(),
            control::GO => debug::shared().vcpus.iter().for_each(|vcpu| sys::wake(&vcpu.command)),
            _ => return,
        }
        let _ = sys::write(layout::CONTROL_FD, &[what]);
    }

    /// Sends a signal to all guest and user processes.
    fn signal_all(&self, signal: u32) {
        for &process in self.guest_processes().filter(|process| **process != 0) {
            sys::kill(process, signal);
        }
    }

    fn guest_processes(&self) -> impl Iterator<Item = &u32> {
        self.guests.as_flattened().iter().chain(self.user_processes.as_flattened())
    }

    /// Posts an event to a vCPU.
    fn raise_event(&self, index: usize, what: u32) {
        // If the event is pending already, the vCPU was notified before.
        if let Some(vcpu) = vcpus().get(index)
            && vcpu.events().fetch_or(what, SeqCst) & what == 0
        {
            self.interrupt(index);
        }
    }

    /// Stops the vCPUs that have not stopped yet, for the debugger.
    fn halt(&self) {
        for (index, vcpu) in debug::shared().vcpus.iter().enumerate() {
            if vcpu.halted.load(SeqCst) == 0 {
                self.raise_event(index, event::DEBUG);
            }
        }
    }

    /// Makes a vCPU check its events.
    fn interrupt(&self, index: usize) {
        let (Some(vcpu), Some(guests)) = (vcpus().get(index), self.guests.get(index)) else {
            return;
        };
        if kick::wake(index, vcpu) {
            return;
        }
        // During a switch of the process, or before the process has its handler, the next process
        // checks.
        let running = vcpu.running.load(SeqCst) as usize;
        if let (Some(&process @ 1..), Some(slot)) = (guests.get(running), vcpu.slots.get(running))
            && slot.process.load(SeqCst) != 0
        {
            sys::kill(process, KICK);
        }
    }

    /// Prints the guest's output; returns the state of each console's.
    fn drain(&mut self) -> [OutputState; 2] {
        // Each console has its turn.
        core::array::from_fn(|index| self.drain_line(index))
    }

    fn drain_line(&mut self, index: usize) -> OutputState {
        if index != 0 && !has_console() {
            return OutputState::Printed;
        }
        let ConsoleLine { output, printed, .. } = lines()[index];
        let tail = output.tail.load(SeqCst);
        let state = self.outputs[index].drain(output, printed);
        if output.tail.load(SeqCst) != tail && output.room() > RING / 2 {
            // The guest may wait for room.
            self.raise_event(0, event::CONSOLE);
        }
        state
    }

    /// Prints the rest of an ended guest's output, and waits for its readers. It raises no event:
    /// the guest's processes have ended, and their ids may be those of others by now.
    fn flush(&mut self) {
        let count = 1 + usize::from(has_console());
        for (line, console) in lines().iter().zip(&mut self.outputs).take(count) {
            loop {
                match console.drain(line.output, line.printed) {
                    OutputState::Printed => break,
                    OutputState::Pending => {}
                    OutputState::Blocked => {
                        wait([Some((line.printed, WRITABLE))], MAX_WAIT);
                    }
                }
            }
        }
    }

    /// Kills all other processes and reaps them, so that no process and no user of a disk is left
    /// when this process exits, and prints the rest of the guest's output. Returns the first
    /// process that has exited by itself.
    fn end_all(&mut self) -> Option<ChildExit> {
        for &process in self.guest_processes().chain(&self.disks).chain(&self.nets) {
            if process != 0 {
                sys::kill(process, linux::SIGKILL);
            }
        }
        let mut found = None;
        while let Some(exit) = ChildExit::next(0) {
            if !exit.is_killed() {
                found = found.or(Some(exit));
            }
        }
        self.flush();
        found
    }
}

/// Exit of a process of the VM.
struct ChildExit {
    process: u32,
    /// Status of wait4(2).
    status: u32,
}

impl ChildExit {
    /// Returns the next exit; `None`: none yet (`WNOHANG`), or no children left.
    fn next(options: u32) -> Option<Self> {
        Self::wait(u64::MAX, options)
    }

    /// Waits for the exit of one process.
    fn of(process: u32) -> Option<Self> {
        Self::wait(process.into(), 0)
    }

    fn wait(process: u64, options: u32) -> Option<Self> {
        let (process, status) = sys::wait_for_child(process, options)?;
        Some(Self { process, status })
    }

    fn signal(&self) -> u8 {
        (self.status & 0x7f) as u8
    }

    /// Returns whether it was killed by `SIGKILL`.
    fn is_killed(&self) -> bool {
        u32::from(self.signal()) == linux::SIGKILL
    }

    /// Returns whether the process has exited, or was killed for its own action or by a signal
    /// between processes of the VM.
    fn is_self_inflicted(&self) -> bool {
        let signal = u32::from(self.signal());
        [0, KICK, TIMER].contains(&signal) || exit::SELF_INFLICTED.contains(&signal)
    }

    /// Returns the exit code of the VM (`docs/spec/exit-codes.md`).
    fn code(&self, kind: ProcessKind) -> u8 {
        match kind {
            _ if !self.is_self_inflicted() => 128 + self.signal(),
            ProcessKind::Guest => exit::FAULT,
            ProcessKind::Setup | ProcessKind::Worker if self.signal() == 0 => HOST,
            ProcessKind::Setup | ProcessKind::Worker => INTERNAL,
        }
    }
}

/// Kind of an ended process.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum ProcessKind {
    /// Guest process with its seccomp filter: the guest may have caused the exit.
    Guest,
    /// Guest process without its filter.
    Setup,
    /// Worker of a disk or network.
    Worker,
}

impl fmt::Display for ProcessKind {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str(match self {
            Self::Guest => "guest process",
            Self::Setup => "new guest process",
            Self::Worker => "worker process",
        })
    }
}

impl fmt::Display for ChildExit {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "{} ", self.process)?;
        match u32::from(self.signal()) {
            0 => write!(out, "exited with status {}", self.status >> 8 & 0xff),
            linux::SIGSYS => write!(out, "was killed by its seccomp filter (signal 31, SIGSYS)"),
            signal => write!(out, "was killed by signal {signal}"),
        }
    }
}

/// Returns whether there is a virtio console.
fn has_console() -> bool {
    config().start.console != console::NONE
}
