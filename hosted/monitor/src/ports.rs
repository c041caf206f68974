//! Ports of the virtio console and their host ends.
//!
//! One stream of frames ([`proto::ports`]) connects them with the device model. A port is read only
//! while the guest has it open and has room for the input, so no port delays another one. A
//! terminal in raw mode is always read, because of the keys for `parador`.

use crate::config::port::PortConfig;
use crate::console::{HostConsole, Input};
use crate::terminal::Keys;
use hosted_command::failure::{Failure, IoContext};
use proto::ports::{FrameKind, HEADER, Header, IS_CONSOLE, WINDOW};
use rustix::event::PollFlags;
use rustix::io::{Errno, read, write};
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;

/// Bytes of frames for the VM above which no further input is read.
const MAX_PENDING: usize = 64 << 10;

/// A port and its host end, for all starts of a VM.
pub struct Port {
    name: String,
    is_console: bool,
    end: HostConsole,
}

impl Port {
    /// Opens the host end of a named port.
    ///
    /// # Errors
    /// See [`HostConsole::open`].
    pub fn open(config: &PortConfig) -> Result<Self, Failure> {
        let name = config.name.0.clone();
        let end = HostConsole::open(&config.target, &format!("port {name}"))?;
        Ok(Self { name, is_console: false, end })
    }

    /// Creates the port of the console.
    pub fn console(end: HostConsole) -> Self {
        Self { name: String::new(), is_console: true, end }
    }

    /// Returns whether the host end is standard input and output.
    pub fn is_stdio(&self) -> bool {
        self.end.is_stdio()
    }
}

/// State of a port during one start of a VM.
struct PortLine<'a> {
    port: &'a mut Port,
    /// The guest has the port open.
    guest_open: bool,
    /// State of the host end that the device model knows.
    known_open: bool,
    /// Bytes that may be sent to the device model.
    credit: usize,
    /// Input that has not been sent to the device model yet.
    input: Vec<u8>,
    /// The input has ended.
    has_ended: bool,
    /// The output has failed: it is discarded.
    has_failed: bool,
}

impl PortLine<'_> {
    /// Returns whether the host end is open: a console always is.
    fn is_open(&self) -> bool {
        self.port.is_console || !self.has_ended && !self.has_failed && self.port.end.is_connected()
    }

    /// Returns whether the host end is to be polled: for clients always, for input with room.
    fn wants_input(&self) -> bool {
        let has_room = self.guest_open && self.credit > 0;
        !self.has_ended && (has_room || !self.port.end.is_connected())
    }

    /// Takes input; `keys` are those of a terminal in raw mode. Returns `true` if the user ends the
    /// VM.
    fn take(&mut self, bytes: &[u8], keys: Option<&mut Keys>) -> bool {
        match keys {
            Some(keys) => keys.pass(bytes, &mut self.input),
            None => {
                self.input.extend(bytes);
                false
            }
        }
    }
}

/// Source of an event of the ports.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum PortSource {
    /// Frames of the VM.
    Frames,
    /// Room for frames to the VM.
    Room,
    /// Input or a connection of the port with this index.
    Input(usize),
    /// Room for output of the port with this index.
    Output(usize),
}

/// Connects the ports with a running VM.
pub struct PortMux<'a> {
    stream: &'a UnixStream,
    lines: Vec<PortLine<'a>>,
    /// Frames of the VM that are not complete.
    received: Vec<u8>,
    /// Frames that the VM has not taken.
    pending: Vec<u8>,
    is_open: bool,
}

impl<'a> PortMux<'a> {
    /// Defines the ports. A console has index 0; the first named port has index 1.
    pub fn new(stream: &'a UnixStream, ports: &'a mut [Port]) -> Self {
        let lines = ports.iter_mut().map(|port| PortLine {
            port,
            guest_open: false,
            known_open: false,
            credit: WINDOW.into(),
            input: Vec::new(),
            has_ended: false,
            has_failed: false,
        });
        let lines = lines.collect();
        let mut mux =
            Self { stream, lines, received: Vec::new(), pending: Vec::new(), is_open: true };
        for index in 0..mux.lines.len() {
            let port = &mux.lines[index].port;
            let flags = if port.is_console { IS_CONSOLE } else { 0 };
            let data = [&[flags], port.name.as_bytes()].concat();
            mux.push(FrameKind::Define, index, &data);
            mux.report_state(index);
        }
        mux
    }

