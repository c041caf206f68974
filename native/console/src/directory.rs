//! Memory that root shares with this server: the names of the sessions, and the log.

use native_rt::Window;
use proto::console::directory::{
    ENTRY, LOG, LOG_END, LOG_LENGTH, SESSIONS, entry as encode, name as decode,
};

/// Reader of the directory. Root writes at any time, so this server copies before it uses data.
pub struct Directory {
    window: Window,
    /// Bytes of the log read so far.
    read: u64,
}

impl Directory {
    /// Creates a reader at the start of the log.
    pub fn new(window: Window) -> Self {
        Self { window, read: 0 }
    }

    /// Returns the entry of a session; `None` if the session has no client.
    pub fn entry(&self, session: usize) -> Option<[u8; ENTRY]> {
        let mut entry = encode("");
        let there = session < SESSIONS && self.window.read((session * ENTRY) as u64, &mut entry);
        (there && decode(&entry).is_some()).then_some(entry)
    }

    fn written(&self) -> u64 {
        let mut end = [0; 8];
        // The region has a fixed size; a failed read means an empty log.
        let there = self.window.read(LOG_END, &mut end);
        if there { u64::from_le_bytes(end) } else { self.read }
    }

    /// Reads the next part of the log; `None` at its end. Skips bytes that root has overwritten.
    pub fn read_log<'b>(&mut self, buffer: &'b mut [u8]) -> Option<&'b [u8]> {
        let written = self.written();
        self.read = self.read.max(written.saturating_sub(LOG_LENGTH)).min(written);
        let offset = self.read % LOG_LENGTH;
        let length = (written - self.read).min(LOG_LENGTH - offset).min(buffer.len() as u64);
        let part = &mut buffer[..length as usize];
        if length == 0 || !self.window.read(LOG + offset, part) {
            return None;
        }
        // Bytes that root has written meanwhile replace the oldest ones.
        let lost = self.written().saturating_sub(LOG_LENGTH).saturating_sub(self.read);
        self.read += length;
        Some(&part[lost.min(length) as usize..])
    }
}
