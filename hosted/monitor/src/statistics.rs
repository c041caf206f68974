//! Statistics of a VM: events handled and host resources used.
//!
//! The wedge's counters lie in memory that the guest can modify: they are only displayed.

use crate::state::State;
use nix::sys::resource::{UsageWho, getrusage};
use proto::hosted::{self, counter, layout};
use proto::system::MAX_VCPUS;
use rustix::fs::fstat;
use rustix::param::clock_ticks_per_second;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::fs::{self, File};
use std::mem::offset_of;
use std::os::unix::fs::FileExt;
use wedge_sites::Kind;

/// Index of the count of replaced functions in the counters of site kinds.
const FUNCTIONS: usize = u8::MAX as usize;

/// Response of `GET /v1/vm/stats`.
#[derive(Clone, Debug, Deserialize, Serialize, JsonSchema)]
pub struct Statistics {
    /// Lifecycle state.
    pub state: State,
    /// Milliseconds since the last start.
    pub uptime_ms: u64,
    /// Milliseconds from the last start to the guest's first instruction.
    pub start_ms: Option<u64>,
    /// Number of restarts.
    pub resets: u64,
    /// Virtual CPUs.
    pub vcpus: u8,
    /// Host processes of the VM.
    pub processes: u64,
    /// User CPU time of the VM's processes, exited ones included, in milliseconds.
    pub user_ms: u64,
    /// System CPU time of the VM's processes, exited ones included, in milliseconds.
    pub system_ms: u64,
    /// Time that runnable threads of the VM's present processes waited for a host CPU, in
    /// milliseconds. It shrinks when a process exits.
    pub steal_ms: u64,
    /// Guest memory in bytes.
    pub memory_bytes: u64,
    /// Guest memory that the host has allocated, in bytes.
    pub memory_used_bytes: u64,
    /// Counters of the wedge.
    pub wedge: Wedge,
}

/// Counters of the wedge.
#[derive(Clone, Debug, Default, Serialize, Deserialize, JsonSchema)]
pub struct Wedge {
    /// Counters by name.
    pub counters: BTreeMap<String, u64>,
    /// Entries into the wedge by kind of site.
    pub sites: BTreeMap<String, u64>,
}

/// CPU time of processes.
#[derive(Debug, Default)]
pub struct Cpu {
    /// Number of processes.
    pub processes: u64,
    /// User CPU time in milliseconds.
    pub user_ms: u64,
    /// System CPU time in milliseconds.
    pub system_ms: u64,
    /// Time in which threads were runnable without a CPU, in milliseconds.
    pub steal_ms: u64,
}

/// Returns the CPU time of the VM with this first process, or of all exited children.
pub fn cpu(process: Option<u32>) -> Cpu {
    let Some(process) = process else {
        let Ok(usage) = getrusage(UsageWho::RUSAGE_CHILDREN) else { return Cpu::default() };
        let milliseconds = |time: nix::sys::time::TimeVal| {
            time.tv_sec().unsigned_abs() * 1000 + time.tv_usec().unsigned_abs() / 1000
        };
        let (user_ms, system_ms) =
            (milliseconds(usage.user_time()), milliseconds(usage.system_time()));
        return Cpu { user_ms, system_ms, ..Cpu::default() };
    };
    let per_second = clock_ticks_per_second().max(1);
    let milliseconds = |ticks: u64| ticks.saturating_mul(1000) / per_second;
    let mut cpu = Cpu::default();
    for (number, process) in std::iter::once(process).chain(children(process)).enumerate() {
        // The first process counts a process that exits meanwhile.
        let Some([user, system, others_user, others_system]) = times(process) else { continue };
        cpu.processes += 1;
        cpu.steal_ms += steal(process);
        cpu.user_ms += milliseconds(user);
        cpu.system_ms += milliseconds(system);
        if number == 0 {
            cpu.user_ms += milliseconds(others_user);
            cpu.system_ms += milliseconds(others_system);
        }
    }
    cpu
}

/// Returns the children of a process that the host lists.
pub fn children(process: u32) -> impl Iterator<Item = u32> {
    let children = format!("/proc/{process}/task/{process}/children");
    let children = fs::read_to_string(children).unwrap_or_default();
    let numbers: Vec<_> =
        children.split_whitespace().filter_map(|word| word.parse().ok()).collect();
    numbers.into_iter()
}

