//! Features that a board does not have yet, and its limits.

use super::Validator;
use crate::attach::MAX_MMIO_DEVICES as MAX_DEVICES;
use crate::description::{self, System};
use hosted_command::architecture::Architecture;
use hosted_command::problem::Problem;
use toml::Spanned;

/// Largest number of CPUs of QEMU's machine `virt` that the kernel uses.
const MAX_CPUS: u32 = 64;
/// Remedy for a feature that the board does not have.
const HELP: &str = "remove it, or use board = \"qemu-q35\"";

impl Validator<'_> {
    /// Reports what AArch64 does not have yet, and devices that exceed the board.
    pub(super) fn features(&mut self, system: &System, vms: &[Spanned<description::Vm>]) {
        if self.architecture != Architecture::Arm64 {
            return;
        }
        let mut devices = system.disk.iter().chain(&system.net);
        if let Some(device) = devices.nth(MAX_DEVICES) {
            let count = system.disk.len() + system.net.len();
            let message = format!(
                "board \"qemu-virt\" has room for {MAX_DEVICES} disks and network cards (got {count})"
            );
            let help = "each needs a page of registers, of which the kernel log has the fourth";
            self.problems.push(Problem::new(device.span(), message).help(help));
        }
        for vm in vms.iter().filter(|vm| !vm.get_ref().npt) {
            let message = "board \"qemu-virt\" has no vTLB yet";
            self.problems.push(Problem::new(vm.get_ref().name.span(), message).help(HELP));
        }
        if let Some(cpus) = system.cpus.as_ref().filter(|cpus| *cpus.get_ref() > MAX_CPUS) {
            let message = format!("board \"qemu-virt\" has at most {MAX_CPUS} CPUs");
            self.problems.push(Problem::new(cpus.span(), message));
        }
        if system.iommu {
            let message = "board \"qemu-virt\" has no IOMMU yet";
            self.problems.push(Problem::new(0..0, message).help(HELP));
        }
    }
}
