//! Polling for requests: while the guest submits one after the other, a thread that looks for the
//! next one need not be woken.

use std::sync::atomic::Ordering::{Relaxed, SeqCst};
use std::sync::atomic::{AtomicBool, AtomicU64};
use std::thread;
use std::time::{Duration, Instant};

use proto::polling;

/// Initial polling time.
const LEAST: Duration = Duration::from_micros(10);
/// Longest polling time; polling starts after a wait that was not longer.
const MOST: Duration = Duration::from_micros(100);
/// Looks between two offers of the CPU to other threads.
const LOOKS: u32 = 16;

/// Polling of the threads of a process: by one at a time, on a host with several CPUs.
#[derive(Debug)]
pub struct Polling {
    /// A thread polls, or there is one CPU.
    is_taken: AtomicBool,
    /// Polling time in nanoseconds.
    time: AtomicU64,
}

impl Polling {
    /// Detects the CPUs that this process may use.
    pub fn new() -> Self {
        let several = thread::available_parallelism().is_ok_and(|count| count.get() > 1);
        Self { is_taken: AtomicBool::new(!several), time: AtomicU64::new(0) }
    }

    /// Waits until `is_ready`: by polling, if waits are short, then by `sleep`, which may return
    /// earlier.
    pub fn wait(&self, mut is_ready: impl FnMut() -> bool, sleep: impl FnOnce()) {
        if self.is_taken.swap(true, SeqCst) {
            return sleep();
        }
        let polled = Duration::from_nanos(self.time.load(Relaxed));
        let is_found = poll(polled, &mut is_ready);
        self.is_taken.store(false, SeqCst);
        if is_found {
            return;
        }
        let begin = Instant::now();
        sleep();
        let [polled, waited, least, most] =
            [polled, begin.elapsed(), LEAST, MOST].map(|time| time.as_nanos() as u64);
        self.time.store(polling::next(polled, waited, least, most), Relaxed);
    }
}

fn poll(time: Duration, mut is_ready: impl FnMut() -> bool) -> bool {
    if time.is_zero() {
        return false;
    }
    let begin = Instant::now();
    loop {
        for _ in 0..LOOKS {
            if is_ready() {
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

    fn polling(time: Duration) -> Polling {
        let time = AtomicU64::new(time.as_nanos() as u64);
        Polling { is_taken: AtomicBool::new(false), time }
    }

    #[test]
    fn who_finds_a_request_does_not_sleep() {
        let polling = polling(Duration::from_secs(60));
        let looks = AtomicU64::new(0);
        polling.wait(|| looks.fetch_add(1, Relaxed) == 99, || panic!("a request is there"));
        assert_eq!(looks.load(Relaxed), 100);
    }

    #[test]
    fn long_waits_end_polling() {
        let polling = polling(LEAST);
        polling.wait(|| false, || thread::sleep(2 * MOST));
        assert_eq!(polling.time.load(Relaxed), 0);
    }

    #[test]
    fn one_thread_polls() {
        let polling = polling(Duration::from_secs(60));
        let mut slept = false;
        polling.wait(
            || {
                polling.wait(|| panic!("two threads poll"), || slept = true);
                true
            },
            || panic!("a request is there"),
        );
        assert!(slept);
    }
}
