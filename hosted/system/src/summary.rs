//! Summary of the verified properties of a description, as `parador system check` prints it.

use crate::description::{Board, Log};
use crate::resolved::{KernelSource, ResolvedSystem, plural};
use crate::vtlb;
use hosted_command::value::Size;
use std::fmt;

/// Summary of the verified properties.
impl fmt::Display for ResolvedSystem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{}: no problem found", self.source.file)?;
        writeln!(f, "  board    {}", self.board.name())?;
        let count = |items: usize, what: &str| plural(items as u32, what);
        writeln!(
            f,
            "  parts    {}, {}, {}: names unique, references valid",
            count(self.vms.len(), "virtual machine"),
            count(self.tasks.len(), "task"),
            count(self.servers.len(), "server"),
        )?;
        writeln!(f, "  CPUs     {}", self.cpu_summary())?;
        writeln!(f, "  memory   {}", self.memory_summary())?;
        self.write_devices(f)?;
        for vm in &self.vms {
            let kernel = match vm.kernel.get_ref() {
                KernelSource::Debian(_) => "Debian's kernel, checked after fetching".to_owned(),
                KernelSource::Micro(name) => format!("{name} of the build"),
                KernelSource::File(path) => format!("{} is complete", path.display()),
            };
            write!(f, "  {:<8} {}, {kernel}", vm.name, vm.memory.get_ref())?;
            match vm.vtlb {
                Some(vtlb) => writeln!(f, ", {}", vtlb::describe(vtlb))?,
                None => writeln!(f)?,
            }
        }
        Ok(())
    }
}

impl ResolvedSystem {
    fn cpu_summary(&self) -> String {
        let vcpus = self.vms.iter().filter(|vm| !vm.template).map(|vm| vm.vcpus).sum();
        let vcpus = plural(vcpus, "vCPU");
        match self.cpus {
            None => format!("{vcpus}; number of CPUs unknown"),
            Some(cpus) if self.share_cpus => {
                format!("{vcpus} on {}, sharing allowed", plural(cpus, "CPU"))
            }
            Some(cpus) => format!("{vcpus} on {}, none shared", plural(cpus, "CPU")),
        }
    }

    fn memory_summary(&self) -> String {
        let guests = Size(self.guest_memory());
        match &self.memory {
            Some((size, _)) => {
                format!("{guests} for guests, boot files and Parador fit into {size}")
            }
            None if self.board == Board::Pc => format!("{guests} for guests; memory size unknown"),
            None => format!("{guests} for guests; memory size chosen to fit"),
        }
    }

    /// Writes the line of the devices with their servers and clients.
    fn write_devices(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let log = match self.log {
            Log::Com1 => "com1: kernel log",
            Log::Com2 => "com2: kernel log",
            Log::None => "no kernel log",
        };
        write!(f, "  devices  {log}")?;
        for (index, server) in self.servers.iter().enumerate() {
            match server.device {
                Some(device) => write!(f, "; {device}: server {}", server.name)?,
                None => write!(f, "; server {}", server.name)?,
            }
            let index = index as u8;
            let tasks = self.tasks.iter().map(|task| (&task.name, task.console == Some(index)));
            let vms = self.vms.iter().map(|vm| (&vm.name, vm.uses(index)));
            let clients: Vec<&str> = tasks
                .chain(vms)
                .filter(|(_, is_client)| *is_client)
                .map(|(name, _)| name.as_str())
                .collect();
            if !clients.is_empty() {
                write!(f, " for {}", clients.join(", "))?;
            }
        }
        for vm in &self.vms {
            for device in &vm.devices {
                write!(f, "; {device}: {} itself", vm.name)?;
            }
        }
        writeln!(f)
    }
}
