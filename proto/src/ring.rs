//! Rings of fixed-size entries in memory shared by two tasks that do not trust each other.
//!
//! One side produces, the other consumes. Each side keeps its own position privately and publishes
//! it. Positions of the other side are checked against it: arbitrary words in the memory make an
//! operation fail with [`Broken`], and never cause a panic, an access outside of the ring or an
//! endless loop. An entry is copied before it is validated, because the other side may change it at
//! any time.
//!
//! A side that is about to sleep requests a signal. After producing or consuming an entry, the
//! other side takes that request and signals, so a busy pair exchanges no signals (event
//! suppression). Request and position are accessed in one total order on both sides, hence no
//! signal is lost: either the sleeper sees the new position, or the other side sees the request.
//!
//! | word | written by | content |
//! |---|---|---|
//! | 0 | producer | entries ever produced, modulo 2^32 |
//! | 1 | both | the producer requests a signal when an entry is consumed |
//! | 8 | consumer | entries ever consumed, modulo 2^32 |
//! | 9 | both | the consumer requests a signal when an entry is produced |
//! | 16… | producer | `CAPACITY` entries of `N` words |

use core::sync::atomic::{AtomicU64, Ordering};

const PUT: usize = 0;
const PRODUCER_WANTS_SIGNAL: usize = 1;
const TAKEN: usize = 8;
const CONSUMER_WANTS_SIGNAL: usize = 9;
const ENTRIES: usize = 16;

/// Returns the number of words of a ring of `capacity` entries of `n` words.
pub const fn words(n: usize, capacity: usize) -> usize {
    ENTRIES + n * capacity
}

/// The other side has violated the protocol. The ring is unusable until both sides restart.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Broken;

/// Memory of a ring.
#[derive(Clone, Copy)]
struct Ring<'m, const N: usize, const CAPACITY: usize> {
    /// Exactly `words(N, CAPACITY)` words.
    words: &'m [AtomicU64],
}

impl<'m, const N: usize, const CAPACITY: usize> Ring<'m, N, CAPACITY> {
    fn new(words: &'m [AtomicU64]) -> Option<Self> {
        const { assert!(CAPACITY.is_power_of_two() && CAPACITY <= 1 << 16 && N > 0) }
        Some(Self { words: words.get(..self::words(N, CAPACITY))? })
    }

    fn entry(self, position: u32) -> &'m [AtomicU64] {
        let first = ENTRIES + position as usize % CAPACITY * N;
        &self.words[first..first + N]
    }

    /// Returns the number of entries from `taken` to `put`, if it does not exceed the capacity.
    fn filled(put: u32, taken: u32) -> Result<u32, Broken> {
        let filled = put.wrapping_sub(taken);
        if filled as usize <= CAPACITY { Ok(filled) } else { Err(Broken) }
    }

    /// Returns the other side's position.
    fn position(self, word: usize) -> Result<u32, Broken> {
        u32::try_from(self.words[word].load(Ordering::SeqCst)).map_err(|_| Broken)
    }

    fn publish(self, word: usize, position: u32) {
        self.words[word].store(position.into(), Ordering::SeqCst);
    }

    /// Takes the other side's request for a signal.
    fn take_signal_request(self, word: usize) -> bool {
        self.words[word].load(Ordering::SeqCst) != 0
            && self.words[word].swap(0, Ordering::SeqCst) != 0
    }

    fn set_signal_request(self, word: usize, requested: bool) {
        self.words[word].store(requested.into(), Ordering::SeqCst);
    }
}

/// Empties a ring. Both sides must be idle, and must restart afterwards.
pub fn clear(words: &[AtomicU64]) {
    for word in [PUT, PRODUCER_WANTS_SIGNAL, TAKEN, CONSUMER_WANTS_SIGNAL] {
        if let Some(word) = words.get(word) {
            word.store(0, Ordering::SeqCst);
        }
    }
}

/// Producer of entries of `N` words in a ring of `CAPACITY` entries, a power of two.
pub struct Producer<'m, const N: usize, const CAPACITY: usize> {
    ring: Ring<'m, N, CAPACITY>,
    put: u32,
    /// Consumer's position when last read.
    taken: u32,
}

impl<'m, const N: usize, const CAPACITY: usize> Producer<'m, N, CAPACITY> {
    /// Creates the producer of a [cleared](clear) ring; `None` if the memory is too short.
    pub fn new(words: &'m [AtomicU64]) -> Option<Self> {
        Some(Self { ring: Ring::new(words)?, put: 0, taken: 0 })
    }

    /// Restarts after the ring was cleared.
    pub fn restart(&mut self) {
        (self.put, self.taken) = (0, 0);
    }

    /// Returns the number of entries ever produced, modulo 2^32.
    pub fn total_put(&self) -> u32 {
        self.put
    }

