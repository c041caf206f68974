//! Cgroups of the host: those of the carrier and its VM, at the engine's path, in every hierarchy
//! (version 1) or the only one (version 2).

use crate::refuse;
use hosted_command::failure::{Failure, IoContext};
use oci_spec::runtime::LinuxResources;
use std::fs;
use std::io;
use std::path::{Component, Path, PathBuf};
use std::thread;
use std::time::Duration;

/// Place of all hierarchies.
const ROOT: &str = "/sys/fs/cgroup";
/// File that adds a process to a cgroup.
const PROCESSES: &str = "cgroup.procs";
/// Settings that a cgroup of version 1 needs before it takes processes.
const CPUSET: [&str; 2] = ["cpuset.cpus", "cpuset.mems"];
/// Largest share of CPU time of cgroups of version 1, and the smallest.
const SHARES: [u64; 2] = [2, 262_144];
/// The same of version 2.
const WEIGHTS: [u64; 2] = [1, 10_000];
/// Use of memory and its limit, in version 1 and in version 2.
pub const MEMORY: [[&str; 2]; 2] =
    [["memory.usage_in_bytes", "memory.limit_in_bytes"], ["memory.current", "memory.max"]];
/// No limit, in version 1 and in version 2.
const UNLIMITED: [&str; 2] = ["-1", "max"];
/// File that gives controllers to the cgroups below, in version 2, and those that limits need.
const DELEGATED: &str = "cgroup.subtree_control";
const CONTROLLERS: [&str; 3] = ["+cpu", "+memory", "+cpuset"];
/// Time for the processes of a cgroup to end.
const ATTEMPTS: u32 = 1000;
const INTERVAL: Duration = Duration::from_millis(5);
/// Checks whether memory has become free: a guest reports it after two seconds.
const FREE_ATTEMPTS: u32 = 2000;

/// Limits of a VM's processes on the host; `u64::MAX`: none, and `None` changes nothing.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct HostLimits {
    /// Memory in bytes.
    pub memory: Option<u64>,
    /// CPU time in microseconds in each period.
    pub cpu_quota: Option<u64>,
    /// Period in microseconds.
    pub cpu_period: Option<u64>,
    /// Share of CPU time, as in version 1.
    pub cpu_shares: Option<u64>,
}

/// CPUs and memory nodes of the host, as lists of numbers (`cpuset(7)`); empty: all.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CpuSet {
    cpus: String,
    nodes: String,
}

impl CpuSet {
    /// Reads the set of a configuration.
    ///
    /// # Errors
    /// A list is malformed.
    pub fn new(resources: &LinuxResources) -> Result<Self, Failure> {
        let cpu = resources.cpu().as_ref();
        let cpus = cpu.and_then(|cpu| cpu.cpus().clone());
        let nodes = cpu.and_then(|cpu| cpu.mems().clone());
        Self::of(cpus, nodes)
    }

    /// Creates a set of two lists.
    ///
    /// # Errors
    /// A list is malformed.
    pub fn of(cpus: Option<String>, nodes: Option<String>) -> Result<Self, Failure> {
        let set = Self { cpus: cpus.unwrap_or_default(), nodes: nodes.unwrap_or_default() };
        for (name, list) in [("cpus", &set.cpus), ("mems", &set.nodes)] {
            if !list.is_empty() && count(list).is_none() {
                let text = format!("linux.resources.cpu.{name}: {list:?} is no list of numbers");
                return Err(refuse(text).help("such as 0-3,5"));
            }
        }
        Ok(set)
    }

    /// Returns the number of CPUs; `None`: all.
    pub fn count(&self) -> Option<u64> {
        count(&self.cpus)
    }
}

/// Returns how many numbers a list has; `None`: it is malformed, or empty.
fn count(list: &str) -> Option<u64> {
    let number = |text: &str| text.trim().parse::<u16>().ok().map(u64::from);
    list.trim().split(',').try_fold(0, |sum, part| {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        Some(sum + number(last)?.checked_sub(number(first)?)? + 1)
    })
}

