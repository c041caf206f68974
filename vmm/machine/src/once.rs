//! Messages that are logged once each: a small set of keys that forgets nothing and says when it is full.

const ENTRIES: usize = 48;

/// Keys of the messages that a virtual machine has logged. It bounds what a guest can log in its whole life only if
/// the host hands it on to the board of the next boot ([`Pc::keep_logged`](crate::Pc::keep_logged)).
#[derive(Clone, Debug)]
pub struct Once {
    keys: [u64; ENTRIES],
    used: usize,
}

/// What to do about a key.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Say {
    /// It is new: log it.
    It,
    /// It is new, and the last that is logged.
    Last,
    /// It is known, or the set is full.
    Nothing,
}

impl Once {
    /// An empty set.
    pub const fn new() -> Self {
        Self { keys: [0; ENTRIES], used: 0 }
    }

    /// Enters a key.
    pub fn enter(&mut self, key: u64) -> Say {
        if self.used == ENTRIES || self.keys[..self.used].contains(&key) {
            return Say::Nothing;
        }
        self.keys[self.used] = key;
        self.used += 1;
        if self.used == ENTRIES { Say::Last } else { Say::It }
    }
}

impl Default for Once {
    fn default() -> Self {
        Self::new()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_once_until_full() {
        let mut once = Once::new();
        assert_eq!((once.enter(0), once.enter(0)), (Say::It, Say::Nothing));
        for key in 1..ENTRIES as u64 - 1 {
            assert_eq!(once.enter(key), Say::It);
        }
        assert_eq!(
            (once.enter(99), once.enter(99), once.enter(100)),
            (Say::Last, Say::Nothing, Say::Nothing)
        );
    }
}
