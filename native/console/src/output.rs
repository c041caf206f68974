//! Queue of output bytes with their owners.

use proto::console::directory::SESSIONS;

use crate::ring::Ring;

/// Owner of a byte: a client's session, or the multiplexer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Owner(u8);

impl Owner {
    /// The multiplexer itself.
    pub const MULTIPLEXER: Self = Self(SESSIONS as u8);

    /// Returns the owner of a client's output, by its session, less than [`SESSIONS`].
    pub const fn client(session: usize) -> Self {
        Self(session as u8)
    }
}

const _: () = assert!(SESSIONS < u8::MAX as usize);

/// First-in, first-out queue.
pub struct Output<const SIZE: usize> {
    bytes: Ring<SIZE>,
    owners: Ring<SIZE>,
    waiting: [usize; SESSIONS + 1],
}

impl<const SIZE: usize> Output<SIZE> {
    /// Creates an empty queue.
    pub const fn new() -> Self {
        Self { bytes: Ring::new(), owners: Ring::new(), waiting: [0; SESSIONS + 1] }
    }

    /// Returns the number of queued bytes.
    pub const fn len(&self) -> usize {
        self.bytes.len()
    }

    /// Returns the number of free bytes.
    pub const fn room(&self) -> usize {
        self.bytes.room()
    }

    /// Returns the number of queued bytes of an owner.
    pub fn waiting(&self, owner: Owner) -> usize {
        self.waiting[usize::from(owner.0)]
    }

    /// Queues a byte; returns `false` if the queue is full.
    pub fn put(&mut self, owner: Owner, byte: u8) -> bool {
        let fits = self.bytes.put(byte);
        if fits {
            self.owners.put(owner.0);
            self.waiting[usize::from(owner.0)] += 1;
        }
        fits
    }

    /// Queues bytes until the queue is full.
    pub fn put_all(&mut self, owner: Owner, bytes: &[u8]) {
        for &byte in bytes {
            self.put(owner, byte);
        }
    }

    /// Takes the oldest byte.
    pub fn take(&mut self) -> Option<u8> {
        let owner = self.owners.take()?;
        self.waiting[usize::from(owner)] -= 1;
        self.bytes.take()
    }

    /// Drops all bytes.
    pub fn clear(&mut self) {
        self.bytes.clear();
        self.owners.clear();
        self.waiting = [0; SESSIONS + 1];
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_byte_has_an_owner() {
        let mut output = Output::<8>::new();
        let (one, two) = (Owner::client(0), Owner::client(SESSIONS - 1));
        output.put_all(one, b"abc");
        output.put_all(two, b"defghijk");
        output.put_all(Owner::MULTIPLEXER, b"x");
        let waiting =
            |output: &Output<8>| [one, two, Owner::MULTIPLEXER].map(|owner| output.waiting(owner));
        assert_eq!((waiting(&output), output.len(), output.room()), ([3, 5, 0], 8, 0));
        assert_eq!([output.take(), output.take()], [Some(b'a'), Some(b'b')]);
        output.put_all(Owner::MULTIPLEXER, b"x");
        assert_eq!(waiting(&output), [1, 5, 1]);
        let rest: Vec<u8> = core::iter::from_fn(|| output.take()).collect();
        assert_eq!((&rest[..], waiting(&output)), (&b"cdefghx"[..], [0; 3]));
        output.put_all(two, b"ab");
        output.clear();
        assert_eq!((waiting(&output), output.take()), ([0; 3], None));
    }
}
