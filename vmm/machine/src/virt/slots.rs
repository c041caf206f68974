//! Devices of the board `virt` in slots: virtio devices with MMIO transport, or as functions of a
//! PCI bus, and channels. Nothing moves those with MMIO and channels, and their interrupts are
//! lines of the interrupt controller; those of functions are messages.
//!
//! A device's lock is held while it is called; each of its effects takes the lock of the board
//! inside of it. CPU 0 services the devices' timers.

use spin::relax::RelaxStrategy;
use vmm_arm64::VcpuLoop;
use vmm_boot::virt as layout;
use vmm_bus::backend::ChannelInfo;
use vmm_bus::{
    Access, BackendRef, ChannelBackend, Device, DeviceBackend, Env, MachineEvent, Msi, NEVER,
    Nanos, WAKE_CHANGE, WAKE_INPUT,
};
use vmm_dev::arm64::gic::v2m;
use vmm_dev::channel::{MmioChannel, SHARES_WINDOW};
use vmm_dev::pci::Function;
use vmm_dev::virtio::VirtioDevice;
use vmm_dev::virtio::mmio::{Mmio, spec};
use vmm_dev::virtio::pci::{self, Pci};
use vmm_mem::GuestMemory;

use super::{ChipEnv, CpuBus, Devices, Fixed, MESSAGES, Virt};
use crate::Host;
use crate::functions::{Bus, Functions};
use crate::pci::PciBoard;

const _: () = assert!(spec::LENGTH <= layout::PAGE);
const _: () = assert!(proto::channel::MAX_SIZE <= layout::CHANNEL_SHARES);
const _: () = assert!(SHARES_WINDOW as u64 <= layout::CHANNEL_SHARES_LENGTH);
const _: () = assert!(proto::channel::MAX_VM_CHANNELS as u64 <= layout::MAX_CHANNELS);

/// Way to the virtio devices of the board `virt`; channels are at fixed addresses always.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum VirtBus {
    /// Fixed addresses (transport MMIO).
    #[default]
    Fixed,
    /// PCI.
    Pci,
}

/// A device in a slot of the board `virt`.
pub trait VirtDevice: Device {
    /// The device as a PCI function; `None`: its registers are at the address of its slot.
    fn function(&mut self) -> Option<&mut dyn Function>;
}

/// A virtio device with its transport.
#[expect(clippy::large_enum_variant, reason = "there are few, and nothing allocates")]
pub enum VirtSlotDevice<D> {
    /// Registers at a fixed address.
    Mmio(Mmio<D>),
    /// A PCI function.
    Pci(Pci<D>),
}

impl<D: VirtioDevice + 'static> VirtSlotDevice<D> {
    fn device(&mut self) -> &mut dyn Device {
        match self {
            Self::Mmio(device) => device,
            Self::Pci(device) => device,
        }
    }
}

impl<D: VirtioDevice + 'static> Device for VirtSlotDevice<D> {
    fn read(&mut self, access: Access, env: &mut dyn Env) -> u64 {
        self.device().read(access, env)
    }

    fn write(&mut self, access: Access, value: u64, env: &mut dyn Env) {
        self.device().write(access, value, env);
    }

    fn wake(&mut self, timer: u8, env: &mut dyn Env) {
        self.device().wake(timer, env);
    }

    fn reset(&mut self, env: &mut dyn Env) {
        self.device().reset(env);
    }
}

impl<D: VirtioDevice + 'static> VirtDevice for VirtSlotDevice<D> {
    fn function(&mut self) -> Option<&mut dyn Function> {
        match self {
            Self::Mmio(_) => None,
            Self::Pci(device) => Some(device),
        }
    }
}

impl VirtDevice for MmioChannel {
    fn function(&mut self) -> Option<&mut dyn Function> {
        None
    }
}

impl Bus for VirtBus {
    type Device = dyn VirtDevice;
    type Virtio<D: VirtioDevice + 'static> = VirtSlotDevice<D>;
    type Channel = MmioChannel;

    fn virtio<D: VirtioDevice + 'static>(self, device: D, slot: usize) -> VirtSlotDevice<D> {
        let window = layout::PCI_WINDOW as u32 + pci::spec::WINDOW * slot as u32;
        match self {
            Self::Fixed => VirtSlotDevice::Mmio(Mmio::new(device)),
            Self::Pci => VirtSlotDevice::Pci(Pci::new(device, window)),
        }
    }

    fn channel(self, info: ChannelInfo, _: usize) -> MmioChannel {
        MmioChannel::new(info)
    }

    fn of_virtio<D: VirtioDevice + 'static>(device: &mut VirtSlotDevice<D>) -> &mut Self::Device {
        device
    }

    fn of_channel(channel: &mut MmioChannel) -> &mut Self::Device {
        channel
    }

    fn place_channel(info: &ChannelInfo, backend: &mut dyn ChannelBackend) {
        let memory = layout::channel_memory(info.number);
        backend.set_addresses(Some(memory), Some(memory + layout::CHANNEL_SHARES));
    }
}

