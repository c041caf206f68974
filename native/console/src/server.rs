//! Sessions, buffers, and what happens on calls and events.

use native_rt::{Irq, Message, Notification, Page, Slots, drop_capability};
use proto::console::{CLOSE, DRAIN, DRAINED, MAX_BYTES, OPEN, READ, WRITE};
use proto::start::{event, slot};
use proto::{DONE, REFUSED};

use crate::ring::Ring;
use crate::uart::{Registers, Uart};

/// Most sessions; a session is the badge of its gate.
const SESSIONS: usize = 16;
/// Bytes that wait to be sent.
const OUTPUT: usize = 16 << 10;
/// Bytes that wait to be read.
const INPUT: usize = 1 << 10;

#[derive(Clone, Copy)]
struct Session {
    notification: Notification,
    events: u64,
    /// A write was cut.
    wants_room: bool,
}

/// The server.
pub struct Server<R> {
    uart: Uart<R>,
    irq: Irq,
    output: Ring<OUTPUT>,
    input: Ring<INPUT>,
    sessions: [Option<Session>; SESSIONS],
    /// The session that reads the input.
    reader: Option<usize>,
    /// Where clients' notifications come.
    slots: Slots<1>,
    /// The slot that the next one comes to.
    offered: Option<u64>,
    /// Root waits for the output to end.
    draining: bool,
}

impl<R: Registers> Server<R> {
    /// A server without sessions.
    pub fn new(uart: Uart<R>, irq: Irq) -> Self {
        let mut server = Self {
            uart,
            irq,
            output: Ring::new(),
            input: Ring::new(),
            sessions: [None; SESSIONS],
            reader: None,
            slots: Slots::new(slot::FREE),
            offered: None,
            draining: false,
        };
        server.offer();
        server
    }

    /// Offers a slot for the next capability.
    fn offer(&mut self) {
        self.offered = self.slots.take();
        let (base, count) = self.offered.map_or((0, 0), |slot| (slot, 1));
        Page::current().accept_capabilities(base, count);
    }

    /// Gives a slot up.
    fn discard(&mut self, slot: u64) {
        // An empty slot is what is wanted.
        let _ = drop_capability(slot);
        self.slots.give(slot);
    }

    /// Answers a call.
    pub fn call(&mut self, badge: u64, message: Message) -> Message {
        let came = (message.tag.items != 0).then(|| self.offered.take()).flatten();
        let Some(index) = usize::try_from(badge).ok().filter(|&index| index < SESSIONS) else {
            self.forget(came);
            return refused();
        };
        let answer = match message.tag.label {
            OPEN if came.is_some() => {
                if self.sessions[index].is_some() {
                    self.close(index);
                    self.input.clear();
                }
                self.sessions[index] = came.map(|slot| Session {
                    notification: Notification::at(slot),
                    events: message.words[0],
                    wants_room: false,
                });
                self.reader = Some(index);
                self.offer();
                return done(0);
            }
            WRITE => self.write(index, message),
            READ => self.read(index, message.words[0]),
            CLOSE => {
                self.close(index);
                done(0)
            }
            _ => refused(),
        };
        self.forget(came);
        answer
    }

    /// Gives a capability up that came where none was expected.
    fn forget(&mut self, came: Option<u64>) {
        if let Some(slot) = came {
            self.discard(slot);
            self.offer();
        }
    }

    fn close(&mut self, index: usize) {
        if let Some(session) = self.sessions[index].take() {
            self.discard(session.notification.selector());
        }
        if self.reader == Some(index) {
            self.reader = self.sessions.iter().position(Option::is_some);
        }
    }

    fn write(&mut self, index: usize, message: Message) -> Message {
        let mut bytes = [0; MAX_BYTES];
        let bytes = Page::current().bytes(message.tag.words, message.words[0], &mut bytes);
        let taken = bytes.iter().take_while(|&&byte| self.output.put(byte)).count();
        if taken < bytes.len()
            && let Some(session) = &mut self.sessions[index]
        {
            session.wants_room = true;
        }
        let output = &mut self.output;
        self.uart.send(|| output.take());
        done(taken as u64)
    }

    fn read(&mut self, index: usize, wanted: u64) -> Message {
        if self.reader != Some(index) {
            return done(0);
        }
        let mut bytes = [0; MAX_BYTES];
        let wanted = wanted.min(MAX_BYTES as u64) as usize;
        let mut length = 0;
        while length < wanted
            && let Some(byte) = self.input.take()
        {
            bytes[length] = byte;
            length += 1;
        }
        if length < wanted {
            // The buffer is empty now; more may be waiting in the port.
            self.service();
            if self.input.len() > 0 {
                self.signal_reader();
            }
        }
        let words = Page::current().set_bytes(&bytes[..length]);
        done(length as u64).with_page(words)
    }

    /// Takes events of the server's notification.
    pub fn events(&mut self, events: u64) {
        if events & DRAIN != 0 {
            self.draining = true;
        }
        if events & (event::INTERRUPT | DRAIN) != 0 {
            self.interrupt();
        }
    }

    /// Serves the device.
    pub fn interrupt(&mut self) {
        // First: an edge that comes while the interrupt is masked would be lost.
        let _ = self.irq.acknowledge();
        let was_waiting = self.input.len() > 0;
        self.service();
        if self.input.len() > 0 && !was_waiting {
            self.signal_reader();
        }
        if self.output.room() >= OUTPUT / 2 {
            self.signal_writers();
        }
        if self.draining && self.output.len() == 0 && self.uart.finish() {
            self.draining = false;
            // Root may have gone on without us.
            let _ = Notification::at(slot::ROOT).signal(DRAINED);
        }
    }

    fn service(&mut self) {
        let (output, input) = (&mut self.output, &mut self.input);
        self.uart.service(
            input.room(),
            || output.take(),
            |byte| {
                // There is room: its size was told.
                input.put(byte);
            },
        );
    }

    fn signal_reader(&mut self) {
        if let Some(index) = self.reader
            && let Some(session) = self.sessions[index]
            && session.notification.signal(session.events).is_err()
        {
            // The client is gone.
            self.close(index);
        }
    }

    fn signal_writers(&mut self) {
        for index in 0..SESSIONS {
            let Some(session) = &mut self.sessions[index] else { continue };
            if core::mem::take(&mut session.wants_room)
                && session.notification.signal(session.events).is_err()
            {
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
