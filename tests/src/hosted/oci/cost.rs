//! Memory and CPU time of all processes of pods: the engine's shims and their descendants.

use anyhow::{Context, Result, ensure};
use std::fs;
use std::path::Path;
use std::time::Duration;

/// Cost of pods.
#[derive(Clone, Copy, Debug, Default)]
pub struct Cost {
    /// Memory in bytes; shared memory is divided by its users (PSS).
    pub memory: u64,
    /// CPU time of the threads that have not ended.
    pub cpu: Duration,
}

/// Returns the cost of the pods with these names.
pub(super) fn of_pods(ids: &[&str]) -> Result<Cost> {
    let mut processes = shims(ids)?;
    ensure!(processes.len() == ids.len(), "{} shims of {} pods", processes.len(), ids.len());
    let mut cost = Cost::default();
    while let Some(process) = processes.pop() {
        let folder = Path::new("/proc").join(process);
        // One that ends at this moment has none.
        let memory = fs::read_to_string(folder.join("smaps_rollup")).unwrap_or_default();
        cost.memory += proportional(&memory) << 10;
        for task in fs::read_dir(folder.join("task")).into_iter().flatten().flatten() {
            let read = |name: &str| fs::read_to_string(task.path().join(name)).unwrap_or_default();
            let time = read("schedstat").split_whitespace().next().and_then(|it| it.parse().ok());
            cost.cpu += Duration::from_nanos(time.unwrap_or(0));
            processes.extend(read("children").split_whitespace().map(str::to_owned));
        }
    }
    Ok(cost)
}

/// Returns the shims of pods: processes with `-id POD` in their command lines.
fn shims(ids: &[&str]) -> Result<Vec<String>> {
    let all = fs::read_dir("/proc").context("no /proc")?.flatten();
    let is_shim = |line: &[u8]| {
        let words: Vec<&[u8]> = line.split(|byte| *byte == 0).collect();
        let mut pairs = words.windows(2);
        pairs.any(|pair| pair[0] == b"-id" && ids.iter().any(|id| id.as_bytes() == pair[1]))
    };
    let found =
        all.filter(|entry| fs::read(entry.path().join("cmdline")).is_ok_and(|line| is_shim(&line)));
    Ok(found.filter_map(|entry| entry.file_name().into_string().ok()).collect())
}

/// Returns the PSS in KiB.
fn proportional(rollup: &str) -> u64 {
    let line = rollup.lines().find_map(|line| line.strip_prefix("Pss:"));
    line.and_then(|line| line.split_whitespace().next()?.parse().ok()).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shared_memory_is_divided() {
        let text = "5581-7ffd ---p 00000000 00:00 0 [rollup]\nRss:    5000 kB\nPss:    1234 kB\n\
            Pss_Dirty: 99 kB\n";
        assert_eq!(proportional(text), 1234);
        assert_eq!(proportional(""), 0);
        assert!(of_pods(&["none"]).is_err());
    }
}
