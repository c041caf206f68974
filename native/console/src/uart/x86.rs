//! Serial port of a PC: a 16550 at I/O ports.

use native_rt::Ports;
use proto::start::Start;

use super::ns16550::Ns16550;

/// Driver of the server's port.
pub type ConsolePort = Ns16550<Ports>;

/// Initialises the port at this first I/O port; `None`: no serial port is known there.
pub fn open(_: &Start, first: u16) -> Option<ConsolePort> {
    Some(Ns16550::new(Ports::new(first, 8)?))
}
