//! Sessions in shared memory between clients and servers, and devices of servers.
//!
//! Root allocates a session's memory when its first side starts, and keeps it permanently: a device
//! may still write to it after both sides have ended, until the next server has reset the device.
//! The same holds for a server's DMA memory. So no address programmed by an old server ever belongs
//! to another owner.
//!
//! A server keeps its PCI function, too: the description names it by its position among those of
//! its class, which changes if one becomes absent, and the clients repeat unanswered writes to the
//! next server.

use abi::args::irq_flags;
use abi::{PAGE_SIZE, rights};
use heapless::Vec;
use hw_tables::pci::parts_without_table;
use hw_tables::virtio_mmio;
use native_rt::start::Boot;
use native_rt::{Irq, Status, Window};
use proto::service::{
    Attachment, DiskClient, DiskDriver, DiskServer, MAX_SESSIONS, NetServer, Service, SwitchPort,
};
use proto::start::{
    DEVICES, DEVICES_LENGTH, MEMORY, RangeKind, Role, SESSION_STRIDE, SESSIONS, event, slot,
};
use proto::system::{
    Device, MAX_SERVERS, MAX_VMS, PciClass, Server, ServerKind, System, VirtioClass, Vm,
};
use proto::{disk, net};

use crate::child::{Child, Resources, StartError, trigger};
use crate::instances::Instances;
use crate::iommu::{Iommu, NoRoom};
use crate::manager::{CHILDREN, FIRST_VM};
use crate::memory::{Memory, physical};
use crate::mmio;
use crate::pci::{Address, Bar, Function, Pci};

/// Maximum number of sessions in a system.
const MAX_ALL: usize = MAX_SERVERS * MAX_SESSIONS;
/// DMA memory of a server, in pages: queues, commands and tables; for a switch, frames too.
const DISK_PAGES: u64 = 32;
const SWITCH_PAGES: u64 = 34;
const DMA_PAGES_ALIGN: u64 = 16;
/// Owner of permanent memory: sessions, DMA memory, channels.
pub const PERMANENT: usize = CHILDREN;

/// A session.
struct Session {
    service: Service,
    server: usize,
    client: usize,
    /// Index of its VM in the description.
    plan: usize,
    /// Its index with the server, and with the client.
    of_server: usize,
    of_client: usize,
    /// Index into the client's disks or network cards.
    index: usize,
    memory: Option<Window>,
}

impl Session {
    /// Returns whether a VM with this index is the session's client. A VM created from a template
    /// may reuse the index of a destroyed one.
    fn is_client(&self, number: usize, vm: &Vm, system: &System) -> bool {
        let plan = system.vms.get(self.plan);
        self.client == number && plan.is_some_and(|plan| core::ptr::eq(plan, vm))
    }

    /// Returns the client's child, if it runs.
    fn find_client<'c>(
        &self,
        system: &System,
        instances: &Instances,
        children: &'c [Option<Child>],
    ) -> Option<&'c Child> {
        let vm = instances.get(self.client.checked_sub(FIRST_VM)?)?.plan;
        children.get(self.client)?.as_ref().filter(|_| self.is_client(self.client, vm, system))
    }
}

/// Driver that a server needs for its device.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Driver {
    Disk(DiskDriver),
    NetworkCard,
}

impl Driver {
    fn of_virtio(class: VirtioClass) -> Self {
        match class {
            VirtioClass::Block => Self::Disk(DiskDriver::Virtio),
            VirtioClass::Net => Self::NetworkCard,
        }
    }

    /// Pages of DMA memory.
    fn pages(self) -> u64 {
        match self {
            Self::Disk(_) => DISK_PAGES,
            Self::NetworkCard => SWITCH_PAGES,
        }
    }
}

/// The description, the VMs, and the running children.
#[derive(Clone, Copy)]
pub struct SystemView<'e> {
    /// The description.
    pub system: &'e System<'e>,
    /// Virtual machines.
    pub instances: &'e Instances<'e>,
    /// Children, by index.
    pub children: &'e [Option<Child>],
}

/// All sessions of the system, and the DMA memory of devices.
pub struct Sessions {
    sessions: Vec<Session, MAX_ALL>,
    dma: [Option<Window>; MAX_SERVERS],
    /// The function of each server, from its first start on.
    functions: [Option<Address>; MAX_SERVERS],
    /// The IOMMU, if the platform has one.
    iommu: Option<Iommu>,
}

