//! The guest's serial line, and the virtio console beside it: one session of a console server for both, with buffers that save
//! calls. Input goes to the line to which the guest has written last.
//!
//! A server that does not answer has ended. Output waits, as if the server had no room, until root signals
//! [`event::CONSOLE`]: then either another server is there, or none will come and output is discarded from now on.

use core::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use abi::{FOREVER, rights};
use native_rt::{Gate, Message, Notification, Page, time, warn};
use proto::console::{MAX_BYTES, OPEN, READ, WRITE};
use proto::start::{Clock, event, slot};
use spin::mutex::SpinMutex;

use crate::Yielding;

/// Bytes of output and input that are kept here.
const BUFFER: usize = MAX_BYTES;
/// Output of this length is flushed.
const FULL: usize = 256;
/// Output waits at most this long, in ns.
const PATIENCE: u64 = 2_000_000;
/// At the end of the guest the last output may take this long, in ns.
const LAST_PATIENCE: u64 = 1_000_000_000;

/// Bytes on their way, in one direction.
struct Buffer {
    bytes: [u8; BUFFER],
    start: usize,
    end: usize,
}

impl Buffer {
    const EMPTY: Self = Self { bytes: [0; BUFFER], start: 0, end: 0 };

    fn waiting(&self) -> &[u8] {
        &self.bytes[self.start..self.end]
    }

    /// Drops the first `count` waiting bytes.
    fn consume(&mut self, count: usize) {
        self.start += count.min(self.end - self.start);
        if self.start == self.end {
            (self.start, self.end) = (0, 0);
        }
    }

    fn put(&mut self, byte: u8) -> bool {
        if self.end == BUFFER && self.start > 0 {
            self.bytes.copy_within(self.start..self.end, 0);
            (self.start, self.end) = (0, self.end - self.start);
        }
        let fits = self.end < BUFFER;
        if fits {
            self.bytes[self.end] = byte;
            self.end += 1;
        }
        fits
    }
}

/// A way from the guest to its console.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Line {
    /// The first serial port.
    Serial,
    /// The virtio device.
    Virtio,
}

/// The console of this program's machine.
pub static CONSOLE: Console = Console::closed();

/// The outside of both lines, for all threads of the VMM. Without a server, output is discarded and nothing is typed.
pub struct Console {
    /// TSC value at which the output has waited long enough.
    flush_at: AtomicU64,
    ticks: AtomicU64,
    last_ticks: AtomicU64,
    /// The guest has written to the virtio device last.
    virtio: AtomicBool,
    session: SpinMutex<Session, Yielding>,
}

struct Session {
    /// `None`: there is no server, and none will come.
    gate: Option<Gate>,
    /// The server has ended.
    lost: bool,
    output: Buffer,
    input: Buffer,
    /// The server has no room: it will say when it has.
    blocked: bool,
    /// The server may have input.
    may_read: bool,
}

impl Console {
    /// No server yet.
    const fn closed() -> Self {
        Self {
            flush_at: AtomicU64::new(FOREVER),
            ticks: AtomicU64::new(0),
            last_ticks: AtomicU64::new(0),
            virtio: AtomicBool::new(false),
            session: SpinMutex::new(Session {
                gate: None,
                lost: false,
                output: Buffer::EMPTY,
                input: Buffer::EMPTY,
                blocked: false,
                may_read: true,
            }),
        }
    }

    /// Opens the session, if the VMM has been given one.
    pub fn open(&self, present: bool, clock: &Clock) {
        let ticks = |nanos| time::ticks(clock.tsc_khz, nanos);
        self.ticks.store(ticks(PATIENCE), Ordering::Relaxed);
        self.last_ticks.store(ticks(LAST_PATIENCE), Ordering::Relaxed);
        let mut session = self.session.lock();
        session.gate = present.then(|| Gate::at(slot::DEVICE));
        session.open();
    }

    /// TSC value at which [`Console::flush`] is due.
    #[inline(always)]
    pub fn flush_at(&self) -> u64 {
        self.flush_at.load(Ordering::Relaxed)
    }

    /// Takes a byte of output, unless the server has had no room for long.
    pub fn put(&self, line: Line, byte: u8) -> bool {
        self.virtio.store(line == Line::Virtio, Ordering::Relaxed);
        let session = &mut *self.session.lock();
        if session.gate.is_none() {
            return true;
        }
        let taken = session.output.put(byte);
        let length = session.output.waiting().len();
        if !session.blocked {
            if byte == b'\n' || length >= FULL {
                self.send(session);
            } else if length == 1 {
                let ticks = self.ticks.load(Ordering::Relaxed);
                self.flush_at.store(time::tsc().saturating_add(ticks), Ordering::Relaxed);
            }
        }
        taken || session.output.put(byte)
    }

