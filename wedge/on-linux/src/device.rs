//! The device process: serves the console, makes processes for address spaces, and ends them all with the machine.

use core::fmt;
use core::sync::atomic::Ordering::SeqCst;

use linux_raw_sys::general as linux;
use proto::wedge::{Filters, MAX_DISKS, MAX_QUEUES, control, exit, layout};
use vmm_cpu::MAX_VCPUS;

use crate::config::{self, config};
use crate::memory::Ram;
use crate::processes::{self, KICK, TIMER};
use crate::report::{HOST, INTERNAL, warn};
use crate::setup::{self, Kind};
use crate::shared::{ByteRing, RING, SLOTS, SharedVcpu, event, shared, started, vcpus};
use crate::{debug, disk, idle, net, sys, user_process};

const READABLE: u16 = linux::POLLIN as u16;
/// How often, and after how many milliseconds, to look for the exit that may be why the host makes no process.
const EXIT_TRIES: u32 = 20;
const EXIT_WAIT: u64 = 10;

/// The device process. It believes nothing of what is in shared memory, which the guest can change: numbers of processes are its own.
pub struct DeviceServer {
    ram: Ram,
    /// By virtual CPU and slot; 0: none.
    guests: [[u32; SLOTS]; MAX_VCPUS],
    /// The same of processes for user_processes.
    user_processes: [[u32; SLOTS]; MAX_VCPUS],
    disks: [u32; disk::MAX_WORKERS],
    nets: [u32; net::MAX_WORKERS],
    /// The guest's first instruction has been allowed: what guest processes say from then on is the guest's word.
    has_started: bool,
}

/// The serial line, and the virtio console: what is typed and printed.
struct ConsoleLine {
    /// Descriptors.
    typed: u32,
    printed: u32,
    input: &'static ByteRing,
    output: &'static ByteRing,
}

