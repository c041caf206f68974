//! The board `virt`: address map, and boot of a Linux kernel for AArch64 (Linux,
//! Documentation/arm64/booting.rst) or AArch32 (Documentation/arm/booting.rst) with a device tree
//! (Devicetree Specification v0.4).
//!
//! | address | device | interrupt |
//! |---|---|---|
//! | [`DISTRIBUTOR`], [`REDISTRIBUTORS`] | GICv3 | |
//! | [`DISTRIBUTOR`], [`CPU_INTERFACE`] | or GICv2 | |
//! | [`MESSAGES`] | GICv2m frame for both | [`FIRST_MESSAGE`] and the following ones |
//! | [`UART`] | PL011 | [`UART_INTERRUPT`] |
//! | [`CLOCK`] | PL031 | |
//! | [`BUTTON`] | power button, a virtio device | [`BUTTON_INTERRUPT`] |
//! | [`pass_through`] | devices that the guest drives itself | [`pass_through_interrupt`] |
//! | [`device`] | devices in slots: virtio, channels to other VMs | [`device_interrupt`] |
//! | [`channel_memory`] | memory of channels, and the shares of their peers | |
//! | [`PCI_WINDOW`], [`ECAM`] | PCI, if a device is on it | messages, or as [`pass_through`] |
//! | [`RAM`] | RAM; its last [`STOLEN_TIME_LENGTH`] bytes are records of stolen time | |
//!
//! RAM is elsewhere, behind [`RAM`], if its addresses are those of the host's memory.

use hw_arm64::psci::stolen_time;

/// Length of a small device's registers.
pub const PAGE: u64 = 0x1000;
/// Registers of the interrupt controller's distributor.
pub const DISTRIBUTOR: u64 = 0x800_0000;
/// Registers of the CPU's interface of a GICv2, which the host maps.
pub const CPU_INTERFACE: u64 = 0x801_0000;
/// Registers of a GICv3's redistributors.
pub const REDISTRIBUTORS: u64 = 0x80a_0000;
/// Length of these.
pub const REDISTRIBUTORS_LENGTH: u64 = 0x10_0000;
/// Registers of the frame for interrupt messages.
pub const MESSAGES: u64 = 0x802_0000;
/// First interrupt by message.
pub const FIRST_MESSAGE: u32 = 80;
/// Number of interrupts by message.
pub const MESSAGE_COUNT: u32 = 48;
const _: () = assert!(DEVICES_INTERRUPT + SLOT_INTERRUPTS * MAX_SLOTS as u32 <= FIRST_MESSAGE);
/// Registers of the UART.
pub const UART: u64 = 0x900_0000;
/// Interrupt of the UART.
pub const UART_INTERRUPT: u32 = 33;
/// Registers of the clock.
pub const CLOCK: u64 = 0x901_0000;
/// Registers of the power button.
pub const BUTTON: u64 = 0x902_0000;
/// Interrupt of the power button.
pub const BUTTON_INTERRUPT: u32 = 34;
/// Page with the registers of the first device that the guest drives itself.
const PASS_THROUGH: u64 = 0x904_0000;
/// Distance of these pages: guests with pages of any size can map each apart.
const PASS_THROUGH_STRIDE: u64 = 0x1_0000;
/// Interrupt of the first of these devices; those of further ones follow.
const PASS_THROUGH_INTERRUPT: u32 = 36;
/// Maximum number of these devices.
pub const MAX_PASS_THROUGH: usize = 4;
const _: () = assert!(PASS_THROUGH + MAX_PASS_THROUGH as u64 * PASS_THROUGH_STRIDE <= DEVICES);
const _: () = assert!(PASS_THROUGH_INTERRUPT + MAX_PASS_THROUGH as u32 <= DEVICES_INTERRUPT);
/// Registers of the device in the first slot.
const DEVICES: u64 = 0xa00_0000;
/// Maximum number of slots.
pub const MAX_SLOTS: usize = 16;
/// Interrupts of a device in a slot.
pub const SLOT_INTERRUPTS: u32 = 2;
const DEVICES_INTERRUPT: u32 = 48;
/// Memory of the first channel.
const CHANNELS: u64 = 0x1000_0000;
/// Distance of channels.
pub const CHANNEL_STRIDE: u64 = 0x200_0000;
/// Offset of the peer's shares from a channel's memory, of which this is the maximum length.
pub const CHANNEL_SHARES: u64 = 0x100_0000;
/// Length of the peer's shares.
pub const CHANNEL_SHARES_LENGTH: u64 = 0x10_0000;
/// Maximum number of channels.
pub const MAX_CHANNELS: u64 = 4;
const _: () = assert!(CHANNEL_SHARES + CHANNEL_SHARES_LENGTH <= CHANNEL_STRIDE);
const _: () = assert!(CHANNELS + MAX_CHANNELS * CHANNEL_STRIDE <= PCI_WINDOW);
/// Windows of PCI functions.
pub const PCI_WINDOW: u64 = 0x2000_0000;
/// Bytes for windows of PCI functions.
pub const PCI_WINDOW_LENGTH: u64 = 0x1000_0000;
/// Memory-mapped configuration space of PCI, one bus.
pub const ECAM: u64 = 0x3f00_0000;
/// Length of this.
pub const ECAM_LENGTH: u64 = 1 << 20;
const _: () = assert!(PCI_WINDOW + PCI_WINDOW_LENGTH <= ECAM && ECAM + ECAM_LENGTH <= RAM);
/// Start of RAM.
pub const RAM: u64 = 0x4000_0000;
/// Length of the memory at the end of RAM for records of stolen time, which is not in the device
/// tree: a page of the largest size, so that guests can map it apart from their own.
pub const STOLEN_TIME_LENGTH: u64 = 0x1_0000;
const _: () = assert!(STOLEN_TIME_LENGTH >= 64 * stolen_time::LENGTH);

