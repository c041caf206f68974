//! Back ends of the VM's devices: console rings, disk requests, network frames, and the device
//! process.

use core::fmt;
use core::ops::Range;
use core::sync::atomic::Ordering::Relaxed;

use host_linux::sys;
use proto::hosted::{MAX_DISKS, MAX_NETS, MAX_SHARES, Start, console, log};
use vmm_bus::backend::BlockInfo;
use vmm_bus::frames;
use vmm_bus::{BackendRef, ByteStream, DeviceBackend, EntropySource};
use vmm_machine::{Host, Level, Model, Slots};

use crate::clock::YieldRelax;
use crate::state::shared::{ByteRing, shared};
use crate::state::{config, doorbell};
use crate::{balloon, clock, disk, kick, net, report};

const _: () = assert!(Level::Error.number() == log::ERROR);
const _: () = assert!(Level::Warning.number() == log::WARN);
const _: () = assert!(Level::Info.number() == log::INFO);

/// Host services of the device models, for one vCPU.
pub struct LinuxHost {
    log: u64,
    serial: Rings,
}

impl LinuxHost {
    /// Creates the services with the loader's log level.
    pub fn new(start: &Start) -> Self {
        let shared = shared();
        let serial = Rings { output: &shared.output, input: &shared.input };
        Self { log: start.log, serial }
    }
}

impl Host for LinuxHost {
    fn counter(&self) -> u64 {
        clock::tsc()
    }

    fn serial(&mut self) -> BackendRef<'_> {
        BackendRef::Bytes(&mut self.serial)
    }

    fn log(&mut self, level: Level, text: fmt::Arguments<'_>) {
        if level.number() <= self.log {
            report::print_line(level.number(), text);
        }
    }

    fn kick(&mut self, index: usize) {
        kick::notify(index);
    }
}

/// Byte stream by rings to and from the device process.
pub struct Rings {
    output: &'static ByteRing,
    input: &'static ByteRing,
}

impl ByteStream for Rings {
    fn put(&mut self, byte: u8) -> bool {
        let put = self.output.put(byte);
        doorbell::notify();
        put
    }

    fn take(&mut self) -> Option<u8> {
        let byte = self.input.take();
        if byte.is_none() {
            // The ring has room: the device process may have more input.
            doorbell::notify();
        }
        byte
    }
}

/// The host's random number generator.
pub struct HostRandom;

impl EntropySource for HostRandom {
    fn fill(&mut self, to: &mut [u8]) -> bool {
        sys::random(to)
    }
}

/// Largest number of PCI functions: disks, shared directories, entropy source, networks, vsock,
/// balloon and console, in this order.
pub const MAX_FUNCTIONS: usize = MAX_DISKS + MAX_SHARES + 4 + MAX_NETS;

/// Back end of a PCI function.
pub enum HostEndpoint {
    /// Disk workers, or a disk image process.
    Disk(disk::RequestEndpoint),
    /// The host's random number generator.
    Entropy(HostRandom),
    /// Host memory.
    Balloon(balloon::BalloonEndpoint),
    /// Stream of frames, or a tap device.
    Net(net::NetEndpoint),
    /// File server process.
    Share(disk::RequestEndpoint),
    /// Vsock process.
    Vsock(net::VsockEndpoint),
    /// Console socket, by the device process.
    Console(Rings),
}

impl DeviceBackend for HostEndpoint {
    fn get(&mut self) -> BackendRef<'_> {
        match self {
            Self::Disk(disk) => BackendRef::Block(disk),
            Self::Entropy(source) => BackendRef::Entropy(source),
            Self::Balloon(balloon) => BackendRef::Balloon(balloon),
            Self::Net(net) => BackendRef::Net(net),
            Self::Share(share) => BackendRef::Messages(share),
            Self::Vsock(vsock) => BackendRef::Packets(vsock),
            Self::Console(rings) => BackendRef::Bytes(rings),
        }
    }
}

/// Slots of the bus.
pub type BusSlots = Slots<HostEndpoint, MAX_FUNCTIONS, YieldRelax>;

/// Slots of the PCI functions that handle each event.
pub struct DeviceSlots {
    /// Disks.
    pub disks: Range<usize>,
    /// Shared directories.
    pub shares: Range<usize>,
    /// Networks and vsock.
    pub nets: Range<usize>,
    /// Balloon.
    pub balloon: Range<usize>,
    /// Console.
    pub console: Range<usize>,
    /// The last of the networks is vsock.
    has_vsock: bool,
}

impl DeviceSlots {
    /// Publishes the vCPU that is to be notified of completions for a slot.
    pub fn set_target(&self, slot: usize, vcpu: usize) {
        let queue_target = |index| disk::queue(index).target.store(vcpu as u32, Relaxed);
        if self.disks.contains(&slot) {
            return queue_target(slot);
        } else if self.shares.contains(&slot) {
            return queue_target(MAX_DISKS + slot - self.shares.start);
        }
        let net_index = match slot {
            slot if self.has_vsock && slot + 1 == self.nets.end => net::VSOCK,
            slot if self.nets.contains(&slot) => slot - self.nets.start,
            _ => return,
        };
        if let Some(target) = shared().targets.get(net_index) {
            target.store(vcpu as u8, Relaxed);
        }
    }
}

/// Adds all PCI functions to the bus.
pub fn add_devices(slots: &mut BusSlots, start: &Start) -> DeviceSlots {
    let disks = (start.disks as usize).min(MAX_DISKS);
    let shares = (start.shares as usize).min(MAX_SHARES);
    let nets = (start.nets as usize).min(MAX_NETS);
    for index in 0..disks {
        let record = config::disk(index);
        let make = if record.is_external {
            disk::RequestEndpoint::with_device_process
        } else {
            disk::RequestEndpoint::new
        };
        let link = HostEndpoint::Disk(make(disk::queue(index)));
        // The bus has as many slots.
        let _ = slots.add(
            Model::Block(BlockInfo::of_file(record.sectors, record.read_only, record.serial)),
            link,
        );
    }
    for index in 0..shares {
        let tag = config::share(index).tag;
        let link = disk::RequestEndpoint::with_device_process(disk::queue(MAX_DISKS + index));
        let _ = slots.add(Model::P9(tag), HostEndpoint::Share(link));
    }
    let _ = slots.add(Model::Entropy, HostEndpoint::Entropy(HostRandom));
    for index in 0..nets {
        let record = config::net(index);
        let link = HostEndpoint::Net(net::link(index, &record));
        let _ = slots.add(Model::Net(frames::info(record.mac, record.mtu, record.is_tap())), link);
    }
    if start.vsock != 0 {
        let _ = slots.add(Model::Vsock(start.vsock), HostEndpoint::Vsock(net::packets()));
    }
    let balloon = balloon::BalloonEndpoint::new(start);
    let balloon =
        balloon.and_then(|link| slots.add(Model::Balloon, HostEndpoint::Balloon(link)).ok());
    let shared = shared();
    let rings = Rings { output: &shared.console_output, input: &shared.console_input };
    let model = match start.console {
        console::NONE => None,
        console::PORTS => Some(Model::Ports),
        _ => Some(Model::Console),
    };
    let console = model.and_then(|model| slots.add(model, HostEndpoint::Console(rings)).ok());
    let first_net = disks + shares + 1;
    DeviceSlots {
        disks: 0..disks,
        shares: disks..disks + shares,
        nets: first_net..first_net + nets + usize::from(start.vsock != 0),
        balloon: balloon.map_or(0..0, |slot| slot..slot + 1),
        console: console.map_or(0..0, |slot| slot..slot + 1),
        has_vsock: start.vsock != 0,
    }
}