impl Sessions {
    /// Returns the sessions of the description. Ignores those beyond the limits of a client or
    /// server, which `parador system check` rejects.
    fn described(system: &System) -> Vec<Session, MAX_ALL> {
        let mut sessions: Vec<Session, MAX_ALL> = Vec::new();
        // Templates have none, and VMs are numbered without them at first.
        let started = system.vms.iter().enumerate().filter(|(_, vm)| !vm.template);
        for (vm, (index_of_plan, plan)) in started.enumerate().take(MAX_VMS) {
            let client = FIRST_VM + vm;
            let disks = plan.disks.iter().map(|disk| (Service::Disk, disk.server));
            let nets = plan.nets.iter().map(|net| (Service::Net, net.server));
            let disks = disks.enumerate();
            for (of_client, (index, (service, server))) in disks.chain(nets.enumerate()).enumerate()
            {
                let server = usize::from(server);
                let of_server = sessions.iter().filter(|session| session.server == server).count();
                if of_server < MAX_SESSIONS && of_client < MAX_SESSIONS {
                    // The limits of all servers together are `MAX_ALL`.
                    let _ = sessions.push(Session {
                        service,
                        server,
                        client,
                        plan: index_of_plan,
                        of_server,
                        of_client,
                        index,
                        memory: None,
                    });
                }
            }
        }
        sessions
    }

    /// Creates the sessions of the description, and enables the IOMMU.
    pub fn new(system: &System, boot: &Boot, memory: &mut Memory) -> Self {
        if let Some(pci) = Pci::find(boot) {
            pci.assign();
        }
        let iommu = Iommu::new(boot, memory, PERMANENT);
        Self {
            sessions: Self::described(system),
            dma: [None; MAX_SERVERS],
            functions: [None; MAX_SERVERS],
            iommu,
        }
    }

    /// Connects a child to its side of its sessions: maps their memory, and delegates each side's
    /// notifications to the peer. `vm`: the child is this VM, otherwise a server.
    fn connect(
        &mut self,
        number: usize,
        vm: Option<&Vm>,
        child: &mut Child,
        resources: &mut Resources,
        view: SystemView,
    ) -> Result<(), StartError> {
        let SystemView { system, instances, children } = view;
        for session in &mut self.sessions {
            let (own, other, there) = match vm {
                None if session.server == number => {
                    let client = session.find_client(system, instances, children);
                    (session.of_server, client, session.of_client)
                }
                Some(vm) if session.is_client(number, vm, system) => {
                    let server = children.get(session.server).and_then(Option::as_ref);
                    (session.of_client, server, session.of_server)
                }
                _ => continue,
            };
            let memory = match session.memory {
                Some(memory) => memory,
                None => {
                    let bytes = match session.service {
                        Service::Disk => disk::SESSION_BYTES,
                        Service::Net => net::SESSION_BYTES,
                    };
                    let pages = bytes / PAGE_SIZE;
                    let memory = &mut resources.memory;
                    let window = memory.allocate_aligned(PERMANENT, pages, 1 << pages.ilog2());
                    *session.memory.insert(window.ok_or(StartError::Memory)?)
                }
            };
            let address = SESSIONS + own as u64 * SESSION_STRIDE;
            child.add_window(RangeKind::Session, memory, address, physical(memory))?;
            if let Some(other) = other {
                let peer = match vm {
                    Some(_) => system.servers.get(session.server).map(|server| server.name),
                    None => system.vms.get(session.plan).map(|vm| vm.name),
                };
                connect_peers(
                    || other.give_session_notifications(child, own),
                    || child.give_session_notifications(other, there),
                    |error| warn_of_peer(peer, error),
                )?;
            }
        }
        Ok(())
    }

    /// Connects a VM; returns the description for its VMM.
    pub fn connect_client(
        &mut self,
        number: usize,
        vm: &Vm,
        child: &mut Child,
        resources: &mut Resources,
        view: SystemView,
    ) -> Result<Vec<Attachment, MAX_SESSIONS>, StartError> {
        self.connect(number, Some(vm), child, resources, view)?;
        let own = self.sessions.iter();
        let own = own.filter(|session| session.is_client(number, vm, view.system));
        Ok(own
            .map(|session| Attachment {
                service: session.service,
                signal: event::session(session.of_server),
            })
            .collect())
    }

