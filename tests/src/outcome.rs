//! A system test, its result, and the summary of many.

use crate::keys;
use anyhow::Result;
use serde::{Deserialize, Serialize};
use std::fmt::Write;
use std::time::Instant;

/// Lines of an error that a summary shows. The reason is the last.
const SHOWN_LINES: usize = 12;

/// Class of a test by its dependence on timing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Class {
    /// Starts several CPUs, host's or guest's, or kills or restarts processes or virtual machines.
    SmpOrKill,
    /// Does neither.
    Other,
}

impl Class {
    /// Returns the class of this name on the command line.
    pub fn parse(name: &str) -> Option<Self> {
        match name {
            "smp-or-kill" => Some(Self::SmpOrKill),
            "other" => Some(Self::Other),
            _ => None,
        }
    }
}

/// A fault of QEMU that ends a test on several emulated CPUs now and then (docs/CAVEATS.md).
struct KnownBug {
    name: &'static str,
    /// Text in the test's error that shows it.
    sign: &'static str,
}

const KNOWN_BUGS: [KnownBug; 4] = [
    KnownBug { name: "QEMU saved the host's state over a guest's", sign: "failed: rip " },
    KnownBug { name: "QEMU kept code that Linux had changed", sign: "int3: 0000 [#1]" },
    KnownBug { name: "QEMU crashed", sign: "QEMU was killed by signal 11" },
    KnownBug { name: "an emulated host stopped in its boot", sign: keys::STOPPED },
];

/// A system test.
pub struct Test {
    /// Unique name.
    pub name: String,
    /// Kind.
    pub class: Class,
    /// CPUs of the emulated machine, each a thread of QEMU. 0: there is none, or it has one thread.
    qemu_threads: u32,
    body: Box<dyn Fn() -> Result<()> + Send + Sync>,
}

impl Test {
    /// A test that runs without an emulated machine, or on one with one thread.
    pub fn new(
        name: impl Into<String>,
        class: Class,
        body: impl Fn() -> Result<()> + Send + Sync + 'static,
    ) -> Self {
        Self { name: name.into(), class, qemu_threads: 0, body: Box::new(body) }
    }

    /// The same test on an emulated machine with this number of CPUs, each a thread of QEMU.
    pub fn with_qemu_threads(self, qemu_threads: u32) -> Self {
        Self { qemu_threads, ..self }
    }

    /// Runs the test, and once more if a known bug of QEMU with several threads has ended it.
    pub fn run(&self) -> Outcome {
        let start = Instant::now();
        let attempt = || (self.body)().err().map(|error| format!("{error:#}"));
        let mut error = attempt();
        let bug = error.as_ref().filter(|_| self.qemu_threads > 1).and_then(|error| {
            KNOWN_BUGS.iter().find(|bug| error.contains(bug.sign)).map(|bug| bug.name.to_owned())
        });
        let mut retry = None;
        if let (Some(bug), Some(first)) = (bug, &error) {
            eprintln!("{} once more, because {bug}:\n{first}", self.name);
            retry = Some(Retry { bug, error: first.clone() });
            error = attempt();
        }
        let seconds = start.elapsed().as_secs_f64();
        Outcome { test: self.name.clone(), seconds, error, retry }
    }
}

/// The result of one run of a test.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Outcome {
    /// Name of the test.
    pub test: String,
    /// Duration in seconds, both attempts included.
    pub seconds: f64,
    /// Reason of the failure, after the transcripts; of the second attempt if there were two.
    pub error: Option<String>,
    /// The first of two attempts.
    pub retry: Option<Retry>,
}

/// An attempt that a known bug of the emulator has ended.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Retry {
    /// Description of the bug.
    pub bug: String,
    /// Error of the attempt.
    pub error: String,
}

/// The last lines of an error, indented.
pub fn reason(error: &str) -> String {
    let lines: Vec<&str> = error.lines().collect();
    let first = lines.len().saturating_sub(SHOWN_LINES);
    lines[first..].iter().map(|line| format!("           {line}\n")).collect()
}

