//! Resources of the children by kind: servers, native programs, VMMs.

use abi::boot;
use heapless::Vec;
use native_rt::random::Generator;
use proto::channel::MAX_VM_CHANNELS;
use proto::start::{RangeKind, Role, VCPU_STACK, Vmm, slot};
use proto::system::{
    Device, MAX_VCPUS, MAX_VM_DISKS, MAX_VM_NETS, OnReset, Server, ServerKind, Vm,
};

use super::{FIRST_TASK, FIRST_VM, Manager};
use crate::child::{Child, ChildConfig, StartError};
use crate::sessions::SystemView;
use crate::{pass_through, platform};

/// Kernel memory of a server, in pages.
const SERVER_QUOTA: u64 = 64;
/// Kernel memory of a native program: an equal part of the remaining quota, within these bounds.
const MIN_TASK_QUOTA: u64 = 40;
const MAX_TASK_QUOTA: u64 = 1024;
/// Kernel memory that root keeps for its own mappings and capabilities.
const OWN_QUOTA: u64 = 64;
/// Kernel memory of a VMM: for one vCPU, for each further one, and for the page tables of each GiB
/// of guest memory, in two address spaces.
const VMM_QUOTA: u64 = 64;
const VCPU_QUOTA: u64 = 24;
const GIB_QUOTA: u64 = 4;
/// And for a PCI function of the guest's own: page tables, and the mappings of its registers.
const FUNCTION_QUOTA: u64 = 12;
/// And for a channel: page tables, and the shares' mappings.
const CHANNEL_QUOTA: u64 = 24;
/// Kernel memory that root needs for a channel's aliases.
const CHANNEL_OWN_QUOTA: u64 = 8;
const SMALL_STACK: u64 = 48 << 10;
/// A VMM's whole board is on its stack.
const VMM_STACK: u64 = 32 << 10;
/// So are its devices with their sessions: per device, and during their set-up.
const DEVICE_STACK: u64 = 16 << 10;
const SETUP_STACK: u64 = 12 << 10;
const TASK_STACK: u64 = 64 << 10;
/// Private memory of a native program.
const TASK_MEMORY: u64 = 256 << 10;

impl<'a> Manager<'a> {
    pub(super) fn start_server(
        &mut self,
        number: usize,
        server: &Server,
    ) -> Result<Child, StartError> {
        let has_sessions = matches!(server.kind, ServerKind::Block | ServerKind::Switch);
        let config = ChildConfig {
            number,
            cpu: 0,
            priority: server.priority,
            cpu_time: server.cpu_time,
            contexts: 1,
            quota: SERVER_QUOTA,
            slots: if has_sessions { slot::SERVER_COUNT } else { slot::COUNT },
            stack: SMALL_STACK,
            may_create_objects: false,
        };
        if has_sessions {
            return self.build(&config, server.binary, |root, child| {
                let Self { sessions, resources, children, instances, system, .. } = root;
                let view = SystemView { system, instances, children };
                sessions.connect_server(number, server, child, resources, view)
            });
        }
        let Device::Serial(port) = server.device else { return Err(StartError::Device) };
        if port == self.system.log {
            return Err(StartError::Device);
        }
        self.build(&config, server.binary, |root, child| {
            let (line, port) = platform::add_serial(child, &mut root.resources, port)?;
            root.sessions.add_line(line)?;
            let multiplex = server.kind == ServerKind::Multiplexer;
            if multiplex {
                root.directory = Some((number, child.add_directory(&mut root.resources)?));
            }
            Ok(Role::Console { port, multiplex })
        })
    }

    /// Returns the quota of kernel memory of each native program, in pages.
    fn task_quota(&self) -> u64 {
        let servers = self.system.servers.len() as u64 * SERVER_QUOTA;
        let vms: u64 = self.system.vms.iter().map(|vm| self.vmm_quota(vm)).sum();
        let own = OWN_QUOTA + CHANNEL_OWN_QUOTA * self.system.channels.len() as u64;
        let left = self.resources.boot.info.quota_pages.saturating_sub(own + servers + vms);
        // One part remains for programs that start later.
        (left / (self.system.tasks.len() as u64 + 1)).clamp(MIN_TASK_QUOTA, MAX_TASK_QUOTA)
    }

    pub(super) fn start_task(&mut self, number: usize) -> Result<Child, StartError> {
        let task = &self.system.tasks[number - FIRST_TASK];
        let config = ChildConfig {
            number,
            cpu: task.cpu,
            priority: task.priority,
            cpu_time: task.cpu_time,
            contexts: 1,
            quota: self.task_quota(),
            slots: slot::COUNT,
            stack: TASK_STACK,
            may_create_objects: true,
        };
        self.build(&config, task.binary, |root, child| {
            child.add_private(&mut root.resources, TASK_MEMORY)?;
            root.connect_console(child, task.console, number)?;
            if task.manage {
                child.add_management(&mut root.resources.slots)?;
            }
            Ok(Role::Program(task.arguments.clone()))
        })
    }

