//! Statistics of a VM: events handled and host resources used.
//!
//! The wedge's counters and the guest's statistics of its memory lie in memory that the guest can
//! modify: they are only displayed. The counters of devices and the times of vCPUs are the host's.

pub mod devices;
pub mod guest_memory;
pub mod latency;
pub mod prometheus;
pub mod vcpus;

use crate::state::State;
use nix::sys::resource::{UsageWho, getrusage};
use proto::hosted::{self, counter, layout};
use proto::system::MAX_VCPUS;
use rustix::fs::fstat;
use rustix::param::clock_ticks_per_second;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::fs::{self, File};
use std::mem::offset_of;
use std::os::unix::fs::FileExt;
use std::path::Path;
use wedge_sites::Kind;

use devices::{DiskStatistics, NetStatistics, ShareStatistics};
use guest_memory::GuestMemory;
pub use prometheus::prometheus;
use vcpus::VcpuTime;

/// Index of the count of replaced functions in the counters of site kinds.
const FUNCTIONS: usize = u8::MAX as usize;

/// Response of `GET /v1/vm/stats`.
#[derive(Clone, Debug, Default, Deserialize, Serialize, JsonSchema)]
// A VM of another release may lack fields.
#[serde(default)]
#[schemars(!default)]
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
    /// Target size of the balloon in bytes; `None`: the VM has no balloon.
    pub balloon_bytes: Option<u64>,
    /// Guest's own statistics of its memory; `None`: its kernel has no balloon driver.
    pub guest_memory: Option<GuestMemory>,
    /// Times of the vCPUs since the last start.
    pub vcpu_times: Vec<VcpuTime>,
    /// Requests of the disks since the last start.
    pub disks: Vec<DiskStatistics>,
    /// Frames of the network cards since the last start.
    pub nets: Vec<NetStatistics>,
    /// Messages of the shared directories since the last start.
    pub shares: Vec<ShareStatistics>,
    /// Counters of the wedge.
    pub wedge: Wedge,
}

/// Counters of the wedge.
#[derive(Clone, Debug, Default, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
#[schemars(!default)]
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

/// Returns the time that the threads of a process were runnable without a CPU, in milliseconds; 0
/// where the host keeps no such statistics.
fn steal(process: u32) -> u64 {
    let threads = fs::read_dir(format!("/proc/{process}/task")).into_iter().flatten().flatten();
    // A thread may exit meanwhile.
    let waited = threads.filter_map(|thread| schedstat(&thread.path()).map(|[_, waited]| waited));
    waited.sum::<u64>() / 1_000_000
}

/// Returns the times in nanoseconds for which a thread with this folder in `/proc` ran, and was
/// runnable without a CPU (Linux' `Documentation/scheduler/sched-stats.rst`).
fn schedstat(task: &Path) -> Option<[u64; 2]> {
    let text = fs::read_to_string(task.join("schedstat")).ok()?;
    let mut fields = text.split_whitespace().map_while(|word| word.parse().ok());
    Some([fields.next()?, fields.next()?])
}

/// Returns the allocated bytes of a memory file.
pub fn used(memory: &File) -> u64 {
    // In units of 512 bytes (stat(3type)).
    fstat(memory).map_or(0, |stat| u64::try_from(stat.st_blocks).unwrap_or(0) * 512)
}

/// Returns words of a memory file; missing ones are 0.
fn words<const COUNT: usize>(file: &File, offset: u64) -> [u64; COUNT] {
    let mut bytes = [[0; 8]; COUNT];
    // Missing words count as zero.
    let _ = file.read_exact_at(bytes.as_flattened_mut(), offset);
    bytes.map(u64::from_le_bytes)
}

/// Returns the wedge's counters, from the memory that it shares.
pub fn wedge(shared: &File) -> Wedge {
    // Sums of all virtual CPUs.
    fn sums<const COUNT: usize>(shared: &File, at: usize) -> [u64; COUNT] {
        let mut sums = [0_u64; COUNT];
        for vcpu in 0..MAX_VCPUS {
            let at = vcpu * size_of::<hosted::VcpuStatistics>() + at;
            let words = words::<COUNT>(shared, layout::STATISTICS + at as u64);
            for (sum, word) in sums.iter_mut().zip(words) {
                *sum = sum.wrapping_add(word);
            }
        }
        sums
    }
    const COUNTERS: usize = counter::NAMES.len();
    let counters = sums::<COUNTERS>(shared, offset_of!(hosted::VcpuStatistics, counters));
    let names = counter::NAMES.iter().map(|name| name.replace(' ', "_"));
    let sites = sums::<256>(shared, offset_of!(hosted::VcpuStatistics, sites));
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

#[cfg(test)]
pub mod testing {
    //! Statistics for tests.

    use super::devices::{FrameStatistics, Requests};
    use super::latency::LatencyHistogram;
    use super::*;

    /// Returns statistics of a running VM with two vCPUs, two disks, a network and a shared
    /// directory.
    pub fn statistics() -> Statistics {
        let requests = |requests, bytes| Requests { requests, bytes, ..Requests::default() };
        let frames =
            |frames, bytes| FrameStatistics { frames, bytes, ..FrameStatistics::default() };
        let none = Requests::default();
        let histogram = LatencyHistogram::from(vec![1, 0, 1]);
        let read = Requests { time_ns: 1_500_000_000, max_ns: 700, histogram, ..requests(2, 4096) };
        let flush = Requests { failed: 1, ..requests(1, 0) };
        let (write, name) = (requests(1, 512), "a\"\\".to_owned());
        let other = DiskStatistics { name, read: none, write, flush: none, discard: none };
        let name = "disk0".to_owned();
        let disk = DiskStatistics { name, read, write: none, flush, discard: none };
        let (receive, transmit) = (frames(1, 1514), frames(3, 180));
        let net = NetStatistics { name: "net0".to_owned(), receive, transmit };
        let (tag, other_messages) = ("tag".to_owned(), requests(9, 0));
        let share = ShareStatistics { tag, read: none, write: none, other: other_messages };
        Statistics {
            state: State::Running,
            uptime_ms: 0,
            start_ms: None,
            resets: 0,
            vcpus: 2,
            processes: 4,
            user_ms: 0,
            system_ms: 0,
            steal_ms: 0,
            memory_bytes: 1 << 30,
            memory_used_bytes: 64 << 20,
            balloon_bytes: Some(4096),
            guest_memory: Some(GuestMemory {
                age_ms: 0,
                total_bytes: Some(1 << 29),
                free_bytes: Some(2048),
                available_bytes: None,
                cache_bytes: Some(0),
                swapped_in_bytes: Some(0),
                swapped_out_bytes: Some(0),
                major_faults: Some(0),
                minor_faults: Some(1),
            }),
            vcpu_times: vec![
                VcpuTime::default(),
                VcpuTime { run_ms: 30, steal_ms: 70, idle_ms: 900 },
            ],
            disks: vec![disk, other],
            nets: vec![net],
            shares: vec![share],
            wedge: Wedge::default(),
        }
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
}
