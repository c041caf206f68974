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

/// Events that have arrived and that the shell has not handled yet. Losing one is fatal: the server
/// signals no further key before the shell has read the first.
struct PendingEvents(u64);

impl PendingEvents {
    /// Takes the pending events, or those that `wait` returns.
    fn take(&mut self, wait: impl FnOnce() -> u64) -> u64 {
        match core::mem::take(&mut self.0) {
            0 => wait(),
            pending => pending,
        }
    }

    /// Returns whether events are pending or `wait` returns some. All of them stay pending.
    fn has_any(&mut self, wait: impl FnOnce() -> u64) -> bool {
        self.0 = self.take(wait);
        self.0 != 0
    }

    /// Adds all events that `wait` returns, until its timeout.
    fn collect(&mut self, wait: impl FnMut() -> u64) {
        self.0 = core::iter::repeat_with(wait)
            .take_while(|&events| events != 0)
            .fold(self.0, |pending, events| pending | events);
    }
}

/// Console session.
pub struct Screen {
    gate: Gate,
    notification: Notification,
    output: heapless::Vec<u8, MAX_BYTES>,
    events: PendingEvents,
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
            events: PendingEvents(event::CONSOLE),
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
        self.events.0 |= events;
        self.gone = events & event::STOP != 0 || self.connect().is_err();
    }

    /// Waits for events until `deadline`, a TSC value; returns 0 on a timeout.
    pub fn wait(&mut self, deadline: u64) -> u64 {
        self.flush();
        let notification = self.notification;
        self.events.take(|| notification.wait(deadline).unwrap_or(0))
    }

    /// Waits until `deadline`, a TSC value, or until an event arrives, which the next
    /// [`wait`](Self::wait) returns; returns `false` on a timeout.
    pub fn has_event(&mut self, deadline: u64) -> bool {
        self.flush();
        let notification = self.notification;
        self.events.has_any(|| notification.wait(deadline).unwrap_or(0))
    }

    /// Waits until `deadline`, a TSC value, whatever events arrive. The next [`wait`](Self::wait)
    /// returns them.
    pub fn pause(&mut self, deadline: u64) {
        self.flush();
        let notification = self.notification;
        self.events.collect(|| notification.wait(deadline).unwrap_or(0));
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
                        self.events.0 |= self.notification.wait(FOREVER).unwrap_or(0);
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_event_stays_until_it_is_handled() {
        let mut events = PendingEvents(0);
        assert!(!events.has_any(|| 0), "a timeout");
        assert!(events.has_any(|| event::CONSOLE), "a key ends the wait");
        assert!(events.has_any(|| panic!("an event is pending")));
        assert_eq!(events.take(|| panic!("an event is pending")), event::CONSOLE);
        assert_eq!(events.take(|| 0), 0);
    }

    #[test]
    fn a_pause_lasts_whatever_events_arrive() {
        let mut events = PendingEvents(event::CONSOLE);
        let mut arriving = [event::CONSOLE, event::STOP, event::CONSOLE, 0].into_iter();
        events.collect(|| arriving.next().unwrap());
        assert_eq!(arriving.next(), None, "it has waited to its end");
        assert_eq!(events.take(|| 0), event::CONSOLE | event::STOP);
    }
}
