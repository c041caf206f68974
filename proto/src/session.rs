//! Sessions in shared memory: how a client and a server connect, and reconnect after a restart of
//! either.
//!
//! Root owns the memory of a session, maps it for the client and the server and keeps it over
//! restarts. A client has a capability to signal the server's notification, and a server has one
//! for the notification of each vCPU of its client ([`slot::peer`]). The event bit of the session
//! is in the start page.
//!
//! The first [`HEADER`] words hold:
//!
//! | word | written by | content |
//! |---|---|---|
//! | 0 | server | *generation*: number of this run of the server; 0: no server yet |
//! | 1 | server | *accepted*: the request in force; 0: none |
//! | 2 | client | *request*: generation (high half) and the client's count (low half) |
//! | 8–15 | server | server information, valid while a request is accepted |
//! | 16 | client | client information; it may change at any time |
//! | 17 | client | index of the vCPU to signal; it may change at any time |
//!
//! Both sides use the rings after the header only while `accepted == request`. To connect, a client
//! writes a new request, signals the server and does not touch the rings. Once no request of an
//! older connection is in flight, the server clears the rings, accepts and signals the client. A
//! restarted server has a new generation and signals its clients, which then reconnect. A restarted
//! client writes a request with another count. So neither side uses rings in a state that the other
//! side does not know of, and a side that violates these rules harms its own session only.

use core::sync::atomic::{AtomicU64, Ordering};

#[cfg(doc)]
use crate::start::slot;
use crate::system::MAX_VCPUS;

/// Words of the header.
pub const HEADER: usize = 64;
/// Words of server information.
pub const INFO: usize = 8;

const GENERATION: usize = 0;
const ACCEPTED: usize = 1;
const REQUEST: usize = 2;
const FIRST_INFO: usize = 8;
const CLIENT_INFO: usize = 16;
const VCPU: usize = 17;

/// Makes the server of the session in `memory` signal the notification of this vCPU from now on.
/// Signals may still go to the previous one for a while. Does nothing if the memory is too short.
pub fn set_notified_vcpu(memory: &[AtomicU64], vcpu: usize) {
    if let Some(header) = Header::new(memory) {
        header.write(VCPU, vcpu as u64);
    }
}

#[derive(Clone, Copy)]
struct Header<'m>(&'m [AtomicU64]);

impl<'m> Header<'m> {
    fn new(memory: &'m [AtomicU64]) -> Option<Self> {
        memory.get(..HEADER).map(Self)
    }

    fn read(self, word: usize) -> u64 {
        self.0[word].load(Ordering::SeqCst)
    }

    fn write(self, word: usize, value: u64) {
        self.0[word].store(value, Ordering::SeqCst);
    }
}

/// State of a session, as its client sees it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Connection {
    /// Not connected: the rings must not be touched.
    Down,
    /// As `Down`; the client has just requested a connection and must signal the server.
    Asked,
    /// Connected since this call: the rings are empty, and all pending requests must be sent again.
    Fresh,
    /// Connected.
    Up,
}

/// Operations common to both sides of a connection.
pub trait Link {
    /// Returns whether there is a connection: the client requested it, and the server accepted.
    fn is_connected(&self) -> bool;

    /// Closes the connection because the other side violated the protocol of the rings. The client
    /// requests another connection at its next poll.
    fn give_up(&mut self);
}

/// Client side of a connection.
pub struct ClientLink<'m> {
    header: Header<'m>,
    request: u64,
    connected: bool,
}

impl<'m> ClientLink<'m> {
    /// Creates the client of the session in `memory`, not connected; `None` if the memory is too
    /// short.
    pub fn new(memory: &'m [AtomicU64]) -> Option<Self> {
        let header = Header::new(memory)?;
        // The previous client may still be connected: continue its count, and forget its
        // generation.
        let request = header.read(REQUEST) & u64::from(u32::MAX);
        // The first thread waits for the server's answer.
        header.write(VCPU, 0);
        Some(Self { header, request, connected: false })
    }