/// A line for each outcome, by name, with the reasons of failures and retries.
pub fn summary(outcomes: &[Outcome]) -> String {
    let mut sorted: Vec<&Outcome> = outcomes.iter().collect();
    sorted.sort_by(|a, b| a.test.cmp(&b.test));
    let mut text = String::new();
    for Outcome { test, seconds, error, retry } in &sorted {
        let word = match (error, retry) {
            (Some(_), _) => "FAILED",
            (None, Some(_)) => "retried",
            (None, None) => "passed",
        };
        // Writing to a string cannot fail.
        let _ = writeln!(text, "{word:<7} {seconds:>7.1} s  {test}");
        if let Some(retry) = retry {
            let _ = writeln!(text, "           once more, because {}", retry.bug);
        }
        text.extend(error.as_deref().map(reason));
    }
    let retries = sorted.iter().filter(|outcome| outcome.retry.is_some()).count();
    let _ = writeln!(text, "retries because of known bugs of the emulator: {retries}");
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use anyhow::bail;
    use std::sync::atomic::{AtomicU32, Ordering};

    /// A test that fails with each of these errors in turn, then passes.
    fn failing(errors: &'static [&'static str], qemu_threads: u32) -> Outcome {
        let runs = AtomicU32::new(0);
        let body = move || match errors.get(runs.fetch_add(1, Ordering::Relaxed) as usize) {
            Some(error) => bail!("{error}"),
            None => Ok(()),
        };
        Test::new("a", Class::Other, body).with_qemu_threads(qemu_threads).run()
    }

    #[test]
    fn one_retry_for_a_known_bug() {
        const CRASH: &str = "log\nQEMU was killed by signal 11";
        const LOST: &str = "vCPU 0 failed: rip 0xffff";
        let outcome = failing(&[CRASH], 4);
        assert_eq!(outcome.error, None);
        let retry = outcome.retry.unwrap();
        assert_eq!((retry.bug.as_str(), retry.error.as_str()), ("QEMU crashed", CRASH));

        let outcome = failing(&[LOST, CRASH], 2);
        assert_eq!(outcome.error.as_deref(), Some(CRASH));
        assert!(outcome.retry.unwrap().bug.contains("saved the host's state"));
        assert!(failing(&[keys::STOPPED], 2).retry.unwrap().bug.contains("in its boot"));
    }

    #[test]
    fn no_retry_otherwise() {
        for (error, threads) in [("QEMU was killed by signal 11", 1), ("no prompt", 4)] {
            let errors: &'static [&'static str] = Box::leak(Box::new([error]));
            let outcome = failing(errors, threads);
            assert_eq!(outcome.error.as_deref(), Some(error));
            assert_eq!(outcome.retry, None);
        }
    }

    #[test]
    fn summaries() {
        let outcome = |test: &str, error: Option<&str>, bug: Option<&str>| Outcome {
            test: test.to_owned(),
            seconds: 1.25,
            error: error.map(str::to_owned),
            retry: bug.map(|bug| Retry { bug: bug.to_owned(), error: "first".to_owned() }),
        };
        let log: String = (0..20).map(|line| format!("line {line}\n")).collect();
        let outcomes = [
            outcome("c", None, Some("QEMU crashed")),
            outcome("a", None, None),
            outcome("b", Some(&format!("{log}no prompt")), None),
        ];
        let text = summary(&outcomes);
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(lines[0], "passed      1.2 s  a");
        assert_eq!(lines[1], "FAILED      1.2 s  b");
        assert_eq!(lines[2], "           line 9");
        assert_eq!(lines[13], "           no prompt");
        assert_eq!(lines[14], "retried     1.2 s  c");
        assert_eq!(lines[15], "           once more, because QEMU crashed");
        assert_eq!(lines[16], "retries because of known bugs of the emulator: 1");
    }
}
