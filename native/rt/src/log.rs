//! The task's log: lines of text that a task sends to root, and root to the kernel.

use core::fmt::{self, Write};
use core::sync::atomic::{AtomicU64, Ordering};

use proto::console::directory::{LOG, LOG_END, LOG_LENGTH};
use proto::log::{MAX_TEXT, WRITE};

pub use proto::log::Level;

use crate::memory::Window;
use crate::objects::{Gate, Message, Notification, Platform};
use crate::page::Page;

/// Slot of the log gate, or of the platform with [`PLATFORM`] set; 0 before start.
static SINK: AtomicU64 = AtomicU64::new(0);
const PLATFORM: u64 = 1 << 63;

pub(crate) fn to_gate(gate: Gate) {
    SINK.store(gate.selector(), Ordering::Relaxed);
}

pub(crate) fn to_platform(platform: Platform) {
    SINK.store(platform.selector() | PLATFORM, Ordering::Relaxed);
}

/// Text in a buffer of fixed size; excess text is cut.
pub struct Text {
    bytes: [u8; MAX_TEXT],
    length: usize,
}

impl Text {
    /// Creates an empty text.
    pub const fn new() -> Self {
        Self { bytes: [0; MAX_TEXT], length: 0 }
    }

    /// Returns the text, which may end within a character.
    pub fn bytes(&self) -> &[u8] {
        &self.bytes[..self.length]
    }
}

impl Default for Text {
    fn default() -> Self {
        Self::new()
    }
}

impl Write for Text {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        let room = MAX_TEXT - self.length;
        let taken = text.len().min(room);
        self.bytes[self.length..self.length + taken].copy_from_slice(&text.as_bytes()[..taken]);
        self.length += taken;
        Ok(())
    }
}

/// Writes a text to the log; drops it on failure.
#[cold]
#[inline(never)]
pub fn write(level: Level, arguments: fmt::Arguments) {
    let mut text = Text::new();
    let sink = SINK.load(Ordering::Relaxed);
    if sink & PLATFORM != 0 {
        // A `Text` accepts every write and cuts excess text.
        let _ = write!(text, "root: {}{arguments}", level.prefix());
        text.length = text.length.min(MAX_TEXT - 1);
        let _ = text.write_char('\n');
        write_platform(Platform::at(sink & !PLATFORM), text.bytes());
    } else {
        let _ = text.write_fmt(arguments);
        let words = Page::current().set_bytes(text.bytes());
        let length = text.bytes().len() as u64;
        let _ =
            Gate::at(sink).call(Message::new(WRITE, [level as u64, length, 0, 0]).with_page(words));
    }
}

/// Writes at most [`MAX_TEXT`] bytes to the kernel's log.
pub fn write_platform(platform: Platform, bytes: &[u8]) {
    let bytes = &bytes[..bytes.len().min(MAX_TEXT)];
    Page::current().set_bytes(bytes);
    let _ = platform.log(bytes.len() as u64);
    write_mirror(bytes);
}

/// Waits until the kernel has sent its whole log, or the port accepts no more bytes.
pub fn flush(platform: Platform) {
    /// Consecutive calls without progress: far longer than the port needs to send its FIFO.
    const MAX_IDLE_CALLS: u32 = 1_000_000;
    let mut waiting = u64::MAX;
    let mut calls = 0;
    while calls < MAX_IDLE_CALLS
        && let Ok(left @ 1..) = platform.log(0)
    {
        calls = if left < waiting { 0 } else { calls + 1 };
        waiting = left;
    }
}

/// Address of the mirror and slot of its notification; 0 without a mirror.
static MIRROR: AtomicU64 = AtomicU64::new(0);
static MIRROR_NOTIFICATION: AtomicU64 = AtomicU64::new(0);
/// Bytes written to the mirror so far.
static MIRROR_END: AtomicU64 = AtomicU64::new(0);

/// Copies root's log to a region from now on (see `proto::console::directory`) and signals its
/// reader. Only one thread of root writes to the log.
pub fn mirror(to: Option<(Window, Notification)>) {
    let large = |window: &Window| window.length() >= LOG + LOG_LENGTH;
    let (address, slot) = to
        .filter(|(window, _)| large(window))
        .map_or((0, 0), |(window, notification)| (window.base(), notification.selector()));
    MIRROR_NOTIFICATION.store(slot, Ordering::Relaxed);
    MIRROR_END.store(0, Ordering::Relaxed);
    MIRROR.store(address, Ordering::Relaxed);
}

fn write_mirror(bytes: &[u8]) {
    let address = MIRROR.load(Ordering::Relaxed);
    if address == 0 {
        return;
    }
    // SAFETY: `mirror` received a window of at least this length.
    let window = unsafe { Window::new(address, LOG + LOG_LENGTH) };
    let end = MIRROR_END.load(Ordering::Relaxed);
    let offset = end % LOG_LENGTH;
    let (first, second) = bytes.split_at(bytes.len().min((LOG_LENGTH - offset) as usize));
    let after = end + bytes.len() as u64;
    // The parts are within the window. The end is written last: the reader finds all bytes before
    // it.
    let _ = window.write(LOG + offset, first)
        && window.write(LOG, second)
        && window.write(LOG_END, &after.to_le_bytes());
    MIRROR_END.store(after, Ordering::Relaxed);
    let notification = Notification::at(MIRROR_NOTIFICATION.load(Ordering::Relaxed));
    // The reader may have ended.
    let _ = notification.signal(proto::console::CHANGED);
}

/// Logs a failure.
#[macro_export]
macro_rules! error {
    ($($arguments:tt)+) => { $crate::log::write($crate::log::Level::Error, format_args!($($arguments)+)) };
}

/// Logs a warning.
#[macro_export]
macro_rules! warn {
    ($($arguments:tt)+) => { $crate::log::write($crate::log::Level::Warn, format_args!($($arguments)+)) };
}

/// Logs information for users.
#[macro_export]
macro_rules! info {
    ($($arguments:tt)+) => { $crate::log::write($crate::log::Level::Info, format_args!($($arguments)+)) };
}

/// Logs information for developers.
#[macro_export]
macro_rules! debug {
    ($($arguments:tt)+) => { $crate::log::write($crate::log::Level::Debug, format_args!($($arguments)+)) };
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_text_is_cut() {
        let mut text = Text::new();
        for _ in 0..100 {
            write!(text, "0123456789").unwrap();
        }
        assert_eq!(text.bytes().len(), MAX_TEXT);
        assert_eq!(&text.bytes()[510..], b"01");
    }
}
