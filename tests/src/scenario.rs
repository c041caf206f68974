//! Scenarios: what to boot, what to do, what must happen.

use crate::bochs::{self, Model};
use crate::outcome::Class;
use crate::system::{Machine, Running};
use anyhow::{Context, Result, bail};
use std::fmt;
use std::ops::RangeInclusive;
use std::time::{Duration, Instant};

/// Message of `parador` when Parador's kernel has panicked.
const KERNEL_PANIC: &str = "kernel panicked; this is always a bug";
/// Time for building an image and for ending.
const SLACK: Duration = Duration::from_secs(60);

/// Numbers of a virtual machine's CPUs in a description, one excepted.
const SEVERAL_CPUS: RangeInclusive<u32> = 2..=8;
/// Parts of a description that end programs or VMs while others continue.
const ENDS_OTHERS: [&str; 4] = ["check-killer", "check-crasher", "check-cycles", "\nrestart = "];

/// A way to run guests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Backend {
    /// Our kernel on x86-64 with SVM and nested paging.
    NativeX86Npt,
    /// The same with a vTLB instead of nested paging: the description has `npt = false`.
    NativeX86Vtlb,
    /// Our kernel on AArch64 with VHE.
    NativeArm64Vhe,
    /// The same kernel on a processor without VHE.
    NativeArm64NoVhe,
    /// The kernel of x86-64 on a processor of Bochs, from a CD-ROM image: one CPU and no devices
    /// but serial lines.
    Bochs(Model),
    /// `parador run` by KVM of an emulated host.
    Kvm,
    /// `parador run` in processes of this host.
    Process,
}

impl Backend {
    /// Returns a description for this back end: with its board and its guests' serial port.
    pub fn describe(self, description: &str) -> String {
        let (board, serial) = match self {
            Self::NativeArm64Vhe | Self::NativeArm64NoVhe => ("qemu-virt", "ttyAMA0"),
            _ => ("qemu-q35", "ttyS0"),
        };
        description.replace("{board}", board).replace("{serial}", serial)
    }
}

impl fmt::Display for Backend {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NativeX86Npt => f.write_str("native-x86-npt"),
            Self::NativeX86Vtlb => f.write_str("native-x86-vtlb"),
            Self::NativeArm64Vhe => f.write_str("native-arm64-vhe"),
            Self::NativeArm64NoVhe => f.write_str("native-arm64-novhe"),
            Self::Bochs(model) => write!(f, "bochs/{}", model.name()),
            Self::Kvm => f.write_str("kvm"),
            Self::Process => f.write_str("hosted"),
        }
    }
}

/// One thing to do or to wait for, in order.
#[derive(Clone, Copy, Debug)]
pub enum Step {
    /// This text appears on the console, after what was matched before.
    Console(&'static str),
    /// This text appears in the kernel's log, after what was matched before.
    Log(&'static str),
    /// Type this on the console.
    Type(&'static str),
}

/// A system and what must happen in it.
#[derive(Clone, Debug)]
pub struct Scenario {
    /// Unique name.
    pub name: &'static str,
    /// Back ends on which it must hold.
    pub backends: &'static [Backend],
    /// Numbers of host CPUs with which it must hold.
    pub cpus: &'static [u32],
    /// Further numbers, of long runs.
    pub long_cpus: &'static [u32],
    /// System description in TOML; `{artifacts}` stands for the folder of programs, `{cpus}` for
    /// the number of host CPUs, `{board}` for the board that QEMU emulates for the back end,
    /// `{serial}` for the name of a guest's serial port in Linux.
    pub system: String,
    /// The machine, its number of CPUs aside.
    pub machine: Machine,
    /// Expected course of events.
    pub steps: Vec<Step>,
    /// Exit code of `parador`. Whatever it is, a panic of Parador's own kernel is a failure.
    pub code: i32,
    /// Texts that must be on the console or in the log at the end, in any order.
    pub texts: Vec<String>,
    /// Texts that must be nowhere.
    pub never: &'static [&'static str],
    /// Texts, and in how many lines of the kernel's log each may be at most.
    pub most: &'static [(&'static str, usize)],
    /// Counters, `name=value` in the last statistics of a VM in the kernel's log, and their bounds.
    pub counters: &'static [(&'static str, RangeInclusive<u64>)],
    /// Seconds that it may take on a busy machine.
    pub limit: u64,
}

impl Scenario {
    /// Returns the class of a test that runs this on `cpus` CPUs.
    pub fn class(&self, cpus: u32) -> Class {
        let has = |text: &str| self.system.contains(text);
        let has_several =
            cpus > 1 || SEVERAL_CPUS.clone().any(|count| has(&format!("\ncpus = {count}")));
        let types = |word: &str| {
            self.steps.iter().any(|step| matches!(step, Step::Type(text) if text.contains(word)))
        };
        match has_several || ENDS_OTHERS.iter().any(|text| has(text)) || types("restart ") {
            true => Class::SmpOrKill,
            false => Class::Other,
        }
    }

