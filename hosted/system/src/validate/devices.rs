//! Devices of the machine: those of servers, and those that a VM drives itself. Each has one owner.

use super::Validator;
use crate::attach::{Bus, EmulatedDisk, EmulatedNic, MachineDevice, VirtioBus};
use crate::description::{self, Log};
use crate::resolved::ResolvedServer;
use hosted_command::architecture::Architecture;
use hosted_command::problem::Problem;
use proto::system::MAX_VM_DEVICES;
use std::ops::Range;
use toml::Spanned;

/// The machine, as far as devices depend on it.
#[derive(Clone, Copy)]
pub(super) struct MachineDevices<'a> {
    pub(super) log: Log,
    /// Devices of an emulated machine.
    pub(super) emulated: Option<(&'a [EmulatedDisk], &'a [EmulatedNic])>,
}

impl Validator<'_> {
    /// Returns a device of the machine, if the board can have it.
    pub(super) fn machine_device(&mut self, written: &Spanned<String>) -> Option<MachineDevice> {
        let bus = self.bus;
        let device = self.parsed(written, |text| MachineDevice::parse(text, bus))?;
        if device.bus().is_none_or(|stated| stated == bus) {
            return Some(device);
        }
        let message = match (self.architecture, bus) {
            (Architecture::X86, _) => "a PC has no virtio devices over MMIO",
            (_, VirtioBus::Pci) => "with `iommu = true`, all devices are on PCI",
            (_, VirtioBus::Mmio) => {
                "board \"qemu-virt\" has devices on PCI with `iommu = true` only"
            }
        };
        let problem = Problem::new(written.span(), message);
        let help = "write \"virtio-blk:0\" or \"virtio-net:0\", which any board has";
        self.problems.push(problem.help(help));
        None
    }

    /// Checks that a device exists, and that none of these owners has it: text and device.
    pub(super) fn device_is_free(
        &mut self,
        (device, written): (MachineDevice, &Spanned<String>),
        machine: MachineDevices,
        owners: impl IntoIterator<Item = (String, MachineDevice)>,
    ) {
        let owner = owners.into_iter().find(|(_, other)| other.overlaps(device));
        if let Some((owner, _)) = owner {
            let message = format!("{device} already belongs to {owner}");
            let problem = Problem::new(written.span(), message);
            self.problems.push(problem.help("a device has one owner; remove one of the two"));
        }
        if device == MachineDevice::Com1 && machine.log == Log::Com1 {
            self.problems.push(log_conflict(written.span()));
        }
        if let Some(missing) = machine.emulated.and_then(|machine| missing_device(device, machine))
        {
            let message = format!("the machine has no {device}");
            self.problems.push(Problem::new(written.span(), message).help(missing));
        }
    }

    /// Resolves the devices that a VM drives itself. `taken`: those of VMs before it, with the VM's
    /// name.
    pub(super) fn own_devices(
        &mut self,
        vm: &description::Vm,
        machine: MachineDevices,
        servers: &[ResolvedServer],
        taken: &mut Vec<(String, MachineDevice)>,
    ) -> Vec<MachineDevice> {
        let mut devices = Vec::new();
        if let Some(text) = vm.devices.get(MAX_VM_DEVICES) {
            let message = format!("too many devices of a virtual machine (limit {MAX_VM_DEVICES})");
            self.problems.push(Problem::new(text.span(), message));
        }
        if let (Some(text), true) = (vm.devices.first(), vm.template) {
            let message = "a template cannot have devices of the machine";
            self.problems.push(Problem::new(text.span(), message));
        }
        for written in &vm.devices {
            if self.architecture != Architecture::Arm64 {
                let message = "only guests of board \"qemu-virt\" can drive devices themselves";
                let help = "remove it, and add a [[server]] for the device";
                self.problems.push(Problem::new(written.span(), message).help(help));
                break;
            }
            let Some(device) = self.machine_device(written) else { continue };
            self.check_access(vm, device, written);
            let servers = servers.iter().filter_map(owner);
            let vms = taken.iter().map(|(vm, device)| (format!("virtual machine `{vm}`"), *device));
            let owners: Vec<_> = servers.chain(vms).collect();
            self.device_is_free((device, written), machine, owners);
            taken.push((vm.name.get_ref().clone(), device));
            devices.push(device);
        }
        devices
    }

    /// Checks that a guest may drive a device as far as memory is concerned.
    fn check_access(
        &mut self,
        vm: &description::Vm,
        device: MachineDevice,
        written: &Spanned<String>,
    ) {
        match device.bus() {
            Some(VirtioBus::Pci) if matches!(device, MachineDevice::Ahci(..)) => {
                let message =
                    format!("a guest cannot drive {device} itself: nothing resets it by itself");
                let help = "remove it, and add a [[server]] for the device";
                self.problems.push(Problem::new(written.span(), message).help(help));
            }
            // The IOMMU restricts it to the guest's memory.
            Some(VirtioBus::Pci) => {}
            Some(VirtioBus::Mmio) if !vm.trusted => {
                let message = format!(
                    "{device} can access all memory of the machine, because no IOMMU restricts it"
                );
                let help = "set [system] iommu = true, or add `trusted = true` if the guest may; \
                            else add a [[server]]";
                self.problems.push(Problem::new(written.span(), message).help(help));
            }
            Some(VirtioBus::Mmio) | None => {}
        }
    }
}

/// Returns the device of a server, if it has one, and the text that names its owner.
pub(super) fn owner(server: &ResolvedServer) -> Option<(String, MachineDevice)> {
    Some((format!("server `{}`", server.name), server.device?))
}

/// Returns whether the emulated machine lacks the device, and the remedy.
fn missing_device(
    device: MachineDevice,
    (disks, nets): (&[EmulatedDisk], &[EmulatedNic]),
) -> Option<&'static str> {
    let on = |bus| disks.iter().filter(|disk| disk.bus == bus).count();
    let (there, help) = match device {
        MachineDevice::Com1 => (true, ""),
        MachineDevice::VirtioBlk(_, index) => {
            (usize::from(index) < on(Bus::Virtio), "add [system] disk = [\"disk.img\"]")
        }
        // The board has one AHCI controller; disks occupy its first ports.
        MachineDevice::Ahci(index, port) => (
            index == 0 && usize::from(port.unwrap_or(0)) < on(Bus::Ahci),
            "add [system] disk = [\"disk.img,bus=ahci\"]; the board has one controller",
        ),
        MachineDevice::VirtioNet(_, index) => {
            (usize::from(index) < nets.len(), "add [system] net = [\"user\"]")
        }
    };
    (!there).then_some(help)
}

pub(super) fn log_conflict(span: Range<usize>) -> Problem {
    Problem::new(span, "com1 already belongs to the kernel log")
        .help("set [system] log = \"com2\" or \"none\"")
}
