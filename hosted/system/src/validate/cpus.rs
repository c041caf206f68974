//! CPUs: which exist, who owns them, and how much of them is reserved.

use super::Validator;
use crate::cpu_time::Promises;
use crate::description::{self, Cpus};
use crate::resolved::{ResolvedSystem, ResolvedTask, plural};
use hosted_command::architecture::Architecture;
use hosted_command::problem::Problem;
use proto::system::MAX_VCPUS;
use std::collections::HashMap;
use std::ops::Range;
use toml::Spanned;

/// QEMU's limit for the q35 board with default settings.
const MAX_CPUS: u32 = 288;
/// Largest number of CPUs of QEMU's machine `virt` that the kernel uses.
const MAX_CPUS_ARM64: u32 = 64;
/// Remedy for CPUs that two VMs request.
const SHARE_HELP: &str = "use other CPUs, or allow time slices with [system] share_cpus = true";

impl Validator<'_> {
    /// Sums the reservations of each CPU, with the VMs placed as root places them.
    pub(super) fn promises(&mut self, resolved: &ResolvedSystem) {
        let mut promises = Promises::default();
        for server in &resolved.servers {
            promises.add(0, &server.name, server.cpu_time);
        }
        for task in &resolved.tasks {
            promises.add(task.cpu, &task.name, task.cpu_time);
        }
        for (index, vm) in resolved.vms.iter().enumerate().filter(|(_, vm)| !vm.template) {
            let count = resolved.cpus.unwrap_or(MAX_CPUS).max(1);
            // A larger number is a problem that was reported.
            for vcpu in 0..vm.vcpus.min(MAX_VCPUS as u32) {
                let chosen = (index as u32 + vcpu) % count;
                let cpu = vm.pins.get(vcpu as usize).copied().unwrap_or(chosen);
                promises.add(cpu, &vm.name, vm.cpu_time);
            }
        }
        promises.check(&mut self.problems);
    }

    /// Checks that CPUs exist and, unless they may be shared, belong to one VM each.
    pub(super) fn cpus(
        &mut self,
        requests: &[CpuRequest],
        tasks: &[ResolvedTask],
        cpus: Option<u32>,
        share: bool,
    ) {
        self.pins(requests, cpus, share);
        for task in tasks {
            if let Some(count) = cpus.filter(|&count| task.cpu >= count) {
                let message = format!("task `{}`: {}", task.name, no_such_cpu(task.cpu, count));
                let problem = Problem::new(task.binary.span(), message);
                self.problems.push(problem.help("change the task's `cpu`, or [system] cpus"));
            }
        }
        if let Some(count) = cpus {
            self.vcpu_counts(requests, count, share);
        }
    }

    /// Checks the CPUs that VMs name.
    fn pins(&mut self, requests: &[CpuRequest], cpus: Option<u32>, share: bool) {
        let mut owners: HashMap<u32, &str> = HashMap::new();
        for request in requests {
            let mut own: Vec<u32> = Vec::new();
            for pin in &request.pins {
                let cpu = *pin.get_ref();
                if let Some(count) = cpus.filter(|&count| cpu >= count) {
                    let problem = Problem::new(pin.span(), no_such_cpu(cpu, count));
                    self.problems.push(problem.help("change the pin, or [system] cpus"));
                }
                if own.contains(&cpu) && !share {
                    let message = format!("CPU {cpu} is listed twice");
                    self.problems.push(Problem::new(pin.span(), message));
                } else if let (Some(other), false) = (owners.get(&cpu), share) {
                    let message = format!("CPU {cpu} already belongs to `{other}`");
                    let problem = Problem::new(pin.span(), message);
                    self.problems.push(problem.help(SHARE_HELP));
                }
                own.push(cpu);
            }
            owners.extend(own.into_iter().map(|cpu| (cpu, request.name.as_str())));
        }
    }

    /// Checks that `count` CPUs suffice for all vCPUs.
    fn vcpu_counts(&mut self, requests: &[CpuRequest], count: u32, share: bool) {
        let mut total = 0_u32;
        for request in requests {
            total = total.saturating_add(request.vcpus);
            if request.vcpus > count && !share {
                let message = format!(
                    "`{}` has {}, the machine has {}",
                    request.name,
                    plural(request.vcpus, "vCPU"),
                    plural(count, "CPU")
                );
                let problem = Problem::new(request.span.clone(), message);
                self.problems.push(
                    problem.help(
                        "give it fewer, the machine more ([system] cpus), or share_cpus = true",
                    ),
                );
            } else if total > count && !share && request.pins.is_empty() {
                let message = format!(
                    "no CPU left for `{}`: {total} vCPUs so far on {}",
                    request.name,
                    plural(count, "CPU")
                );
                self.problems.push(Problem::new(request.span.clone(), message).help(SHARE_HELP));
            }
        }
    }
}

/// CPUs that a VM requests.
pub(super) struct CpuRequest {
    name: String,
    pub(super) vcpus: u32,
    pub(super) pins: Vec<Spanned<u32>>,
    pub(super) span: Range<usize>,
}

impl CpuRequest {
    /// Returns the request of a VM.
    pub(super) fn of(vm: &description::Vm) -> Self {
        let name = vm.name.get_ref().clone();
        match &vm.cpus {
            None => Self { name, vcpus: 1, pins: Vec::new(), span: vm.name.span() },
            Some(cpus) => match cpus.get_ref() {
                Cpus::Count(vcpus) => {
                    Self { name, vcpus: *vcpus, pins: Vec::new(), span: cpus.span() }
                }
                Cpus::Pin(pins) => {
                    Self { name, vcpus: pins.len() as u32, pins: pins.clone(), span: cpus.span() }
                }
            },
        }
    }
}

/// Returns the largest number of CPUs of a machine.
pub(super) fn most_cpus(architecture: Architecture) -> u32 {
    match architecture {
        Architecture::X86 => MAX_CPUS,
        Architecture::Arm64 => MAX_CPUS_ARM64,
    }
}

/// Returns the default number of CPUs of an emulated machine, which has `most` at most.
pub(super) fn least_cpus(
    requests: &[CpuRequest],
    tasks: &[ResolvedTask],
    share: bool,
    most: u32,
) -> u32 {
    let vcpus = requests.iter().map(|request| request.vcpus);
    let together = if share { vcpus.max() } else { vcpus.reduce(u32::saturating_add) };
    let pins = requests.iter().flat_map(|request| &request.pins).map(|pin| *pin.get_ref());
    let named = pins.chain(tasks.iter().map(|task| task.cpu)).max();
    let least = together.unwrap_or(1).max(named.map_or(1, |cpu| cpu.saturating_add(1)));
    least.clamp(1, most)
}

fn no_such_cpu(cpu: u32, count: u32) -> String {
    match count {
        1 => format!("the machine has no CPU {cpu}, only CPU 0"),
        _ => format!("the machine has no CPU {cpu}, only 0 to {}", count - 1),
    }
}
