//! Text tables of the shell.

use core::fmt::{self, Display, Write};

use proto::control::REASONS;
use proto::manage::{Entry, Figures, Kind, State};
#[cfg(target_arch = "aarch64")]
use vmm_arm64::EXIT_NAMES;
#[cfg(target_arch = "x86_64")]
use vmm_x86::exit::EXIT_NAMES;

/// Number of exit reasons in a line of figures.
const SHOWN_REASONS: usize = 3;

/// Header of the list.
pub const LIST_HEAD: &str =
    "NAME                 KIND      STATE      CPUS   MEMORY  PRIO  RESTARTS";
/// Header of the figures.
pub const TOP_HEAD: &str =
    "NAME              RUN%  STEAL%   HALT%   MEMORY   OWN-KIB  EXITS/S  MOST";

/// A number of bytes.
struct Bytes(u64);

impl Display for Bytes {
    fn fmt(&self, to: &mut fmt::Formatter) -> fmt::Result {
        let (number, unit) = match self.0 {
            0 => return to.pad("-"),
            bytes if bytes % (1 << 30) == 0 => (bytes >> 30, 'G'),
            bytes if bytes >= 1 << 20 => (bytes >> 20, 'M'),
            bytes => (bytes >> 10, 'K'),
        };
        let mut text = heapless::String::<24>::new();
        write!(text, "{number}{unit}")?;
        to.pad(&text)
    }
}

/// Writes a line of the list.
pub fn entry(entry: &Entry, to: &mut impl Write) -> fmt::Result {
    let kind = match entry.kind {
        Kind::Server => "server",
        Kind::Task => "program",
        Kind::Vm => "vm",
        Kind::Template => "template",
    };
    let mut state = heapless::String::<24>::new();
    match (entry.kind, entry.state) {
        (Kind::Template, _) => state.push('-').map_err(|_| fmt::Error)?,
        (_, State::New) => write!(state, "new")?,
        (_, State::Running) => write!(state, "running")?,
        (_, State::Paused) => write!(state, "paused")?,
        (_, State::Waiting) => write!(state, "waiting")?,
        (_, State::Ended(code)) => write!(state, "ended {code}")?,
    }
    let Entry { name, memory, vcpus, priority, restarts, .. } = entry;
    let memory = Bytes(*memory);
    write!(to, "{name:<20} {kind:<9} {state:<9} {vcpus:>5} {memory:>8} {priority:>5} {restarts:>9}")
}

/// A percentage with one decimal.
struct Percent(u64, u64);

impl Display for Percent {
    fn fmt(&self, to: &mut fmt::Formatter) -> fmt::Result {
        let Self(part, whole) = *self;
        let tenths = (u128::from(part) * 1000).checked_div(whole.into()).unwrap_or(0);
        let mut text = heapless::String::<48>::new();
        write!(text, "{}.{}", tenths / 10, tenths % 10)?;
        to.pad(&text)
    }
}

/// Writes a line of figures: the difference between `before` and `now`.
pub fn figures(entry: &Entry, before: &Figures, now: &Figures, to: &mut impl Write) -> fmt::Result {
    let time = now.lived.saturating_sub(before.lived);
    let percent = |of: fn(&Figures) -> u64| Percent(of(now).saturating_sub(of(before)), time);
    let mut exits = [0; REASONS];
    for (index, change) in exits.iter_mut().enumerate() {
        *change = now.exits[index].saturating_sub(before.exits[index]);
    }
    let all: u64 = exits.iter().fold(0, |sum: u64, &exits| sum.saturating_add(exits));
    let per_second = |count: u64| {
        u64::try_from(u128::from(count) * 1_000_000_000 / u128::from(time.max(1)))
            .unwrap_or(u64::MAX)
    };
    write!(
        to,
        "{:<15} {:>6} {:>7} {:>7} {:>8} {:>9} {:>8} ",
        entry.name,
        percent(|figures| figures.run),
        percent(|figures| figures.steal),
        percent(|figures| figures.halt),
        Bytes(entry.memory),
        (now.bytes + now.kernel_bytes) >> 10,
        per_second(all),
    )?;
    for _ in 0..SHOWN_REASONS {
        let most = exits.iter().enumerate().max_by_key(|(_, count)| **count);
        let Some((index, &count)) = most.filter(|(_, count)| **count > 0) else { break };
        let name = EXIT_NAMES.get(index).copied().unwrap_or("?");
        write!(to, " {name}={}", per_second(count))?;
        exits[index] = 0;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn example(kind: Kind, state: State) -> Entry<'static> {
        Entry {
            number: 20,
            name: "linux",
            kind,
            state,
            memory: 256 << 20,
            vcpus: 2,
            priority: 10,
            restarts: 3,
        }
    }

    fn line(kind: Kind, state: State) -> String {
        let mut text = String::new();
        entry(&example(kind, state), &mut text).unwrap();
        text
    }

    #[test]
    fn lines_of_the_list_have_columns() {
        assert_eq!(
            [LIST_HEAD, &line(Kind::Vm, State::Running)],
            [
                "NAME                 KIND      STATE      CPUS   MEMORY  PRIO  RESTARTS",
                "linux                vm        running       2     256M    10         3",
            ]
        );
        assert!(line(Kind::Vm, State::Ended(83)).contains(" ended 83 "));
        assert!(line(Kind::Template, State::New).contains("template  -  "));
    }

    #[test]
    fn figures_are_rates() {
        let before = Figures { lived: 5_000_000_000, run: 1_000, ..Figures::default() };
        let mut now = Figures {
            lived: 7_000_000_000,
            run: 500_001_000,
            halt: 1_499_000_000,
            bytes: 200 << 10,
            kernel_bytes: 56 << 10,
            ..before
        };
        (now.exits[0], now.exits[1], now.exits[3]) = (2, 2_000, 1_000);
        let mut text = String::new();
        figures(&example(Kind::Vm, State::Running), &before, &now, &mut text).unwrap();
        assert_eq!(
            [TOP_HEAD, &text],
            [
                "NAME              RUN%  STEAL%   HALT%   MEMORY   OWN-KIB  EXITS/S  MOST",
                "linux             25.0     0.0    74.9     256M       256     1501  io=1000 hlt=500 cpuid=1",
            ]
        );
        // The clock stands still, and figures decrease: after a restart.
        text.clear();
        figures(&example(Kind::Vm, State::Running), &now, &before, &mut text).unwrap();
    }
}