/// Slot at an address, and the offset there. The slot may not exist.
fn slot_at(address: u64) -> Option<(usize, u64)> {
    let offset = address.checked_sub(layout::device(0))?;
    let slot = usize::try_from(offset / layout::PAGE).ok()?;
    (slot < layout::MAX_SLOTS).then_some((slot, offset % layout::PAGE))
}

impl<'m, R: RelaxStrategy, const CPUS: usize, P: Functions<dyn VirtDevice>> Virt<'m, R, CPUS, P> {
    /// Notifies the device in `slot` of input or completions of its back end. `caller`: the vCPU
    /// whose thread calls between two runs, if any; it needs no kick.
    pub fn function_input<H: Host>(&self, slot: usize, caller: Option<&VcpuLoop>, host: &mut H) {
        self.wake(slot, WAKE_INPUT, caller, host);
    }

    /// Notifies the device in `slot` that the properties of its back end have changed; likewise.
    pub fn function_change<H: Host>(&self, slot: usize, caller: Option<&VcpuLoop>, host: &mut H) {
        self.wake(slot, WAKE_CHANGE, caller, host);
    }

    fn wake<H: Host>(&self, slot: usize, timer: u8, caller: Option<&VcpuLoop>, host: &mut H) {
        let running = caller.map(VcpuLoop::index);
        self.with_function(slot, host, running, |device, env| device.wake(timer, env));
    }

    /// Calls the device in a slot on behalf of vCPU `running`. Returns the result, and whether that
    /// vCPU has events to service; `None` for an empty slot.
    pub(super) fn with_function<H: Host, T>(
        &self,
        slot: usize,
        host: &mut H,
        running: Option<usize>,
        call: impl FnOnce(&mut dyn VirtDevice, &mut dyn Env) -> T,
    ) -> Option<(T, bool)> {
        let (mut call, mut result) = (Some(call), None);
        self.functions.with(slot, &mut |device, backend| {
            let Some(call) = call.take() else { return };
            let host = &mut *host;
            let mut env =
                SlotEnv { virt: self, host, backend, slot, running, needs_service: false };
            let value = call(device, &mut env);
            result = Some((value, env.needs_service));
        });
        result
    }
}

impl<const CPUS: usize> Devices<CPUS> {
    /// Takes the next slot from `start` on whose timer is due, and disarms the timer.
    fn take_due(&mut self, start: usize, now: Nanos) -> Option<usize> {
        let due = |&slot: &usize| self.timers[slot] <= now && self.timers[slot] != NEVER;
        let slot = (start..self.timers.len()).find(due)?;
        self.timers[slot] = NEVER;
        Some(slot)
    }

    /// Returns the next deadline of a device in a slot: from now on CPU 0 knows it.
    pub(super) fn take_deadline(&mut self) -> Nanos {
        self.is_rearmed = false;
        self.timers.into_iter().fold(NEVER, Nanos::min)
    }
}

