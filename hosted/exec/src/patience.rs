//! Time limit for the first answer of an agent.
//!
//! The time in which the threads of the VM wait for a CPU does not count: a guest that boots in
//! half a second takes many on a busy host, or with a small share or quota of CPU time. Linux
//! states it for each thread (`/proc/PID/task/TID/schedstat`); kernels without it state nothing, so
//! the limit is the shorter one. A guest can let its threads wait at will, so the sum has a bound.

use std::fs;
use std::path::Path;
use std::time::{Duration, Instant};

/// Time limit in which the VM has CPUs.
const LIMIT: Duration = Duration::from_secs(10);
/// Time limit in any case.
const LONGEST: Duration = Duration::from_secs(60);
/// Most threads of a VM that are looked at.
const MAX_THREADS: usize = 4096;

/// Deadline for the first answer of an agent.
#[derive(Debug)]
pub struct AgentDeadline {
    started: Instant,
    until: Instant,
}

impl AgentDeadline {
    /// Creates the deadline of a VM that is started now.
    #[allow(clippy::new_without_default)]
    pub fn new() -> Self {
        let started = Instant::now();
        Self { started, until: started + LIMIT }
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
        self.until = self.started + (LIMIT + waited).min(LONGEST);
        if now < self.until {
            return None;
        }
        let text = format!("no agent has answered within {} s", LIMIT.as_secs());
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
        let mut deadline = AgentDeadline::new();
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
        let mut deadline = AgentDeadline::new();
        let now = deadline.started + LIMIT;
        let text = deadline.passed_at(now, || Duration::ZERO);
        assert_eq!(text.as_deref(), Some("no agent has answered within 10 s"));
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