/// Returns the CPU times of a process and of its exited children, in clock ticks (proc_pid_stat(5):
/// fields 14 to 17).
fn times(process: u32) -> Option<[u64; 4]> {
    let stat = fs::read_to_string(format!("/proc/{process}/stat")).ok()?;
    let (_, rest) = stat.rsplit_once(')')?;
    let mut fields = rest.split_whitespace().skip(11).map(str::parse);
    let mut next = || fields.next()?.ok();
    Some([next()?, next()?, next()?, next()?])
}

/// Returns the time that the threads of a process were runnable without a CPU, in milliseconds
/// (Linux' `Documentation/scheduler/sched-stats.rst`; 0 where the host keeps no such statistics).
fn steal(process: u32) -> u64 {
    let threads = fs::read_dir(format!("/proc/{process}/task")).into_iter().flatten().flatten();
    let waited = threads.filter_map(|thread| {
        // A thread may exit meanwhile.
        let text = fs::read_to_string(thread.path().join("schedstat")).ok()?;
        text.split_whitespace().nth(1)?.parse::<u64>().ok()
    });
    waited.sum::<u64>() / 1_000_000
}

/// Returns the allocated bytes of a memory file.
pub fn used(memory: &File) -> u64 {
    // In units of 512 bytes (stat(3type)).
    fstat(memory).map_or(0, |stat| u64::try_from(stat.st_blocks).unwrap_or(0) * 512)
}

/// Returns the wedge's counters, from the memory that it shares.
pub fn wedge(shared: &File) -> Wedge {
    // Sums of all virtual CPUs.
    let words = |at: usize, count: usize| {
        let mut sums = vec![0_u64; count];
        for vcpu in 0..MAX_VCPUS {
            let mut bytes = vec![0; 8 * count];
            let at = vcpu * size_of::<hosted::VcpuStatistics>() + at;
            // Missing words count as zero.
            let _ = shared.read_exact_at(&mut bytes, layout::STATISTICS + at as u64);
            for (sum, word) in sums.iter_mut().zip(bytes.chunks(8)) {
                let word = word.iter().rfold(0, |all, byte| all << 8 | u64::from(*byte));
                *sum = sum.wrapping_add(word);
            }
        }
        sums
    };
    let counters = words(offset_of!(hosted::VcpuStatistics, counters), counter::NAMES.len());
    let names = counter::NAMES.iter().map(|name| name.replace(' ', "_"));
    let sites = words(offset_of!(hosted::VcpuStatistics, sites), 256);
    let kinds = sites.into_iter().enumerate().filter(|(_, count)| *count != 0);
    let name = |number| match number {
        FUNCTIONS => "functions".to_owned(),
        _ => Kind::from_number(number as u8).map_or("unknown", Kind::name).to_owned(),
    };
    Wedge {
        counters: names.zip(counters).collect(),
        sites: kinds.map(|(number, count)| (name(number), count)).collect(),
    }
}

/// Metric with the values of one or more VMs.
struct Family {
    name: &'static str,
    kind: &'static str,
    help: &'static str,
    /// Labels and values.
    values: Vec<(Vec<Label>, String)>,
}

