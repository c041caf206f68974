//! Serial ports: a driver for each kind, behind one trait.

#[cfg(target_arch = "x86_64")]
pub mod ns16550;
#[cfg(any(test, target_arch = "aarch64"))]
pub mod pl011;
#[cfg_attr(target_arch = "aarch64", path = "uart/arm64.rs")]
#[cfg_attr(target_arch = "x86_64", path = "uart/x86.rs")]
mod port;

pub use port::{ConsolePort, open};

/// Driver of a serial port that has been initialised: it receives by interrupts.
pub trait SerialDriver {
    /// The interrupt stays asserted until its cause is gone, so the kernel may only unmask it
    /// after [`SerialDriver::service`]. Otherwise it is an edge, which a masked interrupt would
    /// lose.
    const IS_LEVEL: bool;

    /// Moves bytes in both directions until the port asserts no interrupt. `next` returns
    /// `client`'s bytes to send, `received` accepts at most `room` bytes of input. Excess input
    /// stays in the port, which does not interrupt until there is room again.
    fn service<T>(
        &mut self,
        room: usize,
        client: &mut T,
        next: impl Fn(&mut T) -> Option<u8>,
        received: impl Fn(&mut T, u8),
    );

    /// Sends bytes of `next` as far as the port has room, and enables the interrupt for the next
    /// time.
    fn send(&mut self, next: impl FnMut() -> Option<u8>);

    /// Waits for the transmitter to become idle; returns whether it did.
    fn drain(&mut self) -> bool;
}

/// Status reads until the transmitter must be idle; far more than 32 bytes at 115200 baud take.
const IDLE_READS: u32 = 100_000;
/// Maximum number of rounds per interrupt, so that a broken device cannot block the server.
const MAX_ROUNDS: u32 = 256;