    /// Returns the number of entries ever consumed, modulo 2^32; it lags by at most `CAPACITY`.
    pub fn total_taken(&mut self) -> Result<u32, Broken> {
        let taken = self.ring.position(TAKEN)?;
        Ring::<N, CAPACITY>::filled(self.put, taken)?;
        self.taken = taken;
        Ok(taken)
    }

    /// Returns the number of free entries.
    pub fn room(&mut self) -> Result<usize, Broken> {
        self.total_taken()?;
        Ok(CAPACITY - self.put.wrapping_sub(self.taken) as usize)
    }

    /// Produces an entry; `false` if the ring is full.
    pub fn put(&mut self, entry: [u64; N]) -> Result<bool, Broken> {
        if self.put.wrapping_sub(self.taken) as usize == CAPACITY && self.room()? == 0 {
            return Ok(false);
        }
        for (word, value) in self.ring.entry(self.put).iter().zip(entry) {
            word.store(value, Ordering::Relaxed);
        }
        self.put = self.put.wrapping_add(1);
        self.ring.publish(PUT, self.put);
        Ok(true)
    }

    /// Returns whether to signal the consumer, once per request. To be called after producing.
    #[must_use]
    pub fn must_signal(&self) -> bool {
        self.ring.take_signal_request(CONSUMER_WANTS_SIGNAL)
    }

    /// Requests a signal when entries are consumed. `false`: `wanted` entries are free already, and
    /// a signal may not come.
    pub fn sleep(&mut self, wanted: usize) -> Result<bool, Broken> {
        self.ring.set_signal_request(PRODUCER_WANTS_SIGNAL, true);
        let sleeps = self.room()? < wanted;
        if !sleeps {
            self.ring.set_signal_request(PRODUCER_WANTS_SIGNAL, false);
        }
        Ok(sleeps)
    }
}

/// Consumer of entries.
pub struct Consumer<'m, const N: usize, const CAPACITY: usize> {
    ring: Ring<'m, N, CAPACITY>,
    taken: u32,
    /// Producer's position when last read.
    put: u32,
}

impl<'m, const N: usize, const CAPACITY: usize> Consumer<'m, N, CAPACITY> {
    /// Creates the consumer of a [cleared](clear) ring; `None` if the memory is too short.
    pub fn new(words: &'m [AtomicU64]) -> Option<Self> {
        Some(Self { ring: Ring::new(words)?, taken: 0, put: 0 })
    }

    /// Restarts after the ring was cleared.
    pub fn restart(&mut self) {
        (self.put, self.taken) = (0, 0);
    }

    /// Returns the number of pending entries.
    pub fn waiting(&mut self) -> Result<usize, Broken> {
        let put = self.ring.position(PUT)?;
        let filled = Ring::<N, CAPACITY>::filled(put, self.taken)?;
        self.put = put;
        Ok(filled as usize)
    }

    /// Copies the oldest entry without consuming it.
    pub fn peek(&mut self) -> Result<Option<[u64; N]>, Broken> {
        if self.put == self.taken && self.waiting()? == 0 {
            return Ok(None);
        }
        let entry = self.ring.entry(self.taken);
        Ok(Some(core::array::from_fn(|index| entry[index].load(Ordering::Relaxed))))
    }

    /// Returns the slot of the oldest entry to the producer, after [`peek`](Self::peek) has
    /// returned an entry.
    pub fn advance(&mut self) {
        if self.put != self.taken {
            self.taken = self.taken.wrapping_add(1);
            self.ring.publish(TAKEN, self.taken);
        }
    }

    /// Consumes the oldest entry.
    pub fn take(&mut self) -> Result<Option<[u64; N]>, Broken> {
        let entry = self.peek()?;
        if entry.is_some() {
            self.advance();
        }
        Ok(entry)
    }

    /// Returns whether to signal the producer, once per request. To be called after consuming.
    #[must_use]
    pub fn must_signal(&self) -> bool {
        self.ring.take_signal_request(PRODUCER_WANTS_SIGNAL)
    }

