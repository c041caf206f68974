//! PCI functions of a board with a PCI bus.
//!
//! Each slot has a lock for its function and back end, so one thread at a time calls a back end.
//! The lock of the board is taken inside of it, never the other way round. Device 0 is the host
//! bridge. The first 31 slots are functions 0 of the other devices, the next ones functions 1 of
//! devices 1, 2 ... ([`slot_of`]).

use spin::mutex::SpinMutex;
use spin::relax::{RelaxStrategy, Spin};
use vmm_bus::backend::{BlockInfo, ChannelInfo, NetInfo};
use vmm_bus::{BackendRef, DeviceBackend};
use vmm_dev::channel;
use vmm_dev::pci::{ConfigTarget, Function, spec::DEVICES};
use vmm_dev::virtio::balloon;
use vmm_dev::virtio::blk::Blk;
use vmm_dev::virtio::console::Console;
use vmm_dev::virtio::entropy::Entropy;
use vmm_dev::virtio::net::NetCard;
use vmm_dev::virtio::p9::{self, P9};
use vmm_dev::virtio::pci::{Pci, spec};
#[cfg(feature = "ports")]
use vmm_dev::virtio::ports::Ports;
use vmm_dev::virtio::vsock::Vsock;

use crate::layout;

/// Maximum number of functions of a board, without the host bridge: 8 disks, 16 shared directories,
/// 4 networks, console, balloon, entropy source and vsock.
pub const MAX_FUNCTIONS: usize = 32;

/// Devices of the bus besides the host bridge.
const DEVICES_WITH_SLOTS: usize = DEVICES as usize - 1;

/// Place of a configuration space on the bus.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Place {
    /// The host bridge.
    Bridge,
    /// The function in this slot, which may not exist.
    Slot(usize),
    /// No function.
    None,
}

/// Returns the place of a configuration space on the bus.
pub fn slot_of(target: ConfigTarget) -> Place {
    match (usize::from(target.device).checked_sub(1), target.function) {
        (None, 0) => Place::Bridge,
        (None, _) => Place::None,
        (Some(device), function) => {
            Place::Slot(device + DEVICES_WITH_SLOTS * usize::from(function))
        }
    }
}

/// Returns the slot of function 1 of the device whose function 0 is in `slot`, if it has one.
pub fn second_function(slot: usize) -> Option<usize> {
    (slot < DEVICES_WITH_SLOTS).then_some(slot + DEVICES_WITH_SLOTS)
}

/// A call of a function and its back end.
pub type FunctionCall<'a> = &'a mut dyn FnMut(&mut dyn Function, &mut dyn DeviceBackend);

/// PCI functions of a board.
pub trait Functions {
    /// Number of slots, at most [`MAX_FUNCTIONS`], constant. 0: the board has no PCI.
    fn slots(&self) -> usize;
    /// Calls the function in a slot and its back end, under their lock; not if the slot is empty.
    fn with(&self, slot: usize, call: FunctionCall<'_>);
    /// Slot of the channel with this number.
    fn channel(&self, number: u64) -> Option<usize>;
    /// Resets all functions to their power-on state for a new boot. Disks drop outstanding
    /// requests, channels their shares.
    fn power_on(&self);
}

/// A board without PCI.
impl Functions for () {
    #[inline]
    fn slots(&self) -> usize {
        0
    }

    #[inline]
    fn with(&self, _: usize, _: FunctionCall<'_>) {}

    fn channel(&self, _: u64) -> Option<usize> {
        None
    }

    fn power_on(&self) {}
}

/// Functions in another place, or a board without PCI.
impl<F: Functions + ?Sized> Functions for Option<&F> {
    #[inline]
    fn slots(&self) -> usize {
        self.map_or(0, Functions::slots)
    }

    fn with(&self, slot: usize, call: FunctionCall<'_>) {
        if let Some(functions) = self {
            functions.with(slot, call);
        }
    }

    fn channel(&self, number: u64) -> Option<usize> {
        self.and_then(|functions| functions.channel(number))
    }

