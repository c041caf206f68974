//! Scenarios: what to boot, what to do, what must happen.

use crate::system::{Machine, Running};
use anyhow::{Context, Result, bail};
use std::fmt;
use std::time::{Duration, Instant};

/// What `parador` says when Parador's own kernel panicked.
const KERNEL_PANIC: &str = "kernel panicked; this is always a bug";
/// Time for building an image and for ending.
const SLACK: Duration = Duration::from_secs(60);

/// A way to run guests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Backend {
    /// Our kernel on x86-64 with SVM and nested paging.
    NativeX86Npt,
}

impl fmt::Display for Backend {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::NativeX86Npt => "native-x86-npt",
        })
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
    /// System description in TOML; `{artifacts}` stands for the folder of programs, `{cpus}` for
    /// the number of host CPUs.
    pub system: String,
    /// The machine, its number of CPUs aside.
    pub machine: Machine,
    /// What happens.
    pub steps: Vec<Step>,
    /// Exit code of `parador`. Whatever it is, a panic of Parador's own kernel is a failure.
    pub code: i32,
    /// Texts that must be on the console or in the log at the end, in any order.
    pub texts: Vec<String>,
    /// Texts that must be nowhere.
    pub never: &'static [&'static str],
    /// Seconds that it may take on a busy machine.
    pub limit: u64,
}

impl Scenario {
    /// Builds the system, runs it, and compares.
    pub fn run(&self, backend: Backend, cpus: u32) -> Result<()> {
        let Backend::NativeX86Npt = backend;
        twice_if_emulator_fails(cpus, || self.run_once(cpus))
    }

    fn run_once(&self, cpus: u32) -> Result<()> {
        let description = self.system.replace("{cpus}", &cpus.to_string());
        let machine = Machine { cpus, ..self.machine.clone() };
        let limit = Duration::from_secs(self.limit);
        let mut running = Running::start(&description, &machine, limit)?;
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
            bail!("`{text}` appeared");
        }
        Ok(())
    }
}

/// QEMU's processor with several threads may lose a guest's state, which its VMM reports as below, or go on with code that Linux has changed since, which
/// Linux reports, and QEMU itself may crash (docs/CAVEATS.md): then all of it starts once more, no oftener.
pub fn twice_if_emulator_fails(cpus: u32, act: impl Fn() -> Result<()>) -> Result<()> {
    const FAILURES: [&str; 3] =
        ["gave up: rip ", "int3: 0000 [#1]", "QEMU was killed by signal 11"];
    match act() {
        Err(error)
            if cpus > 1 && FAILURES.iter().any(|text| format!("{error:#}").contains(text)) =>
        {
            eprintln!("once more, since the emulator has failed:\n{error:#}");
            act()
        }
        result => result,
    }
}

/// An error whose text ends with the reason, after the transcripts, where a reader looks first.
fn reason_last(error: anyhow::Error) -> anyhow::Error {
    let parts: Vec<String> = error.chain().map(ToString::to_string).collect();
    anyhow::anyhow!("{}", parts.join("\n"))
}
