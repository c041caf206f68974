//! Serial port and virtio console of the guest: one session of a console server for both, with
//! buffers that save calls. Input goes to the device to which the guest has written last.
//!
//! A server that does not answer has ended. Output waits, as if the server had no room, until root
//! signals [`event::CONSOLE`]: then either root has restarted the server, or it will not and the
//! VMM discards all further output.

use core::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use abi::{FOREVER, rights};
use native_rt::{Gate, Message, Notification, Page, time, warn};
use proto::console::{MAX_BYTES, OPEN, READ, WRITE};
use proto::start::{Clock, event, slot};
use spin::mutex::SpinMutex;
use vmm_bus::ByteStream;

use crate::YieldRelax;

/// Bytes of output and input that the VMM buffers.
const BUFFER: usize = MAX_BYTES;
/// Amount of output that is flushed immediately.
const FLUSH_LENGTH: usize = 256;
/// Maximum delay of output, in ns.
const MAX_DELAY: u64 = 2_000_000;
/// Time limit for the last output at the end of the guest, in ns.
const FINISH_TIMEOUT: u64 = 1_000_000_000;

/// Buffered bytes of one direction.
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

/// A console device of the guest.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum ConsoleLine {
    /// The first serial port.
    Serial,
    /// The virtio device.
    Virtio,
}

/// Console of this program's VM.
pub static CONSOLE: Console = Console::closed();

/// Host side of both devices, used by all threads of the VMM. Without a server it discards output
/// and has no input.
pub struct Console {
    /// TSC value at which pending output is due.
    flush_at: AtomicU64,
    ticks: AtomicU64,
    last_ticks: AtomicU64,
    /// The guest has written to the virtio device last.
    virtio: AtomicBool,
    /// There may be input for the device that has found none before.
    redirected: AtomicBool,
    session: SpinMutex<Session, YieldRelax>,
}

struct Session {
    /// `None`: there is no server, and it will not restart.
    gate: Option<Gate>,
    /// The server has ended.
    lost: bool,
    output: Buffer,
    input: Buffer,
    /// The server has no room; it signals when it has.
    blocked: bool,
    /// The server may have input.
    may_read: bool,
}

impl ByteStream for ConsoleLine {
    fn put(&mut self, byte: u8) -> bool {
        CONSOLE.put(*self, byte)
    }

    fn take(&mut self) -> Option<u8> {
        CONSOLE.take(*self)
    }
}

