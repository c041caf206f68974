//! Features that a board does not have yet.

use super::Validator;
use crate::description::{self, ServerKind, System};
use hosted_command::architecture::Architecture;
use hosted_command::problem::Problem;
use std::ops::Range;
use toml::Spanned;

/// Largest number of CPUs of QEMU's machine `virt` that the kernel uses.
const MAX_CPUS: u32 = 64;
/// Remedy for a feature that the board does not have.
const HELP: &str = "remove it, or use board = \"qemu-q35\"";

impl Validator<'_> {
    /// Reports what AArch64 does not have yet: servers with devices, disks and networks, vTLBs.
    pub(super) fn features(
        &mut self,
        system: &System,
        servers: &[Spanned<description::Server>],
        vms: &[Spanned<description::Vm>],
    ) {
        if self.architecture != Architecture::Arm64 {
            return;
        }
        let mut missing = |span: Range<usize>, what: &str| {
            let message = format!("board \"qemu-virt\" has no {what} yet");
            self.problems.push(Problem::new(span, message).help(HELP));
        };
        let devices = system.disk.iter().chain(&system.net);
        devices.for_each(|device| missing(device.span(), "disks and network cards"));
        for server in servers.iter().filter(|server| server.get_ref().kind != ServerKind::Console) {
            missing(server.get_ref().name.span(), "disk servers and switches");
        }
        for vm in vms {
            let of = vm.get_ref();
            let devices = of.disk.iter().chain(&of.net);
            devices.for_each(|device| missing(device.span(), "disks and network cards of VMs"));
            if !of.npt {
                missing(of.name.span(), "vTLB");
            }
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