    /// Reads the state of the session, and requests a connection if there is none.
    pub fn poll(&mut self) -> Connection {
        let generation = self.header.read(GENERATION) & u64::from(u32::MAX);
        if generation == 0 {
            self.connected = false;
            return Connection::Down;
        }
        let accepted = self.header.read(ACCEPTED) == self.request;
        if generation != self.request >> 32 || (self.connected && !accepted) {
            self.connected = false;
            let count = (self.request as u32).wrapping_add(1);
            self.request = generation << 32 | u64::from(count);
            self.header.write(REQUEST, self.request);
            return Connection::Asked;
        }
        match (self.connected, accepted) {
            (_, false) => Connection::Down,
            (true, true) => Connection::Up,
            (false, true) => {
                self.connected = true;
                Connection::Fresh
            }
        }
    }

    /// Publishes the word of client information.
    pub fn set_client_info(&mut self, word: u64) {
        self.header.write(CLIENT_INFO, word);
    }

    /// Returns the server information, if connected.
    pub fn info(&self) -> Option<[u64; INFO]> {
        self.connected.then(|| core::array::from_fn(|index| self.header.read(FIRST_INFO + index)))
    }
}

impl Link for ClientLink<'_> {
    fn is_connected(&self) -> bool {
        self.connected
    }

    fn give_up(&mut self) {
        self.connected = false;
        self.request &= u64::from(u32::MAX);
    }
}

/// Server side of a connection.
pub struct ServerLink<'m> {
    header: Header<'m>,
    generation: u32,
    /// Request in force; 0: none.
    accepted: u64,
    /// Request that must not be accepted again, because its connection broke.
    broken: u64,
}

impl<'m> ServerLink<'m> {
    /// Creates the server of the session in `memory`, in a new generation; `None` if the memory is
    /// too short. The client must be signalled.
    ///
    /// No request of an older run may be in flight: no device still writes to the memory.
    pub fn new(memory: &'m [AtomicU64]) -> Option<Self> {
        let header = Header::new(memory)?;
        let generation = (header.read(GENERATION) as u32).wrapping_add(1).max(1);
        header.write(ACCEPTED, 0);
        header.write(GENERATION, generation.into());
        Some(Self { header, generation, accepted: 0, broken: 0 })
    }

    /// Returns a request for a new connection. The caller [accepts](Self::accept) it once no
    /// request of the previous connection is in flight, and must not touch the rings until then.
    pub fn request(&mut self) -> Option<u64> {
        let request = self.header.read(REQUEST);
        let new = request != self.accepted && request != self.broken;
        let asks = new && request >> 32 == u64::from(self.generation);
        if new && self.accepted != 0 {
            self.give_up();
        }
        asks.then_some(request)
    }

    /// Accepts a request, after the rings were cleared. The client must be signalled.
    pub fn accept(&mut self, request: u64, info: [u64; INFO]) {
        for (index, word) in info.into_iter().enumerate() {
            self.header.write(FIRST_INFO + index, word);
        }
        self.accepted = request;
        self.header.write(ACCEPTED, request);
    }

    /// Returns the number of the connection, of which each has another one; 0: none.
    pub fn connection(&self) -> u64 {
        self.accepted
    }

    /// Returns the word of client information.
    pub fn client_info(&self) -> u64 {
        self.header.read(CLIENT_INFO)
    }

    /// Returns the index of the client's vCPU to signal, less than [`MAX_VCPUS`]. The client may
    /// not have it.
    #[inline]
    pub fn notified_vcpu(&self) -> usize {
        (self.header.read(VCPU) % MAX_VCPUS as u64) as usize
    }
}