    /// Returns the quota of kernel memory of a VMM, in pages.
    fn vmm_quota(&self, vm: &Vm) -> u64 {
        let further = u64::from(vm.vcpus.saturating_sub(1));
        let channels = self.channels.count(self.system, vm) as u64;
        let functions = vm.devices.iter().filter(|device| matches!(device, Device::Pci(..)));
        let pools = vm.vtlb.map_or(0, |vtlb| u64::from(vtlb.pool)) * u64::from(vm.vcpus);
        VMM_QUOTA
            + VCPU_QUOTA * further
            + GIB_QUOTA * (vm.memory >> 30)
            + CHANNEL_QUOTA * channels
            + FUNCTION_QUOTA * functions.count() as u64
            + pools
    }

    /// Returns the CPUs of a VM's vCPUs.
    fn vm_cpus(&self, index: usize, vm: &Vm) -> Result<Vec<u32, MAX_VCPUS>, StartError> {
        let machine = self.resources.boot.info;
        let mut cpus = vm.pins.clone();
        if cpus.is_empty() {
            let choice = |vcpu| (index as u32 + vcpu) % machine.cpus.max(1);
            cpus.extend((0..vm.vcpus).map(choice).take(cpus.capacity()));
        }
        match cpus.iter().find(|&&cpu| cpu >= machine.cpus) {
            Some(&cpu) => Err(StartError::Cpu(cpu)),
            None => Ok(cpus),
        }
    }

    /// Returns the stack of a VMM's first thread, in bytes.
    fn vmm_stack(&self, vm: &Vm) -> u64 {
        let channels = self.channels.count(self.system, vm);
        let consoles = usize::from(vm.virtio_console);
        let devices = match vm.disks.len() + vm.nets.len() + channels + consoles {
            0 => 0,
            // The VMM has variants for these numbers, plus an entropy source.
            few @ 1..=2 => few + 1,
            3..=4 => 5,
            _ => MAX_VM_DISKS + MAX_VM_NETS + MAX_VM_CHANNELS + 2,
        } as u64;
        let setup = if devices == 0 { 0 } else { SETUP_STACK };
        (VMM_STACK + DEVICE_STACK * devices + setup).next_multiple_of(abi::PAGE_SIZE)
    }

    pub(super) fn start_vm(&mut self, number: usize, vm: &'a Vm<'a>) -> Result<Child, StartError> {
        let index = number - FIRST_VM;
        let machine = self.resources.boot.info;
        if vm.vtlb.is_none() && machine.features & boot::FEATURE_NESTED == 0 {
            return Err(StartError::NoNestedPaging);
        }
        if vm.devices.contains(&Device::Serial(self.system.log)) {
            return Err(StartError::Device);
        }
        let cpus = self.vm_cpus(index, vm)?;
        let config = ChildConfig {
            number,
            cpu: cpus.first().copied().unwrap_or(0),
            priority: vm.priority,
            cpu_time: vm.cpu_time,
            contexts: cpus.len() as u64,
            quota: self.vmm_quota(vm),
            slots: slot::COUNT,
            stack: self.vmm_stack(vm),
            may_create_objects: cpus.len() > 1,
        };
        self.build(&config, vm.binary, |root, child| {
            let is_contiguous = vm.has_identity_memory();
            let identity = child.add_guest(&mut root.resources, vm.memory, is_contiguous)?;
            let further = cpus.len() as u64 - 1;
            if further > 0 {
                child.add_private(&mut root.resources, further * VCPU_STACK)?;
                child.add_vcpu_notifications(&mut root.resources.slots, cpus.len())?;
            }
            root.add_file(child, RangeKind::Kernel, vm.kernel)?;
            if let Some(initrd) = vm.initrd {
                root.add_file(child, RangeKind::Initrd, initrd)?;
            }
            root.connect_console(child, vm.console, number)?;
            child.add_report(&mut root.resources)?;
            let Self { sessions, resources, children, channels, instances, system, seeds, .. } =
                root;
            let view = SystemView { system, instances, children };
            let seed = seeds.as_mut().map(Generator::seed);
            let attachments = sessions.connect_client(number, vm, child, resources, view)?;
            let channels = channels.connect(number, vm, system, child, resources, children)?;
            let (iommu, guest) = (sessions.iommu(), (number, identity));
            let devices = pass_through::connect(child, resources, iommu, guest, &vm.devices)?;
            let on_reset = if vm.restarts_at_reset() { OnReset::Exit } else { vm.on_reset };
            Ok(Role::Vmm(Vmm {
                id: index as u32 + 1,
                cpus,
                memory: vm.memory,
                command_line: vm.command_line,
                console: vm.console.is_some(),
                on_reset,
                kvmclock: vm.kvmclock,
                virtio_console: vm.virtio_console,
                transport: vm.transport,
                vtlb: vm.vtlb,
                xcr0_mask: machine.xcr0_mask,
                gicv2: machine.features & boot::FEATURE_GICV2 != 0,
                aarch32: machine.features & boot::FEATURE_AARCH32 != 0,
                seed,
                attachments,
                channels,
                devices,
                identity,
            }))
        })
    }

    fn add_file(&self, child: &mut Child, kind: RangeKind, name: &str) -> Result<(), StartError> {
        let role = if kind == RangeKind::Kernel { "kernel" } else { "initrd" };
        let file = self.header.find(name).ok_or(StartError::File(role))?;
        child.add_file(&self.resources, kind, file.offset, file.length)
    }
}
