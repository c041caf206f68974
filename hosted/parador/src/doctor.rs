//! `parador doctor`: what this host has of what virtual machines need, and what `parador run` would make of it.
//!
//! A device `/dev/kvm` that is there may still not run anything, or never return: see [`kvm::trial`].

use std::fmt::Write;
use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Instant;

use clap::Args;
use rustix::fs::{MemfdFlags, memfd_create};
use serde::Serialize;
use std::arch::x86_64::__cpuid_count;

use crate::compat;
use crate::failure::{self, Failure};
use crate::kvm;
use crate::output;

mod host;
mod limits;
mod passt;

/// Name of the finding that decides about the back end.
const KVM: &str = "KVM";
/// Calls of the host that are timed.
const CALLS: u32 = 100_000;

#[derive(Debug, Args)]
pub struct Options {
    /// Print JSON.
    #[arg(long)]
    json: bool,
    /// Try to run a virtual CPU with KVM, and say how that ends.
    #[arg(long, hide = true)]
    try_kvm: bool,
    /// Give up what a machine's processes give up, and say what the host refuses.
    #[arg(long, hide = true)]
    try_sandbox: bool,
}

/// What a finding means.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
#[serde(rename_all = "lowercase")]
enum State {
    /// There.
    Ok,
    /// Not there; nothing that works today needs it.
    Absent,
    /// Not there, and needed by processes that are machines.
    Missing,
}

#[derive(Debug, Serialize)]
struct Finding {
    name: &'static str,
    state: State,
    found: String,
    /// What it is for.
    purpose: &'static str,
}

#[derive(Debug, Serialize)]
struct Report {
    findings: Vec<Finding>,
    /// What `parador run --backend auto` would take; `null`: nothing.
    backend: Option<&'static str>,
}

/// Prints the report. Returns the exit code.
pub fn run(options: &Options) -> Result<u8, Failure> {
    if options.try_kvm {
        return Ok(try_kvm());
    }
    if options.try_sandbox {
        let refused = hosted_jail::enter();
        output::print(Sandbox::of(&refused).lines())?;
        return Ok(0);
    }
    let report = examine();
    let text = match options.json {
        true => serde_json::to_string_pretty(&report)
            .map_err(|error| Failure::new(failure::INTERNAL, error.to_string()))?,
        false => table(&report),
    };
    output::print(format!("{}\n", text.trim_end()))?;
    Ok(if report.backend.is_some() { 0 } else { failure::UNAVAILABLE })
}

fn examine() -> Report {
    let sandbox = Sandbox::tried();
    let mut findings = vec![
        Finding {
            name: "processor",
            state: State::Ok,
            found: line_of("/proc/cpuinfo", "model name").unwrap_or_else(|| "unknown".to_owned()),
            purpose: "",
        },
        processor(),
        present(
            "protection keys",
            hosted_vmm::has_keys(),
            State::Absent,
            "a guest's kernel closed to its programs",
        ),
        kvm(),
        dispatch(),
        present(
            "seccomp",
            read("/proc/sys/kernel/seccomp/actions_avail")
                .is_some_and(|actions| has_word(&actions, "kill_process")),
            State::Missing,
            "the host closed to a machine's processes",
        ),
        present(
            "memfd",
            memfd_create("parador-doctor", MemfdFlags::CLOEXEC).is_ok(),
            State::Missing,
            "memory that processes share",
        ),
        present(
            "32-bit programs",
            compat::is_there(),
            State::Absent,
            "32-bit programs in machines that are processes",
        ),
        mappings(),
        large_pages(),
        rings(),
        permitted("user namespaces", sandbox.namespaces),
        permitted("Landlock", sandbox.landlock),
        passt::finding(),
        system_call(),
    ];
    findings.extend(limits::findings());
    findings.push(host::finding());
    let backend =
        if findings.iter().any(|finding| finding.name == KVM && finding.state == State::Ok) {
            Some("kvm")
        } else if findings.iter().all(|finding| finding.state != State::Missing) {
            Some("process")
        } else {
            None
        };
    Report { findings, backend }
}

fn present(name: &'static str, is: bool, otherwise: State, purpose: &'static str) -> Finding {
    let (state, found) = if is { (State::Ok, "yes") } else { (otherwise, "no") };
    Finding { name, state, found: found.to_owned(), purpose }
}

