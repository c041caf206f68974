//! The world around a board of the targets `board` and `virt`: its host, and a back end for each
//! kind of device; and the steps of their inputs.

use std::collections::{BTreeMap, VecDeque};
use std::fmt;

use proto::channel::View;
use spin::relax::Spin;
use vmm_boot::virt as layout;
use vmm_bus::backend::{BlockInfo, ChannelInfo, NetInfo, Offload};
use vmm_bus::testing::{ScriptDisk, ScriptPeer, ScriptPort};
use vmm_bus::{BackendRef, ByteStream, DeviceBackend};
use vmm_machine::functions::Bus;
use vmm_machine::{Host, Level, Model, Slots};

use crate::input::Input;

/// CPUs of a board.
pub(crate) const CPUS: usize = 2;
/// Devices in slots.
pub(crate) const SLOTS: usize = 5;
/// Slot of the channel, and the pseudo slot of a change of its peer.
pub(crate) const CHANNEL: usize = 4;
pub(crate) const CHANGE: usize = 5;
const SECTORS: u64 = 64;
/// Bytes of registers of a function that the guest drives itself.
pub(crate) const OWN_REGISTERS: u64 = 0x4000;

/// Host of the board.
#[derive(Default)]
pub(crate) struct World {
    /// Its counter.
    pub(crate) tsc: u64,
    /// CPU that runs; [`CPUS`]: none.
    pub(crate) running: usize,
    /// The serial line.
    pub(crate) stream: Typed,
    /// Addresses of registers of functions that the guest drives itself, by function and base
    /// address.
    pub(crate) placed: BTreeMap<(usize, usize), u64>,
}

impl Host for World {
    fn counter(&self) -> u64 {
        self.tsc
    }

    fn serial(&mut self) -> BackendRef<'_> {
        BackendRef::Bytes(&mut self.stream)
    }

    fn log(&mut self, _: Level, text: fmt::Arguments<'_>) {
        assert!(!text.to_string().is_empty());
    }

    fn place_registers(&mut self, number: usize, index: usize, address: Option<u64>) -> bool {
        match address {
            Some(address) => {
                let window = layout::PCI_WINDOW..layout::PCI_WINDOW + layout::PCI_WINDOW_LENGTH;
                let last = address + OWN_REGISTERS - 1;
                assert!(window.contains(&address) && window.contains(&last), "{address:#x}");
                let is_over = |other: &u64| address.abs_diff(*other) < OWN_REGISTERS;
                assert!(!self.placed.values().any(is_over), "{address:#x} is in use");
                self.placed.insert((number, index), address);
            }
            None => assert!(self.placed.remove(&(number, index)).is_some(), "nothing is there"),
        }
        address.is_some()
    }

    fn kick(&mut self, index: usize) {
        assert!(index < CPUS && index != self.running, "a kick of {index}");
    }
}

/// A line that refuses a letter.
#[derive(Default)]
pub(crate) struct Typed(pub(crate) VecDeque<u8>);

impl ByteStream for Typed {
    fn put(&mut self, byte: u8) -> bool {
        byte != b'f'
    }

    fn take(&mut self) -> Option<u8> {
        self.0.pop_front()
    }
}

/// Back end of a device in a slot.
pub(crate) enum Connected {
    Disk(ScriptDisk),
    Port(ScriptPort),
    Line(Typed),
    Entropy(usize),
    Peer(ScriptPeer),
}

impl DeviceBackend for Connected {
    fn get(&mut self) -> BackendRef<'_> {
        match self {
            Self::Disk(disk) => BackendRef::Block(disk),
            Self::Port(port) => BackendRef::Net(port),
            Self::Line(line) => BackendRef::Bytes(line),
            Self::Entropy(bytes) => BackendRef::Entropy(bytes),
            Self::Peer(peer) => BackendRef::Channel(peer),
        }
    }
}

impl Connected {
    /// Lets something arrive from outside.
    pub(crate) fn arrive(&mut self, length: usize) {
        match self {
            Self::Disk(disk) => {
                if let Some(request) = disk.requests.get(disk.ended.len()) {
                    disk.complete(request.0);
                }
            }
            Self::Port(port) if port.waiting.len() < 16 => {
                port.waiting.push_back((Offload::default(), vec![5; length]));
            }
            Self::Line(line) => line.0.extend(std::iter::repeat_n(b'i', length % 64)),
            Self::Entropy(bytes) => *bytes += length % 64,
            Self::Port(_) | Self::Peer(_) => {}
        }
    }

    /// Changes what the peer of a channel shows.
    pub(crate) fn change(&mut self, length: usize) {
        if let Self::Peer(peer) = self {
            peer.view = View::unpack([length as u64 * 0x0101_0101; 4]);
        }
    }
}

/// Creates a device of each kind in slots on this bus.
pub(crate) fn connected<B: Bus>(bus: B) -> Slots<Connected, SLOTS, Spin, B> {
    let info = BlockInfo {
        sectors: SECTORS,
        discard: true,
        write_zeroes: true,
        max_bytes: 0x2000,
        ..BlockInfo::default()
    };
    let channel = ChannelInfo {
        number: 0,
        side: 1,
        own_id: 1,
        peer_id: 2,
        size: 1 << 14,
        doorbell: true,
        own_name: [b'a'; _],
        peer_name: [b'b'; _],
    };
    let net = NetInfo { mac: [2; 6], ..NetInfo::default() };
    let mut slots = Slots::on(bus);
    for (device, outside) in [
        (Model::Block(info), Connected::Disk(ScriptDisk::new(SECTORS as usize * 512, 8))),
        (Model::Net(net), Connected::Port(ScriptPort { room: 100, ..ScriptPort::default() })),
        (Model::Console, Connected::Line(Typed::default())),
        (Model::Entropy, Connected::Entropy(100)),
        (Model::Channel(channel), Connected::Peer(ScriptPeer::default())),
    ] {
        assert!(slots.add(device, outside).is_ok());
    }
    slots
}

/// Executes the steps of an input until one ends the VM: each begins with a byte for its kind,
/// whose top bit selects the CPU.
pub(crate) fn run_steps<S: Copy>(
    input: &mut Input<'_>,
    steps: &[S],
    mut act: impl FnMut(S, usize, &mut Input<'_>) -> bool,
) {
    while !input.is_empty() {
        let byte = input.byte();
        let cpu = usize::from(byte >> 7);
        if !act(steps[usize::from(byte & 0x7f) % steps.len()], cpu, input) {
            break;
        }
    }
}

/// Reads an address: one of these places (8), and an offset (16).
pub(crate) fn place(input: &mut Input<'_>, places: &[u64]) -> u64 {
    places[usize::from(input.byte()) % places.len()] + u64::from(input.half())
}
