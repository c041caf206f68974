//! Sessions in shared memory: how a client and a server find each other, and again after either was restarted.
//!
//! The memory of a session belongs to root, which maps it for the client and the server and keeps it while one of
//! them is restarted. Each has a capability to signal the other's notification, in slot
//! `start::slot::SESSIONS + n`, where `n` is the session's number with its owner; the other side's event bit for the
//! session is in the start page.
//!
//! The first [`HEADER`] words hold:
//!
//! | word | written by | what |
//! |---|---|---|
//! | 0 | server | *generation*: number of this run of the server; 0: there was none yet |
//! | 1 | server | *accepted*: the request in force; 0: none |
//! | 2 | client | *request*: generation that is asked (high half) and the client's count (low half) |
//! | 8–15 | server | what the server tells of itself, valid while a request is accepted |
//! | 16 | client | what the client tells of itself; it may change at any time |
//!
//! The rings behind the header are used by both sides only while `accepted == request`. To connect, a client writes a
//! new request, signals the server and leaves the rings alone. The server, once nothing of an older connection is under
//! way, clears the rings, accepts and signals the client. A server that was restarted has a new generation and signals
//! its clients; whoever sees it connects anew. A client that was restarted makes a request with another count.
//! So neither side ever uses rings that the other believes to be in another state, and whichever breaks these
//! rules harms its own session only.

use core::sync::atomic::{AtomicU64, Ordering};

/// Words of the header.
pub const HEADER: usize = 64;
/// Words that a server tells about itself.
pub const INFO: usize = 8;

const GENERATION: usize = 0;
const ACCEPTED: usize = 1;
const REQUEST: usize = 2;
const FIRST_INFO: usize = 8;
const CLIENT_INFO: usize = 16;

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

/// What a client finds when it looks at its session.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Connection {
    /// Not connected: the rings must not be touched.
    Down,
    /// As `Down`, and the client has just asked for a connection: the server is to be signalled.
    Asked,
    /// Connected just now: the rings are empty, and whatever was under way is to be sent again.
    Fresh,
    /// Connected as before.
    Up,
}

/// A side of a connection, for what is the same on both.
pub trait Link {
    /// Whether there is a connection: the client asked for it, and the server has accepted.
    fn is_connected(&self) -> bool;

    /// Ends the connection because the other side broke the rules of the rings. The client asks for another one when it
    /// polls next.
    fn give_up(&mut self);
}

/// The client's side.
pub struct ClientLink<'m> {
    header: Header<'m>,
    request: u64,
    connected: bool,
}

impl<'m> ClientLink<'m> {
    /// The client of the session in `memory`, not connected; `None` if there is too little memory.
    pub fn new(memory: &'m [AtomicU64]) -> Option<Self> {
        let header = Header::new(memory)?;
        // A client before this one may be connected: go on counting, and forget its generation.
        let request = header.read(REQUEST) & u64::from(u32::MAX);
        Some(Self { header, request, connected: false })
    }

    /// Looks at the state of the session, and asks for a connection if there is none.
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

    /// Tells the server something about the client.
    pub fn set_client_info(&mut self, word: u64) {
        self.header.write(CLIENT_INFO, word);
    }

    /// What the server tells of itself, if connected.
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

/// The server's side.
pub struct ServerLink<'m> {
    header: Header<'m>,
    generation: u32,
    /// The request in force, 0 for none.
    accepted: u64,
    /// A request that must not be accepted: its connection broke.
    broken: u64,
}

impl<'m> ServerLink<'m> {
    /// The server of the session in `memory`, in a new generation; `None` if there is too little memory. The client is
    /// to be signalled.
    ///
    /// Nothing of an older run may be under way: no device still writes to the memory.
    pub fn new(memory: &'m [AtomicU64]) -> Option<Self> {
        let header = Header::new(memory)?;
        let generation = (header.read(GENERATION) as u32).wrapping_add(1).max(1);
        header.write(ACCEPTED, 0);
        header.write(GENERATION, generation.into());
        Some(Self { header, generation, accepted: 0, broken: 0 })
    }

    /// A request for a new connection, to be [accepted](Self::accept) when nothing of the one before is under way.
    /// The rings must not be touched until then.
    pub fn request(&mut self) -> Option<u64> {
        let request = self.header.read(REQUEST);
        let new = request != self.accepted && request != self.broken;
        let asks = new && request >> 32 == u64::from(self.generation);
        if new && self.accepted != 0 {
            self.give_up();
        }
        asks.then_some(request)
    }

    /// Accepts a request, after the rings were cleared. The client is to be signalled.
    pub fn accept(&mut self, request: u64, info: [u64; INFO]) {
        for (index, word) in info.into_iter().enumerate() {
            self.header.write(FIRST_INFO + index, word);
        }
        self.accepted = request;
        self.header.write(ACCEPTED, request);
    }

    /// What the client tells about itself.
    pub fn client_info(&self) -> u64 {
        self.header.read(CLIENT_INFO)
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
    fn broken_connections_are_closed_and_made_anew() {
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
    fn generations_wrap() {
        let memory = memory(HEADER);
        memory[GENERATION].store(u32::MAX.into(), Ordering::Relaxed);
        let mut server = ServerLink::new(&memory).unwrap();
        assert_eq!(server.generation, 1);
        connect(&mut ClientLink::new(&memory).unwrap(), &mut server);
    }

    proptest! {
        /// Either side writes anything into the header: the other one never believes in a connection that it did not
        /// make itself, and never panics.
        #[test]
        fn hostile_headers(writes in prop::collection::vec((0..HEADER, any::<u64>(), any::<bool>()), 0..100)) {
            let memory = memory(HEADER);
            let mut client = ClientLink::new(&memory).unwrap();
            let mut server = ServerLink::new(&memory).unwrap();
            for (word, value, small) in writes {
                memory[word % 16].store(if small { value % 4 } else { value }, Ordering::Relaxed);
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
