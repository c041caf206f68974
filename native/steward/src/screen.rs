//! Console session of the shell: text output and keys.
//!
//! A server that does not answer has ended. Root signals [`event::CONSOLE`] when it has restarted
//! the server, or will not restart it.

use core::fmt;

use abi::{FOREVER, rights};
use native_rt::{Gate, Message, Notification, Page, Status};
use proto::DONE;
use proto::console::{MAX_BYTES, OPEN, READ, WRITE};
use proto::start::{event, slot};

/// Console session.
pub struct Screen {
    gate: Gate,
    notification: Notification,
    output: heapless::Vec<u8, MAX_BYTES>,
    /// Events that arrived during a wait for other events.
    events: u64,
    /// The server has ended and will not restart.
    gone: bool,
}

impl Screen {
    /// Opens the session.
    pub fn open() -> Result<Self, Status> {
        let screen = Self {
            gate: Gate::at(slot::DEVICE),
            notification: Notification::at(slot::NOTIFICATION),
            output: heapless::Vec::new(),
            events: event::CONSOLE,
            gone: false,
        };
        screen.connect()?;
        Ok(screen)
    }

    fn connect(&self) -> Result<(), Status> {
        Page::current().set_capability(0, slot::NOTIFICATION, rights::SIGNAL);
        let answer = self.gate.call(Message::new(OPEN, [event::CONSOLE, 0, 0, 0]).with_items(1))?;
        if answer.tag.label == DONE { Ok(()) } else { Err(Status::BadArgument) }
    }

    /// Opens the session with a restarted server. If the old one has just ended, waits for its
    /// successor, or for the order to end.
    fn reconnect(&mut self, ended: bool) {
        const NEWS: u64 = event::CONSOLE | event::STOP;
        let mut events = if ended { 0 } else { event::CONSOLE };
        while events & NEWS == 0 {
            events |= self.notification.wait(FOREVER).unwrap_or(event::STOP);
        }
        self.events |= events;
        self.gone = events & event::STOP != 0 || self.connect().is_err();
    }

    /// Waits for events until `deadline`, a TSC value; returns 0 on a timeout.
    pub fn wait(&mut self, deadline: u64) -> u64 {
        self.flush();
        let earlier = core::mem::take(&mut self.events);
        if earlier != 0 {
            return earlier;
        }
        self.notification.wait(deadline).unwrap_or(0)
    }

    /// Returns whether the server has ended permanently.
    pub fn is_gone(&self) -> bool {
        self.gone
    }

    /// Reads typed keys into `buffer`; returns the filled part, which is shorter than the buffer if
    /// there are no more keys.
    pub fn read<'b>(&mut self, buffer: &'b mut [u8; MAX_BYTES]) -> &'b [u8] {
        match self.gate.call(Message::new(READ, [MAX_BYTES as u64, 0, 0, 0])) {
            Ok(answer) if answer.tag.label == DONE => {
                Page::current().bytes(answer.tag.words, answer.words[0], buffer)
            }
            answer => {
                self.reconnect(answer.is_err());
                &[]
            }
        }
    }

    /// Sends pending output; blocks until the server accepts it.
    pub fn flush(&mut self) {
        let mut sent = 0;
        while sent < self.output.len() && !self.gone {
            let rest = &self.output[sent..];
            let words = Page::current().set_bytes(rest);
            let length = rest.len() as u64;
            match self.gate.call(Message::new(WRITE, [length, 0, 0, 0]).with_page(words)) {
                Ok(answer) if answer.tag.label == DONE => {
                    sent += (answer.words[0] as usize).min(rest.len());
                    if sent < self.output.len() {
                        // Room, or input that is read later.
                        self.events |= self.notification.wait(FOREVER).unwrap_or(0);
                    }
                }
                // Output that the last server accepted but did not show is lost.
                answer => self.reconnect(answer.is_err()),
            }
        }
        self.output.clear();
    }
}

impl fmt::Write for Screen {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        for &byte in text.as_bytes() {
            if self.output.is_full() {
                self.flush();
            }
            // There is room.
            let _ = self.output.push(byte);
        }
        Ok(())
    }
}
