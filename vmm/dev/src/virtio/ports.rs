//! Console with several named ports.
//!
//! State: the queues; of each port its name, the state of both sides, input for the guest, and the
//! messages that are due; the frames in transfer from and to the host end.
//! Features: ports that the host end defines ([`proto::ports`]), consoles among them; both sides
//! open and close them. Without `F_MULTIPORT` the driver has port 0 alone.
//! Missing: window size, removal of ports, emergency write.
//! Documentation: VIRTIO 1.2, section 5.3 "Console Device".

use super::console::spec::{RECEIVE, TRANSMIT};
use super::queue::{Queue, RingError, with_readable, with_writable};
use super::{BATCH, CONFIG_LEN, Kind, MAX_QUEUES, VirtioDevice, more};
use proto::ports::{FrameKind, HEADER, Header, IS_CONSOLE, MAX_NAME, MAX_PORTS, WINDOW};
use vmm_bus::Env;

/// Queues, features, control messages.
pub mod spec {
    /// Queue: control messages to the driver.
    pub const CONTROL_RECEIVE: usize = 2;
    /// Queue: control messages of the driver.
    pub const CONTROL_TRANSMIT: usize = 3;
    /// Feature: several ports, and control queues.
    pub const F_MULTIPORT: u64 = 1 << 1;
    /// Configuration: largest number of ports (RO), 32 bits.
    pub const MAX_NR_PORTS: usize = 4;
    /// Bytes of a control message: port (32 bits), event (16), value (16).
    pub const CONTROL: usize = 8;

    /// Event of the driver: it takes control messages.
    pub const DEVICE_READY: u16 = 0;
    /// Event: the port exists.
    pub const PORT_ADD: u16 = 1;
    /// Event of the driver: it can use the port.
    pub const PORT_READY: u16 = 3;
    /// Event: the port is a console.
    pub const CONSOLE_PORT: u16 = 4;
    /// Event of both sides: the sender has opened (1) or closed (0) the port.
    pub const PORT_OPEN: u16 = 6;
    /// Event: name of the port, which follows the message.
    pub const PORT_NAME: u16 = 7;
}
use spec::*;

/// Number of queues.
const QUEUES: usize = 2 * MAX_PORTS + 2;
const _: () = assert!(QUEUES <= MAX_QUEUES);
/// Entries of each queue.
const ENTRIES: u16 = 64;
/// Bytes of a port in a frame to the host end.
const PIECE: usize = 256;
/// Longest control message in bytes.
const MAX_CONTROL: usize = CONTROL + MAX_NAME;

/// Returns the receive queue of a port (section 5.3.2); its transmit queue is the next one.
const fn receive_queue(port: usize) -> usize {
    if port == 0 { RECEIVE } else { 2 * port + 2 }
}

/// Control messages to the driver that are due, in this order.
const DUE: [u16; 3] = [PORT_ADD, CONSOLE_PORT, PORT_NAME];

/// A port.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Port {
    is_defined: bool,
    is_console: bool,
    name: [u8; MAX_NAME],
    name_length: usize,
    /// The driver can use the port.
    is_usable: bool,
    host_open: bool,
    /// State of the host end that the driver knows.
    known_open: bool,
    guest_open: bool,
    /// The host end does not know `guest_open` yet.
    is_changed: bool,
    /// Messages of [`DUE`], one bit each by event.
    due: u16,
    /// Bytes that the host end may send in addition to those that it knows of.
    credit: u16,
    /// Bytes of the first chain of the transmit queue that the host end has.
    sent: u32,
    /// Ring of input for the guest.
    input: [u8; WINDOW as usize],
    first: usize,
    length: usize,
}

impl Port {
    const NEW: Self = Self {
        is_defined: false,
        is_console: false,
        name: [0; MAX_NAME],
        name_length: 0,
        is_usable: false,
        host_open: false,
        known_open: false,
        guest_open: false,
        is_changed: false,
        due: 0,
        credit: 0,
        sent: 0,
        input: [0; WINDOW as usize],
        first: 0,
        length: 0,
    };

    /// Returns contiguous input.
    fn available(&self) -> &[u8] {
        let end = (self.first + self.length).min(self.input.len());
        &self.input[self.first..end]
    }

    /// Adds a byte of input; `false`: the host end has exceeded its window.
    fn push(&mut self, byte: u8) -> bool {
        let has_room = self.length < self.input.len();
        if has_room {
            self.input[(self.first + self.length) % self.input.len()] = byte;
            self.length += 1;
        }
        has_room
    }

