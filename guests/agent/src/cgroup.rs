//! Cgroups of containers in the guest (version 2): their limits and statistics.

use proto::agent::container::{ContainerStatistics, Limits};
use std::fs;
use std::io;
use std::os::fd::AsRawFd;
use std::path::{Component, Path, PathBuf};
use std::thread;
use std::time::Duration;

/// Root of the guest's cgroups; each container has one below it.
const ROOT: &str = "/sys/fs/cgroup";
/// Controllers that containers have.
const CONTROLLERS: &str = "+cpu +memory +pids";
/// Text that stands for no limit.
const NO_LIMIT: &str = "max";

/// Adds to an error what was done.
fn named(what: &str) -> impl FnOnce(io::Error) -> io::Error {
    move |error| io::Error::new(error.kind(), format!("{what}: {error}"))
}

/// Returns the cgroup of a container.
fn place(name: &str) -> PathBuf {
    Path::new(ROOT).join(name)
}

/// Makes the cgroup of a container, whose processes may use the devices that a filter permits, or
/// all if it is empty.
pub fn create(name: &str, limits: &Limits, device_filter: &[u64]) -> io::Result<()> {
    let controllers = Path::new(ROOT).join("cgroup.subtree_control");
    let place = place(name);
    fs::write(controllers, CONTROLLERS)
        .and_then(|()| match fs::create_dir(&place) {
            // That of a former container of this name, without processes.
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
                remove_tree(&place).and_then(|()| fs::create_dir(&place))
            }
            made => made,
        })
        .map_err(named("make the container's cgroup"))?;
    if !device_filter.is_empty() {
        set_device_filter(&place, device_filter).map_err(named("limit the container's devices"))?;
    }
    set_limits(name, limits)
}

fn set_device_filter(place: &Path, filter: &[u64]) -> io::Result<()> {
    let folder = fs::File::open(place)?;
    let set = host_linux::sys::set_device_filter(folder.as_raw_fd(), filter);
    set.map_err(|error| io::Error::from_raw_os_error(error.0))
}

/// Moves this process to the cgroup of a container.
pub fn join(name: &str) -> io::Result<()> {
    enter(&place(name)).map_err(named("join the container's cgroup"))
}

/// Moves this process to the cgroup of a container, or, if that has processes only in cgroups that
/// it has made below, to the one of its first process.
pub fn join_beside(name: &str, first: i32) -> io::Result<()> {
    match enter(&place(name)) {
        // It gives its controllers to those below (cgroups of version 2 have no processes then).
        Err(error) if error.kind() == io::ErrorKind::ResourceBusy => {
            let text = fs::read_to_string(format!("/proc/{first}/cgroup"))?;
            let below = place_below(name, &text).ok_or(error);
            below.and_then(|place| enter(&place))
        }
        joined => joined,
    }
    .map_err(named("join the container's cgroup"))
}

fn enter(place: &Path) -> io::Result<()> {
    // 0 is the process that writes.
    fs::write(place.join("cgroup.procs"), "0")
}

/// Returns the cgroup of a process by its `/proc/PID/cgroup`, if it is below the container's.
fn place_below(name: &str, text: &str) -> Option<PathBuf> {
    let path = text.lines().find_map(|line| line.strip_prefix("0::/"))?;
    let place = Path::new(ROOT).join(path);
    let is_plain = Path::new(path).components().all(|it| matches!(it, Component::Normal(_)));
    (is_plain && place.starts_with(self::place(name))).then_some(place)
}

/// Kills all processes of a container. Those in a PID namespace of its own end with its first
/// process, those in that of the sandbox do not.
pub fn kill(name: &str) {
    // It may be gone.
    let _ = fs::write(place(name).join("cgroup.kill"), "1");
}

/// Removes the cgroup of a container that has ended, and whose processes were killed.
pub fn remove(name: &str) {
    /// Time for processes to end that were just killed.
    const ATTEMPTS: u32 = 100;
    const INTERVAL: Duration = Duration::from_millis(5);
    for _ in 0..ATTEMPTS {
        match remove_tree(&place(name)) {
            Err(error) if error.kind() == io::ErrorKind::ResourceBusy => thread::sleep(INTERVAL),
            _ => return,
        }
    }
}

/// Removes a cgroup and those that its container has made below it.
fn remove_tree(place: &Path) -> io::Result<()> {
    // The files of a cgroup end with it. The container has ended, and makes no more.
    for entry in fs::read_dir(place)?.flatten() {
        if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
            remove_tree(&entry.path())?;
        }
    }
    fs::remove_dir(place)
}

/// Returns whether the kernel has killed processes of a container for lack of memory.
pub fn lacked_memory(name: &str) -> bool {
    let events = fs::read_to_string(place(name).join("memory.events"));
    events.is_ok_and(|events| value(&events, "oom_kill") > 0)
}

