//! Starts the children, serves their gates, and handles their ends.

use abi::bundle::Header;
use abi::{FAULT_LABEL, FOREVER, boot};
use native_rt::random::Generator;
use native_rt::start::Boot;
use native_rt::thread::ThreadResources;
use native_rt::{
    Factory, Incoming, Message, OwnThread, Page, Platform, ServerThread, Slots, error, info,
    reply_wait, time, wait, warn,
};
use proto::channel::{LET_GO, LOOK, MAP, OFFER, REVOKE};
use proto::control::{DRAINED, EXITED, PANICKED, STARTED, VmmStatistics, code};
use proto::log::{Level, MAX_TEXT};
use proto::manage::Refusal;
use proto::start::{Clock, Role, Start, event};
use proto::system::{MAX_SERVERS, MAX_TASKS, MAX_VMS, Restart, ServerKind, System};
use proto::{DONE, REFUSED, console};

use crate::alarm::{ALARM, Alarm};
use crate::channels::Channels;
use crate::child::{Child, ChildConfig, Resources, StartError, purpose};
use crate::directory::Directory;
use crate::instances::{Instances, Name};
use crate::lines::LineBudget;
use crate::memory::Memory;
use crate::platform::Fault;
use crate::policy::{Draining, Ended};
use crate::sessions::{PERMANENT, Sessions};
use crate::{leave, lines, pass_through, platform, policy};

mod launch;
mod statistics;

use statistics::{Counts, VtlbCounts};

/// Slot of root's notification.
pub const NOTIFICATION: u64 = boot::slot::FREE;
const ALARM_NOTIFICATION: u64 = boot::slot::FREE + 1;
const ALARM_THREAD: u64 = boot::slot::FREE + 2;
const ALARM_SCHED: u64 = boot::slot::FREE + 3;
const FIRST_FREE: u64 = boot::slot::FREE + 4;

/// Children are numbered: servers, tasks, VMs.
pub(crate) const FIRST_TASK: usize = MAX_SERVERS;
pub(crate) const FIRST_VM: usize = FIRST_TASK + MAX_TASKS;
pub(crate) const CHILDREN: usize = FIRST_VM + MAX_VMS;
const _: () = assert!(CHILDREN <= proto::console::directory::SESSIONS);

/// Time limit for tasks to end by themselves and for output to drain at the end of the system, in
/// ns.
const SHUTDOWN_TIMEOUT: u64 = 3_000_000_000;

/// Time between two looks at the log of the IOMMUs, while servers or VMs have devices, in ns.
const DEVICE_CHECK: u64 = 1_000_000_000;

/// State of a child that outlives it.
#[derive(Clone, Copy)]
pub(crate) struct Record {
    /// Exit code of its last end.
    pub ended: Option<u64>,
    /// TSC value of its restart.
    pub restart: u64,
    /// Restarts since it was last healthy.
    restarts: u32,
    /// Failed starts since it last started.
    failed_starts: u32,
    /// Total number of restarts.
    pub all_restarts: u32,
    /// An operator has ended it: it is not restarted.
    pub hold: bool,
    /// An operator has paused it.
    pub paused: bool,
}

impl Record {
    /// Returns whether its child is to be restarted at `now`.
    fn restarts_at(&self, now: u64, phase: Phase) -> bool {
        phase == Phase::Running && self.restart <= now
    }
}

pub(crate) const UNKNOWN: Record = Record {
    ended: None,
    restart: FOREVER,
    restarts: 0,
    failed_starts: 0,
    all_restarts: 0,
    hold: false,
    paused: false,
};

/// Progress of the system's shutdown.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Phase {
    Running,
    /// Remaining tasks are asked to end, until this TSC value.
    Stopping(u64),
    /// Servers are asked to drain their output, until this TSC value.
    Draining(u64),
}

impl Phase {
    /// Refuses requests that start a child during the shutdown.
    pub(crate) fn check_running(self) -> Result<(), Refusal> {
        if self == Self::Running { Ok(()) } else { Err(Refusal::Ending) }
    }
}

