//! PrimeCell UART PL011 (DDI 0183G, chapter 3).

/// Name in a device tree.
pub const COMPATIBLE: &str = "arm,pl011";
/// Data register.
pub const DATA: usize = 0x00;
/// Flag register.
pub const FLAGS: usize = 0x18;
/// First of the registers of the line: IrDA, divisor, line control (LCRH).
pub const LOW_POWER: usize = 0x20;
/// Control register.
pub const CONTROL: usize = 0x30;
/// Levels of the FIFOs at which they interrupt.
pub const FIFO_LEVELS: usize = 0x34;
/// Interrupt mask: a set bit lets the interrupt through.
pub const INTERRUPT_MASK: usize = 0x38;
/// Interrupts, without the mask.
pub const RAW_INTERRUPTS: usize = 0x3c;
/// Interrupts, with the mask.
pub const INTERRUPTS: usize = 0x40;
/// Clears interrupts.
pub const CLEAR: usize = 0x44;
/// DMA control.
pub const DMA_CONTROL: usize = 0x48;
/// First of eight registers with one byte of the identification each.
pub const IDENTIFICATION: usize = 0xfe0;
/// Identification of revision r1p3: part 0x011 of Arm, PrimeCell.
pub const IDENTITY: [u8; 8] = [0x11, 0x10, 0x14, 0x00, 0x0d, 0xf0, 0x05, 0xb1];
/// Bit of [`FLAGS`]: the transmitter has not sent everything.
pub const BUSY: u32 = 1 << 3;
/// Bit of [`FLAGS`]: the receive FIFO is empty.
pub const RECEIVE_EMPTY: u32 = 1 << 4;
/// Bit of [`FLAGS`]: the transmit FIFO is full.
pub const TRANSMIT_FULL: u32 = 1 << 5;
/// Interrupt: received data.
pub const RECEIVED: u32 = 1 << 4;
/// Interrupt: room in the transmit FIFO.
pub const TRANSMITTED: u32 = 1 << 5;
/// Interrupt: received data below the level have waited.
pub const RECEIVE_TIMEOUT: u32 = 1 << 6;
/// All interrupts.
pub const ALL_INTERRUPTS: u32 = 0x7ff;
/// Bytes of the transmit FIFO (revision r1p5 has 32).
pub const FIFO: usize = 16;
/// Bit of [`FLAGS`]: the transmit FIFO is empty.
pub const TRANSMIT_EMPTY: u32 = 1 << 7;
/// Bits of [`CONTROL`]: enabled, with receiver and transmitter.
pub const ENABLED: u32 = 1 << 0 | 1 << 8 | 1 << 9;
