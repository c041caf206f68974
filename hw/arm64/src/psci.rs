//! Power State Coordination Interface (DEN 0022), by which a kernel starts CPUs and ends the
//! machine.

/// Names in a device tree of the versions with standard function numbers.
pub const COMPATIBLE: [&str; 2] = ["arm,psci-1.0", "arm,psci-0.2"];
/// Starts a CPU: affinity, entry point, argument.
pub const CPU_ON: u64 = 0xc400_0003;
/// Switches the machine off.
pub const SYSTEM_OFF: u64 = 0x8400_0008;
/// Resets the machine.
pub const SYSTEM_RESET: u64 = 0x8400_0009;
/// Result: done.
pub const SUCCESS: i64 = 0;