    /// Removes input, for which the host end may send as much.
    fn consume(&mut self, count: usize) {
        self.first = (self.first + count) % self.input.len();
        self.length -= count;
        self.credit = self.credit.saturating_add(count as u16);
    }

    /// Sets whether the guest has the port open. A closed port discards its input.
    fn set_guest_open(&mut self, is_open: bool) {
        self.is_changed |= self.guest_open != is_open;
        self.guest_open = is_open;
        if !is_open {
            self.consume(self.length);
        }
    }

    /// Returns the next control message that is due. The driver learns that the host end has
    /// closed the port after all input.
    fn next_message(&self) -> Option<u16> {
        let is_open_due = self.is_usable
            && self.host_open != self.known_open
            && (self.host_open || self.length == 0);
        let due = DUE.into_iter().find(|event| self.due & 1 << event != 0);
        due.or(is_open_due.then_some(PORT_OPEN))
    }

    /// Starts or ends the exchange of control messages with the driver.
    fn announce(&mut self, is_ready: bool) {
        (self.is_usable, self.known_open) = (false, false);
        self.due = if is_ready && self.is_defined { 1 << PORT_ADD } else { 0 };
    }

    /// Handles a byte of the definition: the flags, then the name.
    fn define(&mut self, position: u16, byte: u8) {
        match usize::from(position) {
            0 => {
                let guest_open = self.guest_open;
                *self = Self { is_defined: true, guest_open, is_changed: guest_open, ..Self::NEW };
            }
            1 => self.is_console = byte & IS_CONSOLE != 0,
            place => {
                if let Some(letter) = self.name.get_mut(place - 2) {
                    *letter = byte;
                    self.name_length = place - 1;
                }
            }
        }
    }

    /// Encodes a control message; returns its length.
    fn message(&mut self, index: usize, event: u16, to: &mut [u8; MAX_CONTROL]) -> usize {
        let value = event != PORT_OPEN || self.host_open;
        to[..4].copy_from_slice(&(index as u32).to_le_bytes());
        to[4..6].copy_from_slice(&event.to_le_bytes());
        to[6..CONTROL].copy_from_slice(&u16::from(value).to_le_bytes());
        self.due &= !(1 << event);
        match event {
            PORT_OPEN => self.known_open = self.host_open,
            PORT_NAME => {
                let name = &self.name[..self.name_length];
                to[CONTROL..][..name.len()].copy_from_slice(name);
                return CONTROL + name.len();
            }
            _ => {}
        }
        CONTROL
    }
}

/// Frame from the host end that is being received.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Incoming {
    header: [u8; HEADER],
    /// Bytes of the header that were received.
    received: usize,
    /// Bytes of the data that were received.
    data: u16,
}

/// Frame to the host end that is being sent.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Outgoing {
    bytes: [u8; HEADER + PIECE],
    length: usize,
    sent: usize,
}

/// A console with several ports.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Ports {
    queues: [Queue; QUEUES],
    ports: [Port; MAX_PORTS],
    /// The driver takes control messages.
    is_ready: bool,
    incoming: Incoming,
    outgoing: Outgoing,
    /// Port that sends next.
    turn: usize,
}

impl Default for Ports {
    fn default() -> Self {
        Self::new()
    }
}

impl Ports {
    /// Creates the device in its power-on state, without ports.
    pub const fn new() -> Self {
        Self {
            queues: [Queue::new(ENTRIES); QUEUES],
            ports: [Port::NEW; MAX_PORTS],
            is_ready: false,
            incoming: Incoming { header: [0; HEADER], received: 0, data: 0 },
            outgoing: Outgoing { bytes: [0; HEADER + PIECE], length: 0, sent: 0 },
            turn: 0,
        }
    }

    /// Handles all that either side has left, except output of the guest.
    fn run(&mut self, env: &mut dyn Env) -> Result<(), RingError> {
        self.receive(env);
        (0..MAX_PORTS).try_for_each(|port| self.deliver(port, env))?;
        self.control(env)?;
        self.transmit(env)
    }

    /// Receives frames of the host end.
    fn receive(&mut self, env: &mut dyn Env) {
        for _ in 0..usize::from(BATCH) * PIECE {
            let Some(byte) = env.take() else { return };
            self.accept(byte, env);
        }
        more(env);
    }

