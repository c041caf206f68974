//! Split virtqueue, driver side (virtio 1.2, section 2.7).
//!
//! The device is trusted only as far as its DMA reaches: the driver checks that each used chain was
//! offered.

use core::sync::atomic::{AtomicU64, Ordering, fence};

/// Bytes of memory of a queue, physically contiguous and page-aligned.
pub const QUEUE_BYTES: u64 = 4096;
/// Maximum number of descriptors of a queue.
pub const MAX_SIZE: u16 = 128;

/// Descriptor flag: the chain continues.
const NEXT: u16 = 1;
/// Descriptor flag: the device writes the buffer.
pub const WRITE: u16 = 2;
/// Flag of the used ring: the device needs no notifications.
const NO_NOTIFY: u64 = 1;

const WORDS: usize = QUEUE_BYTES as usize / 8;
/// Offsets of the rings.
const AVAILABLE: usize = MAX_SIZE as usize * 16;
const USED: usize = AVAILABLE + 512;
const _: () = assert!(AVAILABLE + 6 + 2 * MAX_SIZE as usize <= USED);
const _: () = assert!(USED + 6 + 8 * MAX_SIZE as usize <= QUEUE_BYTES as usize);

/// Error: the device used a chain that was not offered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Broken;

/// Driver side of a virtqueue.
pub struct Queue<'m> {
    words: &'m [AtomicU64],
    physical: u64,
    size: u16,
    /// Number of chains offered and taken back so far, modulo 2^16.
    offered: u16,
    taken: u16,
    /// Chains in flight, by their first descriptor.
    in_flight: u128,
}

impl<'m> Queue<'m> {
    /// Creates an empty queue in `memory`, at `physical` for the device, of `size` descriptors or
    /// as many as fit; `None` if the memory is too short.
    pub fn new(memory: &'m [AtomicU64], physical: u64, size: u16) -> Option<Self> {
        let words = memory.get(..WORDS)?;
        words.iter().for_each(|word| word.store(0, Ordering::Relaxed));
        let size = 1 << size.clamp(1, MAX_SIZE).ilog2();
        Some(Self { words, physical, size, offered: 0, taken: 0, in_flight: 0 })
    }

    /// Returns the number of descriptors, a power of two.
    pub fn size(&self) -> u16 {
        self.size
    }

    /// Returns the physical addresses of descriptors, available ring, used ring.
    pub fn addresses(&self) -> [u64; 3] {
        [self.physical, self.physical + AVAILABLE as u64, self.physical + USED as u64]
    }

    /// Writes the chain of consecutive descriptors that begins with `first`: address, length and
    /// flags ([`WRITE`]) of each buffer.
    fn write_chain(&self, first: u16, buffers: &[(u64, u32, u16)]) {
        for (index, &(address, length, flags)) in buffers.iter().enumerate() {
            let number = usize::from(first) + index;
            let Some([low, high]) = self.words.get(2 * number..2 * number + 2) else { return };
            let last = index + 1 == buffers.len();
            let flags = if last { flags } else { flags | NEXT };
            let next = if last { 0 } else { number as u64 + 1 };
            low.store(address, Ordering::Relaxed);
            high.store(u64::from(length) | u64::from(flags) << 32 | next << 48, Ordering::Relaxed);
        }
    }

    /// Offers a chain of buffers in the descriptors from `first` on. Returns `false` without effect
    /// if the descriptors exceed the queue, or a chain that begins there is in flight.
    #[must_use]
    pub fn offer(&mut self, first: u16, buffers: &[(u64, u32, u16)]) -> bool {
        let end = usize::from(first) + buffers.len();
        if end > usize::from(self.size) || buffers.is_empty() || self.in_flight >> first & 1 != 0 {
            return false;
        }
        self.write_chain(first, buffers);
        self.in_flight |= 1 << first;
        // Only the driver writes this ring, so it may change a word in two steps.
        let offset = 2 * (2 + usize::from(self.offered % self.size)) + AVAILABLE;
        self.set16(offset, first);
        self.offered = self.offered.wrapping_add(1);
        fence(Ordering::Release);
        self.set16(AVAILABLE + 2, self.offered);
        true
    }

    fn set16(&self, offset: usize, value: u16) {
        let (word, shift) = (&self.words[offset / 8], offset % 8 * 8);
        let rest = word.load(Ordering::Relaxed) & !(0xffff << shift);
        word.store(rest | u64::from(value) << shift, Ordering::Release);
    }

