//! Power State Coordination Interface (DEN 0022), by which a kernel starts CPUs and ends the
//! machine.

/// Names in a device tree of the versions with standard function numbers.
pub const COMPATIBLE: [&str; 2] = ["arm,psci-1.0", "arm,psci-0.2"];
/// Version: 1.1, in the format of the function.
pub const VERSION_1_1: u64 = 1 << 16 | 1;
/// Returns the version.
pub const VERSION: u64 = 0x8400_0000;
/// Suspends the calling CPU; with 64-bit arguments.
pub const CPU_SUSPEND: u64 = 0xc400_0001;
/// Stops the calling CPU.
pub const CPU_OFF: u64 = 0x8400_0002;
/// State of a CPU: affinity, lowest level. 0: on, 1: off, 2: it has been started, and does not run
/// yet (section 5.7).
pub const AFFINITY_INFO: u64 = 0xc400_0004;
/// Kind of the trusted OS that may have to migrate; [`NO_TRUSTED_OS`].
pub const MIGRATE_INFO_TYPE: u64 = 0x8400_0006;
/// There is none.
pub const NO_TRUSTED_OS: u64 = 2;
/// Returns whether there is a function.
pub const FEATURES: u64 = 0x8400_000a;
/// Bit of function numbers: arguments have 64 bits.
pub const WIDE: u64 = 1 << 30;
/// Starts a CPU: affinity, entry point, argument.
pub const CPU_ON: u64 = 0xc400_0003;
/// Switches the machine off.
pub const SYSTEM_OFF: u64 = 0x8400_0008;
/// Resets the machine.
pub const SYSTEM_RESET: u64 = 0x8400_0009;
/// Result: done.
pub const SUCCESS: i64 = 0;
/// Result: no such function.
pub const NOT_SUPPORTED: i64 = -1;
/// Result: an argument is wrong.
pub const INVALID_PARAMETERS: i64 = -2;
/// Result: the CPU runs already.
pub const ALREADY_ON: i64 = -4;
/// Result: the CPU has been started, and does not run yet (section 5.2.2).
pub const ON_PENDING: i64 = -5;
/// Result: the entry point is no memory.
pub const INVALID_ADDRESS: i64 = -9;

/// Functions of the SMC calling convention itself (DEN 0028).
pub mod smccc {
    /// Returns the version.
    pub const VERSION: u64 = 0x8000_0000;
    /// Version 1.1.
    pub const VERSION_1_1: u64 = 1 << 16 | 1;
    /// Returns whether there is a function.
    pub const ARCH_FEATURES: u64 = 0x8000_0001;
}

/// Stolen time of the calling CPU (DEN 0057).
pub mod stolen_time {
    /// Returns whether there is a function.
    pub const FEATURES: u64 = 0xc500_0020;
    /// Returns the physical address of the CPU's record.
    pub const RECORD: u64 = 0xc500_0021;
    /// Length of a record, and its alignment. Its first words, revision and attributes, are 0.
    pub const LENGTH: u64 = 64;
    /// Offset in a record of the time in nanoseconds, 64 bits.
    pub const TIME: u64 = 8;
}

/// Interface to random numbers of the firmware (DEN 0098). Results are in `x0` to `x3`, or their
/// halves.
pub mod trng {
    /// Returns the version.
    pub const VERSION: u64 = 0x8400_0050;
    /// Version 1.0.
    pub const VERSION_1_0: u64 = 1 << 16;
    /// Returns whether there is a function.
    pub const FEATURES: u64 = 0x8400_0051;
    /// Returns the UUID of the source, four words of 32 bits.
    pub const GET_UUID: u64 = 0x8400_0052;
    /// Returns up to [`max_bits`] bits, 32 in a register, the last register being the lowest.
    pub const RND32: u64 = 0x8400_0053;
    /// The same with 64 bits in a register.
    pub const RND64: u64 = 0xc400_0053;
    /// Largest number of bits, by the number of bits in a register.
    pub const fn max_bits(register: u32) -> u32 {
        3 * register
    }
    /// Result: there are no random numbers at present.
    pub const NO_ENTROPY: i64 = -3;
}