/// A part of the sandbox: `None` if the host permits it, else why not.
fn permitted(name: &'static str, refused: Option<String>) -> Finding {
    let (state, found) = match refused {
        None => (State::Ok, "yes, tried".to_owned()),
        Some(why) => (State::Absent, format!("refused: {why}")),
    };
    Finding { name, state, found, purpose: "a stricter sandbox" }
}

/// What the host refuses of the sandbox, each with the reason. It is tried, in a process of its own (`parador doctor --try-sandbox`): what the
/// host's settings permit, a security module or a filter of system calls may deny.
#[derive(Debug, PartialEq, Eq)]
struct Sandbox {
    namespaces: Option<String>,
    landlock: Option<String>,
}

impl Sandbox {
    fn of(refused: &hosted_jail::Refused) -> Self {
        Self { namespaces: refused.namespaces(), landlock: refused.landlock().map(str::to_owned) }
    }

    /// A line for each, empty where nothing is refused.
    fn lines(&self) -> String {
        let [namespaces, landlock] = [&self.namespaces, &self.landlock]
            .map(|why| why.as_deref().unwrap_or_default().replace('\n', " "));
        format!("{namespaces}\n{landlock}\n")
    }

    fn from_lines(text: &str) -> Option<Self> {
        let mut lines =
            text.lines().map(|line| Some(line.to_owned()).filter(|why| !why.is_empty()));
        Some(Self { namespaces: lines.next()?, landlock: lines.next()? })
    }

    fn tried() -> Self {
        let tried = Command::new("/proc/self/exe")
            .args(["doctor", "--try-sandbox"])
            .stdin(Stdio::null())
            .stderr(Stdio::null())
            .output();
        let why = match tried {
            Err(error) => failure::describe(&error),
            Ok(output) => match Self::from_lines(&String::from_utf8_lossy(&output.stdout)) {
                Some(tried) => return tried,
                None => format!("the process that tried it ended with {}", output.status),
            },
        };
        Self { namespaces: Some(why.clone()), landlock: Some(why) }
    }
}

/// What the wedge asks of the processor, and its extended state.
fn processor() -> Finding {
    let size = __cpuid_count(0xd, 0).ebx;
    let (state, found) = match hosted_vmm::check_host() {
        Ok(_) => (State::Ok, format!("yes; {size} bytes of extended state")),
        Err(error) => (State::Missing, error.to_string()),
    };
    Finding { name: "FSGSBASE, XSAVE", state, found, purpose: "switches without the host" }
}

fn kvm() -> Finding {
    let (state, found) = match kvm::trial() {
        Ok(()) => (State::Ok, "usable".to_owned()),
        Err(why) if Path::new("/dev/kvm").exists() => {
            (State::Absent, format!("there, but not usable: {why}"))
        }
        Err(why) => (State::Absent, why),
    };
    Finding { name: KVM, state, found, purpose: "unmodified kernels" }
}

/// Tries KVM, and prints what does not work.
fn try_kvm() -> u8 {
    match hosted_kvm::probe() {
        Ok(()) => 0,
        Err(error) => {
            // Whoever asked has gone if it cannot be printed.
            let _ = output::print(format!("{error}\n"));
            1
        }
    }
}

/// Syscall User Dispatch came with Linux 5.11; there is no option to leave it out.
fn dispatch() -> Finding {
    let release = read("/proc/sys/kernel/osrelease").unwrap_or_default();
    let is_new = version(&release).is_some_and(|version| version >= (5, 11));
    let state = if is_new { State::Ok } else { State::Missing };
    let found = format!("Linux {}", release.trim());
    Finding { name: "Linux 5.11", state, found, purpose: "system calls caught in the process" }
}

fn version(release: &str) -> Option<(u32, u32)> {
    let mut parts = release.split(|c: char| !c.is_ascii_digit());
    Some((parts.next()?.parse().ok()?, parts.next()?.parse().ok()?))
}

fn mappings() -> Finding {
    /// With fewer a process drops what it has mapped again and again.
    const ENOUGH: u64 = 10_000;
    let most = number("/proc/sys/vm/max_map_count").unwrap_or(0);
    let state = if most >= ENOUGH { State::Ok } else { State::Absent };
    let found = format!("{most} for each process");
    Finding { name: "mappings", state, found, purpose: "pages of programs" }
}

