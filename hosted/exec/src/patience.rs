//! Time limit for the first answer of an agent.
//!
//! The time in which the threads of the VM wait for a CPU does not count: a guest that boots in
//! half a second takes many on a busy host, or with a small share or quota of CPU time. Linux
//! states it for each thread (`/proc/PID/task/TID/schedstat`); kernels without it state nothing, so
//! the limit is the shorter one. A guest can let its threads wait at will, so the sum has a bound.

use hosted_monitor::config::vm::Time;
use std::fs;
use std::path::Path;
use std::time::{Duration, Instant};

/// Multiple of the limit after which there is no answer, however long the VM has waited for CPUs.
const LONGEST: u32 = 6;
/// Most threads of a VM that are looked at.
const MAX_THREADS: usize = 4096;

/// Time limit for the first answer of an agent, in which the VM has CPUs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AgentTimeout(Duration);

impl AgentTimeout {
    /// Shortest limit, and the longest one.
    const BOUNDS: [Duration; 2] = [Duration::from_secs(1), Duration::from_secs(3600)];

    /// Parses a time, as [`Time`] does.
    ///
    /// # Errors
    /// It is no time, or out of bounds.
    pub fn parse(text: &str) -> Result<Self, String> {
        let Time(limit) = Time::parse(text)?;
        let [least, most] = Self::BOUNDS;
        match (least..=most).contains(&limit) {
            true => Ok(Self(limit)),
            false => Err(format!("expected 1s to 1h (got {text})")),
        }
    }
}

impl Default for AgentTimeout {
    fn default() -> Self {
        Self(Duration::from_secs(10))
    }
}

/// Deadline for the first answer of an agent.
#[derive(Debug)]
pub struct AgentDeadline {
    limit: Duration,
    started: Instant,
    until: Instant,
}

impl AgentDeadline {
    /// Creates the deadline of a VM that is started now.
    pub fn new(AgentTimeout(limit): AgentTimeout) -> Self {
        let started = Instant::now();
        Self { limit, started, until: started + limit }
    }

    /// Returns the reason to give up; `None`: an answer may still come. `vm` is the process of the
    /// VM if it is known.
    pub fn passed(&mut self, vm: Option<u32>) -> Option<String> {
        let waited = || vm.map_or(Duration::ZERO, |vm| cpu_wait(Path::new("/proc"), vm));
        self.passed_at(Instant::now(), waited)
    }

    /// Looks at the VM only if the deadline has passed without its waits, and postpones it by them.
    fn passed_at(&mut self, now: Instant, waited: impl FnOnce() -> Duration) -> Option<String> {
        if now < self.until {
            return None;
        }
        let waited = waited();
        self.until = self.started + self.limit.saturating_add(waited).min(self.limit * LONGEST);
        if now < self.until {
            return None;
        }
        let text = format!("no agent has answered within {} s", self.limit.as_secs());
        Some(match waited.as_secs() {
            0 => text,
            seconds => {
                let whole = now.duration_since(self.started).as_secs();
                format!("{text}, besides waits of {seconds} s for CPUs of the host ({whole} s)")
            }
        })
    }
}

/// Returns the time in which the threads of a process and of its descendants have waited for a CPU.
/// Some may end meanwhile.
fn cpu_wait(proc: &Path, process: u32) -> Duration {
    let mut processes = vec![process.to_string()];
    let (mut threads, mut nanoseconds) = (0, 0_u64);
    while let Some(process) = processes.pop() {
        let tasks = fs::read_dir(proc.join(process).join("task")).into_iter().flatten().flatten();
        for task in tasks {
            threads += 1;
            if threads > MAX_THREADS {
                return Duration::from_nanos(nanoseconds);
            }
            let read = |name: &str| fs::read_to_string(task.path().join(name)).unwrap_or_default();
            // Time on CPUs, time of waits, number of time slices.
            let waited = read("schedstat").split_whitespace().nth(1).and_then(|it| it.parse().ok());
            nanoseconds = nanoseconds.saturating_add(waited.unwrap_or(0));
            processes.extend(read("children").split_whitespace().map(str::to_owned));
        }
    }
    Duration::from_nanos(nanoseconds)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn waits_for_cpus_do_not_count() {
        let mut deadline = AgentDeadline::new(AgentTimeout::default());
        let after = |seconds: u64| deadline.started + Duration::from_secs(seconds);
        let [early, limit, late, latest] = [9, 10, 15, 60].map(after);
        let seconds = Duration::from_secs;
        assert_eq!(deadline.passed_at(early, || unreachable!("it is not over")), None);
        assert_eq!(deadline.passed_at(limit, || seconds(4)), None);
        let text = deadline.passed_at(late, || seconds(4)).unwrap();
        let expected = "no agent has answered within 10 s, besides waits of 4 s for CPUs of the \
                        host (15 s)";
        assert_eq!(text, expected);
        assert_eq!(deadline.passed_at(late, || seconds(1000)), None);
        assert!(deadline.passed_at(latest, || seconds(1000)).is_some(), "a guest that waits");
    }

    #[test]
    fn an_idle_guest_has_the_limit() {
        let mut deadline = AgentDeadline::new(AgentTimeout::default());
        let now = deadline.started + deadline.limit;
        let text = deadline.passed_at(now, || Duration::ZERO);
        assert_eq!(text.as_deref(), Some("no agent has answered within 10 s"));
    }

    #[test]
    fn limits_have_bounds() {
        let parsed = |text: &str| AgentTimeout::parse(text).map(|limit| limit.0.as_secs());
        assert_eq!([parsed("1"), parsed("90s"), parsed("60m")], [Ok(1), Ok(90), Ok(3600)]);
        for wrong in ["0", "61m", "99999999999999999999h"] {
            assert!(parsed(wrong).is_err(), "{wrong}");
        }
        assert_eq!(parsed("2h").unwrap_err(), "expected 1s to 1h (got 2h)");
        let mut deadline = AgentDeadline::new(AgentTimeout::parse("90s").unwrap());
        let after = |seconds: u64| deadline.started + Duration::from_secs(seconds);
        let [early, late, latest] = [89, 90, 540].map(after);
        assert_eq!(deadline.passed_at(early, || Duration::ZERO), None);
        assert_eq!(deadline.passed_at(late, || Duration::MAX), None);
        let text = deadline.passed_at(latest, || Duration::MAX).unwrap();
        assert!(text.starts_with("no agent has answered within 90 s, besides waits"), "{text}");
    }

    #[test]
    fn waits_of_all_threads() {
        let folder = tempfile::tempdir().unwrap();
        let task = |process: u32, thread: u32, schedstat: &str, children: &str| {
            let task = folder.path().join(format!("{process}/task/{thread}"));
            fs::create_dir_all(&task).unwrap();
            fs::write(task.join("schedstat"), schedstat).unwrap();
            fs::write(task.join("children"), children).unwrap();
        };
        task(10, 10, "1 2000 3\n", "20 ");
        task(10, 11, "1 300 3\n", "");
        task(20, 20, "1 40 3\n", "99 ");
        task(30, 30, "1 5000000 3\n", "");
        assert_eq!(cpu_wait(folder.path(), 10), Duration::from_nanos(2340));
        task(20, 20, "malformed", "");
        assert_eq!(cpu_wait(folder.path(), 10), Duration::from_nanos(2300));
        assert_eq!(cpu_wait(folder.path(), 40), Duration::ZERO);
    }
}
