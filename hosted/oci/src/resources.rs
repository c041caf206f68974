//! Limits of containers in their guests and of VMs on the host, `update`, and `events`.

use crate::balloon::{self, Change};
use crate::cgroup::{self, CpuSet, HostLimits};
use crate::line::Update;
use crate::store::{ContainerRecord, Status, Store};
use crate::{annotations, refuse};
use hosted_command::failure::Failure;
use hosted_command::input;
use hosted_command::output::print;
use hosted_exec::connection::ControlConnection;
use hosted_exec::patience::AgentDeadline;
use hosted_exec::vm::AgentVm;
use oci_spec::runtime::LinuxResources;
use proto::agent::AgentRequest;
use proto::agent::container::{ContainerStatistics, Limits};
use serde_json::{Value, json};
use std::path::Path;
use std::thread;
use std::time::Duration;

/// Memory of the host that a VM needs besides its own: its processes, and its page tables.
const HOST_MEMORY: u64 = 32 << 20;
/// Name of the standard input.
const STANDARD_INPUT: &str = "-";

/// Limits as a configuration or a command line states them: 0 states none, and -1 that there is no
/// limit.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StatedLimits {
    /// Memory in bytes.
    pub memory: Option<i64>,
    /// CPU time in microseconds in each period.
    pub cpu_quota: Option<i64>,
    /// Period in microseconds.
    pub cpu_period: Option<u64>,
    /// Share of CPU time, as in cgroups of version 1.
    pub cpu_shares: Option<u64>,
    /// Processes.
    pub processes: Option<i64>,
}

impl StatedLimits {
    /// Reads the limits of a configuration.
    pub fn new(resources: &LinuxResources) -> Self {
        let cpu = resources.cpu().as_ref();
        Self {
            memory: resources.memory().as_ref().and_then(|memory| memory.limit()),
            cpu_quota: cpu.and_then(|cpu| cpu.quota()),
            cpu_period: cpu.and_then(|cpu| cpu.period()),
            cpu_shares: cpu.and_then(|cpu| cpu.shares()),
            processes: resources.pids().as_ref().map(|pids| pids.limit()),
        }
    }

    /// Returns the limit of memory in bytes; `None`: none.
    pub fn memory_limit(&self) -> Option<u64> {
        self.memory.and_then(limit).filter(|limit| *limit != u64::MAX)
    }

    /// Returns the limits of the container in the guest.
    pub fn guest(&self) -> Limits {
        Limits {
            memory: self.memory.and_then(limit),
            cpu_quota: self.cpu_quota.and_then(limit),
            cpu_period: self.cpu_period.filter(|period| *period > 0),
            cpu_weight: self.cpu_shares.filter(|shares| *shares > 0).map(cgroup::weight),
            processes: self.processes.and_then(limit),
        }
    }

    /// Returns the limits of the VM's processes on the host; the guest takes `extra` bytes besides
    /// the container.
    pub fn host(&self, extra: u64) -> HostLimits {
        let beyond = extra.saturating_add(HOST_MEMORY);
        HostLimits {
            memory: self.memory.and_then(limit).map(|memory| memory.saturating_add(beyond)),
            cpu_quota: self.cpu_quota.and_then(limit),
            cpu_period: self.cpu_period.filter(|period| *period > 0),
            cpu_shares: self.cpu_shares.filter(|shares| *shares > 0),
        }
    }
}

/// Reads a limit; 0 states none, and -1 that there is no limit.
fn limit(value: i64) -> Option<u64> {
    (value != 0).then(|| u64::try_from(value).unwrap_or(u64::MAX))
}

/// Changes the limits of a container.
///
/// # Errors
/// It does not run, the limits are malformed, or the VM has less memory.
pub fn update(store: &Store, arguments: &Update) -> Result<(), Failure> {
    let _lock = store.lock(&arguments.id)?;
    let mut state = store.load(&arguments.id)?;
    let (stated, cpu_set) = limits_of(arguments)?;
    let limits = stated.guest();
    let most = state.vm_memory;
    if let Some(memory) = limits.memory.filter(|memory| (most + 1..u64::MAX).contains(memory)) {
        let text = format!("memory limit {memory} exceeds the memory of the VM ({most} bytes)");
        return Err(
            refuse(text).help("a VM keeps its size: create another container with this limit")
        );
    }
    let (mut vm, control) = connect(store, &state)?;
    control.request(&mut vm, &AgentRequest::Limit { container: &state.id, limits })?;
    if limits.memory.is_some() {
        state.memory_limit = stated.memory_limit();
        store.save(&state)?;
        // The host's limit waits for the memory that the guest returns.
        balloon::fit(store, &state.vm_folder, Change::Inflate)?;
    }
    limit_host(store, &mut state, &stated, &cpu_set)?;
    match limits.memory {
        Some(_) => balloon::fit(store, &state.vm_folder, Change::Deflate),
        None => Ok(()),
    }
}

