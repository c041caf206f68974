//! Sessions of the console server, and its reaction to calls and events.

use native_rt::{Gate, Irq, Message, Notification, Page, Slots, drop_capability};
use proto::console::directory::{self, SESSIONS};
use proto::console::{CHANGED, CLOSE, DRAIN, MAX_BYTES, OPEN, READ, WRITE};
use proto::control::DRAINED;
use proto::start::{event, slot};
use proto::{DONE, REFUSED};

use crate::directory::Directory;
use crate::mux::Mux;
use crate::uart::SerialDriver;

#[derive(Clone, Copy)]
struct Session {
    notification: Notification,
    events: u64,
}

/// The console server. A session is the badge of its gate.
pub struct ConsoleServer<U> {
    uart: U,
    irq: Irq,
    mux: &'static mut Mux,
    directory: Option<Directory>,
    sessions: [Option<Session>; SESSIONS],
    /// Slots for clients' notifications.
    slots: Slots<1>,
    /// Slot that accepts the next capability.
    accept_slot: Option<u64>,
    /// Root waits for the output to drain.
    draining: bool,
}

impl<U: SerialDriver> ConsoleServer<U> {
    /// Creates a server without sessions.
    pub fn new(uart: U, irq: Irq, mux: &'static mut Mux, directory: Option<Directory>) -> Self {
        let mut server = Self {
            uart,
            irq,
            mux,
            directory,
            sessions: [None; SESSIONS],
            slots: Slots::new(slot::FREE),
            accept_slot: None,
            draining: false,
        };
        server.accept_capability();
        server
    }

    /// Accepts a capability in a free slot, unless one is already prepared.
    fn accept_capability(&mut self) {
        self.accept_slot = self.accept_slot.or_else(|| self.slots.allocate());
        let (base, count) = self.accept_slot.map_or((0, 0), |slot| (slot, 1));
        Page::current().accept_capabilities(base, count);
    }

    /// Frees a slot and its capability.
    fn free_slot(&mut self, slot: u64) {
        // An empty slot is the desired result.
        let _ = drop_capability(slot);
        self.slots.free(slot);
        self.accept_capability();
    }

    /// Handles a call and returns the reply.
    pub fn call(&mut self, badge: u64, message: Message) -> Message {
        let received = (message.tag.items != 0).then(|| self.accept_slot.take()).flatten();
        let Some(index) = usize::try_from(badge).ok().filter(|&index| index < SESSIONS) else {
            self.drop_received(received);
            return refused();
        };
        let answer = match message.tag.label {
            OPEN if received.is_some() => {
                self.drop_session(index);
                self.sessions[index] = received.map(|slot| Session {
                    notification: Notification::at(slot),
                    events: message.words[0],
                });
                self.accept_capability();
                let entry = self.directory.as_ref().and_then(|directory| directory.entry(index));
                let name = entry.as_ref().and_then(directory::name);
                self.mux.open(index, name.unwrap_or("?"));
                done(0)
            }
            // A client without a session opened it with a previous server instance.
            WRITE | READ if self.sessions[index].is_none() => {
                self.drop_received(received);
                refused()
            }
            WRITE => {
                self.drop_received(received);
                self.write(index, message)
            }
            READ => {
                self.drop_received(received);
                self.read(index, message.words[0])
            }
            CLOSE => {
                self.drop_received(received);
                self.close(index);
                done(0)
            }
            _ => {
                self.drop_received(received);
                refused()
            }
        };
        self.send();
        self.wake();
        answer
    }

    /// Drops a capability that a message delegated unexpectedly.
    fn drop_received(&mut self, received: Option<u64>) {
        if let Some(slot) = received {
            self.free_slot(slot);
        }
    }

    fn drop_session(&mut self, index: usize) {
        if let Some(session) = self.sessions[index].take() {
            self.free_slot(session.notification.selector());
        }
    }

    fn close(&mut self, index: usize) {
        self.drop_session(index);
        self.mux.close(index);
    }

    fn write(&mut self, index: usize, message: Message) -> Message {
        let mut bytes = [0; MAX_BYTES];
        let bytes = Page::current().bytes(message.tag.words, message.words[0], &mut bytes);
        done(self.mux.write(index, bytes) as u64)
    }

    fn read(&mut self, index: usize, wanted: u64) -> Message {
        let mut bytes = [0; MAX_BYTES];
        let wanted = wanted.min(MAX_BYTES as u64) as usize;
        let length = self.mux.read(index, &mut bytes[..wanted]);
        if length < wanted {
            // There is room now; the port may hold more input.
            self.service();
        }
        self.wake();
        let words = Page::current().set_bytes(&bytes[..length]);
        done(length as u64).with_page(words)
    }

    /// Handles events of the server's notification.
    pub fn events(&mut self, events: u64) {
        if events & DRAIN != 0 {
            self.draining = true;
        }
        if events & CHANGED != 0 {
            self.read_directory();
        }
        if events & (event::INTERRUPT | DRAIN) != 0 {
            self.interrupt();
        }
    }

    /// Applies root's changes of the directory: new clients, ended clients, and the log.
    fn read_directory(&mut self) {
        let Some(directory) = &mut self.directory else { return };
        let mut buffer = [0; 512];
        while let Some(bytes) = directory.read_log(&mut buffer) {
            self.mux.log(bytes);
        }
        for index in 0..SESSIONS {
            let entry = self.directory.as_ref().and_then(|directory| directory.entry(index));
            match entry.as_ref().and_then(directory::name) {
                // The log is not a client.
                Some(_) if index == directory::LOG_SESSION => {}
                Some(name) => self.mux.announce(index, name),
                None => self.close(index),
            }
        }
        self.send();
        self.wake();
    }

    /// Handles an interrupt of the port.
    pub fn interrupt(&mut self) {
        if !U::IS_LEVEL {
            let _ = self.irq.acknowledge();
        }
        self.service();
        // Replies to keys.
        self.send();
        self.wake();
        if U::IS_LEVEL {
            let _ = self.irq.acknowledge();
        }
        if self.draining && self.mux.is_empty() && self.uart.drain() {
            self.draining = false;
            // Root never blocks on a server, so it replies; or it has stopped waiting for this
            // server.
            let _ = Gate::at(slot::CONTROL).call(Message::new(DRAINED, [0; 4]));
        }
    }

    fn service(&mut self) {
        let Self { uart, mux, .. } = self;
        let room = mux.input_room();
        uart.service(room, *mux, Mux::next, Mux::key);
    }

    fn send(&mut self) {
        let Self { uart, mux, .. } = self;
        uart.send(|| mux.next());
    }

    /// Signals clients that have input or room.
    fn wake(&mut self) {
        for index in self.mux.take_wakes() {
            if let Some(session) = self.sessions[index]
                && session.notification.signal(session.events).is_err()
            {
                // The client has ended.
                self.close(index);
            }
        }
    }
}

fn done(word: u64) -> Message {
    Message::new(DONE, [word, 0, 0, 0])
}

fn refused() -> Message {
    Message::new(REFUSED, [0; 4])
}