    fn power_on(&self) {
        if let Some(functions) = self {
            functions.power_on();
        }
    }
}

/// Kind and properties of a device to create.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Model {
    /// Block device; its back end is a [`BackendRef::Block`].
    Block(BlockInfo),
    /// Network device; its back end is a [`BackendRef::Net`].
    Net(NetInfo),
    /// Console; its back end is a [`BackendRef::Bytes`].
    Console,
    /// Console with several ports; its back end is a [`BackendRef::Bytes`] that carries
    /// [frames](proto::ports).
    #[cfg(feature = "ports")]
    Ports,
    /// Entropy source; its back end is a [`BackendRef::Entropy`].
    Entropy,
    /// Memory balloon; its back end is a [`BackendRef::Balloon`].
    Balloon,
    /// Shared directory with this tag, padded with zeros; its back end is a
    /// [`BackendRef::Messages`].
    P9([u8; p9::spec::MOST_TAG]),
    /// Sockets between guest and host, with the guest's CID; its back end is a
    /// [`BackendRef::Packets`].
    Vsock(u64),
    /// Side of a channel; its back end is a [`BackendRef::Channel`].
    Channel(ChannelInfo),
}

/// Device model of a PCI function.
// One size for all slots; the largest has several kilobytes.
#[expect(clippy::large_enum_variant, reason = "there is no heap")]
enum PciDevice {
    Block(Pci<Blk>),
    Net(Pci<NetCard>),
    Console(Pci<Console>),
    #[cfg(feature = "ports")]
    Ports(Pci<Ports>),
    Entropy(Pci<Entropy>),
    Balloon(Pci<balloon::Balloon>),
    P9(Pci<P9>),
    Vsock(Pci<Vsock>),
    Channel(channel::Channel),
}

impl PciDevice {
    /// Creates the device in its power-on state.
    fn new(model: Model, slot: usize) -> Self {
        let base = layout::PCI_WINDOW + spec::WINDOW * slot as u32;
        match model {
            Model::Block(info) => Self::Block(Pci::new(Blk::new(info), base)),
            Model::Net(info) => Self::Net(Pci::new(NetCard::new(info), base)),
            Model::Console => Self::Console(Pci::new(Console::new(), base)),
            #[cfg(feature = "ports")]
            Model::Ports => Self::Ports(Pci::new(Ports::new(), base)),
            Model::Entropy => Self::Entropy(Pci::new(Entropy::new(), base)),
            Model::Balloon => Self::Balloon(Pci::new(balloon::Balloon::new(), base)),
            Model::P9(tag) => Self::P9(Pci::new(P9::new(tag), base)),
            Model::Vsock(cid) => Self::Vsock(Pci::new(Vsock::new(cid), base)),
            Model::Channel(info) => {
                let memory = layout::channel_memory(info.number);
                let shares = memory + layout::CHANNEL_SHARES;
                Self::Channel(channel::Channel::new(info, base, memory, shares))
            }
        }
    }
}

/// Up to `N` devices on PCI, at most [`MAX_FUNCTIONS`], each with a back end of type `O`. Threads
/// wait for the lock of a device with strategy `R`.
pub struct Slots<O, const N: usize, R = Spin> {
    slots: [Slot<O, R>; N],
}

/// A slot; empty without a model.
struct Slot<O, R> {
    model: Option<Model>,
    device: SpinMutex<Option<(PciDevice, O)>, R>,
}

impl<O, const N: usize, R> Default for Slots<O, N, R> {
    fn default() -> Self {
        Self::new()
    }
}

impl<O, const N: usize, R> Slots<O, N, R> {
    /// Creates empty slots: a PCI bus with only the host bridge.
    // Inlined, to be built in place: it is large, and stacks are small.
    #[inline(always)]
    pub fn new() -> Self {
        const { assert!(N >= 1 && N <= MAX_FUNCTIONS) };
        Self { slots: core::array::from_fn(|_| Slot { model: None, device: SpinMutex::new(None) }) }
    }

    /// Adds a device in the next free slot and returns the slot's index; without a free slot,
    /// returns the back end.
    pub fn add(&mut self, model: Model, backend: O) -> Result<usize, O> {
        let is_free = |slot: &Slot<O, R>| slot.model.is_none();
        let Some(index) = self.slots.iter().position(is_free) else { return Err(backend) };
        let slot = &mut self.slots[index];
        slot.model = Some(model);
        // Built in place, too.
        slot.device.get_mut().get_or_insert_with(|| (PciDevice::new(model, index), backend));
        Ok(index)
    }
}

impl<O, const N: usize, R: RelaxStrategy> Slots<O, N, R> {
    /// Calls `act` with the back end of a slot's device, under its lock.
    pub fn with_backend<T>(&self, slot: usize, act: impl FnOnce(&mut O) -> T) -> Option<T> {
        self.slots.get(slot)?.device.lock().as_mut().map(|(_, backend)| act(backend))
    }
}

impl<O: DeviceBackend, const N: usize, R: RelaxStrategy> Functions for Slots<O, N, R> {
    fn slots(&self) -> usize {
        N
    }

    fn with(&self, slot: usize, call: FunctionCall<'_>) {
        let mut device = match self.slots.get(slot) {
            Some(slot) => slot.device.lock(),
            None => return,
        };
        let Some((device, backend)) = &mut *device else { return };
        let function: &mut dyn Function = match device {
            PciDevice::Block(device) => device,
            PciDevice::Net(device) => device,
            PciDevice::Console(device) => device,
            #[cfg(feature = "ports")]
            PciDevice::Ports(device) => device,
            PciDevice::Entropy(device) => device,
            PciDevice::Balloon(device) => device,
            PciDevice::P9(device) => device,
            PciDevice::Vsock(device) => device,
            PciDevice::Channel(device) => device,
        };
        call(function, backend);
    }

    fn channel(&self, number: u64) -> Option<usize> {
        self.slots.iter().position(|slot| {
            matches!(slot.model, Some(Model::Channel(info)) if u64::from(info.number) == number)
        })
    }

    fn power_on(&self) {
        for (index, Slot { model, device }) in self.slots.iter().enumerate() {
            let (Some(model), Some((device, backend))) = (*model, &mut *device.lock()) else {
                continue;
            };
            *device = PciDevice::new(model, index);
            match backend.get() {
                BackendRef::Block(block) => block.forget(),
                BackendRef::Messages(messages) => messages.forget(),
                BackendRef::Packets(packets) => packets.reset(),
                BackendRef::Channel(channel) => channel.reset(),
                _ => {}
            }
        }
    }
}
