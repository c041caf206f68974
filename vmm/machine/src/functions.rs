//! PCI functions of a board with a PCI bus.
//!
//! The lock of the board protects the functions and their back ends, so one thread at a time calls
//! a back end. Function `slot` is device `slot + 1`; device 0 is the host bridge.

use vmm_bus::backend::{BlockInfo, ChannelInfo, NetInfo};
use vmm_bus::{BalloonBackend, Block, ChannelBackend, Messages, Net, Packets};
use vmm_dev::channel;
use vmm_dev::pci::Function;
use vmm_dev::virtio::balloon;
use vmm_dev::virtio::blk::Blk;
use vmm_dev::virtio::console::Console;
use vmm_dev::virtio::entropy::Entropy;
use vmm_dev::virtio::net::NetCard;
use vmm_dev::virtio::p9::{self, P9};
use vmm_dev::virtio::pci::{Pci, spec};
use vmm_dev::virtio::vsock::Vsock;

use crate::layout;

/// Maximum number of functions of a board, without the host bridge.
pub const MAX_FUNCTIONS: usize = 16;

/// PCI functions of a board.
pub trait Functions {
    /// Number of slots, at most [`MAX_FUNCTIONS`], constant. 0: the board has no PCI.
    fn slots(&self) -> usize;
    /// Function in a slot, and its back end.
    fn get(&mut self, slot: usize) -> Option<(&mut dyn Function, &mut dyn DeviceBackend)>;
    /// Back end of the channel with this number.
    fn channel(&mut self, number: u64) -> Option<&mut dyn ChannelBackend>;
    /// Resets all functions to their power-on state for a new boot. Disks drop outstanding
    /// requests, channels their shares.
    fn power_on(&mut self);
}

/// A board without PCI.
impl Functions for () {
    #[inline]
    fn slots(&self) -> usize {
        0
    }

    #[inline]
    fn get(&mut self, _: usize) -> Option<(&mut dyn Function, &mut dyn DeviceBackend)> {
        None
    }

    fn channel(&mut self, _: u64) -> Option<&mut dyn ChannelBackend> {
        None
    }

    fn power_on(&mut self) {}
}

/// Functions in another place, or a board without PCI.
impl<F: Functions + ?Sized> Functions for Option<&mut F> {
    #[inline]
    fn slots(&self) -> usize {
        self.as_ref().map_or(0, |functions| functions.slots())
    }

    fn get(&mut self, slot: usize) -> Option<(&mut dyn Function, &mut dyn DeviceBackend)> {
        self.as_mut()?.get(slot)
    }

    fn channel(&mut self, number: u64) -> Option<&mut dyn ChannelBackend> {
        self.as_mut()?.channel(number)
    }

    fn power_on(&mut self) {
        if let Some(functions) = self {
            functions.power_on();
        }
    }
}

/// Back end of one function. By default no service is connected.
pub trait DeviceBackend {
    /// See [`vmm_bus::Env::block`].
    fn block(&mut self) -> Option<&mut dyn Block> {
        None
    }
    /// See [`vmm_bus::Env::net`].
    fn net(&mut self) -> Option<&mut dyn Net> {
        None
    }
    /// See [`vmm_bus::Env::balloon`].
    fn balloon(&mut self) -> Option<&mut dyn BalloonBackend> {
        None
    }
    /// See [`vmm_bus::Env::messages`].
    fn messages(&mut self) -> Option<&mut dyn Messages> {
        None
    }
    /// See [`vmm_bus::Env::packets`].
    fn packets(&mut self) -> Option<&mut dyn Packets> {
        None
    }
    /// See [`vmm_bus::Env::channel`].
    fn channel(&mut self) -> Option<&mut dyn ChannelBackend> {
        None
    }
    /// See [`vmm_bus::Env::put`].
    fn put(&mut self, _byte: u8) -> bool {
        true
    }
    /// See [`vmm_bus::Env::take`].
    fn take(&mut self) -> Option<u8> {
        None
    }
    /// See [`vmm_bus::Env::entropy`].
    fn entropy(&mut self, _to: &mut [u8]) -> bool {
        false
    }
}

impl<T: DeviceBackend + ?Sized> DeviceBackend for &mut T {
    fn block(&mut self) -> Option<&mut dyn Block> {
        (**self).block()
    }

    fn net(&mut self) -> Option<&mut dyn Net> {
        (**self).net()
    }

    fn balloon(&mut self) -> Option<&mut dyn BalloonBackend> {
        (**self).balloon()
    }

    fn messages(&mut self) -> Option<&mut dyn Messages> {
        (**self).messages()
    }

