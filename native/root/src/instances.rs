//! Virtual machines: those of the description, and those created from its templates.

use heapless::String;
use proto::manage::{Refusal, is_name};
use proto::system::{MAX_NAME, MAX_VMS, System, Vm};

/// Name of a VM.
pub type Name = String<MAX_NAME>;

/// A virtual machine.
pub struct Instance<'a> {
    /// Its name.
    pub name: Name,
    /// Its description.
    pub plan: &'a Vm<'a>,
}

/// All VMs. The index of a VM never changes.
pub struct Instances<'a> {
    all: [Option<Instance<'a>>; MAX_VMS],
}

impl<'a> Instances<'a> {
    /// Creates the VMs of the description, without templates.
    pub fn new(system: &'a System<'a>) -> Self {
        let mut plans = system.vms.iter().filter(|vm| !vm.template);
        Self {
            all: core::array::from_fn(|_| {
                let plan = plans.next()?;
                // The description's names are short enough.
                Some(Instance { name: plan.name.try_into().ok()?, plan })
            }),
        }
    }

    /// Returns the VM with this index.
    pub fn get(&self, index: usize) -> Option<&Instance<'a>> {
        self.all.get(index)?.as_ref()
    }

    /// Returns the index of the VM with this name.
    pub fn find(&self, name: &str) -> Option<usize> {
        self.all.iter().position(|vm| vm.as_ref().is_some_and(|vm| vm.name == name))
    }

    /// Adds a VM; returns its index.
    pub fn add(&mut self, name: &str, plan: &'a Vm<'a>) -> Result<usize, Refusal> {
        if !is_name(name) {
            return Err(Refusal::BadName);
        }
        let index = self.all.iter().position(Option::is_none).ok_or(Refusal::Full)?;
        let name = name.try_into().map_err(|_| Refusal::BadName)?;
        self.all[index] = Some(Instance { name, plan });
        Ok(index)
    }

    /// Removes a VM.
    pub fn remove(&mut self, index: usize) {
        if let Some(entry) = self.all.get_mut(index) {
            *entry = None;
        }
    }
}

#[cfg(test)]
pub mod tests {
    use super::*;
    use proto::system::{Board, Device, OnReset, Restart, SerialPort, Server, ServerKind};

    pub fn vm(name: &'static str, template: bool) -> Vm<'static> {
        Vm {
            name,
            memory: 1 << 20,
            vcpus: 1,
            pins: heapless::Vec::new(),
            binary: "vmm",
            kernel: "kernel",
            initrd: None,
            command_line: "",
            console: None,
            priority: 10,
            cpu_time: None,
            restart: Restart::Never,
            on_reset: OnReset::Exit,
            kvmclock: true,
            virtio_console: false,
            transport: proto::system::VirtioTransport::Pci,
            vtlb: None,
            essential: true,
            template,
            disks: heapless::Vec::new(),
            nets: heapless::Vec::new(),
            devices: heapless::Vec::new(),
        }
    }

    pub fn server(name: &'static str) -> Server<'static> {
        Server {
            name,
            kind: ServerKind::Switch,
            device: Device::None,
            binary: "net",
            restart: Restart::OnCrash,
            priority: 40,
            cpu_time: None,
        }
    }

    pub fn system<const N: usize>(vms: [Vm<'static>; N]) -> System<'static> {
        System {
            board: Board::QemuQ35,
            log: SerialPort::None,
            cpus: 1,
            servers: heapless::Vec::new(),
            tasks: heapless::Vec::new(),
            vms: heapless::Vec::from_iter(vms),
            channels: heapless::Vec::new(),
        }
    }

    #[test]
    fn templates_are_not_started_but_copied() {
        let system = system([vm("small", true), vm("linux", false)]);
        let mut instances = Instances::new(&system);
        assert_eq!(instances.find("linux"), Some(0));
        assert_eq!(instances.find("small"), None);
        assert_eq!(instances.add("Bad", &system.vms[0]), Err(Refusal::BadName));
        for index in 1..MAX_VMS {
            assert_eq!(instances.add(&format!("copy-{index}"), &system.vms[0]), Ok(index));
        }
        assert_eq!(instances.add("more", &system.vms[0]), Err(Refusal::Full));
        instances.remove(5);
        assert!(instances.get(5).is_none());
        assert_eq!(instances.add("again", &system.vms[0]), Ok(5));
        assert_eq!(instances.get(5).map(|vm| vm.plan.name), Some("small"));
    }
}
