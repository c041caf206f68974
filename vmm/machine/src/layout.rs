//! Address map of the board `pc`, defined only here. Firmware tables are generated from [`layout`].
//!
//! | port | chip | interrupt |
//! |---|---|---|
//! | 20, a0, 4d0 | 8259A pair and edge/level registers | |
//! | 40–43, 61 | 8254 and speaker port | 0 (I/O APIC input 2) |
//! | 60, 64 | keyboard controller without a keyboard | 1 |
//! | 70–71 | real-time clock | 8 |
//! | 80 | POST codes | |
//! | 92 | system control port A | |
//! | 3f8–3ff | serial line | 4 |
//! | 501 | guest-chosen exit code, 0 to 63 | |
//! | 505 | pvpanic | |
//! | 600–60f | ACPI power management | 9 |
//! | cf8–cff | PCI configuration, on a board with PCI | |
//! | cf9 | reset | |
//!
//! Memory: RAM from 0 to at most [`HOLE`], and from 4 GiB on; the I/O APIC at [`IO_APIC`], each
//! local APIC at [`LOCAL_APIC`] until its CPU moves it. On a board with PCI, windows of functions
//! from [`PCI_WINDOW`] on and the configuration space at [`ECAM`].

use hw_x86::apic;
use proto::channel;
use vmm_boot::{PcLayout, PciLayout};
use vmm_dev::channel::SHARES_WINDOW;
use vmm_dev::pc::{pm, reset, rtc};
use vmm_vcpu::MAX_VCPUS;

/// End of low RAM: addresses from here to 4 GiB belong to devices.
pub const HOLE: u64 = 0xc000_0000;
/// Registers of the I/O APIC.
pub const IO_APIC: u64 = 0xfec0_0000;
/// Registers of a local APIC after reset.
pub const LOCAL_APIC: u64 = 0xfee0_0000;
/// Id of the I/O APIC: the first that no CPU has.
pub const IO_APIC_ID: u8 = MAX_VCPUS as u8;

/// Edge/level registers of the 8259A pair.
pub const ELCR: u16 = 0x4d0;
/// 8254.
pub const PIT: u16 = 0x40;
/// Speaker port, with the gate and output of the 8254's channel 2.
pub const PORT_B: u16 = 0x61;
/// Keyboard controller: data.
pub const KEYBOARD_DATA: u16 = 0x60;
/// Keyboard controller: status and commands.
pub const KEYBOARD_STATUS: u16 = 0x64;
/// Real-time clock: index, then data.
pub const RTC: u16 = 0x70;
/// POST codes.
pub const POST: u16 = 0x80;
/// System control port A.
pub const PORT_92: u16 = 0x92;
/// Serial line.
pub const SERIAL: u16 = 0x3f8;
/// Exit code chosen by the guest.
pub const DEBUG_EXIT: u16 = 0x501;
/// pvpanic.
pub const PVPANIC: u16 = 0x505;
/// ACPI power management.
pub const PM: u16 = 0x600;
/// Configuration address of PCI, absent on a board without PCI; the reset port is inside it but
/// responds only to accesses of one byte.
pub const PCI_ADDRESS: u16 = 0xcf8;
/// Configuration data of PCI, 4 bytes.
pub const PCI_DATA: u16 = PCI_ADDRESS + 4;
/// First window of a PCI function.
pub const PCI_WINDOW: u32 = HOLE as u32;
/// Bytes for windows of PCI functions.
pub const PCI_WINDOW_LENGTH: u32 = 0x2000_0000;
/// Memory of the first channel to another VM; the other channels follow.
const CHANNEL_WINDOW: u32 = PCI_WINDOW + 0x1000_0000;
/// Distance of channels, a multiple of the maximum memory of one.
const CHANNEL_STRIDE: u32 = 0x200_0000;
/// Offset of the peer's shares from the channel's memory.
pub const CHANNEL_SHARES: u32 = channel::MAX_SIZE as u32;
const _: () = assert!(CHANNEL_SHARES + SHARES_WINDOW <= CHANNEL_STRIDE);
const _: () = assert!(
    CHANNEL_WINDOW + channel::MAX_VM_CHANNELS as u32 * CHANNEL_STRIDE
        <= PCI_WINDOW + PCI_WINDOW_LENGTH
);
/// Address of a channel's memory at power-on.
pub const fn channel_memory(number: u8) -> u32 {
    CHANNEL_WINDOW + number as u32 % channel::MAX_VM_CHANNELS as u32 * CHANNEL_STRIDE
}
/// Memory-mapped configuration space of PCI, one bus.
pub const ECAM: u32 = PCI_WINDOW + PCI_WINDOW_LENGTH;
/// Reset port.
pub const RESET: u16 = 0xcf9;
/// First of the 8259A pair.
pub const PIC_MASTER: u16 = apic::pic::COMMAND_1;
/// Second of the 8259A pair.
pub const PIC_SLAVE: u16 = apic::pic::COMMAND_2;

/// ISA interrupt of the 8254.
pub const PIT_IRQ: u8 = 0;
/// ISA interrupt of the keyboard controller.
pub const KEYBOARD_IRQ: u8 = 1;
/// ISA interrupt of the serial line.
pub const SERIAL_IRQ: u8 = 4;
/// ISA interrupt of the real-time clock.
pub const RTC_IRQ: u8 = 8;
/// ISA interrupt of ACPI.
pub const SCI: u8 = 9;
/// I/O APIC input of the 8254; the other ISA interrupts have the input of their number.
pub const PIT_GSI: u8 = 2;

/// The layout of a board without PCI, for the table generator.
pub fn layout() -> PcLayout {
    PcLayout {
        hole_start: HOLE,
        local_apic: LOCAL_APIC as u32,
        io_apic: IO_APIC as u32,
        io_apic_id: IO_APIC_ID,
        pit_gsi: PIT_GSI,
        sci: SCI,
        pm1a_event: PM + pm::spec::PM1_EVENT as u16,
        pm1a_control: PM + pm::spec::PM1_CONTROL as u16,
        pm_timer: PM + pm::spec::TIMER as u16,
        gpe0: PM + pm::spec::GPE0 as u16,
        sleep_type_off: pm::spec::SLP_TYP_S5 as u8,
        reset_port: RESET,
        reset_value: reset::spec::SYS_RST | reset::spec::RST_CPU,
        serial: SERIAL,
        serial_irq: SERIAL_IRQ,
        rtc: RTC,
        rtc_irq: RTC_IRQ,
        rtc_century: rtc::spec::CENTURY,
        pvpanic: Some(PVPANIC),
        pci: None,
    }
}

/// The layout of a board with PCI.
pub fn layout_with_pci() -> PcLayout {
    let pci = PciLayout {
        ecam: ECAM,
        window: PCI_WINDOW,
        window_length: PCI_WINDOW_LENGTH,
        config_port: PCI_ADDRESS,
    };
    PcLayout { pci: Some(pci), ..layout() }
}

/// I/O APIC input of an ISA interrupt; interrupt 2 is the cascade and has none.
pub const fn gsi(irq: u8) -> Option<u8> {
    match irq {
        PIT_IRQ => Some(PIT_GSI),
        PIT_GSI => None,
        other => Some(other),
    }
}
