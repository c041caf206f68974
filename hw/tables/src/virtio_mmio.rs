//! Virtio over MMIO (Virtual I/O Device 1.2, section 4.2.2): registers of the transport, and the
//! console's character output without queues (section 5.3.4, emergency write).

/// Name in a device tree.
pub const COMPATIBLE: &str = "virtio,mmio";

/// Magic value (RO).
pub const MAGIC: u64 = 0x000;
/// "virt".
pub const MAGIC_VALUE: u32 = 0x7472_6976;
/// Version (RO).
pub const VERSION: u64 = 0x004;
/// The version without legacy interface.
pub const VERSION_VALUE: u32 = 2;
/// Device type (RO); 0: none.
pub const DEVICE_ID: u64 = 0x008;
/// Vendor (RO).
pub const VENDOR_ID: u64 = 0x00c;
/// Selected word of the device's features (RO).
pub const DEVICE_FEATURES: u64 = 0x010;
/// Selected word of the device's features (WO).
pub const DEVICE_FEATURES_SELECT: u64 = 0x014;
/// Selected word of the driver's features (WO).
pub const DRIVER_FEATURES: u64 = 0x020;
/// Selected word of the driver's features (WO).
pub const DRIVER_FEATURES_SELECT: u64 = 0x024;
/// Selected queue (WO).
pub const QUEUE_SELECT: u64 = 0x030;
/// Maximum size of the selected queue; 0: it does not exist (RO).
pub const QUEUE_MAX: u64 = 0x034;
/// Size of the selected queue (WO).
pub const QUEUE_SIZE: u64 = 0x038;
/// Enable flag of the selected queue.
pub const QUEUE_READY: u64 = 0x044;
/// Notification: number of a queue (WO).
pub const QUEUE_NOTIFY: u64 = 0x050;
/// Causes of the interrupt (RO).
pub const INTERRUPT_STATUS: u64 = 0x060;
/// Acknowledgement of causes (WO).
pub const INTERRUPT_ACK: u64 = 0x064;
/// Device status; 0 resets the device.
pub const STATUS: u64 = 0x070;
/// Descriptor table of the selected queue, 64 bits in two registers (WO).
pub const QUEUE_DESC: u64 = 0x080;
/// Available ring of the selected queue, likewise.
pub const QUEUE_DRIVER: u64 = 0x090;
/// Used ring of the selected queue, likewise.
pub const QUEUE_DEVICE: u64 = 0x0a0;
/// Selected region of shared memory (WO).
pub const SHARED_SELECT: u64 = 0x0ac;
/// Length and address of the selected region, two registers each; all ones: it does not exist.
pub const SHARED_LENGTH: u64 = 0x0b0;
/// End of these registers.
pub const SHARED_END: u64 = 0x0c0;
/// Generation of the configuration (RO).
pub const GENERATION: u64 = 0x0fc;
/// Configuration of the device.
pub const CONFIG: u64 = 0x100;
/// Bytes of all registers.
pub const LENGTH: u64 = 0x200;

/// Device type of a network card.
pub const NET: u32 = 1;
/// Device type of a disk.
pub const BLOCK: u32 = 2;
/// Device type of a console.
pub const CONSOLE: u32 = 3;
/// Feature of a console: emergency write.
pub const CONSOLE_EMERGENCY_WRITE: u32 = 1 << 2;
/// Register of the console that sends a character other than 0, at any time.
pub const EMERGENCY_WRITE: u64 = CONFIG + 8;