/// Returns the address of the registers of the device in a slot, [`PAGE`] bytes.
pub const fn device(slot: usize) -> u64 {
    DEVICES + slot as u64 * PAGE
}

/// Returns the interrupt of a line of the device in a slot, below [`SLOT_INTERRUPTS`]. The device
/// tree describes it as edge-triggered.
pub const fn device_interrupt(slot: usize, line: u8) -> u32 {
    DEVICES_INTERRUPT + SLOT_INTERRUPTS * slot as u32 + line as u32 % SLOT_INTERRUPTS
}

/// Returns the address of the page with the registers of a device that the guest drives itself.
pub const fn pass_through(number: usize) -> u64 {
    PASS_THROUGH + (number % MAX_PASS_THROUGH) as u64 * PASS_THROUGH_STRIDE
}

/// Returns the interrupt of such a device.
pub const fn pass_through_interrupt(number: usize) -> u32 {
    PASS_THROUGH_INTERRUPT + (number % MAX_PASS_THROUGH) as u32
}

/// Returns the device number on PCI of such a device that is a PCI function: the last ones.
pub const fn pass_through_pci_device(number: usize) -> u8 {
    PCI_DEVICES - MAX_PASS_THROUGH as u8 + (number % MAX_PASS_THROUGH) as u8
}
/// Devices of the PCI bus; device 0 is the host bridge, those of slots follow.
const PCI_DEVICES: u8 = 32;
const _: () = assert!(MAX_SLOTS < pass_through_pci_device(0) as usize);

/// Returns the number of the device with an interrupt; `None`: it is no such device.
pub const fn pass_through_number(interrupt: u32) -> Option<usize> {
    let number = interrupt.wrapping_sub(PASS_THROUGH_INTERRUPT) as usize;
    if number < MAX_PASS_THROUGH { Some(number) } else { None }
}

/// Returns the address of a vCPU's record of stolen time, below 64, in RAM at this address and of
/// this length.
pub const fn stolen_time_record((base, length): (u64, u64), vcpu: usize) -> u64 {
    base + length - STOLEN_TIME_LENGTH + vcpu as u64 % 64 * stolen_time::LENGTH
}

/// Returns the address of a channel's memory.
pub const fn channel_memory(number: u8) -> u64 {
    CHANNELS + number as u64 % MAX_CHANNELS * CHANNEL_STRIDE
}

/// A device in a slot, as the device tree describes it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum SlotNode {
    /// Virtio device with MMIO transport.
    Virtio,
    /// Function of the PCI bus.
    Pci,
    /// Side of the channel with this number.
    Channel(u8),
}

/// Kinds of devices that a guest can drive itself.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum DeviceKind {
    /// UART.
    Pl011,
    /// Virtio device with MMIO transport.
    Virtio,
    /// PCI function, whose registers the guest places.
    Pci,
}

/// A device that the guest drives itself, as the device tree describes it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct PassThroughNode {
    /// Kind.
    pub kind: DeviceKind,
    /// Offset of its registers in their page ([`pass_through`]), in bytes.
    pub offset: u64,
    /// Length of its registers in bytes.
    pub length: u64,
    /// Its interrupt is level-triggered.
    pub is_level: bool,
}

#[cfg(feature = "load")]
mod load;
#[cfg(feature = "load")]
pub use load::{VirtBoot, VirtStart, load, memory_needed};
