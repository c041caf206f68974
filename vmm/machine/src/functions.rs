//! Devices of a board in slots: the functions of a PCI bus, or devices without a bus.
//!
//! Each slot has a lock for its device and back end, so one thread at a time calls a back end.
//! The lock of the board is taken inside of it, never the other way round. On PCI, device 0 is the
//! host bridge. The first 31 slots are functions 0 of the other devices, the next ones functions 1
//! of devices 1, 2 ... ([`slot_of`]).

use spin::mutex::SpinMutex;
use spin::relax::{RelaxStrategy, Spin};
use vmm_bus::backend::{BlockInfo, ChannelInfo, NetInfo};
use vmm_bus::{BackendRef, ChannelBackend, DeviceBackend};
use vmm_dev::channel;
use vmm_dev::pci::{ConfigTarget, Function, spec::DEVICES};
use vmm_dev::virtio::VirtioDevice;
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

/// A call of a device `F` in a slot and its back end.
pub type FunctionCall<'a, F = dyn Function> = &'a mut dyn FnMut(&mut F, &mut dyn DeviceBackend);

/// Devices of a board in slots: PCI functions, or other devices `F`.
pub trait Functions<F: ?Sized = dyn Function> {
    /// Number of slots, at most [`MAX_FUNCTIONS`], constant. 0: the board has none, and no PCI.
    fn slots(&self) -> usize;
    /// Kind and properties of the device in a slot; `None`: the slot is empty.
    fn model(&self, slot: usize) -> Option<Model>;
    /// Calls the device in a slot and its back end, under their lock; not if the slot is empty.
    fn with(&self, slot: usize, call: FunctionCall<'_, F>);
    /// Slot of the channel with this number.
    fn channel(&self, number: u64) -> Option<usize>;
    /// Resets all functions to their power-on state for a new boot. Disks drop outstanding
    /// requests, channels their shares. Boards call it when they are created. If a back end gives
    /// others access to guest memory, it must be called before the guest is loaded, too.
    fn power_on(&self);
}

/// A board without slots.
impl<F: ?Sized> Functions<F> for () {
    #[inline]
    fn slots(&self) -> usize {
        0
    }

    fn model(&self, _: usize) -> Option<Model> {
        None
    }

    #[inline]
    fn with(&self, _: usize, _: FunctionCall<'_, F>) {}

    fn channel(&self, _: u64) -> Option<usize> {
        None
    }

    fn power_on(&self) {}
}

/// Slots in another place, or a board without slots.
impl<F: ?Sized, T: Functions<F> + ?Sized> Functions<F> for Option<&T> {
    #[inline]
    fn slots(&self) -> usize {
        self.map_or(0, Functions::slots)
    }

    fn model(&self, slot: usize) -> Option<Model> {
        self.and_then(|functions| functions.model(slot))
    }

    fn with(&self, slot: usize, call: FunctionCall<'_, F>) {
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

/// The way by which a guest reaches the devices in slots.
pub trait Bus: Copy {
    /// A device in a slot, without its type.
    type Device: ?Sized + 'static;
    /// A virtio device.
    type Virtio<D: VirtioDevice + 'static>;
    /// A side of a channel.
    type Channel;

    /// Creates a virtio device in its power-on state for a slot.
    fn virtio<D: VirtioDevice + 'static>(self, device: D, slot: usize) -> Self::Virtio<D>;
    /// Creates the side of a channel in its power-on state for a slot.
    fn channel(self, info: ChannelInfo, slot: usize) -> Self::Channel;
    /// Returns the virtio device without its type.
    fn of_virtio<D: VirtioDevice + 'static>(device: &mut Self::Virtio<D>) -> &mut Self::Device;
    /// Returns the side of a channel without its type.
    fn of_channel(channel: &mut Self::Channel) -> &mut Self::Device;
    /// Prepares the back end of a channel, which has been reset, for a new boot.
    fn place_channel(info: &ChannelInfo, backend: &mut dyn ChannelBackend);
}

/// The bus PCI; its guest chooses the addresses of devices.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct PciBus;

impl Bus for PciBus {
    type Device = dyn Function;
    type Virtio<D: VirtioDevice + 'static> = Pci<D>;
    type Channel = channel::Channel;

    fn virtio<D: VirtioDevice + 'static>(self, device: D, slot: usize) -> Pci<D> {
        Pci::new(device, window_base(slot))
    }

    fn channel(self, info: ChannelInfo, slot: usize) -> channel::Channel {
        let memory = layout::channel_memory(info.number);
        let shares = memory + layout::CHANNEL_SHARES;
        channel::Channel::new(info, window_base(slot), memory, shares)
    }

    fn of_virtio<D: VirtioDevice + 'static>(device: &mut Pci<D>) -> &mut Self::Device {
        device
    }

    fn of_channel(channel: &mut channel::Channel) -> &mut Self::Device {
        channel
    }

