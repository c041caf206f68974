//! Management gate: requests of the operator shell.

use abi::PAGE_SIZE;
use native_rt::{Message, Page, Platform, info, time};
use proto::manage::{
    CREATE, DESTROY, Entry, FIGURES, Figures, KILL, Kind, LIST, MAX_ENCODED, MEMORY, PAUSE,
    RESTART, RESUME, Refusal, START, STOP, State,
};
use proto::start::event;
use proto::system::{MAX_NAME, MAX_VMS, System};
use proto::{DONE, REFUSED};
use serde::Serialize;

use crate::instances::Instances;
use crate::manager::{CHILDREN, EndCause, FIRST_TASK, FIRST_VM, Manager, UNKNOWN};

/// Indices from here on are those of templates.
const FIRST_TEMPLATE: usize = CHILDREN;

impl Manager<'_> {
    /// Handles a call through a management gate.
    pub(crate) fn manage(&mut self, label: u64, message: Message) -> Message {
        match self.try_manage(label, message) {
            Ok(answer) => answer,
            Err(refusal) => Message::new(REFUSED, [refusal as u64, 0, 0, 0]),
        }
    }

    fn try_manage(&mut self, label: u64, message: Message) -> Result<Message, Refusal> {
        let done = Ok(Message::new(DONE, [0; 4]));
        match label {
            LIST => return Ok(self.list(message.words[0])),
            FIGURES => return self.figures(message.words[0]),
            MEMORY => return Ok(self.memory()),
            _ => {}
        }
        let mut buffer = [0; 2 * MAX_NAME];
        let length = message.words[0].saturating_add(message.words[1]);
        if length > buffer.len() as u64 {
            return Err(Refusal::Malformed);
        }
        let text = Page::current().bytes(message.tag.words, length, &mut buffer);
        let text = core::str::from_utf8(text).map_err(|_| Refusal::Malformed)?;
        let split = text.split_at_checked(message.words[0] as usize);
        let (name, second) = split.ok_or(Refusal::Malformed)?;
        if label == CREATE {
            let number = self.create(name, second)?;
            return Ok(Message::new(DONE, [number as u64, 0, 0, 0]));
        }
        if label == RESTART
            && let Some(number) = server_to_restart(self.system, &self.instances, name)
        {
            self.restart(number)?;
            return done;
        }
        self.control_vm(label, name)?;
        done
    }

    /// Carries out an operation on a VM.
    fn control_vm(&mut self, label: u64, name: &str) -> Result<(), Refusal> {
        let number = self.find_vm(name)?;
        match label {
            START => self.start_now(number)?,
            STOP => {
                self.running(number)?;
                self.records[number].hold = true;
                self.signal(number, event::POWER_BUTTON);
            }
            KILL => self.kill(number)?,
            PAUSE => {
                self.running(number)?;
                self.set_paused(number, true);
            }
            RESUME => {
                self.running(number)?;
                if !self.records[number].paused {
                    return Err(Refusal::PausedNot);
                }
                self.set_paused(number, false);
            }
            RESTART => self.restart(number)?,
            DESTROY => {
                // It need not run.
                let _ = self.kill(number);
                self.instances.remove(number - FIRST_VM);
                self.records[number] = UNKNOWN;
                info!("vm {name} destroyed");
                self.advance();
            }
            _ => return Err(Refusal::Malformed),
        }
        Ok(())
    }

    fn find_vm(&self, name: &str) -> Result<usize, Refusal> {
        let exists = self.system.tasks.iter().any(|task| task.name == name)
            || self.system.servers.iter().any(|server| server.name == name)
            || self.system.vms.iter().any(|vm| vm.template && vm.name == name);
        let found = self.instances.find(name).map(|index| FIRST_VM + index);
        found.ok_or(if exists { Refusal::NoVm } else { Refusal::Unknown })
    }

    fn restart(&mut self, number: usize) -> Result<(), Refusal> {
        self.running(number)?;
        // Before the kill: otherwise a refused restart would end the child.
        self.phase.check_running()?;
        let record = &mut self.records[number];
        // It is about to be restarted, so its end is not the end of the system.
        (record.hold, record.restart) = (true, 0);
        self.end(number, EndCause::Killed);
        self.start_now(number)
    }

    fn running(&self, number: usize) -> Result<(), Refusal> {
        if self.children[number].is_some() { Ok(()) } else { Err(Refusal::RunsNot) }
    }

    fn signal(&self, number: usize, events: u64) {
        if let Some(child) = &self.children[number] {
            child.signal(events);
        }
    }

    fn set_paused(&mut self, number: usize, paused: bool) {
        self.records[number].paused = paused;
        if let Some(child) = &self.children[number] {
            child.set_paused(paused);
        }
    }

    fn start_now(&mut self, number: usize) -> Result<(), Refusal> {
        self.phase.check_running()?;
        if self.children[number].is_some() {
            return Err(Refusal::Runs);
        }
        self.start(number);
        self.advance();
        self.running(number).map_err(|_| Refusal::Failed)
    }

    /// Ends a VM, or cancels its pending restart.
    fn kill(&mut self, number: usize) -> Result<(), Refusal> {
        let record = &mut self.records[number];
        record.hold = true;
        let waits = core::mem::replace(&mut record.restart, UNKNOWN.restart) != UNKNOWN.restart;
        if self.children[number].is_some() {
            self.end(number, EndCause::Killed);
        } else if waits {
            self.advance();
        } else {
            return Err(Refusal::RunsNot);
        }
        Ok(())
    }

    fn create(&mut self, name: &str, template: &str) -> Result<usize, Refusal> {
        let named = |vm: &&proto::system::Vm| vm.name == template;
        let system = self.system;
        let Some(plan) = system.vms.iter().find(named).filter(|vm| vm.template) else {
            let exists = self.find_vm(template) != Err(Refusal::Unknown);
            return Err(if exists { Refusal::NoTemplate } else { Refusal::Unknown });
        };
        if self.find_vm(name) != Err(Refusal::Unknown) {
            return Err(Refusal::Taken);
        }
        let number = FIRST_VM + self.instances.add(name, plan)?;
        self.records[number] = UNKNOWN;
        info!("vm {name} created from template {template}");
        Ok(number)
    }

    // ---- questions ---------------------------------------------------------------------------

    fn list(&self, from: u64) -> Message {
        let from = usize::try_from(from).unwrap_or(usize::MAX);
        let name;
        let entry = match (from..CHILDREN).find(|&number| self.exists(number)) {
            Some(number) => {
                name = self.name(number);
                self.entry(number, &name)
            }
            None => match self.template(from) {
                Some(entry) => entry,
                None => return Message::new(DONE, [0; 4]),
            },
        };
        answer(&entry)
    }

    fn exists(&self, number: usize) -> bool {
        match number {
            FIRST_VM.. => self.instances.get(number - FIRST_VM).is_some(),
            FIRST_TASK.. => number - FIRST_TASK < self.system.tasks.len(),
            _ => number < self.system.servers.len(),
        }
    }

    fn entry<'n>(&self, number: usize, name: &'n str) -> Entry<'n> {
        let record = &self.records[number];
        let state = match (&self.children[number], record.ended) {
            (Some(_), _) if record.paused => State::Paused,
            (Some(_), _) => State::Running,
            _ if record.restart != UNKNOWN.restart => State::Waiting,
            (None, Some(code)) => State::Ended(code),
            (None, None) => State::New,
        };
        let vm = number.checked_sub(FIRST_VM).and_then(|index| self.instances.get(index));
        let task = number.checked_sub(FIRST_TASK).and_then(|index| self.system.tasks.get(index));
        let server = self.system.servers.get(number);
        let priority = vm.map(|vm| vm.plan.priority);
        let priority = priority.or(task.map(|task| task.priority));
        Entry {
            number: number as u32,
            name,
            kind: match number {
                FIRST_VM.. => Kind::Vm,
                FIRST_TASK.. => Kind::Task,
                _ => Kind::Server,
            },
            state,
            memory: vm.map_or(0, |vm| vm.plan.memory),
            vcpus: vm.map_or(0, |vm| vm.plan.vcpus),
            priority: priority.or(server.map(|server| server.priority)).unwrap_or(0),
            restarts: record.all_restarts,
        }
    }

    fn template(&self, from: usize) -> Option<Entry<'_>> {
        let first = from.saturating_sub(FIRST_TEMPLATE);
        let mut templates = self.system.vms.iter().enumerate().take(MAX_VMS).skip(first);
        let (index, vm) = templates.find(|(_, vm)| vm.template)?;
        Some(Entry {
            number: (FIRST_TEMPLATE + index) as u32,
            name: vm.name,
            kind: Kind::Template,
            state: State::New,
            memory: vm.memory,
            vcpus: vm.vcpus,
            priority: vm.priority,
            restarts: 0,
        })
    }

    fn figures(&self, number: u64) -> Result<Message, Refusal> {
        let number = usize::try_from(number).unwrap_or(usize::MAX);
        let child = self.children.get(number).ok_or(Refusal::Unknown)?;
        let child = child.as_ref().ok_or(Refusal::RunsNot)?;
        child.signal(event::REPORT);
        let report = child.report().unwrap_or_default();
        let nanos = |ticks| time::nanos(self.clock.tsc_khz, ticks);
        // The report is of one moment: its own time counts. Without a report, the figures are of
        // the start.
        let lived = report.written.saturating_sub(child.created_at);
        let vcpus =
            self.instances.get(number.saturating_sub(FIRST_VM)).map_or(1, |vm| vm.plan.vcpus);
        let all = (lived - report.paused.min(lived)).saturating_mul(vcpus.into());
        let steal = all.saturating_sub(report.used).saturating_sub(report.halted);
        Ok(answer(&Figures {
            lived: nanos(lived),
            run: nanos(report.used),
            steal: nanos(steal),
            halt: nanos(report.halted),
            paused: nanos(report.paused),
            bytes: child.bytes,
            kernel_bytes: child.quota * PAGE_SIZE,
            entries: report.entries,
            handled_in_kernel: report.handled_in_kernel,
            exits: report.exits,
        }))
    }

    fn memory(&self) -> Message {
        let stats = Platform::at(abi::boot::slot::PLATFORM).stats().unwrap_or_default();
        let memory = &self.resources.memory;
        let words = [memory.free(), memory.pieces(), stats.pages_used, stats.pages_total];
        Message::new(DONE, words)
    }
}

