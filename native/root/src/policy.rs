//! Decisions about the ends of children, as pure functions.

use proto::control::code;
use proto::system::{MAX_SERVERS, Restart};

/// Minimum delay of a restart, in ns, and number of its doublings.
const FIRST_DELAY: u64 = 100_000_000;
const MAX_DOUBLINGS: u32 = 7;
/// A child that lived this long, in ns, counts as healthy: its end has a new cause.
const HEALTHY: u64 = 30_000_000_000;
/// Number of failed starts in a row after which a child is not restarted.
const MAX_FAILED_STARTS: u32 = 5;

/// Returns whether a child that ended with this code is restarted.
pub fn starts_again(policy: Restart, code: u64) -> bool {
    match policy {
        Restart::Never => false,
        Restart::OnCrash => code >= code::INTERNAL,
        Restart::Always => true,
    }
}

/// Returns whether a restart is repeated after `failures` failed starts in a row. The cause may
/// pass, such as a lack of memory, or not, such as a device that does not stop.
pub fn repeats_start(policy: Restart, failures: u32) -> bool {
    failures < MAX_FAILED_STARTS && starts_again(policy, code::INTERNAL)
}

/// Returns the delay of the next start in ns, and the new number of restarts, for a child that
/// lived `lived` ns, ended with `code`, and had been restarted `restarts` times since it was last
/// healthy. A guest reset restarts the VM at once: it is no failure, so it does not count, and only
/// [`FIRST_DELAY`] must separate two starts, because creating a VM is work of root that the guest's
/// CPU time does not pay for. Other ends back off.
pub fn next_restart(restarts: u32, lived: u64, code: u64) -> (u64, u32) {
    let restarts = if lived >= HEALTHY { 0 } else { restarts };
    match code {
        code::RESET => (FIRST_DELAY.saturating_sub(lived), restarts),
        _ => (FIRST_DELAY << restarts.min(MAX_DOUBLINGS), restarts.saturating_add(1)),
    }
}

/// Console servers with pending output when the system ends. The system waits for all of them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Draining(u32);

const _: () = assert!(MAX_SERVERS <= u32::BITS as usize);

impl Draining {
    /// Adds a server, by its index.
    pub fn add(&mut self, server: usize) {
        self.0 |= 1 << server;
    }

    /// Removes a child that has sent its output or has ended. Other children are ignored.
    pub fn remove(&mut self, number: usize) {
        let bit = u32::try_from(number).ok().and_then(|number| 1u32.checked_shl(number));
        self.0 &= !bit.unwrap_or(0);
    }

    /// Returns whether no server is left.
    pub const fn is_over(self) -> bool {
        self.0 == 0
    }
}

/// Properties of a child's end that determine the outcome.
#[derive(Clone, Copy, Debug)]
pub struct Ended {
    /// The system waited for it.
    pub essential: bool,
    /// It is a native program, not a guest.
    pub task: bool,
    /// Its exit code.
    pub code: u64,
}

/// Returns the outcome of the system: the first failure, in the order of the description. A native
/// program that only ran until the essential children ended counts too, unless it crashed: crashing
/// may be its purpose.
pub fn exit_status(ends: impl Iterator<Item = Ended>) -> u64 {
    ends.filter(|end| end.essential || end.task && end.code < code::INTERNAL)
        .map(|end| end.code)
        .find(|&code| code != code::OK)
        .unwrap_or(code::OK)
}

/// Returns the description of an exit code.
pub fn outcome(code: u64, of_guest: bool) -> &'static str {
    match code {
        code::OK if of_guest => "power-off",
        code::BAD_CONFIG => "bad configuration",
        code::INTERNAL => "internal error",
        code::GUEST_PANIC => "guest panic",
        code::GUEST_FAULT => "guest fault",
        code::WATCHDOG => "watchdog",
        code::RESET => "reset",
        _ => "exit",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn restarts_back_off_and_recover() {
        let mut restarts = 0;
        let mut delays = Vec::new();
        for _ in 0..10 {
            let (delay, next) = next_restart(restarts, 0, code::GUEST_FAULT);
            delays.push(delay / 1_000_000);
            restarts = next;
        }
        assert_eq!(delays, [100, 200, 400, 800, 1600, 3200, 6400, 12800, 12800, 12800]);
        assert_eq!(next_restart(restarts, HEALTHY, code::GUEST_FAULT), (FIRST_DELAY, 1));
        assert_eq!(next_restart(u32::MAX, 0, code::GUEST_FAULT).1, u32::MAX);
    }

    #[test]
    fn a_reset_starts_at_once() {
        // Independent of earlier restarts, and without counting.
        for restarts in [0, 1, 7, u32::MAX] {
            assert_eq!(next_restart(restarts, FIRST_DELAY, code::RESET), (0, restarts));
            assert_eq!(next_restart(restarts, HEALTHY, code::RESET), (0, 0));
        }
        // A VM that only resets restarts ten times per second at most.
        assert_eq!(next_restart(3, FIRST_DELAY / 4, code::RESET), (FIRST_DELAY / 4 * 3, 3));
    }

    #[test]
    fn crashes_and_exits() {
        assert!(starts_again(Restart::OnCrash, code::GUEST_PANIC));
        assert!(!starts_again(Restart::OnCrash, 63), "the guest's own code is no crash");
        assert!(starts_again(Restart::Always, code::OK));
        assert!(!starts_again(Restart::Never, code::INTERNAL));
    }

    #[test]
    fn a_start_that_always_fails_is_the_end() {
        let starts = |policy| (1..100).take_while(|&count| repeats_start(policy, count)).count();
        assert_eq!(starts(Restart::Always), 4);
        assert_eq!(starts(Restart::OnCrash), 4);
        assert_eq!(starts(Restart::Never), 0);
    }

    #[test]
    fn the_system_ends_when_the_last_console_has_sent_everything() {
        let mut draining = Draining::default();
        assert!(draining.is_over(), "no console");
        draining.add(1);
        draining.add(4);
        draining.remove(1);
        assert!(!draining.is_over(), "the first one");
        // A repeated message; messages of a program and of no server at all.
        [1, 0, 8, 31, 32, usize::MAX].into_iter().for_each(|number| draining.remove(number));
        assert!(!draining.is_over());
        draining.remove(4);
        assert!(draining.is_over());
    }

    #[test]
    fn first_failure_counts() {
        let end = |essential, task, code| Ended { essential, task, code };
        let exit_status = |ends: &[Ended]| exit_status(ends.iter().copied());
        assert_eq!(exit_status(&[]), 0);
        assert_eq!(
            exit_status(&[end(true, false, 0), end(true, false, 83), end(true, false, 80)]),
            83
        );
        assert_eq!(exit_status(&[end(false, true, 2)]), 2, "a helper that found a mistake");
        assert_eq!(exit_status(&[end(false, true, code::INTERNAL)]), 0, "a helper that crashed");
        assert_eq!(exit_status(&[end(false, false, 83)]), 0, "a guest that does not matter");
    }
}
