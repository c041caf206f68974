//! Resource limits that decide whether a VM starts, and with which devices (getrlimit(2),
//! cgroups(7)).

use super::{Finding, State, read};
use proto::hosted::layout::SLOTS;
use rustix::process::{Resource, getrlimit};
use std::path::{Path, PathBuf};

/// Mount points of cgroups: version 2, and the controllers of version 1.
const UNIFIED: &str = "/sys/fs/cgroup";
const PROCESSES: &str = "/sys/fs/cgroup/pids";
const MEMORY: &str = "/sys/fs/cgroup/memory";
/// Fewest processes that a VM starts with, and its processes in addition to one per guest address
/// space.
const PROCESSES_LEAST: u64 = 10;
const PROCESSES_BESIDE: u64 = 16;
/// Fewest descriptors that a VM starts with, and enough for a VM with all devices.
const FILES: (u64, u64) = (64, 256);
/// Address space for a VM with the least memory and with the default; guest memory is mapped up to
/// three times.
const ADDRESSES: (u64, u64) = (256 << 20, 3 << 30);
/// Least memory of a VM, and the default.
const MIN_MEMORY: u64 = 64 << 20;
const DEFAULT_MEMORY: u64 = 1 << 30;

/// A limit and its origin.
#[derive(Clone, PartialEq, Eq, Debug)]
struct Limit {
    most: u64,
    /// Amount in use.
    used: u64,
    from: &'static str,
}

pub fn findings() -> Vec<Finding> {
    let groups = read("/proc/self/cgroup").unwrap_or_default();
    let value = |path: &Path| path.to_str().and_then(read);
    vec![
        processes(&groups, &value),
        memory(&groups, &value),
        judged(
            "open files",
            limit(Resource::Nofile, "RLIMIT_NOFILE").as_slice(),
            FILES,
            "disks, networks, shared directories",
        ),
        judged(
            "address space",
            limit(Resource::As, "RLIMIT_AS").as_slice(),
            ADDRESSES,
            "guest memory in each process",
        ),
        judged(
            "file size",
            limit(Resource::Fsize, "RLIMIT_FSIZE").as_slice(),
            (MIN_MEMORY, DEFAULT_MEMORY),
            "guest memory, disks",
        ),
    ]
}

/// Checks the limit of processes: RLIMIT_NPROC counts per user, cgroups per group.
fn processes(groups: &str, value: &dyn Fn(&Path) -> Option<String>) -> Finding {
    let mut limits = limit(Resource::Nproc, "RLIMIT_NPROC");
    let files = [
        (PROCESSES, "pids", "pids.max", "pids.current"),
        (UNIFIED, "", "pids.max", "pids.current"),
    ];
    limits.extend(of_groups(groups, "cgroup pids.max", &files, value));
    let enough = (PROCESSES_LEAST, PROCESSES_BESIDE + SLOTS as u64);
    judged("processes", &limits, enough, "one per guest address space")
}

fn memory(groups: &str, value: &dyn Fn(&Path) -> Option<String>) -> Finding {
    let files = [
        (MEMORY, "memory", "memory.limit_in_bytes", "memory.usage_in_bytes"),
        (UNIFIED, "", "memory.max", "memory.current"),
    ];
    let limits = of_groups(groups, "cgroup memory.max", &files, value);
    judged("memory", &limits, (0, MIN_MEMORY), "guest memory")
}

/// Returns the limit of this process, if there is one.
fn limit(resource: Resource, from: &'static str) -> Vec<Limit> {
    let most = getrlimit(resource).current;
    most.map(|most| Limit { most, used: 0, from }).into_iter().collect()
}

/// Returns the limits of the process's cgroups and their ancestors: `groups` is
/// `/proc/self/cgroup`. Each of `files` is a folder, its controller (none in version 2) and the
/// names of the limit and of the amount in use.
fn of_groups(
    groups: &str,
    from: &'static str,
    files: &[(&str, &str, &str, &str)],
    value: &dyn Fn(&Path) -> Option<String>,
) -> Vec<Limit> {
    let mut limits = Vec::new();
    for line in groups.lines() {
        let mut parts = line.splitn(3, ':').skip(1);
        let (Some(controllers), Some(path)) = (parts.next(), parts.next()) else { continue };
        for &(root, controller, most, used) in files {
            if !controllers.split(',').any(|one| one == controller) {
                continue;
            }
            for group in Path::new(path).ancestors() {
                let group = group.strip_prefix("/").unwrap_or(group);
                let folder = PathBuf::from(root).join(group);
                let number = |name: &str| value(&folder.join(name))?.trim().parse::<u64>().ok();
                // Version 1 has a number near 2^63 in place of `max`.
                if let Some(most) = number(most).filter(|most| *most < 1 << 62) {
                    limits.push(Limit { most, used: number(used).unwrap_or(0), from });
                }
            }
        }
    }
    limits
}

/// Creates the finding of the strictest limit: with less than `least` available no VM starts, with
/// less than `enough` not every VM.
fn judged(
    name: &'static str,
    limits: &[Limit],
    (least, enough): (u64, u64),
    purpose: &'static str,
) -> Finding {
    let left = |limit: &Limit| limit.most.saturating_sub(limit.used);
    let Some(narrowest) = limits.iter().min_by_key(|limit| left(limit)) else {
        return Finding { name, state: State::Ok, found: "no limit".to_owned(), purpose };
    };
    let state = match left(narrowest) {
        left if left < least => State::Missing,
        left if left < enough => State::Absent,
        _ => State::Ok,
    };
    let Limit { most, used, from } = narrowest;
    let used = if *used == 0 { String::new() } else { format!(", {used} in use") };
    let wanted =
        if state == State::Ok { String::new() } else { format!(": a VM may need {enough}") };
    Finding { name, state, found: format!("at most {most} ({from}{used}){wanted}"), purpose }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn limits_of_all_groups_above() {
        let files = [
            (UNIFIED, "", "pids.max", "pids.current"),
            (PROCESSES, "pids", "pids.max", "pids.current"),
        ];
        let value = |path: &Path| {
            let text = match path.to_str()? {
                "/sys/fs/cgroup/a/b/pids.max" => "max\n",
                "/sys/fs/cgroup/a/pids.max" => "40\n",
                "/sys/fs/cgroup/a/pids.current" => "9\n",
                "/sys/fs/cgroup/pids/c/pids.max" => "30\n",
                _ => return None,
            };
            Some(text.to_owned())
        };
        let found = of_groups("8:pids:/c\n7:cpu,cpuacct:/\n0::/a/b\n", "cgroup", &files, &value);
        let limit = |most, used| Limit { most, used, from: "cgroup" };
        assert_eq!(found, [limit(30, 0), limit(40, 9)]);
        assert_eq!(of_groups("", "cgroup", &files, &value), []);
    }

    #[test]
    fn the_narrowest_limit_counts() {
        let limit = |most, used| Limit { most, used, from: "it" };
        let state = |limits: &[Limit]| judged("a", limits, (10, 20), "b").state;
        assert_eq!(state(&[]), State::Ok);
        assert_eq!(state(&[limit(100, 0), limit(20, 0)]), State::Ok);
        assert_eq!(state(&[limit(100, 0), limit(20, 1)]), State::Absent);
        assert_eq!(state(&[limit(100, 91), limit(20, 1)]), State::Missing);
        let text = judged("a", &[limit(100, 95)], (10, 20), "b").found;
        assert_eq!(text, "at most 100 (it, 95 in use): a VM may need 20");
        assert_eq!(judged("a", &[limit(100, 0)], (10, 20), "b").found, "at most 100 (it)");
    }
}
