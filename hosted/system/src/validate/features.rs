//! Features that a board does not have yet, and its limits besides that of CPUs.

use super::Validator;
use crate::attach::{Bus, EmulatedDisk, MAX_LINES, MAX_MMIO_DEVICES, VirtioBus};
use crate::description::{self, System};
use hosted_command::architecture::Architecture;
use hosted_command::problem::Problem;
use toml::Spanned;

/// Remedy for a feature that the board does not have.
const HELP: &str = "remove it, or use board = \"qemu-q35\"";

impl Validator<'_> {
    /// Reports what AArch64 does not have yet, and devices that exceed the board.
    pub(super) fn features(&mut self, system: &System, vms: &[Spanned<description::Vm>]) {
        if self.architecture != Architecture::Arm64 {
            return;
        }
        self.number_of_devices(system);
        for vm in vms.iter().filter(|vm| !vm.get_ref().npt) {
            let message = "board \"qemu-virt\" has no vTLB yet";
            self.problems.push(Problem::new(vm.get_ref().name.span(), message).help(HELP));
        }
    }

    /// Reports the first device that has no page of registers, or no interrupt line, for itself.
    fn number_of_devices(&mut self, system: &System) {
        let (most, help) = match self.bus {
            VirtioBus::Mmio => (
                MAX_MMIO_DEVICES,
                "each needs a page of registers, of which the kernel log has the fourth; \
                 with [system] iommu = true they are on PCI, which has four",
            ),
            VirtioBus::Pci => {
                (MAX_LINES, "each needs one of the four interrupt lines of PCI for itself")
            }
        };
        // All disks of the AHCI controller are one function.
        let is_ahci = |disk: &&Spanned<String>| {
            let disk = EmulatedDisk::parse(disk.get_ref(), self.folder);
            disk.is_ok_and(|disk| disk.bus == Bus::Ahci)
        };
        let (ahci, disks): (Vec<_>, Vec<_>) = system.disk.iter().partition(is_ahci);
        let mut devices = ahci.into_iter().take(1).chain(disks).chain(&system.net);
        let count = devices.clone().count();
        if let Some(device) = devices.nth(most) {
            let message = format!(
                "board \"qemu-virt\" has room for {most} disks and network cards (got {count})"
            );
            self.problems.push(Problem::new(device.span(), message).help(help));
        }
    }
}
