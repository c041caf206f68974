use super::connection::port;
use super::*;
use rustix::net::{
    AddressFamily, SendAncillaryBuffer, SendAncillaryMessage, SocketFlags, SocketType, sendmsg,
    socketpair,
};
use std::net::Shutdown;
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
        sendmsg(&self.source, &[io::IoSlice::new(&[0])], &mut rights, SendFlags::empty()).unwrap();
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

/// As Linux does after close(2): it resets the connection if the answer takes long.
#[test]
fn a_slow_reader_gets_what_was_sent_before_an_orderly_end() {
    let data: Vec<u8> = (0..MOST_DATA).map(|number| number as u8).collect();
    let ends = ["reset", "restart of the driver", "hang-up"];
    for (end, flags) in ends.into_iter().flat_map(|end| [(end, shutdown::BOTH), (end, 0)]) {
        let mut rig = Rig::new();
        let (mut client, key) = rig.connected();
        for part in data.chunks(1 << 14) {
            rig.send(key, op::RW, 0, part);
        }
        assert!(!rig.server.connections[&key].waiting.is_empty(), "the test is about it");
        rig.send(key, op::SHUTDOWN, flags, &[]);
        match end {
            "reset" => rig.send(key, op::RST, 0, &[]),
            "hang-up" => rig.guest.shutdown(Shutdown::Both).unwrap(),
            _ => rig.guest.write_all(&0_u32.to_be_bytes()).unwrap(),
        }
        rig.turn();
        let is_orderly = flags != 0;
        assert!(rig.server.connections.is_empty());
        assert_eq!(rig.server.draining.len(), usize::from(is_orderly));
        let mut came = Vec::new();
        while let bytes @ [_, ..] = &read(&mut client)[..] {
            came.extend(bytes);
            rig.turn();
        }
        assert_eq!(came == data, is_orderly, "{end}: {} bytes", came.len());
        assert!(data.starts_with(&came) && rig.server.draining.is_empty());
    }
}

#[test]
fn draining_connections_are_limited_and_end_with_their_reader() {
    let mut rig = Rig::new();
    let (client, key) = rig.connected();
    while rig.server.connections[&key].waiting.is_empty() {
        rig.send(key, op::RW, 0, &[1; 1 << 14]);
    }
    rig.send(key, op::SHUTDOWN, shutdown::SEND, &[]);
    rig.send(key, op::RST, 0, &[]);
    for port in 0..MAX_CONNECTIONS as u32 {
        rig.send((5, port), op::REQUEST, 0, &[]);
    }
    assert_eq!(rig.server.connections.len(), MAX_CONNECTIONS - 1);
    drop(client);
    rig.turn();
    assert!(rig.server.draining.is_empty());
}

/// The queue of packets to the guest does not matter to those that it has sent.
#[test]
fn packets_before_a_hang_up_are_handled() {
    for is_process_end in [false, true] {
        let mut rig = Rig::new();
        let (mut client, key) = rig.connected();
        let data = [1; CHUNK + 1];
        for (op, data) in [(op::CREDIT_REQUEST, &[][..]), (op::RW, &data[..])] {
            rig.send_packet(&Header { op, ..rig.header(key, data) }, data);
        }
        if is_process_end {
            rig.server.finish();
        } else {
            rig.guest.shutdown(Shutdown::Both).unwrap();
            rig.turn();
            assert!(rig.server.stream.is_none());
        }
        assert_eq!(read(&mut client), data);
    }
}

#[test]
fn a_failed_accept_is_repeated() {
    let mut rig = Rig::new();
    let (socket, mut peer) = UnixStream::pair().unwrap();
    peer.write_all(b"accept(2) fails").unwrap();
    let socket = UnixListener::from(OwnedFd::from(socket));
    let listener = std::mem::replace(&mut rig.server.listener, socket);
    rig.server.turn().unwrap();
    rig.server.listener = listener;
    let mut client = UnixStream::connect(rig.path()).unwrap();
    client.write_all(b"CONNECT 9\n").unwrap();
    // Neither a connection nor a packet wakes the server.
    rig.server.turn().unwrap();
    assert_eq!(rig.ops(), [(op::REQUEST, PORTS.start, 0)]);
}

#[test]
fn requests_that_have_ended_do_not_accumulate() {
    let mut rig = Rig::new();
    for number in 0..3000 {
        rig.send((50, number % 3), op::REQUEST, 0, &[]);
        rig.send((50, number % 3), op::RST, 0, &[]);
    }
    // The first one has been requested.
    assert_eq!(rig.server.asking, [(50, 0)]);
    for port in 0..3 {
        rig.send((50, port), op::REQUEST, 0, &[]);
    }
    assert_eq!(rig.server.asking, [(50, 0), (50, 1), (50, 2)]);
    // A driver that restarts: the response to the first request is still to come.
    rig.guest.write_all(&0_u32.to_be_bytes()).unwrap();
    rig.turn();
    assert_eq!(rig.server.asking, [(50, 0)]);
    rig.send((51, 7), op::REQUEST, 0, &[]);
    assert_eq!((rig.answer(None), rig.answer(None)), (50, 51));
    assert_eq!(rig.ops(), [(op::RST, 51, 0)]);
    assert!(rig.server.asking.is_empty() && rig.server.connections.is_empty());
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
        let draining = server.draining.len();
        assert!(server.connections.len() + server.clients.len() + draining <= MAX_CONNECTIONS);
        assert!(server.asking.len() <= server.connections.len() + 1);
        assert!(server.output.len() <= 2 * (MAX_QUEUED + 2 * CHUNK), "{}", server.output.len());
        assert!(server.input.len() <= HEADER + MOST_DATA as usize + CHUNK);
        let kept = server.connections.values().map(|one| one.waiting.len()).max();
        assert!(kept.is_none_or(|kept| kept <= MOST_DATA as usize));
    }
}
