//! Reader and writer of an input.
//!
//! Numbers are little-endian. All bytes after the end are 0, so a shortened input keeps a meaning.

/// Unread rest of an input.
#[derive(Clone, Copy, Debug)]
pub struct Input<'a>(&'a [u8]);

impl<'a> Input<'a> {
    /// Creates a reader of the whole input.
    pub fn new(bytes: &'a [u8]) -> Self {
        Self(bytes)
    }

    /// True at the end of the input.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// The next bytes, at most `length`.
    pub fn bytes(&mut self, length: usize) -> &'a [u8] {
        let (taken, rest) = self.0.split_at(length.min(self.0.len()));
        self.0 = rest;
        taken
    }

    /// All remaining bytes.
    pub fn rest(&mut self) -> &'a [u8] {
        self.bytes(usize::MAX)
    }

    fn array<const N: usize>(&mut self) -> [u8; N] {
        let mut array = [0; N];
        let taken = self.bytes(N);
        array[..taken.len()].copy_from_slice(taken);
        array
    }

    /// 8 bits.
    pub fn byte(&mut self) -> u8 {
        u8::from_le_bytes(self.array())
    }

    /// 16 bits.
    pub fn half(&mut self) -> u16 {
        u16::from_le_bytes(self.array())
    }

    /// 32 bits.
    pub fn word(&mut self) -> u32 {
        u32::from_le_bytes(self.array())
    }

    /// 64 bits.
    pub fn long(&mut self) -> u64 {
        u64::from_le_bytes(self.array())
    }

    /// Size of an access: 1, 2, 4 or 8.
    pub fn size(&mut self) -> u8 {
        1 << (self.byte() & 3)
    }
}

/// Writer of an input.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Seed(Vec<u8>);

impl Seed {
    /// Creates an empty input.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds bytes.
    pub fn bytes(mut self, bytes: &[u8]) -> Self {
        self.0.extend_from_slice(bytes);
        self
    }

    /// Adds 8 bits.
    pub fn byte(self, value: u8) -> Self {
        self.bytes(&[value])
    }

    /// Adds 16 bits.
    pub fn half(self, value: u16) -> Self {
        self.bytes(&value.to_le_bytes())
    }

    /// Adds 32 bits.
    pub fn word(self, value: u32) -> Self {
        self.bytes(&value.to_le_bytes())
    }

    /// Adds 64 bits.
    pub fn long(self, value: u64) -> Self {
        self.bytes(&value.to_le_bytes())
    }

    /// Adds the size of an access.
    pub fn size(self, size: u8) -> Self {
        self.byte(size.trailing_zeros() as u8)
    }

    /// The complete input.
    pub fn finish(self) -> Vec<u8> {
        self.0
    }
}

/// Pseudo-random numbers for reproducible mutations of inputs (Marsaglia's xorshift).
#[derive(Clone, Copy, Debug)]
pub struct Random(u64);

impl Random {
    /// Creates the sequence of a start value.
    pub fn new(start: u64) -> Self {
        Self(start | 1)
    }

    /// The next number.
    pub fn draw(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    /// Next number below `end`, which is not 0.
    pub fn below(&mut self, end: usize) -> usize {
        (self.draw() >> 16) as usize % end
    }

    /// Mutates an input slightly.
    pub fn mutate(&mut self, input: &mut Vec<u8>) {
        for _ in 0..=self.below(8) {
            let (at, value) = (self.below(input.len() + 1), self.draw() as u8);
            match self.below(6) {
                0 => input.insert(at, value),
                1 => input.truncate(at),
                2 => {
                    let (from, length) = (self.below(input.len() + 1), self.below(32));
                    let copy: Vec<u8> = input.iter().skip(from).take(length).copied().collect();
                    input.splice(at..at, copy);
                }
                3 => {
                    let edge = [0, 1, 0x7f, 0x80, 0xff][self.below(5)];
                    input.iter_mut().skip(at).take(1 << self.below(4)).for_each(|b| *b = edge);
                }
                4 => input.iter_mut().skip(at).take(1).for_each(|byte| *byte ^= 1 << (value & 7)),
                _ => input.iter_mut().skip(at).take(1).for_each(|byte| *byte = value),
            }
        }
    }
}
