//! Polling for events before a wait, which saves the notifier from waking a thread.

/// Looks for an event between two offers of the CPU to other threads.
pub const LOOKS: u32 = 16;

/// Returns the next polling time, after polling in vain for `polled` and waiting for `waited` then,
/// all in one unit. As in KVM (`halt_poll_ns`, `Documentation/virt/kvm/halt-polling.rst` in Linux)
/// it grows from `least` while waits are at most `most`. At once to twice the wait: events come in
/// bursts of a few. For the same reason a longer wait, which ends a burst, halves it.
pub fn after_wait(polled: u64, waited: u64, least: u64, most: u64) -> u64 {
    if waited <= most {
        return (2 * polled.max(waited)).clamp(least, most);
    }
    if polled < 2 * least { 0 } else { polled / 2 }
}

/// Returns the next polling time, after polling of at most `polled` has found an event.
pub fn after_event(polled: u64, most: u64) -> u64 {
    (2 * polled).min(most)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn polling_follows_the_waits() {
        let waits = [1, 12, 20, 50, 51, 3, 51, 51, 51, 51];
        let mut polled = 0;
        let polls = waits.map(|waited| {
            polled = after_wait(polled, waited, 10, 50);
            polled
        });
        assert_eq!(polls, [10, 24, 48, 50, 25, 50, 25, 12, 0, 0]);
    }

    #[test]
    fn bursts_of_three_events_are_found() {
        let mut polled = after_wait(0, 20, 10, 50);
        for _ in 0..100 {
            for _ in 0..2 {
                assert!(polled >= 20);
                polled = after_event(polled, 50);
            }
            polled = after_wait(polled, 1000, 10, 50);
        }
    }
}
