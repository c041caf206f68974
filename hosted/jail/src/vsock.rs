//! Vsock: connections between programs of the guest and sockets of the host.
//!
//! The process has three descriptors: a stream of packets from and to the guest, each behind its length as 32 bits, big-endian; a socket to which programs of the
//! host connect, who say `CONNECT PORT` and are told `OK PORT` when the guest has taken the connection; and one by which it asks `parador run` for a connection to the socket of
//! a port, because a filter cannot look into the name that connect(2) is given.
//!
//! The guest may send anything. What it sends is kept as far as it has been given credit; a packet that breaks a rule ends its connection. What
//! is for the guest is limited as a whole: as long as much of it waits, nobody is heard. A host's program that does not read holds up its own connection only.

use std::collections::{BTreeMap, VecDeque};
use std::io::{self, ErrorKind, IoSliceMut, Read, Write};
use std::mem::MaybeUninit;
use std::net::Shutdown;
use std::os::fd::{AsFd, BorrowedFd, FromRawFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

use proto::vsock::{HEADER, HOST, Header, MOST_DATA, STREAM, op, shutdown};
use proto::wedge::layout;
use rustix::event::{PollFd, PollFlags, poll};
use rustix::fs::Timespec;
use rustix::io::Errno;
use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendFlags, recvmsg, send};

use crate::confine::{Failed, Files, confine};
use crate::worker::READY;

/// Most connections and programs that are about to have one.
const MOST_CONNECTIONS: usize = 512;
/// Bytes for the guest that may wait before nobody is heard any more.
const WAITING: usize = 512 << 10;
/// Bytes that are read at once.
const PIECE: usize = 32 << 10;
/// Bytes of a packet's length.
const LENGTH: usize = 4;
/// Most bytes of a line with a port.
const LINE: usize = 32;
/// Bytes that a connection has to have passed on before the guest is told.
const TELL: u32 = MOST_DATA / 4;
/// Ports of this host that connections to the guest are from.
const PORTS: std::ops::Range<u32> = 1 << 30..1 << 31;
/// How often a process looks whether it is to end, if it misses the signal.
const PAUSE: Timespec = Timespec { tv_sec: 1, tv_nsec: 0 };

/// What a process is told of vsock. Its descriptors are [`layout::DISKS_FD`] and the two behind it: the stream, the listening socket, and where it asks
/// for connections.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Vsock {
    /// The guest's number.
    pub cid: u32,
}

/// Serves vsock, until `end`.
///
/// # Errors
/// The process cannot be set up.
pub fn serve_vsock(vsock: Vsock, end: &AtomicBool) -> Result<(), Failed> {
    let own = |number: u32| {
        // SAFETY: `parador run` starts the program with these descriptors, and nothing else of it uses them.
        unsafe { OwnedFd::from_raw_fd((layout::DISKS_FD + number) as i32) }
    };
    let (stream, listener) = (UnixStream::from(own(0)), UnixListener::from(own(1)));
    let mut server = Server::new(vsock, stream, listener, own(2))?;
    confine(Files::Sockets, 0)?;
    rustix::io::write(rustix::stdio::stdout(), &[READY]).map_err(io::Error::from)?;
    while !end.load(Relaxed) {
        server.turn()?;
    }
    Ok(())
}

/// A connection's ports: of the host, of the guest.
type Key = (u32, u32);

/// How far a connection is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Stage {
    /// The guest wants it; whoever has the port's socket has not been found yet.
    Asked,
    /// The host wants it, and the guest has not taken it yet.
    Requested,
    /// It is there.
    Open,
}

