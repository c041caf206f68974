//! Scenarios: what to boot, what to do, what must happen.

use crate::image::Image;
use crate::machine::{Boot, End, Machine, Running};
use anyhow::{Context, Result, bail};
use std::fmt;
use std::time::{Duration, Instant};

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

/// How the machine boots.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum From {
    /// By QEMU's own loader.
    Loader,
    /// From a CD-ROM image through GRUB.
    Disc,
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
    /// Memory of the machine in MiB.
    pub memory: u32,
    /// Value of QEMU's `-cpu`.
    pub processor: &'static str,
    /// How it boots.
    pub from: From,
    /// What happens.
    pub steps: Vec<Step>,
    /// How it ends.
    pub end: End,
    /// Texts that must be nowhere on the console or in the log.
    pub never: &'static [&'static str],
    /// Seconds that it may take on a busy machine.
    pub limit: u64,
}

impl Scenario {
    /// Builds the system, runs it, and compares.
    pub fn run(&self, backend: Backend, cpus: u32) -> Result<()> {
        let Backend::NativeX86Npt = backend;
        let description = self.system.replace("{cpus}", &cpus.to_string());
        let image = match self.from {
            From::Loader => Image::build(&description)?,
            From::Disc => Image::build_disc(&description)?,
        };
        let disc = image.disc();
        let boot = match self.from {
            From::Loader => Boot::Direct(&image),
            From::Disc => Boot::Disc(&disc),
        };
        let machine = Machine { cpus, memory: self.memory, processor: self.processor };
        let mut running = Running::start(&machine, boot)?;
        self.follow(&mut running)
            .with_context(|| format!("\n{}{}", running.console.tail(), running.log.tail()))
            .map_err(reason_last)
    }

    fn follow(&self, running: &mut Running) -> Result<()> {
        let deadline = Instant::now() + Duration::from_secs(self.limit);
        for step in &self.steps {
            match *step {
                Step::Console(text) => running.console.expect(text, deadline)?,
                Step::Log(text) => running.log.expect(text, deadline)?,
                Step::Type(text) => running.type_text(text)?,
            }
        }
        let end = running.wait(deadline)?;
        if end != self.end {
            bail!("ended with {end:?} instead of {:?}", self.end);
        }
        for text in self.never {
            for transcript in [&running.console, &running.log] {
                if transcript.text().contains(text) {
                    bail!("`{text}` appeared");
                }
            }
        }
        Ok(())
    }
}

/// An error whose text ends with the reason, after the transcripts, where a reader looks first.
fn reason_last(error: anyhow::Error) -> anyhow::Error {
    let parts: Vec<String> = error.chain().map(ToString::to_string).collect();
    anyhow::anyhow!("{}", parts.join("\n"))
}