    /// Sends the output, as far as the server takes it.
    #[cold]
    pub fn flush(&self) {
        self.send(&mut self.session.lock());
    }

    fn send(&self, session: &mut Session) {
        self.flush_at.store(FOREVER, Ordering::Relaxed);
        session.send();
    }

    /// The server says that there is input or room; or root, that there is another server or none.
    pub fn wake(&self) {
        let session = &mut *self.session.lock();
        if session.lost && !session.open() {
            warn!("the console does not come back");
            (session.gate, session.lost) = (None, false);
        }
        session.may_read = true;
        session.blocked = false;
        self.send(session);
    }

    /// Takes a byte of input, if it is for this line.
    pub fn take(&self, line: Line) -> Option<u8> {
        let is_meant = self.virtio.load(Ordering::Relaxed) == (line == Line::Virtio);
        is_meant.then(|| self.session.lock().take()).flatten()
    }

    /// Sends the last output, waiting for room if need be.
    pub fn finish(&self, notification: Notification) {
        let deadline = time::tsc().saturating_add(self.last_ticks.load(Ordering::Relaxed));
        self.flush();
        while self.session.lock().has_output()
            && let Ok(events) = notification.wait(deadline)
        {
            if events & event::CONSOLE != 0 {
                self.wake();
            }
        }
    }
}

impl Session {
    /// Opens the session, if there is a gate; whether that was possible.
    fn open(&mut self) -> bool {
        let Some(gate) = self.gate else { return false };
        Page::current().set_capability(0, slot::NOTIFICATION, rights::SIGNAL);
        let answer = gate.call(Message::new(OPEN, [event::CONSOLE, 0, 0, 0]).with_items(1));
        self.lost = !answer.is_ok_and(|answer| answer.tag.label == proto::DONE);
        self.blocked = self.lost;
        !self.lost
    }

    fn has_output(&self) -> bool {
        self.gate.is_some() && !self.output.waiting().is_empty()
    }

    fn send(&mut self) {
        while let Some(gate) = self.gate
            && !self.lost
            && self.has_output()
        {
            let length = self.output.waiting().len();
            let words = Page::current().set_bytes(self.output.waiting());
            let write = Message::new(WRITE, [length as u64, 0, 0, 0]).with_page(words);
            match gate.call(write) {
                Ok(answer) if answer.tag.label == proto::DONE => {
                    let taken = (answer.words[0] as usize).min(length);
                    self.output.consume(taken);
                    self.blocked = taken < length;
                    if self.blocked {
                        return;
                    }
                }
                answer => self.lose(answer),
            }
        }
    }

    /// A call has failed. If it was refused, there is another server already, which does not know the session.
    fn lose(&mut self, answer: Result<Message, native_rt::Status>) {
        if answer.is_err() || !self.open() {
            (self.lost, self.blocked) = (true, true);
        }
    }

    fn take(&mut self) -> Option<u8> {
        if self.input.waiting().is_empty()
            && self.may_read
            && !self.lost
            && let Some(gate) = self.gate
        {
            match gate.call(Message::new(READ, [MAX_BYTES as u64, 0, 0, 0])) {
                Ok(answer) if answer.tag.label == proto::DONE => {
                    let page = Page::current();
                    let input = &mut self.input;
                    let length =
                        page.bytes(answer.tag.words, answer.words[0], &mut input.bytes).len();
                    (input.start, input.end) = (0, length);
                    self.may_read = length == MAX_BYTES;
                }
                answer => self.lose(answer),
            }
        }
        let byte = self.input.waiting().first().copied();
        if byte.is_some() {
            self.input.consume(1);
        }
        byte
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buffer_keeps_order_and_uses_all_room() {
        let mut buffer = Buffer::EMPTY;
        for byte in 0..BUFFER {
            assert!(buffer.put(byte as u8));
        }
        assert!(!buffer.put(0));
        buffer.consume(3);
        for byte in 0..3 {
            assert!(buffer.put(byte));
        }
        assert_eq!(buffer.waiting()[0], 3);
        assert_eq!(buffer.waiting().len(), BUFFER);
        buffer.consume(usize::MAX);
        assert!(buffer.waiting().is_empty());
    }
}
