//! The compiled form of a validated description, which `root` reads.

use crate::attach::{MachineDevice, VirtioBus};
use crate::description::{Board, Log, OnReset, Restart, ServerKind};
use crate::resolved::{ResolvedServer, ResolvedSystem, ResolvedTask, ResolvedVm};
use hosted_command::failure::{self, Failure};
use proto::system as compiled;

impl ResolvedSystem {
    /// Encodes the description for `root`. `names` are the kernels and RAM disks in the bundle, in
    /// the order of `vms`.
    pub fn compile(&self, names: &[(String, Option<String>)]) -> Result<Vec<u8>, Failure> {
        let vms = self.vms.iter().zip(names);
        let vms = vms.map(|(vm, (kernel, initrd))| compile_vm(vm, kernel, initrd.as_deref()));
        let system = compiled::System {
            board: match self.board {
                Board::QemuQ35 => compiled::Board::QemuQ35,
                Board::Pc => compiled::Board::Pc,
                Board::QemuVirt => compiled::Board::QemuVirt,
            },
            log: match self.log {
                Log::Com1 => compiled::SerialPort::Com1,
                Log::Com2 => compiled::SerialPort::Com2,
                Log::None => compiled::SerialPort::None,
            },
            cpus: self.cpus.unwrap_or(0),
            servers: self.servers.iter().map(compile_server).collect(),
            tasks: self.tasks.iter().map(compile_task).collect(),
            vms: vms.collect(),
            channels: self.channels.iter().copied().collect(),
        };
        // Strings dominate; 64 KiB hold sixteen VMs with the longest command lines.
        let mut buffer = vec![0; 64 << 10];
        match system.encode(&mut buffer) {
            Ok(bytes) => Ok(bytes.to_vec()),
            Err(_) => {
                Err(Failure::new(failure::BAD_CONFIG, "the texts in the description exceed 64 KiB")
                    .help("shorten the arguments of tasks"))
            }
        }
    }
}

fn compile_server(server: &ResolvedServer) -> compiled::Server<'_> {
    compiled::Server {
        name: &server.name,
        kind: match server.kind {
            ServerKind::Console if server.shared => compiled::ServerKind::Multiplexer,
            ServerKind::Console => compiled::ServerKind::Console,
            ServerKind::Block => compiled::ServerKind::Block,
            ServerKind::Switch => compiled::ServerKind::Switch,
        },
        device: server.device.map_or(compiled::Device::None, compile_device),
        binary: server.binary(),
        priority: server.priority,
        cpu_time: server.cpu_time,
        restart: compile_restart(server.restart),
    }
}

fn compile_device(device: MachineDevice) -> compiled::Device {
    match device {
        MachineDevice::Com1 => compiled::Device::Serial(compiled::SerialPort::Com1),
        MachineDevice::VirtioBlk(bus, index) => {
            virtio_device(bus, compiled::VirtioClass::Block, index)
        }
        MachineDevice::VirtioNet(bus, index) => {
            virtio_device(bus, compiled::VirtioClass::Net, index)
        }
        MachineDevice::Ahci(index, port) => {
            compiled::Device::Pci(compiled::PciClass::Ahci(port), index)
        }
    }
}

fn virtio_device(bus: VirtioBus, class: compiled::VirtioClass, index: u8) -> compiled::Device {
    match bus {
        VirtioBus::Pci => compiled::Device::Pci(compiled::PciClass::Virtio(class), index),
        VirtioBus::Mmio => compiled::Device::Mmio(class, index),
    }
}

fn compile_task(task: &ResolvedTask) -> compiled::TaskSpec<'_> {
    compiled::TaskSpec {
        name: &task.name,
        binary: task.binary.get_ref(),
        arguments: task.arguments.iter().map(String::as_str).collect(),
        cpu: task.cpu,
        priority: task.priority,
        cpu_time: task.cpu_time,
        essential: task.essential,
        console: task.console,
        manage: task.manage,
    }
}

fn compile_vm<'a>(
    vm: &'a ResolvedVm,
    kernel: &'a str,
    initrd: Option<&'a str>,
) -> compiled::Vm<'a> {
    compiled::Vm {
        name: &vm.name,
        memory: vm.memory.get_ref().0,
        vcpus: vm.vcpus,
        pins: vm.pins.iter().copied().collect(),
        binary: vm.binary(),
        kernel,
        initrd,
        command_line: &vm.command_line,
        console: vm.console,
        priority: vm.priority,
        cpu_time: vm.cpu_time,
        restart: compile_restart(vm.restart),
        on_reset: match vm.on_reset {
            OnReset::Exit => compiled::OnReset::Exit,
            OnReset::Reset => compiled::OnReset::Reset,
        },
        kvmclock: vm.kvmclock,
        virtio_console: vm.virtio_console,
        transport: vm.transport,
        vtlb: vm.vtlb,
        essential: vm.essential,
        template: vm.template,
        disks: vm.disks.iter().copied().collect(),
        nets: vm.nets.iter().copied().collect(),
        devices: vm.devices.iter().copied().map(compile_device).collect(),
    }
}

fn compile_restart(restart: Restart) -> compiled::Restart {
    match restart {
        Restart::Never => compiled::Restart::Never,
        Restart::OnCrash => compiled::Restart::OnCrash,
        Restart::Always => compiled::Restart::Always,
    }
}
