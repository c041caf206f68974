//! Rings of fixed entries in memory that two tasks share and neither of which trusts the other.
//!
//! One side puts, the other takes. Each keeps its own position privately and publishes it; what it reads of the other
//! side's is checked against that, so random words in the memory make an operation fail with [`Broken`], and never
//! a panic, an access beyond the ring or an endless loop. An entry is copied before it is looked at, because the
//! other side may change it at any time.
//!
//! A side that goes to sleep leaves a wish; the other side, having put or taken something, looks for it, takes it and
//! then signals. So a busy pair signals nobody ("event suppression"). Wish and position are accessed in one total
//! order on both sides, hence no signal is lost: either the sleeper sees the new position, or the other sees the wish.
//!
//! | word | written by | what |
//! |---|---|---|
//! | 0 | producer | entries ever put, modulo 2^32 |
//! | 1 | both | wish of the producer: signal me when something was taken |
//! | 8 | consumer | entries ever taken, modulo 2^32 |
//! | 9 | both | wish of the consumer: signal me when something was put |
//! | 16… | producer | `CAPACITY` entries of `N` words |

use core::sync::atomic::{AtomicU64, Ordering};

const PUT: usize = 0;
const PRODUCER_SLEEPS: usize = 1;
const TAKEN: usize = 8;
const CONSUMER_SLEEPS: usize = 9;
const ENTRIES: usize = 16;

/// Words of a ring of `capacity` entries of `n` words.
pub const fn words(n: usize, capacity: usize) -> usize {
    ENTRIES + n * capacity
}

/// The other side has written what it never may. The ring is of no use until both sides start anew.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Broken;

/// The memory of a ring.
#[derive(Clone, Copy)]
struct Ring<'m, const N: usize, const CAPACITY: usize> {
    /// Exactly `words(N, CAPACITY)` of them.
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

    /// The number of entries from `taken` to `put`, if there can be as many.
    fn filled(put: u32, taken: u32) -> Result<u32, Broken> {
        let filled = put.wrapping_sub(taken);
        if filled as usize <= CAPACITY { Ok(filled) } else { Err(Broken) }
    }

    /// The other side's position.
    fn position(self, word: usize) -> Result<u32, Broken> {
        u32::try_from(self.words[word].load(Ordering::SeqCst)).map_err(|_| Broken)
    }

    fn publish(self, word: usize, position: u32) {
        self.words[word].store(position.into(), Ordering::SeqCst);
    }

    /// Takes the other side's wish to be signalled.
    fn wish(self, word: usize) -> bool {
        self.words[word].load(Ordering::SeqCst) != 0
            && self.words[word].swap(0, Ordering::SeqCst) != 0
    }

    fn set_wish(self, word: usize, wish: bool) {
        self.words[word].store(wish.into(), Ordering::SeqCst);
    }
}

/// Empties a ring. Neither side may use it meanwhile, and both begin anew after it.
pub fn clear(words: &[AtomicU64]) {
    for word in [PUT, PRODUCER_SLEEPS, TAKEN, CONSUMER_SLEEPS] {
        if let Some(word) = words.get(word) {
            word.store(0, Ordering::SeqCst);
        }
    }
}

/// The side that puts entries of `N` words into a ring of `CAPACITY` entries, a power of two.
pub struct Producer<'m, const N: usize, const CAPACITY: usize> {
    ring: Ring<'m, N, CAPACITY>,
    put: u32,
    /// The consumer's position when last read.
    taken: u32,
}

impl<'m, const N: usize, const CAPACITY: usize> Producer<'m, N, CAPACITY> {
    /// The producer of a ring that was just [cleared](clear); `None` if the memory is too short.
    pub fn new(words: &'m [AtomicU64]) -> Option<Self> {
        Some(Self { ring: Ring::new(words)?, put: 0, taken: 0 })
    }

    /// Begins anew after the ring was cleared.
    pub fn restart(&mut self) {
        (self.put, self.taken) = (0, 0);
    }

    /// Entries ever put, modulo 2^32.
    pub fn total_put(&self) -> u32 {
        self.put
    }