    /// Connects a disk or network server and delegates its device; returns its role.
    pub fn connect_server(
        &mut self,
        number: usize,
        server: &Server,
        child: &mut Child,
        resources: &mut Resources,
        view: SystemView,
    ) -> Result<Role<'static>, StartError> {
        let system = view.system;
        let (driver, function) = match server.device {
            Device::Pci(class, index) => {
                let driver = match class {
                    PciClass::Virtio(class) => Driver::of_virtio(class),
                    PciClass::Ahci(port) => Driver::Disk(DiskDriver::Ahci(port)),
                };
                self.add_dma(number, child, resources, driver)?;
                let function = self.add_function(number, child, resources, class, index)?;
                (Some(driver), Some(function))
            }
            Device::Mmio(class, index) => {
                let driver = Driver::of_virtio(class);
                self.add_dma(number, child, resources, driver)?;
                add_transport(child, resources, class, index)?;
                (Some(driver), None)
            }
            Device::None => (None, None),
            Device::Serial(_) => return Err(StartError::Device),
        };
        self.connect(number, None, child, resources, view)?;
        if let (Some(iommu), Some(function)) = (&mut self.iommu, function) {
            let own = self.sessions.iter().filter(|session| session.server == number);
            let windows = self.dma[number].into_iter().chain(own.filter_map(|own| own.memory));
            let memory = &mut resources.memory;
            let done = iommu.allow(memory, PERMANENT, number, function.address, windows);
            done.map_err(|NoRoom| StartError::Memory)?;
        }
        if let Some(function) = function {
            function.start();
        }
        let own = self.sessions.iter().filter(|session| session.server == number);
        let plans = own.filter_map(|session| {
            let signal = event::session(session.of_client);
            Some((session, system.vms.get(session.plan)?, signal))
        });
        match (server.kind, driver) {
            (ServerKind::Block, Some(Driver::Disk(driver))) => {
                let client = |(session, vm, signal): (&Session, &Vm, u64)| {
                    let disk = vm.disks.get(session.index)?;
                    Some(DiskClient { part: disk.part, read_only: disk.read_only, signal })
                };
                Ok(Role::Disk(DiskServer { driver, clients: plans.filter_map(client).collect() }))
            }
            (ServerKind::Switch, None | Some(Driver::NetworkCard)) => {
                let port = |(session, vm, signal): (&Session, &Vm, u64)| {
                    let net = vm.nets.get(session.index)?;
                    Some(SwitchPort { mac: net.mac, group: net.group, rate: net.rate, signal })
                };
                let uplink = driver.is_some();
                Ok(Role::Net(NetServer { uplink, ports: plans.filter_map(port).collect() }))
            }
            _ => Err(StartError::Device),
        }
    }

    /// Delegates a PCI function to a server: registers, configuration (read-only), and its
    /// interrupt.
    fn add_function<'r>(
        &mut self,
        number: usize,
        child: &mut Child,
        resources: &mut Resources<'r>,
        class: PciClass,
        index: u8,
    ) -> Result<Function<'r>, StartError> {
        let boot = resources.boot;
        let function = self.function(boot, number, class, index)?;
        self.keep_function(number, function.address)?;
        if !function.disable() {
            return Err(StartError::Device);
        }
        let bars = function.bars();
        let mut address = DEVICES;
        let mut next = |length: u64| {
            let at = address.checked_next_multiple_of(length)?;
            address = at.checked_add(length).filter(|&end| end <= DEVICES + DEVICES_LENGTH)?;
            Some(at)
        };
        let place = next(PAGE_SIZE).ok_or(StartError::Place)?;
        let window =
            boot.device_pages(function.configuration, PAGE_SIZE).ok_or(StartError::Device)?;
        child.add_registers(RangeKind::Configuration, window, place, rights::READ, 0, PAGE_SIZE)?;
        for bar in &bars {
            let length = bar.length.max(PAGE_SIZE);
            // A register range larger than the whole window is memory of a graphics card, not of a
            // disk.
            let Some(place) = next(length) else { continue };
            let window = boot.device_pages(bar.base, bar.length).ok_or(StartError::Device)?;
            if bar.base % PAGE_SIZE != 0 {
                native_rt::warn!(
                    "PCI function {}: registers {} begin in a page",
                    function.address,
                    bar.number
                );
                continue;
            }
            // Firmware may put small registers of several functions into one page.
            if bar.length < PAGE_SIZE && function.shares_pages(bar) {
                return Err(StartError::SharedPage);
            }
            let to = (place, bar.number.into());
            add_bar(child, &function, bar, window, to, rights::READ | rights::WRITE)?;
        }
        self.enable_function(number, child, resources, (&function, &bars))?;
        native_rt::info!("server drives PCI function {}", function.address);
        Ok(function)
    }

    /// Gives a server the interrupt of a function, which has registers `bars`, and enables it.
    fn enable_function(
        &mut self,
        number: usize,
        child: &mut Child,
        resources: &mut Resources<'_>,
        (function, bars): (&Function<'_>, &[Bar]),
    ) -> Result<(), StartError> {
        if let Some(line) = function.line() {
            let interrupt = (line.interrupt, trigger(line.is_level));
            child.add_interrupt(resources, interrupt, slot::DEVICE).map_err(of_line)?;
            function.enable_line();
        } else {
            let irq = child.add_interrupt(resources, (0, irq_flags::MESSAGE), slot::DEVICE)?;
            let mut message = irq.message()?;
            if let Some(iommu) = &mut self.iommu {
                let remapped = iommu.message(&mut resources.memory, PERMANENT, number, message);
                message = remapped.map_err(|NoRoom| StartError::Memory)?;
            }
            let (address, data) = message;
            if !function.enable(bars, address, data as u32) {
                return Err(StartError::Device);
            }
        }
        Ok(())
    }

    /// Maps a server's DMA memory, which outlives it.
    fn add_dma(
        &mut self,
        number: usize,
        child: &mut Child,
        resources: &mut Resources,
        driver: Driver,
    ) -> Result<(), StartError> {
        let memory = self.dma.get_mut(number).ok_or(StartError::Memory)?;
        if memory.is_none() {
            let pages = driver.pages();
            *memory = resources.memory.allocate_aligned(PERMANENT, pages, DMA_PAGES_ALIGN);
        }
        let window = memory.ok_or(StartError::Memory)?;
        child.add_window(RangeKind::Dma, window, MEMORY, physical(window))
    }

    /// Lets a server's interrupt of an I/O APIC pass the IOMMU.
    pub fn add_line(&mut self, interrupt: Irq) -> Result<(), StartError> {
        if let Some(iommu) = &mut self.iommu {
            iommu.add_line(interrupt.message()?);
        }
        Ok(())
    }

    /// Handles the end of a server: its device must not access memory any more.
    pub fn server_ended(&mut self, boot: &Boot, number: usize, server: &Server) {
        if let Some(address) = self.functions.get(number).copied().flatten()
            && !self.is_of_another(number, address)
        {
            // The log reports the device's own state.
            match Pci::find(boot).and_then(|pci| pci.function(address)) {
                Some(function) if function.disable() => {
                    native_rt::info!("PCI function {address} is disabled");
                }
                Some(_) => native_rt::error!("cannot disable PCI function {address}"),
                None => native_rt::error!("PCI function {address} is absent"),
            }
            if let Some(iommu) = &mut self.iommu {
                iommu.deny(number, address);
            }
        }
        if let Device::Mmio(class, index) = server.device
            && let Ok(place) = mmio::find(boot, class, index)
        {
            if mmio::reset(boot, &place) {
                native_rt::info!("virtio device at {:#x} is reset", place.base);
            } else {
                native_rt::error!("cannot reset the virtio device at {:#x}", place.base);
            }
        }
        if let Some(iommu) = &mut self.iommu {
            iommu.report();
        }
    }

    /// Returns the function that a server has had since its first start; before that, the one at a
    /// position.
    fn function<'b>(
        &self,
        boot: &'b Boot,
        number: usize,
        class: PciClass,
        index: u8,
    ) -> Result<Function<'b>, StartError> {
        let Some(kept) = self.functions.get(number).copied().flatten() else {
            return find(boot, class, index).ok_or(StartError::Device);
        };
        let function = Pci::find(boot).and_then(|pci| pci.function(kept));
        function.filter(|found| found.is(class)).ok_or(StartError::Absent(kept))
    }

    /// Keeps a function for a server; fails if it is another server's, or a VM drives it.
    fn keep_function(&mut self, number: usize, function: Address) -> Result<(), StartError> {
        if self.is_of_another(number, function) {
            return Err(StartError::Taken);
        }
        *self.functions.get_mut(number).ok_or(StartError::Device)? = Some(function);
        Ok(())
    }

    /// Returns whether a function is another server's, running or not, or another child drives it.
    fn is_of_another(&self, number: usize, function: Address) -> bool {
        let mut others = self.functions.iter().enumerate().filter(|(other, _)| *other != number);
        others.any(|(_, kept)| *kept == Some(function))
            || self.iommu.as_ref().is_some_and(|iommu| iommu.is_of_another(number, function))
    }

    /// The IOMMU, if the platform has one.
    pub fn iommu(&mut self) -> Option<&mut Iommu> {
        self.iommu.as_mut()
    }

    /// Logs requests of devices that the IOMMU blocked. Returns a running server or VM whose device
    /// made one; it is to be stopped, and the function to be called again.
    pub fn report(&mut self) -> Option<usize> {
        let iommu = self.iommu.as_mut()?;
        iommu.report();
        iommu.take_offender()
    }

    /// Returns whether the IOMMU's log has to be read now and then.
    pub fn has_guarded_devices(&self) -> bool {
        self.iommu.as_ref().is_some_and(Iommu::is_used)
    }
}

