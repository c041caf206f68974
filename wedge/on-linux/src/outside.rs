//! The outside of the machine: the console's rings, the disks' requests, the networks' frames, and the device process.

use core::fmt;
use core::ops::Range;

use proto::wedge::{MAX_DISKS, MAX_NETS, MAX_SHARES, Start};
use vmm_bus::backend::BlockInfo;
use vmm_bus::frames;
use vmm_bus::{BalloonBackend, Block, Messages, Net, Packets};
use vmm_machine::{DeviceBackend, Host, Level, Model, Slots};

use crate::shared::{self, Ring, event, shared};
use crate::{balloon, device, disk, net, processes, report, sys};

/// The outside as the virtual CPU reaches it.
pub struct LinuxHost {
    log: u64,
}

impl LinuxHost {
    /// As the loader wants it.
    pub fn new(start: &Start) -> Self {
        Self { log: start.log }
    }
}

impl Host for LinuxHost {
    fn tsc(&self) -> u64 {
        crate::guest::tsc()
    }

    fn put(&mut self, byte: u8) -> bool {
        put(&shared().output, byte)
    }

    fn take(&mut self) -> Option<u8> {
        take(&shared().input)
    }

    fn log(&mut self, level: Level, text: fmt::Arguments<'_>) {
        if level.number() <= self.log {
            report::say_at(level.number(), text);
        }
    }

    fn kick(&mut self, index: usize) {
        device::tell(index, event::KICK);
    }
}

/// Puts a byte for the device process.
fn put(ring: &Ring, byte: u8) -> bool {
    let put = ring.put(byte);
    processes::ring();
    put
}

/// Takes a byte of the device process.
fn take(ring: &Ring) -> Option<u8> {
    let byte = ring.take();
    if byte.is_none() {
        // There may be more, now that there is room.
        processes::ring();
    }
    byte
}

/// PCI functions of a machine: disks, then shared directories, the source of random numbers, networks, vsock, the balloon
/// and the console.
pub const MAX_FUNCTIONS: usize = MAX_DISKS + MAX_SHARES + 4 + MAX_NETS;

/// What a PCI function is connected to.
pub enum Link {
    /// A file.
    Disk(disk::Link),
    /// The host's random numbers.
    Entropy,
    /// The host's memory.
    Balloon(balloon::Link),
    /// A stream of frames, or a tap device.
    Net(net::Link),
    /// A server of files.
    Share(disk::Link),
    /// Sockets of the host.
    Vsock(net::Packets),
    /// The device process.
    Console,
}

impl DeviceBackend for Link {
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

/// Slots of functions that events are about.
pub struct Filled {
    /// Of disks.
    pub disks: Range<usize>,
    /// Of shared directories.
    pub shares: Range<usize>,
    /// Of networks and vsock.
    pub nets: Range<usize>,
    /// Of the balloon.
    pub balloon: Range<usize>,
    /// Of the console.
    pub console: Range<usize>,
}

/// Fills the slots of the bus.
pub fn fill(slots: &mut Slots<Link, MAX_FUNCTIONS>, start: &Start) -> Filled {
    let disks = (start.disks as usize).min(MAX_DISKS);
    let shares = (start.shares as usize).min(MAX_SHARES);
    let nets = (start.nets as usize).min(MAX_NETS);
    for number in 0..disks {
        let record = shared::disk(number);
        let make =
            if record.is_elsewhere { disk::Link::with_device_process } else { disk::Link::new };
        let link = Link::Disk(make(disk::queue(number)));
        // There are as many slots.
        let _ = slots.add(Model::Block(BlockInfo::of_file(&record)), link);
    }
    for number in 0..shares {
        let tag = shared::share(number).tag;
        let link = disk::Link::with_device_process(disk::queue(MAX_DISKS + number));
        let _ = slots.add(Model::P9(tag), Link::Share(link));
    }
    let _ = slots.add(Model::Entropy, Link::Entropy);
    for number in 0..nets {
        let record = shared::net(number);
        let link = Link::Net(net::link(number, &record));
        let _ = slots.add(Model::Net(frames::info(&record)), link);
    }
    if start.vsock != 0 {
        let _ = slots.add(Model::Vsock(start.vsock), Link::Vsock(net::packets()));
    }
    let balloon = balloon::Link::new(start);
    let balloon = balloon.and_then(|link| slots.add(Model::Balloon, Link::Balloon(link)).ok());
    let has_console = start.console != 0;
    let console = has_console.then(|| slots.add(Model::Console, Link::Console).ok()).flatten();
    let first_net = disks + shares + 1;
    Filled {
        disks: 0..disks,
        shares: disks..disks + shares,
        nets: first_net..first_net + nets + usize::from(start.vsock != 0),
        balloon: balloon.map_or(0..0, |slot| slot..slot + 1),
        console: console.map_or(0..0, |slot| slot..slot + 1),
    }
}