/// The lines.
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
    /// With the processes of disks and networks, and without any of the guest.
    pub fn new(ram: Ram, disks: [u32; disk::MAX_WORKERS], nets: [u32; net::MAX_WORKERS]) -> Self {
        let none = [[0; SLOTS]; MAX_VCPUS];
        Self { ram, guests: none, user_processes: none, disks, nets, has_started: false }
    }

    /// Makes the process of a slot of a virtual CPU, if it has none and there is such a slot.
    pub fn create_guest(&mut self, vcpu: usize, number: usize) -> Result<(), sys::Errno> {
        let guests = self.guests.get_mut(vcpu);
        let guest = guests.and_then(|guests| guests[..config::slots()].get_mut(number));
        if let Some(guest) = guest.filter(|guest| **guest == 0) {
            *guest = processes::create(vcpu, number, self.ram)?;
            // Nobody to tell if it cannot be written.
            let _ = sys::write(layout::CONTROL_FD, &[control::PROCESS_CREATED]);
        }
        Ok(())
    }

    /// Makes a process for programs of a slot, where one is wanted. The one before is gone then, with all that programs have made of it.
    fn create_user_process(&mut self, index: usize, vcpu: &SharedVcpu) -> Result<(), sys::Errno> {
        let number = vcpu.user_wanted.load(SeqCst).wrapping_sub(1) as usize;
        let user_processes = self.user_processes.get_mut(index);
        let program = user_processes
            .and_then(|user_processes| user_processes[..config::slots()].get_mut(number));
        let Some(program) = program.filter(|_| user_process::is_enabled()) else { return Ok(()) };
        if *program != 0 {
            sys::kill(*program, linux::SIGKILL);
            ChildExit::of(*program);
        }
        *program = user_process::create(index, number, &config().filters)?;
        vcpu.user_wanted.store(0, SeqCst);
        sys::wake(&vcpu.user_wanted);
        Ok(())
    }

    /// Tells programs to stop, for virtual CPUs that may not do it themselves.
    fn send_stops(&self) {
        for (index, vcpu) in vcpus().iter().enumerate() {
            let asked = vcpu.stop_requests.load(SeqCst);
            if vcpu.stops_sent.load(SeqCst) != asked {
                let running = vcpu.running.load(SeqCst) as usize;
                if let Some(&process @ 1..) = self.user_processes[index].get(running) {
                    sys::kill(process, KICK);
                }
                vcpu.stops_sent.store(asked, SeqCst);
                sys::wake(&vcpu.stops_sent);
            }
        }
    }

    /// Makes the process that a virtual CPU will want next, before it does: Linux takes the lowest identifier of address spaces that
    /// nobody has.
    fn create_next_guest(&mut self, vcpu: usize) -> Result<(), sys::Errno> {
        let guests = self.guests.get(vcpu);
        match guests.and_then(|guests| guests.iter().position(|guest| *guest == 0)) {
            // The last one serves all that have no slot of their own.
            Some(number) if number < config::slots() - 1 => self.create_guest(vcpu, number),
            _ => Ok(()),
        }
    }

    /// Takes its filter of system calls and serves until the machine has ended; gives its exit code.
    pub fn serve(&mut self) -> u8 {
        if let Err(error) = processes::confine(&config().filters, Filters::DEVICE) {
            warn(format_args!("cannot install the seccomp filter of the device process: {error}"));
            self.end_all();
            return HOST;
        }
        let shared = shared();
        let (lines, mut inputs) = (lines(), [true, has_console()]);
        let mut controlled = true;
        loop {
            shared.pending.store(0, SeqCst);
            let has_more = self.drain();
            let ended = shared.ended.load(SeqCst);
            if ended != 0 {
                self.drain();
                self.end_all();
                return self.code_of_guest(ended - 1);
            }
            for (index, vcpu) in vcpus().iter().enumerate() {
                let wanted = vcpu.wanted.swap(0, SeqCst);
                let made = match wanted {
                    0 => Ok(()),
                    _ => self
                        .create_guest(index, wanted as usize - 1)
                        .and_then(|()| self.create_next_guest(index)),
                };
                if let Err(error) = made.and_then(|()| self.create_user_process(index, vcpu)) {
                    return self.end_refused(error);
                }
            }
            let kick = shared.kick.swap(0, SeqCst);
            for index in (0..vcpus().len()).filter(|index| kick & 1 << index != 0) {
                self.interrupt(index);
            }
            self.send_stops();
            // Workers of other programs cannot tell the virtual CPU themselves.
            for number in 0..MAX_QUEUES {
                if disk::queue(number).pending.swap(0, SeqCst) != 0 {
                    self.raise_event(
                        0,
                        if number < MAX_DISKS { event::DISK } else { event::SHARE },
                    );
                }
            }
            if let Some(exit) = ChildExit::next(linux::WNOHANG) {
                return self.end_after(exit);
            }
            if !self.has_started && shared.started.load(SeqCst) == started::READY {
                self.has_started = true;
                // Nobody to tell if it cannot be written.
                let _ = sys::write(layout::CONTROL_FD, &[control::STARTED]);
                shared.started.store(started::ALLOWED, SeqCst);
                sys::wake(&shared.started);
            }
            if debug::shared().halt_pending.swap(0, SeqCst) != 0 {
                let _ = sys::write(layout::CONTROL_FD, &[control::HALTED]);
            }
            let wanted = |index: usize| {
                let is_wanted = inputs[index] && lines[index].input.room() > RING / 2;
                is_wanted.then_some(lines[index].typed)
            };
            let descriptors = [
                Some(layout::DOORBELL_FD),
                controlled.then_some(layout::CONTROL_FD),
                wanted(0),
                wanted(1),
            ];
            // Now and then it looks whether a process has died.
            let [rung, told, typed @ ..] = wait(descriptors, if has_more { 0 } else { 1000 });
            if told {
                let mut byte = [0];
                match sys::read(layout::CONTROL_FD, &mut byte) {
                    Ok(0) | Err(_) => controlled = false,
                    Ok(_) => self.control(byte[0]),
                }
            }
            if rung {
                let mut count = [0; 8];
                // It has been readable, so there is something to take.
                let _ = sys::read(layout::DOORBELL_FD, &mut count);
            }
            for (index, line) in lines.iter().enumerate().filter(|(index, _)| typed[*index]) {
                let mut bytes = [0; 4096];
                match sys::read(line.typed, &mut bytes) {
                    Ok(0) | Err(_) => inputs[index] = false,
                    Ok(count) => {
                        for &byte in &bytes[..count] {
                            // There is room: more than half of the ring.
                            line.input.put(byte);
                        }
                        self.raise_event(0, event::CONSOLE);
                    }
                }
            }
        }
    }

    /// Ends the VM because one of its processes has ended; gives the exit code.
    fn end_after(&self, exit: ChildExit) -> u8 {
        self.drain();
        let others = self.end_all();
        // The end of a namespace's first process ends all, and comes to be known last.
        let exit = if exit.is_killed() { others.unwrap_or(exit) } else { exit };
        let kind = self.kind_of(&exit);
        warn(format_args!("{kind} {exit}"));
        exit.code(kind)
    }

    /// Ends the VM because the host makes no process; gives the exit code. A namespace whose first process was killed refuses
    /// new ones a little before the others die: then that exit is the reason.
    fn end_refused(&self, error: sys::Errno) -> u8 {
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

    /// The exit code for one that a guest process has given. From the guest there are those of `docs/spec/exit-codes.md` only: another
    /// one is a fault. The wedge says what it likes before the guest's first instruction.
    fn code_of_guest(&self, code: u32) -> u8 {
        match u8::try_from(code) {
            Ok(code) if !self.has_started || exit::is_guest_code(code) => code,
            _ => {
                warn(format_args!(
                    "the guest ends its VM with code {code}, which is not a guest's"
                ));
                exit::FAULT
            }
        }
    }

    /// Whose end this is.
    fn kind_of(&self, exit: &ChildExit) -> ProcessKind {
        for (kind, processes) in [(Kind::Guest, &self.guests), (Kind::User, &self.user_processes)] {
            let place = processes.as_flattened().iter().position(|id| *id == exit.process);
            let Some(place) = place else { continue };
            let mark = setup::words().confined(kind, place / SLOTS, place % SLOTS);
            return if mark.load(SeqCst) { ProcessKind::Guest } else { ProcessKind::Setup };
        }
        ProcessKind::Worker
    }

    /// Does what the one who has started the machine wants, and says so.
    fn control(&self, what: u8) {
        match what {
            // By the host's kernel, whatever the guest does with its processes. Disks finish what they have begun.
            control::PAUSE => self.signal_all(linux::SIGSTOP),
            control::RESUME => self.signal_all(linux::SIGCONT),
            control::POWER_BUTTON => self.raise_event(0, event::POWER_BUTTON),
            control::HALT => self.halt(),
            control::GO => debug::shared().vcpus.iter().for_each(|vcpu| sys::wake(&vcpu.command)),
            _ => return,
        }
        let _ = sys::write(layout::CONTROL_FD, &[what]);
    }

    /// Sends a signal to all processes of the guest.
    fn signal_all(&self, signal: u32) {
        for &process in self.guest_processes().filter(|process| **process != 0) {
            sys::kill(process, signal);
        }
    }

    fn guest_processes(&self) -> impl Iterator<Item = &u32> {
        self.guests.as_flattened().iter().chain(self.user_processes.as_flattened())
    }

    /// Tells a virtual CPU of an event.
    fn raise_event(&self, index: usize, what: u32) {
        // If somebody else has told it, it knows.
        if let Some(vcpu) = vcpus().get(index)
            && vcpu.events().fetch_or(what, SeqCst) & what == 0
        {
            self.interrupt(index);
        }
    }

    /// Stops the virtual CPUs that have not stopped yet, for the debugger.
    fn halt(&self) {
        for (index, vcpu) in debug::shared().vcpus.iter().enumerate() {
            if vcpu.halted.load(SeqCst) == 0 {
                self.raise_event(index, event::DEBUG);
            }
        }
    }

    /// Makes a virtual CPU look at its events.
    fn interrupt(&self, index: usize) {
        let (Some(vcpu), Some(guests)) = (vcpus().get(index), self.guests.get(index)) else {
            return;
        };
        if idle::wake(vcpu) {
            return;
        }
        // If it is going from one process to another, or to one that does not listen yet, the next one looks.
        let running = vcpu.running.load(SeqCst) as usize;
        if let (Some(&process @ 1..), Some(slot)) = (guests.get(running), vcpu.slots.get(running))
            && slot.process.load(SeqCst) != 0
        {
            sys::kill(process, KICK);
        }
    }

    /// Prints what the guest has put; whether there is more, which waits until other things have been looked at.
    fn drain(&self) -> bool {
        let count = 1 + usize::from(has_console());
        // Each line has its turn.
        lines().iter().take(count).fold(false, |more, line| self.drain_line(line) | more)
    }

    fn drain_line(&self, &ConsoleLine { output, printed, .. }: &ConsoleLine) -> bool {
        let mut bytes = [0; 4096];
        for _ in 0..RING / bytes.len() {
            let mut used = 0;
            while used < bytes.len() {
                let Some(byte) = output.take() else { break };
                bytes[used] = byte;
                used += 1;
            }
            if used == 0 {
                return false;
            }
            let mut rest = &bytes[..used];
            while !rest.is_empty() {
                match sys::write(printed, rest) {
                    Ok(count) => rest = &rest[count..],
                    Err(sys::Errno(4 | 11)) => {}
                    // Nobody listens any longer.
                    Err(_) => return false,
                }
            }
            if output.room() <= RING / 2 {
                continue;
            }
            // The serial line may have had to wait for room.
            self.raise_event(0, event::CONSOLE);
        }
        true
    }

    /// Ends all other processes, and waits until they are gone: whoever waits for this one finds nothing left, and no disk in use. Gives the first of
    /// them that has ended by itself.
    fn end_all(&self) -> Option<ChildExit> {
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
        found
    }
}

