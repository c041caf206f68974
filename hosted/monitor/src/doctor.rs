//! `parador doctor`: reports which host prerequisites are met, and the back end that `parador run`
//! would choose.
//!
//! A present `/dev/kvm` may still fail to run a guest, or never return: see [`kvm::trial`].

use std::fmt::Write;
use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Instant;

use clap::Args;
use host_linux::io_uring::IoUring;
use host_linux::sandbox;
use rustix::fs::{MemfdFlags, memfd_create};
use serde::Serialize;
use std::arch::x86_64::__cpuid_count;

use crate::compat;
use crate::kvm;
use hosted_command::failure::{self, Failure};
use hosted_command::output;
use hosted_command::supervise;

mod host;
mod limits;
mod passt;

/// Name of the finding that decides about the back end.
const KVM: &str = "KVM";
/// Number of timed system calls.
const CALLS: u32 = 100_000;

/// Options of `parador doctor`.
#[derive(Debug, Args)]
pub struct Options {
    /// Print JSON.
    #[arg(long)]
    json: bool,
    /// Run a virtual CPU with KVM and report the result.
    #[arg(long, hide = true)]
    try_kvm: bool,
    /// Enter the VM sandbox and report what the host refuses.
    #[arg(long, hide = true)]
    try_sandbox: bool,
}

/// Severity of a finding.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
#[serde(rename_all = "lowercase")]
enum State {
    /// Present.
    Ok,
    /// Absent, but not required.
    Absent,
    /// Absent, and required by the process back end.
    Missing,
}

#[derive(Debug, Serialize)]
struct Finding {
    name: &'static str,
    state: State,
    found: String,
    /// Purpose of the facility.
    purpose: &'static str,
}

#[derive(Debug, Serialize)]
struct Report {
    findings: Vec<Finding>,
    /// Back end of `parador run --backend auto`; `null`: none.
    backend: Option<&'static str>,
}