    /// Handles a byte of the host end.
    fn accept(&mut self, byte: u8, env: &mut dyn Env) {
        let incoming = &mut self.incoming;
        if incoming.received < HEADER {
            incoming.header[incoming.received] = byte;
            incoming.received += 1;
            if incoming.received < HEADER {
                return;
            }
            incoming.data = 0;
        } else {
            incoming.data += 1;
        }
        let position = incoming.data;
        let header = Header::from_bytes(incoming.header);
        if header.is_none_or(|header| header.length == position) {
            incoming.received = 0;
        }
        let Some(header) = header else {
            return env.missing("virtio ports: unknown frame", incoming.header[0].into());
        };
        let Some(port) = self.ports.get_mut(usize::from(header.port)) else { return };
        match header.kind {
            FrameKind::Define => {
                port.define(position, byte);
                if position == header.length {
                    port.announce(self.is_ready);
                }
            }
            FrameKind::Open | FrameKind::Close => port.host_open = header.kind == FrameKind::Open,
            // The header alone.
            FrameKind::Data if position == 0 => {}
            FrameKind::Data if !port.guest_open => port.credit = port.credit.saturating_add(1),
            FrameKind::Data => {
                if !port.push(byte) {
                    env.missing("virtio ports: window exceeded", header.port.into());
                }
            }
            FrameKind::Credit => {}
        }
    }

    /// Gives input of a port to the guest.
    fn deliver(&mut self, index: usize, env: &mut dyn Env) -> Result<(), RingError> {
        let (port, queue) = (&mut self.ports[index], &mut self.queues[receive_queue(index)]);
        while port.length > 0 && port.guest_open {
            let Some(chain) = queue.pop(env.memory())? else {
                if queue.await_driver(env.memory())? {
                    continue;
                }
                return Ok(());
            };
            if chain.writable == 0 {
                return Err(RingError::Short);
            }
            let input = port.available();
            let memory = env.memory();
            let done = with_writable(queue, memory, chain, |mut data| data.write(input));
            queue.give_back(memory, chain.head, done as u32);
            if done == 0 {
                // The guest has shortened the chain.
                return Err(RingError::Short);
            }
            port.consume(done);
        }
        Ok(())
    }

    /// Sends control messages that are due to the driver.
    fn control(&mut self, env: &mut dyn Env) -> Result<(), RingError> {
        if !self.is_ready {
            return Ok(());
        }
        let queue = &mut self.queues[CONTROL_RECEIVE];
        for (index, port) in self.ports.iter_mut().enumerate() {
            while let Some(event) = port.next_message() {
                let Some(chain) = queue.pop(env.memory())? else {
                    if queue.await_driver(env.memory())? {
                        continue;
                    }
                    return Ok(());
                };
                let mut message = [0; MAX_CONTROL];
                let length = port.message(index, event, &mut message);
                if (chain.writable as usize) < length {
                    return Err(RingError::Short);
                }
                let memory = env.memory();
                let message = &message[..length];
                let done = with_writable(queue, memory, chain, |mut data| data.write(message));
                queue.give_back(memory, chain.head, done as u32);
            }
        }
        Ok(())
    }

    /// Handles control messages of the driver.
    fn handle_control(&mut self, env: &mut dyn Env) -> Result<(), RingError> {
        for _ in 0..BATCH {
            let queue = &mut self.queues[CONTROL_TRANSMIT];
            let Some(chain) = queue.pop(env.memory())? else {
                if queue.await_driver(env.memory())? {
                    continue;
                }
                return Ok(());
            };
            let mut message = [0; CONTROL];
            let memory = env.memory();
            let read = with_readable(queue, memory, chain, |mut data| data.read(&mut message));
            queue.give_back(memory, chain.head, 0);
            if read < CONTROL {
                return Err(RingError::Short);
            }
            let [a, b, c, d, event @ .., low, high] = message;
            let port = u32::from_le_bytes([a, b, c, d]);
            let value = u16::from_le_bytes([low, high]);
            self.on_message(port, u16::from_le_bytes(event), value, env);
        }
        more(env);
        Ok(())
    }

    fn on_message(&mut self, id: u32, event: u16, value: u16, env: &mut dyn Env) {
        if event == DEVICE_READY {
            self.is_ready = value == 1;
            return self.ports.iter_mut().for_each(|port| port.announce(value == 1));
        }
        let port = usize::try_from(id).ok().and_then(|index| self.ports.get_mut(index));
        let Some(port) = port.filter(|port| port.is_defined) else {
            return env.missing("virtio ports: message for a missing port", id.into());
        };
        match event {
            PORT_READY if value == 1 => {
                let console = if port.is_console { 1 << CONSOLE_PORT } else { 0 };
                let name = if port.name_length > 0 { 1 << PORT_NAME } else { 0 };
                port.due |= console | name;
                port.is_usable = true;
            }
            PORT_READY => {}
            PORT_OPEN => port.set_guest_open(value == 1),
            _ => env.missing("virtio ports: unknown control message", event.into()),
        }
    }