/// Lets a starting child and a running peer signal each other: `to_child` and `to_peer` delegate
/// the notifications. Only a failure of `to_child` is the child's. A failure of `to_peer` is passed
/// to `lost`: the peer can cause it, as it may occupy its own slots and use up its own quota, and
/// must not keep a server from starting that others use.
pub fn connect_peers(
    to_child: impl FnOnce() -> Result<(), StartError>,
    to_peer: impl FnOnce() -> Result<(), StartError>,
    lost: impl FnOnce(StartError),
) -> Result<(), StartError> {
    to_child()?;
    if let Err(error) = to_peer() {
        lost(error);
    }
    Ok(())
}

/// Logs that a peer of a starting child cannot signal it.
pub fn warn_of_peer(peer: Option<&str>, error: StartError) {
    let peer = peer.unwrap_or("?");
    native_rt::warn!(
        "{peer} cannot signal a child that starts, as it occupies the slot or has used up its \
         quota: {error}; restart {peer}"
    );
}

/// Delegates a virtio device over MMIO to a server: registers and interrupt.
fn add_transport(
    child: &mut Child,
    resources: &mut Resources,
    class: VirtioClass,
    index: u8,
) -> Result<(), StartError> {
    let boot = resources.boot;
    let place = mmio::find(boot, class, index)?;
    if !mmio::reset(boot, &place) {
        return Err(StartError::Device);
    }
    let both = rights::READ | rights::WRITE;
    child.add_mmio_device(resources, (place, virtio_mmio::LENGTH), (0, slot::DEVICE, both))?;
    native_rt::info!("server drives virtio device at {:#x}", place.base);
    Ok(())
}

