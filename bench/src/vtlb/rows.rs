//! Rows of the results, and their measurement in one system.

use crate::counted::Counts;
use anyhow::{Context, Result, bail};
use std::collections::BTreeMap;

/// Instructions that a world switch is priced at: VMRUN and VMEXIT take 1,000 to 1,500 cycles.
pub const PRICE: f64 = 1200.0;
/// Suffix of rows of which another row is left when the benchmark's own cost is taken off.
const RAW: &str = "_raw";
/// Suffix of rows whose caches were cold.
const COLD: &str = "_1st";
/// Rows that have another name in results than in the output of `vbench`: output, key.
const NAMES: [(&str, &str); 3] =
    [("ctx_2p_0k", "ctx2"), ("sockxmit_rt", "sockxmit"), ("mprotect_pair", "mprotect")];

/// A benchmark: one drawing.
pub struct Benchmark {
    /// Name of the drawing, and of its row if it has only one.
    pub name: &'static str,
    /// Title of the drawing.
    pub title: &'static str,
    /// Prefix of the rows in a benchmark of several rows.
    pub rows: Option<&'static str>,
}

const fn single(name: &'static str, title: &'static str) -> Benchmark {
    Benchmark { name, title, rows: None }
}

const fn several(name: &'static str, title: &'static str, rows: &'static str) -> Benchmark {
    Benchmark { name, title, rows: Some(rows) }
}

/// The benchmarks of `vbench`.
pub const BENCHMARKS: [Benchmark; 11] = [
    single("forkwait", "fork + exit + wait"),
    single("forkexec", "fork + exec"),
    single("touch_file", "touch of a page of a mapped file"),
    single("touch_anon", "touch of a fresh anonymous page"),
    single("ctx2", "context switch between 2 processes"),
    single("sockxmit", "socket pair round trip"),
    single("mprotect", "two mprotect and a write"),
    single("compile", "compilation of a C file of Lua"),
    several("touchmem", "read of a mapped file, 1/N of its pages", "touchmem"),
    several("lat_ctx", "context switch, P processes that sum N KB", "ctx_"),
    several("jobs", "turn of N processes that touch 32 pages", "jobs_"),
];
/// The rows of the micro-guest: name and title.
pub const MICRO: [(&str, &str); 4] = [
    ("invlpg", "INVLPG of a mapped page"),
    ("fill", "touch of a mapped page after INVLPG"),
    ("inject", "touch of an absent page, to the guest's handler"),
    ("cr3", "CR3 load, alternating between two roots"),
];

impl Benchmark {
    /// Returns the rows of this benchmark.
    pub fn select<'a>(&self, rows: impl Iterator<Item = &'a String>) -> Vec<&'a String> {
        let is_own = |row: &&String| match self.rows {
            Some(prefix) => row.starts_with(prefix),
            None => row.as_str() == self.name,
        };
        rows.filter(is_own).collect()
    }
}

/// One row in one system.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Cost {
    /// Instructions per operation.
    pub instructions: f64,
    /// World switches per operation.
    pub switches: f64,
}

impl Cost {
    /// Instructions with world switches priced.
    pub fn priced(self) -> f64 {
        self.instructions + PRICE * self.switches
    }
}

/// Costs by name of row.
pub type Costs = BTreeMap<String, Cost>;

/// Events of a vTLB per operation, in the order of its counters, by name of row.
pub type Events = BTreeMap<String, Vec<f64>>;

/// A line `VB name instructions ns n=operations mark=index [events=count,...]`.
struct Line<'a> {
    key: &'a str,
    instructions: f64,
    operations: f64,
    mark: usize,
    events: Vec<f64>,
}

