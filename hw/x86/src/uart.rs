//! Serial port 16550 (National Semiconductor PC16550D data sheet, section 8).

/// I/O port of the first one.
pub const COM1: u16 = 0x3f8;
/// I/O port of the second one.
pub const COM2: u16 = 0x2f8;

/// Data; with [`DIVISOR_ACCESS`] the divisor's low byte.
pub const DATA: u16 = 0;
/// Interrupt enable; with [`DIVISOR_ACCESS`] the divisor's high byte.
pub const INTERRUPT_ENABLE: u16 = 1;
/// Interrupt identification (read).
pub const INTERRUPT_IDENTIFICATION: u16 = 2;
/// FIFO control (write).
pub const FIFO_CONTROL: u16 = 2;
/// Line control.
pub const LINE_CONTROL: u16 = 3;
/// Modem control.
pub const MODEM_CONTROL: u16 = 4;
/// Line status.
pub const LINE_STATUS: u16 = 5;

/// Value of [`FIFO_CONTROL`]: on, both cleared.
pub const FIFO_ON_AND_CLEAR: u8 = 0x07;
/// Bits of [`INTERRUPT_IDENTIFICATION`]: the FIFOs are on and work.
pub const FIFO_IS_ON: u8 = 0xc0;
/// Bytes of a FIFO.
pub const FIFO_LENGTH: u8 = 16;
/// Value of [`LINE_CONTROL`]: eight bits, no parity.
pub const EIGHT_BITS: u8 = 0x03;
/// Bit of [`LINE_CONTROL`]: the divisor is accessible.
pub const DIVISOR_ACCESS: u8 = 0x80;
/// Bits of [`MODEM_CONTROL`]: data terminal ready, request to send.
pub const READY_TO_SEND: u8 = 0x03;
/// Bit of [`LINE_STATUS`]: the transmitter, or its FIFO, is empty.
pub const TRANSMITTER_EMPTY: u8 = 0x20;
/// Divisor of 115200 baud.
pub const DIVISOR_115200: u8 = 1;
