//! Virtio over MMIO (Virtual I/O Device 1.2, section 4.2.2): the registers by which a device is
//! found, and the console's character output without queues (section 5.3.4, emergency write).
//! Registers have 32 bits.

/// Name in a device tree.
pub const COMPATIBLE: &str = "virtio,mmio";
/// Magic value.
pub const MAGIC: usize = 0x000;
/// Contents of [`MAGIC`].
pub const MAGIC_VALUE: u32 = 0x7472_6976;
/// Device type; 0: none.
pub const DEVICE: usize = 0x008;
/// Features that the device offers, 32 of them.
pub const FEATURES: usize = 0x010;
/// Device configuration.
pub const CONFIGURATION: usize = 0x100;

/// Device type of a console.
pub const CONSOLE: u32 = 3;
/// Feature of a console: emergency write.
pub const CONSOLE_EMERGENCY_WRITE: u32 = 1 << 2;
/// Register of the console that sends a character other than 0, at any time.
pub const EMERGENCY_WRITE: usize = CONFIGURATION + 8;