/// Changes the limits of a VM's processes on the host.
fn limit_host(
    store: &Store,
    state: &mut ContainerRecord,
    stated: &StatedLimits,
    cpu_set: &CpuSet,
) -> Result<(), Failure> {
    // The VM of a pod is in the cgroup of its sandbox.
    if !state.has_own_vm() {
        return Ok(());
    }
    let limits = stated.host(annotations::extra(&state.annotations)?.0);
    let limits = with_known_cpu_time(limits, state);
    cgroup::limit(&state.cgroups, &limits)?;
    cgroup::confine(&state.cgroups, cpu_set)?;
    state.scope.as_ref().map_or(Ok(()), |scope| scope.limit(&limits))?;
    // Only now: a refused limit is none that the next change keeps.
    state.cpu_quota = limits.cpu_quota.or(state.cpu_quota);
    state.cpu_period = limits.cpu_period.or(state.cpu_period);
    store.save(state)
}

/// Adds the known period to a quota that is changed alone, and the known quota to a period, as
/// runc does: systemd takes their quotient.
fn with_known_cpu_time(limits: HostLimits, state: &ContainerRecord) -> HostLimits {
    match (limits.cpu_quota, limits.cpu_period) {
        (None, None) => limits,
        (quota, period) => HostLimits {
            cpu_quota: quota.or(state.cpu_quota),
            cpu_period: period.or(state.cpu_period),
            ..limits
        },
    }
}

fn limits_of(arguments: &Update) -> Result<(StatedLimits, CpuSet), Failure> {
    if let Some(file) = &arguments.resources {
        let text = match file == Path::new(STANDARD_INPUT) {
            true => input::standard()?,
            false => input::regular(file)?,
        };
        let resources: LinuxResources = serde_json::from_slice(&text)
            .map_err(|error| refuse(format!("{}: {error}", file.display())))?;
        return Ok((StatedLimits::new(&resources), CpuSet::new(&resources)?));
    }
    let stated = StatedLimits {
        memory: arguments.memory,
        cpu_quota: arguments.cpu_quota,
        cpu_period: arguments.cpu_period,
        cpu_shares: arguments.cpu_share,
        processes: arguments.pids_limit,
    };
    let set = CpuSet::of(arguments.cpuset_cpus.clone(), arguments.cpuset_mems.clone())?;
    Ok((stated, set))
}

/// Connects to the agent of a container that was created and has not ended.
fn connect(
    store: &Store,
    state: &ContainerRecord,
) -> Result<(AgentVm, ControlConnection), Failure> {
    match store.status(state) {
        Status::Created | Status::Running => {}
        status => {
            let text = format!("container not running: it is {}", status.word());
            return Err(refuse(text));
        }
    }
    let mut vm = AgentVm::attach(state.vm_folder.clone());
    let limit = annotations::agent_timeout(&state.annotations)?;
    let control = ControlConnection::open(&mut vm, &mut AgentDeadline::new(limit))?;
    let control = control.ok_or_else(|| refuse("the VM does not answer"))?;
    Ok((vm, control))
}

/// Prints the statistics of a container once, or at this interval until it ends.
///
/// # Errors
/// It does not run.
pub fn events(store: &Store, id: &str, interval: Option<Duration>) -> Result<(), Failure> {
    let state = store.load(id)?;
    let (mut vm, control) = connect(store, &state)?;
    loop {
        let statistics = match control.statistics(&mut vm, id) {
            Ok(statistics) => statistics,
            Err(_) if interval.is_some() && store.status(&state) == Status::Stopped => {
                return Ok(());
            }
            Err(failure) => return Err(failure),
        };
        print(format!("{}\n", event(id, &statistics)))?;
        match interval {
            None => return Ok(()),
            Some(interval) => thread::sleep(interval),
        }
    }
}

