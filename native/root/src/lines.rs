//! Lines of children in the log.
//!
//! The log has one line of limited speed for all, and keeps what one child writes to it from showing what others do. So
//! each child has a [`LineBudget`]; lines beyond it are counted, and the count is logged in their place.

use core::fmt::Write;

use abi::FOREVER;
use native_rt::log::{Text, write_platform};
use native_rt::{Platform, time};
use proto::log::Level;

/// Lines that a child may write at once: more than any program of this project writes while it starts.
pub const BURST: u64 = 100;
/// Lines that it may write in each second from then on.
pub const RATE: u64 = 10;
/// Lines of the text of a panic. They are the child's last, and restarts have a limit of their own, so they cost no budget.
const PANIC_LINES: usize = 8;
/// Nanoseconds from the first line that is suppressed to the line that says how many were.
const NOTE_DELAY: u64 = 1_000_000_000;

/// A token bucket of lines. It is a child's as long as the system runs: a restart does not fill it.
#[derive(Clone, Debug)]
pub struct LineBudget {
    /// TSC value at which the bucket is full again.
    full_at: u64,
    /// Lines suppressed and not told of yet.
    suppressed: u64,
    /// TSC value at which to tell of them; [`FOREVER`]: there are none.
    note: u64,
}

impl LineBudget {
    /// A full bucket.
    pub const fn new() -> Self {
        Self { full_at: 0, suppressed: 0, note: FOREVER }
    }

    /// Takes a token for a line at TSC value `now` of a counter of `khz` kHz; `false`: there is none, and the line counts
    /// as suppressed.
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

    /// TSC value at which [`LineBudget::take_suppressed`] is to be called; [`FOREVER`]: not at all.
    pub const fn note(&self) -> u64 {
        self.note
    }

    /// Takes the number of lines suppressed since the last call.
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

/// Writes a child's text behind its name, line by line, as far as its budget goes. `khz` is the TSC's frequency.
pub fn write(name: &str, level: Level, text: &[u8], budget: &mut LineBudget, khz: u64) {
    for line in lines(text) {
        if budget.take(time::tsc(), khz) {
            write_line(name, level, line);
        }
    }
}

/// Writes the text of a child's panic behind its name.
pub fn write_panic(name: &str, text: &[u8]) {
    for line in lines(text).take(PANIC_LINES) {
        write_line(name, Level::Error, line);
    }
}

/// A line of the log: name, level, text. Only printable ASCII gets through, so that a child can neither imitate
/// others nor command a terminal.
fn compose(name: &str, level: Level, line: &[u8]) -> Text {
    let mut text = Text::new();
    // A text takes everything and cuts what is too long.
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
        // A clock that stands still, or goes back, gives nothing and breaks nothing.
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
