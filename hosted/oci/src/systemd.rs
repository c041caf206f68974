//! Cgroups of systemd: that of a container is a scope, which systemd makes for the carrier when
//! asked over D-Bus, by busctl(1). systemd removes it with its last process.
//!
//! systemd knows the limits, too: when it reads its configuration again, it writes those that it
//! knows to the cgroup (systemd.resource-control(5)).

use crate::cgroup::{HostLimits, weight};
use crate::refuse;
use hosted_command::failure::{Failure, IoContext};
use hosted_command::proc_number;
use hosted_command::trust::is_host_root;
use serde::{Deserialize, Serialize};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::thread;
use std::time::Duration;

/// Client of D-Bus, a part of systemd.
const CLIENT: &str = "busctl";
/// The manager of units: its name, object, and interface (org.freedesktop.systemd1(5)).
const MANAGER: [&str; 3] =
    ["org.freedesktop.systemd1", "/org/freedesktop/systemd1", "org.freedesktop.systemd1.Manager"];
const DEFAULT_SLICE: &str = "system.slice";
/// Cgroups of this process (cgroups(7)).
const OWN: &str = "/proc/self/cgroup";
/// Number of fields of each limit.
const FIELDS: usize = 3;
/// A second, and the period of CPU quotas that is not stated, in microseconds.
const SECOND: u64 = 1_000_000;
const PERIOD: u64 = 100_000;
/// Time for systemd to make a scope.
const ATTEMPTS: u32 = 500;
const INTERVAL: Duration = Duration::from_millis(10);

/// Scope of a container.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Scope {
    /// Name of the unit.
    unit: String,
    slice: String,
}

impl Scope {
    /// Reads the cgroup path of a configuration, `slice:prefix:name`; `None` is that of runc.
    ///
    /// # Errors
    /// It has another form.
    pub fn new(path: Option<&Path>, id: &str) -> Result<Self, Failure> {
        let Some(path) = path else {
            return Ok(Self { unit: format!("runc-{id}.scope"), slice: DEFAULT_SLICE.to_owned() });
        };
        let shown = path.display();
        let wrong = || {
            let text = format!(
                "expected cgroupsPath to be of format \"slice:prefix:name\" for \
                systemd cgroups, got {shown} instead"
            );
            refuse(text)
        };
        let parts: Vec<&str> = path.to_str().ok_or_else(wrong)?.split(':').collect();
        let &[slice, prefix, name] = &parts[..] else { return Err(wrong()) };
        let is_part = |part: &str| !part.contains('/') && !part.contains("..");
        if name.is_empty() || !parts.iter().all(|part| is_part(part)) {
            return Err(wrong());
        }
        let unit = match prefix {
            "" => format!("{name}.scope"),
            prefix => format!("{prefix}-{name}.scope"),
        };
        let slice = if slice.is_empty() { DEFAULT_SLICE } else { slice };
        match slice.ends_with(".slice") {
            true => Ok(Self { unit, slice: slice.to_owned() }),
            false => Err(wrong()),
        }
    }

    /// Lets systemd move this process to the scope, and returns its path below the root of the
    /// hierarchies.
    ///
    /// # Errors
    /// systemd does not run, or refuses.
    pub fn enter(&self, limits: &HostLimits) -> Result<PathBuf, Failure> {
        let pid = proc_number::own().to_string();
        let own: [&[&str]; 6] = [
            &["Description", "s", "container of parador-oci"],
            &["Slice", "s", &self.slice],
            &["PIDs", "au", "1", &pid],
            &["Delegate", "b", "true"],
            &["DefaultDependencies", "b", "false"],
            &["CollectMode", "s", "inactive-or-failed"],
        ];
        let limits = limit_properties(limits);
        let mut properties = vec![(own.len() + limits.len() / FIELDS).to_string()];
        properties.extend(own.concat().into_iter().map(str::to_owned));
        properties.extend(limits);
        // No auxiliary units.
        properties.push("0".to_owned());
        self.call("StartTransientUnit", "ssa(sv)a(sa(sv))", "replace", &properties)?;
        for _ in 0..ATTEMPTS {
            let text = fs::read_to_string(OWN).file_error("read", Path::new(OWN))?;
            if let Some(path) = path_of(&text, &self.unit) {
                return Ok(path);
            }
            thread::sleep(INTERVAL);
        }
        Err(refuse(format!("systemd has not made the scope {} within 5 s", self.unit)))
    }

