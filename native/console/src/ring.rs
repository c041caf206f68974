//! Byte rings.

/// First-in, first-out ring; `SIZE` is a power of two.
pub struct Ring<const SIZE: usize> {
    bytes: [u8; SIZE],
    /// Number of bytes taken and put so far, modulo 2^32.
    taken: u32,
    put: u32,
}

impl<const SIZE: usize> Ring<SIZE> {
    /// Creates an empty ring.
    pub const fn new() -> Self {
        assert!(SIZE.is_power_of_two() && SIZE <= 1 << 31);
        Self { bytes: [0; SIZE], taken: 0, put: 0 }
    }

    /// Returns the number of bytes in the ring.
    pub const fn len(&self) -> usize {
        self.put.wrapping_sub(self.taken) as usize
    }

    /// Returns the number of free bytes.
    pub const fn room(&self) -> usize {
        SIZE - self.len()
    }

    /// Adds a byte; returns `false` if the ring is full.
    pub fn put(&mut self, byte: u8) -> bool {
        let fits = self.room() > 0;
        if fits {
            self.bytes[self.put as usize % SIZE] = byte;
            self.put = self.put.wrapping_add(1);
        }
        fits
    }

    /// Takes the oldest byte.
    pub fn take(&mut self) -> Option<u8> {
        (self.len() > 0).then(|| {
            let byte = self.bytes[self.taken as usize % SIZE];
            self.taken = self.taken.wrapping_add(1);
            byte
        })
    }

    /// Drops all bytes.
    pub fn clear(&mut self) {
        self.taken = self.put;
    }
}

/// The last `SIZE` bytes of a stream; `SIZE` is a power of two.
pub struct History<const SIZE: usize> {
    bytes: [u8; SIZE],
    /// Number of bytes added so far, modulo 2^32.
    put: u32,
    /// Number of bytes kept.
    length: u32,
}

impl<const SIZE: usize> History<SIZE> {
    /// Creates an empty history.
    pub const fn new() -> Self {
        assert!(SIZE.is_power_of_two() && SIZE <= 1 << 31);
        Self { bytes: [0; SIZE], put: 0, length: 0 }
    }

    /// Adds a byte, replacing the oldest one when full.
    pub fn put(&mut self, byte: u8) {
        self.bytes[self.put as usize % SIZE] = byte;
        self.put = self.put.wrapping_add(1);
        self.length = (self.length + 1).min(SIZE as u32);
    }

    /// Returns the number of bytes kept.
    pub const fn len(&self) -> usize {
        self.length as usize
    }

    /// Returns the byte that was added `back` bytes ago: 0 is the last one.
    fn ago(&self, back: usize) -> u8 {
        self.bytes[self.put.wrapping_sub(1).wrapping_sub(back as u32) as usize % SIZE]
    }

    /// Last bytes, at most `most`.
    pub fn last(&self, most: usize) -> impl Iterator<Item = u8> {
        (0..self.len().min(most)).rev().map(|back| self.ago(back))
    }

    /// Returns the number of last bytes that make `lines` lines, at most `most` bytes. Bytes after
    /// the last line feed count as a line. If the limit of bytes is reached first, it returns only
    /// complete lines, or a part of one line if there is no complete one.
    pub fn last_lines(&self, lines: usize, most: usize) -> usize {
        let within = self.len().min(most);
        let mut feeds = (0..within).filter(|&back| self.ago(back) == b'\n');
        match feeds.nth(lines) {
            Some(start) => start,
            None if within == self.len() => within,
            // The oldest complete line starts after the oldest line feed.
            None => (0..within).rev().find(|&back| self.ago(back) == b'\n').unwrap_or(within),
        }
    }

    /// Drops all bytes.
    pub fn clear(&mut self) {
        self.length = 0;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn order_and_limits() {
        let mut ring = Ring::<4>::new();
        ring.put = u32::MAX - 1;
        ring.taken = ring.put;
        for round in 0..5 {
            for byte in 0..4 {
                assert!(ring.put(round + byte));
            }
            assert!(!ring.put(9), "full");
            for byte in 0..4 {
                assert_eq!(ring.take(), Some(round + byte));
            }
            assert_eq!(ring.take(), None);
        }
    }

    #[test]
    fn the_last_bytes_are_kept() {
        let mut history = History::<8>::new();
        history.put = u32::MAX - 2;
        let last = |history: &History<8>, most| history.last(most).collect::<Vec<_>>();
        assert_eq!(last(&history, 9), b"");
        b"abc".iter().for_each(|&byte| history.put(byte));
        assert_eq!(last(&history, 9), b"abc");
        b"defghijkl".iter().for_each(|&byte| history.put(byte));
        assert_eq!(last(&history, 9), b"efghijkl");
        assert_eq!(last(&history, 2), b"kl");
        history.clear();
        assert_eq!(last(&history, 9), b"");
    }

    #[test]
    fn lines_from_the_end() {
        let mut history = History::<16>::new();
        let lines = |history: &History<16>, lines, most| {
            let count = history.last_lines(lines, most);
            String::from_utf8(history.last(count).collect()).unwrap()
        };
        b"1\n22\n333\n$".iter().for_each(|&byte| history.put(byte));
        assert_eq!(lines(&history, 1, 16), "333\n$");
        assert_eq!(lines(&history, 0, 16), "$");
        assert_eq!(lines(&history, 9, 16), "1\n22\n333\n$");
        assert_eq!(lines(&history, 9, 7), "333\n$", "whole lines only");
        assert_eq!(lines(&history, 9, 3), "$");
        b"xxxxxxxxxxxxxxxxxxxx".iter().for_each(|&byte| history.put(byte));
        assert_eq!(lines(&history, 2, 16), "xxxxxxxxxxxxxxxx", "one line that is too long");
    }
}