/// Reason why the interrupt by line of a server or VM cannot be created.
pub fn of_line(error: StartError) -> StartError {
    match error {
        StartError::Kernel(Status::Busy) => StartError::SharedLine,
        error => error,
    }
}

/// Returns function `index` of a class.
pub fn find(boot: &Boot, class: PciClass, index: u8) -> Option<Function<'_>> {
    Pci::find(boot)?.nth(class, index)
}

/// Maps a function's registers at an address, with these rights, as range `number`, without the
/// pages of its interrupt table: an access to these faults, and no driver needs them. Registers
/// without other pages are no range.
pub fn add_bar(
    child: &mut Child,
    function: &Function,
    bar: &Bar,
    window: Window,
    (place, number): (u64, u64),
    rights: u8,
) -> Result<(), StartError> {
    let table = function.table().filter(|&(number, ..)| number == bar.number);
    let table = table.map(|(_, offset, length)| (offset, length));
    let mut is_empty = true;
    for (offset, length) in parts_without_table(table, window.length(), PAGE_SIZE) {
        let part = window.part(offset, length).ok_or(StartError::Device)?;
        child.map(part, place + offset, rights)?;
        is_empty = false;
    }
    match is_empty {
        true => Ok(()),
        false => child.add_known_range(RangeKind::Registers, place, bar.length, number),
    }
}

#[cfg(test)]
mod tests {
    use abi::boot::BootInfo;
    use proto::service::DiskRange;
    use proto::system::{VmDisk, VmNet};