fn large_pages() -> Finding {
    let chosen = read("/sys/kernel/mm/transparent_hugepage/shmem_enabled").unwrap_or_default();
    let chosen = chosen.split(['[', ']']).nth(1).unwrap_or("unknown").to_owned();
    let state = match chosen.as_str() {
        "always" | "within_size" | "force" => State::Ok,
        _ => State::Absent,
    };
    let found = format!("{chosen} for shared memory");
    Finding { name: "large pages", state, found, purpose: "fewer faults" }
}

/// Rings can wait for memory since Linux 6.7; many containers permit none.
fn rings() -> Finding {
    let release = read("/proc/sys/kernel/osrelease").unwrap_or_default();
    let is_new = version(&release).is_some_and(|version| version >= (6, 7));
    let (state, found) = match (is_new, hosted_jail::has_rings()) {
        (true, true) => (State::Ok, "yes: all requests of a disk at a time"),
        (false, _) => (State::Absent, "not before Linux 6.7: two requests of a disk at a time"),
        (_, false) => (State::Absent, "not permitted: two requests of a disk at a time"),
    };
    Finding { name: "io_uring", state, found: found.to_owned(), purpose: "raw disks" }
}

fn system_call() -> Finding {
    let start = Instant::now();
    for _ in 0..CALLS {
        std::hint::black_box(rustix::process::getppid());
    }
    let time = start.elapsed().as_secs_f64() / f64::from(CALLS) * 1e6;
    let found = format!("{time:.2} µs");
    Finding { name: "a system call", state: State::Ok, found, purpose: "what faults are made of" }
}

fn read(path: &str) -> Option<String> {
    fs::read_to_string(path).ok()
}

fn number(path: &str) -> Option<u64> {
    read(path)?.trim().parse().ok()
}

fn has_word(text: &str, word: &str) -> bool {
    text.split_whitespace().any(|other| other == word)
}

/// The value of the first line `name : value`.
fn line_of(path: &str, name: &str) -> Option<String> {
    let text = read(path)?;
    let lines = text.lines().filter_map(|line| line.split_once(':'));
    lines
        .map(|(key, value)| (key.trim(), value.trim()))
        .find_map(|(key, value)| (key == name).then(|| value.to_owned()))
}

fn table(report: &Report) -> String {
    let mut text = String::new();
    for Finding { name, state, found, purpose } in &report.findings {
        let mark = match state {
            State::Ok => "ok",
            State::Absent => "-",
            State::Missing => "MISSING",
        };
        // A String takes all.
        let _ = write!(text, "{mark:<8} {name:<16} {found}");
        let _ = match purpose.is_empty() {
            true => writeln!(text),
            false => writeln!(text, " ({purpose})"),
        };
    }
    let _ = match report.backend {
        Some(backend) => writeln!(text, "\n`parador run` uses the back end `{backend}` here."),
        None => writeln!(text, "\n`parador run` does not work here."),
    };
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions() {
        assert_eq!(version("6.1.0-56-cloud-amd64\n"), Some((6, 1)));
        assert_eq!(version("5.10"), Some((5, 10)));
        assert_eq!(version("none"), None);
    }

    #[test]
    fn what_is_refused_is_read_again() {
        let why = || Some("Operation not permitted (EPERM)".to_owned());
        for (namespaces, landlock) in [(None, None), (why(), None), (None, why()), (why(), why())] {
            let sandbox = Sandbox { namespaces, landlock };
            assert_eq!(Sandbox::from_lines(&sandbox.lines()), Some(sandbox));
        }
        assert_eq!(Sandbox::from_lines(""), None);
        let found = permitted("user namespaces", why());
        assert_eq!(found.state, State::Absent);
        assert_eq!(found.found, "refused: Operation not permitted (EPERM)");
    }

    #[test]
    fn what_is_missing_is_said() {
        let finding = |state| Finding { name: "a", state, found: "b".into(), purpose: "c" };
        let findings = vec![finding(State::Ok), finding(State::Missing)];
        let text = table(&Report { findings, backend: None });
        assert!(text.contains("ok       a                b (c)\nMISSING  a"), "{text}");
        assert!(text.ends_with("does not work here.\n"));
    }
}
