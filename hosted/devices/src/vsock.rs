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
//! connection only. It gets the data of a connection that the guest has shut down in order, also
//! after the guest has forgotten the connection: Linux resets it 8 s after close(2).

use std::collections::{BTreeMap, VecDeque};
use std::io::{self, ErrorKind, IoSliceMut, Read, Write};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, FromRawFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

use proto::hosted::layout;
use proto::vsock::{HEADER, HOST, Header, MOST_DATA, STREAM, op, shutdown};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::fs::Timespec;
use rustix::io::Errno;
use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendFlags, recvmsg, send};

use self::connection::{ConnectLine, Connection, Lifetime, PendingClient, Remainder, Stage};
use crate::confine::{FileAccess, SetupError, confine};
use crate::worker::READY;

mod connection;

/// Most connections, pending and draining ones included.
const MAX_CONNECTIONS: usize = 512;
/// Bytes queued for the guest before input from host programs is paused.
const MAX_QUEUED: usize = 512 << 10;
/// Bytes per read.
const CHUNK: usize = 32 << 10;
/// Bytes of a packet's length field.
const LENGTH: usize = 4;
/// Bytes forwarded on a connection before the guest gets a credit update.
const CREDIT_UPDATE: u32 = MOST_DATA / 4;
/// Host ports of connections to the guest.
const PORTS: std::ops::Range<u32> = 1 << 30..1 << 31;
/// Polling interval for the end of the process, in case the signal is missed.
const POLL_INTERVAL: Timespec = Timespec { tv_sec: 30, tv_nsec: 0 };
/// Longest pause after a client could not be accepted.
const ACCEPT_RETRY: Timespec = Timespec { tv_sec: 0, tv_nsec: 200_000_000 };
/// Most reads of packets at the end of the process: as much as a socket buffers.
const LAST_READS: usize = MAX_QUEUED / CHUNK;

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
    server.finish();
    Ok(())
}

