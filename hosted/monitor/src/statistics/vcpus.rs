//! Times of vCPUs, from the host scheduler's statistics of the processes or threads that run them
//! (Linux' `Documentation/scheduler/sched-stats.rst`). The guest has no part in them.

use proto::hosted::VCPU_NAME;
use proto::system::MAX_VCPUS;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::collections::HashMap;
use std::fs;
use std::iter;
use std::path::Path;
use std::time::Duration;

/// Time of a vCPU since the start of its VM.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, Serialize, JsonSchema)]
#[serde(default)]
#[schemars(!default)]
pub struct VcpuTime {
    /// Time in which a host CPU executed the vCPU, in milliseconds.
    pub run_ms: u64,
    /// Time in which the vCPU was ready and waited for a host CPU, in milliseconds.
    pub steal_ms: u64,
    /// The rest, in milliseconds: it waited for events, or the VM was paused.
    pub idle_ms: u64,
}

/// Time of a thread, or of a vCPU, in nanoseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Times {
    run: u64,
    wait: u64,
}

impl Times {
    fn add(&mut self, other: Self) {
        self.run = self.run.saturating_add(other.run);
        self.wait = self.wait.saturating_add(other.wait);
    }
}

/// Times of a running VM's vCPUs. The sums never decrease: those of ended threads, of which a vCPU
/// with `--protection process` has some, are those at the last look.
#[derive(Debug, Default)]
pub struct VcpuTimes {
    /// vCPU and times of the threads at the last look.
    threads: HashMap<u32, (usize, Times)>,
    /// Times of ended threads by vCPU.
    ended: [Times; MAX_VCPUS],
}

impl VcpuTimes {
    /// Looks at the threads of a VM; `process` is its first process.
    pub fn update(&mut self, process: u32) {
        let mut threads = HashMap::new();
        for process in iter::once(process).chain(super::children(process)) {
            let tasks = fs::read_dir(format!("/proc/{process}/task"));
            for task in tasks.into_iter().flatten().flatten() {
                let number = task.file_name().to_str().and_then(|name| name.parse().ok());
                threads.extend(number.zip(look(&task.path())));
            }
        }
        self.replace(threads);
    }

    fn replace(&mut self, threads: HashMap<u32, (usize, Times)>) {
        for (number, (vcpu, times)) in &self.threads {
            let now = threads.get(number);
            // The number may be that of a new thread.
            if now.is_none_or(|now| now.0 != *vcpu || now.1.run < times.run) {
                self.ended[*vcpu].add(*times);
            }
        }
        self.threads = threads;
    }

    /// Returns the times of the first `count` vCPUs of a VM that started this long ago.
    pub fn times(&self, count: usize, uptime: Duration) -> Vec<VcpuTime> {
        let mut sums = self.ended;
        for (vcpu, times) in self.threads.values() {
            sums[*vcpu].add(*times);
        }
        let uptime = u64::try_from(uptime.as_millis()).unwrap_or(u64::MAX);
        let sums = sums.iter().take(count).map(|times| {
            let (run_ms, steal_ms) = (times.run / 1_000_000, times.wait / 1_000_000);
            let idle_ms = uptime.saturating_sub(run_ms).saturating_sub(steal_ms);
            VcpuTime { run_ms, steal_ms, idle_ms }
        });
        sums.collect()
    }
}

/// Returns vCPU and times of a thread with this folder in `/proc`, if it runs a vCPU and has not
/// ended.
fn look(task: &Path) -> Option<(usize, Times)> {
    let name = fs::read_to_string(task.join("comm")).ok()?;
    let vcpu = vcpu_of(&name)?;
    let [run, wait] = super::schedstat(task)?;
    Some((vcpu, Times { run, wait }))
}

/// Returns the vCPU that a thread with this name runs.
fn vcpu_of(name: &str) -> Option<usize> {
    let index = name.trim_end().strip_prefix(VCPU_NAME)?.parse().ok()?;
    (index < MAX_VCPUS).then_some(index)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::thread;
    use std::time::Instant;

    #[test]
    fn names_of_vcpus() {
        assert_eq!(vcpu_of("parador-vcpu7\n"), Some(7));
        for name in ["parador-vcpu8\n", "parador-vcpu\n", "parador-wedge\n", "parador-vcpu-1"] {
            assert_eq!(vcpu_of(name), None, "{name}");
        }
    }

    #[test]
    fn a_busy_thread_runs() {
        let start = Instant::now();
        let thread = thread::Builder::new().name(format!("{VCPU_NAME}1")).spawn(move || {
            let mut times = VcpuTimes::default();
            while times.times(2, start.elapsed())[1].run_ms < 5 {
                assert!(start.elapsed() < Duration::from_secs(60));
                times.update(std::process::id());
            }
            assert_eq!((times.threads.len(), times.times(2, start.elapsed())[0].run_ms), (1, 0));
        });
        thread.unwrap().join().unwrap();
    }

    #[test]
    fn sums_never_decrease() {
        const MS: u64 = 1_000_000;
        let mut times = VcpuTimes::default();
        let of = |vcpu, run, wait| (vcpu, Times { run: run * MS, wait: wait * MS });
        times.replace([(5, of(0, 10, 1)), (6, of(0, 20, 2)), (7, of(1, 1, 0))].into());
        // One has ended, and another one has its number.
        times.replace([(5, of(0, 12, 1)), (7, of(1, 0, 0))].into());
        let all = times.times(2, Duration::from_millis(40));
        assert_eq!(all[0], VcpuTime { run_ms: 32, steal_ms: 3, idle_ms: 5 });
        assert_eq!(all[1], VcpuTime { run_ms: 1, steal_ms: 0, idle_ms: 39 });
        assert_eq!(times.times(1, Duration::ZERO)[0].idle_ms, 0);
    }
}
