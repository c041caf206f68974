//! Commands on [`layout::CONTROL_FD`], one byte each. The device process answers a command with the
//! same byte on completion.

/// Stop the guest processes.
pub const PAUSE: u8 = b'p';
/// Continue the guest processes.
pub const RESUME: u8 = b'r';
/// Press the power button.
pub const POWER_BUTTON: u8 = b'b';
/// Stop the vCPUs for a debugger.
pub const HALT: u8 = b'h';
/// Continue the vCPUs that a debugger has released.
pub const GO: u8 = b'g';
/// Ask the guest for statistics of its memory ([`balloon`](super::balloon)). The acknowledgement
/// does not wait for the guest.
pub const MEMORY_STATISTICS: u8 = b'm';
/// Change the size of the balloon to the target in shared memory ([`balloon`](super::balloon)). The
/// acknowledgement does not wait for the guest.
pub const BALLOON: u8 = b't';
/// From the device process only: a vCPU has stopped for a debugger.
pub const HALTED: u8 = b'H';
/// From the device process only: a guest process was created.
pub const PROCESS_CREATED: u8 = b'n';
/// From the device process only: the guest is about to execute its first instruction.
pub const STARTED: u8 = b's';
