//! A ring of bytes.

/// First in, first out; `SIZE` is a power of two.
pub struct Ring<const SIZE: usize> {
    bytes: [u8; SIZE],
    /// Bytes ever taken and put, modulo 2^32.
    taken: u32,
    put: u32,
}

impl<const SIZE: usize> Ring<SIZE> {
    /// An empty ring.
    pub const fn new() -> Self {
        assert!(SIZE.is_power_of_two() && SIZE <= 1 << 31);
        Self { bytes: [0; SIZE], taken: 0, put: 0 }
    }

    /// Number of bytes in it.
    pub const fn len(&self) -> usize {
        self.put.wrapping_sub(self.taken) as usize
    }

    /// Number of bytes that still fit.
    pub const fn room(&self) -> usize {
        SIZE - self.len()
    }

    /// Puts a byte, if it fits.
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

    /// Drops everything.
    pub fn clear(&mut self) {
        self.taken = self.put;
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
}