/// Confines the processes of cgroups that have the controller to a set of CPUs.
///
/// # Errors
/// The host has not all of them, or a cgroup above may not use them.
pub fn confine(places: &[PathBuf], set: &CpuSet) -> Result<(), Failure> {
    for place in places {
        for (name, list) in CPUSET.into_iter().zip([&set.cpus, &set.nodes]) {
            if !list.is_empty() {
                self::set(place, name, list)?;
            }
        }
    }
    Ok(())
}

/// Returns the cgroups of a container at the engine's path: one in each hierarchy.
pub fn places(path: &Path) -> Vec<PathBuf> {
    let below: PathBuf =
        path.components().filter(|it| matches!(it, Component::Normal(_))).collect();
    if below.as_os_str().is_empty() {
        return Vec::new();
    }
    hierarchies(Path::new(ROOT)).into_iter().map(|hierarchy| hierarchy.join(&below)).collect()
}

/// Returns the roots of the hierarchies below a folder, which may be one itself.
fn hierarchies(root: &Path) -> Vec<PathBuf> {
    if root.join(PROCESSES).exists() {
        return vec![root.to_owned()];
    }
    let entries = fs::read_dir(root).into_iter().flatten().flatten();
    // Links are other names of the same hierarchies.
    let folders = entries.filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir()));
    let mut found: Vec<PathBuf> = folders.map(|entry| entry.path()).collect();
    found.retain(|folder| folder.join(PROCESSES).exists());
    found.sort();
    found
}

/// Makes the cgroups. Returns those that this process may make: none for users without rights.
///
/// # Errors
/// One cannot be made for another reason.
pub fn make(places: &[PathBuf]) -> Result<Vec<PathBuf>, Failure> {
    let mut made = Vec::new();
    for place in places {
        match fs::create_dir_all(place) {
            Err(error) if is_refused(&error) => continue,
            done => done.file_error("create the cgroup", place)?,
        }
        inherit_cpus(place).file_error("set up the cgroup", place)?;
        delegate(place);
        made.push(place.clone());
    }
    Ok(made)
}

fn is_refused(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::PermissionDenied | io::ErrorKind::ReadOnlyFilesystem)
}

/// Copies the CPUs and nodes of the cgroups above, which version 1 does not do.
fn inherit_cpus(place: &Path) -> io::Result<()> {
    let root = Path::new(ROOT);
    let above: Vec<&Path> = place.ancestors().take_while(|it| *it != root).collect();
    for pair in above.windows(2).rev() {
        let &[own, parent] = pair else { continue };
        for name in CPUSET {
            let Ok(value) = fs::read_to_string(own.join(name)) else { continue };
            if value.trim().is_empty() {
                fs::write(own.join(name), fs::read_to_string(parent.join(name))?)?;
            }
        }
    }
    Ok(())
}

/// Gives a cgroup of version 2 the controllers of limits. A cgroup above may not have them, or may
/// be another user's: the limits are not set then.
fn delegate(place: &Path) {
    let root = Path::new(ROOT);
    let above: Vec<&Path> =
        place.ancestors().skip(1).take_while(|it| it.starts_with(root)).collect();
    for above in above.into_iter().rev().filter(|above| above.join(DELEGATED).exists()) {
        for controller in CONTROLLERS {
            let _ = fs::write(above.join(DELEGATED), controller);
        }
    }
}

/// Sets limits in the cgroups that have the controllers.
///
/// # Errors
/// The host refuses a value, or the processes keep more memory than the limit for ten seconds.
pub fn limit(places: &[PathBuf], limits: &HostLimits) -> Result<(), Failure> {
    for place in places {
        limit_cpu(place, limits)?;
        if let Some(memory) = limits.memory {
            limit_memory(place, memory)?;
        }
    }
    Ok(())
}

/// Writes a setting if the cgroup has it.
fn set(place: &Path, name: &str, value: &str) -> Result<(), Failure> {
    let file = place.join(name);
    if !file.exists() {
        return Ok(());
    }
    let action = format!("set the limit {value} in");
    fs::write(&file, value).file_error(&action, &file)
}

