//! Connections of the vsock device, and host programs that request one.

use std::collections::VecDeque;
use std::io::{ErrorKind, Read, Write};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;

use rustix::event::PollFlags;

/// Longest line with a port in bytes.
const LINE: usize = 32;

/// State of a connection.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Stage {
    /// Requested by the guest; the host socket is not connected yet.
    Asked,
    /// Requested by the host; the guest has not accepted yet.
    Requested,
    /// Established.
    Open,
}

/// A connection.
#[derive(Debug)]
pub(super) struct Connection {
    pub stage: Stage,
    /// Host socket; `None` before it is connected.
    pub socket: Option<UnixStream>,
    /// Total bytes sent to the guest; the guest's buffer size; total bytes that the guest has
    /// consumed.
    pub sent: u32,
    pub buffer: u32,
    pub taken: u32,
    /// A credit request has been sent to the guest.
    pub begs: bool,
    /// Total bytes received from the guest, forwarded, and reported as forwarded.
    pub received: u32,
    pub forwarded: u32,
    pub told: u32,
    /// Bytes from the guest that the host program has not taken.
    pub waiting: VecDeque<u8>,
    /// The host program has ended its direction and the guest is informed; it has disconnected.
    pub is_done: bool,
    pub is_gone: bool,
    /// The guest has ended its direction and the host program is informed; it accepts no more data.
    pub guest_is_done: bool,
    pub peer_is_informed: bool,
    pub guest_is_deaf: bool,
}

/// Result of an operation on a connection.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Lifetime {
    Stays,
    /// The connection ends, and the guest is informed.
    Ends,
}

impl Connection {
    pub fn new(stage: Stage, socket: Option<UnixStream>) -> Self {
        Self {
            stage,
            socket,
            sent: 0,
            buffer: 0,
            taken: 0,
            begs: false,
            received: 0,
            forwarded: 0,
            told: 0,
            waiting: VecDeque::new(),
            is_done: false,
            is_gone: false,
            guest_is_done: false,
            peer_is_informed: false,
            guest_is_deaf: false,
        }
    }

    /// Returns the bytes that the guest accepts now. A guest that reports more consumption than was
    /// sent gains nothing.
    pub fn credit(&self) -> u32 {
        self.buffer.saturating_sub(self.sent.wrapping_sub(self.taken))
    }

    /// Returns the events to poll for on the host socket, if any: a hung-up socket reports its
    /// state forever.
    pub fn wants(&self, accepts_input: bool) -> Option<PollFlags> {
        let mut flags = PollFlags::empty();
        if self.stage != Stage::Open || self.is_gone {
            // The host program may disconnect while it waits for the guest.
            return (self.stage == Stage::Requested && accepts_input).then_some(flags);
        }
        if accepts_input && !self.is_done && !self.guest_is_deaf && self.credit() > 0 {
            flags |= PollFlags::IN;
        }
        if !self.waiting.is_empty() {
            flags |= PollFlags::OUT;
        }
        (!flags.is_empty() || self.is_done && accepts_input).then_some(flags)
    }

    /// Forwards data to the host program.
    pub fn pass_on(&mut self) -> Lifetime {
        let Some(socket) = &mut self.socket else { return Lifetime::Stays };
        let before = self.waiting.len();
        let lifetime = forward(socket, &mut self.waiting);
        self.forwarded = self.forwarded.wrapping_add((before - self.waiting.len()) as u32);
        if lifetime == Lifetime::Ends || !self.waiting.is_empty() {
            return lifetime;
        }
        if self.guest_is_done && self.guest_is_deaf {
            return Lifetime::Ends;
        }
        if self.guest_is_done && !self.peer_is_informed {
            self.peer_is_informed = true;
            // Fails if the peer has disconnected, which is detected elsewhere.
            let _ = socket.shutdown(Shutdown::Write);
        }
        Lifetime::Stays
    }

    /// Returns the data that the host program has not taken, if the guest has ended its direction:
    /// without that, its end of the connection is an abort.
    pub fn into_remainder(self) -> Option<Remainder> {
        let Self { socket, waiting, guest_is_done, .. } = self;
        let has_data = guest_is_done && !waiting.is_empty();
        socket.filter(|_| has_data).map(|socket| Remainder { socket, waiting })
    }
}

/// Rest of a connection that the guest has ended.
#[derive(Debug)]
pub(super) struct Remainder {
    pub socket: UnixStream,
    /// Bytes that the host program has not taken.
    waiting: VecDeque<u8>,
}

impl Remainder {
    /// Forwards data to the host program. The rest ends with its last byte.
    pub fn pass_on(&mut self) -> Lifetime {
        let lifetime = forward(&mut self.socket, &mut self.waiting);
        if self.waiting.is_empty() { Lifetime::Ends } else { lifetime }
    }
}

/// Writes bytes until none are left or the socket blocks. `Ends`: the socket has failed.
fn forward(socket: &mut UnixStream, waiting: &mut VecDeque<u8>) -> Lifetime {
    while !waiting.is_empty() {
        match socket.write(waiting.as_slices().0) {
            Ok(count) => drop(waiting.drain(..count)),
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(error) if error.kind() == ErrorKind::WouldBlock => break,
            Err(_) => return Lifetime::Ends,
        }
    }
    Lifetime::Stays
}

/// A host program that has not sent its port yet.
#[derive(Debug)]
pub(super) struct PendingClient {
    pub socket: UnixStream,
    pub line: Vec<u8>,
}

/// Result of reading from a [`PendingClient`].
#[derive(PartialEq, Eq, Debug)]
pub(super) enum ConnectLine {
    /// Incomplete line.
    Waits,
    /// Requested port.
    Port(u32),
    /// Invalid line, or disconnected.
    Nothing,
}

impl PendingClient {
    /// Reads the line, and no data after it, which is for the guest.
    pub fn listen(&mut self) -> ConnectLine {
        loop {
            let mut byte = [0];
            match self.socket.read(&mut byte) {
                Ok(1) if byte == *b"\n" => {
                    return port(&self.line).map_or(ConnectLine::Nothing, ConnectLine::Port);
                }
                Ok(1) if self.line.len() < LINE => self.line.extend(byte),
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) if error.kind() == ErrorKind::WouldBlock => return ConnectLine::Waits,
                _ => return ConnectLine::Nothing,
            }
        }
    }
}

/// Parses `CONNECT PORT`.
pub fn port(line: &[u8]) -> Option<u32> {
    let mut words = str::from_utf8(line).ok()?.split_ascii_whitespace();
    let is_connect = words.next()?.eq_ignore_ascii_case("connect");
    let port = words.next()?.parse().ok()?;
    (is_connect && words.next().is_none()).then_some(port)
}