    use super::*;
    use crate::instances::tests::{system, vm};
    use crate::pass_through::tests::WITHOUT_DEVICES;

    #[test]
    fn a_line_that_another_server_has_is_named() {
        let text = of_line(StartError::Kernel(Status::Busy)).to_string();
        assert!(text.starts_with("another server has the device's interrupt line"), "{text}");
        assert_eq!(of_line(StartError::Kernel(Status::NoQuota)).to_string(), "Kernel(NoQuota)");
    }

    #[test]
    fn a_peer_that_refuses_a_capability_harms_itself_only() {
        let busy = StartError::Kernel(Status::Busy);
        let connect = |own: Result<(), StartError>, peers: Result<(), StartError>| {
            let mut lost = None;
            let outcome = connect_peers(|| own, || peers, |error| lost = Some(error));
            (outcome, lost)
        };
        assert_eq!(connect(Ok(()), Ok(())), (Ok(()), None));
        assert_eq!(connect(Ok(()), Err(busy)), (Ok(()), Some(busy)), "the server starts");
        assert_eq!(connect(Err(busy), Ok(())), (Err(busy), None));
    }

    #[test]
    fn all_servers_can_have_all_their_sessions() {
        let mut vms: [_; MAX_VMS] = core::array::from_fn(|_| vm("guest", false));
        for vm in &mut vms {
            vm.disks.extend((0..4).map(|server| VmDisk {
                server,
                part: DiskRange::WHOLE,
                read_only: false,
            }));
            vm.nets.extend((4..8).map(|server| VmNet { server, mac: [2; 6], group: 0, rate: 0 }));
        }
        let sessions = Sessions::described(&system(vms));
        assert_eq!(sessions.len(), MAX_SERVERS * MAX_SESSIONS);
        for (server, of_server) in [(0, 0), (MAX_SERVERS - 1, MAX_SESSIONS - 1)] {
            let is = |it: &&Session| it.server == server && it.of_server == of_server;
            assert_eq!(sessions.iter().filter(is).count(), 1);
        }
    }

    /// Also without an IOMMU.
    #[test]
    fn a_server_keeps_its_function() {
        let mut sessions = Sessions {
            sessions: Vec::new(),
            dma: [None; MAX_SERVERS],
            functions: [None; MAX_SERVERS],
            iommu: None,
        };
        let [first, second] = [0x18, 0x20].map(Address::from_number);
        assert_eq!(sessions.keep_function(0, first), Ok(()));
        assert_eq!(sessions.keep_function(1, second), Ok(()));
        assert_eq!(sessions.keep_function(0, first), Ok(()), "a restart");
        // The first function is absent, so others have its position.
        assert_eq!(sessions.keep_function(0, second), Err(StartError::Taken));
        assert_eq!(sessions.keep_function(2, second), Err(StartError::Taken));
        static MACHINE: BootInfo = WITHOUT_DEVICES;
        let boot = Boot { info: &MACHINE, bundle: &[] };
        let class = PciClass::Virtio(VirtioClass::Block);
        let found = |number| sessions.function(&boot, number, class, 0).map(|it| it.address);
        assert_eq!(found(0), Err(StartError::Absent(first)));
        assert_eq!(found(2), Err(StartError::Device));
        let text = StartError::Absent(first).to_string();
        assert!(text.starts_with("PCI function 00:03.0, which the server had"), "{text}");
    }

    #[test]
    fn a_session_is_of_one_virtual_machine_and_not_of_a_number() {
        let system = system([vm("with-disk", false), vm("small", true)]);
        let mut instances = Instances::new(&system);
        let session = Session {
            service: Service::Disk,
            server: 0,
            client: FIRST_VM,
            plan: 0,
            of_server: 0,
            of_client: 0,
            index: 0,
            memory: None,
        };
        let is_client = |instances: &Instances, index| {
            let vm = instances.get(index).map(|instance| instance.plan);
            vm.is_some_and(|vm| session.is_client(FIRST_VM + index, vm, &system))
        };
        assert!(is_client(&instances, 0));
        // Destroyed, and another VM created in its place.
        instances.remove(0);
        assert!(!is_client(&instances, 0));
        assert_eq!(instances.add("new", &system.vms[1]), Ok(0));
        assert!(!is_client(&instances, 0));
    }
}
