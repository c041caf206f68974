//! Serial port of an AArch64 machine: a PL011, whose registers root has mapped.

use native_rt::device::{self, DeviceRegisters};
use proto::start::Start;

use super::pl011::Pl011;

/// Driver of the server's port.
pub type ConsolePort = Pl011<DeviceRegisters>;

/// Initialises the port; `None`: the start page describes no registers.
pub fn open(start: &Start, _: u16) -> Option<ConsolePort> {
    Some(Pl011::new(device::registers(start, 0)?))
}
