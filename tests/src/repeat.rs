//! Repeated system tests: options, results that outlive an interruption, and the table of failures.
//!
//! The state is a file of JSON lines: first the sources and conditions that its results belong to,
//! then one line for each run. Tests that are selected by other filters share it.

use crate::outcome::{Class, Outcome, reason};
use crate::system::{target, workspace};
use anyhow::{Context, Result, bail};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::fs::{self, File};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::io::{ErrorKind, Write};
use std::path::Path;
use std::process::{Command, Stdio};

const FILE: &str = "repeat.jsonl";
/// Files that can change a test's result: patterns of git.
const WITH_INFLUENCE: [&str; 4] = [".", ":!docs", ":!bench/results", ":!*.md"];
/// Options of the test harness that take the next word as their value.
const WITH_VALUE: [&str; 6] =
    ["--test-threads", "--logfile", "--skip", "--color", "--format", "-Z"];

/// Options of this module's; all others are the test harness's.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Options {
    /// Runs of each test; `None`: one, whose results are not kept.
    pub repeat: Option<usize>,
    /// Loops that keep CPUs of the host busy meanwhile.
    pub busy: usize,
    /// Only tests of this class.
    pub class: Option<Class>,
    /// Only tests whose names have one of these texts; none: all.
    pub filters: Vec<String>,
    /// Words for the test harness.
    pub rest: Vec<String>,
}

impl Options {
    /// Reads the words of a command line. Fails on a value that an option cannot have.
    pub fn parse(words: impl IntoIterator<Item = String>) -> Result<Self> {
        let mut options = Self::default();
        let mut words = words.into_iter();
        while let Some(word) = words.next() {
            let mut value = || words.next().with_context(|| format!("{word} without a value"));
            let number = |text: String| {
                text.parse().ok().with_context(|| format!("{word} takes a number, not `{text}`"))
            };
            match word.as_str() {
                "--repeat" => options.repeat = Some(number(value()?)?),
                "--busy" => options.busy = number(value()?)?,
                "--class" => {
                    let name = value()?;
                    let class = Class::parse(&name);
                    let class =
                        class.with_context(|| format!("no class `{name}`: smp-or-kill, other"))?;
                    options.class = Some(class);
                }
                option if WITH_VALUE.contains(&option) => {
                    let value = value()?;
                    options.rest.extend([word, value]);
                }
                option if option.starts_with('-') => options.rest.push(word),
                _ => options.filters.push(word),
            }
        }
        Ok(options)
    }

    /// Returns true if a test is selected. `is_exact`: filters are whole names.
    pub fn selects(&self, name: &str, class: Class, is_exact: bool) -> bool {
        let matches = |filter: &String| match is_exact {
            true => name == filter,
            false => name.contains(filter.as_str()),
        };
        self.class.is_none_or(|wanted| wanted == class)
            && (self.filters.is_empty() || self.filters.iter().any(matches))
    }
}

/// The sources and conditions that results belong to.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Key {
    /// Digest of all files of the tree that can change a result.
    pub sources: String,
    /// Busy loops.
    pub busy: usize,
    /// Seconds of load in tests that have such a length.
    pub stress: u32,
}

impl Key {
    /// Returns the key of the present tree. Fails without git, and if a file cannot be read.
    pub fn of_tree(busy: usize, stress: u32) -> Result<Self> {
        let mut list = Command::new("git");
        list.args(["ls-files", "-z", "--cached", "--others", "--exclude-standard", "--"]);
        list.args(WITH_INFLUENCE).current_dir(workspace()).stdin(Stdio::null());
        let output = list.output().context("cannot start git")?;
        if !output.status.success() {
            bail!("{list:?} failed: {}", String::from_utf8_lossy(&output.stderr));
        }
        let mut hasher = DefaultHasher::new();
        for name in String::from_utf8_lossy(&output.stdout).split_terminator('\0') {
            let path = workspace().join(name);
            name.hash(&mut hasher);
            match fs::read(&path) {
                Ok(bytes) => bytes.hash(&mut hasher),
                // Deleted, but not yet in a commit.
                Err(error) if error.kind() == ErrorKind::NotFound => {}
                Err(error) => bail!("cannot read {}: {error}", path.display()),
            }
        }
        Ok(Self { sources: format!("{:016x}", hasher.finish()), busy, stress })
    }
}