/// Tells a virtual CPU of an event, for other processes than the device process. Where they may not interrupt it themselves, that does.
pub fn raise_event(index: usize, what: u32) {
    let Some(vcpu) = vcpus().get(index) else { return };
    if vcpu.events().fetch_or(what, SeqCst) & what != 0 || idle::wake(vcpu) {
        return;
    }
    interrupt(index);
}

/// Interrupts a virtual CPU, or has the device process do it.
pub fn interrupt(index: usize) {
    let Some(vcpu) = vcpus().get(index) else { return };
    if config::kicks() {
        // If it is going from one process to another, or to one that does not listen yet, the next one looks.
        let slot = vcpu.slots.get(vcpu.running.load(SeqCst) as usize);
        let process = slot.map_or(0, |slot| slot.process.load(SeqCst));
        if process != 0 {
            sys::kill(process, KICK);
        }
        return;
    }
    shared().kick.fetch_or(1 << index, SeqCst);
    processes::notify();
}

/// Waits until one of these descriptors can be read, for so many milliseconds at most: which of them can.
fn wait<const COUNT: usize>(descriptors: [Option<u32>; COUNT], most: u64) -> [bool; COUNT] {
    // `struct pollfd`; of a negative descriptor nothing is said.
    let entry = |fd: Option<u32>| u64::from(fd.unwrap_or(u32::MAX)) | u64::from(READABLE) << 32;
    let mut entries = descriptors.map(entry);
    let arguments = [entries.as_mut_ptr() as u64, COUNT as u64, most, 0, 0, 0];
    // SAFETY: the kernel writes the entries' results.
    match unsafe { sys::call(linux::__NR_poll, arguments) } {
        Ok(1..) => entries.map(|entry| entry >> 48 != 0),
        _ => [false; COUNT],
    }
}

