//! PrimeCell real-time clock PL031 (DDI 0224C, chapter 3).

/// Name in a device tree.
pub const COMPATIBLE: &str = "arm,pl031";
/// Seconds since 1970.
pub const DATA: usize = 0x00;
/// Seconds at which the alarm interrupts.
pub const MATCH: usize = 0x04;
/// Sets the seconds.
pub const LOAD: usize = 0x08;
/// Control.
pub const CONTROL: usize = 0x0c;
/// Interrupt mask: bit 0 lets the alarm through.
pub const INTERRUPT_MASK: usize = 0x10;
/// First of eight registers with one byte of the identification each.
pub const IDENTIFICATION: usize = 0xfe0;
/// Identification: part 0x031 of Arm, PrimeCell.
pub const IDENTITY: [u8; 8] = [0x31, 0x10, 0x04, 0x00, 0x0d, 0xf0, 0x05, 0xb1];