/// Cause of a child's end.
pub(crate) enum EndCause<'t> {
    Exited(u64, &'t VmmStatistics),
    Panicked(&'t [u8]),
    Faulted(Fault),
    /// Ended by an operator.
    Killed,
    /// Its device made a request that the IOMMU blocked.
    DeviceBlocked,
}

/// Root's state.
pub struct Manager<'a> {
    pub(crate) resources: Resources<'a>,
    header: Header<'a>,
    pub(crate) system: &'a System<'a>,
    pub(crate) clock: Clock,
    pub(crate) instances: Instances<'a>,
    pub(crate) children: [Option<Child>; CHILDREN],
    pub(crate) records: [Record; CHILDREN],
    lines: [LineBudget; CHILDREN],
    /// Directory of the console's multiplexer, and the server's index.
    directory: Option<(usize, Directory)>,
    pub(crate) sessions: Sessions,
    /// TSC value of the next look at the log of the IOMMUs.
    device_check: u64,
    channels: Channels,
    /// Source of the seeds of VMs, if the firmware provides one.
    seeds: Option<Generator>,
    alarm: Option<Alarm>,
    pub(crate) phase: Phase,
    draining: Draining,
    outcome: u64,
}

impl<'a> Manager<'a> {
    /// Initialises root's state. `thread` is the running thread.
    pub fn new(
        boot: &'a Boot,
        header: Header<'a>,
        system: &'a System<'a>,
        clock: Clock,
        thread: OwnThread,
    ) -> Self {
        let alarm = create_alarm(thread);
        if let Err(status) = alarm {
            warn!("cannot start the alarm: no child will be restarted: {status:?}");
        }
        let slots = Slots::new(FIRST_FREE);
        let mut memory = Memory::new(boot);
        let sessions = Sessions::new(system, boot, &mut memory);
        Self {
            resources: Resources { boot, memory, slots },
            header,
            system,
            clock,
            instances: Instances::new(system),
            children: [const { None }; CHILDREN],
            records: [UNKNOWN; CHILDREN],
            lines: [const { LineBudget::new() }; CHILDREN],
            directory: None,
            sessions,
            device_check: FOREVER,
            channels: Channels::new(system),
            seeds: platform::seed(boot).map(|seed| Generator::new(seed, 0)),
            alarm: alarm.ok(),
            phase: Phase::Running,
            draining: Draining::default(),
            outcome: code::OK,
        }
    }

    /// Starts all children and serves for ever.
    pub fn run(mut self) -> ! {
        info!("{} MiB of memory free", self.resources.memory.free() >> 20);
        for number in 0..CHILDREN {
            self.start(number);
        }
        self.advance();
        let mut next = wait();
        loop {
            let answer = match next {
                Ok(Incoming::Call(badge, message)) => self.call(badge, message),
                Ok(Incoming::Events(events)) => {
                    self.events(events);
                    None
                }
                Err(_) => None,
            };
            next = match answer {
                Some(answer) => reply_wait(answer),
                None => wait(),
            };
        }
    }

    pub(crate) fn name(&self, number: usize) -> Name {
        let system = self.system;
        let name = match number {
            FIRST_VM.. => self.instances.get(number - FIRST_VM).map(|vm| vm.name.as_str()),
            FIRST_TASK.. => system.tasks.get(number - FIRST_TASK).map(|task| task.name),
            _ => system.servers.get(number).map(|server| server.name),
        };
        // Names in a description are short enough.
        name.unwrap_or("?").try_into().unwrap_or_default()
    }