/// Returns the server that a restart concerns. If a VM has the same name, the restart concerns the
/// VM, as every other request does.
fn server_to_restart(system: &System, instances: &Instances, name: &str) -> Option<usize> {
    match instances.find(name) {
        Some(_) => None,
        None => system.servers.iter().position(|server| server.name == name),
    }
}

/// Returns a reply with a serialised struct in the page.
fn answer(value: &impl Serialize) -> Message {
    let mut buffer = [0; MAX_ENCODED];
    // The largest structs fit, as a test of `proto` shows.
    let bytes = postcard::to_slice(value, &mut buffer).map_or(&[][..], |bytes| bytes);
    let words = Page::current().set_bytes(bytes);
    Message::new(DONE, [bytes.len() as u64, 0, 0, 0]).with_page(words)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::instances::tests::{server, system, vm};

    #[test]
    fn a_name_means_the_virtual_machine_in_every_request() {
        let mut system = system([vm("console", false)]);
        system.servers.extend(["console", "blk0"].map(server));
        let mut instances = Instances::new(&system);
        assert_eq!(server_to_restart(&system, &instances, "console"), None);
        assert_eq!(server_to_restart(&system, &instances, "blk0"), Some(1));
        assert_eq!(server_to_restart(&system, &instances, "none"), None);
        instances.remove(0);
        assert_eq!(server_to_restart(&system, &instances, "console"), Some(0));
    }
}