impl Link for ServerLink<'_> {
    fn is_connected(&self) -> bool {
        self.accepted != 0
    }

    fn give_up(&mut self) {
        self.broken = self.accepted;
        self.accepted = 0;
        self.header.write(ACCEPTED, 0);
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::testing::memory;

    fn connect(client: &mut ClientLink, server: &mut ServerLink) {
        assert_eq!(client.poll(), Connection::Asked);
        assert_eq!(client.poll(), Connection::Down, "asked once");
        let request = server.request().unwrap();
        server.accept(request, [7; INFO]);
        assert_eq!(server.request(), None);
        assert_eq!(client.poll(), Connection::Fresh);
        assert_eq!(client.poll(), Connection::Up);
        assert_eq!(client.info(), Some([7; INFO]));
    }

    #[test]
    fn client_first_then_restarts_of_both() {
        let memory = memory(HEADER);
        let mut client = ClientLink::new(&memory).unwrap();
        assert_eq!(client.poll(), Connection::Down, "there is no server yet");
        let mut server = ServerLink::new(&memory).unwrap();
        connect(&mut client, &mut server);
        for _ in 0..3 {
            let mut server = ServerLink::new(&memory).unwrap();
            assert_eq!(server.request(), None, "the request was to the server before");
            connect(&mut client, &mut server);
            let mut other = ClientLink::new(&memory).unwrap();
            connect(&mut other, &mut server);
            client = ClientLink::new(&memory).unwrap();
            connect(&mut client, &mut server);
        }
    }

    #[test]
    fn a_new_client_does_not_take_over_the_old_connection() {
        let memory = memory(HEADER);
        let mut server = ServerLink::new(&memory).unwrap();
        connect(&mut ClientLink::new(&memory).unwrap(), &mut server);
        let mut client = ClientLink::new(&memory).unwrap();
        assert_eq!(client.info(), None);
        assert_eq!(client.poll(), Connection::Asked);
        assert!(server.is_connected());
        assert!(server.request().is_some());
        assert!(!server.is_connected(), "closed as soon as a new request is seen");
        assert_eq!(client.poll(), Connection::Down);
    }

    #[test]
    fn broken_connections_are_closed_and_reopened() {
        let memory = memory(HEADER);
        let mut client = ClientLink::new(&memory).unwrap();
        let mut server = ServerLink::new(&memory).unwrap();
        connect(&mut client, &mut server);
        server.give_up();
        assert_eq!(server.request(), None, "the same request is not accepted again");
        connect(&mut client, &mut server);
        client.give_up();
        connect(&mut client, &mut server);
    }

    #[test]
    fn the_client_chooses_the_vcpu_to_signal() {
        let memory = memory(HEADER);
        let server = ServerLink::new(&memory).unwrap();
        assert_eq!(server.notified_vcpu(), 0);
        set_notified_vcpu(&memory, 3);
        assert_eq!(server.notified_vcpu(), 3);
        let server = ServerLink::new(&memory).unwrap();
        assert_eq!(server.notified_vcpu(), 3, "a restart of the server changes nothing");
        set_notified_vcpu(&memory, MAX_VCPUS + 1);
        assert_eq!(server.notified_vcpu(), 1, "always an index");
        ClientLink::new(&memory).unwrap();
        assert_eq!(server.notified_vcpu(), 0, "the first thread of a new client waits");
        set_notified_vcpu(&memory[..HEADER - 1], 3);
        assert_eq!(server.notified_vcpu(), 0);
    }

    #[test]
    fn generations_wrap() {
        let memory = memory(HEADER);
        memory[GENERATION].store(u32::MAX.into(), Ordering::Relaxed);
        let mut server = ServerLink::new(&memory).unwrap();
        assert_eq!(server.generation, 1);
        connect(&mut ClientLink::new(&memory).unwrap(), &mut server);
    }

    proptest! {
        /// Writes arbitrary values to the header from either side: no side trusts a connection that
        /// it did not establish, and none panics.
        #[test]
        fn hostile_headers(writes in prop::collection::vec((0..HEADER, any::<u64>(), any::<bool>()), 0..100)) {
            let memory = memory(HEADER);
            let mut client = ClientLink::new(&memory).unwrap();
            let mut server = ServerLink::new(&memory).unwrap();
            for (word, value, small) in writes {
                memory[word % (VCPU + 1)].store(if small { value % 4 } else { value }, Ordering::Relaxed);
                prop_assert!(server.notified_vcpu() < MAX_VCPUS);
                let before = server.accepted;
                if let Some(request) = server.request() {
                    prop_assert_ne!(request, before);
                    prop_assert_eq!(request >> 32, u64::from(server.generation));
                    server.accept(request, [0; INFO]);
                }
                match client.poll() {
                    Connection::Fresh | Connection::Up => prop_assert!(client.info().is_some()),
                    Connection::Down | Connection::Asked => prop_assert!(client.info().is_none()),
                }
            }
        }
    }
}
