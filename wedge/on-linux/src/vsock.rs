//! Vsock: packets go over a stream to a process of the host's (`hosted/jail`), which keeps connections, each behind its length, as frames of networks do
//! ([`crate::net`]). A packet of no bytes says that the guest's device was reset.

use core::iter;

use proto::vsock::{HEADER, Header, MOST_DATA};
use vmm_bus::{Data, Packets};

use crate::net;

/// The host's sockets as the guest's device has them.
pub struct Link {
    stream: net::Link,
    /// The other side has packets of this driver.
    has_sent: bool,
    /// The other side does not know of a reset yet.
    is_reset: bool,
}

impl Link {
    /// Without packets.
    pub fn new() -> Self {
        Self { stream: net::Link::of_packets(), has_sent: false, is_reset: false }
    }
}

impl Packets for Link {
    fn send(&mut self, packet: &mut Data<'_>) -> bool {
        if !(HEADER as u32..=HEADER as u32 + MOST_DATA).contains(&packet.left()) {
            return true;
        }
        if self.is_reset {
            let mut nothing = iter::empty();
            let mut nothing = Data::new(packet.memory(), &mut nothing, 0);
            self.is_reset = !self.stream.put(&[], &mut nothing);
        }
        let is_taken = !self.is_reset && self.stream.put(&[], packet);
        self.has_sent |= is_taken;
        is_taken
    }

    fn first(&mut self) -> Option<(Header, u32)> {
        loop {
            let length = self.stream.await_first()?;
            if let Some(bytes) = self.stream.first_bytes(0) {
                return Some((Header::from_bytes(&bytes), length.saturating_sub(HEADER as u32)));
            }
            // No packet: somebody has changed what is in shared memory.
            self.stream.forget_first();
        }
    }

    fn copy(&mut self, offset: u32, to: &mut Data<'_>) {
        self.stream.copy_first(offset.saturating_add(HEADER as u32), to);
    }

    fn drop_first(&mut self) {
        self.stream.forget_first();
    }

    fn reset(&mut self) {
        // Whoever of the host waits for the first driver goes on waiting.
        self.is_reset |= core::mem::take(&mut self.has_sent);
    }
}