fn limit_cpu(place: &Path, limits: &HostLimits) -> Result<(), Failure> {
    set_old_cpu_time(limits, |name, value| set(place, name, value))?;
    set_cpu_time(place, limits)?;
    if let Some(shares) = limits.cpu_shares {
        set(place, "cpu.shares", &shares.to_string())?;
        set(place, "cpu.weight", &weight(shares).to_string())?;
    }
    Ok(())
}

/// Writes quota and period of version 1 with `set`. A cgroup may not exceed the share of one above
/// it in between either: where Linux refuses the new period with the old quota, the quota is
/// written first, as runc does.
fn set_old_cpu_time(
    limits: &HostLimits,
    mut set: impl FnMut(&str, &str) -> Result<(), Failure>,
) -> Result<(), Failure> {
    let [quota_file, period_file] = ["cpu.cfs_quota_us", "cpu.cfs_period_us"];
    let period = limits.cpu_period.map(|period| period.to_string());
    let done = period.as_ref().map_or(Ok(()), |period| set(period_file, period));
    let Some(quota) = limits.cpu_quota else { return done };
    let quota = if quota == u64::MAX { UNLIMITED[0].to_owned() } else { quota.to_string() };
    set(quota_file, &quota)?;
    match (done, period) {
        (Err(_), Some(period)) => set(period_file, &period),
        _ => Ok(()),
    }
}

/// Writes quota and period of version 2, which are one setting: the period alone keeps the quota.
fn set_cpu_time(place: &Path, limits: &HostLimits) -> Result<(), Failure> {
    const FILE: &str = "cpu.max";
    let period = limits.cpu_period.map_or_else(String::new, |period| format!(" {period}"));
    let quota = match (limits.cpu_quota, limits.cpu_period) {
        (Some(u64::MAX), _) => UNLIMITED[1].to_owned(),
        (Some(quota), _) => quota.to_string(),
        (None, None) => return Ok(()),
        (None, Some(_)) => {
            let now = fs::read_to_string(place.join(FILE)).unwrap_or_default();
            now.split_whitespace().next().unwrap_or(UNLIMITED[1]).to_owned()
        }
    };
    set(place, FILE, &format!("{quota}{period}"))
}

/// Sets the limit of memory, after a wait if more is in use.
fn limit_memory(place: &Path, limit: u64) -> Result<(), Failure> {
    let mut attempts = 0..FREE_ATTEMPTS;
    loop {
        match try_limit_memory(place, limit) {
            Err(error) if error.kind() == io::ErrorKind::ResourceBusy => {
                if attempts.next().is_none() {
                    return Err(refuse(format!(
                        "the VM keeps more memory than the limit of {limit} bytes on the host"
                    )));
                }
                thread::sleep(INTERVAL);
            }
            done => return done.file_error("limit the memory of the cgroup", place),
        }
    }
}

/// Sets the limit of memory, unless more is in use ([`io::ErrorKind::ResourceBusy`]).
fn try_limit_memory(place: &Path, limit: u64) -> io::Result<()> {
    let text = limit.to_string();
    let [old, new] = if limit == u64::MAX { UNLIMITED } else { [&*text; 2] };
    let [[_, file], [used, maximum]] = MEMORY.map(|names| names.map(|name| place.join(name)));
    let high = place.join("memory.high");
    if file.exists() {
        return fs::write(file, old);
    }
    if !maximum.exists() {
        return Ok(());
    }
    // Linux reclaims memory down to this value; a maximum below the use would kill the VM.
    fs::write(&high, new)?;
    let used = fs::read_to_string(used)?;
    let is_free = used.trim().parse::<u64>().is_ok_and(|used| used <= limit);
    let done = if is_free { fs::write(maximum, new) } else { Ok(()) };
    fs::write(&high, UNLIMITED[1])?;
    if is_free { done } else { Err(io::ErrorKind::ResourceBusy.into()) }
}

/// Converts shares of CPU time from version 1 to version 2, as systemd and other runtimes do.
pub fn weight(shares: u64) -> u64 {
    let [least, most] = SHARES;
    let [lightest, heaviest] = WEIGHTS;
    lightest + (shares.clamp(least, most) - least) * (heaviest - lightest) / (most - least)
}