    fn kind(number: usize) -> &'static str {
        match number {
            FIRST_VM.. => "vm",
            FIRST_TASK.. => "task",
            _ => "server",
        }
    }

    fn essential(&self, number: usize) -> bool {
        if let Some(index) = number.checked_sub(FIRST_VM) {
            return self.instances.get(index).is_some_and(|vm| vm.plan.essential);
        }
        let task = number.checked_sub(FIRST_TASK).and_then(|index| self.system.tasks.get(index));
        task.is_some_and(|task| task.essential)
    }

    // ---- starting ----------------------------------------------------------------------------

    /// Starts a child if the description has it. A failure counts as its end, and that of a restart
    /// as a crash, until too many have failed in a row.
    pub(crate) fn start(&mut self, number: usize) {
        let record = &mut self.records[number];
        let is_restart = record.restart != FOREVER;
        (record.restart, record.hold, record.paused) = (FOREVER, false, false);
        let started = match number {
            FIRST_VM.. => {
                let plan = self.instances.get(number - FIRST_VM).map(|vm| vm.plan);
                plan.map(|plan| self.start_vm(number, plan))
            }
            FIRST_TASK.. => {
                (number - FIRST_TASK < self.system.tasks.len()).then(|| self.start_task(number))
            }
            _ => self.system.servers.get(number).map(|server| self.start_server(number, server)),
        };
        match started {
            None => {}
            Some(Ok(child)) => {
                let memory = (child.bytes + child.shared) >> 10;
                self.children[number] = Some(child);
                self.records[number].failed_starts = 0;
                self.channels.started(number, &self.children);
                info!("{} {} started, {memory} KiB", Self::kind(number), self.name(number));
                self.connect_clients(number);
            }
            Some(Err(error)) => {
                let (kind, name) = (Self::kind(number), self.name(number));
                error!("cannot start {kind} {name}: {error}");
                let record = &mut self.records[number];
                record.ended = Some(code::BAD_CONFIG);
                record.failed_starts = record.failed_starts.saturating_add(1);
                let failures = record.failed_starts;
                self.resources.memory.free_all(number);
                self.remove_name(number);
                let again = is_restart && policy::repeats_start(self.policy(number), failures);
                if !(again && self.schedule_restart(number, 0, code::INTERNAL)) {
                    self.wake_clients(number);
                }
            }
        }
    }

    /// Creates a child of a program in the bundle; `equip` adds its resources and returns its role.
    fn build(
        &mut self,
        config: &ChildConfig,
        binary: &str,
        equip: impl FnOnce(&mut Self, &mut Child) -> Result<Role<'a>, StartError>,
    ) -> Result<Child, StartError> {
        if config.cpu >= self.resources.boot.info.cpus {
            return Err(StartError::Cpu(config.cpu));
        }
        let file = self.header.find(binary).ok_or(StartError::File("program"))?;
        let range = file.offset as usize..(file.offset + file.length) as usize;
        let bytes = self.resources.boot.bundle.get(range).ok_or(StartError::Place)?;
        let mut child = Child::new(&mut self.resources, config)?;
        let name = self.name(config.number);
        let done = child
            .load(&mut self.resources, (file.offset, bytes), config.stack)
            .and_then(|entry| Ok((entry, equip(self, &mut child)?)))
            .and_then(|(entry, role)| {
                let start = Start {
                    name: &name,
                    cpu: config.cpu,
                    priority: config.priority,
                    cpu_time: config.cpu_time,
                    clock: self.clock,
                    ranges: child.ranges().clone(),
                    role,
                };
                child.start(&mut self.resources, &start, entry)
            });
        match done {
            Ok(()) => Ok(child),
            Err(error) => {
                self.destroy_child(config.number, child, false);
                Err(error)
            }
        }
    }

    /// Destroys a child that has ended or failed to start, and removes all references to it: its
    /// device loses access, no peer regards it as running, and root writes to none of its memory.
    /// `has_run`: it may have started its devices.
    fn destroy_child(&mut self, number: usize, child: Child, has_run: bool) {
        if self.directory.as_ref().is_some_and(|(owner, _)| *owner == number) {
            self.directory = None;
        }
        // A server that still runs would take what registers of a disabled device read as for its
        // answers, and report success to its clients.
        child.stop();
        if let Some(vm) = number.checked_sub(FIRST_VM).and_then(|index| self.instances.get(index)) {
            let iommu = self.sessions.iommu();
            let (boot, devices) = (self.resources.boot, &vm.plan.devices);
            let of = (number, &child);
            if !pass_through::vm_ended(boot, iommu, of, devices, has_run) {
                error!("vm {}: its memory stays unused, as a device may access it", vm.name);
                self.resources.memory.transfer(number, PERMANENT);
            }
        }
        if let Some(server) = self.system.servers.get(number) {
            self.sessions.server_ended(self.resources.boot, number, server);
        }
        child.destroy(&mut self.resources);
        self.channels.ended(number, &self.children);
        self.draining.remove(number);
    }

    /// Removes a child's name from the console's multiplexer.
    fn remove_name(&self, number: usize) {
        if let Some((_, directory)) = &self.directory {
            directory.set(number, "");
        }
    }

    /// Delegates a child's console gate, if the description has one. The session is the child's
    /// index.
    fn connect_console(
        &mut self,
        child: &mut Child,
        console: Option<u8>,
        number: usize,
    ) -> Result<(), StartError> {
        let Some(server) = console.map(usize::from) else { return Ok(()) };
        let name = self.name(number);
        if let Some((_, directory)) = self.directory.as_ref().filter(|(owner, _)| *owner == server)
        {
            directory.set(number, &name);
        }
        match self.children.get(server) {
            Some(Some(server)) => server.session(&mut self.resources.slots, child, number as u64),
            // It will connect its clients when it starts.
            Some(None) if self.records[server].restart != FOREVER => Ok(()),
            _ => Err(StartError::Server),
        }
    }

    /// Returns whether a child's console is this server.
    fn is_client(&self, number: usize, server: usize) -> bool {
        let console = match number {
            FIRST_VM.. => self.instances.get(number - FIRST_VM).and_then(|vm| vm.plan.console),
            FIRST_TASK.. => {
                self.system.tasks.get(number - FIRST_TASK).and_then(|task| task.console)
            }
            _ => None,
        };
        console.map(usize::from) == Some(server)
    }

    /// Creates sessions for the clients of a restarted console server. Sessions of other servers
    /// are in memory and stay.
    fn connect_clients(&mut self, server: usize) {
        for number in FIRST_TASK..CHILDREN {
            if !self.is_client(number, server) {
                continue;
            }
            let Some(mut child) = self.children[number].take() else { continue };
            if let Err(error) = self.connect_console(&mut child, Some(server as u8), number) {
                error!("{} {} has no console: {error:?}", Self::kind(number), self.name(number));
            }
            self.children[number] = Some(child);
        }
        self.wake_clients(server);
    }

    /// Notifies the clients of a console server that it has restarted, or will not.
    fn wake_clients(&self, server: usize) {
        for number in (FIRST_TASK..CHILDREN).filter(|&number| self.is_client(number, server)) {
            if let Some(child) = &self.children[number] {
                child.signal(event::CONSOLE);
            }
        }
    }

    // ---- serving -----------------------------------------------------------------------------

    /// Handles a call; returns `None` if the caller gets no reply.
    fn call(&mut self, badge: u64, message: Message) -> Option<Message> {
        let number = (badge >> purpose::BITS) as usize;
        if number >= CHILDREN || self.children[number].is_none() {
            return Some(Message::new(REFUSED, [0; 4]));
        }
        let mut text = [0; MAX_TEXT];
        let page = Page::current();
        match (badge & ((1 << purpose::BITS) - 1), message.tag.label) {
            (purpose::LOG, proto::log::WRITE) => {
                let text = page.bytes(message.tag.words, message.words[1], &mut text);
                self.log(number, Level::from_code(message.words[0]), text);
                Some(Message::new(DONE, [0; 4]))
            }
            (purpose::CONTROL, label @ (OFFER | REVOKE | MAP | LET_GO | LOOK)) => {
                Some(self.channels.call(number, label, message.words, &self.children))
            }
            (purpose::CONTROL, STARTED) => Some(Message::new(DONE, [0; 4])),
            (purpose::CONTROL, DRAINED) => {
                self.draining.remove(number);
                self.advance();
                Some(Message::new(DONE, [0; 4]))
            }
            (purpose::CONTROL, EXITED) => {
                let mut words = [0; VmmStatistics::WORDS];
                let count = (message.tag.words as usize).min(words.len());
                page.words(&mut words[..count]);
                let statistics = VmmStatistics::unpack(&words);
                self.end(number, EndCause::Exited(message.words[0], &statistics));
                None
            }
            (purpose::CONTROL, PANICKED) => {
                let text = page.bytes(message.tag.words, message.words[0], &mut text);
                self.end(number, EndCause::Panicked(text));
                None
            }
            (purpose::FAULT, FAULT_LABEL) => {
                let [vector, error, address, ip] = message.words;
                self.end(number, EndCause::Faulted(Fault { vector, error, address, ip }));
                None
            }
            (purpose::MANAGE, label) => Some(self.manage(label, message)),
            _ => Some(Message::new(REFUSED, [0; 4])),
        }
    }

    /// Writes a text of a child to the log.
    fn log(&mut self, number: usize, level: Level, text: &[u8]) {
        let name = self.name(number);
        let budget = &mut self.lines[number];
        let before = budget.note();
        lines::write(&name, level, text, budget, self.clock.tsc_khz);
        if budget.note() != before {
            // The first suppressed line: set the alarm for its report.
            self.advance();
        }
    }

    /// Reports the number of suppressed lines of a child, if any.
    fn report_suppressed(&mut self, number: usize) {
        let count = self.lines[number].take_suppressed();
        if count != 0 {
            let (kind, name) = (Self::kind(number), self.name(number));
            warn!(
                "{kind} {name}: {count} lines dropped, beyond {} at once or {} per second",
                lines::BURST,
                lines::RATE
            );
        }
    }

    fn events(&mut self, events: u64) {
        if events & ALARM != 0 {
            while let Some(number) = self.sessions.report() {
                self.end(number, EndCause::DeviceBlocked);
            }
            let now = time::tsc();
            if self.device_check <= now {
                self.device_check = FOREVER;
            }
            for number in 0..CHILDREN {
                if self.lines[number].note() <= now {
                    self.report_suppressed(number);
                }
                if self.records[number].restarts_at(now, self.phase) {
                    self.start(number);
                }
            }
            self.advance();
        }
    }

    // ---- ends --------------------------------------------------------------------------------

    /// Destroys a child, logs the cause, and decides about its restart.
    pub(crate) fn end(&mut self, number: usize, end: EndCause) {
        let (kind, name) = (Self::kind(number), self.name(number));
        let (code, what) = match &end {
            EndCause::Exited(code, _) => (*code, policy::outcome(*code, number >= FIRST_VM)),
            EndCause::Panicked(_) => (code::INTERNAL, "panic"),
            EndCause::Faulted(_) => (code::INTERNAL, "fault"),
            EndCause::Killed => (code::OK, "killed"),
            EndCause::DeviceBlocked => (code::INTERNAL, "blocked request of its device"),
        };
        self.report_suppressed(number);
        match end {
            EndCause::Exited(..) | EndCause::Killed | EndCause::DeviceBlocked => {}
            EndCause::Panicked(text) => lines::write_panic(&name, text),
            EndCause::Faulted(fault) => error!("{kind} {name}: {fault}"),
        }
        let Some(child) = self.children[number].take() else { return };
        let lived = time::tsc().saturating_sub(child.created_at);
        let (bytes, shared) = (child.bytes, child.shared);
        let pages = pages_used();
        self.destroy_child(number, child, true);
        let kernel = pages.saturating_sub(pages_used()) * abi::PAGE_SIZE;
        if let EndCause::Exited(_, statistics) = end
            && number >= FIRST_VM
        {
            info!("vm {name}: statistics: {}", Counts(statistics, bytes + kernel, shared));
            let vm = self.instances.get(number - FIRST_VM);
            if vm.is_some_and(|vm| vm.plan.vtlb.is_some()) {
                info!("vm {name}: vtlb: {}", VtlbCounts(statistics));
            }
        }
        info!("{kind} {name} ended: {what} code {code}");
        self.records[number].ended = Some(code);
        self.remove_name(number);

        let vm = number.checked_sub(FIRST_VM).and_then(|index| self.instances.get(index));
        let has_reset = vm.is_some_and(|vm| vm.plan.restarts_at_reset()) && code == code::RESET;
        let again = (policy::starts_again(self.policy(number), code) || has_reset)
            && !self.records[number].hold;
        let lived = time::nanos(self.clock.tsc_khz, lived);
        if !(again && self.schedule_restart(number, lived, code))
            && self.records[number].restart == FOREVER
        {
            self.wake_clients(number);
        }
        self.advance();
    }

    /// Returns the condition of a child's restart in the description.
    fn policy(&self, number: usize) -> Restart {
        let server = self.system.servers.get(number).map(|server| server.restart);
        let vm = number.checked_sub(FIRST_VM).and_then(|index| self.instances.get(index));
        server.or(vm.map(|vm| vm.plan.restart)).unwrap_or(Restart::Never)
    }

    /// Schedules the restart of a child that lived `lived` ns and ended with this code. Returns
    /// `false` if root cannot restart children, or the system ends.
    fn schedule_restart(&mut self, number: usize, lived: u64, code: u64) -> bool {
        if self.alarm.is_none() || self.phase != Phase::Running {
            return false;
        }
        let record = &mut self.records[number];
        let (delay, restarts) = policy::next_restart(record.restarts, lived, code);
        record.restarts = restarts;
        record.all_restarts = record.all_restarts.saturating_add(1);
        record.restart = time::after(&self.clock, delay);
        info!("{} {} restarts in {} ms", Self::kind(number), self.name(number), delay / 1_000_000);
        true
    }

    fn is_over(&self, number: usize) -> bool {
        self.children[number].is_none() && self.records[number].restart == FOREVER
    }

    /// Enters the next phase when it is due, and sets the alarm for the next event.
    pub(crate) fn advance(&mut self) {
        let now = time::tsc();
        if self.phase == Phase::Running {
            let none_essential = (FIRST_TASK..CHILDREN).all(|number| !self.essential(number));
            let over = (FIRST_TASK..CHILDREN)
                .filter(|&number| none_essential || self.essential(number))
                .all(|number| self.is_over(number));
            if over {
                info!("all guests ended");
                self.phase = Phase::Stopping(time::after(&self.clock, SHUTDOWN_TIMEOUT));
                self.records.iter_mut().for_each(|record| record.restart = FOREVER);
                for child in self.children[FIRST_TASK..FIRST_VM].iter().flatten() {
                    child.signal(event::STOP);
                }
            }
        }
        if let Phase::Stopping(until) = self.phase {
            let left = self.children[FIRST_TASK..FIRST_VM].iter().flatten().count();
            if left == 0 || now >= until {
                for number in FIRST_TASK..FIRST_VM {
                    if self.children[number].is_some() {
                        warn!("task {} does not end", self.name(number));
                    }
                }
                self.outcome = self.exit_status();
                self.phase = Phase::Draining(time::after(&self.clock, SHUTDOWN_TIMEOUT));
                for (number, server) in self.system.servers.iter().enumerate() {
                    let is_console =
                        matches!(server.kind, ServerKind::Console | ServerKind::Multiplexer);
                    if let (Some(child), true) = (&self.children[number], is_console) {
                        self.draining.add(number);
                        child.signal(console::DRAIN);
                    }
                }
            }
        }
        if let Phase::Draining(until) = self.phase
            && (now >= until || self.draining.is_over())
        {
            self.leave();
        }
        let phase_ends = match self.phase {
            Phase::Running => FOREVER,
            Phase::Stopping(until) | Phase::Draining(until) => until,
        };
        let restarts = self.records.iter().map(|record| record.restart);
        let notes = self.lines.iter().map(LineBudget::note);
        if self.device_check == FOREVER && self.sessions.has_guarded_devices() {
            self.device_check = time::after(&self.clock, DEVICE_CHECK);
        }
        let next = restarts.chain(notes).fold(phase_ends.min(self.device_check), u64::min);
        if let Some(alarm) = &self.alarm {
            alarm.set(next);
        }
    }

    fn exit_status(&self) -> u64 {
        policy::exit_status((FIRST_TASK..CHILDREN).filter_map(|number| {
            let code = self.records[number].ended?;
            Some(Ended { essential: self.essential(number), task: number < FIRST_VM, code })
        }))
    }

    fn leave(&mut self) -> ! {
        (0..CHILDREN).for_each(|number| self.report_suppressed(number));
        info!("outcome {}", self.outcome);
        leave(self.system.board, self.outcome)
    }
}