/// Returns statistics as runc prints them: times in nanoseconds, sizes in bytes.
fn event(id: &str, all: &ContainerStatistics) -> Value {
    let nanoseconds = |microseconds: u64| microseconds.saturating_mul(1_000);
    json!({
        "type": "stats",
        "id": id,
        "data": {
            "cpu": {
                "usage": {
                    "total": nanoseconds(all.cpu_us),
                    "user": nanoseconds(all.user_us),
                    "kernel": nanoseconds(all.system_us),
                },
                "throttling": {
                    "periods": all.periods,
                    "throttledPeriods": all.throttled_periods,
                    "throttledTime": nanoseconds(all.throttled_us),
                },
            },
            "memory": {
                "cache": all.file_cache,
                "usage": {
                    "usage": all.memory,
                    "max": all.memory_peak,
                    "limit": all.memory_limit,
                    "failcnt": all.oom_kills,
                },
            },
            "pids": { "current": all.processes, "limit": process_limit(all.process_limit) },
        },
    })
}

/// Returns a limit of processes; 0: there is none.
fn process_limit(limit: u64) -> u64 {
    if limit == u64::MAX { 0 } else { limit }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::testing::state;
    use std::fs;

    #[test]
    fn limits_of_configurations() {
        let resources = serde_json::from_value(json!({
            "memory": { "limit": 1 << 20 },
            "cpu": { "quota": -1, "period": 0, "shares": 1024 },
            "pids": { "limit": 0 },
        }));
        let expected = Limits {
            memory: Some(1 << 20),
            cpu_quota: Some(u64::MAX),
            cpu_weight: Some(39),
            ..Limits::default()
        };
        let stated = StatedLimits::new(&resources.unwrap());
        assert_eq!(stated.guest(), expected);
        let expected = HostLimits {
            memory: Some((1 << 20) + HOST_MEMORY + 5),
            cpu_quota: Some(u64::MAX),
            cpu_period: None,
            cpu_shares: Some(1024),
        };
        assert_eq!(stated.host(5), expected);
        assert_eq!(stated.memory_limit(), Some(1 << 20));
        let unlimited = StatedLimits { memory: Some(-1), ..stated };
        assert_eq!(unlimited.memory_limit(), None);
        assert_eq!(unlimited.host(5).memory, Some(u64::MAX));
    }

    #[test]
    fn a_changed_quota_keeps_the_period() {
        let folder = tempfile::tempdir().unwrap();
        let store = Store::new(Some(&folder.path().join("root")));
        let _lock = store.reserve("a").unwrap();
        let cgroup = folder.path().join("cgroup");
        fs::create_dir(&cgroup).unwrap();
        let maximum = cgroup.join("cpu.max");
        fs::write(&maximum, "50000 50000").unwrap();
        let mut state = ContainerRecord {
            cgroups: vec![cgroup],
            cpu_quota: Some(50_000),
            cpu_period: Some(50_000),
            ..state("a", None)
        };
        let mut update = |cpu_quota, cpu_period| {
            let stated = StatedLimits { cpu_quota, cpu_period, ..StatedLimits::default() };
            limit_host(&store, &mut state, &stated, &CpuSet::default()).unwrap();
            state = store.load("a").unwrap();
            fs::read_to_string(&maximum).unwrap()
        };
        assert_eq!(update(Some(25_000), None), "25000 50000");
        assert_eq!(update(Some(0), Some(10_000)), "25000 10000");
        assert_eq!(update(None, None), "25000 10000");
        assert_eq!(update(Some(-1), Some(0)), "max 10000");
        assert_eq!(update(None, Some(20_000)), "max 20000");
        assert_eq!((state.cpu_quota, state.cpu_period), (Some(u64::MAX), Some(20_000)));
        // systemd gets both, too.
        let limits = HostLimits { cpu_quota: Some(5_000), ..HostLimits::default() };
        let expected = HostLimits { cpu_period: Some(20_000), ..limits };
        assert_eq!(with_known_cpu_time(limits, &state), expected);
    }

    #[test]
    fn statistics_are_those_of_runc() {
        let statistics =
            ContainerStatistics { cpu_us: 7, process_limit: u64::MAX, ..Default::default() };
        let event = event("a", &statistics);
        assert_eq!(event["data"]["cpu"]["usage"]["total"], 7_000);
        assert_eq!(event["data"]["pids"]["limit"], 0);
    }
}
