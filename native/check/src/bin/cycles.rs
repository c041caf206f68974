//! Creates, runs and destroys a VM repeatedly, through the management gate, and compares free
//! memory. Arguments: the template, the number of cycles, and optionally a VM that is restarted as
//! often.
#![no_std]
#![no_main]
#![forbid(unsafe_code)]

use native_check::{Report, argument, number, same};
use native_rt::manage::ManagementGate;
use native_rt::{Notification, error, info, time};
use proto::manage::{CREATE, DESTROY, PAUSE, RESTART, RESUME, Refusal, START, STOP, State};
use proto::start::{Clock, Start, slot};

const NAME: &str = "cycle";
const SECOND: u64 = 1_000_000_000;

native_rt::entry!(main);

fn main(start: &Start<'static>) -> u64 {
    let template = argument(start, 0).unwrap_or("template");
    let mut report = Report::default();
    let manager = Manager { root: ManagementGate::new(), clock: start.clock };
    let count = number(start, 1, 200);
    // First, so that it does not run meanwhile.
    if let Some(vm) = argument(start, 2) {
        report.case("lives", manager.lives(vm, count));
    }
    report.case("refusals", manager.refusals(template));
    report.case("cycles", manager.cycles(template, count));
    report.exit_code()
}

struct Manager {
    root: ManagementGate,
    clock: Clock,
}

impl Manager {
    fn request(&self, label: u64, what: &'static str) -> Result<(), &'static str> {
        self.root.request(label, NAME, "").map_err(|refusal| {
            error!("{what}: {}", refusal.text());
            what
        })
    }

    /// Checks that impossible requests are refused without effect.
    fn refusals(&self, template: &'static str) -> Result<(), &'static str> {
        let ask = |label, name, second| self.root.request(label, name, second);
        let before = self.root.memory();
        same("unknown", ask(START, NAME, ""), Err(Refusal::Unknown))?;
        same("template runs", ask(START, template, ""), Err(Refusal::NoVm))?;
        same("no template", ask(CREATE, NAME, "nothing"), Err(Refusal::Unknown))?;
        same("bad name", ask(CREATE, "Bad name", template), Err(Refusal::BadName))?;
        same("name of a template", ask(CREATE, template, template), Err(Refusal::Taken))?;
        same("operation", ask(99, template, ""), Err(Refusal::NoVm))?;
        same("create", ask(CREATE, NAME, template), Ok(()))?;
        same("twice", ask(CREATE, NAME, template), Err(Refusal::Taken))?;
        for label in [STOP, PAUSE, RESUME, RESTART] {
            same("runs not", ask(label, NAME, ""), Err(Refusal::RunsNot))?;
        }
        same("destroy", ask(DESTROY, NAME, ""), Ok(()))?;
        same("memory", self.root.memory(), before)
    }

    fn cycles(&self, template: &str, count: u64) -> Result<(), &'static str> {
        let before = self.root.memory();
        for cycle in 0..count {
            self.root.request(CREATE, NAME, template).map_err(|_| "create")?;
            self.request(START, "start")?;
            self.wait_for_end(NAME)?;
            self.request(DESTROY, "destroy")?;
            if self.root.memory() != before {
                info!("cycle {cycle}: {:?} instead of {before:?}", self.root.memory());
                return Err("memory leaked");
            }
        }
        info!("{count} cycles: {before:?}");
        Ok(())
    }

    /// Restarts a VM with channels, which cannot be created from a template. Its peers keep
    /// running.
    fn lives(&self, vm: &str, count: u64) -> Result<(), &'static str> {
        // Memory allocated for the first start and kept, such as the channel's, is no leak.
        self.wait_for_end(vm)?;
        let before = self.root.memory();
        for life in 0..count {
            self.root.request(START, vm, "").map_err(|_| "start again")?;
            self.wait_for_end(vm)?;
            if self.root.memory() != before {
                info!("life {life}: {:?} instead of {before:?}", self.root.memory());
                return Err("memory leaked");
            }
        }
        info!("{count} lives: {before:?}");
        Ok(())
    }

    /// Waits until the guest has shut down.
    fn wait_for_end(&self, vm: &str) -> Result<(), &'static str> {
        let notification = Notification::at(slot::NOTIFICATION);
        let limit = time::after(&self.clock, 20 * SECOND);
        loop {
            match self.state(vm)? {
                State::Ended(0) => return Ok(()),
                State::Ended(code) => {
                    error!("the guest ended with {code}");
                    return Err("the guest failed");
                }
                _ if time::tsc() > limit => return Err("the guest does not end"),
                // A short wait, which an event may shorten.
                _ => drop(notification.wait(time::after(&self.clock, SECOND / 1000))),
            }
        }
    }

    fn state(&self, vm: &str) -> Result<State, &'static str> {
        let mut state = None;
        let listed = self.root.list(|entry| {
            if entry.name == vm {
                state = Some(entry.state);
            }
        });
        listed.ok().and(state).ok_or("it is not listed")
    }
}