/// Results of repeated tests, in memory and in a file.
pub struct State {
    file: File,
    outcomes: Vec<Outcome>,
}

impl State {
    /// Opens the state below the folder of build products. Results that belong to another key are
    /// put aside.
    pub fn open(key: &Key) -> Result<Self> {
        Self::open_file(&target().join(FILE), key)
    }

    fn open_file(path: &Path, key: &Key) -> Result<Self> {
        let text = match fs::read_to_string(path) {
            Ok(text) => text,
            Err(error) if error.kind() == ErrorKind::NotFound => String::new(),
            Err(error) => bail!("cannot read {}: {error}", path.display()),
        };
        let outcomes = match parse(&text) {
            Some((found, outcomes)) if found == *key => outcomes,
            Some((found, outcomes)) => {
                let name = format!("repeat-{}-{}.jsonl", found.sources, found.busy);
                let other = path.with_file_name(name);
                fs::rename(path, &other).context("cannot put results aside")?;
                let count = outcomes.len();
                println!("{count} results of other sources or conditions: {}", other.display());
                Vec::new()
            }
            None => Vec::new(),
        };
        // Rewritten, because the last line may be incomplete.
        let mut lines = line(key)?;
        for outcome in &outcomes {
            lines += &line(outcome)?;
        }
        let new = path.with_extension("new");
        fs::write(&new, lines)
            .and_then(|()| fs::rename(&new, path))
            .context("cannot write state")?;
        let file = File::options().append(true).open(path).context("cannot open state")?;
        Ok(Self { file, outcomes })
    }

    /// Returns how often a test was run.
    pub fn runs(&self, test: &str) -> usize {
        self.outcomes.iter().filter(|outcome| outcome.test == test).count()
    }

    /// Adds a result.
    pub fn add(&mut self, outcome: Outcome) -> Result<()> {
        self.file.write_all(line(&outcome)?.as_bytes()).context("cannot write state")?;
        self.outcomes.push(outcome);
        Ok(())
    }

    /// Results of the selected tests.
    pub fn outcomes(&self, is_selected: impl Fn(&str) -> bool) -> Vec<&Outcome> {
        self.outcomes.iter().filter(|outcome| is_selected(&outcome.test)).collect()
    }
}

fn line(value: &impl Serialize) -> Result<String> {
    Ok(serde_json::to_string(value)? + "\n")
}

/// Reads a state. Lines that a killed process has not finished are left out. `None`: no state.
fn parse(text: &str) -> Option<(Key, Vec<Outcome>)> {
    let mut lines = text.lines();
    let key = serde_json::from_str(lines.next()?).ok()?;
    Some((key, lines.filter_map(|line| serde_json::from_str(line).ok()).collect()))
}

/// Results of one test.
#[derive(Default)]
struct Row<'a> {
    runs: usize,
    failures: usize,
    retries: BTreeMap<&'a str, usize>,
    first: Option<&'a str>,
}