fn create_alarm(thread: OwnThread) -> Result<Alarm, native_rt::Status> {
    const PRIORITY: u8 = 63;
    let factory = Factory::at(boot::slot::FACTORY);
    let notification = factory.notification(NOTIFICATION)?;
    thread.bind_notification(notification)?;
    let own = factory.notification(ALARM_NOTIFICATION)?;
    let sched = factory.sched_context(ALARM_SCHED, PRIORITY, 1_000_000, 0)?;
    let resources =
        ThreadResources { factory, task: boot::slot::TASK, slot: ALARM_THREAD, cpu: 0, sched };
    Alarm::start(resources, own, notification)
}

/// Returns the pages of kernel memory in use.
pub(crate) fn pages_used() -> u64 {
    Platform::at(boot::slot::PLATFORM).stats().map_or(0, |stats| stats.pages_used)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn children_start_only_while_the_system_runs() {
        let record = Record { restart: 5, ..UNKNOWN };
        assert!(record.restarts_at(5, Phase::Running));
        assert!(!record.restarts_at(4, Phase::Running));
        assert_eq!(Phase::Running.check_running(), Ok(()));
        for phase in [Phase::Stopping(9), Phase::Draining(9)] {
            assert!(!record.restarts_at(5, phase));
            assert_eq!(phase.check_running(), Err(Refusal::Ending));
        }
    }
}