impl<H: Host, R: RelaxStrategy, const CPUS: usize, P: Functions<dyn VirtDevice>>
    CpuBus<'_, '_, H, R, CPUS, P>
{
    pub(super) fn with_slot<T>(
        &mut self,
        slot: usize,
        call: impl FnOnce(&mut dyn VirtDevice, &mut dyn Env) -> T,
    ) -> Option<T> {
        let called = self.virt.with_function(slot, self.host, Some(self.cpu), call);
        let (result, needs_service) = called?;
        self.needs_service |= needs_service;
        Some(result)
    }

    /// Calls the devices in slots whose timers are due, each at most once.
    pub(super) fn service_slots(&mut self) {
        if self.virt.functions.slots() == 0 {
            return;
        }
        let now = self.virt.fixed.clock.nanos(self.host.counter());
        let mut start = 0;
        while let Some(slot) = self.locked(|devices, _| devices.take_due(start, now)) {
            self.with_slot(slot, |device, env| device.wake(0, env));
            start = slot + 1;
        }
    }

    /// Returns whether an address is in the registers of a slot, or in memory of a channel that has
    /// nothing mapped there.
    pub(super) fn has_slot(&self, address: u64) -> bool {
        let in_slot = slot_at(address).is_some_and(|(slot, _)| slot < self.virt.functions.slots());
        in_slot || self.in_channel(address) || self.in_pci(address)
    }

    /// Returns whether an address is in the memory or the shares of a channel. Accesses reach the
    /// VMM only while nothing is mapped there.
    fn in_channel(&self, address: u64) -> bool {
        let offset = address.wrapping_sub(layout::channel_memory(0));
        let number = offset / layout::CHANNEL_STRIDE;
        number < layout::MAX_CHANNELS
            && offset % layout::CHANNEL_STRIDE
                < layout::CHANNEL_SHARES + layout::CHANNEL_SHARES_LENGTH
            && self.virt.functions.channel(number).is_some()
    }

    /// Reads a register of a device in a slot; all ones without a device.
    pub(super) fn read_slot(&mut self, address: u64, size: u8) -> u64 {
        let nothing = Access::new(0, size).open_bus();
        if self.in_pci(address) {
            return self.pci_read(address, size);
        }
        let Some((slot, offset)) = slot_at(address) else { return nothing };
        let access = Access::new(offset, size);
        if !offset.is_multiple_of(size.into()) {
            return 0;
        }
        let read = self.with_slot(slot, |device, env| match device.function() {
            None => device.read(access, env),
            Some(_) => nothing,
        });
        read.unwrap_or(nothing)
    }

    /// Writes a register of a device in a slot, if it exists.
    pub(super) fn write_slot(&mut self, address: u64, size: u8, value: u64) {
        if self.in_pci(address) {
            self.pci_write(address, size, value);
        } else if let Some((slot, offset)) = slot_at(address)
            && offset.is_multiple_of(size.into())
        {
            let access = Access::new(offset, size);
            self.with_slot(slot, |device, env| {
                if device.function().is_none() {
                    device.write(access, value, env);
                }
            });
        }
    }
}

/// Environment of a device in a slot, whose lock is held; each effect takes the lock of the board.
struct SlotEnv<'a, 'm, H, R, const CPUS: usize, P> {
    virt: &'a Virt<'m, R, CPUS, P>,
    host: &'a mut H,
    backend: &'a mut dyn DeviceBackend,
    slot: usize,
    /// vCPU on whose behalf the device is called.
    running: Option<usize>,
    /// An effect has left events for that vCPU.
    needs_service: bool,
}

impl<'m, H: Host, R: RelaxStrategy, const CPUS: usize, P: Functions<dyn VirtDevice>>
    SlotEnv<'_, 'm, H, R, CPUS, P>
{
    fn board<T>(&mut self, act: impl FnOnce(&mut Devices<CPUS>, (&Fixed<'m>, &mut H)) -> T) -> T {
        let (result, needs_service) = self.virt.locked(self.host, self.running, act);
        self.needs_service |= needs_service;
        result
    }

    fn chip(&mut self, act: impl FnOnce(&mut ChipEnv<'_, '_, H>)) {
        self.board(|devices, (fixed, host)| {
            act(&mut ChipEnv { fixed, effects: &mut devices.effects, host, line: None });
        });
    }
}

impl<H: Host, R: RelaxStrategy, const CPUS: usize, P: Functions<dyn VirtDevice>> Env
    for SlotEnv<'_, '_, H, R, CPUS, P>
{
    fn now(&self) -> Nanos {
        self.virt.fixed.clock.nanos(self.host.counter())
    }

    fn set_line(&mut self, line: u8, level: bool) {
        let number = layout::device_interrupt(self.slot, line);
        self.board(|devices, _| devices.gic.set_level(number, level));
    }

    fn arm(&mut self, timer: u8, deadline: Nanos) {
        let slot = self.slot;
        if timer == 0 {
            self.board(|devices, _| {
                if let Some(armed) = devices.timers.get_mut(slot)
                    && *armed != deadline
                {
                    *armed = deadline;
                    devices.is_rearmed = true;
                }
            });
        }
    }

    fn memory(&self) -> &GuestMemory {
        self.virt.fixed.memory
    }

    fn backend(&mut self) -> (BackendRef<'_>, &GuestMemory) {
        (self.backend.get(), self.virt.fixed.memory)
    }

    fn msi(&mut self, msi: Msi) {
        let access = Access::new(msi.address.wrapping_sub(layout::MESSAGES), 4);
        let Some(number) = v2m::interrupt(&MESSAGES, access, msi.data.into()) else {
            return self.missing("interrupt message to no controller", msi.address);
        };
        let slot = self.slot;
        self.board(|devices, _| {
            devices.gic.set_pending(number);
            if let Some(last) = devices.messages.get_mut(slot) {
                *last = number;
            }
        });
    }

    fn machine(&mut self, event: MachineEvent) {
        self.chip(|env| env.machine(event));
    }

    fn missing(&mut self, what: &'static str, value: u64) {
        self.chip(|env| env.missing(what, value));
    }
}
