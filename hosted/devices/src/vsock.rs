//! Vsock: connections between guest applications and Unix sockets of the host.
//!
//! The process has three descriptors: a stream of packets from and to the guest, each after its
//! length as a 32-bit big-endian number; a listening socket for host programs, which send `CONNECT
//! PORT` and receive `OK PORT` when the guest accepts; and a socket on which it asks `parador run`
//! to connect to the socket of a port, because a seccomp filter cannot inspect the path of
//! connect(2).
//!
//! The guest is not trusted. Its data is buffered up to the credit that it has been given; a packet
//! that breaks a rule ends its connection. The queue to the guest is limited as a whole: while it
//! is full, no input from host programs is read. A host program that does not read blocks its own
//! connection only.

use std::collections::{BTreeMap, VecDeque};
use std::io::{self, ErrorKind, IoSliceMut, Read, Write};
use std::mem::MaybeUninit;
use std::net::Shutdown;
use std::os::fd::{AsFd, BorrowedFd, FromRawFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

use proto::hosted::layout;
use proto::vsock::{HEADER, HOST, Header, MOST_DATA, STREAM, op, shutdown};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::fs::Timespec;
use rustix::io::Errno;
use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendFlags, recvmsg, send};

use crate::confine::{FileAccess, SetupError, confine};
use crate::worker::READY;

/// Most connections, pending ones included.
const MAX_CONNECTIONS: usize = 512;
/// Bytes queued for the guest before input from host programs is paused.
const MAX_QUEUED: usize = 512 << 10;
/// Bytes per read.
const CHUNK: usize = 32 << 10;
/// Bytes of a packet's length field.
const LENGTH: usize = 4;
/// Longest line with a port in bytes.
const LINE: usize = 32;
/// Bytes forwarded on a connection before the guest gets a credit update.
const CREDIT_UPDATE: u32 = MOST_DATA / 4;
/// Host ports of connections to the guest.
const PORTS: std::ops::Range<u32> = 1 << 30..1 << 31;
/// Polling interval for the end of the process, in case the signal is missed.
const POLL_INTERVAL: Timespec = Timespec { tv_sec: 1, tv_nsec: 0 };

/// Configuration of the vsock device. Its descriptors are [`layout::DISKS_FD`] and the two after
/// it: packet stream, listening socket, connection requests.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Vsock {
    /// Guest CID.
    pub cid: u32,
}

/// Serves vsock until `end`.
///
/// # Errors
/// The process cannot be set up.
pub fn serve_vsock(vsock: Vsock, end: &AtomicBool) -> Result<(), SetupError> {
    let own = |number: u32| {
        // SAFETY: `parador run` starts the program with these descriptors, and no other code of it
        // uses them.
        unsafe { OwnedFd::from_raw_fd((layout::DISKS_FD + number) as i32) }
    };
    let (stream, listener) = (UnixStream::from(own(0)), UnixListener::from(own(1)));
    let mut server = Server::new(vsock, stream, listener, own(2))?;
    confine(FileAccess::Sockets, 0)?;
    rustix::io::write(rustix::stdio::stdout(), &[READY]).map_err(io::Error::from)?;
    while !end.load(Relaxed) {
        server.turn()?;
    }
    Ok(())
}

/// Ports of a connection: host, guest.
type Key = (u32, u32);

/// State of a connection.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Stage {
    /// Requested by the guest; the host socket is not connected yet.
    Asked,
    /// Requested by the host; the guest has not accepted yet.
    Requested,
    /// Established.
    Open,
}

/// A connection.
#[derive(Debug)]
struct Connection {
    stage: Stage,
    /// Host socket; `None` before it is connected.
    socket: Option<UnixStream>,
    /// Total bytes sent to the guest; the guest's buffer size; total bytes that the guest has
    /// consumed.
    sent: u32,
    buffer: u32,
    taken: u32,
    /// A credit request has been sent to the guest.
    begs: bool,
    /// Total bytes received from the guest, forwarded, and reported as forwarded.
    received: u32,
    forwarded: u32,
    told: u32,
    /// Bytes from the guest that the host program has not taken.
    waiting: VecDeque<u8>,
    /// The host program has ended its direction and the guest is informed; it has disconnected.
    is_done: bool,
    is_gone: bool,
    /// The guest has ended its direction and the host program is informed; it accepts no more data.
    guest_is_done: bool,
    peer_is_informed: bool,
    guest_is_deaf: bool,
}

/// Result of an operation on a connection.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Outcome {
    Stays,
    /// The connection ends, and the guest is informed.
    Ends,
}

