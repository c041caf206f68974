//! Multiplexer of one line for many clients: selection, routing of keys, and output history of each
//! client.
//!
//! Two views. *One*: the line shows the bytes of the selected client unchanged; output of the other
//! clients is only kept. *All*: the line shows the output of all clients line by line with a prefix
//! `[name] `; [`crate::cook`] explains why no client can forge one. Keys go to the selected client
//! in both views.
//!
//! In the view of all clients, each client may have as many bytes queued as there is free room,
//! less what the selected client needs: so a flooding client gets at most a part of the queue, and
//! a smaller one the more clients flood. Only the selected client waits for room; lines of other
//! clients without room are counted instead.
//!
//! Invariants: no client delays another one, except by the speed of the line while it is selected;
//! memory is fixed; the order of calls determines all results.

use core::fmt::{self, Write};

use heapless::String;
use proto::console::directory::{LOG_SESSION, SESSIONS};
use proto::system::MAX_NAME;

use crate::cook::{COLUMNS, Cook, Cooked};
use crate::output::{Output, Owner};
use crate::ring::{History, Ring};

/// Escape key: the next key is a command. Ctrl-].
pub const ESCAPE: u8 = 0x1d;

/// Bytes of output queued for the line.
const OUTPUT: usize = 16 << 10;
/// Room that client output leaves for messages and for the history after a switch.
const RESERVE: usize = 4 << 10;
/// Upper bound of a line with the output before and after it.
const LINE_ROOM: usize = 4 * COLUMNS;
/// Room that lines of other clients leave for the selected client: with no output queued, it never
/// waits for them.
const SELECTED_ROOM: usize = 2 << 10;
/// Bytes of input queued per client.
const INPUT: usize = 1 << 10;
/// Bytes of output history per client.
const HISTORY: usize = 8 << 10;
/// Lines and bytes of history shown after a switch.
const SHOWN_LINES: usize = 20;
const SHOWN_BYTES: usize = 2 << 10;

/// Interpretation of the next key.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Keys {
    /// It goes to the selected client.
    Pass,
    /// It is a command.
    Command,
    /// It belongs to the name of a client.
    Name,
}

/// Connection state of a client.
#[derive(Clone, Copy, PartialEq, Eq)]
enum ClientState {
    /// Never connected.
    Unknown,
    /// Named by root, session not open yet.
    Expected,
    /// Session open.
    Open,
    /// Ended; its output is kept.
    Ended,
}

struct Client {
    state: ClientState,
    /// Number by which users select it.
    number: u8,
    name: String<MAX_NAME>,
    history: History<HISTORY>,
    input: Ring<INPUT>,
    /// A write was truncated, and the client waits for room.
    wants_room: bool,
    /// Output arrived since the client was last shown.
    has_unseen_output: bool,
    /// The client ended and has not opened a session since.
    ended: bool,
    cook: Cook,
    /// Number of complete lines without room to show them.
    hidden_lines: u32,
}

impl Client {
    const UNKNOWN: Self = Self {
        state: ClientState::Unknown,
        number: 0,
        name: String::new(),
        history: History::new(),
        input: Ring::new(),
        wants_room: false,
        has_unseen_output: false,
        ended: false,
        cook: Cook::new(),
        hidden_lines: 0,
    };

    /// Returns the number of characters of text in a line after the prefix.
    fn width(&self) -> usize {
        COLUMNS - self.name.len() - "[] ".len()
    }
}

/// The multiplexer. A session identifies a client, and is less than [`SESSIONS`].
pub struct Mux {
    /// Several clients may share the line; otherwise the bytes of the only one pass unchanged in
    /// both directions.
    shared: bool,
    clients: [Client; SESSIONS],
    output: Output<OUTPUT>,
    /// At least one client waits for room.
    has_waiter: bool,
    selected: usize,
    keys: Keys,
    typed: String<MAX_NAME>,
    /// The line shows the output of all clients.
    all: bool,
    /// The last byte on the line was a line feed.
    at_start: bool,
    /// The selected client's incomplete line is on the screen.
    partial: bool,
    /// Clients to signal for input or room, one bit each.
    wakes: u64,
}

const _: () = assert!(SESSIONS <= 64);

impl Mux {
    /// Creates a line without clients.
    pub const fn new() -> Self {
        Self {
            shared: false,
            clients: [Client::UNKNOWN; SESSIONS],
            output: Output::new(),
            has_waiter: false,
            selected: 0,
            keys: Keys::Pass,
            typed: String::new(),
            all: false,
            at_start: false,
            partial: false,
            wakes: 0,
        }
    }

