//! Log lines of children.
//!
//! The log has one line of limited speed for all children, and must not let one child's output hide
//! the other children's. So each child has a [`LineBudget`]; excess lines are counted, and the
//! count is logged in their place.

use core::fmt::Write;

use abi::FOREVER;
use native_rt::log::{Text, write_platform};
use native_rt::{Platform, time};
use proto::log::Level;

/// Burst of lines: more than any program of this project writes while it starts.
pub const BURST: u64 = 100;
/// Sustained rate, in lines per second.
pub const RATE: u64 = 10;
/// Maximum number of lines of a panic. They are the child's last, and restarts have a limit of
/// their own, so they cost no budget.
const PANIC_LINES: usize = 8;
/// Nanoseconds from the first suppressed line to the line with their number.
const NOTE_DELAY: u64 = 1_000_000_000;

/// A token bucket of lines. It outlives restarts of the child: a restart does not refill it.
#[derive(Clone, Debug)]
pub struct LineBudget {
    /// TSC value at which the bucket is full again.
    full_at: u64,
    /// Suppressed lines that were not reported yet.
    suppressed: u64,
    /// TSC value at which to report them; [`FOREVER`]: none.
    note: u64,
}

impl LineBudget {
    /// Creates a full bucket.
    pub const fn new() -> Self {
        Self { full_at: 0, suppressed: 0, note: FOREVER }
    }

    /// Takes a token for a line at TSC value `now` of a counter of `khz` kHz; returns `false` if
    /// the bucket is empty, and counts the line as suppressed.
    fn take(&mut self, now: u64, khz: u64) -> bool {
        let token = time::ticks(khz, 1_000_000_000 / RATE).max(1);
        let full_at = self.full_at.max(now);
        if full_at - now > (BURST - 1).saturating_mul(token) {
            if self.suppressed == 0 {
                self.note = now.saturating_add(time::ticks(khz, NOTE_DELAY));
            }
            self.suppressed = self.suppressed.saturating_add(1);
            return false;
        }
        self.full_at = full_at.saturating_add(token);
        true
    }

    /// Returns the TSC value at which [`LineBudget::take_suppressed`] is due; [`FOREVER`] if no
    /// line is suppressed.
    pub const fn note(&self) -> u64 {
        self.note
    }

    /// Returns the number of lines suppressed since the last call.
    pub fn take_suppressed(&mut self) -> u64 {
        self.note = FOREVER;
        core::mem::take(&mut self.suppressed)
    }
}

fn lines(text: &[u8]) -> impl Iterator<Item = &[u8]> {
    text.split(|&byte| byte == b'\n').filter(|line| !line.is_empty())
}

fn write_line(name: &str, level: Level, line: &[u8]) {
    let platform = Platform::at(abi::boot::slot::PLATFORM);
    write_platform(platform, compose(name, level, line).bytes());
}

/// Writes a child's text with its name in front of each line, within its budget. `khz` is the TSC's
/// frequency.
pub fn write(name: &str, level: Level, text: &[u8], budget: &mut LineBudget, khz: u64) {
    for line in lines(text) {
        if budget.take(time::tsc(), khz) {
            write_line(name, level, line);
        }
    }
}

/// Writes the text of a child's panic with its name in front of each line.
pub fn write_panic(name: &str, text: &[u8]) {
    for line in lines(text).take(PANIC_LINES) {
        write_line(name, Level::Error, line);
    }
}

/// Composes a log line: name, level, text. Only printable ASCII passes, so that a child can neither
/// forge lines of other children nor control a terminal.
fn compose(name: &str, level: Level, line: &[u8]) -> Text {
    let mut text = Text::new();
    // A `Text` accepts every write and cuts excess text.
    let _ = write!(text, "{name}: {}", level.prefix());
    let room = proto::log::MAX_TEXT - text.bytes().len() - 1;
    for &byte in &line[..line.len().min(room)] {
        let printable = (b' '..=b'~').contains(&byte) || byte == b'\t';
        let _ = text.write_char(if printable { byte as char } else { '?' });
    }
    let _ = text.write_char('\n');
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    const KHZ: u64 = 1_000_000;
    const SECOND: u64 = 1_000_000_000;

    #[test]
    fn a_flood_is_cut_to_the_budget_and_counted() {
        let mut budget = LineBudget::new();
        let start = 77 * SECOND;
        // Ten seconds with a line each microsecond.
        let (mut written, mut noted) = (0, 0);
        for now in (start..start + 10 * SECOND).step_by(1000) {
            written += u64::from(budget.take(now, KHZ));
            if now >= budget.note() {
                noted += budget.take_suppressed();
            }
        }
        let most = BURST + 10 * RATE;
        assert!((most - 1..=most).contains(&written), "{written} lines");
        assert_eq!(
            written + noted + budget.take_suppressed(),
            10_000_000,
            "each is written or counted"
        );
        assert_eq!((budget.note(), budget.take_suppressed()), (FOREVER, 0));
    }

    #[test]
    fn a_quiet_child_has_its_burst_again() {
        let mut budget = LineBudget::new();
        let burst =
            |budget: &mut LineBudget, now| (0..1000).filter(|_| budget.take(now, KHZ)).count();
        assert_eq!(burst(&mut budget, SECOND), BURST as usize);
        assert_eq!(budget.note(), 2 * SECOND, "told a second after the first that is not written");
        assert_eq!(budget.take_suppressed(), 900);
        assert_eq!(burst(&mut budget, SECOND + SECOND / 2), RATE as usize / 2);
        assert_eq!(burst(&mut budget, u64::MAX / 2), BURST as usize, "and no more than that");
        // A clock that stands still or goes back refills nothing and breaks nothing.
        assert_eq!(burst(&mut budget, 0), 0);
        assert!(LineBudget::new().take(0, 0));
    }

    #[test]
    fn nothing_unprintable() {
        let text = compose("vm", Level::Warn, b"a\x1b[2Jb\r\xffroot: c");
        assert_eq!(text.bytes(), b"vm: warning: a?[2Jb??root: c\n");
    }

    #[test]
    fn always_a_whole_line() {
        let text = compose("vm", Level::Info, &[b'x'; 600]);
        assert_eq!(text.bytes().len(), proto::log::MAX_TEXT);
        assert!(text.bytes().ends_with(b"x\n"));
    }
}
