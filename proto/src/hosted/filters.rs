//! Seccomp filters in shared memory.

use super::layout;

/// Seccomp filters of the VM's processes, one for each kind of process. A word is one instruction
/// (`struct sock_filter` in Linux).
#[derive(Clone, Copy, Debug)]
pub struct Filters {
    /// For each filter its length in instructions, then the instructions.
    pub programs: [[u64; Self::WORDS]; Self::COUNT],
}

impl Filters {
    /// Words of each filter, its length included.
    pub const WORDS: usize = 512;
    /// Number of filters.
    pub const COUNT: usize = 8;
    /// Index of the filter of guest processes.
    pub const GUEST: usize = 0;
    /// Index of the filter of disk workers.
    pub const WORKER: usize = 1;
    /// Index of the filter of network workers.
    pub const NET: usize = 2;
    /// Offset from these three indices to the variants that may also send [`layout::KICK_SIGNAL`];
    /// used where the host confines signals to processes of the VM.
    pub const KICKS: usize = 3;
    /// Index of the filter of the device process.
    pub const DEVICE: usize = 6;
    /// Index of the filter of the thread that runs user mode in a user process.
    pub const USER_THREAD: usize = 7;
}

const _: () = assert!(layout::FILTERS + size_of::<Filters>() as u64 <= layout::SHARED_LENGTH);