    /// Returns whether the device needs a notification of the offered chains.
    #[must_use]
    pub fn must_notify(&self) -> bool {
        fence(Ordering::SeqCst);
        self.words[USED / 8].load(Ordering::Acquire) & NO_NOTIFY == 0
    }

    /// Takes back a used chain: its first descriptor, and the number of bytes that the device
    /// wrote.
    pub fn take(&mut self) -> Result<Option<(u16, u32)>, Broken> {
        let used = (self.words[USED / 8].load(Ordering::Acquire) >> 16) as u16;
        if used == self.taken {
            return Ok(None);
        }
        let word = USED / 8 + usize::from(self.taken % self.size);
        let first = self.words[word].load(Ordering::Relaxed) >> 32;
        let length = self.words[word + 1].load(Ordering::Relaxed) as u32;
        if first >= self.size.into() || self.in_flight >> first & 1 == 0 {
            return Err(Broken);
        }
        self.in_flight &= !(1 << first);
        self.taken = self.taken.wrapping_add(1);
        Ok(Some((first as u16, length)))
    }
}

/// Device side, for tests.
#[cfg(test)]
mod tests {
    use super::*;

    fn memory() -> Vec<AtomicU64> {
        (0..WORDS).map(|_| AtomicU64::new(7)).collect()
    }

    fn get16(memory: &[AtomicU64], offset: usize) -> u16 {
        (memory[offset / 8].load(Ordering::Relaxed) >> (offset % 8 * 8)) as u16
    }

    /// The device uses a chain.
    fn use_chain(memory: &[AtomicU64], size: u16, number: u16, first: u32, length: u32) {
        let offset = USED / 8 + usize::from(number % size);
        let keep = |word: &AtomicU64, mask: u64, value: u64| {
            let old = word.load(Ordering::Relaxed);
            word.store(old & mask | value, Ordering::Relaxed);
        };
        keep(&memory[offset], 0xffff_ffff, u64::from(first) << 32);
        keep(&memory[offset + 1], !0xffff_ffff, length.into());
        keep(&memory[USED / 8], !0xffff_0000, u64::from(number.wrapping_add(1)) << 16);
    }

    #[test]
    fn chains_are_offered_and_taken_back() {
        let memory = memory();
        let mut queue = Queue::new(&memory, 0x10_0000, 8).unwrap();
        assert_eq!(queue.addresses(), [0x10_0000, 0x10_0800, 0x10_0a00]);
        for number in 0..20u16 {
            assert!(queue.offer(3, &[(0x1000, 16, 0), (0x2000, 512, WRITE), (0x3000, 1, WRITE)]));
            assert!(!queue.offer(3, &[(0, 1, 0)]), "under way");
            assert!(queue.must_notify());
            assert_eq!(get16(&memory, AVAILABLE + 2), number + 1);
            assert_eq!(get16(&memory, AVAILABLE + 4 + 2 * usize::from(number % 8)), 3);
            assert_eq!(memory[6].load(Ordering::Relaxed), 0x1000);
            assert_eq!(memory[7].load(Ordering::Relaxed), 16 | 1 << 32 | 4 << 48);
            assert_eq!(memory[11].load(Ordering::Relaxed), 1 | 2 << 32, "the last");
            assert_eq!(queue.take(), Ok(None));
            use_chain(&memory, 8, number, 3, 513);
            assert_eq!(queue.take(), Ok(Some((3, 513))));
        }
        memory[USED / 8].fetch_or(1, Ordering::Relaxed);
        assert!(!queue.must_notify());
    }

    #[test]
    fn beyond_the_queue() {
        let memory = memory();
        let mut queue = Queue::new(&memory, 0, 300).unwrap();
        assert_eq!(queue.size(), MAX_SIZE);
        assert!(!queue.offer(127, &[(0, 1, 0); 2]));
        assert!(!queue.offer(0, &[]));
        assert!(queue.offer(127, &[(0, 1, 0)]));
        use_chain(&memory, 128, 0, 5, 0);
        assert_eq!(queue.take(), Err(Broken), "never offered");
        use_chain(&memory, 128, 0, u32::MAX, 0);
        assert_eq!(queue.take(), Err(Broken));
        use_chain(&memory, 128, 0, 127, 0);
        assert_eq!(queue.take(), Ok(Some((127, 0))));
        use_chain(&memory, 128, 1, 127, 0);
        assert_eq!(queue.take(), Err(Broken), "used twice");
        assert!(Queue::new(&memory[1..], 0, 8).is_none());
    }
}