/// Prints the report and returns the exit code.
pub fn run(options: &Options) -> Result<u8, Failure> {
    if options.try_kvm {
        return Ok(try_kvm());
    }
    if options.try_sandbox {
        let refused = sandbox::enter(false).refused;
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
            hosted_loader::has_keys(),
            State::Absent,
            "isolation of the guest kernel from guest user mode",
        ),
        kvm(),
        dispatch(),
        present(
            "seccomp",
            read("/proc/sys/kernel/seccomp/actions_avail")
                .is_some_and(|actions| has_word(&actions, "kill_process")),
            State::Missing,
            "isolation of the host from the VM's processes",
        ),
        present(
            "memfd",
            memfd_create("parador-doctor", MemfdFlags::CLOEXEC).is_ok(),
            State::Missing,
            "memory shared by processes",
        ),
        present(
            "32-bit programs",
            compat::is_there(),
            State::Absent,
            "32-bit user mode in process guests",
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

/// Creates the finding of a sandbox mechanism; `refused` is the host's reason.
fn permitted(name: &'static str, refused: Option<String>) -> Finding {
    let (state, found) = match refused {
        None => (State::Ok, "yes, tried".to_owned()),
        Some(why) => (State::Absent, format!("refused: {why}")),
    };
    Finding { name, state, found, purpose: "a stricter sandbox" }
}

/// Sandbox mechanisms that the host refuses, with the reasons. They are tried in a separate process
/// (`parador doctor --try-sandbox`): a security module or seccomp filter may deny what the host's
/// settings permit.
#[derive(Debug, PartialEq, Eq)]
struct Sandbox {
    namespaces: Option<String>,
    landlock: Option<String>,
}

impl Sandbox {
    fn of(refused: &sandbox::Refused) -> Self {
        let [namespaces, landlock] =
            [refused.namespaces, refused.landlock].map(|error| Some(error?.to_string()));
        Self { namespaces, landlock }
    }

    /// Formats one line per mechanism, empty if permitted.
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
        let tried = Command::new(supervise::SELF)
            .args(["doctor", "--try-sandbox"])
            .stdin(Stdio::null())
            .stderr(Stdio::null())
            .output();
        let why = match tried {
            Err(error) => failure::describe(&error),
            Ok(output) => match Self::from_lines(&String::from_utf8_lossy(&output.stdout)) {
                Some(tried) => return tried,
                None => format!("the test process exited with {}", output.status),
            },
        };
        Self { namespaces: Some(why.clone()), landlock: Some(why) }
    }
}

/// Checks the CPU features that the wedge requires.
fn processor() -> Finding {
    let size = __cpuid_count(0xd, 0).ebx;
    let (state, found) = match hosted_loader::check_host() {
        Ok(_) => (State::Ok, format!("yes; {size} bytes of extended state")),
        Err(error) => (State::Missing, error.to_string()),
    };
    Finding {
        name: "FSGSBASE, XSAVE",
        state,
        found,
        purpose: "context switches without system calls",
    }
}

fn kvm() -> Finding {
    let (state, found) = match kvm::trial() {
        Ok(()) => (State::Ok, "usable".to_owned()),
        Err(why) if Path::new("/dev/kvm").exists() => {
            (State::Absent, format!("present, but not usable: {why}"))
        }
        Err(why) => (State::Absent, why),
    };
    Finding { name: KVM, state, found, purpose: "unmodified kernels" }
}

/// Tries KVM and prints the error.
fn try_kvm() -> u8 {
    match hosted_kvm::probe() {
        Ok(()) => 0,
        Err(error) => {
            // If printing fails, the parent process has exited.
            let _ = output::print(format!("{error}\n"));
            1
        }
    }
}

/// Syscall User Dispatch exists since Linux 5.11 and has no configuration option.
fn dispatch() -> Finding {
    let release = read("/proc/sys/kernel/osrelease").unwrap_or_default();
    let is_new = version(&release).is_some_and(|version| version >= (5, 11));
    let state = if is_new { State::Ok } else { State::Missing };
    let found = format!("Linux {}", release.trim());
    Finding { name: "Linux 5.11", state, found, purpose: "Syscall User Dispatch" }
}

fn version(release: &str) -> Option<(u32, u32)> {
    let mut parts = release.split(|c: char| !c.is_ascii_digit());
    Some((parts.next()?.parse().ok()?, parts.next()?.parse().ok()?))
}

fn mappings() -> Finding {
    /// With fewer mappings, a process keeps dropping and refaulting pages.
    const ENOUGH: u64 = 10_000;
    let most = number("/proc/sys/vm/max_map_count").unwrap_or(0);
    let state = if most >= ENOUGH { State::Ok } else { State::Absent };
    let found = format!("{most} per process");
    Finding { name: "mappings", state, found, purpose: "pages of guest user mode" }
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

/// io_uring can wait on futexes since Linux 6.7; many containers forbid it.
fn rings() -> Finding {
    let release = read("/proc/sys/kernel/osrelease").unwrap_or_default();
    let is_new = version(&release).is_some_and(|version| version >= (6, 7));
    let (state, found) = match (is_new, IoUring::is_possible()) {
        (true, true) => (State::Ok, "yes: all requests of a disk in parallel"),
        (false, _) => (State::Absent, "requires Linux 6.7: two requests of a disk in parallel"),
        (_, false) => (State::Absent, "not permitted: two requests of a disk in parallel"),
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
    Finding { name: "system call", state: State::Ok, found, purpose: "cost of guest page faults" }
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

/// Returns the value of the first line `name : value`.
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
        // Writing to a string does not fail.
        let _ = write!(text, "{mark:<8} {name:<16} {found}");
        let _ = match purpose.is_empty() {
            true => writeln!(text),
            false => writeln!(text, " ({purpose})"),
        };
    }
    let _ = match report.backend {
        Some(backend) => {
            writeln!(text, "\n`parador run` uses the back end `{backend}` on this host.")
        }
        None => writeln!(text, "\n`parador run` does not work on this host."),
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
        assert!(text.ends_with("does not work on this host.\n"));
    }
}
