//! Log buffer of whole entries.

use core::fmt;
use core::sync::atomic::{AtomicU8, AtomicU32, Ordering::Relaxed};

/// Byte ring whose `SIZE` is a power of two. The caller serialises access.
///
/// All fields are atomic, so that a panic can read a ring whose user was stopped within an entry.
pub struct Ring<const SIZE: usize> {
    bytes: [AtomicU8; SIZE],
    /// Bytes appended and taken so far, modulo 2^32.
    appended: AtomicU32,
    taken: AtomicU32,
    /// Entries dropped for lack of space and not reported yet.
    dropped: AtomicU32,
}

impl<const SIZE: usize> Ring<SIZE> {
    /// An empty ring.
    pub const fn new() -> Self {
        assert!(SIZE.is_power_of_two() && SIZE <= 1 << 31);
        Self {
            bytes: [const { AtomicU8::new(0) }; SIZE],
            appended: AtomicU32::new(0),
            taken: AtomicU32::new(0),
            dropped: AtomicU32::new(0),
        }
    }

    /// Number of buffered bytes.
    pub fn len(&self) -> usize {
        self.appended.load(Relaxed).wrapping_sub(self.taken.load(Relaxed)) as usize
    }

    /// Appends the entry that `write` produces. An entry that does not fit is dropped and counted;
    /// the next one that fits is preceded by a line with the count.
    pub fn append(&self, write: impl FnOnce(&mut EntryWriter<'_, SIZE>)) {
        let mut entry = EntryWriter { ring: self, end: self.appended.load(Relaxed), fits: true };
        let dropped = self.dropped.load(Relaxed);
        if dropped != 0 {
            // Writing to an entry never fails.
            let _ = fmt::write(&mut entry, format_args!("kernel: {dropped} messages dropped\n"));
        }
        write(&mut entry);
        let EntryWriter { end, fits, .. } = entry;
        if fits {
            self.appended.store(end, Relaxed);
        }
        self.dropped.store(if fits { 0 } else { dropped.saturating_add(1) }, Relaxed);
    }

    /// Removes and returns the oldest byte.
    pub fn take(&self) -> Option<u8> {
        (self.len() != 0).then(|| {
            let at = self.taken.load(Relaxed);
            self.taken.store(at.wrapping_add(1), Relaxed);
            self.bytes[at as usize % SIZE].load(Relaxed)
        })
    }
}

/// Writer of an entry that is being appended.
pub struct EntryWriter<'a, const SIZE: usize> {
    ring: &'a Ring<SIZE>,
    /// Value of [`Ring::appended`] after its last byte.
    end: u32,
    fits: bool,
}

impl<const SIZE: usize> EntryWriter<'_, SIZE> {
    /// Appends a byte; a line feed becomes a carriage return and a line feed.
    pub fn put(&mut self, byte: u8) {
        if byte == b'\n' {
            self.put_raw(b'\r');
        }
        self.put_raw(byte);
    }

    fn put_raw(&mut self, byte: u8) {
        let used = self.end.wrapping_sub(self.ring.taken.load(Relaxed)) as usize;
        self.fits &= used < SIZE;
        if self.fits {
            self.ring.bytes[self.end as usize % SIZE].store(byte, Relaxed);
            self.end = self.end.wrapping_add(1);
        }
    }
}

impl<const SIZE: usize> fmt::Write for EntryWriter<'_, SIZE> {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        text.bytes().for_each(|byte| self.put(byte));
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn append<const SIZE: usize>(ring: &Ring<SIZE>, text: &str) {
        ring.append(|entry| text.bytes().for_each(|byte| entry.put(byte)));
    }

    fn take<const SIZE: usize>(ring: &Ring<SIZE>, most: usize) -> String {
        core::iter::from_fn(|| ring.take()).take(most).map(char::from).collect()
    }

    #[test]
    fn entries_are_whole_or_not_there() {
        let ring = Ring::<64>::new();
        ring.appended.store(u32::MAX - 20, Relaxed);
        ring.taken.store(u32::MAX - 20, Relaxed);
        append(&ring, "one\n");
        append(&ring, &"x".repeat(64));
        assert_eq!(ring.len(), 5);
        assert_eq!(take(&ring, 3), "one");
        append(&ring, "two\n");
        assert_eq!(take(&ring, 64), "\r\nkernel: 1 messages dropped\r\ntwo\r\n");
        append(&ring, "three\n");
        assert_eq!(take(&ring, 64), "three\r\n", "reported once");
        append(&ring, &"y".repeat(64));
        assert_eq!((ring.len(), take(&ring, 100).len()), (64, 64), "all of it can be used");
    }

    #[test]
    fn a_flood_is_counted() {
        let ring = Ring::<64>::new();
        for _ in 0..1000 {
            append(&ring, "0123456789abcd\n");
        }
        assert_eq!(take(&ring, 100), "0123456789abcd\r\n".repeat(4));
        append(&ring, "after\n");
        assert_eq!(take(&ring, 100), "kernel: 996 messages dropped\r\nafter\r\n");
    }
}
