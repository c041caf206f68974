//! Bits of [`Start::options`].

/// Every patch site enters the wedge; none is handled in place.
pub const NO_FAST_PATHS: u64 = 1 << 0;
/// System calls of user mode are not rewritten.
pub const NO_CALL_SITES: u64 = 1 << 1;
/// Kernel functions are not replaced.
pub const NO_FUNCTIONS: u64 = 1 << 4;
/// Prints the counters when the VM ends.
pub const COUNTERS: u64 = 1 << 2;
/// Counts writes to page tables, descriptor tables and devices by instruction.
pub const PROFILE: u64 = 1 << 3;
/// The VM's processes enter empty namespaces and a Landlock domain, as far as the host permits.
pub const SANDBOX: u64 = 1 << 5;
/// A debugger may stop the vCPUs.
pub const DEBUG: u64 = 1 << 11;
/// With [`SANDBOX`]: the VM ends if the host refuses a part of the sandbox.
pub const STRICT: u64 = 1 << 6;
/// A fault maps one page, and a flush drops all user-mode mappings.
pub const NO_BATCHES: u64 = 1 << 7;
/// One process serves all address spaces of a vCPU, one after another.
pub const ONE_SPACE: u64 = 1 << 8;
/// The guest kernel is unmapped while user mode runs. Requires [`NO_FAST_PATHS`] and
/// [`NO_CALL_SITES`].
pub const REMAP: u64 = 1 << 9;
/// A tracer process receives all signals of a guest process.
pub const TRACED: u64 = 1 << 10;
/// Protection keys isolate the kernel from user mode; the file of guest memory holds copies of
/// executable pages after guest memory ([`layout::COPIES`](super::layout::COPIES)). Excludes
/// [`REMAP`].
pub const KEYS: u64 = 1 << 12;
/// The host supports 32-bit system calls.
pub const COMPAT: u64 = 1 << 14;
/// User mode runs in processes of its own, in which the kernel is not mapped. Excludes
/// [`KEYS`], [`REMAP`], [`TRACED`] and [`PROFILE`]; requires [`NO_CALL_SITES`]. The shared
/// memory is followed by a [`mailbox`](super::layout::mailbox) for each slot.
pub const USER_PROCESS: u64 = 1 << 15;