/// The end of one of the machine's processes.
struct ChildExit {
    process: u32,
    /// As wait4(2) gives it.
    status: u32,
}

impl ChildExit {
    /// The next one; `None`: there is none yet (`WNOHANG`), or nobody left.
    fn next(options: u32) -> Option<Self> {
        Self::wait(u64::MAX, options)
    }

    /// Waits for that of one process.
    fn of(process: u32) -> Option<Self> {
        Self::wait(process.into(), 0)
    }

    fn wait(process: u64, options: u32) -> Option<Self> {
        let mut status = 0_u32;
        let arguments = [process, &raw mut status as u64, u64::from(options), 0, 0, 0];
        // SAFETY: the kernel writes the status.
        let process = unsafe { sys::call(linux::__NR_wait4, arguments) }.unwrap_or(0) as u32;
        (process != 0).then_some(Self { process, status })
    }

    fn signal(&self) -> u8 {
        (self.status & 0x7f) as u8
    }

    /// Somebody has ended it.
    fn is_killed(&self) -> bool {
        u32::from(self.signal()) == linux::SIGKILL
    }

    /// Nobody has ended it: it exited, or was killed for what it did itself or by a signal that
    /// processes of the VM send each other.
    fn is_self_inflicted(&self) -> bool {
        let signal = u32::from(self.signal());
        [0, KICK, TIMER].contains(&signal) || exit::SELF_INFLICTED.contains(&signal)
    }

    /// The exit code that it means for the machine (`docs/spec/exit-codes.md`).
    fn code(&self, kind: ProcessKind) -> u8 {
        match kind {
            _ if !self.is_self_inflicted() => 128 + self.signal(),
            ProcessKind::Guest => exit::FAULT,
            ProcessKind::Setup | ProcessKind::Worker if self.signal() == 0 => HOST,
            ProcessKind::Setup | ProcessKind::Worker => INTERNAL,
        }
    }
}

/// What has ended.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum ProcessKind {
    /// A guest process, which has its filter: the guest may have brought it about.
    Guest,
    /// One that did not have it yet.
    Setup,
    /// A process of a disk or network.
    Worker,
}

impl fmt::Display for ProcessKind {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str(match self {
            Self::Guest => "guest process",
            Self::Setup => "a new guest process,",
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

/// There is a virtio console.
fn has_console() -> bool {
    config().start.console != 0
}