    /// Requests a signal when an entry is produced. `false`: an entry is pending already, and a
    /// signal may not come.
    pub fn sleep(&mut self) -> Result<bool, Broken> {
        self.ring.set_signal_request(CONSUMER_WANTS_SIGNAL, true);
        let sleeps = self.waiting()? == 0;
        if !sleeps {
            self.ring.set_signal_request(CONSUMER_WANTS_SIGNAL, false);
        }
        Ok(sleeps)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::VecDeque;

    use proptest::prelude::*;

    use super::*;
    use crate::testing::memory;

    const WORDS: usize = words(2, 4);
    type Put<'m> = Producer<'m, 2, 4>;
    type Take<'m> = Consumer<'m, 2, 4>;

    #[test]
    fn too_short_memory_is_refused() {
        let memory = memory(WORDS - 1);
        assert!(Put::new(&memory).is_none());
        assert!(Take::new(&memory).is_none());
    }

    #[test]
    fn positions_wrap() {
        let memory = memory(WORDS);
        let (mut put, mut take) = (Put::new(&memory).unwrap(), Take::new(&memory).unwrap());
        let near = u32::MAX - 1;
        (put.put, put.taken, take.put, take.taken) = (near, near, near, near);
        put.ring.publish(PUT, near);
        take.ring.publish(TAKEN, near);
        for value in 0..20 {
            assert_eq!(put.put([value, 0]), Ok(true));
            assert_eq!(take.take(), Ok(Some([value, 0])));
        }
    }

    #[test]
    fn signals_only_who_sleeps() {
        let memory = memory(WORDS);
        let (mut put, mut take) = (Put::new(&memory).unwrap(), Take::new(&memory).unwrap());
        assert_eq!(put.put([1, 2]), Ok(true));
        assert!(!put.must_signal(), "the consumer does not sleep");
        assert_eq!(take.sleep(), Ok(false), "something is there");
        assert_eq!(take.take(), Ok(Some([1, 2])));
        assert_eq!(take.sleep(), Ok(true));
        assert_eq!(put.put([3, 4]), Ok(true));
        assert!(put.must_signal());
        assert!(!put.must_signal(), "once");
        for _ in 0..3 {
            assert_eq!(put.put([5, 6]), Ok(true));
        }
        assert_eq!(put.put([7, 8]), Ok(false), "full");
        assert_eq!(put.sleep(1), Ok(true));
        assert_eq!(take.take(), Ok(Some([3, 4])));
        assert!(take.must_signal());
        assert_eq!(put.sleep(1), Ok(false));
        assert!(!take.must_signal());
    }

    #[derive(Clone, Debug)]
    enum Step {
        Put(u64),
        Take,
        Peek,
        Restart,
    }

    fn steps() -> impl Strategy<Value = Vec<Step>> {
        let step = prop_oneof![
            8 => any::<u64>().prop_map(Step::Put),
            8 => Just(Step::Take),
            2 => Just(Step::Peek),
            1 => Just(Step::Restart),
        ];
        prop::collection::vec(step, 0..200)
    }

    proptest! {
        #[test]
        fn behaves_as_a_queue(steps in steps()) {
            let memory = memory(WORDS);
            let (mut put, mut take) = (Put::new(&memory).unwrap(), Take::new(&memory).unwrap());
            let mut model = VecDeque::new();
            for step in steps {
                match step {
                    Step::Put(value) => {
                        let fits = model.len() < 4;
                        prop_assert_eq!(put.room(), Ok(4 - model.len()));
                        prop_assert_eq!(put.put([value, !value]), Ok(fits));
                        if fits {
                            model.push_back([value, !value]);
                        }
                    }
                    Step::Take => prop_assert_eq!(take.take(), Ok(model.pop_front())),
                    Step::Peek => prop_assert_eq!(take.peek(), Ok(model.front().copied())),
                    Step::Restart => {
                        clear(&memory);
                        put.restart();
                        take.restart();
                        model.clear();
                    }
                }
                prop_assert_eq!(take.waiting(), Ok(model.len()));
            }
        }

        /// Writes arbitrary words anywhere at any time, as a hostile peer does.
        #[test]
        fn hostile_words(writes in prop::collection::vec((0..WORDS, any::<u64>(), any::<bool>()), 0..100)) {
            let memory = memory(WORDS);
            let (mut put, mut take) = (Put::new(&memory).unwrap(), Take::new(&memory).unwrap());
            for (index, value, small) in writes {
                memory[index].store(if small { value % 8 } else { value }, Ordering::Relaxed);
                let _ = (put.put([1, 2]), put.room(), put.sleep(1), put.must_signal());
                let taken = (0..2 * 4).take_while(|_| matches!(take.take(), Ok(Some(_)))).count();
                prop_assert!(taken <= 8);
                let _ = (take.peek(), take.sleep(), take.must_signal());
                take.advance();
            }
        }
    }

    #[test]
    fn between_threads() {
        const COUNT: u64 = 20_000;
        let memory = memory(WORDS);
        let mut put = Put::new(&memory).unwrap();
        let mut take = Take::new(&memory).unwrap();
        std::thread::scope(|scope| {
            scope.spawn(move || {
                let mut next = 0;
                while next < COUNT {
                    if put.put([next, !next]).unwrap() {
                        next += 1;
                    } else {
                        std::thread::yield_now();
                    }
                }
            });
            for expected in 0..COUNT {
                let entry = loop {
                    if let Some(entry) = take.take().unwrap() {
                        break entry;
                    }
                    std::thread::yield_now();
                };
                assert_eq!(entry, [expected, !expected]);
            }
        });
    }
}