    /// Returns whether the VM can still send frames, or output of its ports waits for room.
    pub fn is_open(&self) -> bool {
        self.is_open || self.waits().next().is_some()
    }

    /// Output that waits for room.
    fn waits(&self) -> impl Iterator<Item = (PortSource, BorrowedFd<'_>, PollFlags)> {
        let lines = self.lines.iter().enumerate().filter(|(_, line)| !line.has_failed);
        lines.filter_map(|(index, line)| {
            Some((PortSource::Output(index), line.port.end.waits()?, PollFlags::OUT))
        })
    }

    /// Returns the descriptors to poll and their events. `raw`: a terminal is in raw mode.
    pub fn interest(&self, raw: bool) -> Vec<(PortSource, BorrowedFd<'_>, PollFlags)> {
        let stream = self.stream.as_fd();
        let is_read = self.is_open && self.waits().next().is_none();
        let frames = is_read.then_some((PortSource::Frames, stream, PollFlags::IN));
        let has_frames = self.is_open && !self.pending.is_empty();
        let room = has_frames.then_some((PortSource::Room, stream, PollFlags::OUT));
        let has_room = self.is_open && self.pending.len() < MAX_PENDING;
        let is_read = |line: &PortLine<'_>| {
            has_room && line.wants_input() || raw && line.port.is_stdio() && !line.has_ended
        };
        let lines = self.lines.iter().enumerate().filter(|(_, line)| is_read(line));
        let inputs = lines.filter_map(|(index, line)| {
            let fd = line.port.end.input()?;
            Some((PortSource::Input(index), fd, PollFlags::IN))
        });
        frames.into_iter().chain(room).chain(inputs).chain(self.waits()).collect()
    }

    /// Handles an event. `keys` are those of a terminal in raw mode. Returns `true` if the user
    /// ends the VM.
    ///
    /// # Errors
    /// The output of the VM cannot be written, or the stream fails.
    pub fn ready(&mut self, source: PortSource, keys: Option<&mut Keys>) -> Result<bool, Failure> {
        match source {
            PortSource::Frames => self.receive().map(|()| false),
            PortSource::Room => {
                self.send();
                Ok(false)
            }
            PortSource::Input(index) => Ok(self.input(index, keys)),
            PortSource::Output(index) => {
                let written = self.lines[index].port.end.flush();
                self.written(index, written).map(|()| false)
            }
        }
    }

    /// Adds a frame for the VM.
    fn push(&mut self, kind: FrameKind, index: usize, data: &[u8]) {
        let header = Header { kind, port: (index + self.shift()) as u8, length: data.len() as u16 };
        self.pending.extend(header.to_bytes());
        self.pending.extend(data);
    }

    /// Returns the number of the first port: 0 is the console's.
    fn shift(&self) -> usize {
        usize::from(!self.lines.first().is_some_and(|line| line.port.is_console))
    }

    /// Tells the VM whether the host end of a port is open, if that has changed.
    fn report_state(&mut self, index: usize) {
        let is_open = self.lines[index].is_open();
        if std::mem::replace(&mut self.lines[index].known_open, is_open) != is_open {
            let kind = if is_open { FrameKind::Open } else { FrameKind::Close };
            self.push(kind, index, &[]);
        }
    }

    /// Reads input of a port. Returns `true` if the user ends the VM.
    fn input(&mut self, index: usize, keys: Option<&mut Keys>) -> bool {
        let line = &mut self.lines[index];
        let keys = keys.filter(|_| line.port.is_stdio());
        let mut buffer = [0; WINDOW as usize];
        // Without room only keys or a connection are expected.
        let room = if keys.is_some() { buffer.len() } else { line.credit.clamp(1, buffer.len()) };
        let mut is_over = false;
        match line.port.end.read(&mut buffer[..room]) {
            Input::Bytes(length) => is_over = line.take(&buffer[..length], keys),
            Input::Nothing => {}
            Input::End => line.has_ended = true,
        }
        self.forward(index);
        self.report_state(index);
        self.send();
        is_over
    }

    /// Adds frames with the input of a port, as much as the guest has room for.
    fn forward(&mut self, index: usize) {
        let line = &mut self.lines[index];
        let count = line.credit.min(line.input.len());
        if line.guest_open && count > 0 {
            line.credit -= count;
            let data: Vec<u8> = line.input.drain(..count).collect();
            self.push(FrameKind::Data, index, &data);
        }
    }

    /// Writes frames to the VM, as much as it takes.
    fn send(&mut self) {
        match write(self.stream, &self.pending) {
            Ok(taken) => drop(self.pending.drain(..taken)),
            Err(Errno::AGAIN | Errno::INTR) => {}
            // The VM has ended: its own end is reported elsewhere.
            Err(_) => self.pending.clear(),
        }
    }

    /// Reads frames of the VM.
    fn receive(&mut self) -> Result<(), Failure> {
        let mut buffer = [0; 16 << 10];
        match read(self.stream, &mut buffer[..]) {
            Ok(0) | Err(Errno::CONNRESET) => self.is_open = false,
            Ok(length) => self.received.extend(&buffer[..length]),
            Err(Errno::AGAIN | Errno::INTR) => {}
            Err(error) => return Err(Failure::os("read from the VM's ports", &error.into())),
        }
        let mut start = 0;
        while let Some((header, rest)) = self.received[start..].split_first_chunk::<HEADER>() {
            let header = Header::from_bytes(*header);
            let length = header.map_or(0, |header| usize::from(header.length));
            let Some(data) = rest.get(..length) else { break };
            let data = data.to_vec();
            start += HEADER + length;
            // The guest can forge frames of its own ports.
            if let Some(header) = header {
                self.handle(header, &data)?;
            }
        }
        self.received.drain(..start);
        Ok(())
    }

    fn handle(&mut self, header: Header, data: &[u8]) -> Result<(), Failure> {
        let index = usize::from(header.port).checked_sub(self.shift());
        let Some(index) = index.filter(|index| *index < self.lines.len()) else { return Ok(()) };
        let line = &mut self.lines[index];
        match header.kind {
            FrameKind::Open => {
                line.guest_open = true;
                self.forward(index);
            }
            FrameKind::Close => line.guest_open = false,
            FrameKind::Credit => {
                if let Ok(count) = <[u8; 2]>::try_from(data) {
                    let credit = line.credit + usize::from(u16::from_le_bytes(count));
                    line.credit = credit.min(WINDOW.into());
                    self.forward(index);
                }
            }
            FrameKind::Data if line.has_failed => {}
            FrameKind::Data => {
                let written = line.port.end.write(data);
                self.written(index, written)?;
            }
            FrameKind::Define => {}
        }
        Ok(())
    }

    /// Handles the result of a write: a port without a reader has failed.
    fn written(&mut self, index: usize, result: io::Result<()>) -> Result<(), Failure> {
        match result {
            Err(error) if error.kind() == io::ErrorKind::BrokenPipe => {
                self.lines[index].has_failed = true;
            }
            written => written.os_error("write the output of a port")?,
        }
        self.report_state(index);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::console::Target;
    use crate::terminal::MAX_KEYS;
    use std::io::{Read, Write};

    fn frame(kind: FrameKind, port: u8, data: &[u8]) -> Vec<u8> {
        let header = Header { kind, port, length: data.len() as u16 };
        [&header.to_bytes(), data].concat()
    }

    fn port(name: &str, target: &Target) -> Port {
        Port { name: name.into(), is_console: false, end: HostConsole::open(target, name).unwrap() }
    }

    /// Handles all events that are ready.
    fn serve(mux: &mut PortMux<'_>) {
        for _ in 0..20 {
            let sources: Vec<_> = mux.interest(false).iter().map(|(source, ..)| *source).collect();
            for source in sources {
                mux.ready(source, None).unwrap();
            }
        }
    }

    #[test]
    fn the_keys_for_parador_do_not_wait_for_the_guest() {
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        ours.set_nonblocking(true).unwrap();
        let mut ports = [Port::console(HostConsole::stdio().unwrap())];
        let mut mux = PortMux::new(&ours, &mut ports);
        let reads = |mux: &PortMux<'_>, raw| {
            mux.interest(raw).iter().any(|(source, ..)| *source == PortSource::Input(0))
        };
        let window = usize::from(WINDOW);
        let mut keys = Keys::default();
        assert_eq!([false, true].map(|raw| reads(&mux, raw)), [false, true], "not opened");
        assert!(!mux.lines[0].take(&vec![b'k'; window + 5], Some(&mut keys)));
        mux.pending.clear();
        mux.handle(Header { kind: FrameKind::Open, port: 0, length: 0 }, b"").unwrap();
        mux.send();
        let mut sent = vec![0; HEADER + window];
        theirs.read_exact(&mut sent).unwrap();
        assert_eq!(sent, frame(FrameKind::Data, 0, &vec![b'k'; window]), "early keys");
        assert_eq!([false, true].map(|raw| reads(&mux, raw)), [false, true], "no room");
        let credit = Header { kind: FrameKind::Credit, port: 0, length: 2 };
        mux.handle(credit, &[9, 0]).unwrap();
        assert_eq!(mux.pending, frame(FrameKind::Data, 0, b"kkkkk"));
        assert!(!mux.lines[0].take(&vec![b'k'; 2 * MAX_KEYS], Some(&mut keys)));
        assert_eq!(mux.lines[0].input.len(), MAX_KEYS);
        assert!(mux.lines[0].take(b"\x01x", Some(&mut keys)));
    }

    #[test]
    fn ports_are_defined_and_served() {
        let folder = tempfile::tempdir().unwrap();
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        ours.set_nonblocking(true).unwrap();
        theirs.set_nonblocking(true).unwrap();
        let (file, socket) = (folder.path().join("out"), folder.path().join("socket"));
        let mut ports =
            [port("a", &Target::File(file.clone())), port("b", &Target::Unix(socket.clone()))];
        let mut mux = PortMux::new(&ours, &mut ports);
        serve(&mut mux);
        let mut bytes = vec![0; 4096];
        let mut received = |theirs: &mut UnixStream| {
            let length = theirs.read(&mut bytes).unwrap_or(0);
            bytes[..length].to_vec()
        };
        let defined = [
            frame(FrameKind::Define, 1, b"\0a"),
            frame(FrameKind::Open, 1, b""),
            frame(FrameKind::Define, 2, b"\0b"),
        ];
        assert_eq!(received(&mut theirs), defined.concat(), "a socket without a client is closed");
        // A frame in two pieces; frames that mean nothing.
        let output = frame(FrameKind::Data, 1, b"output");
        theirs.write_all(&[9, 9, 0, 0]).unwrap();
        theirs.write_all(&frame(FrameKind::Data, 0, b"no port")).unwrap();
        theirs.write_all(&output[..7]).unwrap();
        serve(&mut mux);
        theirs.write_all(&output[7..]).unwrap();
        serve(&mut mux);
        assert_eq!(std::fs::read(&file).unwrap(), b"output");
        let mut client = UnixStream::connect(&socket).unwrap();
        client.write_all(&[b'x'; 2 * WINDOW as usize]).unwrap();
        serve(&mut mux);
        assert_eq!(received(&mut theirs), frame(FrameKind::Open, 2, b""), "no input yet");
        theirs.write_all(&frame(FrameKind::Open, 2, b"")).unwrap();
        serve(&mut mux);
        let first = received(&mut theirs);
        assert_eq!(first.len(), HEADER + usize::from(WINDOW), "the window");
        theirs.write_all(&frame(FrameKind::Credit, 2, &[9, 0])).unwrap();
        serve(&mut mux);
        assert_eq!(received(&mut theirs), frame(FrameKind::Data, 2, &[b'x'; 9]));
        drop(client);
        theirs.write_all(&frame(FrameKind::Credit, 2, &WINDOW.to_le_bytes())).unwrap();
        theirs.write_all(&frame(FrameKind::Credit, 2, &[1])).unwrap();
        serve(&mut mux);
        let rest = [b'x'; WINDOW as usize - 9];
        let last = [frame(FrameKind::Data, 2, &rest), frame(FrameKind::Close, 2, b"")];
        assert_eq!(received(&mut theirs), last.concat());
        drop(theirs);
        serve(&mut mux);
        assert!(!mux.is_open());
    }
}
