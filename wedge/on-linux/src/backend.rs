//! Back ends of the VM's devices: console rings, disk requests, network frames, and the device
//! process.

use core::fmt;
use core::ops::Range;

use host_linux::sys;
use proto::hosted::{MAX_DISKS, MAX_NETS, MAX_SHARES, Start, log};
use vmm_bus::backend::BlockInfo;
use vmm_bus::frames;
use vmm_bus::{BalloonBackend, Block, Messages, Net, Packets};
use vmm_machine::{DeviceBackend, Host, Level, Model, Slots};

use crate::state::shared::{ByteRing, event, shared};
use crate::state::{config, doorbell};
use crate::{balloon, clock, disk, kick, net, report};

const _: () = assert!(Level::Error.number() == log::ERROR);
const _: () = assert!(Level::Warning.number() == log::WARN);
const _: () = assert!(Level::Info.number() == log::INFO);

/// Host services of the device models, for one vCPU.
pub struct LinuxHost {
    log: u64,
}

impl LinuxHost {
    /// Creates the services with the loader's log level.
    pub fn new(start: &Start) -> Self {
        Self { log: start.log }
    }
}

impl Host for LinuxHost {
    fn counter(&self) -> u64 {
        clock::tsc()
    }

    fn put(&mut self, byte: u8) -> bool {
        put(&shared().output, byte)
    }

    fn take(&mut self) -> Option<u8> {
        take(&shared().input)
    }

    fn log(&mut self, level: Level, text: fmt::Arguments<'_>) {
        if level.number() <= self.log {
            report::print_line(level.number(), text);
        }
    }

    fn kick(&mut self, index: usize) {
        kick::raise_event(index, event::KICK);
    }
}

/// Sends a byte to the device process.
fn put(ring: &ByteRing, byte: u8) -> bool {
    let put = ring.put(byte);
    doorbell::notify();
    put
}

/// Receives a byte from the device process.
fn take(ring: &ByteRing) -> Option<u8> {
    let byte = ring.take();
    if byte.is_none() {
        // The ring has room: the device process may have more input.
        doorbell::notify();
    }
    byte
}

/// Largest number of PCI functions: disks, shared directories, entropy source, networks, vsock,
/// balloon and console, in this order.
pub const MAX_FUNCTIONS: usize = MAX_DISKS + MAX_SHARES + 4 + MAX_NETS;

/// Back end of a PCI function.
pub enum HostEndpoint {
    /// Disk workers, or a disk image process.
    Disk(disk::RequestEndpoint),
    /// The host's random number generator.
    Entropy,
    /// Host memory.
    Balloon(balloon::BalloonEndpoint),
    /// Stream of frames, or a tap device.
    Net(net::NetEndpoint),
    /// File server process.
    Share(disk::RequestEndpoint),
    /// Vsock process.
    Vsock(net::VsockEndpoint),
    /// Console socket, by the device process.
    Console,
}

impl DeviceBackend for HostEndpoint {
    fn block(&mut self) -> Option<&mut dyn Block> {
        match self {
            Self::Disk(disk) => Some(disk),
            _ => None,
        }
    }

    fn net(&mut self) -> Option<&mut dyn Net> {
        match self {
            Self::Net(net) => Some(net),
            _ => None,
        }
    }

    fn balloon(&mut self) -> Option<&mut dyn BalloonBackend> {
        match self {
            Self::Balloon(balloon) => Some(balloon),
            _ => None,
        }
    }

    fn messages(&mut self) -> Option<&mut dyn Messages> {
        match self {
            Self::Share(share) => Some(share),
            _ => None,
        }
    }

    fn packets(&mut self) -> Option<&mut dyn Packets> {
        match self {
            Self::Vsock(vsock) => Some(vsock),
            _ => None,
        }
    }

    fn put(&mut self, byte: u8) -> bool {
        put(&shared().console_output, byte)
    }

    fn take(&mut self) -> Option<u8> {
        take(&shared().console_input)
    }

    fn entropy(&mut self, to: &mut [u8]) -> bool {
        sys::random(to)
    }
}

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
}

/// Adds all PCI functions to the bus.
pub fn add_devices(slots: &mut Slots<HostEndpoint, MAX_FUNCTIONS>, start: &Start) -> DeviceSlots {
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
    let _ = slots.add(Model::Entropy, HostEndpoint::Entropy);
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
    let has_console = start.console != 0;
    let console =
        has_console.then(|| slots.add(Model::Console, HostEndpoint::Console).ok()).flatten();
    let first_net = disks + shares + 1;
    DeviceSlots {
        disks: 0..disks,
        shares: disks..disks + shares,
        nets: first_net..first_net + nets + usize::from(start.vsock != 0),
        balloon: balloon.map_or(0..0, |slot| slot..slot + 1),
        console: console.map_or(0..0, |slot| slot..slot + 1),
    }
}