    /// Enables sharing by several clients, with the log as one of them.
    pub fn multiplex(&mut self) {
        self.shared = true;
        self.at_start = true;
        self.clients[LOG_SESSION].state = ClientState::Open;
        // It fits.
        let _ = self.clients[LOG_SESSION].name.push_str("log");
    }

    /// Clients to signal for input or room; each is returned once.
    pub fn take_wakes(&mut self) -> impl Iterator<Item = usize> + use<> {
        let wakes = core::mem::take(&mut self.wakes);
        (0..SESSIONS).filter(move |client| wakes & 1 << client != 0)
    }

    // ---- sessions ----------------------------------------------------------------------------

    /// Announces a client: it gets its number, and can be selected.
    pub fn announce(&mut self, client: usize, name: &str) {
        let first = (1..SESSIONS).all(|other| self.clients[other].state == ClientState::Unknown);
        let free = self.free_number();
        let new = &mut self.clients[client];
        if new.name != name {
            new.history.clear();
            new.name.clear();
            // The name of an entry of the directory fits.
            let _ = new.name.push_str(name);
        }
        match new.state {
            ClientState::Unknown => (new.state, new.number) = (ClientState::Expected, free),
            ClientState::Ended => {
                new.state = ClientState::Expected;
                new.input.clear();
            }
            ClientState::Expected | ClientState::Open => return,
        }
        if first && self.shared {
            self.take_early_keys(client);
            self.select(client);
        }
    }

    /// Assigns keys that arrived before any client to this one.
    fn take_early_keys(&mut self, client: usize) {
        let selected = &self.clients[self.selected];
        if selected.state == ClientState::Unknown || self.selected == LOG_SESSION {
            while let Some(key) = self.clients[self.selected].input.take() {
                self.clients[client].input.put(key);
            }
        }
    }

    /// Opens or reopens a client's session. It receives the keys typed for it since it was
    /// announced.
    pub fn open(&mut self, client: usize, name: &str) {
        let again = self.clients[client].ended;
        if self.clients[client].state == ClientState::Open {
            self.clients[client].input.clear();
        }
        self.announce(client, name);
        if !self.shared {
            self.take_early_keys(client);
        }
        let new = &mut self.clients[client];
        (new.state, new.ended) = (ClientState::Open, false);
        new.cook = Cook::new();
        (new.wants_room, new.hidden_lines) = (false, 0);
        if new.input.len() != 0 {
            self.wakes |= 1 << client;
        }
        if !self.shared {
            self.selected = client;
        } else if client == self.selected && again {
            self.print(format_args!("{name} is connected again"));
        }
    }

    fn free_number(&self) -> u8 {
        let taken = |number: &u8| {
            self.clients
                .iter()
                .any(|other| other.state != ClientState::Unknown && other.number == *number)
        };
        (1..u8::MAX).find(|number| !taken(number)).unwrap_or(0)
    }

    /// Ends a client's session.
    pub fn close(&mut self, client: usize) {
        if matches!(self.clients[client].state, ClientState::Unknown | ClientState::Ended) {
            return;
        }
        (self.clients[client].state, self.clients[client].ended) = (ClientState::Ended, true);
        if client == self.selected && self.shared {
            let name = self.clients[client].name.clone();
            self.print(format_args!("{name} has ended; Ctrl-] ? lists the clients"));
        } else if client == self.selected {
            let other = self.clients.iter().position(|other| other.state == ClientState::Open);
            self.selected = other.unwrap_or(client);
        }
    }

    // ---- output ------------------------------------------------------------------------------

    /// Returns the next byte for the line.
    pub fn next(&mut self) -> Option<u8> {
        let byte = self.output.take();
        if self.has_waiter && self.output.room() >= self.wake_threshold() {
            self.wake_waiters();
        }
        byte
    }

    /// Returns the room at which a waiting client is signalled: enough for more than a few bytes.
    fn wake_threshold(&self) -> usize {
        if self.shared && self.all {
            RESERVE + LINE_ROOM + 2 * self.output.waiting(Owner::client(self.selected))
        } else {
            OUTPUT / 2
        }
    }

    /// Returns whether there is room for a line of a client, or for a byte of the selected one.
    fn has_room(&self, client: usize) -> bool {
        let reserved = match (self.all, client == self.selected) {
            (false, _) => 0,
            (true, true) => self.output.waiting(Owner::client(client)),
            (true, false) => SELECTED_ROOM + self.output.waiting(Owner::client(client)),
        };
        self.output.room() >= RESERVE + LINE_ROOM + reserved
    }