/// Removes the cgroup of a container that could not be prepared, and returns the reason.
pub fn abandon(name: &str, error: io::Error) -> io::Error {
    let lacked_memory = lacked_memory(name);
    remove(name);
    match lacked_memory {
        // The words of runc.
        true => io::Error::other(
            "prepare the process: container init was OOM-killed (memory limit too low?)",
        ),
        false => error,
    }
}

/// Changes the limits of a container.
pub fn set_limits(name: &str, limits: &Limits) -> io::Result<()> {
    let place = place(name);
    let quota = place.join("cpu.max");
    let cpu = match (limits.cpu_quota, limits.cpu_period) {
        (None, None) => None,
        (quota_us, period_us) => {
            let now = fs::read_to_string(&quota).map_err(named("read the limit of CPU time"))?;
            Some(cpu_limit(&now, quota_us, period_us))
        }
    };
    let files = [
        ("memory.max", limits.memory.map(limit)),
        ("cpu.max", cpu),
        ("cpu.weight", limits.cpu_weight.map(|weight| weight.to_string())),
        ("pids.max", limits.processes.map(limit)),
    ];
    for (file, value) in files {
        let Some(value) = value else { continue };
        fs::write(place.join(file), &value).map_err(named(&format!("set {file} to {value}")))?;
    }
    Ok(())
}

fn limit(value: u64) -> String {
    if value == u64::MAX { NO_LIMIT.to_owned() } else { value.to_string() }
}

/// Replaces parts of a limit of CPU time, a quota and a period.
fn cpu_limit(now: &str, quota: Option<u64>, period: Option<u64>) -> String {
    let mut parts = now.split_whitespace();
    let [old_quota, old_period] = [(); 2].map(|()| parts.next().unwrap_or_default().to_owned());
    let quota = quota.map_or(old_quota, limit);
    let period = period.map_or(old_period, |period| period.to_string());
    format!("{quota} {period}")
}

/// Reads the statistics of a container.
pub fn statistics(name: &str) -> io::Result<ContainerStatistics> {
    let place = place(name);
    let read =
        |file: &str| fs::read_to_string(place.join(file)).map_err(named(&format!("read {file}")));
    let number = |file: &str| read(file).map(|text| parse(&text));
    let (cpu, memory, events) = (read("cpu.stat")?, read("memory.stat")?, read("memory.events")?);
    Ok(ContainerStatistics {
        cpu_us: value(&cpu, "usage_usec"),
        user_us: value(&cpu, "user_usec"),
        system_us: value(&cpu, "system_usec"),
        periods: value(&cpu, "nr_periods"),
        throttled_periods: value(&cpu, "nr_throttled"),
        throttled_us: value(&cpu, "throttled_usec"),
        memory: number("memory.current")?,
        memory_peak: number("memory.peak")?,
        memory_limit: number("memory.max")?,
        file_cache: value(&memory, "file"),
        oom_kills: value(&events, "oom_kill"),
        processes: number("pids.current")?,
        process_limit: number("pids.max")?,
    })
}

/// Reads a number, or the text for no limit.
fn parse(text: &str) -> u64 {
    text.trim().parse().unwrap_or(u64::MAX)
}

/// Returns the value of a line of names and values; 0: it has none.
fn value(text: &str, name: &str) -> u64 {
    let pairs = text.lines().filter_map(|line| line.split_once(' '));
    let mut values = pairs.filter(|(key, _)| *key == name).map(|(_, value)| parse(value));
    values.next().unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn limits_are_replaced_by_parts() {
        assert_eq!(cpu_limit("max 100000\n", Some(50_000), None), "50000 100000");
        assert_eq!(cpu_limit("50000 100000\n", None, Some(20_000)), "50000 20000");
        assert_eq!(cpu_limit("50000 100000\n", Some(u64::MAX), Some(1_000)), "max 1000");
    }

    #[test]
    fn processes_are_below_their_container() {
        let below = |text: &str| place_below("a", text);
        assert_eq!(below("0::/a/b\n"), Some("/sys/fs/cgroup/a/b".into()));
        assert_eq!(below("0::/a\n"), Some("/sys/fs/cgroup/a".into()));
        for wrong in ["0::/ab\n", "0::/a/../b\n", "0::/\n", "1:cpu:/a\n", ""] {
            assert_eq!(below(wrong), None, "{wrong}");
        }
    }

    #[test]
    fn files_have_numbers() {
        let text = "usage_usec 12\nuser_usec 7\n";
        assert_eq!((value(text, "usage_usec"), value(text, "user_usec")), (12, 7));
        assert_eq!(value(text, "usec"), 0);
        assert_eq!((parse("max\n"), parse("4096\n")), (u64::MAX, 4096));
    }
}