/// Label of a value: name and value.
type Label = (&'static str, String);

/// Formats the statistics of VMs for Prometheus (text format 0.0.4), with their names as label
/// `vm`.
pub fn prometheus(vms: &[(Option<&str>, Statistics)]) -> String {
    let mut families: Vec<Family> = Vec::new();
    for (vm, statistics) in vms {
        for mut family in statistics.families() {
            let named = vm.map(|name| ("vm", name.to_owned()));
            family.values.iter_mut().for_each(|(labels, _)| labels.extend(named.clone()));
            // All values of a metric are together.
            match families.iter_mut().find(|known| known.name == family.name) {
                Some(known) => known.values.extend(family.values),
                None => families.push(family),
            }
        }
    }
    let mut text = String::new();
    for Family { name, kind, help, values } in families {
        // Writing to a string does not fail.
        let _ = writeln!(text, "# HELP parador_{name} {help}\n# TYPE parador_{name} {kind}");
        for (labels, value) in values {
            let labels = labels.iter().map(|(name, value)| format!("{name}=\"{value}\""));
            let labels = labels.collect::<Vec<_>>().join(",");
            let labels = if labels.is_empty() { labels } else { format!("{{{labels}}}") };
            let _ = writeln!(text, "parador_{name}{labels} {value}");
        }
    }
    text
}

impl Statistics {
    /// Returns the metrics of this VM.
    fn families(&self) -> Vec<Family> {
        let mut families = Vec::new();
        let mut metric = |name, kind, help, values| {
            families.push(Family { name, kind, help, values });
        };
        let one = |value: String| vec![(Vec::new(), value)];
        let seconds =
            |milliseconds: u64| format!("{}.{:03}", milliseconds / 1000, milliseconds % 1000);
        let labelled = |label: &'static str, values: &BTreeMap<String, u64>| -> Vec<_> {
            let values = values.iter();
            values.map(|(name, count)| (vec![(label, name.clone())], count.to_string())).collect()
        };
        let states = [State::Created, State::Starting, State::Running, State::Paused, State::Ended];
        let states = states.map(|state| {
            let name = state.to_string();
            (vec![("state", name)], u8::from(state == self.state).to_string())
        });
        metric("state", "gauge", "1 for the VM's current state.", states.to_vec());
        let help = "Time since the last start.";
        metric("uptime_seconds", "gauge", help, one(seconds(self.uptime_ms)));
        if let Some(start) = self.start_ms {
            let help = "Time from the start to the guest's first instruction.";
            metric("start_seconds", "gauge", help, one(seconds(start)));
        }
        metric("resets_total", "counter", "Restarts of the VM.", one(self.resets.to_string()));
        let help = "Host processes of the VM.";
        metric("processes", "gauge", help, one(self.processes.to_string()));
        metric("vcpus", "gauge", "Virtual CPUs.", one(self.vcpus.to_string()));
        let modes = [("user", self.user_ms), ("system", self.system_ms)]
            .map(|(mode, time)| (vec![("mode", mode.to_owned())], seconds(time)));
        let help = "CPU time of the VM's processes.";
        metric("cpu_seconds_total", "counter", help, modes.to_vec());
        let help = "Time that runnable threads of the VM's present processes waited for a CPU.";
        metric("cpu_steal_seconds", "gauge", help, one(seconds(self.steal_ms)));
        metric("memory_bytes", "gauge", "Guest memory.", one(self.memory_bytes.to_string()));
        let help = "Guest memory allocated by the host.";
        metric("memory_used_bytes", "gauge", help, one(self.memory_used_bytes.to_string()));
        let counters = labelled("what", &self.wedge.counters);
        metric("wedge_total", "counter", "Events handled by the wedge.", counters);
        let sites = labelled("kind", &self.wedge.sites);
        metric("sites_total", "counter", "Entries into the wedge by kind of site.", sites);
        families
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn this_process_has_used_time() {
        let cpu = cpu(Some(std::process::id()));
        assert!(cpu.processes >= 1);
        assert!(times(u32::MAX).is_none());
    }

    #[test]
    fn metrics_for_prometheus() {
        let wedge = Wedge {
            counters: [("calls_by_signal".to_owned(), 7)].into(),
            sites: [("cli".to_owned(), u64::MAX)].into(),
        };
        let statistics = Statistics {
            state: State::Paused,
            uptime_ms: 61_007,
            start_ms: Some(80),
            resets: 0,
            vcpus: 2,
            processes: 4,
            user_ms: 1500,
            system_ms: 20,
            steal_ms: 1002,
            memory_bytes: 1 << 30,
            memory_used_bytes: 4096,
            wedge,
        };
        let text = prometheus(&[(Some("a"), statistics.clone()), (Some("b"), statistics.clone())]);
        for line in [
            "parador_state{state=\"paused\",vm=\"b\"} 1",
            "parador_memory_bytes{vm=\"a\"} 1073741824",
        ] {
            assert!(text.lines().any(|other| other == line), "{line}:\n{text}");
        }
        assert_eq!(text.matches("# TYPE parador_state ").count(), 1, "{text}");
        let text = prometheus(&[(None, statistics)]);
        for line in [
            "parador_cpu_steal_seconds 1.002",
            "parador_state{state=\"paused\"} 1",
            "parador_state{state=\"running\"} 0",
            "parador_uptime_seconds 61.007",
            "parador_start_seconds 0.080",
            "parador_cpu_seconds_total{mode=\"system\"} 0.020",
            "parador_wedge_total{what=\"calls_by_signal\"} 7",
            "parador_sites_total{kind=\"cli\"} 18446744073709551615",
            "# TYPE parador_resets_total counter",
        ] {
            assert!(text.lines().any(|other| other == line), "{line}:\n{text}");
        }
    }
}