/// A connection.
#[derive(Debug)]
struct Connection {
    stage: Stage,
    /// The host's side; none while it is looked for.
    socket: Option<UnixStream>,
    /// Bytes ever sent to the guest; bytes that it keeps; bytes that it has not to keep any longer.
    sent: u32,
    buffer: u32,
    taken: u32,
    /// The guest has been asked for credit.
    begs: bool,
    /// Bytes ever come from the guest, passed on, and said to be so.
    received: u32,
    forwarded: u32,
    told: u32,
    /// Bytes from the guest that the host's program has not taken.
    waiting: VecDeque<u8>,
    /// The host's program sends no more, and the guest knows; it has gone.
    is_done: bool,
    is_gone: bool,
    /// The guest sends no more, and the host's program knows; it takes no more.
    guest_is_done: bool,
    is_told: bool,
    guest_is_deaf: bool,
}

/// What becomes of a connection.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Fate {
    Stays,
    /// It ends; the guest is told so.
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
            is_told: false,
            guest_is_deaf: false,
        }
    }

    /// Bytes that the guest takes now. It may say that it has taken more than it was sent; that gives it nothing.
    fn credit(&self) -> u32 {
        self.buffer.saturating_sub(self.sent.wrapping_sub(self.taken))
    }

    /// What is wanted of the host's socket, if anything is: a socket whose other side has gone says so for ever.
    fn wants(&self, hears: bool) -> Option<PollFlags> {
        let mut flags = PollFlags::empty();
        if self.stage != Stage::Open || self.is_gone {
            // Whoever waits for the guest may go.
            return (self.stage == Stage::Requested && hears).then_some(flags);
        }
        if hears && !self.is_done && !self.guest_is_deaf && self.credit() > 0 {
            flags |= PollFlags::IN;
        }
        if !self.waiting.is_empty() {
            flags |= PollFlags::OUT;
        }
        (!flags.is_empty() || self.is_done && hears).then_some(flags)
    }

    /// Passes on to the host what it takes.
    fn pass_on(&mut self) -> Fate {
        let Some(socket) = &mut self.socket else { return Fate::Stays };
        while !self.waiting.is_empty() {
            match socket.write(self.waiting.as_slices().0) {
                Ok(count) => {
                    self.waiting.drain(..count);
                    self.forwarded = self.forwarded.wrapping_add(count as u32);
                }
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Fate::Stays,
                Err(_) => return Fate::Ends,
            }
        }
        if self.guest_is_done && self.guest_is_deaf {
            return Fate::Ends;
        }
        if self.guest_is_done && !self.is_told {
            self.is_told = true;
            // It fails if the other side has gone, which is noticed elsewhere.
            let _ = socket.shutdown(Shutdown::Write);
        }
        Fate::Stays
    }
}

/// A program of the host that has not said yet which port it wants.
#[derive(Debug)]
struct Client {
    socket: UnixStream,
    line: Vec<u8>,
}

/// What became of a [`Client`].
#[derive(PartialEq, Eq, Debug)]
enum Said {
    /// Not all yet.
    Waits,
    /// The port.
    Port(u32),
    /// Nonsense, or it has gone.
    Nothing,
}

impl Client {
    /// Reads its line, and nothing behind it, which is for the guest.
    fn listen(&mut self) -> Said {
        loop {
            let mut byte = [0];
            match self.socket.read(&mut byte) {
                Ok(1) if byte == *b"\n" => {
                    return port(&self.line).map_or(Said::Nothing, Said::Port);
                }
                Ok(1) if self.line.len() < LINE => self.line.extend(byte),
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Said::Waits,
                _ => return Said::Nothing,
            }
        }
    }
}

/// The port of `CONNECT PORT`.
fn port(line: &[u8]) -> Option<u32> {
    let mut words = str::from_utf8(line).ok()?.split_ascii_whitespace();
    let is_connect = words.next()?.eq_ignore_ascii_case("connect");
    let port = words.next()?.parse().ok()?;
    (is_connect && words.next().is_none()).then_some(port)
}

/// What a process has.
struct Server {
    cid: u64,
    /// From and to the guest; none: it has said nonsense, or has gone.
    stream: Option<UnixStream>,
    /// A packet that has begun.
    input: Vec<u8>,
    /// Packets for the guest, and how much of them is sent.
    output: Vec<u8>,
    written: usize,
    listener: UnixListener,
    /// Nobody more can be accepted until somebody goes.
    is_full: bool,
    clients: BTreeMap<u64, Client>,
    next_client: u64,
    connections: BTreeMap<Key, Connection>,
    next_port: u32,
    /// Where connections to the host's sockets come from, who waits for one, and whether the first of them has been asked for.
    source: OwnedFd,
    asking: VecDeque<Key>,
    has_asked: bool,
}