impl Console {
    /// Creates a console without a server.
    const fn closed() -> Self {
        Self {
            flush_at: AtomicU64::new(FOREVER),
            ticks: AtomicU64::new(0),
            last_ticks: AtomicU64::new(0),
            virtio: AtomicBool::new(false),
            redirected: AtomicBool::new(false),
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

    /// Opens the session, if the VMM has a console gate.
    pub fn open(&self, present: bool, clock: &Clock) {
        let ticks = |nanos| time::ticks(clock.tsc_khz, nanos);
        self.ticks.store(ticks(MAX_DELAY), Ordering::Relaxed);
        self.last_ticks.store(ticks(FINISH_TIMEOUT), Ordering::Relaxed);
        let mut session = self.session.lock();
        session.gate = present.then(|| Gate::at(slot::DEVICE));
        session.open();
    }

    /// Returns the TSC value at which [`Console::flush`] is due.
    #[inline(always)]
    pub fn flush_at(&self) -> u64 {
        self.flush_at.load(Ordering::Relaxed)
    }

    /// Accepts a byte of output; returns `false` if the buffer is full because the server has no
    /// room.
    fn put(&self, line: ConsoleLine, byte: u8) -> bool {
        let mut session = self.session.lock();
        let accepted = self.accept(&mut session, byte);
        // Refused bytes do not count: both devices offer them again whenever they are notified.
        let is_redirected = accepted && self.redirect_input(line, &session);
        drop(session);
        if is_redirected {
            // The first vCPU notifies the devices. It fails only if the capability is gone, and the
            // vCPU with it. Not `event::CONSOLE`, by which root reports the fate of a lost server.
            let _ = Notification::at(slot::NOTIFICATION).signal(event::KICK);
        }
        accepted
    }

    /// Directs input to this device. Returns whether the devices must be notified.
    fn redirect_input(&self, line: ConsoleLine, session: &Session) -> bool {
        let virtio = line == ConsoleLine::Virtio;
        if self.virtio.load(Ordering::Relaxed) == virtio {
            return false;
        }
        self.virtio.store(virtio, Ordering::Relaxed);
        let may_have_input = session.may_have_input();
        if may_have_input {
            self.redirected.store(true, Ordering::Release);
        }
        may_have_input
    }

    /// Returns whether both devices must look for input because it goes to another device now.
    #[inline(always)]
    pub fn take_redirected(&self) -> bool {
        self.redirected.load(Ordering::Relaxed) && self.redirected.swap(false, Ordering::Acquire)
    }

    fn accept(&self, session: &mut Session, byte: u8) -> bool {
        if session.gate.is_none() {
            return true;
        }
        let taken = session.output.put(byte);
        let length = session.output.waiting().len();
        if !session.blocked {
            if byte == b'\n' || length >= FLUSH_LENGTH {
                self.send(session);
            } else if length == 1 {
                let ticks = self.ticks.load(Ordering::Relaxed);
                self.flush_at.store(time::tsc().saturating_add(ticks), Ordering::Relaxed);
            }
        }
        taken || session.output.put(byte)
    }

    /// Sends the output, as far as the server accepts it.
    #[cold]
    pub fn flush(&self) {
        self.send(&mut self.session.lock());
    }

    fn send(&self, session: &mut Session) {
        self.flush_at.store(FOREVER, Ordering::Relaxed);
        session.send();
    }

    /// Handles a signal: the server has input or room, or root has restarted the server or will
    /// not.
    pub fn wake(&self) {
        let session = &mut *self.session.lock();
        if session.lost && !session.open() {
            warn!("the console server has ended for good; output is discarded");
            (session.gate, session.lost) = (None, false);
        }
        session.may_read = true;
        session.blocked = false;
        self.send(session);
    }

    /// Takes a byte of input, if it is for this device.
    fn take(&self, line: ConsoleLine) -> Option<u8> {
        let is_meant = self.virtio.load(Ordering::Relaxed) == (line == ConsoleLine::Virtio);
        is_meant.then(|| self.session.lock().take()).flatten()
    }

    /// Sends the last output; waits for room if necessary.
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
    /// Opens the session if there is a gate; returns whether it is open.
    fn open(&mut self) -> bool {
        let Some(gate) = self.gate else { return false };
        Page::current().set_capability(0, slot::NOTIFICATION, rights::SIGNAL);
        let answer = gate.call(Message::new(OPEN, [event::CONSOLE, 0, 0, 0]).with_items(1));
        self.lost = !answer.is_ok_and(|answer| answer.tag.label == proto::DONE);
        self.blocked = self.lost;
        !self.lost
    }

    fn may_have_input(&self) -> bool {
        !self.input.waiting().is_empty() || self.may_read && self.gate.is_some()
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
                answer => self.mark_lost(answer),
            }
        }
    }

    /// Handles a failed call. A refusal means that the server has restarted and does not know the
    /// session.
    fn mark_lost(&mut self, answer: Result<Message, native_rt::Status>) {
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
                answer => self.mark_lost(answer),
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

    /// A device that has found no input does not ask again by itself.
    #[test]
    fn input_that_goes_to_the_other_device_is_reported() {
        let console = Console::closed();
        let put = |line| console.redirect_input(line, &console.session.lock());
        console.session.lock().input.put(b'x');
        assert_eq!(console.take(ConsoleLine::Virtio), None);
        assert!(!put(ConsoleLine::Serial) && !console.take_redirected(), "no change");
        assert!(put(ConsoleLine::Virtio) && console.take_redirected());
        assert!(!console.take_redirected(), "once");
        assert_eq!(console.take(ConsoleLine::Serial), None);
        assert_eq!(console.take(ConsoleLine::Virtio), Some(b'x'));
        assert!(!put(ConsoleLine::Serial), "no input");
        // The server may have some.
        console.session.lock().gate = Some(Gate::at(0));
        assert!(put(ConsoleLine::Virtio) && console.take_redirected());
        console.session.lock().may_read = false;
        assert!(!put(ConsoleLine::Serial) && !console.take_redirected());
    }
}