    /// Builds the system, runs it, and compares.
    pub fn run(&self, backend: Backend, cpus: u32) -> Result<()> {
        let description = backend.describe(&self.system.replace("{cpus}", &cpus.to_string()));
        let mut running = match backend {
            Backend::NativeX86Npt
            | Backend::NativeX86Vtlb
            | Backend::NativeArm64Vhe
            | Backend::NativeArm64NoVhe => {
                let machine = Machine { cpus, ..self.machine.clone() };
                Running::start(&description, &machine, Duration::from_secs(self.limit))?
            }
            Backend::Bochs(model) => bochs::start(&description, model)?,
            Backend::Kvm | Backend::Process => bail!("`parador run` takes no description"),
        };
        self.follow(&mut running)
            .with_context(|| format!("\n{}", running.transcripts()))
            .map_err(reason_last)
    }

    fn follow(&self, running: &mut Running) -> Result<()> {
        // `parador` keeps the limit; the rest is for building the image and for ending.
        let deadline = Instant::now() + Duration::from_secs(self.limit) + SLACK;
        for step in &self.steps {
            match *step {
                Step::Console(text) => running.console.expect(text, deadline)?,
                Step::Log(text) => running.log.expect(text, deadline)?,
                Step::Type(text) => running.type_text(text)?,
            }
        }
        let code = running.wait(deadline)?;
        if code != self.code {
            bail!("ended with code {code} instead of {}", self.code);
        }
        let all = [&running.console, &running.log, &running.messages];
        let appeared = |text: &str| all.iter().any(|transcript| transcript.text().contains(text));
        if let Some(text) = self.texts.iter().find(|text| !appeared(text)) {
            bail!("`{text}` did not appear");
        }
        if let Some(text) = self.never.iter().chain(&[KERNEL_PANIC]).find(|text| appeared(text)) {
            let text_of_all = all.map(|transcript| transcript.text()).concat();
            bail!("`{text}` appeared:\n{}", from(&text_of_all, text));
        }
        let log = running.log.text();
        for &(text, most) in self.most {
            let lines = log.lines().filter(|line| line.contains(text)).count();
            if lines > most {
                bail!("`{text}` is in {lines} lines of the log, at most {most} are allowed");
            }
        }
        for (name, bounds) in self.counters {
            let value = counter(&log, name).with_context(|| format!("the log has no {name}"))?;
            if !bounds.contains(&value) {
                bail!("{name} is {value}, not in {bounds:?}");
            }
        }
        Ok(())
    }
}

/// Returns the counter of this name in the last line with statistics.
fn counter(log: &str, name: &str) -> Option<u64> {
    let (_, statistics) = log.lines().rev().find_map(|line| line.split_once(" statistics: "))?;
    let mut words = statistics.split_whitespace().filter_map(|word| word.split_once('='));
    words.find(|(other, _)| *other == name)?.1.parse().ok()
}

/// An error whose text ends with the reason, after the transcripts, where a reader looks first.
fn reason_last(error: anyhow::Error) -> anyhow::Error {
    let parts: Vec<String> = error.chain().map(ToString::to_string).collect();
    anyhow::anyhow!("{}", parts.join("\n"))
}

/// Some lines from the one with `text` on: the end of a transcript may lack them.
fn from(all: &str, text: &str) -> String {
    const LINES: usize = 20;
    let lines = all.lines().skip_while(|line| !line.contains(text)).take(LINES);
    lines.collect::<Vec<_>>().join("\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn class(system: &str, steps: &[Step], cpus: u32) -> Class {
        let scenario = Scenario {
            name: "a",
            backends: &[],
            cpus: &[],
            long_cpus: &[],
            system: system.to_owned(),
            machine: Machine::default(),
            steps: steps.to_vec(),
            code: 0,
            texts: Vec::new(),
            never: &[],
            most: &[],
            counters: &[],
            limit: 1,
        };
        scenario.class(cpus)
    }

    #[test]
    fn an_error_shows_what_appeared() {
        let all = format!("up\n[ 1.0] BUG: soft lockup\n{}", "trace\n".repeat(30));
        let shown = super::from(&all, "BUG: ");
        assert!(shown.starts_with("[ 1.0] BUG: soft lockup\ntrace"));
        assert_eq!(shown.lines().count(), 20);
    }

    #[test]
    fn counters() {
        let log =
            "root: vm a: statistics: entries=1 b=2\nroot: vm a: statistics: entries=7 bb=3\nend";
        assert_eq!(counter(log, "entries"), Some(7));
        assert_eq!(counter(log, "b"), None);
        assert_eq!(counter("entries=1", "entries"), None);
    }

    #[test]
    fn classes() {
        let plain = "[[vm]]\nname = \"a\"\ncpus = 1\n";
        assert_eq!(class(plain, &[], 1), Class::Other);
        assert_eq!(class(plain, &[], 2), Class::SmpOrKill);
        assert_eq!(class("[[vm]]\ncpus = 4\n", &[], 1), Class::SmpOrKill);
        assert_eq!(class("[[vm]]\nrestart = \"always\"\n", &[], 1), Class::SmpOrKill);
        assert_eq!(class("binary = \"check-killer\"\n", &[], 1), Class::SmpOrKill);
        assert_eq!(class(plain, &[Step::Type("restart linux\r")], 1), Class::SmpOrKill);
    }
}
