//! The console session: text out, keys in.
//!
//! A server that does not answer has ended. Root signals [`event::CONSOLE`] when another one is there, or none will come.

use core::fmt;

use abi::{FOREVER, rights};
use native_rt::{Gate, Message, Notification, Page, Status};
use proto::DONE;
use proto::console::{MAX_BYTES, OPEN, READ, WRITE};
use proto::start::{event, slot};

/// The session.
pub struct Screen {
    gate: Gate,
    notification: Notification,
    output: heapless::Vec<u8, MAX_BYTES>,
    /// Events that came while something else was waited for.
    events: u64,
    /// There is no server, and none will come.
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

    /// Opens the session with another server. If the old one has just ended, waits for the next one, or the order to end.
    fn reconnect(&mut self, ended: bool) {
        const NEWS: u64 = event::CONSOLE | event::STOP;
        let mut events = if ended { 0 } else { event::CONSOLE };
        while events & NEWS == 0 {
            events |= self.notification.wait(FOREVER).unwrap_or(event::STOP);
        }
        self.events |= events;
        self.gone = events & event::STOP != 0 || self.connect().is_err();
    }

    /// Waits for events until `deadline`, a TSC value; 0 if none came.
    pub fn wait(&mut self, deadline: u64) -> u64 {
        self.flush();
        let earlier = core::mem::take(&mut self.events);
        if earlier != 0 {
            return earlier;
        }
        self.notification.wait(deadline).unwrap_or(0)
    }

    /// There is no server any more.
    pub fn is_gone(&self) -> bool {
        self.gone
    }

    /// Keys that were typed: the part of `buffer` that has them. Fewer than fit: there are no more.
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

    /// Sends what waits, for as long as it takes.
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
                // What the last server took and had not shown is lost.
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