impl Connection {
    fn new(stage: Stage, socket: Option<UnixStream>) -> Self {
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
    fn credit(&self) -> u32 {
        self.buffer.saturating_sub(self.sent.wrapping_sub(self.taken))
    }

    /// Returns the events to poll for on the host socket, if any: a hung-up socket reports its
    /// state forever.
    fn wants(&self, accepts_input: bool) -> Option<PollFlags> {
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
    fn pass_on(&mut self) -> Outcome {
        let Some(socket) = &mut self.socket else { return Outcome::Stays };
        while !self.waiting.is_empty() {
            match socket.write(self.waiting.as_slices().0) {
                Ok(count) => {
                    self.waiting.drain(..count);
                    self.forwarded = self.forwarded.wrapping_add(count as u32);
                }
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Outcome::Stays,
                Err(_) => return Outcome::Ends,
            }
        }
        if self.guest_is_done && self.guest_is_deaf {
            return Outcome::Ends;
        }
        if self.guest_is_done && !self.peer_is_informed {
            self.peer_is_informed = true;
            // Fails if the peer has disconnected, which is detected elsewhere.
            let _ = socket.shutdown(Shutdown::Write);
        }
        Outcome::Stays
    }
}

/// A host program that has not sent its port yet.
#[derive(Debug)]
struct Client {
    socket: UnixStream,
    line: Vec<u8>,
}

/// Result of reading from a [`Client`].
#[derive(PartialEq, Eq, Debug)]
enum ConnectLine {
    /// Incomplete line.
    Waits,
    /// Requested port.
    Port(u32),
    /// Invalid line, or disconnected.
    Nothing,
}

impl Client {
    /// Reads the line, and no data after it, which is for the guest.
    fn listen(&mut self) -> ConnectLine {
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
fn port(line: &[u8]) -> Option<u32> {
    let mut words = str::from_utf8(line).ok()?.split_ascii_whitespace();
    let is_connect = words.next()?.eq_ignore_ascii_case("connect");
    let port = words.next()?.parse().ok()?;
    (is_connect && words.next().is_none()).then_some(port)
}

/// State of the process.
struct Server {
    cid: u64,
    /// Packet stream; `None` after invalid data or a hang-up.
    stream: Option<UnixStream>,
    /// Incomplete received packet.
    input: Vec<u8>,
    /// Packets queued for the guest, and the bytes of them that have been sent.
    output: Vec<u8>,
    written: usize,
    listener: UnixListener,
    /// No descriptor is free to accept a further client.
    is_full: bool,
    clients: BTreeMap<u64, Client>,
    next_client: u64,
    connections: BTreeMap<Key, Connection>,
    next_port: u32,
    /// Socket for connection requests, the connections that wait for one, and whether the first of
    /// them has been requested.
    source: OwnedFd,
    asking: VecDeque<Key>,
    has_asked: bool,
}

/// A source of events.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Ready {
    Stream,
    Listener,
    Source,
    Client(u64),
    Connection(Key),
}

impl Server {
    fn new(
        vsock: Vsock,
        stream: UnixStream,
        listener: UnixListener,
        source: OwnedFd,
    ) -> io::Result<Self> {
        stream.set_nonblocking(true)?;
        listener.set_nonblocking(true)?;
        rustix::io::ioctl_fionbio(&source, true)?;
        Ok(Self {
            cid: vsock.cid.into(),
            stream: Some(stream),
            input: Vec::new(),
            output: Vec::new(),
            written: 0,
            listener,
            is_full: false,
            clients: BTreeMap::new(),
            next_client: 0,
            connections: BTreeMap::new(),
            next_port: PORTS.start,
            source,
            asking: VecDeque::new(),
            has_asked: false,
        })
    }

    /// Waits for events and handles them.
    fn turn(&mut self) -> io::Result<()> {
        for (ready, flags) in self.wait_for(&POLL_INTERVAL)? {
            match ready {
                Ready::Stream => {
                    if flags.contains(PollFlags::OUT) {
                        self.write();
                    }
                    if flags.intersects(PollFlags::IN | PollFlags::HUP | PollFlags::ERR) {
                        self.read();
                    }
                }
                Ready::Listener => self.accept(),
                Ready::Source => self.on_connection(),
                Ready::Client(number) => self.read_line(number),
                Ready::Connection(key) => self.serve(key, flags),
            }
        }
        self.request_connection();
        self.write();
        Ok(())
    }

    /// Returns the ready sources and their events, after at most `time`.
    fn wait_for(&self, time: &Timespec) -> io::Result<Vec<(Ready, PollFlags)>> {
        let accepts_input = self.accepts_input();
        let mut wanted: Vec<(Ready, BorrowedFd<'_>, PollFlags)> = Vec::new();
        if let Some(stream) = &self.stream {
            let mut flags = PollFlags::empty();
            flags.set(PollFlags::IN, accepts_input);
            flags.set(PollFlags::OUT, self.written < self.output.len());
            wanted.push((Ready::Stream, stream.as_fd(), flags));
            if accepts_input && !self.is_full {
                wanted.push((Ready::Listener, self.listener.as_fd(), PollFlags::IN));
            }
            if self.has_asked {
                wanted.push((Ready::Source, self.source.as_fd(), PollFlags::IN));
            }
        }
        let clients = self.clients.iter().filter(|_| accepts_input);
        wanted.extend(clients.map(|(number, client)| {
            (Ready::Client(*number), client.socket.as_fd(), PollFlags::IN)
        }));
        wanted.extend(self.connections.iter().filter_map(|(key, connection)| {
            let flags = connection.wants(accepts_input)?;
            Some((Ready::Connection(*key), connection.socket.as_ref()?.as_fd(), flags))
        }));
        let mut fds: Vec<_> =
            wanted.iter().map(|(_, fd, flags)| PollFd::from_borrowed_fd(*fd, *flags)).collect();
        match poll(&mut fds, Some(time)) {
            Ok(_) | Err(Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
        let ready = wanted.iter().zip(&fds).filter(|(_, fd)| !fd.revents().is_empty());
        Ok(ready.map(|((ready, ..), fd)| (*ready, fd.revents())).collect())
    }

    /// Returns whether input from host programs is read: not while the queue to the guest is full.
    fn accepts_input(&self) -> bool {
        self.stream.is_some() && self.output.len() - self.written < MAX_QUEUED
    }

    fn accept(&mut self) {
        while self.clients.len() + self.connections.len() < MAX_CONNECTIONS {
            match self.listener.accept() {
                Ok((socket, _)) => {
                    if socket.set_nonblocking(true).is_ok() {
                        self.clients.insert(self.next_client, Client { socket, line: Vec::new() });
                        self.next_client += 1;
                    }
                }
                Err(error) if error.kind() == ErrorKind::WouldBlock => return,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                // The host has no free descriptor for this process.
                Err(_) => break,
            }
        }
        self.is_full = true;
    }

    /// Reads the port request of a client.
    fn read_line(&mut self, number: u64) {
        let said = self.clients.get_mut(&number).map_or(ConnectLine::Nothing, Client::listen);
        if said == ConnectLine::Waits {
            return;
        }
        let client = self.clients.remove(&number);
        if let (ConnectLine::Port(port), Some(Client { socket, .. })) = (said, client) {
            let key = (self.free_port(), port);
            self.connections.insert(key, Connection::new(Stage::Requested, Some(socket)));
            self.put(key, op::REQUEST, 0, &[]);
        } else {
            self.is_full = false;
        }
    }

    /// Returns an unused host port.
    fn free_port(&mut self) -> u32 {
        loop {
            let port = self.next_port;
            self.next_port = if port + 1 < PORTS.end { port + 1 } else { PORTS.start };
            if self.connections.range((port, 0)..=(port, u32::MAX)).next().is_none() {
                return port;
            }
        }
    }

    /// Sends a packet of a connection, or about an unknown one.
    fn put(&mut self, key: Key, op: u16, flags: u32, data: &[u8]) {
        let connection = self.connections.get_mut(&key);
        let forwarded = connection.map_or(0, |connection| {
            connection.told = connection.forwarded;
            connection.forwarded
        });
        let header = Header {
            from: HOST,
            to: self.cid,
            from_port: key.0,
            to_port: key.1,
            length: data.len() as u32,
            kind: STREAM,
            op,
            flags,
            buffer: MOST_DATA,
            forwarded,
        };
        self.put_packet(&header, data);
    }

    fn put_packet(&mut self, header: &Header, data: &[u8]) {
        self.output.extend(((HEADER + data.len()) as u32).to_be_bytes());
        self.output.extend(header.to_bytes());
        self.output.extend(data);
    }

    /// Sends queued packets to the guest.
    fn write(&mut self) {
        while let Some(stream) = &mut self.stream
            && self.written < self.output.len()
        {
            match stream.write(&self.output[self.written..]) {
                Ok(count) => self.written += count,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) if error.kind() == ErrorKind::WouldBlock => break,
                Err(_) => self.close_stream(),
            }
        }
        // Each byte is moved at most once.
        if self.written > self.output.len() / 2 {
            self.output.drain(..self.written);
            self.written = 0;
        }
    }

    /// Closes the packet stream after a hang-up or invalid data. The end of the VM ends the
    /// process.
    fn close_stream(&mut self) {
        self.stream = None;
        self.connections.clear();
        self.clients.clear();
        self.asking.clear();
    }

    /// Reads packets of the guest.
    fn read(&mut self) {
        let Some(stream) = &mut self.stream else { return };
        let before = self.input.len();
        self.input.resize(before + CHUNK, 0);
        let read = stream.read(&mut self.input[before..]);
        self.input.truncate(before + *read.as_ref().unwrap_or(&0));
        match read {
            Ok(0) => return self.close_stream(),
            Ok(_) => {}
            Err(error)
                if matches!(error.kind(), ErrorKind::Interrupted | ErrorKind::WouldBlock) =>
            {
                return;
            }
            Err(_) => return self.close_stream(),
        }
        let input = std::mem::take(&mut self.input);
        let mut rest = input.as_slice();
        while let Some((length, behind)) = rest.split_first_chunk::<LENGTH>() {
            let length = u32::from_be_bytes(*length) as usize;
            if length > HEADER + MOST_DATA as usize {
                return self.close_stream();
            }
            let Some((packet, behind)) = behind.split_at_checked(length) else { break };
            rest = behind;
            match packet.split_first_chunk() {
                Some((header, data)) => self.packet(&Header::from_bytes(header), data),
                // The guest driver was reset.
                None if packet.is_empty() => {
                    self.connections.clear();
                    self.is_full = false;
                }
                None => return self.close_stream(),
            }
        }
        self.input = rest.to_vec();
    }

    /// Handles a packet of the guest.
    fn packet(&mut self, header: &Header, data: &[u8]) {
        // The guest can modify a packet while it is read.
        if header.from != self.cid || header.to != HOST || header.length as usize != data.len() {
            return;
        }
        let key = (header.to_port, header.from_port);
        if header.kind != STREAM {
            let reset = Header {
                from: HOST,
                to: self.cid,
                from_port: key.0,
                to_port: key.1,
                kind: header.kind,
                op: op::RST,
                ..Header::default()
            };
            if header.op != op::RST {
                self.put_packet(&reset, &[]);
            }
            return;
        }
        let Some(connection) = self.connections.get_mut(&key) else {
            return match header.op {
                op::RST => {}
                op::REQUEST if self.clients.len() + self.connections.len() < MAX_CONNECTIONS => {
                    let mut connection = Connection::new(Stage::Asked, None);
                    (connection.buffer, connection.taken) = (header.buffer, header.forwarded);
                    self.connections.insert(key, connection);
                    self.asking.push_back(key);
                }
                _ => self.put(key, op::RST, 0, &[]),
            };
        };
        (connection.buffer, connection.taken) = (header.buffer, header.forwarded);
        connection.begs &= connection.credit() == 0;
        match (header.op, connection.stage) {
            (op::RST, _) => self.forget(key),
            (op::RESPONSE, Stage::Requested) => {
                connection.stage = Stage::Open;
                let line = format!("OK {}\n", key.0);
                let socket = connection.socket.as_mut();
                // The socket buffer is empty, so the line fits.
                if socket.is_none_or(|socket| socket.write_all(line.as_bytes()).is_err()) {
                    self.end(key);
                }
            }
            (op::RW, Stage::Open) => {
                let kept = connection.received.wrapping_sub(connection.forwarded);
                let is_allowed = header.length <= MOST_DATA - kept;
                if !is_allowed || connection.guest_is_done || connection.is_gone {
                    return self.end(key);
                }
                connection.received = connection.received.wrapping_add(header.length);
                connection.waiting.extend(data);
                self.pass_on(key);
            }
            (op::SHUTDOWN, Stage::Open) => {
                connection.guest_is_done |= header.flags & shutdown::SEND != 0;
                connection.guest_is_deaf |= header.flags & shutdown::RECEIVE != 0;
                self.pass_on(key);
            }
            (op::CREDIT_REQUEST, Stage::Open) => self.put(key, op::CREDIT_UPDATE, 0, &[]),
            (op::CREDIT_UPDATE, Stage::Open) => {}
            _ => self.end(key),
        }
    }

    /// Forwards data to the host program and sends credit updates.
    fn pass_on(&mut self, key: Key) {
        let Some(connection) = self.connections.get_mut(&key) else { return };
        match connection.pass_on() {
            Outcome::Ends => self.end(key),
            Outcome::Stays
                if connection.forwarded.wrapping_sub(connection.told) >= CREDIT_UPDATE =>
            {
                self.put(key, op::CREDIT_UPDATE, 0, &[]);
            }
            Outcome::Stays => {}
        }
    }

    /// Ends a connection and informs the guest.
    fn end(&mut self, key: Key) {
        self.forget(key);
        self.put(key, op::RST, 0, &[]);
    }

    fn forget(&mut self, key: Key) {
        self.connections.remove(&key);
        self.is_full = false;
    }

    /// Handles events of a host socket.
    fn serve(&mut self, key: Key, flags: PollFlags) {
        let Some(connection) = self.connections.get_mut(&key) else { return };
        let gone = flags.intersects(PollFlags::HUP | PollFlags::ERR);
        if connection.stage != Stage::Open {
            if gone {
                self.end(key);
            }
            return;
        }
        if flags.contains(PollFlags::OUT) {
            self.pass_on(key);
        }
        let accepts_input = self.accepts_input();
        let Some(connection) = self.connections.get_mut(&key) else { return };
        if !gone && !flags.contains(PollFlags::IN) || !accepts_input {
            return;
        }
        let credit = connection.credit() as usize;
        let Some(socket) = &mut connection.socket else { return };
        if !connection.is_done && !connection.guest_is_deaf && credit > 0 {
            let mut buffer = [0; CHUNK];
            match socket.read(&mut buffer[..credit.min(CHUNK)]) {
                Ok(0) => connection.is_done = true,
                Ok(count) => {
                    connection.sent = connection.sent.wrapping_add(count as u32);
                    let begs = connection.credit() == 0 && !connection.begs;
                    connection.begs |= begs;
                    self.put(key, op::RW, 0, &buffer[..count]);
                    if begs {
                        self.put(key, op::CREDIT_REQUEST, 0, &[]);
                    }
                    return;
                }
                Err(error)
                    if matches!(error.kind(), ErrorKind::Interrupted | ErrorKind::WouldBlock) =>
                {
                    return;
                }
                Err(_) => return self.end(key),
            }
            if !gone {
                return self.put(key, op::SHUTDOWN, shutdown::SEND, &[]);
            }
        }
        if !gone {
            return;
        }
        if !connection.waiting.is_empty() {
            // The data has no receiver.
            return self.end(key);
        }
        if connection.is_done || connection.guest_is_deaf {
            connection.is_gone = true;
            self.put(key, op::SHUTDOWN, shutdown::BOTH, &[]);
        }
    }

    /// Requests the next pending connection: one at a time, so that responses need no ID.
    fn request_connection(&mut self) {
        while !self.has_asked
            && let Some(&key) = self.asking.front()
        {
            if !self.connections.contains_key(&key) {
                self.asking.pop_front();
            } else if send(&self.source, &key.0.to_le_bytes(), SendFlags::NOSIGNAL).is_ok() {
                self.has_asked = true;
            } else {
                self.asking.pop_front();
                self.end(key);
            }
        }
    }

    /// Handles the response to a connection request.
    fn on_connection(&mut self) {
        let mut room = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut rights = RecvAncillaryBuffer::new(&mut room);
        let mut byte = [0];
        let read = recvmsg(
            &self.source,
            &mut [IoSliceMut::new(&mut byte)],
            &mut rights,
            RecvFlags::CMSG_CLOEXEC,
        );
        if matches!(read, Err(Errno::INTR | Errno::AGAIN)) {
            return;
        }
        let socket = rights.drain().find_map(|message| match message {
            RecvAncillaryMessage::ScmRights(mut sockets) => sockets.next(),
            _ => None,
        });
        self.has_asked = false;
        let Some(key) = self.asking.pop_front() else { return };
        // The connection may have ended meanwhile, or been established by an earlier response.
        let connection = self.connections.get_mut(&key);
        let Some(connection) = connection.filter(|one| one.stage == Stage::Asked) else { return };
        match socket.map(UnixStream::from) {
            Some(socket) => {
                connection.socket = Some(socket);
                connection.stage = Stage::Open;
                self.put(key, op::RESPONSE, 0, &[]);
            }
            None => self.end(key),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::net::{
        AddressFamily, SendAncillaryBuffer, SendAncillaryMessage, SocketFlags, SocketType, sendmsg,
        socketpair,
    };
    use std::path::PathBuf;
    use tempfile::TempDir;

    const CID: u32 = 7;

    /// A server, the guest, and the process that connects to host sockets.
    struct Rig {
        server: Server,
        guest: UnixStream,
        /// Bytes of the server that are no complete packet yet.
        begun: Vec<u8>,
        source: OwnedFd,
        folder: TempDir,
    }

    impl Rig {
        fn new() -> Self {
            let folder = tempfile::tempdir().unwrap();
            let (ours, guest) = UnixStream::pair().unwrap();
            let listener = UnixListener::bind(folder.path().join("socket")).unwrap();
            guest.set_nonblocking(true).unwrap();
            let (source, asks) =
                socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::NONBLOCK, None)
                    .unwrap();
            let server = Server::new(Vsock { cid: CID }, ours, listener, asks).unwrap();
            Self { server, guest, begun: Vec::new(), source, folder }
        }

        fn path(&self) -> PathBuf {
            self.folder.path().join("socket")
        }

        /// Runs the server once.
        fn turn(&mut self) {
            while self.server.wait_briefly() {
                self.server.turn().unwrap();
            }
        }

        /// Sends a packet from the guest, with unlimited credit.
        fn send(&mut self, key: Key, op: u16, flags: u32, data: &[u8]) {
            let header = Header { op, flags, ..self.header(key, data) };
            self.send_packet(&header, data);
            self.turn();
        }

        fn header(&self, key: Key, data: &[u8]) -> Header {
            Header {
                from: CID.into(),
                to: HOST,
                from_port: key.1,
                to_port: key.0,
                length: data.len() as u32,
                kind: STREAM,
                buffer: 1 << 20,
                ..Header::default()
            }
        }

        fn send_packet(&mut self, header: &Header, data: &[u8]) {
            let length = (HEADER + data.len()) as u32;
            let packet = [&length.to_be_bytes()[..], &header.to_bytes(), data].concat();
            let mut rest = &packet[..];
            while !rest.is_empty() {
                match self.guest.write(rest) {
                    Ok(count) => rest = &rest[count..],
                    Err(_) => self.server.turn().unwrap(),
                }
            }
        }

        /// Returns the packets to the guest.
        fn packets(&mut self) -> Vec<(Header, Vec<u8>)> {
            self.turn();
            let mut buffer = [0; 1 << 16];
            let mut packets = Vec::new();
            while let Ok(count @ 1..) = self.guest.read(&mut buffer) {
                self.begun.extend(&buffer[..count]);
                self.turn();
            }
            while let Some(length) = self.begun.first_chunk::<LENGTH>() {
                let length = LENGTH + u32::from_be_bytes(*length) as usize;
                if self.begun.len() < length {
                    break;
                }
                let packet: Vec<u8> = self.begun.drain(..length).skip(LENGTH).collect();
                let header = Header::from_bytes(packet.first_chunk().unwrap());
                assert_eq!((header.from, header.to), (HOST, CID.into()));
                assert_eq!(header.length as usize, packet.len() - HEADER);
                packets.push((header, packet[HEADER..].to_vec()));
            }
            packets
        }

        /// Returns operations, host ports and flags of the packets to the guest.
        fn ops(&mut self) -> Vec<(u16, u32, u32)> {
            let packets = self.packets().into_iter();
            packets.map(|(header, _)| (header.op, header.from_port, header.flags)).collect()
        }

        /// Connects a host program to the guest's port 9; returns the connection's ports.
        fn connected(&mut self) -> (UnixStream, Key) {
            let mut client = UnixStream::connect(self.path()).unwrap();
            client.set_nonblocking(true).unwrap();
            client.write_all(b"CONNECT 9\n").unwrap();
            let ops = self.ops();
            let &[(op::REQUEST, port, 0)] = &ops[..] else { panic!("{ops:?}") };
            self.send((port, 9), op::RESPONSE, 0, &[]);
            let mut answer = [0; 64];
            let length = client.read(&mut answer).unwrap();
            assert_eq!(answer[..length], *format!("OK {port}\n").as_bytes());
            (client, (port, 9))
        }

        /// Answers a connection request.
        fn answer(&mut self, socket: Option<&UnixStream>) -> u32 {
            let mut port = [0; 4];
            rustix::net::recv(&self.source, &mut port, RecvFlags::empty()).unwrap();
            let mut room = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
            let mut rights = SendAncillaryBuffer::new(&mut room);
            let socket = socket.map(AsFd::as_fd);
            if let Some(socket) = &socket {
                rights.push(SendAncillaryMessage::ScmRights(std::slice::from_ref(socket)));
            }
            sendmsg(&self.source, &[io::IoSlice::new(&[0])], &mut rights, SendFlags::empty())
                .unwrap();
            self.turn();
            u32::from_le_bytes(port)
        }
    }

    impl Server {
        /// Returns whether an event is pending.
        fn wait_briefly(&self) -> bool {
            let pause = Timespec { tv_sec: 0, tv_nsec: 0 };
            !self.wait_for(&pause).unwrap().is_empty()
        }
    }

    fn read(socket: &mut UnixStream) -> Vec<u8> {
        let mut bytes = vec![0; 1 << 20];
        let length = socket.read(&mut bytes).unwrap();
        bytes.truncate(length);
        bytes
    }

    #[test]
    fn lines() {
        for (line, wanted) in [
            ("CONNECT 52", Some(52)),
            ("connect 4294967295\r", Some(u32::MAX)),
            ("CONNECT 4294967296", None),
            ("CONNECT", None),
            ("CONNECT 1 2", None),
            ("DISCONNECT 1", None),
            ("", None),
        ] {
            assert_eq!(port(line.as_bytes()), wanted, "{line}");
        }
    }

    #[test]
    fn a_program_of_the_host_connects() {
        let mut rig = Rig::new();
        let (mut client, key) = rig.connected();
        client.write_all(b"to the guest").unwrap();
        let packets = rig.packets();
        assert_eq!((packets[0].0.op, &packets[0].1[..]), (op::RW, &b"to the guest"[..]));
        rig.send(key, op::RW, 0, b"to the host");
        assert_eq!(read(&mut client), b"to the host");
        // Each side ends its own direction, the guest closes.
        client.shutdown(Shutdown::Write).unwrap();
        assert_eq!(rig.ops(), [(op::SHUTDOWN, key.0, shutdown::SEND)]);
        rig.send(key, op::RW, 0, b"still");
        rig.send(key, op::SHUTDOWN, shutdown::SEND, &[]);
        assert_eq!((read(&mut client), read(&mut client)), (b"still".to_vec(), Vec::new()));
        // No data follows in either direction.
        assert_eq!(rig.ops(), [(op::SHUTDOWN, key.0, shutdown::BOTH)]);
        rig.send(key, op::SHUTDOWN, shutdown::BOTH, &[]);
        assert_eq!(rig.ops(), [(op::RST, key.0, 0)]);
        assert!(rig.server.connections.is_empty());
    }

    #[test]
    fn what_follows_a_line_is_for_the_guest() {
        let mut rig = Rig::new();
        let mut client = UnixStream::connect(rig.path()).unwrap();
        client.write_all(b"CONN").unwrap();
        assert_eq!(rig.ops(), []);
        client.write_all(b"ECT 9\nhello").unwrap();
        let key = (PORTS.start, 9);
        assert_eq!(rig.ops(), [(op::REQUEST, key.0, 0)]);
        rig.send(key, op::RESPONSE, 0, &[]);
        assert_eq!(rig.packets()[0].1, b"hello");
    }

    #[test]
    fn connection_refused_by_the_guest() {
        let mut rig = Rig::new();
        for line in ["CONNECT 9\n", "HELLO\n", &"x".repeat(100)] {
            let mut client = UnixStream::connect(rig.path()).unwrap();
            client.write_all(line.as_bytes()).unwrap();
            for (_, port, _) in rig.ops() {
                rig.send((port, 9), op::RST, 0, &[]);
            }
            assert!(matches!(client.read(&mut [0]), Ok(0) | Err(_)), "{line}");
            assert_eq!(rig.server.clients.len() + rig.server.connections.len(), 0);
        }
    }

    #[test]
    fn a_guest_application_connects() {
        let mut rig = Rig::new();
        rig.send((50, 9), op::REQUEST, 0, &[]);
        rig.send((51, 9), op::REQUEST, 0, &[]);
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        ours.set_nonblocking(true).unwrap();
        assert_eq!(rig.answer(Some(&ours)), 50);
        assert_eq!(rig.answer(None), 51);
        drop(ours);
        assert_eq!(rig.ops(), [(op::RESPONSE, 50, 0), (op::RST, 51, 0)]);
        rig.send((50, 9), op::RW, 0, b"question");
        assert_eq!(read(&mut theirs), b"question");
        // The host program disconnects.
        drop(theirs);
        assert_eq!(rig.ops(), [(op::SHUTDOWN, 50, shutdown::BOTH)]);
        rig.send((50, 9), op::RW, 0, b"stray");
        assert_eq!(rig.ops(), [(op::RST, 50, 0)]);
        // A connection that has ended before its response.
        rig.send((52, 9), op::REQUEST, 0, &[]);
        rig.send((52, 9), op::RST, 0, &[]);
        assert_eq!(rig.answer(None), 52);
        assert_eq!(rig.ops(), []);
    }

    #[test]
    fn credit_is_kept() {
        let mut rig = Rig::new();
        let (mut client, key) = rig.connected();
        // The guest takes 1000 bytes at a time.
        let open = Header { op: op::CREDIT_UPDATE, buffer: 1000, ..rig.header(key, &[]) };
        rig.send_packet(&open, &[]);
        rig.turn();
        client.write_all(&[1; 2500]).unwrap();
        for (taken, length) in [(1000, 1000), (2000, 1000), (2500, 500)] {
            let packets = rig.packets();
            let data: usize = packets.iter().map(|packet| packet.1.len()).sum();
            assert_eq!(data, length);
            let begs = packets.iter().any(|packet| packet.0.op == op::CREDIT_REQUEST);
            assert_eq!(begs, length == 1000);
            rig.send_packet(&Header { forwarded: taken, ..open }, &[]);
        }
        // To the host: as much as the credit allows, and not a byte more.
        let (piece, all) = (vec![2; 1 << 14], MOST_DATA as usize);
        let mut sent = 0;
        let mut told = 0;
        // Data in the socket buffer does not count.
        while sent - told < all {
            let part = piece.len().min(all - (sent - told));
            rig.send(key, op::RW, 0, &piece[..part]);
            sent += part;
            for (header, _) in rig.packets() {
                assert_eq!(header.op, op::CREDIT_UPDATE);
                told = header.forwarded as usize;
            }
        }
        let mut came = 0;
        while came < sent {
            came += read(&mut client).len();
            rig.turn();
        }
        rig.send(key, op::CREDIT_REQUEST, 0, &[]);
        let last = rig.packets().pop().unwrap().0;
        assert_eq!((last.op, last.forwarded as usize), (op::CREDIT_UPDATE, sent));
        while rig.server.connections.contains_key(&key) {
            rig.send(key, op::RW, 0, &piece);
        }
        assert_eq!(rig.ops().last(), Some(&(op::RST, key.0, 0)));
    }

    #[test]
    fn broken_rules_end_one_connection() {
        let mut rig = Rig::new();
        let (_other, _) = rig.connected();
        for (op, flags) in [(op::REQUEST, 0), (op::RESPONSE, 0), (0, 0), (8, 0), (u16::MAX, 3)] {
            let (mut client, key) = rig.connected();
            rig.send(key, op, flags, &[]);
            assert_eq!(rig.ops(), [(op::RST, key.0, 0)], "{op}");
            assert_eq!(read(&mut client), []);
        }
        let (_client, key) = rig.connected();
        rig.send(key, op::SHUTDOWN, shutdown::SEND, &[]);
        rig.send(key, op::RW, 0, b"more");
        assert_eq!(rig.ops(), [(op::RST, key.0, 0)]);
        // About an unknown connection.
        for op in [op::RESPONSE, op::RW, op::SHUTDOWN, op::CREDIT_REQUEST, 77] {
            rig.send((1, 2), op, 0, &[]);
            assert_eq!(rig.ops(), [(op::RST, 1, 0)], "{op}");
        }
        rig.send((1, 2), op::RST, 0, &[]);
        // Another sender, receiver, type, length.
        let plain = Header { op: op::RW, ..rig.header((1, 2), &[]) };
        for header in [
            Header { from: 3, ..plain },
            Header { to: 1, ..plain },
            Header { kind: 2, op: op::RST, ..plain },
            Header { length: 1, ..plain },
        ] {
            rig.send_packet(&header, &[]);
            assert_eq!(rig.ops(), [], "{header:?}");
        }
        rig.send_packet(&Header { kind: 2, ..plain }, &[]);
        let packets = rig.packets();
        assert_eq!((packets[0].0.kind, packets[0].0.op), (2, op::RST));
        assert_eq!(rig.server.connections.len(), 1, "the others' do not matter to one");
    }

    #[test]
    fn a_driver_reset() {
        let mut rig = Rig::new();
        let (mut client, key) = rig.connected();
        rig.guest.write_all(&0_u32.to_be_bytes()).unwrap();
        rig.turn();
        assert_eq!(read(&mut client), []);
        rig.send(key, op::RW, 0, b"late");
        assert_eq!(rig.ops(), [(op::RST, key.0, 0)]);
        rig.connected();
        // Invalid lengths: the stream is not trusted any more, and no connection keeps waiting.
        for length in [1, HEADER as u32 - 1, (HEADER as u32) + MOST_DATA + 1, u32::MAX] {
            let mut rig = Rig::new();
            let (mut client, _) = rig.connected();
            rig.guest.write_all(&length.to_be_bytes()).unwrap();
            rig.guest.write_all(&[0; HEADER]).unwrap();
            rig.turn();
            assert_eq!(read(&mut client), [], "{length}");
        }
    }

    #[test]
    fn connections_are_limited() {
        let mut rig = Rig::new();
        for port in 0..MAX_CONNECTIONS as u32 + 3 {
            rig.send((5, port), op::REQUEST, 0, &[]);
        }
        assert_eq!(rig.server.connections.len(), MAX_CONNECTIONS);
        assert_eq!(rig.ops(), [(op::RST, 5, 0); 3]);
        let mut client = UnixStream::connect(rig.path()).unwrap();
        client.write_all(b"CONNECT 9\n").unwrap();
        assert_eq!(rig.ops(), [], "it waits");
        rig.send((5, 0), op::RST, 0, &[]);
        assert_eq!(rig.ops(), [(op::REQUEST, PORTS.start, 0)]);
    }

    /// A guest that takes no data and sends arbitrary packets: the server's buffers stay limited.
    #[test]
    fn a_guest_without_sense() {
        let mut rig = Rig::new();
        let mut state = 0x9e37_79b9_7f4a_7c15_u64;
        let mut random = move |below: u64| {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            state % below
        };
        let (ours, _theirs) = UnixStream::pair().unwrap();
        ours.set_nonblocking(true).unwrap();
        let mut clients = Vec::new();
        for step in 0..20_000 {
            if random(50) == 0 {
                clients.truncate(20);
                let mut client = UnixStream::connect(rig.path()).unwrap();
                client.set_nonblocking(true).unwrap();
                let _ = client.write_all(b"CONNECT 1\n");
                clients.insert(random(clients.len() as u64 + 1) as usize, client);
            }
            let ports = [1, 2, PORTS.start + random(40) as u32];
            let key = (ports[random(3) as usize], random(4) as u32);
            let data = vec![0; [0, 0, 1, 5000][random(4) as usize]];
            let header = Header {
                op: random(9) as u16,
                flags: random(4) as u32,
                buffer: random(1 << 20) as u32,
                forwarded: random(1 << 20) as u32,
                ..rig.header(key, &data)
            };
            let length = (HEADER + data.len()) as u32;
            let packet = [&length.to_be_bytes()[..], &header.to_bytes(), &data].concat();
            // Whole packets only, as the device model ensures.
            if rig.server.accepts_input() {
                let mut rest = &packet[..];
                while !rest.is_empty() && rig.server.accepts_input() {
                    match rig.guest.write(rest) {
                        Ok(count) => rest = &rest[count..],
                        Err(_) => rig.server.turn().unwrap(),
                    }
                }
                if !rest.is_empty() {
                    // In a VM, the rest would not be lost; the test ends here.
                    break;
                }
            }
            if let Some(client) = clients.get_mut(random(20) as usize) {
                let _ = client.write(&[0; 3000]);
            }
            if rig.server.has_asked {
                rig.answer((step % 3 != 0).then_some(&ours));
            }
            rig.turn();
            if step % 1000 == 999 {
                rig.packets();
            }
            let server = &rig.server;
            assert!(server.connections.len() + server.clients.len() <= MAX_CONNECTIONS);
            assert!(server.output.len() <= 2 * (MAX_QUEUED + 2 * CHUNK), "{}", server.output.len());
            assert!(server.input.len() <= HEADER + MOST_DATA as usize + CHUNK);
            let kept = server.connections.values().map(|one| one.waiting.len()).max();
            assert!(kept.is_none_or(|kept| kept <= MOST_DATA as usize));
        }
    }
}