    /// Returns whether no output is queued.
    pub fn is_empty(&self) -> bool {
        self.output.len() == 0
    }

    fn wake_waiters(&mut self) {
        self.has_waiter = false;
        for (index, client) in self.clients.iter_mut().enumerate() {
            if core::mem::take(&mut client.wants_room) {
                self.wakes |= 1 << index;
            }
        }
    }

    /// Writes output of a client. Returns the number of bytes accepted; the client is signalled
    /// when there is room for the remaining ones.
    pub fn write(&mut self, client: usize, bytes: &[u8]) -> usize {
        let mut taken = 0;
        for &byte in bytes {
            if !self.put(client, byte) {
                self.clients[client].wants_room = true;
                self.has_waiter = true;
                break;
            }
            taken += 1;
        }
        taken
    }

    /// Writes to root's log, which never waits.
    pub fn log(&mut self, bytes: &[u8]) {
        for &byte in bytes {
            if byte == b'\n' {
                self.log_byte(b'\r');
            }
            self.log_byte(byte);
        }
    }

    fn log_byte(&mut self, byte: u8) {
        if !self.put(LOG_SESSION, byte) {
            self.clients[LOG_SESSION].history.put(byte);
        }
    }

    /// Queues a byte of a client's output; returns `false` without room.
    fn put(&mut self, client: usize, byte: u8) -> bool {
        if !self.shared {
            return self.output.put(Owner::client(client), byte);
        }
        let shown = client == self.selected;
        if shown && !self.has_room(client) {
            return false;
        }
        self.clients[client].history.put(byte);
        if self.all {
            self.show_cooked(client, byte);
        } else if shown {
            self.output.put(Owner::client(client), byte);
            self.at_start = byte == b'\n';
        } else {
            self.clients[client].has_unseen_output = true;
        }
        true
    }

    /// Shows a byte of a client as a part of one of its lines. There is room if the client is
    /// selected.
    fn show_cooked(&mut self, index: usize, byte: u8) {
        let width = self.clients[index].width();
        loop {
            let (cooked, taken) = self.clients[index].cook.take(byte, width);
            if cooked == Cooked::Ended {
                self.show_line(index);
                self.clients[index].cook.next_line();
            } else if index == self.selected {
                self.show_change(cooked);
            }
            if taken {
                return;
            }
        }
    }

    /// Shows a change of the selected client's incomplete line.
    fn show_change(&mut self, cooked: Cooked) {
        let owner = Owner::client(self.selected);
        match cooked {
            Cooked::Nothing | Cooked::Ended => {}
            _ if !self.partial => self.show_partial(owner),
            Cooked::Added(byte) => {
                self.output.put(owner, byte);
            }
            Cooked::Erased => {
                self.output.put(owner, 0x08);
            }
        }
    }

    /// Shows the selected client's incomplete line, if there is one, from its start, charged to the
    /// owner of the output that interrupted it.
    fn show_partial(&mut self, owner: Owner) {
        let Self { clients, output, selected, .. } = self;
        let client = &clients[*selected];
        self.partial = !client.cook.line().is_empty();
        if self.partial {
            put_prefixed_line(output, owner, client);
            self.at_start = false;
        }
    }

    /// Shows a complete line of a client.
    fn show_line(&mut self, index: usize) {
        let (own, owner) = (index == self.selected, Owner::client(index));
        if !own && !self.has_room(index) {
            self.clients[index].hidden_lines += 1;
            return;
        }
        if !(own && self.partial) {
            self.fresh_line(owner);
            let hidden_lines = core::mem::take(&mut self.clients[index].hidden_lines);
            if hidden_lines != 0 {
                let name = self.clients[index].name.clone();
                let mut line = Line(&mut self.output, owner);
                let _ = write!(line, "[{name}] ({hidden_lines} lines dropped)\r\n");
            }
            put_prefixed_line(&mut self.output, owner, &self.clients[index]);
        }
        self.output.put_all(owner, b"\r\n");
        (self.partial, self.at_start) = (false, true);
        if !own {
            self.show_partial(owner);
        }
    }

    /// Moves to the start of a line on the screen. An incomplete line is erased and shown again
    /// later.
    fn fresh_line(&mut self, owner: Owner) {
        if self.partial {
            self.output.put_all(owner, b"\r\x1b[K");
        } else if !self.at_start {
            self.output.put_all(owner, b"\r\n");
        }
        (self.partial, self.at_start) = (false, true);
    }