    /// Changes limits of the scope.
    ///
    /// # Errors
    /// systemd does not run, or refuses.
    pub fn limit(&self, limits: &HostLimits) -> Result<(), Failure> {
        let mut properties = limit_properties(limits);
        if properties.is_empty() {
            return Ok(());
        }
        properties.insert(0, (properties.len() / FIELDS).to_string());
        // Until the scope ends.
        self.call("SetUnitProperties", "sba(sv)", "true", &properties)
    }

    /// Calls a method of the manager with the unit, an option and properties. The manager is that
    /// of root, or of the user whose rootless engine makes this process the root of a user
    /// namespace.
    fn call(
        &self,
        method: &str,
        signature: &str,
        option: &str,
        properties: &[String],
    ) -> Result<(), Failure> {
        let mut command = Command::new(CLIENT);
        command.args((!is_host_root()).then_some("--user"));
        command.args(["--quiet", "call"]).args(MANAGER).args([method, signature]);
        command.args([&self.unit, option]).args(properties);
        let ended = command.stdin(Stdio::null()).output().start_error(CLIENT)?;
        if ended.status.success() {
            return Ok(());
        }
        let errors = String::from_utf8_lossy(&ended.stderr);
        let text = format!("systemd refuses {method}: {}", errors.trim());
        Err(refuse(text).help("without systemd, set the engine's cgroup manager to cgroupfs"))
    }
}

/// Returns the properties of limits: name, type and value of each. systemd knows versions of
/// cgroups, and takes [`u64::MAX`] as no limit.
fn limit_properties(limits: &HostLimits) -> Vec<String> {
    let quota = limits.cpu_quota.map(|quota| match (quota, limits.cpu_period) {
        (u64::MAX, _) => u64::MAX,
        (quota, period) => {
            quota.saturating_mul(SECOND) / period.filter(|&period| period != 0).unwrap_or(PERIOD)
        }
    });
    let all = [
        ("MemoryMax", limits.memory),
        ("CPUQuotaPeriodUSec", limits.cpu_period),
        ("CPUQuotaPerSecUSec", quota),
        ("CPUWeight", limits.cpu_shares.map(weight)),
    ];
    let stated = all.into_iter().filter_map(|(name, value)| Some((name, value?)));
    stated.flat_map(|(name, value)| [name.to_owned(), "t".to_owned(), value.to_string()]).collect()
}

/// Returns the path of a unit in the cgroups of a process, which are lines of hierarchy,
/// controllers and path.
fn path_of(cgroups: &str, unit: &str) -> Option<PathBuf> {
    let paths = cgroups.lines().filter_map(|line| line.splitn(3, ':').nth(2)).map(Path::new);
    let mut found = paths.filter(|path| path.file_name().is_some_and(|name| name == unit));
    found.next().map(Path::to_owned)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_have_three_parts() {
        let parse = |text: &str| Scope::new(Some(Path::new(text)), "id").ok();
        let scope = |unit: &str, slice: &str| {
            Some(Scope { unit: unit.to_owned(), slice: slice.to_owned() })
        };
        assert_eq!(parse("user.slice:libpod:abc"), scope("libpod-abc.scope", "user.slice"));
        assert_eq!(parse("::abc"), scope("abc.scope", DEFAULT_SLICE));
        assert_eq!(Scope::new(None, "id").ok(), scope("runc-id.scope", DEFAULT_SLICE));
        for wrong in ["/a", "a:b:c", "a.slice:b:", "a.slice:b", "x/a.slice:b:c", "a.slice:..:c"] {
            assert_eq!(parse(wrong), None, "{wrong}");
        }
    }

    #[test]
    fn limits_are_properties() {
        assert!(limit_properties(&HostLimits::default()).is_empty());
        let limits = HostLimits {
            memory: Some(4096),
            cpu_quota: Some(150_000),
            cpu_period: Some(50_000),
            cpu_shares: Some(2),
        };
        let expected = "MemoryMax t 4096 CPUQuotaPeriodUSec t 50000 CPUQuotaPerSecUSec t 3000000 \
                        CPUWeight t 1";
        assert_eq!(limit_properties(&limits).join(" "), expected);
        let quota = |cpu_quota| HostLimits { cpu_quota: Some(cpu_quota), ..HostLimits::default() };
        let value = |cpu_quota| limit_properties(&quota(cpu_quota))[2].clone();
        assert_eq!([value(50_000), value(u64::MAX)], ["500000", "18446744073709551615"]);
    }

    #[test]
    fn the_path_is_that_of_the_process() {
        let both = "12:memory:/\n1:name=systemd:/a.slice/x.scope\n0::/\n";
        assert_eq!(path_of(both, "x.scope"), Some("/a.slice/x.scope".into()));
        assert_eq!(path_of("0::/a.slice/y.scope\n", "x.scope"), None);
    }
}