/// A row for each test that has failed or was retried, with the reason of its first failure, and
/// the sums of all.
pub fn table(outcomes: &[&Outcome]) -> String {
    let mut rows: BTreeMap<&str, Row> = BTreeMap::new();
    for outcome in outcomes {
        let row = rows.entry(&outcome.test).or_default();
        row.runs += 1;
        row.failures += usize::from(outcome.error.is_some());
        row.first = row.first.or(outcome.error.as_deref());
        if let Some(retry) = &outcome.retry {
            *row.retries.entry(&retry.bug).or_default() += 1;
        }
    }
    let retries = |row: &Row| row.retries.values().sum::<usize>();
    let mut text = format!("{:>5} {:>8} {:>8}  test\n", "runs", "failures", "retries");
    // Writing to a string cannot fail.
    for (test, row) in rows.iter().filter(|(_, row)| row.failures + row.retries.len() > 0) {
        let _ = writeln!(text, "{:>5} {:>8} {:>8}  {test}", row.runs, row.failures, retries(row));
        for (bug, count) in &row.retries {
            let _ = writeln!(text, "           {count} x {bug}");
        }
        text.extend(row.first.map(reason));
    }
    let sum = |of: &dyn Fn(&Row) -> usize| rows.values().map(of).sum::<usize>();
    let (runs, failures) = (sum(&|row| row.runs), sum(&|row| row.failures));
    let _ =
        writeln!(text, "{runs:>5} {failures:>8} {:>8}  all {} tests", sum(&retries), rows.len());
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::outcome::Retry;

    fn words(text: &str) -> Vec<String> {
        text.split_whitespace().map(str::to_owned).collect()
    }

    fn outcome(test: &str, error: Option<&str>, bug: Option<&str>) -> Outcome {
        Outcome {
            test: test.to_owned(),
            seconds: 1.5,
            error: error.map(str::to_owned),
            retry: bug.map(|bug| Retry { bug: bug.to_owned(), error: "first".to_owned() }),
        }
    }

    fn key(sources: &str) -> Key {
        Key { sources: sources.to_owned(), busy: 2, stress: 10 }
    }

    #[test]
    fn options() {
        let parse = |text| Options::parse(words(text));
        let options = parse("--repeat 20 smp --busy 2 --test-threads 1 --class smp-or-kill kills");
        assert_eq!(
            options.unwrap(),
            Options {
                repeat: Some(20),
                busy: 2,
                class: Some(Class::SmpOrKill),
                filters: words("smp kills"),
                rest: words("--test-threads 1"),
            }
        );
        assert_eq!(parse("--list").unwrap().rest, ["--list"]);
        for wrong in ["--repeat", "--repeat many", "--busy -1", "--class fast"] {
            assert!(parse(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn selections() {
        let options = Options::parse(words("--class other hosted/cpus disk")).unwrap();
        assert!(options.selects("hosted/disk-full", Class::Other, false));
        assert!(!options.selects("hosted/disk-full", Class::Other, true));
        assert!(options.selects("hosted/cpus", Class::Other, true));
        assert!(!options.selects("hosted/cpus", Class::SmpOrKill, true));
        assert!(!options.selects("hosted/shell", Class::Other, false));
        assert!(Options::default().selects("hosted/shell", Class::Other, false));
    }

    #[test]
    fn a_state_resumes() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("state");
        let mut state = State::open_file(&path, &key("a")).unwrap();
        state.add(outcome("one", None, Some("crash"))).unwrap();
        state.add(outcome("one", Some("no\nprompt"), None)).unwrap();
        drop(state);
        // A line that was cut short does not count, and does not spoil the next one.
        let mut text = fs::read_to_string(&path).unwrap();
        text.push_str("{\"test\":\"tw");
        fs::write(&path, text).unwrap();
        let mut state = State::open_file(&path, &key("a")).unwrap();
        assert_eq!((state.runs("one"), state.runs("two")), (2, 0));
        state.add(outcome("two", None, None)).unwrap();
        drop(state);
        let state = State::open_file(&path, &key("a")).unwrap();
        assert_eq!((state.runs("one"), state.runs("two")), (2, 1));
        let selected = state.outcomes(|test| test == "one");
        assert_eq!(*selected[1], outcome("one", Some("no\nprompt"), None));
        drop(state);

        // Results of other sources are kept, elsewhere.
        let state = State::open_file(&path, &key("b")).unwrap();
        assert_eq!(state.runs("one"), 0);
        let aside = fs::read_to_string(folder.path().join("repeat-a-2.jsonl")).unwrap();
        assert_eq!(parse(&aside).unwrap().1.len(), 3);
    }

    #[test]
    fn keys_tell_sources_apart() {
        let first = Key::of_tree(0, 10).unwrap();
        assert_eq!(first, Key::of_tree(0, 10).unwrap());
        assert_ne!(first, Key::of_tree(2, 10).unwrap());
    }

    #[test]
    fn tables() {
        let outcomes = [
            outcome("a", None, None),
            outcome("b", None, Some("crash")),
            outcome("b", Some("log\nno prompt"), None),
            outcome("b", Some("other"), Some("crash")),
            outcome("c", None, Some("int3")),
        ];
        let expected = "\
\x20runs failures  retries  test
    3        2        2  b
           2 x crash
           log
           no prompt
    1        0        1  c
           1 x int3
    5        2        3  all 3 tests
";
        assert_eq!(table(&outcomes.iter().collect::<Vec<_>>()), expected);
    }
}