    /// Shows a message of the multiplexer.
    fn print(&mut self, text: fmt::Arguments) {
        self.fresh_line(Owner::MULTIPLEXER);
        let _ = write!(self.message(), "[parador] {text}\r\n");
        if self.all {
            self.show_partial(Owner::MULTIPLEXER);
        }
    }

    /// Returns a writer for the multiplexer's own text.
    fn message(&mut self) -> Line<'_> {
        Line(&mut self.output, Owner::MULTIPLEXER)
    }

    // ---- input -------------------------------------------------------------------------------

    /// Returns the number of keys that can be accepted now.
    pub fn input_room(&self) -> usize {
        // With several clients, one that does not read must not keep the user from selecting
        // another one.
        if self.shared { INPUT } else { self.clients[self.selected].input.room() }
    }

    /// Processes a key.
    pub fn key(&mut self, byte: u8) {
        match self.keys {
            Keys::Pass if byte == ESCAPE && self.shared => self.keys = Keys::Command,
            Keys::Pass => self.forward_key(byte),
            Keys::Command => {
                self.keys = Keys::Pass;
                self.command(byte);
            }
            Keys::Name => self.name_key(byte),
        }
    }

    /// Queues a key for the selected client, connected or not; drops it if the queue is full.
    fn forward_key(&mut self, byte: u8) {
        let client = &mut self.clients[self.selected];
        if client.state == ClientState::Open && client.input.len() == 0 {
            self.wakes |= 1 << self.selected;
        }
        if client.state != ClientState::Ended {
            client.input.put(byte);
        }
    }

    /// Reads input of a client; returns the number of bytes.
    pub fn read(&mut self, client: usize, bytes: &mut [u8]) -> usize {
        let input = &mut self.clients[client].input;
        let mut length = 0;
        while length < bytes.len()
            && let Some(byte) = input.take()
        {
            bytes[length] = byte;
            length += 1;
        }
        length
    }

    fn command(&mut self, key: u8) {
        match key {
            ESCAPE => self.forward_key(ESCAPE),
            b'0'..=b'9' => self.select_number(key - b'0'),
            b'n' => self.select_next(true),
            b'p' => self.select_next(false),
            b':' => {
                self.keys = Keys::Name;
                self.typed.clear();
                self.fresh_line(Owner::MULTIPLEXER);
                self.output.put_all(Owner::MULTIPLEXER, b"[parador] to: ");
                self.at_start = false;
            }
            b'a' => self.toggle_all(),
            b's' => self.show_history(),
            b'?' | b'h' => self.show_clients(),
            _ => self.print(format_args!("unknown command; Ctrl-] ? lists the commands")),
        }
    }

    fn name_key(&mut self, key: u8) {
        match key {
            b'\r' | b'\n' => {
                self.keys = Keys::Pass;
                let typed = self.typed.clone();
                self.select_name(&typed);
            }
            0x08 | 0x7f => {
                if self.typed.pop().is_some() {
                    self.output.put_all(Owner::MULTIPLEXER, b"\x08 \x08");
                }
            }
            b'!'..=b'~' => {
                if self.typed.push(key as char).is_ok() {
                    self.output.put(Owner::MULTIPLEXER, key);
                }
            }
            _ => {
                self.keys = Keys::Pass;
                self.print(format_args!("selection cancelled"));
            }
        }
    }

    fn select_number(&mut self, number: u8) {
        let found = self.named_clients().find(|&index| self.clients[index].number == number);
        match found {
            Some(index) => self.select(index),
            None => self.print(format_args!("no client has number {number}")),
        }
    }

    /// Selects a client by its name, an unambiguous prefix of its name, or its number.
    fn select_name(&mut self, name: &str) {
        if let Ok(number) = name.parse() {
            return self.select_number(number);
        }
        let exact = self.named_clients().find(|&index| self.clients[index].name == name);
        let starts =
            |index: &usize| !name.is_empty() && self.clients[*index].name.starts_with(name);
        let only = self.named_clients().find(starts);
        let several = self.named_clients().filter(starts).nth(1).is_some();
        match exact.or(only.filter(|_| !several)) {
            Some(index) => self.select(index),
            None => {
                let what = if several { "several clients match" } else { "no client matches" };
                // Only printable characters are collected.
                self.print(format_args!("{what} {name:?}"));
            }
        }
    }

    fn named_clients(&self) -> impl Iterator<Item = usize> {
        (0..SESSIONS).filter(|&index| self.clients[index].state != ClientState::Unknown)
    }

    /// Selects the open client with the next higher or lower number.
    fn select_next(&mut self, up: bool) {
        let from = self.clients[self.selected].number;
        let distance = |index: &usize| {
            let number = self.clients[*index].number;
            if up { number.wrapping_sub(from) } else { from.wrapping_sub(number) }
        };
        let others = self.named_clients().filter(|&index| {
            let client = &self.clients[index];
            matches!(client.state, ClientState::Expected | ClientState::Open)
                && client.number != from
        });
        if let Some(index) = others.min_by_key(distance) {
            self.select(index);
        }
    }

    fn select(&mut self, index: usize) {
        // Queued output is in the history; dropping it makes the switch visible at once.
        self.output.clear();
        self.wake_waiters();
        self.selected = index;
        (self.partial, self.at_start) = (false, false);
        self.clients[index].has_unseen_output = false;
        let Client { number, name, .. } = &self.clients[index];
        let (number, name) = (*number, name.clone());
        let ended = if self.clients[index].state == ClientState::Ended { ", ended" } else { "" };
        // Resets colours that the last client has set.
        self.output.put_all(Owner::MULTIPLEXER, b"\x1b[m");
        self.print(format_args!("{name} ({number}{ended}); Ctrl-] ? for help"));
        if !self.all {
            self.show_last(SHOWN_LINES, SHOWN_BYTES);
        }
    }

    /// Shows the end of the selected client's history.
    fn show_last(&mut self, lines: usize, bytes: usize) {
        let Self { clients, output, selected, at_start, .. } = self;
        let client = &clients[*selected];
        let length = client.history.last_lines(lines, bytes.min(output.room()));
        for byte in client.history.last(length) {
            output.put(Owner::MULTIPLEXER, byte);
            *at_start = byte == b'\n';
        }
    }

    fn show_history(&mut self) {
        self.output.clear();
        self.wake_waiters();
        (self.partial, self.at_start) = (false, false);
        let name = self.clients[self.selected].name.clone();
        self.print(format_args!("output history of {name}:"));
        self.show_last(HISTORY, HISTORY);
    }

    fn toggle_all(&mut self) {
        self.all = !self.all;
        // The other view may have the room that the client waits for.
        self.wake_waiters();
        for client in &mut self.clients {
            client.cook = Cook::new();
            (client.hidden_lines, client.has_unseen_output) = (0, false);
        }
        self.partial = false;
        match self.all {
            true => self.print(format_args!("showing all clients; Ctrl-] a shows one")),
            false => self.print(format_args!("showing one client")),
        }
    }

    fn show_clients(&mut self) {
        self.fresh_line(Owner::MULTIPLEXER);
        let mut numbers = 0_u64;
        for index in self.named_clients() {
            numbers |= 1 << self.clients[index].number.min(63);
        }
        for number in (0..64).filter(|number| numbers & 1 << number != 0) {
            let Some(index) =
                self.named_clients().find(|&index| self.clients[index].number == number)
            else {
                continue;
            };
            let Self { clients, output, .. } = self;
            let client = &clients[index];
            let mark = if index == self.selected { '>' } else { ' ' };
            let label = match (client.state, client.has_unseen_output) {
                (ClientState::Ended, _) => "ended",
                (_, true) => "new output",
                _ => "",
            };
            let name = &client.name;
            let mut line = Line(output, Owner::MULTIPLEXER);
            let _ = write!(line, "[parador] {mark}{number:>2} {name} {label}\r\n");
        }
        for line in HELP {
            let _ = write!(self.message(), "[parador] {line}\r\n");
        }
        if self.all {
            self.show_partial(Owner::MULTIPLEXER);
        }
    }
}

const HELP: &[&str] = &[
    "Ctrl-] 0..9      show this client and send it the keys",
    "Ctrl-] n, p      show the next or the previous client",
    "Ctrl-] : NAME    show the client with this name, start of a name, or number",
    "Ctrl-] a         show all clients, or one again",
    "Ctrl-] s         show the output history of this client",
    "Ctrl-] Ctrl-]    send Ctrl-] to the client",
];

/// Writes a client's line after its prefix.
fn put_prefixed_line(output: &mut Output<OUTPUT>, owner: Owner, client: &Client) {
    // The callers ensure that the line fits.
    let _ = write!(Line(output, owner), "[{}] ", client.name);
    output.put_all(owner, client.cook.line());
}

/// Writer of text for the line, charged to an owner.
struct Line<'a>(&'a mut Output<OUTPUT>, Owner);

impl Write for Line<'_> {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        self.0.put_all(self.1, text.as_bytes());
        Ok(())
    }
}

#[cfg(test)]
mod tests;