/// Ports of a connection: host, guest.
type Key = (u32, u32);

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
    /// The host has refused to accept a client, for lack of descriptors or memory.
    accept_failed: bool,
    clients: BTreeMap<u64, PendingClient>,
    /// Rest of connections that the guest has ended.
    draining: BTreeMap<u64, Remainder>,
    /// Next ID in `clients` and `draining`.
    next_id: u64,
    connections: BTreeMap<Key, Connection>,
    next_port: u32,
    /// Socket for connection requests, the connections that wait for one, and whether the first of
    /// them has been requested. Each is in there once; only the first may have ended meanwhile.
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
    PendingClient(u64),
    Draining(u64),
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
            accept_failed: false,
            clients: BTreeMap::new(),
            draining: BTreeMap::new(),
            next_id: 0,
            connections: BTreeMap::new(),
            next_port: PORTS.start,
            source,
            asking: VecDeque::new(),
            has_asked: false,
        })
    }

    /// Waits for events and handles them.
    fn turn(&mut self) -> io::Result<()> {
        let time = if self.accept_failed { ACCEPT_RETRY } else { POLL_INTERVAL };
        let events = self.wait_for(&time)?;
        self.accept_failed = false;
        for (ready, flags) in events {
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
                Ready::PendingClient(id) => self.read_line(id),
                Ready::Draining(id) => self.drain(id),
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
            if accepts_input && !self.is_full() && !self.accept_failed {
                wanted.push((Ready::Listener, self.listener.as_fd(), PollFlags::IN));
            }
            if self.has_asked {
                wanted.push((Ready::Source, self.source.as_fd(), PollFlags::IN));
            }
        }
        let clients = self.clients.iter().filter(|_| accepts_input);
        wanted.extend(
            clients.map(|(id, client)| {
                (Ready::PendingClient(*id), client.socket.as_fd(), PollFlags::IN)
            }),
        );
        wanted.extend(self.draining.iter().map(|(id, remainder)| {
            (Ready::Draining(*id), remainder.socket.as_fd(), PollFlags::OUT)
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

    /// Returns whether there are as many connections as allowed.
    fn is_full(&self) -> bool {
        self.clients.len() + self.draining.len() + self.connections.len() >= MAX_CONNECTIONS
    }

    /// Returns an unused ID.
    fn new_id(&mut self) -> u64 {
        self.next_id += 1;
        self.next_id
    }

    fn accept(&mut self) {
        while !self.is_full() {
            match self.listener.accept() {
                Ok((socket, _)) => {
                    if socket.set_nonblocking(true).is_ok() {
                        let id = self.new_id();
                        self.clients.insert(id, PendingClient { socket, line: Vec::new() });
                    }
                }
                Err(error) if error.kind() == ErrorKind::WouldBlock => return,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(_) => {
                    self.accept_failed = true;
                    return;
                }
            }
        }
    }

    /// Reads the port request of a client.
    fn read_line(&mut self, id: u64) {
        let said = self.clients.get_mut(&id).map_or(ConnectLine::Nothing, PendingClient::listen);
        if said == ConnectLine::Waits {
            return;
        }
        let client = self.clients.remove(&id);
        if let (ConnectLine::Port(port), Some(PendingClient { socket, .. })) = (said, client) {
            let key = (self.free_port(), port);
            self.connections.insert(key, Connection::new(Stage::Requested, Some(socket)));
            self.put(key, op::REQUEST, 0, &[]);
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
                // A hang-up: packets that were sent before it are still read.
                Err(error) if error.kind() == ErrorKind::BrokenPipe => {
                    self.written = self.output.len();
                }
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
        self.clients.clear();
        self.reset_connections();
    }

    /// Ends all connections after a reset of the guest driver or a hang-up.
    fn reset_connections(&mut self) {
        for connection in std::mem::take(&mut self.connections).into_values() {
            self.keep_remainder(connection);
        }
        // The response to a request is still to come.
        self.asking.truncate(usize::from(self.has_asked));
    }

    /// Handles the end of a connection by the guest: data that it sent before an orderly end is
    /// still forwarded.
    fn keep_remainder(&mut self, connection: Connection) {
        if let Some(remainder) = connection.into_remainder() {
            let id = self.new_id();
            self.draining.insert(id, remainder);
        }
    }

    /// Forwards data of an ended connection. The host program sees its end when it has all data.
    fn drain(&mut self, id: u64) {
        if self.draining.get_mut(&id).is_some_and(|one| one.pass_on() == Lifetime::Ends) {
            self.draining.remove(&id);
        }
    }

    /// Forwards data that arrived before the end of the process, as far as the host's sockets take
    /// it immediately.
    fn finish(&mut self) {
        for _ in 0..LAST_READS {
            self.read();
        }
        for connection in self.connections.values_mut() {
            connection.pass_on();
        }
        for remainder in self.draining.values_mut() {
            remainder.pass_on();
        }
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
                None if packet.is_empty() => self.reset_connections(),
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
            return self.reset_foreign(header);
        }
        let Some(connection) = self.connections.get_mut(&key) else {
            return self.packet_without_connection(key, header);
        };
        (connection.buffer, connection.taken) = (header.buffer, header.forwarded);
        connection.begs &= connection.credit() == 0;
        match (header.op, connection.stage) {
            (op::RST, _) => {
                if let Some(connection) = self.forget(key) {
                    self.keep_remainder(connection);
                }
            }
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

    fn packet_without_connection(&mut self, key: Key, header: &Header) {
        match header.op {
            op::RST => {}
            op::REQUEST if !self.is_full() => {
                let mut connection = Connection::new(Stage::Asked, None);
                (connection.buffer, connection.taken) = (header.buffer, header.forwarded);
                self.connections.insert(key, connection);
                // The response to an earlier request of the same key is as good.
                if !self.asking.contains(&key) {
                    self.asking.push_back(key);
                }
            }
            _ => self.put(key, op::RST, 0, &[]),
        }
    }

    /// Resets a connection that is not a stream.
    fn reset_foreign(&mut self, header: &Header) {
        if header.op != op::RST {
            let reset = Header {
                from: HOST,
                to: self.cid,
                from_port: header.to_port,
                to_port: header.from_port,
                kind: header.kind,
                op: op::RST,
                ..Header::default()
            };
            self.put_packet(&reset, &[]);
        }
    }

    /// Forwards data to the host program and sends credit updates.
    fn pass_on(&mut self, key: Key) {
        let Some(connection) = self.connections.get_mut(&key) else { return };
        match connection.pass_on() {
            Lifetime::Ends => self.end(key),
            Lifetime::Stays
                if connection.forwarded.wrapping_sub(connection.told) >= CREDIT_UPDATE =>
            {
                self.put(key, op::CREDIT_UPDATE, 0, &[]);
            }
            Lifetime::Stays => {}
        }
    }

    /// Ends a connection and informs the guest.
    fn end(&mut self, key: Key) {
        self.forget(key);
        self.put(key, op::RST, 0, &[]);
    }

    fn forget(&mut self, key: Key) -> Option<Connection> {
        // The response to an outstanding request finds the first one.
        let mut is_outstanding = self.has_asked;
        self.asking.retain(|&asking| std::mem::take(&mut is_outstanding) || asking != key);
        self.connections.remove(&key)
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
            if send(&self.source, &key.0.to_le_bytes(), SendFlags::NOSIGNAL).is_ok() {
                self.has_asked = true;
            } else {
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
mod tests;