    /// Entries ever taken by the other side, modulo 2^32; at most `CAPACITY` less than were put.
    pub fn total_taken(&mut self) -> Result<u32, Broken> {
        let taken = self.ring.position(TAKEN)?;
        Ring::<N, CAPACITY>::filled(self.put, taken)?;
        self.taken = taken;
        Ok(taken)
    }

    /// Entries that can be put now.
    pub fn room(&mut self) -> Result<usize, Broken> {
        self.total_taken()?;
        Ok(CAPACITY - self.put.wrapping_sub(self.taken) as usize)
    }

    /// Puts an entry; `false` if there is no room.
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

    /// Whether the consumer sleeps and is to be signalled now. Asked after putting; answered with `true` once.
    #[must_use]
    pub fn must_signal(&self) -> bool {
        self.ring.wish(CONSUMER_SLEEPS)
    }

    /// Asks for a signal when entries were taken. `false`: there is room for `wanted` entries already, and
    /// no signal may come.
    pub fn sleep(&mut self, wanted: usize) -> Result<bool, Broken> {
        self.ring.set_wish(PRODUCER_SLEEPS, true);
        let sleeps = self.room()? < wanted;
        if !sleeps {
            self.ring.set_wish(PRODUCER_SLEEPS, false);
        }
        Ok(sleeps)
    }
}

/// The side that takes entries.
pub struct Consumer<'m, const N: usize, const CAPACITY: usize> {
    ring: Ring<'m, N, CAPACITY>,
    taken: u32,
    /// The producer's position when last read.
    put: u32,
}

impl<'m, const N: usize, const CAPACITY: usize> Consumer<'m, N, CAPACITY> {
    /// The consumer of a ring that was just [cleared](clear); `None` if the memory is too short.
    pub fn new(words: &'m [AtomicU64]) -> Option<Self> {
        Some(Self { ring: Ring::new(words)?, taken: 0, put: 0 })
    }

    /// Begins anew after the ring was cleared.
    pub fn restart(&mut self) {
        (self.put, self.taken) = (0, 0);
    }

    /// Entries that wait.
    pub fn waiting(&mut self) -> Result<usize, Broken> {
        let put = self.ring.position(PUT)?;
        let filled = Ring::<N, CAPACITY>::filled(put, self.taken)?;
        self.put = put;
        Ok(filled as usize)
    }

    /// Copies the oldest entry and leaves it.
    pub fn peek(&mut self) -> Result<Option<[u64; N]>, Broken> {
        if self.put == self.taken && self.waiting()? == 0 {
            return Ok(None);
        }
        let entry = self.ring.entry(self.taken);
        Ok(Some(core::array::from_fn(|index| entry[index].load(Ordering::Relaxed))))
    }

    /// Gives the place of the oldest entry back to the producer, after [`peek`](Self::peek) has shown one.
    pub fn advance(&mut self) {
        if self.put != self.taken {
            self.taken = self.taken.wrapping_add(1);
            self.ring.publish(TAKEN, self.taken);
        }
    }

    /// Takes the oldest entry.
    pub fn take(&mut self) -> Result<Option<[u64; N]>, Broken> {
        let entry = self.peek()?;
        if entry.is_some() {
            self.advance();
        }
        Ok(entry)
    }

    /// Whether the producer sleeps and is to be signalled now. Asked after taking; answered with `true` once.
    #[must_use]
    pub fn must_signal(&self) -> bool {
        self.ring.wish(PRODUCER_SLEEPS)
    }

    /// Asks for a signal when something is put. `false`: something waits already, and no signal may come.
    pub fn sleep(&mut self) -> Result<bool, Broken> {
        self.ring.set_wish(CONSUMER_SLEEPS, true);
        let sleeps = self.waiting()? == 0;
        if !sleeps {
            self.ring.set_wish(CONSUMER_SLEEPS, false);
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
        assert!(!put.must_signal(), "nobody sleeps");
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

        /// The other side writes anything anywhere at any time.
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