    fn packets(&mut self) -> Option<&mut dyn Packets> {
        (**self).packets()
    }

    fn channel(&mut self) -> Option<&mut dyn ChannelBackend> {
        (**self).channel()
    }

    fn put(&mut self, byte: u8) -> bool {
        (**self).put(byte)
    }

    fn take(&mut self) -> Option<u8> {
        (**self).take()
    }

    fn entropy(&mut self, to: &mut [u8]) -> bool {
        (**self).entropy(to)
    }
}

/// Kind and properties of a device to create.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Model {
    /// Block device; its back end implements [`Block`].
    Block(BlockInfo),
    /// Network device; its back end implements [`Net`].
    Net(NetInfo),
    /// Console; its back end reads and writes bytes.
    Console,
    /// Entropy source; its back end provides entropy.
    Entropy,
    /// Memory balloon; its back end implements [`BalloonBackend`].
    Balloon,
    /// Shared directory with this tag, padded with zeros; its back end implements [`Messages`].
    P9([u8; p9::spec::MOST_TAG]),
    /// Sockets between guest and host, with the guest's CID; its back end implements [`Packets`].
    Vsock(u64),
    /// Side of a channel; its back end implements [`ChannelBackend`].
    Channel(ChannelInfo),
}

/// Device model of a PCI function.
// One size for all slots; the largest, a disk with all its requests, has several kilobytes.
#[expect(clippy::large_enum_variant, reason = "there is no heap")]
enum PciDevice {
    Block(Pci<Blk>),
    Net(Pci<NetCard>),
    Console(Pci<Console>),
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

/// A device, its configuration, and its back end.
struct Slot<O> {
    model: Model,
    device: PciDevice,
    backend: O,
}

/// Up to `N` devices on PCI, at most [`MAX_FUNCTIONS`], each with a back end of type `O`.
pub struct Slots<O, const N: usize> {
    slots: [Option<Slot<O>>; N],
}

impl<O, const N: usize> Default for Slots<O, N> {
    fn default() -> Self {
        Self::new()
    }
}

impl<O, const N: usize> Slots<O, N> {
    /// Creates empty slots: a PCI bus with only the host bridge.
    // Inlined, not a constant: built in place, because it is large and stacks are small.
    #[inline(always)]
    pub fn new() -> Self {
        const { assert!(N >= 1 && N <= MAX_FUNCTIONS) };
        Self { slots: core::array::from_fn(|_| None) }
    }

    /// Adds a device in the next free slot and returns the slot's index; without a free slot,
    /// returns the back end.
    pub fn add(&mut self, model: Model, backend: O) -> Result<usize, O> {
        let Some(slot) = self.slots.iter().position(Option::is_none) else { return Err(backend) };
        self.slots[slot] = Some(Slot { model, device: PciDevice::new(model, slot), backend });
        Ok(slot)
    }

    /// Back end of a slot's device.
    pub fn backend(&mut self, slot: usize) -> Option<&mut O> {
        self.slots.get_mut(slot)?.as_mut().map(|slot| &mut slot.backend)
    }
}

impl<O: DeviceBackend, const N: usize> Functions for Slots<O, N> {
    fn slots(&self) -> usize {
        N
    }

    fn get(&mut self, slot: usize) -> Option<(&mut dyn Function, &mut dyn DeviceBackend)> {
        let Slot { device, backend, .. } = self.slots.get_mut(slot)?.as_mut()?;
        let function: &mut dyn Function = match device {
            PciDevice::Block(device) => device,
            PciDevice::Net(device) => device,
            PciDevice::Console(device) => device,
            PciDevice::Entropy(device) => device,
            PciDevice::Balloon(device) => device,
            PciDevice::P9(device) => device,
            PciDevice::Vsock(device) => device,
            PciDevice::Channel(device) => device,
        };
        Some((function, backend))
    }

    fn channel(&mut self, number: u64) -> Option<&mut dyn ChannelBackend> {
        self.slots.iter_mut().flatten().find_map(|slot| match slot.model {
            Model::Channel(info) if u64::from(info.number) == number => slot.backend.channel(),
            _ => None,
        })
    }

    fn power_on(&mut self) {
        for (number, slot) in self.slots.iter_mut().enumerate() {
            if let Some(Slot { model, device, backend }) = slot {
                *device = PciDevice::new(*model, number);
                if let Some(block) = backend.block() {
                    block.forget();
                }
                if let Some(messages) = backend.messages() {
                    messages.forget();
                }
                if let Some(packets) = backend.packets() {
                    packets.reset();
                }
                if let Some(channel) = backend.channel() {
                    channel.reset();
                }
            }
        }
    }
}