impl<'a> Line<'a> {
    /// Reads the text after `VB`; `None`: a line of another kind, or of a row that is not used.
    fn read(text: &'a str) -> Option<Result<Self>> {
        let words: Vec<&str> = text.split_whitespace().collect();
        let (name, value, rest) = match words[..] {
            [name, value, "ns", ref rest @ ..] if rest.len() >= 2 => (name, value, rest),
            _ => return None,
        };
        if [RAW, COLD].iter().any(|suffix| name.ends_with(suffix)) {
            return None;
        }
        let key = NAMES.iter().find(|(output, _)| *output == name).map_or(name, |(_, key)| key);
        let line = || {
            let counts = |list: &str| -> Option<Vec<f64>> {
                list.split(',').map(|count| count.parse().ok()).collect()
            };
            let events = match rest.get(2) {
                Some(word) => counts(word.strip_prefix("events=")?)?,
                None => Vec::new(),
            };
            Some(Self {
                key,
                instructions: value.parse().ok()?,
                operations: rest[0].strip_prefix("n=")?.parse().ok()?,
                mark: rest[1].strip_prefix("mark=")?.parse().ok()?,
                events,
            })
        };
        Some(line().with_context(|| format!("`VB {text}` is not understood")))
    }
}

fn lines(console: &str) -> impl Iterator<Item = Result<Line<'_>>> {
    let texts = console.lines().filter_map(|line| line.split_once("VB ").map(|(_, rest)| rest));
    texts.filter_map(Line::read)
}

/// Reads the rows of a program's output, whose counts between marks are `pairs`.
pub fn read(console: &str, pairs: &[Counts]) -> Result<Costs> {
    let mut costs = Costs::new();
    for line in lines(console) {
        let Line { key, instructions, operations, mark, .. } = line?;
        let Some(counts) = pairs.get(mark) else {
            bail!("row {key} names the marks {mark} of {}", pairs.len());
        };
        costs.insert(key.to_owned(), Cost { instructions, switches: counts.entries / operations });
    }
    Ok(costs)
}

/// Reads the events of the vTLB from a program's output; none with other paging.
pub fn read_events(console: &str) -> Result<Events> {
    let per_operation = |line: Line<'_>| {
        let counts = line.events.iter().map(|count| count / line.operations).collect();
        (line.key.to_owned(), counts)
    };
    let with_events = |line: &Result<Line<'_>>| !matches!(line, Ok(line) if line.events.is_empty());
    lines(console).filter(with_events).map(|line| line.map(per_operation)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_rows_and_their_marks() {
        let pairs = [100.0, 7.0].map(|entries| Counts { instructions: 0.0, entries });
        let console = "VB boot 9 ns n=1\nnoise VB forkwait 500.5 ns n=50 mark=0\n\
                       VB ctx_2p_0k_raw 9.0 ns n=7 mark=1\nVB ctx_2p_0k 3.0 ns n=7 mark=1\n";
        let costs = read(console, &pairs).unwrap();
        assert_eq!(costs.len(), 2);
        assert_eq!(costs["forkwait"], Cost { instructions: 500.5, switches: 2.0 });
        assert_eq!(costs["forkwait"].priced(), 2900.5);
        assert_eq!(costs["ctx2"], Cost { instructions: 3.0, switches: 1.0 });
        assert!(read(console, &pairs[..1]).is_err());
        assert!(read("nothing", &pairs).unwrap().is_empty());
    }

    #[test]
    fn reads_the_events_of_an_operation() {
        let console = "VB forkwait 500.5 ns n=50 mark=0 events=100,0,25\n\
                       VB ctx_2p_0k 3.0 ns n=7 mark=1\n";
        let events = read_events(console).unwrap();
        assert_eq!(events.len(), 1);
        assert_eq!(events["forkwait"], [2.0, 0.0, 0.5]);
        let pairs = [100.0, 7.0].map(|entries| Counts { instructions: 0.0, entries });
        assert_eq!(read(console, &pairs).unwrap()["forkwait"].switches, 2.0);
        assert!(read_events("VB forkwait 1.0 ns n=1 mark=0 events=1,x\n").is_err());
    }

    #[test]
    fn rows_of_a_benchmark() {
        let rows = ["ctx2", "ctx_4p_0k", "jobs_1", "compile"].map(String::from);
        let select = |name: &str| {
            let benchmark = BENCHMARKS.iter().find(|one| one.name == name).unwrap();
            benchmark.select(rows.iter())
        };
        assert_eq!(select("lat_ctx"), ["ctx_4p_0k"]);
        assert_eq!(select("ctx2"), ["ctx2"]);
    }
}
