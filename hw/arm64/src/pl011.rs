//! PrimeCell UART PL011 (DDI 0183G, chapter 3).

/// Name in a device tree.
pub const COMPATIBLE: &str = "arm,pl011";
/// Data register.
pub const DATA: usize = 0x00;
/// Flag register.
pub const FLAGS: usize = 0x18;
/// Control register.
pub const CONTROL: usize = 0x30;
/// Interrupt mask.
pub const INTERRUPT_MASK: usize = 0x38;
/// Bytes of the transmit FIFO (revision r1p5 has 32).
pub const FIFO: usize = 16;
/// Bit of [`FLAGS`]: the transmit FIFO is empty.
pub const TRANSMIT_EMPTY: u32 = 1 << 7;
/// Bits of [`CONTROL`]: enabled, with receiver and transmitter.
pub const ENABLED: u32 = 1 << 0 | 1 << 8 | 1 << 9;