    /// Sends frames to the host end as long as it has room.
    fn transmit(&mut self, env: &mut dyn Env) -> Result<(), RingError> {
        for _ in 0..BATCH {
            let outgoing = &mut self.outgoing;
            while let Some(&byte) = outgoing.bytes[..outgoing.length].get(outgoing.sent) {
                if !env.put(byte) {
                    return Ok(());
                }
                outgoing.sent += 1;
            }
            if !self.compose_state() && !self.compose_data(env)? {
                return Ok(());
            }
        }
        more(env);
        Ok(())
    }

    /// Begins a frame.
    fn compose(&mut self, kind: FrameKind, port: usize, length: usize) {
        let header = Header { kind, port: port as u8, length: length as u16 };
        self.outgoing.bytes[..HEADER].copy_from_slice(&header.to_bytes());
        (self.outgoing.length, self.outgoing.sent) = (HEADER + length, 0);
    }

    /// Begins a frame on the state of a port, if one is due.
    fn compose_state(&mut self) -> bool {
        let is_due = |port: &Port| port.is_changed || port.credit > 0;
        let Some(index) = self.ports.iter().position(is_due) else { return false };
        let port = &mut self.ports[index];
        // Before the state: the host end may send as soon as the port is open.
        if port.credit > 0 {
            let credit = core::mem::take(&mut port.credit).to_le_bytes();
            self.outgoing.bytes[HEADER..][..credit.len()].copy_from_slice(&credit);
            self.compose(FrameKind::Credit, index, credit.len());
            return true;
        }
        port.is_changed = false;
        let kind = if port.guest_open { FrameKind::Open } else { FrameKind::Close };
        self.compose(kind, index, 0);
        true
    }

    /// Begins a frame with output of the next port that has some.
    fn compose_data(&mut self, env: &mut dyn Env) -> Result<bool, RingError> {
        for offset in 0..MAX_PORTS {
            let index = (self.turn + offset) % MAX_PORTS;
            let length = self.take_output(index, env)?;
            if length > 0 {
                self.turn = index + 1;
                self.compose(FrameKind::Data, index, length);
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// Copies output of a port to the data of the frame to send; returns its length.
    fn take_output(&mut self, index: usize, env: &mut dyn Env) -> Result<usize, RingError> {
        let queue = &mut self.queues[receive_queue(index) + TRANSMIT];
        let port = &mut self.ports[index];
        for _ in 0..ENTRIES {
            let Some(chain) = queue.pop(env.memory())? else {
                if queue.await_driver(env.memory())? {
                    continue;
                }
                return Ok(0);
            };
            let piece = &mut self.outgoing.bytes[HEADER..];
            let count = with_readable(queue, env.memory(), chain, |mut data| {
                data.skip(port.sent);
                data.read(piece)
            });
            port.sent += count as u32;
            // No progress: the guest has shortened the chain.
            if port.sent >= chain.readable || count == 0 {
                port.sent = 0;
                queue.give_back(env.memory(), chain.head, 0);
            } else {
                queue.undo_pop();
            }
            if count > 0 && port.is_defined {
                return Ok(count);
            }
        }
        more(env);
        Ok(0)
    }
}

impl VirtioDevice for Ports {
    fn kind(&self) -> Kind {
        Kind::Console
    }

    fn features(&self) -> u64 {
        F_MULTIPORT
    }

    fn queues(&mut self) -> &mut [Queue] {
        &mut self.queues
    }

    fn config(&self, to: &mut [u8; CONFIG_LEN]) {
        to[MAX_NR_PORTS] = MAX_PORTS as u8;
    }

    fn start(&mut self, features: u64, _: &mut dyn Env) {
        if features & F_MULTIPORT == 0 {
            self.ports[0].set_guest_open(true);
        }
    }

    fn notify(&mut self, queue: usize, env: &mut dyn Env) -> Result<(), RingError> {
        match queue {
            CONTROL_TRANSMIT => {
                self.handle_control(env)?;
                self.run(env)
            }
            // The transmit queues are those with odd numbers.
            _ if queue % 2 == TRANSMIT => self.transmit(env),
            _ => self.run(env),
        }
    }

    fn wake(&mut self, _: u8, env: &mut dyn Env) -> Result<bool, RingError> {
        self.run(env)?;
        self.handle_control(env)?;
        Ok(false)
    }

    fn reset(&mut self, _: &mut dyn Env) {
        // The streams to and from the host end continue.
        self.is_ready = false;
        for port in &mut self.ports {
            port.announce(false);
            port.set_guest_open(false);
            port.sent = 0;
        }
    }
}