/// Moves this process to cgroups.
///
/// # Errors
/// One does not take it.
pub fn join(places: &[PathBuf]) -> Result<(), Failure> {
    places.iter().try_for_each(|place| {
        let file = place.join(PROCESSES);
        fs::write(&file, "0").file_error("move the process to the cgroup", place)
    })
}

/// Removes cgroups once their processes have ended.
///
/// # Errors
/// One still has processes after five seconds.
pub fn remove(places: &[PathBuf]) -> Result<(), Failure> {
    for place in places {
        let mut removed = remove_tree(place);
        for _ in 0..ATTEMPTS {
            match &removed {
                Err(error) if error.kind() == io::ErrorKind::ResourceBusy => {}
                _ => break,
            }
            thread::sleep(INTERVAL);
            removed = remove_tree(place);
        }
        match removed {
            Err(error) if error.kind() == io::ErrorKind::NotFound || is_refused(&error) => {}
            done => done.file_error("remove the cgroup", place)?,
        }
    }
    Ok(())
}

/// Removes a cgroup and those below it.
fn remove_tree(place: &Path) -> io::Result<()> {
    for entry in fs::read_dir(place)?.flatten() {
        if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
            remove_tree(&entry.path())?;
        }
    }
    fs::remove_dir(place)
}

/// File of the freezer in one of the cgroups, and what it contains when frozen and when not.
fn freezer(places: &[PathBuf]) -> Option<(PathBuf, [&'static str; 2])> {
    places.iter().find_map(|place| {
        let new = place.join("cgroup.freeze");
        let old = place.join("freezer.state");
        match (old.exists(), new.exists()) {
            (true, _) => Some((old, ["FROZEN", "THAWED"])),
            (_, true) => Some((new, ["1", "0"])),
            _ => None,
        }
    })
}

/// Stops or continues all processes of a container; `false`: there is no freezer.
///
/// # Errors
/// The freezer refuses.
pub fn freeze(places: &[PathBuf], is_frozen: bool) -> Result<bool, Failure> {
    let Some((file, [frozen, thawed])) = freezer(places) else { return Ok(false) };
    let state = if is_frozen { frozen } else { thawed };
    fs::write(&file, state).file_error("write", &file).map(|()| true)
}

/// Returns whether the processes of a container are stopped.
pub fn is_frozen(places: &[PathBuf]) -> bool {
    freezer(places).is_some_and(|(file, [_, thawed])| {
        fs::read_to_string(file).is_ok_and(|state| state.trim() != thawed)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hierarchies_of_both_versions() {
        let folder = tempfile::tempdir().unwrap();
        let root = folder.path();
        assert!(hierarchies(root).is_empty());
        for name in ["cpu", "memory", "other"] {
            fs::create_dir(root.join(name)).unwrap();
        }
        std::os::unix::fs::symlink("cpu", root.join("link")).unwrap();
        for name in ["cpu", "memory"] {
            fs::write(root.join(name).join(PROCESSES), "").unwrap();
        }
        assert_eq!(hierarchies(root), [root.join("cpu"), root.join("memory")]);
        fs::write(root.join(PROCESSES), "").unwrap();
        assert_eq!(hierarchies(root), [root]);
        assert!(places(Path::new("/")).is_empty());
    }

    #[test]
    fn sets_of_cpus_are_lists() {
        for (list, expected) in [("0", Some(1)), ("0-3,5", Some(5)), ("7,\n", None), ("3-1", None)]
        {
            assert_eq!(count(list), expected, "{list}");
        }
        assert!(CpuSet::of(Some("0,x".to_owned()), None).is_err());
        let folder = tempfile::tempdir().unwrap();
        let places = [folder.path().to_owned()];
        let set = CpuSet::of(Some("1".to_owned()), None).unwrap();
        confine(&places, &set).unwrap();
        let files = CPUSET.map(|name| folder.path().join(name));
        files.iter().for_each(|file| fs::write(file, "0-1").unwrap());
        confine(&places, &set).unwrap();
        assert_eq!(files.map(|file| fs::read_to_string(file).unwrap()), ["1", "0-1"]);
    }

    #[test]
    fn limits_of_both_versions() {
        let folders = [(); 2].map(|()| tempfile::tempdir().unwrap());
        let [old, new] = folders.each_ref().map(|folder| folder.path().to_owned());
        let places = [old.clone(), new.clone()];
        let limits = HostLimits {
            memory: Some(4096),
            cpu_quota: Some(1),
            cpu_period: Some(2),
            cpu_shares: Some(262_144),
        };
        // Cgroups without controllers stay.
        limit(&places, &limits).unwrap();
        assert!(places.iter().all(|place| fs::read_dir(place).unwrap().count() == 0));
        let of_old =
            ["memory.limit_in_bytes", "cpu.cfs_quota_us", "cpu.cfs_period_us", "cpu.shares"];
        let of_new = ["memory.max", "cpu.max", "cpu.weight", "memory.high"];
        for (place, names) in [(&old, &of_old), (&new, &of_new)] {
            names.iter().for_each(|name| fs::write(place.join(name), "").unwrap());
        }
        fs::write(new.join("memory.current"), "4096\n").unwrap();
        let read = |place: &Path, name: &str| fs::read_to_string(place.join(name)).unwrap();
        limit(&places, &limits).unwrap();
        assert_eq!(of_old.map(|name| read(&old, name)), ["4096", "1", "2", "262144"]);
        assert_eq!(of_new.map(|name| read(&new, name)), ["4096", "1 2", "10000", "max"]);
        let busy = try_limit_memory(&new, 4095).unwrap_err();
        assert_eq!(busy.kind(), io::ErrorKind::ResourceBusy);
        let none = HostLimits { memory: Some(u64::MAX), cpu_quota: Some(u64::MAX), ..limits };
        limit(&places, &none).unwrap();
        assert_eq!([of_old[0], of_old[1]].map(|name| read(&old, name)), ["-1", "-1"]);
        assert_eq!([of_new[0], of_new[1]].map(|name| read(&new, name)), ["max", "max 2"]);
        assert_eq!([weight(0), weight(2), weight(u64::MAX)], [1, 1, 10_000]);
    }

    #[test]
    fn a_period_alone_keeps_the_quota() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("cpu.max");
        for (now, then) in [("7000 100000\n", "7000 50000"), ("max 100000\n", "max 50000")] {
            fs::write(&file, now).unwrap();
            let limits = HostLimits { cpu_period: Some(50_000), ..HostLimits::default() };
            limit(&[folder.path().to_owned()], &limits).unwrap();
            assert_eq!(fs::read_to_string(&file).unwrap(), then);
        }
    }

    /// A cgroup below one with a tenth of a CPU, as Linux checks it (`tg_cfs_schedulable_down`).
    #[test]
    fn quota_and_period_stay_below_those_above() {
        let update = |now: (u64, u64), quota: Option<u64>, period: Option<u64>| {
            let mut time = now;
            let mut set = |name: &str, value: &str| {
                let value = value.parse().unwrap();
                let new = match name {
                    "cpu.cfs_quota_us" => (value, time.1),
                    _ => (time.0, value),
                };
                let is_valid = new.0 * 10 <= new.1;
                time = if is_valid { new } else { time };
                is_valid.then_some(()).ok_or_else(|| refuse("EINVAL"))
            };
            let limits = HostLimits { cpu_quota: quota, cpu_period: period, ..Default::default() };
            let done = set_old_cpu_time(&limits, &mut set).is_ok();
            (done, time)
        };
        let low = (1_000, 10_000);
        let high = (10_000, 100_000);
        assert_eq!(update(high, Some(low.0), Some(low.1)), (true, low));
        assert_eq!(update(low, Some(high.0), Some(high.1)), (true, high));
        assert_eq!(update(high, None, Some(low.1)), (false, high));
        assert_eq!(update(high, Some(high.0), Some(low.1)), (false, high));
        assert_eq!(update(low, Some(high.0), None), (false, low));
    }

    #[test]
    fn freezers() {
        let folder = tempfile::tempdir().unwrap();
        let places = [folder.path().to_owned()];
        assert!(!freeze(&places, true).unwrap());
        fs::write(folder.path().join("cgroup.freeze"), "0\n").unwrap();
        assert!(!is_frozen(&places));
        assert!(freeze(&places, true).unwrap() && is_frozen(&places));
    }
}