    fn place_channel(_: &ChannelInfo, _: &mut dyn ChannelBackend) {}
}

/// Address of the window of the function in a slot at power-on.
const fn window_base(slot: usize) -> u32 {
    layout::PCI_WINDOW + spec::WINDOW * slot as u32
}

/// Device model in a slot.
// One size for all slots; the largest has several kilobytes.
enum SlotDevice<B: Bus> {
    Block(B::Virtio<Blk>),
    Net(B::Virtio<NetCard>),
    Console(B::Virtio<Console>),
    #[cfg(feature = "ports")]
    Ports(B::Virtio<Ports>),
    Entropy(B::Virtio<Entropy>),
    Balloon(B::Virtio<balloon::Balloon>),
    P9(B::Virtio<P9>),
    Vsock(B::Virtio<Vsock>),
    Channel(B::Channel),
}

impl<B: Bus> SlotDevice<B> {
    /// Creates the device in its power-on state.
    fn new(bus: B, model: Model, slot: usize) -> Self {
        match model {
            Model::Block(info) => Self::Block(bus.virtio(Blk::new(info), slot)),
            Model::Net(info) => Self::Net(bus.virtio(NetCard::new(info), slot)),
            Model::Console => Self::Console(bus.virtio(Console::new(), slot)),
            #[cfg(feature = "ports")]
            Model::Ports => Self::Ports(bus.virtio(Ports::new(), slot)),
            Model::Entropy => Self::Entropy(bus.virtio(Entropy::new(), slot)),
            Model::Balloon => Self::Balloon(bus.virtio(balloon::Balloon::new(), slot)),
            Model::P9(tag) => Self::P9(bus.virtio(P9::new(tag), slot)),
            Model::Vsock(cid) => Self::Vsock(bus.virtio(Vsock::new(cid), slot)),
            Model::Channel(info) => Self::Channel(bus.channel(info, slot)),
        }
    }

    fn get(&mut self) -> &mut B::Device {
        match self {
            Self::Block(device) => B::of_virtio(device),
            Self::Net(device) => B::of_virtio(device),
            Self::Console(device) => B::of_virtio(device),
            #[cfg(feature = "ports")]
            Self::Ports(device) => B::of_virtio(device),
            Self::Entropy(device) => B::of_virtio(device),
            Self::Balloon(device) => B::of_virtio(device),
            Self::P9(device) => B::of_virtio(device),
            Self::Vsock(device) => B::of_virtio(device),
            Self::Channel(device) => B::of_channel(device),
        }
    }
}

/// Up to `N` devices, at most [`MAX_FUNCTIONS`], each with a back end of type `O`. Threads wait for
/// the lock of a device with strategy `R`. The guest reaches them by `B`.
pub struct Slots<O, const N: usize, R = Spin, B: Bus = PciBus> {
    bus: B,
    slots: [Slot<O, R, B>; N],
}

/// A slot; empty without a model.
struct Slot<O, R, B: Bus> {
    model: Option<Model>,
    device: SpinMutex<Option<(SlotDevice<B>, O)>, R>,
}

impl<O, const N: usize, R, B: Bus + Default> Default for Slots<O, N, R, B> {
    fn default() -> Self {
        Self::new()
    }
}

impl<O, const N: usize, R, B: Bus> Slots<O, N, R, B> {
    /// Creates empty slots; on PCI, a bus with only the host bridge.
    #[inline(always)]
    pub fn new() -> Self
    where
        B: Default,
    {
        Self::on(B::default())
    }

    /// The same with this bus.
    // Inlined, to be built in place: it is large, and stacks are small.
    #[inline(always)]
    pub fn on(bus: B) -> Self {
        const { assert!(N >= 1 && N <= MAX_FUNCTIONS) };
        let slots = core::array::from_fn(|_| Slot { model: None, device: SpinMutex::new(None) });
        Self { bus, slots }
    }

    /// Adds a device in the next free slot and returns the slot's index; without a free slot,
    /// returns the back end.
    pub fn add(&mut self, model: Model, backend: O) -> Result<usize, O> {
        let is_free = |slot: &Slot<O, R, B>| slot.model.is_none();
        let Some(index) = self.slots.iter().position(is_free) else { return Err(backend) };
        let (bus, slot) = (self.bus, &mut self.slots[index]);
        slot.model = Some(model);
        // Built in place, too.
        slot.device.get_mut().get_or_insert_with(|| (SlotDevice::new(bus, model, index), backend));
        Ok(index)
    }
}

impl<O, const N: usize, R: RelaxStrategy, B: Bus> Slots<O, N, R, B> {
    /// Calls `act` with the back end of a slot's device, under its lock.
    pub fn with_backend<T>(&self, slot: usize, act: impl FnOnce(&mut O) -> T) -> Option<T> {
        self.slots.get(slot)?.device.lock().as_mut().map(|(_, backend)| act(backend))
    }
}

impl<O: DeviceBackend, const N: usize, R: RelaxStrategy, B: Bus> Functions<B::Device>
    for Slots<O, N, R, B>
{
    fn slots(&self) -> usize {
        N
    }

    fn model(&self, slot: usize) -> Option<Model> {
        self.slots.get(slot)?.model
    }

    fn with(&self, slot: usize, call: FunctionCall<'_, B::Device>) {
        let mut device = match self.slots.get(slot) {
            Some(slot) => slot.device.lock(),
            None => return,
        };
        let Some((device, backend)) = &mut *device else { return };
        call(device.get(), backend);
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
            *device = SlotDevice::new(self.bus, model, index);
            match backend.get() {
                BackendRef::Block(block) => block.forget(),
                BackendRef::Messages(messages) => messages.forget(),
                BackendRef::Packets(packets) => packets.reset(),
                BackendRef::Channel(channel) => {
                    channel.reset();
                    if let Model::Channel(info) = model {
                        B::place_channel(&info, channel);
                    }
                }
                _ => {}
            }
        }
    }
}
