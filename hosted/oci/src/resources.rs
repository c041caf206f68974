//! Limits of containers in their guests, `update`, and `events`.

use crate::line::Update;
use crate::refuse;
use crate::store::{ContainerRecord, Status, Store};
use hosted_command::failure::{Failure, IoContext};
use hosted_command::output::print;
use hosted_exec::connection::ControlConnection;
use hosted_exec::vm::AgentVm;
use oci_spec::runtime::LinuxResources;
use proto::agent::AgentRequest;
use proto::agent::container::{ContainerStatistics, Limits};
use serde_json::{Value, json};
use std::fs;
use std::io::{self, Read};
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

/// Largest share of CPU time of cgroups of version 1, and the smallest.
const SHARES: [u64; 2] = [2, 262_144];
/// The same of version 2.
const WEIGHTS: [u64; 2] = [1, 10_000];
/// Name of the standard input.
const STANDARD_INPUT: &str = "-";

/// Returns the limits of a configuration.
pub fn limits(resources: &LinuxResources) -> Limits {
    let cpu = resources.cpu().as_ref();
    let memory = resources.memory().as_ref().and_then(|memory| memory.limit());
    Limits {
        memory: memory.and_then(limit),
        cpu_quota: cpu.and_then(|cpu| cpu.quota()).and_then(limit),
        cpu_period: cpu.and_then(|cpu| cpu.period()).filter(|period| *period > 0),
        cpu_weight: cpu.and_then(|cpu| cpu.shares()).filter(|shares| *shares > 0).map(weight),
        processes: resources.pids().as_ref().and_then(|pids| limit(pids.limit())),
    }
}

/// Reads a limit; 0 states none, and -1 that there is no limit.
fn limit(value: i64) -> Option<u64> {
    (value != 0).then(|| u64::try_from(value).unwrap_or(u64::MAX))
}

/// Converts shares of CPU time from version 1 to version 2, as systemd and other runtimes do.
fn weight(shares: u64) -> u64 {
    let [least, most] = SHARES;
    let [lightest, heaviest] = WEIGHTS;
    lightest + (shares.clamp(least, most) - least) * (heaviest - lightest) / (most - least)
}

/// Changes the limits of a container.
///
/// # Errors
/// It does not run, the limits are malformed, or the VM has less memory.
pub fn update(store: &Store, arguments: &Update) -> Result<(), Failure> {
    let _lock = store.lock(&arguments.id)?;
    let state = store.load(&arguments.id)?;
    let limits = limits_of(arguments)?;
    let most = state.vm_memory;
    if let Some(memory) = limits.memory.filter(|memory| (most + 1..u64::MAX).contains(memory)) {
        let text = format!("memory limit {memory} exceeds the memory of the VM ({most} bytes)");
        return Err(
            refuse(text).help("a VM keeps its size: create another container with this limit")
        );
    }
    let (mut vm, control) = connect(store, &state)?;
    control.request(&mut vm, &AgentRequest::Limit { container: &state.id, limits })
}

fn limits_of(arguments: &Update) -> Result<Limits, Failure> {
    if let Some(file) = &arguments.resources {
        let text = match file == Path::new(STANDARD_INPUT) {
            true => {
                let mut text = Vec::new();
                io::stdin().read_to_end(&mut text).os_error("read the standard input")?;
                text
            }
            false => fs::read(file).file_error("read", file)?,
        };
        let resources: LinuxResources = serde_json::from_slice(&text)
            .map_err(|error| refuse(format!("{}: {error}", file.display())))?;
        return Ok(limits(&resources));
    }
    Ok(Limits {
        memory: arguments.memory.and_then(limit),
        cpu_quota: arguments.cpu_quota.and_then(limit),
        cpu_period: arguments.cpu_period.filter(|period| *period > 0),
        cpu_weight: arguments.cpu_share.filter(|shares| *shares > 0).map(weight),
        processes: arguments.pids_limit.and_then(limit),
    })
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
    let control = ControlConnection::open(&mut vm, Instant::now())?;
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
        assert_eq!(limits(&resources.unwrap()), expected);
        assert_eq!(
            [weight(0), weight(2), weight(262_144), weight(u64::MAX)],
            [1, 1, 10_000, 10_000]
        );
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
