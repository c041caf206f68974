//! Values of [`Start::log`], the least severe messages that are printed. A message of a VM's
//! process is a line `<LEVEL>TEXT` on standard error.

/// The VM cannot continue.
pub const ERROR: u64 = 0;
/// The guest used something that is not supported.
pub const WARN: u64 = 1;
/// Information.
pub const INFO: u64 = 2;