/// Something that can be ready.
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

    /// Waits for something, and does what is to be done then.
    fn turn(&mut self) -> io::Result<()> {
        for (ready, flags) in self.wait_for(&PAUSE)? {
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
                Ready::Source => self.answered(),
                Ready::Client(number) => self.hear(number),
                Ready::Connection(key) => self.serve(key, flags),
            }
        }
        self.ask();
        self.write();
        Ok(())
    }

    /// What is ready within a time, and for what.
    fn wait_for(&self, time: &Timespec) -> io::Result<Vec<(Ready, PollFlags)>> {
        let hears = self.hears();
        let mut wanted: Vec<(Ready, BorrowedFd<'_>, PollFlags)> = Vec::new();
        if let Some(stream) = &self.stream {
            let mut flags = PollFlags::empty();
            flags.set(PollFlags::IN, hears);
            flags.set(PollFlags::OUT, self.written < self.output.len());
            wanted.push((Ready::Stream, stream.as_fd(), flags));
            if hears && !self.is_full {
                wanted.push((Ready::Listener, self.listener.as_fd(), PollFlags::IN));
            }
            if self.has_asked {
                wanted.push((Ready::Source, self.source.as_fd(), PollFlags::IN));
            }
        }
        let clients = self.clients.iter().filter(|_| hears);
        wanted.extend(clients.map(|(number, client)| {
            (Ready::Client(*number), client.socket.as_fd(), PollFlags::IN)
        }));
        wanted.extend(self.connections.iter().filter_map(|(key, connection)| {
            let flags = connection.wants(hears)?;
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

    /// Whether anybody is heard: not while much waits for the guest.
    fn hears(&self) -> bool {
        self.stream.is_some() && self.output.len() - self.written < WAITING
    }

    fn accept(&mut self) {
        while self.clients.len() + self.connections.len() < MOST_CONNECTIONS {
            match self.listener.accept() {
                Ok((socket, _)) => {
                    if socket.set_nonblocking(true).is_ok() {
                        self.clients.insert(self.next_client, Client { socket, line: Vec::new() });
                        self.next_client += 1;
                    }
                }
                Err(error) if error.kind() == ErrorKind::WouldBlock => return,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                // The host has no more descriptors for this process.
                Err(_) => break,
            }
        }
        self.is_full = true;
    }

    /// A program says which port it wants.
    fn hear(&mut self, number: u64) {
        let said = self.clients.get_mut(&number).map_or(Said::Nothing, Client::listen);
        if said == Said::Waits {
            return;
        }
        let client = self.clients.remove(&number);
        if let (Said::Port(port), Some(Client { socket, .. })) = (said, client) {
            let key = (self.free_port(), port);
            self.connections.insert(key, Connection::new(Stage::Requested, Some(socket)));
            self.put(key, op::REQUEST, 0, &[]);
        } else {
            self.is_full = false;
        }
    }

    /// A port that no connection is from.
    fn free_port(&mut self) -> u32 {
        loop {
            let port = self.next_port;
            self.next_port = if port + 1 < PORTS.end { port + 1 } else { PORTS.start };
            if self.connections.range((port, 0)..=(port, u32::MAX)).next().is_none() {
                return port;
            }
        }
    }

    /// Sends a packet of a connection, or about one that there is not.
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

    /// Sends to the guest what its stream takes.
    fn write(&mut self) {
        while let Some(stream) = &mut self.stream
            && self.written < self.output.len()
        {
            match stream.write(&self.output[self.written..]) {
                Ok(count) => self.written += count,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) if error.kind() == ErrorKind::WouldBlock => break,
                Err(_) => self.leave(),
            }
        }
        // Bytes are moved once at most.
        if self.written > self.output.len() / 2 {
            self.output.drain(..self.written);
            self.written = 0;
        }
    }

    /// Nothing comes from the guest any more, or nothing that makes sense. The machine's end ends the process.
    fn leave(&mut self) {
        self.stream = None;
        self.connections.clear();
        self.clients.clear();
        self.asking.clear();
    }

    /// Reads packets of the guest.
    fn read(&mut self) {
        let Some(stream) = &mut self.stream else { return };
        let before = self.input.len();
        self.input.resize(before + PIECE, 0);
        let read = stream.read(&mut self.input[before..]);
        self.input.truncate(before + *read.as_ref().unwrap_or(&0));
        match read {
            Ok(0) => return self.leave(),
            Ok(_) => {}
            Err(error)
                if matches!(error.kind(), ErrorKind::Interrupted | ErrorKind::WouldBlock) =>
            {
                return;
            }
            Err(_) => return self.leave(),
        }
        let input = std::mem::take(&mut self.input);
        let mut rest = input.as_slice();
        while let Some((length, behind)) = rest.split_first_chunk::<LENGTH>() {
            let length = u32::from_be_bytes(*length) as usize;
            if length > HEADER + MOST_DATA as usize {
                return self.leave();
            }
            let Some((packet, behind)) = behind.split_at_checked(length) else { break };
            rest = behind;
            match packet.split_first_chunk() {
                Some((header, data)) => self.packet(&Header::from_bytes(header), data),
                // The guest's driver begins anew.
                None if packet.is_empty() => {
                    self.connections.clear();
                    self.is_full = false;
                }
                None => return self.leave(),
            }
        }
        self.input = rest.to_vec();
    }

    /// A packet of the guest.
    fn packet(&mut self, header: &Header, data: &[u8]) {
        // The guest can change a packet while it is looked at.
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
                op::REQUEST if self.clients.len() + self.connections.len() < MOST_CONNECTIONS => {
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
                // There is room for it: it is the first that is written.
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

    /// Passes on to the host what it takes, and tells the guest.
    fn pass_on(&mut self, key: Key) {
        let Some(connection) = self.connections.get_mut(&key) else { return };
        match connection.pass_on() {
            Fate::Ends => self.end(key),
            Fate::Stays if connection.forwarded.wrapping_sub(connection.told) >= TELL => {
                self.put(key, op::CREDIT_UPDATE, 0, &[]);
            }
            Fate::Stays => {}
        }
    }

    /// Ends a connection, and tells the guest.
    fn end(&mut self, key: Key) {
        self.forget(key);
        self.put(key, op::RST, 0, &[]);
    }

    fn forget(&mut self, key: Key) {
        self.connections.remove(&key);
        self.is_full = false;
    }

    /// The host's side of a connection is ready.
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
        let hears = self.hears();
        let Some(connection) = self.connections.get_mut(&key) else { return };
        if !gone && !flags.contains(PollFlags::IN) || !hears {
            return;
        }
        let credit = connection.credit() as usize;
        let Some(socket) = &mut connection.socket else { return };
        if !connection.is_done && !connection.guest_is_deaf && credit > 0 {
            let mut buffer = [0; PIECE];
            match socket.read(&mut buffer[..credit.min(PIECE)]) {
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
            // Nobody will take it.
            return self.end(key);
        }
        if connection.is_done || connection.guest_is_deaf {
            connection.is_gone = true;
            self.put(key, op::SHUTDOWN, shutdown::BOTH, &[]);
        }
    }

    /// Asks for the connection that is wanted next: one at a time, so that answers need no names.
    fn ask(&mut self) {
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

    /// The connection that was asked for, or none.
    fn answered(&mut self) {
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
        // It may have ended meanwhile, and even be there again, by an earlier answer.
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

    /// A server, the guest, and who makes connections to the host's sockets.
    struct Rig {
        server: Server,
        guest: UnixStream,
        /// Bytes of the server that make no packet yet.
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

        /// Lets the server do what can be done now.
        fn turn(&mut self) {
            while self.server.wait_briefly() {
                self.server.turn().unwrap();
            }
        }

        /// The guest sends a packet, with all that anybody could have of credit.
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

        /// What the guest gets.
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

        /// Operations, ports of the host and flags of what the guest gets.
        fn ops(&mut self) -> Vec<(u16, u32, u32)> {
            let packets = self.packets().into_iter();
            packets.map(|(header, _)| (header.op, header.from_port, header.flags)).collect()
        }

        /// A program of the host that has a connection to the guest's port 9; the connection's ports.
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

        /// Answers who asks for a port of the host.
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
        /// Something is ready now.
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
        // Nothing will follow in either direction.
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
    fn nobody_listens_in_the_guest() {
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
    fn a_program_of_the_guest_connects() {
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
        // The host's program goes away.
        drop(theirs);
        assert_eq!(rig.ops(), [(op::SHUTDOWN, 50, shutdown::BOTH)]);
        rig.send((50, 9), op::RW, 0, b"nobody");
        assert_eq!(rig.ops(), [(op::RST, 50, 0)]);
        // A connection that is no more when its answer comes.
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
        // To the host: as much as was promised, and not a byte more.
        let (piece, all) = (vec![2; 1 << 14], MOST_DATA as usize);
        let mut sent = 0;
        let mut told = 0;
        // What waits in the socket itself does not count.
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
        // About no connection.
        for op in [op::RESPONSE, op::RW, op::SHUTDOWN, op::CREDIT_REQUEST, 77] {
            rig.send((1, 2), op, 0, &[]);
            assert_eq!(rig.ops(), [(op::RST, 1, 0)], "{op}");
        }
        rig.send((1, 2), op::RST, 0, &[]);
        // Of somebody else, for somebody else, of another kind, of another length.
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
    fn a_driver_begins_anew() {
        let mut rig = Rig::new();
        let (mut client, key) = rig.connected();
        rig.guest.write_all(&0_u32.to_be_bytes()).unwrap();
        rig.turn();
        assert_eq!(read(&mut client), []);
        rig.send(key, op::RW, 0, b"late");
        assert_eq!(rig.ops(), [(op::RST, key.0, 0)]);
        rig.connected();
        // Lengths that are none: nothing is believed any more, and nobody waits for ever.
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
        for port in 0..MOST_CONNECTIONS as u32 + 3 {
            rig.send((5, port), op::REQUEST, 0, &[]);
        }
        assert_eq!(rig.server.connections.len(), MOST_CONNECTIONS);
        assert_eq!(rig.ops(), [(op::RST, 5, 0); 3]);
        let mut client = UnixStream::connect(rig.path()).unwrap();
        client.write_all(b"CONNECT 9\n").unwrap();
        assert_eq!(rig.ops(), [], "it waits");
        rig.send((5, 0), op::RST, 0, &[]);
        assert_eq!(rig.ops(), [(op::REQUEST, PORTS.start, 0)]);
    }

    /// A guest that takes nothing and sends whatever comes to its mind: what the server keeps is limited.
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
            // Whole packets only, as its own end of the stream sees to it.
            if rig.server.hears() {
                let mut rest = &packet[..];
                while !rest.is_empty() && rig.server.hears() {
                    match rig.guest.write(rest) {
                        Ok(count) => rest = &rest[count..],
                        Err(_) => rig.server.turn().unwrap(),
                    }
                }
                if !rest.is_empty() {
                    // The rest of it is not lost in a machine; here the test ends.
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
            assert!(server.connections.len() + server.clients.len() <= MOST_CONNECTIONS);
            assert!(server.output.len() <= 2 * (WAITING + 2 * PIECE), "{}", server.output.len());
            assert!(server.input.len() <= HEADER + MOST_DATA as usize + PIECE);
            let kept = server.connections.values().map(|one| one.waiting.len()).max();
            assert!(kept.is_none_or(|kept| kept <= MOST_DATA as usize));
        }
    }
}
