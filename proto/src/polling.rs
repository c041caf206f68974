//! Polling for events before a wait, which saves the notifier from waking a thread.

/// Returns the next polling time, after polling for `polled` and waiting for `waited` then, all in
/// one unit. As in KVM (`halt_poll_ns`, `Documentation/virt/kvm/halt-polling.rst` in Linux), it
/// grows from `least` while waits are at most `most`, and drops to 0 after a longer wait.
pub fn next(polled: u64, waited: u64, least: u64, most: u64) -> u64 {
    if waited > most { 0 } else { (2 * polled).clamp(least, most) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn polling_follows_the_waits() {
        let waits = [1, 5, 50, 50, 51, 3];
        let mut polled = 0;
        let polls = waits.map(|waited| {
            polled = next(polled, waited, 10, 50);
            polled
        });
        assert_eq!(polls, [10, 20, 40, 50, 0, 10]);
    }
}
