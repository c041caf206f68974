//! Polling for requests: while the guest submits one after the other, a thread that looks for the
//! next one need not be woken.

use std::sync::atomic::Ordering::{Relaxed, SeqCst};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64};
use std::thread;
use std::time::{Duration, Instant};

use proto::polling;
use proto::requests::Queue;

/// Initial polling time.
const LEAST: Duration = Duration::from_micros(10);
/// Longest polling time; polling starts after a wait that was not longer.
const MOST: Duration = Duration::from_micros(100);

/// Polling of the threads of a process: by one at a time, on a host with several CPUs.
#[derive(Debug)]
pub struct Polling {
    /// A thread polls, or there is one CPU.
    is_taken: AtomicBool,
    /// Polling time in nanoseconds.
    time: AtomicU64,
    /// Origin of [`Polling::since`].
    epoch: Instant,
    /// Time in nanoseconds at which a thread began to wait, the last that did: another one may be
    /// woken, and that has waited for longer than there was no request.
    since: AtomicU64,
}

impl Polling {
    /// Detects the CPUs that this process may use.
    pub fn new() -> Self {
        let several = thread::available_parallelism().is_ok_and(|count| count.get() > 1);
        Self::with_time(Duration::ZERO, several)
    }

    fn with_time(time: Duration, several: bool) -> Self {
        Self {
            is_taken: AtomicBool::new(!several),
            time: AtomicU64::new(nanoseconds(time)),
            epoch: Instant::now(),
            since: AtomicU64::new(0),
        }
    }

    /// Waits for a request: by polling, if waits are short, then asleep. Returns whether polling
    /// has found one.
    pub fn wait(&self, queue: &Queue, sleep: impl Fn(&AtomicU32, u32)) -> bool {
        let [least, most] = [LEAST, MOST].map(nanoseconds);
        let polled = self.time.load(Relaxed);
        if !self.is_taken.swap(true, SeqCst) {
            let limit = Duration::from_nanos(polled);
            let is_found = polled != 0 && queue.poll(|| poll(queue, limit));
            self.is_taken.store(false, SeqCst);
            if is_found {
                self.time.store(polling::after_event(polled, most), Relaxed);
                return true;
            }
        }
        self.since.store(nanoseconds(self.epoch.elapsed()), Relaxed);
        queue.sleep(sleep);
        let waited = nanoseconds(self.epoch.elapsed()).saturating_sub(self.since.load(Relaxed));
        self.time.store(polling::after_wait(polled, waited, least, most), Relaxed);
        false
    }
}

fn nanoseconds(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

fn poll(queue: &Queue, time: Duration) -> bool {
    let begin = Instant::now();
    loop {
        for _ in 0..polling::LOOKS {
            if queue.waiting.load(SeqCst) != 0 {
                return true;
            }
            std::hint::spin_loop();
        }
        if begin.elapsed() > time {
            return false;
        }
        // A vCPU may wait for this CPU.
        thread::yield_now();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn queue() -> &'static Queue {
        Box::leak(Box::new(Queue::new()))
    }

    #[test]
    fn who_finds_a_request_does_not_sleep() {
        let (polling, queue) = (Polling::with_time(Duration::from_secs(60), true), queue());
        thread::scope(|scope| {
            let found = scope.spawn(|| polling.wait(queue, |_, _| panic!("a request is there")));
            while queue.pollers.load(SeqCst) == 0 {
                thread::yield_now();
            }
            assert!(!queue.give(3), "a thread polls");
            assert!(found.join().unwrap());
        });
        assert_eq!(queue.pollers.load(SeqCst), 0);
    }

    #[test]
    fn long_waits_end_polling() {
        let polling = Polling::with_time(LEAST, true);
        assert!(!polling.wait(queue(), |_, _| thread::sleep(2 * MOST)));
        assert_eq!(polling.time.load(Relaxed), 0);
    }

    #[test]
    fn one_thread_polls() {
        let (polling, queue) = (Polling::with_time(Duration::from_secs(60), false), queue());
        let slept = AtomicBool::new(false);
        assert!(!polling.wait(queue, |_, _| slept.store(true, SeqCst)));
        assert!(slept.load(SeqCst));
    }

    #[test]
    fn waits_are_those_for_requests_not_of_one_thread() {
        let polling = Polling::with_time(LEAST, true);
        let queue = queue();
        assert!(!polling.wait(queue, |_, _| {
            thread::sleep(2 * MOST);
            polling.since.store(nanoseconds(polling.epoch.elapsed()), Relaxed);
        }));
        assert!(polling.time.load(Relaxed) >= nanoseconds(LEAST));
    }
}
